"""Matrix products with weights that stay F32, F16 or BF16, times f32 activations; and the kernel for any block type.

The op's arguments are those of kernels/cpu/matmul.py, read so: a span is one column (`Packing.spans`), the quants are
the f32 activations (QUANTS_STRIDE in bytes), and the records are not read. A row's sum is made column by column, one
fused multiply-add each, whatever rows stand beside it.
"""

from __future__ import annotations

from functools import cache

from edgeinfer.kernels.cpu.matmul import finish, matmul, row_loop
from edgeinfer.kernels.cpu.simd import F32, F32X, Simd, Value
from edgeinfer.kernels.jit import Kernel, Routine, routine
from edgeinfer.kernels.levels import Level
from edgeinfer.kernels.packing import ROWS, Packing
from edgeinfer.kernels.packings import PACKINGS


def _tile(packing: type[Packing], rows: int) -> Routine:
    """The routine for 16 outputs of `rows` rows; `valid` of them exist, and the last one stands in for the others."""

    @routine
    def tile(s: Simd, weights: Value, columns: Value, inputs: Value, inputs_stride: Value, records: Value,
             records_stride: Value, out: Value, out_stride: Value, addend: Value, bias: Value,
             valid: Value) -> None:  # fmt: skip
        last = s.b.sub(valid, s.i64(1))
        which = [s.b.select(s.b.icmp_signed("<", last, s.i64(r)), last, s.i64(r)) for r in range(rows)]
        row_inputs = [s.b.add(inputs, s.b.mul(r, inputs_stride)) for r in which]
        sums = [s.variable(s.const(F32X, 0.0)) for _ in range(rows)]
        with s.loop(columns) as column:
            w = packing.floats(s, s.at(weights, column, packing.nbytes * ROWS))
            for total, address in zip(sums, row_inputs, strict=True):
                total.set(s.fma(w, s.splat(s.load(F32, s.at(address, column, 4))), total.get()))
        finish(s, [v.get() for v in sums], which, out, out_stride, addend, bias)

    return tile


def matmul_float(packing: type[Packing], height: int) -> Kernel:
    """out (rows, 16 tiles) f32 = activations @ weights^T (+ bias) (+ addend). A unit is GRAIN tiles."""
    control, routines = row_loop(_tile(packing, 1), _tile(packing, 2), _tile(packing, height), height)
    return Kernel(f"matmul_{packing.name.lower()}", control, routines)  # type: ignore[arg-type]


@cache
def matmul_kernel(name: str, level: Level) -> Kernel:
    """The matmul for weights of a GGUF block type. KeyError if the type holds no weights."""
    layout = PACKINGS[name]
    if layout.quantized:
        return matmul(layout, level.tile_rows)  # type: ignore[arg-type]  # mypy doubts that a class has a hash
    return matmul_float(layout, level.tile_rows)
