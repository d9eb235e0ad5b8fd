"""The packings of GGUF's types with blocks of 256 values, whose scales are themselves numbers of 4, 6 or 8 bits.

A packed block is the half-precision numbers that multiply them, 16 of each, one a row; then the small scales of its 8
spans; then the weights of its 8 spans, cut into planes of 4, 2 or 1 bits. Scales come out as ggml's decoder makes them:
one multiplication in f32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from edgeinfer.formats.blocks import BY_NAME, IQ4_VALUES, Bytes, k_scales_mins, q3_k_scales, unpack_bits
from edgeinfer.kernels.cpu.simd import I8X, I32X, Simd, Value
from edgeinfer.kernels.packing import ROWS, SPAN, Packing, Span, Step
from edgeinfer.kernels.packing_bits import from_planes, group_words, halves, planes, unpack_words, words_by_row

_SPANS = 8


class _KPacking(Packing):
    """Blocks of 8 spans."""

    values = SPAN * _SPANS
    widths: ClassVar[tuple[int, ...]]  # of the planes, in bits
    scale_bytes: ClassVar[int]  # of 16 rows, per span

    @classmethod
    def pack_blocks(cls, blocks: np.ndarray) -> np.ndarray:
        b: Any = BY_NAME[cls.name].blocks(blocks)[..., 0]  # (tiles, blocks, 16 rows)
        numbers = [words_by_row(b[name]) for name in ("d", "dmin") if name in b.dtype.names]
        parts = cls.pack_scales(b), planes(cls.codes(b), *cls.widths)  # (tiles, blocks, 8 spans, bytes)
        return np.concatenate([*numbers, *(part.reshape(*b.shape[:-1], -1) for part in parts)], -1)

    @classmethod
    def codes(cls, b: Any) -> np.ndarray:
        """The weights as stored: structured blocks (..., 16 rows) -> uint32 (64 groups, ..., 16 rows)."""
        raise NotImplementedError

    @classmethod
    def pack_scales(cls, b: Any) -> Bytes:
        """The small scales: structured blocks (..., 16 rows) -> uint8 (..., 8 spans, scale_bytes)."""
        raise NotImplementedError

    @classmethod
    def span(cls, s: Simd, block: Value, index: Value) -> Span:
        weight_bytes = 64 * sum(cls.widths)
        weights_at = cls.nbytes * ROWS - _SPANS * weight_bytes
        scales = s.at(s.at(block, weights_at - _SPANS * cls.scale_bytes), index, cls.scale_bytes)
        weights = s.at(s.at(block, weights_at), index, weight_bytes)
        return Span(cls.step(s, weights), *cls.scales(s, scales, block))

    @classmethod
    def step(cls, s: Simd, weights: Value) -> Step:
        return from_planes(s, weights, *cls.widths)

    @classmethod
    def scales(cls, s: Simd, address: Value, numbers: Value) -> Iterator[list[Value]]:
        """The span's scales, and its minimums if the type has any, from its small scales and the block's numbers."""
        raise NotImplementedError


def _fields(field: Bytes, width: int, run: int) -> np.ndarray:
    """Codes of `width` bits, each run of `run` bytes holding the lowest of all its bytes first."""
    return unpack_words(group_words(field), width, run)


def _join(low: np.ndarray, high: np.ndarray, low_bits: int) -> np.ndarray:
    """Codes from their low and their high bits."""
    codes: np.ndarray = low | high << np.uint32(low_bits)
    return codes


def _small(s: Simd, v: Value, zero: int = 0) -> Value:
    """16 unsigned bytes as floats, with `zero` standing for 0."""
    wide = s.b.zext(v, I32X)
    return s.to_f32(s.b.sub(wide, s.const(I32X, zero)) if zero else wide)


def _per_span(scales: Bytes) -> Bytes:
    """uint8 (..., 16 rows, 8 n) -> (n, ..., 8 spans, 16 rows): the n numbers of each span."""
    grouped = scales.reshape(*scales.shape[:-1], _SPANS, -1)
    return np.ascontiguousarray(np.moveaxis(grouped, (-1, -3), (0, -1)))


def _lane_fields(numbers: Bytes, width: int) -> Bytes:
    """uint8 (..., 16) of `width` bits -> (..., 2 * width), as Simd.lane_fields reads them."""
    word = np.dtype(f"u{2 * width}")  # holds one field of each byte
    words = numbers.view(word)
    joined = words[..., :1].copy()
    for k in range(1, 8 // width):
        joined |= words[..., k : k + 1] << word.type(width * k)
    packed: Bytes = joined.view(np.uint8)
    return packed


def _pack_sixes(first: Bytes, second: Bytes) -> Bytes:
    """Two numbers of 6 bits for each of 16 rows: (..., 16) twice -> (..., 24)."""
    return np.concatenate([first | second << 6, _lane_fields(second >> np.uint8(2), 4)], -1)


def _sixes(s: Simd, address: Value) -> tuple[Value, Value]:
    """What `_pack_sixes` made, as two I8X."""
    mixed, upper = s.load(I8X, address), s.lane_fields(s.at(address, 16), 4)
    return s.bits(mixed, 0, 6), s.b.or_(s.bits(mixed, 6, 2), s.bits(upper, 0, 4, to=2))


class Q2_K(_KPacking):  # noqa: N801
    name, nbytes, bits, widths, scale_bytes = "Q2_K", 84, 2, (2,), 32

    @classmethod
    def codes(cls, b: Any) -> np.ndarray:
        return _fields(b["qs"], 2, 32)

    @classmethod
    def pack_scales(cls, b: Any) -> Bytes:
        return np.concatenate(list(_per_span(b["scales"])), -1)

    @classmethod
    def scales(cls, s: Simd, address: Value, numbers: Value) -> Iterator[list[Value]]:
        d, dmin = halves(s, numbers), s.b.fneg(halves(s, s.at(numbers, 32)))
        pairs = [s.load(I8X, address), s.load(I8X, s.at(address, 16))]
        yield [s.b.fmul(d, _small(s, s.bits(pair, 0, 4))) for pair in pairs]
        yield [s.b.fmul(dmin, _small(s, s.bits(pair, 4, 4))) for pair in pairs]


class Q3_K(_KPacking):  # noqa: N801
    name, nbytes, bits, widths, scale_bytes, offset = "Q3_K", 110, 3, (2, 1), 24, 4

    @classmethod
    def codes(cls, b: Any) -> np.ndarray:
        return _join(_fields(b["qs"], 2, 32), _fields(b["hmask"], 1, 32), 2)

    @classmethod
    def pack_scales(cls, b: Any) -> Bytes:
        return _pack_sixes(*_per_span((q3_k_scales(b["scales"]) + np.int8(32)).view(np.uint8)))

    @classmethod
    def scales(cls, s: Simd, address: Value, numbers: Value) -> Iterator[list[Value]]:
        d = halves(s, numbers)
        yield [s.b.fmul(d, _small(s, six, zero=32)) for six in _sixes(s, address)]


class Q4_K(_KPacking):  # noqa: N801
    name, nbytes, bits, scale_bytes = "Q4_K", 144, 4, 24
    widths: ClassVar[tuple[int, ...]] = (4,)

    @classmethod
    def codes(cls, b: Any) -> np.ndarray:
        return _fields(b["qs"], 4, 32)

    @classmethod
    def pack_scales(cls, b: Any) -> Bytes:
        return _pack_sixes(*(_per_span(numbers)[0] for numbers in k_scales_mins(b["scales"])))

    @classmethod
    def scales(cls, s: Simd, address: Value, numbers: Value) -> Iterator[list[Value]]:
        scale, minimum = _sixes(s, address)
        yield [s.b.fmul(halves(s, numbers), _small(s, scale))]
        yield [s.b.fmul(s.b.fneg(halves(s, s.at(numbers, 32))), _small(s, minimum))]


class Q5_K(Q4_K):  # noqa: N801
    name, nbytes, bits, widths = "Q5_K", 176, 5, (4, 1)

    @classmethod
    def codes(cls, b: Any) -> np.ndarray:
        return _join(_fields(b["qs"], 4, 32), _fields(b["qh"], 1, 32), 4)


class Q6_K(_KPacking):  # noqa: N801
    name, nbytes, bits, widths, scale_bytes, offset = "Q6_K", 210, 6, (4, 2), 32, 32

    @classmethod
    def codes(cls, b: Any) -> np.ndarray:
        return _join(_fields(b["ql"], 4, 64), _fields(b["qh"], 2, 32), 4)

    @classmethod
    def pack_scales(cls, b: Any) -> Bytes:
        return np.concatenate(list(_per_span(b["scales"].view(np.uint8))), -1)

    @classmethod
    def scales(cls, s: Simd, address: Value, numbers: Value) -> Iterator[list[Value]]:
        d = halves(s, numbers)
        eights = [s.load(I8X, address), s.load(I8X, s.at(address, 16))]
        yield [s.b.fmul(d, s.to_f32(s.b.sext(eight, I32X))) for eight in eights]


class IQ4_XS(_KPacking):  # noqa: N801
    name, nbytes, bits, widths, scale_bytes, signed = "IQ4_XS", 136, 8, (4,), 12, True

    @classmethod
    def codes(cls, b: Any) -> np.ndarray:
        return _fields(b["qs"], 4, 16)

    @classmethod
    def pack_scales(cls, b: Any) -> Bytes:
        low, high = unpack_bits(b["scales_l"], 4, 1), unpack_bits(b["scales_h"], 2, 1)
        fields = ((_per_span(low), 4), (_per_span(high), 2))
        return np.concatenate([_lane_fields(numbers[0], width) for numbers, width in fields], -1)

    @classmethod
    def step(cls, s: Simd, weights: Value) -> Step:
        codes = from_planes(s, weights, 4)
        return lambda i: ((group, s.lookup(IQ4_VALUES, code)) for group, code in codes(i))

    @classmethod
    def scales(cls, s: Simd, address: Value, numbers: Value) -> Iterator[list[Value]]:
        low, high = s.lane_fields(address, 4), s.lane_fields(s.at(address, 8), 2)
        yield [s.b.fmul(halves(s, numbers), _small(s, s.b.or_(low, s.bits(high, 0, 2, to=4)), zero=32))]
