"""Integer matrix products: packed weights times quantized activations, for one, two, or many rows of activations.

A tile is 16 outputs (one packed tile of weights) times up to `level.tile_rows` rows. However many rows there are, a
row's sum is made the same way, so its bits are the same: over its spans in order, the integer dot of each scale group,
then one fused multiply-add with weight scale times activation scale, then one with minimum times activation sum.
"""

from __future__ import annotations

from functools import cache

from edgeinfer.kernels.cpu.simd import F32, F32X, I32, Simd, Value
from edgeinfer.kernels.cpu.walk import OP_ARGS, word
from edgeinfer.kernels.jit import Kernel, Routine, routine
from edgeinfer.kernels.packing import SPAN, STEPS, Packing

# quantized activations: per row int8 (columns,), and per span a record {f32 scale; f32 scale * sum; i32 sum of each half}
RECORD = 16

# the op's arguments, after OP_ARGS
(WEIGHTS, TILE_BYTES, TILES, GRAIN, SPANS, QUANTS, QUANTS_STRIDE, RECORDS, RECORDS_STRIDE) = range(OP_ARGS, OP_ARGS + 9)
(OUT, OUT_STRIDE, ADDEND, BIAS) = range(OP_ARGS + 9, OP_ARGS + 13)


def _span_products(s: Simd, packing: type[Packing], span_at: Value, index: Value, q: list[Value], records: list[Value],
                   sums: list[Value]) -> list[Value]:  # fmt: skip
    """Add one span's products for every row to `sums` (F32X each). q, records: the rows' addresses at this span."""
    span = packing.span(s, span_at, index)
    groups = len(span.scales)
    dots = [[s.dot(packing.bits, packing.signed, 8 // groups) for _ in range(groups)] for _ in q]
    for g in range(groups):
        with s.loop(s.i64((g + 1) * STEPS // groups), s.i64(g * STEPS // groups)) as i:
            for group, w in span.step(i):
                for row, address in enumerate(q):
                    dots[row][g].add(w, s.broadcast4(s.at(address, group, 4)))
            for dot in dots:
                dot[g].end_step()
    for row, record in enumerate(records):
        scale = s.splat(s.load(F32, record))
        for g in range(groups):
            total = dots[row][g].result()
            half_sums = [s.load(I32, s.at(record, 8 + 4 * h)) for h in range(g * 2 // groups, (g + 1) * 2 // groups)]
            if packing.offset:
                activation_sum = half_sums[0] if len(half_sums) == 1 else s.b.add(*half_sums)
                correction = s.b.mul(activation_sum, s.i32(packing.offset))
                total = s.b.sub(total, s.splat(correction))
            sums[row] = s.fma(s.to_f32(total), s.b.fmul(span.scales[g], scale), sums[row])
            if span.minimums:
                if groups == 1:
                    weighted = s.load(F32, s.at(record, 4))
                else:
                    weighted = s.b.fmul(s.load(F32, record), s.to_f32(half_sums[0]))
                sums[row] = s.fma(span.minimums[g], s.splat(weighted), sums[row])
    return sums


def _tile(packing: type[Packing], rows: int) -> Routine:
    """The routine for 16 outputs of `rows` rows; `valid` of them exist, and the last one stands in for the others."""
    spans_in_block = packing.values // SPAN

    @routine
    def tile(s: Simd, weights: Value, spans: Value, quants: Value, quants_stride: Value, records: Value, records_stride: Value,
             out: Value, out_stride: Value, addend: Value, bias: Value, valid: Value) -> None:  # fmt: skip
        b = s.b
        last = b.sub(valid, s.i64(1))
        which = [s.i64(0)]
        for r in range(1, rows):
            which.append(b.select(b.icmp_signed("<", last, s.i64(r)), last, s.i64(r)))
        q = [b.add(quants, b.mul(r, quants_stride)) for r in which]
        record = [b.add(records, b.mul(r, records_stride)) for r in which]
        sums = [s.variable(s.const(F32X, 0.0)) for _ in range(rows)]
        with s.loop(b.sdiv(spans, s.i64(spans_in_block))) as block, s.loop(s.i64(spans_in_block)) as index:
            span = b.add(b.mul(block, s.i64(spans_in_block)), index)
            totals = _span_products(
                s, packing, s.at(weights, block, packing.nbytes * 16), index,
                [s.at(a, span, SPAN) for a in q], [s.at(a, span, RECORD) for a in record], [v.get() for v in sums],
            )  # fmt: skip
            for v, total in zip(sums, totals, strict=True):
                v.set(total)
        finish(s, [v.get() for v in sums], which, out, out_stride, addend, bias)

    return tile


def finish(s: Simd, sums: list[Value], which: list[Value], out: Value, out_stride: Value, addend: Value, bias: Value) -> None:
    """Store each row's 16 sums, plus bias, plus addend, where these addresses are not 0. The addend may be the output itself."""
    b = s.b
    results = []
    for total, r in zip(sums, which, strict=True):
        for address in (bias, b.add(addend, b.mul(r, out_stride))):
            present = b.icmp_unsigned("!=", bias if address is bias else addend, s.i64(0))
            value = s.variable(total)
            with b.if_then(present):
                value.set(b.fadd(total, s.load(F32X, address)))
            total = value.get()
        results.append(total)
    for total, r in zip(results, which, strict=True):  # after every load: rows that stand in for others write the same twice
        s.store(total, b.add(out, b.mul(r, out_stride)))


def row_loop(one: Routine, two: Routine, many: Routine, height: int) -> tuple[object, tuple[Routine, ...]]:
    """Control code that covers an op's chunk of tiles with the tallest routine that fits the rows left."""

    def control(op: int, step: int, chunk: int) -> int:
        rows = word(step, word(op, 3))
        tile_bytes, grain, spans = word(op, TILE_BYTES), word(op, GRAIN), word(op, SPANS)
        quants, quants_stride = word(op, QUANTS), word(op, QUANTS_STRIDE)
        records, records_stride = word(op, RECORDS), word(op, RECORDS_STRIDE)
        out, out_stride, addend, bias = word(op, OUT), word(op, OUT_STRIDE), word(op, ADDEND), word(op, BIAS)
        end = (chunk + 1) * grain
        if end > word(op, TILES):
            end = word(op, TILES)
        for tile in range(chunk * grain, end):
            w = word(op, WEIGHTS) + tile * tile_bytes
            o = out + tile * 64
            extra = addend
            if addend != 0:
                extra = addend + tile * 64
            offset = bias
            if bias != 0:
                offset = bias + tile * 64
            row = 0
            while row < rows:
                q, r, y = quants + row * quants_stride, records + row * records_stride, o + row * out_stride
                x = extra
                if extra != 0:
                    x = extra + row * out_stride
                left = rows - row
                if left == 1:
                    one(w, spans, q, quants_stride, r, records_stride, y, out_stride, x, offset, 1)
                    row += 1
                elif left == 2:
                    two(w, spans, q, quants_stride, r, records_stride, y, out_stride, x, offset, 2)
                    row += 2
                else:
                    valid = left
                    if left > height:
                        valid = height
                    many(w, spans, q, quants_stride, r, records_stride, y, out_stride, x, offset, valid)
                    row += height
        return 0

    return control, (word, one, two, many)


@cache
def matmul(packing: type[Packing], height: int) -> Kernel:
    """out (rows, 16 tiles) f32 = activations @ weights^T (+ bias) (+ addend). A unit is GRAIN tiles."""
    control, routines = row_loop(_tile(packing, 1), _tile(packing, 2), _tile(packing, height), height)
    return Kernel(f"matmul_{packing.name.lower()}", control, routines)  # type: ignore[arg-type]
