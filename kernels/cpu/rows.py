"""Ops on single rows: RMSNorm, quantizing activations, gated activations, picking rows.

Rows of f32 are padded to whole spans (32 values); what lies in the padding is zero.
"""

from __future__ import annotations

from collections.abc import Callable

from edgeinfer.kernels.cpu.matmul import RECORD
from edgeinfer.kernels.cpu.simd import F32, F32X, I8X, I32X, Simd, Value
from edgeinfer.kernels.cpu.walk import OP_ARGS, OP_ROW_COUNT, word
from edgeinfer.kernels.jit import Kernel, routine
from edgeinfer.kernels.packing import SPAN
from edgeinfer.kernels.step import WANTED_ROWS

VECTOR = 64  # bytes of 16 floats
UNIT_SPANS = 16  # ops that divide a row among threads do so by this many spans

(X, X_STRIDE, OUT, OUT_STRIDE, QUANTS, QUANTS_STRIDE, RECORDS, RECORDS_STRIDE, SPANS) = range(OP_ARGS, OP_ARGS + 9)
(OTHER, OTHER_STRIDE, COLUMNS, EPSILON, ADDEND, ROWS_PER_CHUNK) = range(OP_ARGS + 9, OP_ARGS + 15)


@routine
def quantize_spans(s: Simd, x: Value, quants: Value, records: Value, spans: Value) -> None:
    """f32 -> int8 in -127..127 with a scale for each span: scale = max|x| / 127, quant = nearest(x * (127 / max|x|)).

    A span below 1e-30 is zero: 127 / max|x| would overflow, and what infinity is as an integer depends on the processor.
    A span with a NaN or an infinity has the scale NaN, so that what it takes part in is NaN too.
    """
    b = s.b
    with s.loop(spans) as span:
        at = s.at(x, span, 4 * SPAN)
        halves = [s.load(F32X, at), s.load(F32X, s.at(at, VECTOR))]
        # as integers, magnitudes are in the same order, infinity above every number and NaN above infinity
        low, high = (b.and_(b.bitcast(v, I32X), s.const(I32X, 0x7FFFFFFF)) for v in halves)
        magnitude = b.bitcast(s.tree(s.greater(low, high), s.greater), F32)
        not_finite = b.fsub(magnitude, magnitude)  # NaN, or else 0
        scale = b.fadd(b.fdiv(magnitude, s.f32(127.0)), not_finite)
        present = b.and_(b.fcmp_ordered(">", magnitude, s.f32(1e-30)), b.fcmp_ordered("==", not_finite, s.f32(0.0)))
        inverse = b.select(present, b.fdiv(s.f32(127.0), b.select(present, magnitude, s.f32(1.0))), s.f32(0.0))
        record = s.at(records, span, RECORD)
        sums = []
        for i, v in enumerate(halves):
            scaled = s.nearest(b.fmul(v, s.splat(inverse)))
            q = b.fptosi(b.select(b.fcmp_ordered("==", scaled, scaled), scaled, s.const(F32X, 0.0)), I32X)
            s.store(b.trunc(q, I8X), s.at(s.at(quants, span, SPAN), 16 * i))
            sums.append(s.total(q))
            s.store(sums[i], s.at(record, 8 + 4 * i))
        s.store(scale, record)
        s.store(b.fmul(scale, b.sitofp(b.add(*sums), F32)), s.at(record, 4))


@routine
def rms_scale(s: Simd, x: Value, columns: Value, epsilon: Value) -> Value:
    """1 / sqrt(mean(x^2) + epsilon), the f32 bits in an integer. epsilon: f32 bits."""
    b = s.b
    squares = s.variable(s.const(F32X, 0.0))
    with s.loop(b.sdiv(b.add(columns, s.i64(15)), s.i64(16))) as i:
        v = s.load(F32X, s.at(x, i, VECTOR))
        squares.set(s.fma(v, v, squares.get()))
    mean = b.fdiv(s.total(squares.get()), b.sitofp(columns, F32))
    root = s.call("llvm.sqrt.f32", F32, b.fadd(mean, s.float_of(epsilon)))
    return s.bits_of(b.fdiv(s.f32(1.0), root))


@routine
def scale_by(s: Simd, x: Value, weight: Value, scale: Value, out: Value, addend: Value, vectors: Value) -> None:
    """out = x * scale * weight, plus addend where its address is not 0."""
    b = s.b
    factor = s.splat(s.float_of(scale))
    with s.loop(vectors) as i:
        at = s.at(s.i64(0), i, VECTOR)
        y = s.variable(b.fmul(b.fmul(s.load(F32X, b.add(x, at)), factor), s.load(F32X, b.add(weight, at))))
        with b.if_then(b.icmp_unsigned("!=", addend, s.i64(0))):
            y.set(b.fadd(s.load(F32X, b.add(addend, at)), y.get()))
        s.store(y.get(), b.add(out, at))


def _norm(op: int, step: int, chunk: int) -> int:
    columns, epsilon, weight = word(op, COLUMNS), word(op, EPSILON), word(op, OTHER)
    spans, quants, addend = word(op, SPANS), word(op, QUANTS), word(op, ADDEND)
    start = chunk * word(op, ROWS_PER_CHUNK)
    end = start + word(op, ROWS_PER_CHUNK)
    rows = word(step, word(op, OP_ROW_COUNT))
    if end > rows:
        end = rows
    for row in range(start, end):
        x = word(op, X) + row * word(op, X_STRIDE)
        out = word(op, OUT) + row * word(op, OUT_STRIDE)
        base = addend
        if addend != 0:
            base = addend + row * word(op, OUT_STRIDE)
        scale_by(x, weight, rms_scale(x, columns, epsilon), out, base, 2 * spans)
        if quants != 0:
            to = quants + row * word(op, QUANTS_STRIDE)
            quantize_spans(out, to, word(op, RECORDS) + row * word(op, RECORDS_STRIDE), spans)
    return 0


NORM = Kernel("norm", _norm, (word, rms_scale, scale_by, quantize_spans))


def _quantize(op: int, step: int, chunk: int) -> int:
    spans = word(op, SPANS)
    units = (spans + UNIT_SPANS - 1) // UNIT_SPANS
    first = (chunk % units) * UNIT_SPANS
    count = spans - first
    if count > UNIT_SPANS:
        count = UNIT_SPANS
    start = chunk // units * word(op, ROWS_PER_CHUNK)
    end = start + word(op, ROWS_PER_CHUNK)
    rows = word(step, word(op, OP_ROW_COUNT))
    if end > rows:
        end = rows
    for row in range(start, end):
        x = word(op, X) + row * word(op, X_STRIDE) + first * SPAN * 4
        to = word(op, QUANTS) + row * word(op, QUANTS_STRIDE) + first * SPAN
        records = word(op, RECORDS) + row * word(op, RECORDS_STRIDE) + first * RECORD
        quantize_spans(x, to, records, count)
    return 0


QUANTIZE = Kernel("quantize", _quantize, (word, quantize_spans))


def _gated(name: str, activation: Callable[[Simd, Value], Value]) -> Kernel:
    @routine
    def gate(s: Simd, x: Value, up: Value, out: Value, vectors: Value) -> None:
        """out = activation(x) * up."""
        with s.loop(vectors) as i:
            at = s.at(s.i64(0), i, VECTOR)
            y = activation(s, s.load(F32X, s.b.add(x, at)))
            s.store(s.b.fmul(y, s.load(F32X, s.b.add(up, at))), s.b.add(out, at))

    def control(op: int, step: int, chunk: int) -> int:
        spans, quants = word(op, SPANS), word(op, QUANTS)
        units = (spans + UNIT_SPANS - 1) // UNIT_SPANS
        first = (chunk % units) * UNIT_SPANS
        count = spans - first
        if count > UNIT_SPANS:
            count = UNIT_SPANS
        start = chunk // units * word(op, ROWS_PER_CHUNK)
        end = start + word(op, ROWS_PER_CHUNK)
        rows = word(step, word(op, OP_ROW_COUNT))
        if end > rows:
            end = rows
        offset = first * SPAN * 4
        for row in range(start, end):
            out = word(op, OUT) + row * word(op, OUT_STRIDE) + offset
            x = word(op, X) + row * word(op, X_STRIDE) + offset
            gate(x, word(op, OTHER) + row * word(op, OTHER_STRIDE) + offset, out, 2 * count)
            if quants != 0:
                to = quants + row * word(op, QUANTS_STRIDE) + first * SPAN
                quantize_spans(out, to, word(op, RECORDS) + row * word(op, RECORDS_STRIDE) + first * RECORD, count)
        return 0

    return Kernel(name, control, (word, gate, quantize_spans))


GATED = {"silu": _gated("gated_silu", Simd.silu), "gelu": _gated("gated_gelu", Simd.gelu)}


@routine
def copy_vectors(s: Simd, x: Value, out: Value, vectors: Value) -> None:
    with s.loop(vectors) as i:
        s.store(s.load(F32X, s.at(x, i, VECTOR)), s.at(out, i, VECTOR))


def _take(op: int, step: int, chunk: int) -> int:
    row = word(word(step, WANTED_ROWS), chunk)
    copy_vectors(word(op, X) + row * word(op, X_STRIDE), word(op, OUT) + chunk * word(op, OUT_STRIDE), 2 * word(op, SPANS))
    return 0


TAKE = Kernel("take", _take, (word, copy_vectors))
