"""Integer matrix products: packed weights times quantized activations, for one, two, or many rows of activations.

A tile is 16 outputs (one packed tile of weights) times up to `level.tile_rows` rows. However many rows there are, a
row's sum is made the same way, so its bits are the same: over its spans in order, the integer dot of each scale group,
then one fused multiply-add with weight scale times activation scale, then one with minimum times activation sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from edgeinfer.kernels.cpu.dot import Dot
from edgeinfer.kernels.cpu.simd import F32, F32X, I32, I64, LANES, Simd, Value, Variable
from edgeinfer.kernels.cpu.walk import OP_ARGS, OP_ROW_COUNT, word
from edgeinfer.kernels.jit import Kernel, Routine, routine
from edgeinfer.kernels.packing import SPAN, STEPS, Packing

# quantized activations: per row int8 (columns,), and per span a record {f32 scale; f32 scale * sum; i32 sum of each half}
RECORD = 16

# the op's arguments, after OP_ARGS
(WEIGHTS, TILE_BYTES, TILES, GRAIN, SPANS, QUANTS, QUANTS_STRIDE, RECORDS, RECORDS_STRIDE) = range(OP_ARGS, OP_ARGS + 9)
(OUT, OUT_STRIDE, ADDEND, BIAS) = range(OP_ARGS + 9, OP_ARGS + 13)


class Operands:
    """Addresses of an op's operands for `tiles` tiles from `tile` on and `height` rows from `row` on.

    `valid` of the rows exist; the last one stands in for the others, which then write what it wrote.
    """

    def __init__(self, s: Simd, op: Value, tile: Value, tiles: int, row: Value, height: int, valid: Value) -> None:
        b = s.b
        self._s, self._op = s, op
        last = b.sub(valid, s.i64(1))
        self._rows = [b.add(row, b.select(b.icmp_signed("<", last, s.i64(r)), last, s.i64(r))) for r in range(height)]
        self._tiles = [b.add(tile, s.i64(t)) for t in range(tiles)]
        self.spans = self.argument(SPANS)

    def argument(self, index: int) -> Value:
        return self._s.load(I64, self._s.at(self._op, 8 * index))

    def weights(self) -> list[Value]:
        """Of each tile."""
        return [self._at(WEIGHTS, tile, self.argument(TILE_BYTES)) for tile in self._tiles]

    def of_rows(self, base: int, stride: int) -> list[Value]:
        """Of each row, in the array whose address and stride are these arguments."""
        return [self._at(base, row, self.argument(stride)) for row in self._rows]

    def _at(self, base: int, index: Value, stride: Value) -> Value:
        return self._s.b.add(self.argument(base), self._s.b.mul(index, stride))

    def finish(self, sums: list[list[Value]]) -> None:
        """Store sums[tile][row] (F32X), plus bias, plus addend, where these have addresses. The addend may be the output."""
        s, b = self._s, self._s.b
        stride, results = self.argument(OUT_STRIDE), []
        for tile, totals in zip(self._tiles, sums, strict=True):
            column = b.mul(tile, s.i64(4 * LANES))
            for row, total in zip(self._rows, totals, strict=True):
                value = s.variable(total)
                for base, at in ((self.argument(BIAS), column), (self.argument(ADDEND), b.add(column, b.mul(row, stride)))):
                    with b.if_then(b.icmp_unsigned("!=", base, s.i64(0))):
                        value.set(b.fadd(value.get(), s.load(F32X, b.add(base, at))))
                results.append((value, b.add(self.argument(OUT), b.add(column, b.mul(row, stride)))))
        for value, address in results:  # after every load: a row that stands in for others writes the same twice
            s.store(value.get(), address)


def _span_products(s: Simd, packing: type[Packing], blocks: list[Value], index: Value, q: list[Value],
                   records: list[Value], sums: list[list[Variable]]) -> None:  # fmt: skip
    """Add one span's products to sums[tile][row] (F32X). blocks: of each tile; q, records: of each row, at this span."""
    spans = [packing.span(s, block, index) for block in blocks]
    groups = len(spans[0].scales)
    dots = [[[Dot(s, packing.bits, packing.signed, 8 // groups) for _ in range(groups)] for _ in q] for _ in spans]
    for g in range(groups):
        with s.loop(s.i64((g + 1) * STEPS // groups), s.i64(g * STEPS // groups)) as i:
            for span, tile_dots in zip(spans, dots, strict=True):
                for group, w in span.step(i):
                    for row, address in enumerate(q):
                        tile_dots[row][g].add(w, s.broadcast4(s.at(address, group, 4)))
            for tile_dots in dots:
                for row_dots in tile_dots:
                    row_dots[g].end_step()
    for row, record in enumerate(records):
        scale = s.splat(s.load(F32, record))
        for g in range(groups):
            half_sums = [s.load(I32, s.at(record, 8 + 4 * h)) for h in range(g * 2 // groups, (g + 1) * 2 // groups)]
            activation_sum = half_sums[0] if len(half_sums) == 1 else s.b.add(*half_sums)
            if groups == 1:
                weighted = s.load(F32, s.at(record, 4))
            else:
                weighted = s.b.fmul(s.load(F32, record), s.to_f32(activation_sum))
            for tile, span in enumerate(spans):
                dot = dots[tile][row][g]
                total, offset = dot.result(), packing.offset + dot.excess
                if offset:
                    total = s.b.sub(total, s.splat(s.b.mul(activation_sum, s.i32(offset))))
                value = s.fma(s.to_f32(total), s.b.fmul(span.scales[g], scale), sums[tile][row].get())
                if span.minimums:
                    value = s.fma(span.minimums[g], s.splat(weighted), value)
                sums[tile][row].set(value)


def _tile(packing: type[Packing], tiles: int, height: int) -> Routine:
    """The routine for 16 * tiles outputs of `height` rows."""
    spans_in_block = packing.values // SPAN

    @routine
    def tile(s: Simd, op: Value, tile: Value, row: Value, valid: Value) -> None:
        b = s.b
        operands = Operands(s, op, tile, tiles, row, height, valid)
        weights = operands.weights()
        quants, records = operands.of_rows(QUANTS, QUANTS_STRIDE), operands.of_rows(RECORDS, RECORDS_STRIDE)
        sums = [[s.variable(s.const(F32X, 0.0)) for _ in range(height)] for _ in range(tiles)]
        with s.loop(b.sdiv(operands.spans, s.i64(spans_in_block))) as block, s.loop(s.i64(spans_in_block)) as index:
            span = b.add(b.mul(block, s.i64(spans_in_block)), index)
            _span_products(
                s, packing, [s.at(w, block, packing.nbytes * LANES) for w in weights], index,
                [s.at(a, span, SPAN) for a in quants], [s.at(a, span, RECORD) for a in records], sums,
            )  # fmt: skip
        operands.finish([[v.get() for v in totals] for totals in sums])

    return tile


# One row takes four tiles side by side: memory answers several streams of addresses faster than one (measured here: 18
# against 12 GB/s a core), since the processor reads ahead in each
WIDE = 4


def over_rows(name: str, tile: Callable[[int, int], Routine], height: int) -> Kernel:
    """The kernel that covers an op's chunk of tiles with the routine that fits the rows left. tile(tiles, height) makes one."""
    wide, one, two, many = tile(WIDE, 1), tile(1, 1), tile(1, 2), tile(1, height)

    def control(op: int, step: int, chunk: int) -> int:
        rows = word(step, word(op, OP_ROW_COUNT))
        grain, end = word(op, GRAIN), word(op, TILES)
        tile = chunk * grain
        if tile + grain < end:
            end = tile + grain
        while tile < end:
            if rows == 1 and tile + WIDE <= end:
                wide(op, tile, 0, 1)
                tile += WIDE
                continue
            row = 0
            while row < rows:
                left = rows - row
                if left == 1:
                    one(op, tile, row, 1)
                elif left == 2:
                    two(op, tile, row, 2)
                else:
                    valid = left
                    if valid > height:
                        valid = height
                    many(op, tile, row, valid)
                row += height
            tile += 1
        return 0

    return Kernel(name, control, (word, wide, one, two, many))


@cache
def matmul(packing: type[Packing], height: int) -> Kernel:
    """out (rows, 16 * tiles) f32 = activations @ weights^T (+ bias) (+ addend). A unit is GRAIN tiles."""
    return over_rows(f"matmul_{packing.name.lower()}", partial(_tile, packing), height)
