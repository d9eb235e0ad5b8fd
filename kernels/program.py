"""A recorded network at work: steps checked, replayed by the thread team, timed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from edgeinfer.kernels.builder import Builder, Op
from edgeinfer.kernels.cpu import peaks
from edgeinfer.kernels.locks import ForkSafeLock
from edgeinfer.kernels.step import ROWS, WANTED
from edgeinfer.kernels.team import Cancelled, Team


class Program:
    """A recorded network and the team that replays it. One step runs at a time; callers queue for it."""

    def __init__(self, builder: Builder, threads: int, lookup: Callable[[np.ndarray], np.ndarray], vocabulary: int) -> None:
        """lookup: token ids (n,) -> embeddings f32 (n, columns). vocabulary: how many logits a row has."""
        self._table = builder.finish()
        self._builder = builder  # it keeps buffers and weights alive
        assert builder.embedded is not None and builder.logits is not None
        self._embedded, self._logits = builder.embedded, builder.logits.data[:, :vocabulary]
        self._lookup, self.vocabulary = lookup, vocabulary
        self._step = builder.step
        self._team = Team(builder.code, threads, self._table, self._step.block)
        self._turn = ForkSafeLock()
        self.threads = threads
        self.max_rows, self.max_wanted = builder.max_rows[ROWS], builder.max_rows[WANTED]
        self.weight_bytes = sum(t.nbytes for t in builder.tiles)
        self.closed = False

    def forward(self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, wanted: Sequence[int],
                take: Callable[[int, np.ndarray], None], cancelled: threading.Event | None = None) -> None:  # fmt: skip
        """Run one step. tokens, positions, sequences: int64 (rows,), at most max_rows; wanted: rows in rising order.

        take(i, logits) receives f32 (n, vocabulary) for wanted rows i .. i + n - 1; the array is reused after it returns.
        Positions and sequences must have pages; whoever owns the cache checks that. Raises ValueError for tokens or rows out
        of range, Cancelled once `cancelled` is set or the program is closed.
        """
        n = len(tokens)
        if not 0 < n <= self.max_rows or len(positions) != n or len(sequences) != n:
            raise ValueError(
                f"a step of {n} tokens, {len(positions)} positions and {len(sequences)} sequences; at most {self.max_rows}"
            )
        if tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise ValueError(f"token ids must lie in 0..{self.vocabulary - 1}")
        if any(not 0 <= row < n for row in wanted):
            raise ValueError(f"wanted rows must lie in 0..{n - 1}")
        while not self._turn.acquire(timeout=0.05):
            self._check(cancelled)
        try:
            while True:
                self._check(cancelled)
                try:
                    return self._forward(tokens, positions, sequences, wanted, take)
                except Cancelled:  # perhaps meant for the step before this one: a step can be repeated
                    self._check(cancelled)
        finally:
            self._turn.release()

    def _check(self, cancelled: threading.Event | None) -> None:
        if self.closed or (cancelled and cancelled.is_set()):
            raise Cancelled("the model is closed" if self.closed else "the step was cancelled")

    def _forward(self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, wanted: Sequence[int],
                 take: Callable[[int, np.ndarray], None]) -> None:  # fmt: skip
        step = self._step
        self._enter(tokens, positions, sequences)
        body, end = self._builder.body_end, self._builder.head_end
        start = 0
        for first in range(0, max(len(wanted), 1), self.max_wanted):
            part = wanted[first : first + self.max_wanted]
            step.wanted_rows[: len(part)] = part
            step.block[WANTED] = len(part)
            self._team.run(start, end if len(part) else body)
            start = body  # the head alone, for the wanted rows that are left
            if len(part):
                take(first, self._logits[: len(part)])

    def _enter(self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray) -> None:
        n, step = len(tokens), self._step
        step.positions[:n], step.sequences[:n] = positions, sequences
        step.block[ROWS] = n
        self._embedded.data[:n, : self._embedded.columns] = self._lookup(tokens)

    def time_ops(self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, wanted: int) -> list[tuple[Op, float]]:
        """The ops of a step (see forward) that wants its last rows, each with the seconds it takes when run alone."""
        with self._turn:
            self._check(None)
            self._enter(tokens, positions, sequences)
            self._step.wanted_rows[:wanted], self._step.block[WANTED] = range(len(tokens) - wanted, len(tokens)), wanted
            table = self._table[: self._builder.head_end]
            seconds = peaks.time_ops(self._builder.code, self.threads, table, self._step.block)
            return list(zip(self._builder.ops, seconds.tolist(), strict=False))

    def read_bandwidth(self, repeats: int = 3) -> float:
        """Bytes per second at which this program's threads read its packed weights and do nothing else; the best of a few."""
        with self._turn:
            self._step.block[ROWS] = 1
            return self.weight_bytes / peaks.fastest(self._team, self._builder.head_end, len(self._table), repeats)

    def stop(self) -> None:
        """Have the step that is running end early; its caller sees Cancelled if its event is set, and else repeats it."""
        self._team.stop()

    def close(self) -> None:
        """Stop, join the threads, and let go of weights and buffers."""
        self.closed = True
        self._team.close()
        with self._turn:
            del self._builder, self._embedded, self._logits, self._table, self._step
            self._team.forget()
