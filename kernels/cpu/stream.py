"""Reading memory and nothing else: what a step's speed is measured against."""

from __future__ import annotations

from edgeinfer.kernels.cpu.simd import I64, Simd, Value, ir
from edgeinfer.kernels.cpu.walk import OP_ARGS, word
from edgeinfer.kernels.jit import Kernel, routine

START, BYTES = OP_ARGS, OP_ARGS + 1
UNIT_BYTES = 128 << 10
_EIGHT = ir.VectorType(I64, 8)


@routine
def read(s: Simd, address: Value, vectors: Value) -> Value:
    """The exclusive or of all 64-byte vectors, folded: every byte must be loaded to know it."""
    folded = s.variable(s.const(_EIGHT, 0))
    with s.loop(vectors) as i:
        folded.set(s.b.xor(folded.get(), s.load(_EIGHT, s.at(address, i, 64))))
    out = s.scratch(I64, 8)
    s.store(folded.get(), out)
    return s.load(I64, out)


def _stream(op: int, step: int, chunk: int) -> int:
    first = chunk * UNIT_BYTES
    size = word(op, BYTES) - first
    if size > UNIT_BYTES:
        size = UNIT_BYTES
    return read(word(op, START) + first, size // 64)


STREAM = Kernel("stream", _stream, (word, read))
