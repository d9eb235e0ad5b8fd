"""The thread team: several threads replay one op table, and the caller is one of them.

The caller publishes a step and works on it like every member, in native code that returns at least every few dozen
milliseconds so that Python can see Ctrl-C. The other members are Python threads that sit in native code while steps
follow each other closely, and sleep on a lock otherwise. See kernels/cpu/walk.py for the native half.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import numpy as np

from edgeinfer.kernels.cpu import walk
from edgeinfer.kernels.jit import Code
from edgeinfer.kernels.locks import ForkSafeLock

# In ticks of the processor's clock, some GHz on x86: how long the caller stays in native code, how long members linger
_CALLER_TICKS = 60_000_000
_LINGER_TICKS = 6_000_000


class Cancelled(Exception):
    """A step was stopped before it was finished; its results are not to be used."""


def _system_calls() -> tuple[int, int]:
    """Addresses of the system's yield and of a sleep that takes a 32-bit count (microseconds; milliseconds on Windows)."""
    if sys.platform == "win32":
        kernel32 = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined,unused-ignore]
        functions = (kernel32.SwitchToThread, kernel32.Sleep)
    else:
        libc = ctypes.CDLL(None)
        functions = (libc.sched_yield, libc.usleep)
    addresses = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions]
    return addresses[0], addresses[1]


def _native(code: Code, kernel: Any) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * kernel.arguments)(code.address(kernel))


def aligned_zeros(nbytes: int, alignment: int = 64) -> np.ndarray:
    """Zeroed uint8 memory that starts on an `alignment` boundary."""
    room = np.zeros(nbytes + alignment, np.uint8)
    start = -room.ctypes.data % alignment
    return room[start : start + nbytes]


class _Member:
    """One helping thread. It holds no reference to the team, so that a forgotten team can be collected."""

    def __init__(self, serve: Any, walk_address: int, block: np.ndarray) -> None:
        self._serve, self._walk, self._block = serve, walk_address, block
        self.asleep = False
        self.leaving = False
        self._wake = threading.Lock()
        self._wake.acquire()
        self._seen = int(block.view(np.int64)[walk.GENERATION // 8])
        self._thread = threading.Thread(target=self._run, name="edgeinfer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        address = self._block.ctypes.data
        generation = self._block.view(np.int64)[walk.GENERATION // 8 :]
        while not self.leaving:
            self._seen = self._serve(address, self._seen, _LINGER_TICKS, self._walk)
            self.asleep = True
            if generation[0] <= self._seen and not self.leaving:
                self._wake.acquire()
            self.asleep = False

    def wake(self) -> None:
        if self.asleep:
            self._release()

    def leave(self) -> None:
        self.leaving = True
        self._release()

    def _release(self) -> None:
        with suppress(RuntimeError):  # it has been woken
            self._wake.release()

    def join(self) -> None:
        if self._thread is not threading.current_thread():  # which may be the one that collects a forgotten team
            self._thread.join()


class Team:
    """`threads` threads, the caller included, over one op table.

    table: int64 (ops, OP_WORDS); step: int64, the step block that kernels read; both must outlive the team.
    One step runs at a time: callers queue for it.
    """

    def __init__(self, code: Code, threads: int, table: np.ndarray, step: np.ndarray) -> None:
        self.threads = threads
        self._begin, self._walk, self._serve = (_native(code, k) for k in (walk.BEGIN, walk.WALK, walk.SERVE))
        self._walk_address = code.address(walk.WALK)
        self._arrays: tuple[np.ndarray, ...] = (table, step)
        self._sync = aligned_zeros(len(table) * walk.SYNC_BYTES)
        self._block = aligned_zeros(walk.TEAM_BYTES)
        self._words = self._block.view(np.int64)
        for place, value in (
            (walk.TABLE, table.ctypes.data),
            (walk.SYNC, self._sync.ctypes.data),
            (walk.STEP, step.ctypes.data),
            *zip((walk.YIELD, walk.SLEEP), _system_calls(), strict=True),
        ):
            self._words[place // 8] = value
        self._generation = 0
        self._turn = ForkSafeLock()
        self._members: list[_Member] = []
        self._process = 0
        self.closed = False

    def run(self, start: int, end: int) -> None:
        """Replay ops start .. end - 1 and return when all are complete. Raises Cancelled after stop(), or what a signal raised."""
        with self._turn:
            if self.closed:
                raise Cancelled("the model is closed")
            if self._process != os.getpid():
                self._gather()
            self._generation += 1
            block = self._block.ctypes.data
            try:
                self._begin(block, self._generation, start, end)
                for member in self._members:
                    member.wake()
                while self._walk(block, self._generation, _CALLER_TICKS) == walk.OUT_OF_TIME:
                    pass  # back in Python: pending signals are handled here
            except BaseException:
                self.stop()
                raise
            finally:
                # what the next step changes (row counts, inputs) members must not take for this one's: its number is void now
                self._words[walk.GENERATION // 8] = 0
                stopped = bool(self._words[walk.STOP // 8])
                if stopped:
                    self._settle()
            if stopped:
                raise Cancelled("the step was cancelled")

    def stop(self) -> None:
        """Ask the step that is running to end early; from any thread."""
        self._words[walk.STOP // 8] = 1

    def close(self) -> None:
        """Stop, wait until no thread is at work, and end the members."""
        self.closed = True
        self.stop()
        with self._turn:
            self._settle(resume=False)
            if self._process == os.getpid():
                _dismiss(self._members, self._words)
            self._members = []

    def forget(self) -> None:
        """After close(): let go of the arrays."""
        self._arrays = ()

    def _gather(self) -> None:
        """Start the members: at the first step, and anew in a forked child, which has none of its parent's threads."""
        self._words[walk.INSIDE // 8] = 0
        self._members = [_Member(self._serve, self._walk_address, self._block) for _ in range(self.threads - 1)]
        self._process = os.getpid()
        weakref.finalize(self, _dismiss, self._members, self._words)  # also at exit: no thread may meet a dying interpreter

    def _settle(self, resume: bool = True) -> None:
        """Wait until every member has left the step; then steps may run again."""
        while self._process == os.getpid() and self._words[walk.INSIDE // 8]:
            time.sleep(0.0002)
        if resume:
            self._words[walk.STOP // 8] = 0


def _dismiss(members: list[_Member], words: np.ndarray) -> None:
    """End the members, which a step that runs at exit goes on without."""
    words[walk.STOP // 8] = 1
    for member in members:
        member.leave()
    for member in members:
        member.join()
