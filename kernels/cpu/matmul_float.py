"""Matrix products with weights that stay F32, F16 or BF16, times f32 activations; and the kernel for any block type.

The op's arguments are those of kernels/cpu/matmul.py, read so: a span is one column (`Packing.spans`), the quants are
the f32 activations (QUANTS_STRIDE in bytes), and the records are not read. A row's sum is made column by column, one
fused multiply-add each, whatever rows stand beside it.
"""

from __future__ import annotations

from functools import cache, partial

from edgeinfer.kernels.cpu.matmul import QUANTS, QUANTS_STRIDE, Operands, matmul, over_rows
from edgeinfer.kernels.cpu.simd import F32, F32X, LANES, Simd, Value
from edgeinfer.kernels.jit import Kernel, Routine, routine
from edgeinfer.kernels.levels import Level
from edgeinfer.kernels.packing import Packing
from edgeinfer.kernels.packings import PACKINGS


def _tile(packing: type[Packing], tiles: int, height: int) -> Routine:
    """The routine for 16 * tiles outputs of `height` rows."""

    @routine
    def tile(s: Simd, op: Value, tile: Value, row: Value, valid: Value) -> None:
        operands = Operands(s, op, tile, tiles, row, height, valid)
        weights, inputs = operands.weights(), operands.of_rows(QUANTS, QUANTS_STRIDE)
        sums = [[s.variable(s.const(F32X, 0.0)) for _ in range(height)] for _ in range(tiles)]
        with s.loop(operands.spans) as column:
            for totals, address in zip(sums, weights, strict=True):
                w = packing.floats(s, s.at(address, column, packing.nbytes * LANES))
                for total, x in zip(totals, inputs, strict=True):
                    total.set(s.fma(w, s.splat(s.load(F32, s.at(x, column, 4))), total.get()))
        operands.finish([[v.get() for v in totals] for totals in sums])

    return tile


@cache
def matmul_kernel(name: str, level: Level) -> Kernel:
    """The matmul for weights of a GGUF block type. KeyError if the type holds no weights."""
    layout = PACKINGS[name]
    if layout.quantized:
        return matmul(layout, level.tile_rows)  # type: ignore[arg-type]  # mypy doubts that a class has a hash
    return over_rows(f"matmul_{name.lower()}", partial(_tile, layout), level.tile_rows)
