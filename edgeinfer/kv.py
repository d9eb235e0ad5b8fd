"""The KV cache: one arena of pages for each group of layers with the same window, and rings of pages for sequences.

A ring holds a sequence's last `ring * 64` tokens: the whole context for layers that see everything, and for sliding
windows just the window and one step. Positions are absolute; slots are derived from them (kernels/pages.py).
"""

from __future__ import annotations

import gc
import mmap
import os
import sys
import threading
from dataclasses import dataclass

import numpy as np

from edgeinfer.config import ModelConfig
from edgeinfer.kernels.locks import ForkSafeLock
from edgeinfer.kernels.pages import PAGE, LayerPages, head_bytes
from edgeinfer.kernels.team import Cancelled

MAX_SEQUENCES = 16  # tables are made for so many; their pages take memory only once written


def ring_pages(window: int, context: int, step: int) -> int:
    """Pages in a ring: the context's, or enough for a window and one step of new tokens, whatever their alignment."""
    whole = -(-context // PAGE)
    return whole if window == 0 else min(whole, -(-(window + step) // PAGE) + 1)


def page_bytes(config: ModelConfig, layers: int) -> int:
    """Bytes of a page that `layers` layers share."""
    return layers * config.kv_heads * head_bytes(config.head_dim)


def sequence_bytes(config: ModelConfig, context: int, step: int) -> int:
    """Bytes of one sequence's pages when full."""
    return sum(
        ring_pages(window, context, step) * page_bytes(config, config.windows.count(window))
        for window in set(config.windows)
    )


class _Group:
    """The layers with one window: their arena, the table of rings, and the pages that are free."""

    def __init__(self, config: ModelConfig, window: int, context: int, step: int, sequences: int) -> None:
        self.ring = ring_pages(window, context, step)
        self.page_bytes = page_bytes(config, config.windows.count(window))
        count = self.ring * sequences
        self._map = _reserved(count * self.page_bytes)
        self.arena = np.frombuffer(self._map, np.uint8).reshape(count, self.page_bytes)
        self.table = np.zeros((sequences, self.ring), np.int64)
        self.free = list(range(count - 1, -1, -1))

    def release(self, page: int) -> None:
        """Give a page's memory back to the system; it reads as zeros afterwards."""
        start, end = page * self.page_bytes, (page + 1) * self.page_bytes
        start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
        self.free.append(page)


def _reserved(nbytes: int) -> mmap.mmap:
    """Zeros that take memory page by page as they are written, private to this process: a forked child gets a copy."""
    if os.name != "posix":
        return mmap.mmap(-1, nbytes)
    # most of it is never written: do not count it against the system's promises (Python names the flag from 3.13 on)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)


@dataclass
class CacheSequence:
    """One sequence's place in the cache. `length` tokens are in it; only the session that owns it moves that."""

    index: int
    length: int = 0
    written: int = 0  # tokens ever placed, also by steps that were cancelled: in a ring they took the place of earlier ones
    pages: int = 0  # slots of the longest ring that have a page


class KVCache:
    """The pages of one model. Thread-safe: sessions in several threads take and return sequences."""

    def __init__(self, config: ModelConfig, context: int, step: int) -> None:
        """context: most tokens in a sequence. step: most tokens that one step appends.

        Raises MemoryError where the process may not even reserve the addresses of one sequence.
        """
        self.context = context
        windows = sorted(set(config.windows))
        self.sequences = MAX_SEQUENCES
        while True:
            try:
                self._groups = {window: _Group(config, window, context, step, self.sequences) for window in windows}
                break
            except OSError as error:  # a limit on addresses (ulimit -v): do with fewer sequences
                if self.sequences == 1:
                    raise MemoryError(str(error)) from None
                self.sequences //= 4
        self._windows = config.windows
        self._layer_bytes = page_bytes(config, 1)
        self._free = list(range(self.sequences - 1, -1, -1))
        self._reserved = np.zeros(self.sequences, np.int64)  # tokens that each sequence has pages for
        self._lock = ForkSafeLock(threading.RLock)  # a forgotten reply is closed by the garbage collector, wherever that runs
        self._freed = False

    def layers(self) -> list[LayerPages]:
        """Where each layer's pages are, for the builder."""
        places, used = [], dict.fromkeys(self._groups, 0)
        for window in self._windows:
            group = self._groups[window]
            places.append(LayerPages(group.arena, used[window] * self._layer_bytes, group.table))
            used[window] += 1
        return places

    def open(self) -> CacheSequence:
        """A new, empty sequence. Raises RuntimeError when all (16, as a rule) are open, ValueError once freed."""
        with self._lock:
            if self._freed:
                raise ValueError("the model is closed")
            if not self._free:
                gc.collect()  # replies that were dropped half way wait for it, and give their sequence back
            if not self._free:
                raise RuntimeError(f"{self.sequences} sequences are open on this model; close a session first")
            return CacheSequence(self._free.pop())

    def reserve(self, sequence: CacheSequence, tokens: int) -> None:
        """Have pages for positions 0 .. tokens - 1. Raises ValueError beyond the context, Cancelled once freed."""
        if tokens > self.context:
            raise ValueError(f"{tokens} tokens; the context holds {self.context}")
        wanted = -(-tokens // PAGE)
        with self._lock:
            if self._freed:
                raise Cancelled("the model is closed")
            for group in self._groups.values():
                for slot in range(min(sequence.pages, group.ring), min(wanted, group.ring)):
                    group.table[sequence.index, slot] = group.free.pop()
            sequence.pages = max(sequence.pages, wanted)
            self._reserved[sequence.index] = sequence.pages * PAGE

    def check(self, sequences: np.ndarray, positions: np.ndarray) -> None:
        """Raises ValueError unless every row's sequence has a page for its position: kernels look nothing up.

        sequences, positions: int64 (rows,).
        """
        if len(sequences) == 0 or sequences.min() < 0 or sequences.max() >= self.sequences:
            raise ValueError(f"sequences must lie in 0..{self.sequences - 1}")
        if positions.min() < 0 or (positions >= self._reserved[sequences]).any():
            raise ValueError("a position without a page: reserve() comes first")

    def rollback(self, sequence: CacheSequence, length: int) -> None:
        """Forget all but the first `length` tokens. Raises ValueError where a ring has already dropped what they attend to."""
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot go from {sequence.length} tokens back to {length}")
        for window, group in self._groups.items():
            kept_from = max(0, length - window + 1) if window else 0
            if length and kept_from < sequence.written - group.ring * PAGE:
                raise ValueError(f"tokens {kept_from}.. have left the ring; re-read the text instead")
        sequence.length = length
        if length == 0:
            sequence.written = 0

    def close(self, sequence: CacheSequence) -> None:
        """Give the pages back. A sequence is closed once."""
        with self._lock:
            for group in self._groups.values():
                for slot in range(min(sequence.pages, group.ring)):
                    group.release(int(group.table[sequence.index, slot]))
            sequence.pages = sequence.length = sequence.written = 0
            self._reserved[sequence.index] = 0
            self._free.append(sequence.index)

    def free(self) -> None:
        """Let go of every page; what is open stays harmless, and nothing can be opened any more."""
        with self._lock:
            self._freed = True
            self._reserved[:] = 0
            self._groups = {}
