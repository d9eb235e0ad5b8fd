"""A lock that a forked child finds free, whoever held it in the parent: that thread does not exist in the child."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


class ForkSafeLock:
    """The acquire, release and `with` of threading.Lock, or of the lock that `make` makes."""

    def __init__(self, make: Callable[[], Any] = threading.Lock) -> None:
        self._make, self._lock, self._process = make, make(), os.getpid()

    def acquire(self, timeout: float = -1) -> bool:
        if self._process != os.getpid():
            self._lock, self._process = self._make(), os.getpid()
        return bool(self._lock.acquire(timeout=timeout))

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> ForkSafeLock:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
