"""Reading memory and nothing else: what a step's speed is measured against."""

from __future__ import annotations

import llvmlite.ir as ir

from edgeinfer.kernels.cpu.simd import I64, Simd, Value
from edgeinfer.kernels.cpu.walk import OP_ARGS, word
from edgeinfer.kernels.jit import Kernel, routine

START, BYTES = OP_ARGS, OP_ARGS + 1
UNIT_BYTES = 128 << 10
_EIGHT = ir.VectorType(I64, 8)


_STREAMS = 4  # side by side, as a matmul of one row reads its weights


@routine
def read(s: Simd, address: Value, vectors: Value) -> Value:
    """The exclusive or of all 64-byte vectors, folded: every byte must be loaded to know it."""
    folded = [s.variable(s.const(_EIGHT, 0)) for _ in range(_STREAMS)]
    each = s.b.sdiv(vectors, s.i64(_STREAMS))
    with s.loop(each) as i:
        for stream, part in enumerate(folded):
            at = s.b.add(i, s.b.mul(each, s.i64(stream)))
            part.set(s.b.xor(part.get(), s.load(_EIGHT, s.at(address, at, 64))))
    total = folded[0].get()
    for part in folded[1:]:
        total = s.b.xor(total, part.get())
    out = s.scratch(I64, 8)
    s.store(total, out)
    return s.load(I64, out)


def _stream(op: int, step: int, chunk: int) -> int:
    first = chunk * UNIT_BYTES
    size = word(op, BYTES) - first
    if size > UNIT_BYTES:
        size = UNIT_BYTES
    folded: int = read(word(op, START) + first, size // 64)
    return folded


STREAM = Kernel("stream", _stream, (word, read))
