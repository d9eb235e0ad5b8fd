"""The native half of the thread team: claiming chunks of the op table, finishing ops, waiting.

An op is complete when its chunks are, not when its threads arrive: a thread that the system parks holds up only the
chunk in its hand. Every counter carries the generation of the step it belongs to, so a thread that wakes up in a later
step can claim nothing of the one it knew. kernels/team.py is the Python half and documents the blocks used here.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir

from edgeinfer.kernels.cpu.simd import I32, I64, Simd
from edgeinfer.kernels.jit import Kernel, routine

WORD = 8
LINE = 64  # bytes; counters that several threads write stand a cache line apart

# the team block: one word a line
GENERATION, STOP, INSIDE, TABLE, SYNC, STEP, START, END, YIELD, SLEEP = (LINE * i for i in range(10))
TEAM_BYTES = LINE * 10

# an op's row in the table: words
OP_KERNEL, OP_UNITS, OP_ROWS_PER_CHUNK, OP_ROW_COUNT, OP_BARRIER = range(5)
OP_ARGS = 5
OP_WORDS = 24
OP_BYTES = OP_WORDS * WORD

# an op's two counters: generation << 32 | count
CLAIMED, DONE = 0, LINE
SYNC_BYTES = 2 * LINE

FINISHED, OUT_OF_TIME, STOPPED = 0, 1, 2


@routine
def word(s: Simd, base: Any, index: Any) -> Any:
    """The 64-bit integer at base + 8 * index."""
    return s.load(I64, s.at(base, index, WORD))


@routine
def look(s: Simd, address: Any) -> Any:
    """Atomic load, acquiring."""
    return s.b.load_atomic(s.b.inttoptr(address, I64.as_pointer()), "acquire", 8, typ=I64)


@routine
def publish(s: Simd, address: Any, value: Any) -> None:
    """Atomic store, releasing."""
    s.b.store_atomic(value, s.b.inttoptr(address, I64.as_pointer()), "release", 8)


@routine
def swap(s: Simd, address: Any, expected: Any, new: Any) -> Any:
    """Compare and swap: 1 when the word was `expected` and now is `new`."""
    pair = s.b.cmpxchg(s.b.inttoptr(address, I64.as_pointer()), expected, new, "acq_rel", "acquire")
    return s.b.zext(s.b.extract_value(pair, 1), I64)


@routine
def add(s: Simd, address: Any, value: Any) -> Any:
    """Atomic addition; the word before it."""
    return s.b.atomic_rmw("add", s.b.inttoptr(address, I64.as_pointer()), value, "acq_rel")


@routine
def ticks(s: Simd) -> Any:
    """A clock of the processor, in units of its own."""
    on_x86 = s.b.module.triple.startswith("x86_64")
    return s.call("llvm.readcyclecounter" if on_x86 else "llvm.readsteadycounter", I64)


@routine
def pause(s: Simd) -> None:
    if s.b.module.triple.startswith("x86_64"):
        s.call("llvm.x86.sse2.pause", ir.VoidType())


@routine
def run(s: Simd, kernel: Any, op: Any, step: Any, chunk: Any) -> Any:
    """Call the kernel at an address."""
    signature = ir.FunctionType(I64, [I64, I64, I64])
    return s.b.call(s.b.inttoptr(kernel, signature.as_pointer()), [op, step, chunk])


@routine
def give_way(s: Simd, function: Any) -> None:
    """Call an operating-system function without arguments by its address."""
    s.b.call(s.b.inttoptr(function, ir.FunctionType(I32, []).as_pointer()), [])


@routine
def doze(s: Simd, function: Any) -> None:
    """Call the system's sleep by its address, for its shortest sensible time (50, in the unit it takes)."""
    s.b.call(s.b.inttoptr(function, ir.FunctionType(I32, [I32]).as_pointer()), [s.i32(50)])


@routine
def chunks(s: Simd, row: Any, step: Any) -> Any:
    """How many chunks the op has in this step: its units, times the chunks its rows make (none without rows)."""
    b = s.b
    units = s.load(I64, s.at(row, OP_UNITS, WORD))
    per_chunk = s.load(I64, s.at(row, OP_ROWS_PER_CHUNK, WORD))
    rows = look(s, s.at(step, s.load(I64, s.at(row, OP_ROW_COUNT, WORD)), WORD))
    return b.mul(units, b.sdiv(b.sub(b.add(rows, per_chunk), s.i64(1)), per_chunk))


# 200 pauses are about a microsecond or two: longer spinning only helps when nothing else wants the processor
SPINS, YIELDS = 200, 2000


def _begin(team: int, generation: int, start: int, end: int) -> int:
    """Publish a step: the ops start .. end - 1. While the bounds change the generation reads 0, which no thread joins."""
    publish(team + GENERATION, 0)
    publish(team + START, start)
    publish(team + END, end)
    publish(team + GENERATION, generation)
    return 0


def _walk(team: int, generation: int, budget: int) -> int:
    """Work on the step of that generation until it is finished, or stopped, or `budget` ticks (0: no limit) have passed."""
    table = look(team + TABLE)
    sync = look(team + SYNC)
    step = look(team + STEP)
    op = look(team + START)
    end = look(team + END)
    if look(team + GENERATION) != generation:
        return FINISHED  # the bounds just read may be a later step's
    begun = ticks()
    stamp = generation << 32
    first = op  # of the ops since the last barrier
    while op < end:
        row = table + op * OP_BYTES
        claimed = sync + op * SYNC_BYTES + CLAIMED
        done = sync + op * SYNC_BYTES + DONE
        kernel = word(row, OP_KERNEL)
        count = chunks(row, step)
        if look(team + GENERATION) != generation:
            return FINISHED  # a later step's rows may have been counted, and of this one there is nothing left to do
        while True:
            seen = look(claimed)
            following = 0
            if seen >= stamp:
                if (seen >> 32) > generation:
                    return FINISHED
                following = seen - stamp
            if following >= count:
                break
            if swap(claimed, seen, stamp + following + 1):
                run(kernel, row, step, following)
                while True:
                    was = look(done)
                    now = was + 1
                    if was < stamp:
                        now = stamp + 1
                    if swap(done, was, now):
                        break
                if look(team + STOP):
                    return STOPPED
                if budget > 0 and ticks() - begun > budget:
                    return OUT_OF_TIME
        op += 1
        if word(row, OP_BARRIER) == 0 and op < end:
            continue
        while first < op:
            row = table + first * OP_BYTES
            done = sync + first * SYNC_BYTES + DONE
            count = chunks(row, step)
            waited = 0
            while count > 0 and look(done) < stamp + count:
                waited += 1
                if waited < SPINS:
                    pause()
                else:
                    if look(team + STOP):
                        return STOPPED
                    if look(team + GENERATION) != generation:
                        return FINISHED
                    if budget > 0 and ticks() - begun > budget:
                        return OUT_OF_TIME
                    if waited < SPINS + YIELDS:
                        give_way(look(team + YIELD))
                    else:
                        doze(look(team + SLEEP))
            first += 1
    return FINISHED


def _serve(team: int, generation: int, linger: int, walk: int) -> int:
    """Work on each new step as it is published, until none has come for `linger` ticks; the last generation seen."""
    add(team + INSIDE, 1)
    begun = ticks()
    waited = 0
    while look(team + STOP) == 0:
        current = look(team + GENERATION)
        if current > generation:
            run(walk, team, current, 0)
            generation = current
            begun = ticks()
            waited = 0
        elif waited < SPINS:
            waited += 1
            pause()
        elif ticks() - begun > linger:
            break
        else:
            give_way(look(team + YIELD))
    add(team + INSIDE, -1)
    return generation


_ROUTINES = (word, look, publish, swap, add, ticks, pause, run, give_way, doze, chunks)
BEGIN = Kernel("begin", _begin, _ROUTINES)
WALK = Kernel("walk", _walk, _ROUTINES)
SERVE = Kernel("serve", _serve, _ROUTINES)
