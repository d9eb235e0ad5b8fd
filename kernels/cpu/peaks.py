"""What the processor can do at most: kernels that only multiply and add, and one that does nothing at all.

They are written in the vocabulary of the real kernels, with operands in registers and in the nearest cache, and enough
sums side by side that none waits for the one before. What they reach is what no kernel of that SIMD level can exceed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from edgeinfer.kernels.cpu.dot import Dot
from edgeinfer.kernels.cpu.simd import BYTES, F32, F32X, LANES, Simd, Value
from edgeinfer.kernels.cpu.walk import OP_ARGS, OP_BARRIER, OP_BYTES, OP_KERNEL, OP_ROWS_PER_CHUNK, OP_UNITS, OP_WORDS, word
from edgeinfer.kernels.jit import Code, Kernel, routine
from edgeinfer.kernels.levels import Level
from edgeinfer.kernels.step import ROWS, Step
from edgeinfer.kernels.team import Team, aligned_zeros

DATA, TURNS = OP_ARGS, OP_ARGS + 1
VECTORS = 8  # of weights in a turn: a span
_WEIGHTS = 64 * VECTORS * 8  # bytes that the turns go through, again and again; the activations stand behind them
_DATA_BYTES = _WEIGHTS + 64 * LANES
_CHUNKS, _TURNS, _IDLE_OPS, _REPEATS = 16, 20_000, 256, 5


def sums(level: Level) -> int:
    """Sums of 16 lanes side by side: an instruction takes up to 5 cycles and two begin in each; a sum may be two registers."""
    return {"vnni512": 12, "plain": 2}.get(level.dot, 5)


@routine
def dots(s: Simd, data: Value, turns: Value) -> Value:
    """Integer dots of 4-bit weights: a turn multiplies VECTORS vectors of weights with `sums` vectors of activations."""
    results = [Dot(s, 4, False, VECTORS) for _ in range(sums(s.level))]
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
    results = [s.variable(s.const(F32X, 0.0)) for _ in range(sums(s.level))]
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


def _nothing(op: int, step: int, chunk: int) -> int:
    return 0


KERNELS = INT8, FLOAT, NOTHING = (
    Kernel("peak_int8", _int8, (word, dots)),
    Kernel("peak_f32", _f32, (word, multiply_adds)),
    Kernel("peak_nothing", _nothing, ()),
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
    table = aligned_zeros((2 + _IDLE_OPS) * OP_BYTES).view(np.int64).reshape(-1, OP_WORDS)
    for number, row in enumerate(table):
        row[OP_KERNEL] = code.address((INT8, FLOAT)[number] if number < 2 else NOTHING)
        row[OP_UNITS] = (_CHUNKS if number < 2 else 1) * threads
        row[OP_ROWS_PER_CHUNK] = row[OP_BARRIER] = 1
        row[DATA], row[TURNS] = data.ctypes.data, _TURNS
    step = Step(1, 1)
    step.block[ROWS] = 1
    team = Team(code, threads, table, step.block)

    def best(start: int, end: int) -> float:
        taken = []
        for _ in range(_REPEATS):
            begun = time.perf_counter()
            team.run(start, end)
            taken.append(time.perf_counter() - begun)
        return min(taken)

    try:
        vectors = _CHUNKS * threads * _TURNS * VECTORS * sums(code.level)
        return Peaks(
            int8=vectors * 4 * LANES / best(0, 1), f32=vectors * LANES / best(1, 2), op=best(2, len(table)) / _IDLE_OPS
        )
    finally:
        team.close()
