"""What packings are made of: bytes of 16 rows interleaved in NumPy, and the emitted code that steps through them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from edgeinfer.kernels.cpu.simd import BYTES, I16X, Simd, Value
from edgeinfer.kernels.packing import Step


def interleave(field: np.ndarray) -> np.ndarray:
    """uint8 (..., 16 rows, n): each row's bytes in input order -> (..., 16 n): four bytes of each row in turn."""
    words = np.ascontiguousarray(field).view(np.uint32)
    return np.ascontiguousarray(np.moveaxis(words, -1, -2)).view(np.uint8).reshape(*field.shape[:-2], -1)


def by_row(field: np.ndarray) -> np.ndarray:
    """uint8 (..., 16 rows, n): one number of n bytes a row -> (..., 16 n)."""
    return np.ascontiguousarray(field).reshape(*field.shape[:-2], -1)


def words_by_row(numbers: np.ndarray) -> np.ndarray:
    """(..., 16 rows) numbers of n bytes -> uint8 (..., 16 n)."""
    return np.ascontiguousarray(numbers).view(np.uint8)


def halves(s: Simd, address: Value) -> Value:
    """16 half-precision numbers, one a row, as F32X."""
    return s.half_to_f32(s.load(I16X, address))


def group_words(field: np.ndarray) -> np.ndarray:
    """uint8 (..., 16 rows, n), a byte a value or a field of one -> uint32 (n / 4, ..., 16 rows): a word a group."""
    return np.ascontiguousarray(np.moveaxis(field.view(np.uint32), -1, 0))


def unpack_words(words: np.ndarray, width: int, run: int) -> np.ndarray:
    """formats.blocks.unpack_bits for `group_words`: uint32 (n, ...) -> (n * 8 / width, ...), codes in input order."""
    grouped = words.reshape(-1, 1, run // 4, *words.shape[1:])
    shifts = np.arange(0, 8, width, dtype=np.uint32).reshape(-1, *[1] * words.ndim)
    return _cut(grouped, shifts, width).reshape(-1, *words.shape[1:])


def _cut(words: np.ndarray, start: Any, width: int) -> np.ndarray:
    """Bits start .. start + width - 1 of every byte."""
    cut: np.ndarray = (words >> start) & np.uint32(((1 << width) - 1) * 0x01010101)
    return cut


def planes(codes: np.ndarray, *widths: int) -> np.ndarray:
    """Weights cut into planes of some bits each, the lowest first: uint32 codes (groups, ..., 16 rows) in input order
    -> uint8 (..., groups / 8 spans, 64 * sum(widths)). A plane of w bits is w vectors a span: group g's bits are
    g * w .. of the vectors' bytes in turn.
    """
    spans = codes.reshape(-1, 8, *codes.shape[1:])
    vectors, start = [], 0
    for width in widths:
        fields = _cut(spans, np.uint32(start), width).reshape(len(spans), width, 8 // width, *codes.shape[1:])
        joined = fields[:, :, 0]
        for k in range(1, 8 // width):
            joined |= fields[:, :, k] << np.uint32(width * k)
        vectors.append(joined)
        start += width
    by_span = np.moveaxis(np.concatenate(vectors, axis=1), (0, 1), (-3, -2))  # (..., spans, sum(widths), 16)
    return np.ascontiguousarray(by_span).view(np.uint8).reshape(*by_span.shape[:-2], -1)


def from_planes(s: Simd, address: Value, *widths: int) -> Step:
    """Steps through a span that `planes` made: step i is groups 2i and 2i + 1, whose fields are neighbours."""

    def step(i: Value) -> Iterator[tuple[Value, Value]]:
        parts, plane, to = [], address, 0
        for width in widths:
            bit = s.b.mul(i, s.i64(2 * width))
            both = s.load(BYTES, s.at(plane, s.b.lshr(bit, s.i64(3)), 64))
            if width < 4:
                both = s.shift_right(both, s.b.and_(bit, s.i64(7)))
            parts.append((s.bits(both, 0, width, to), s.bits(both, width, width, to)))
            plane, to = s.at(plane, 64 * width), to + width
        for k in range(2):
            weights = parts[0][k]
            for part in parts[1:]:
                weights = s.b.or_(weights, part[k])
            yield s.b.add(s.b.add(i, i), s.i64(k)), weights

    return step


def nibbles(s: Simd, address: Value, table: Sequence[int] | None = None) -> Step:
    """Steps through 256 bytes: the low nibbles are values 0..15, the high ones 16..31; or what a table has for them."""

    def step(i: Value) -> Iterator[tuple[Value, Value]]:
        both = s.load(BYTES, s.at(address, i, 64))
        for start in (0, 4):
            codes = s.bits(both, start, 4)
            yield s.b.add(i, s.i64(start)), codes if table is None else s.lookup(table, codes)

    return step


def whole_bytes(s: Simd, address: Value) -> Step:
    """Steps through 512 bytes, one a weight."""

    def step(i: Value) -> Iterator[tuple[Value, Value]]:
        for group in (s.b.add(i, i), s.b.add(s.b.add(i, i), s.i64(1))):
            yield group, s.load(BYTES, s.at(address, group, 64))

    return step
