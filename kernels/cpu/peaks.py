"""What the processor can do at most, by kernels that only multiply and add; and how long each op of a table takes.

The kernels are written in the vocabulary of the real kernels, with operands in registers and in the nearest cache, and enough
sums side by side that none waits for the one before. What they reach is what no kernel of that SIMD level can exceed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from edgeinfer.kernels.cpu.dot import Dot
from edgeinfer.kernels.cpu.simd import BYTES, F32, F32X, LANES, Simd, Value
from edgeinfer.kernels.cpu.walk import (
    OP_ARGS,
    OP_BARRIER,
    OP_BYTES,
    OP_KERNEL,
    OP_ROW_COUNT,
    OP_ROWS_PER_CHUNK,
    OP_UNITS,
    OP_WORDS,
    publish,
    ticks,
    word,
)
from edgeinfer.kernels.jit import Code, Kernel, routine
from edgeinfer.kernels.step import ROWS, Step
from edgeinfer.kernels.team import Team, aligned_zeros

DATA, TURNS = OP_ARGS, OP_ARGS + 1
VECTORS = 8  # of weights in a turn: a span
_WEIGHTS = 64 * VECTORS * 8  # bytes that the turns go through, again and again; the activations stand behind them
_DATA_BYTES = _WEIGHTS + 64 * LANES
_CHUNKS, _TURNS, _IDLE_OPS, _REPEATS = 16, 20_000, 256, 5


# Sums of 16 lanes side by side: a multiply-add takes up to 5 cycles and two begin in each, a sum may be two registers, and
# all must have one. The sums of vpmaddubsw are plain additions, which take one cycle.
INT8_SUMS = {"vnni512": 12, "vnni256": 5, "maddubs": 2, "plain": 2}
F32_SUMS = {"vnni512": 12, "vnni256": 5, "maddubs": 5, "plain": 2}


@routine
def dots(s: Simd, data: Value, turns: Value) -> Value:
    """Integer dots of 4-bit weights: in a turn VECTORS vectors of them, each times INT8_SUMS activations."""
    results = [Dot(s, 4, False, VECTORS) for _ in range(INT8_SUMS[s.level.dot])]
    with s.loop(turns) as turn:
        for vector in range(VECTORS):
            weights = s.load(BYTES, s.at(_turn_weights(s, data, turn), 64 * vector))
            for number, dot in enumerate(results):
                dot.add(weights, s.broadcast4(s.at(data, _WEIGHTS + 4 * number)))
        for dot in results:
            dot.end_step()
    total = results[0].result()
    for dot in results[1:]:
        total = s.b.add(total, dot.result())
    return s.wide(s.total(total))


@routine
def multiply_adds(s: Simd, data: Value, turns: Value) -> Value:
    """The same with floats."""
    results = [s.variable(s.const(F32X, 0.0)) for _ in range(F32_SUMS[s.level.dot])]
    with s.loop(turns) as turn:
        for vector in range(VECTORS):
            weights = s.load(F32X, s.at(_turn_weights(s, data, turn), 64 * vector))
            for number, result in enumerate(results):
                activation = s.load(F32, s.at(data, _WEIGHTS + 4 * number))
                result.set(s.fma(weights, s.splat(activation), result.get()))
    total = results[0].get()
    for result in results[1:]:
        total = s.b.fadd(total, result.get())
    return s.bits_of(s.total(total))


def _turn_weights(s: Simd, data: Value, turn: Value) -> Value:
    """Other weights each turn: products of the same ones would be made once, before the loop."""
    return s.at(data, s.b.and_(turn, s.i64(7)), 64 * VECTORS)


def _int8(op: int, step: int, chunk: int) -> int:
    result: int = dots(word(op, DATA), word(op, TURNS))  # returned, so that it must be computed
    return result


def _f32(op: int, step: int, chunk: int) -> int:
    result: int = multiply_adds(word(op, DATA), word(op, TURNS))
    return result


def _clock(op: int, step: int, chunk: int) -> int:
    """Write the time down. What an op costs by itself is the time between two of these."""
    publish(word(op, DATA), ticks())
    return 0


KERNELS = INT8, FLOAT, CLOCK = (
    Kernel("peak_int8", _int8, (word, dots)),
    Kernel("peak_f32", _f32, (word, multiply_adds)),
    Kernel("clock", _clock, (word, publish, ticks)),
)


@dataclass(frozen=True)
class Peaks:
    """int8, f32: multiply-adds a second of all threads together. op: seconds that an op takes which does nothing."""

    int8: float
    f32: float
    op: float


def measure(code: Code, threads: int) -> Peaks:
    """The peaks at the code's level with that many threads: the best of a few times, some tens of milliseconds in all."""
    data = aligned_zeros(_DATA_BYTES)
    data.view(np.float32)[:] = 1.0
    times = np.zeros(1, np.int64)
    table = op_table(2 + _IDLE_OPS)
    for number, row in enumerate(table):
        row[OP_KERNEL] = code.address((INT8, FLOAT)[number] if number < 2 else CLOCK)
        row[OP_UNITS] = _CHUNKS * threads if number < 2 else 1
        row[OP_ROWS_PER_CHUNK] = row[OP_BARRIER] = 1
        row[DATA], row[TURNS] = (data if number < 2 else times).ctypes.data, _TURNS
    step = Step(1, 1)
    step.block[ROWS] = 1
    team = Team(code, threads, table, step.block)
    try:
        lanes, kind = _CHUNKS * threads * _TURNS * VECTORS * LANES, code.level.dot
        int8 = 4 * lanes * INT8_SUMS[kind] / fastest(team, 0, 1)
        f32 = lanes * F32_SUMS[kind] / fastest(team, 1, 2)
        return Peaks(int8, f32, fastest(team, 2, len(table)) / _IDLE_OPS)
    finally:
        team.close()


def fastest(team: Team, start: int, end: int, repeats: int = _REPEATS) -> float:
    """Seconds in which the team runs ops start .. end - 1: the least of a few times."""
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        team.run(start, end)
        taken.append(time.perf_counter() - begun)
    return min(taken)


def time_ops(code: Code, threads: int, ops: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Seconds that each op of a table takes in one step, one op after the other: f64 (ops,), medians of a few steps.

    ops: int64 (ops, OP_WORDS). step: the step block, filled. They run as in a step, with a clock before and after each.
    """
    times = np.zeros(len(ops) + 1, np.int64)
    table = op_table(2 * len(ops) + 1)
    table[1::2] = ops
    table[:, OP_BARRIER] = 1
    clocks = table[::2]
    clocks[:, OP_KERNEL] = code.address(CLOCK)
    clocks[:, OP_UNITS] = 1
    clocks[:, OP_ROWS_PER_CHUNK] = 1 << 40
    clocks[:, OP_ROW_COUNT] = ROWS
    clocks[:, DATA] = times.ctypes.data + times.itemsize * np.arange(len(times))
    team = Team(code, threads, table, step)
    taken = []
    try:
        for _ in range(_REPEATS + 1):
            begun = time.perf_counter()
            team.run(0, len(table))
            seconds = time.perf_counter() - begun
            taken.append(np.diff(times) * (seconds / max(1, times[-1] - times[0])))
    finally:
        team.close()
    return np.asarray(np.median(taken[1:], axis=0))  # the first warms up


def op_table(ops: int) -> np.ndarray:
    """int64 (ops, OP_WORDS), zeros."""
    return aligned_zeros(ops * OP_BYTES).view(np.int64).reshape(ops, OP_WORDS)
