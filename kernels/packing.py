"""Packed weights: one layout for every processor, made from GGUF's blocks when a model is loaded.

16 output rows are interleaved, 4 input values deep: a 64-byte vector holds 4 values of each of 16 rows, so a 32-bit
lane belongs to one row and a row's sum never crosses lanes. Rows are padded to 16 with zero blocks; otherwise packed
bytes are GGUF's bytes in another order. A *span* is 32 input values, eight such vectors.

A block's scales stand before its weights, so that a kernel reads memory from front to back: reaching ahead for them
costs a wait that the processor does not foresee, and with blocks of 256 values half the speed.

A packing says how a block type is laid out (`pack`, NumPy) and how a kernel reads it back (`span`, emitted code).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from edgeinfer.formats.blocks import BY_NAME, IQ4_VALUES, MXFP4_VALUES
from edgeinfer.kernels.cpu.simd import BYTES, F32X, I8X, I16X, I32X, Simd, Value

ROWS = 16  # output rows of a tile
SPAN = 32  # input values that share an activation scale
_VALUES_AT_ONCE = 1 << 18  # what lies between GGUF's blocks and the packed ones is to stay in the cache


Step = Callable[[Value], Iterator[tuple[Value, Value]]]


@dataclass(frozen=True)
class Span:
    """32 input values of 16 rows as a kernel needs them: 8 groups of 4 values, 8 BYTES vectors.

    step(i): emitted in a loop, for i = 0 .. STEPS - 1 (64-bit): the two vectors of step i, each as (its group, BYTES).
    A loop, because LLVM would otherwise keep all eight vectors alive. Where a span has two scales, the steps of the
    first half of the values come first; otherwise groups may come in any order (integer sums are exact).
    scales: one F32X for 32 values, or two for 16 each. minimums: likewise, added to every value; or None.
    """

    step: Step
    scales: list[Value]
    minimums: list[Value] | None = None


STEPS = 4


class Packing:
    """A block type's packed layout. Subclasses register themselves under the GGUF type's name."""

    by_name: ClassVar[dict[str, type[Packing]]] = {}

    name: ClassVar[str]
    values: ClassVar[int]  # per block, in a row
    nbytes: ClassVar[int]  # per block of one row; a packed block holds 16 rows
    quantized: ClassVar[bool] = True  # read by `span`, for int8 activations; else by `floats`, for f32 ones
    bits: ClassVar[int]  # of a weight byte as read, with its sign if it has one
    signed: ClassVar[bool] = False
    offset: ClassVar[int] = 0  # subtracted from every stored weight

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            Packing.by_name[cls.name] = cls

    @classmethod
    def tile_bytes(cls, columns: int) -> int:
        """Bytes of 16 packed rows."""
        return columns // cls.values * cls.nbytes * ROWS

    @classmethod
    def spans(cls, columns: int) -> int:
        """Spans of a row, the matmul's SPANS; for weights that stay floats every column is one."""
        return columns // SPAN if cls.quantized else columns

    @classmethod
    def pack(cls, raw: np.ndarray, columns: int) -> np.ndarray:
        """GGUF rows, uint8 (rows, row_bytes), to packed tiles, uint8 (ceil(rows / 16), tile_bytes)."""
        tiles, tile_bytes = -(-len(raw) // ROWS), cls.tile_bytes(columns)
        packed = np.empty((tiles, tile_bytes), np.uint8)
        at_once = max(1, _VALUES_AT_ONCE // (ROWS * columns))
        for first in range(0, tiles, at_once):
            rows = raw[first * ROWS : (first + at_once) * ROWS]
            if len(rows) % ROWS:
                rows = np.concatenate([rows, np.zeros((-len(rows) % ROWS, rows.shape[1]), np.uint8)])
            blocks = rows.reshape(-1, ROWS, columns // cls.values, cls.nbytes)
            packed[first : first + at_once] = cls.pack_blocks(blocks.transpose(0, 2, 1, 3)).reshape(-1, tile_bytes)
        return packed

    @classmethod
    def pack_blocks(cls, blocks: np.ndarray) -> np.ndarray:
        """uint8 (tiles, blocks, 16 rows, nbytes) -> uint8 (tiles, blocks, 16 * nbytes)."""
        raise NotImplementedError

    @classmethod
    def span(cls, s: Simd, block: Value, index: Value) -> Span:
        """Span `index` (64-bit; 0 where a block is one span) of the packed block at an address."""
        raise NotImplementedError

    @classmethod
    def floats(cls, s: Simd, block: Value) -> Value:
        """The weights of 16 rows in one column, F32X."""
        raise NotImplementedError


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


class Q4_0(Packing):  # noqa: N801
    name, values, nbytes, bits, offset = "Q4_0", 32, 18, 4, 8

    @classmethod
    def pack_blocks(cls, blocks: np.ndarray) -> np.ndarray:
        return np.concatenate([by_row(blocks[..., :2]), interleave(blocks[..., 2:])], -1)

    @classmethod
    def span(cls, s: Simd, block: Value, index: Value) -> Span:
        return Span(nibbles(s, s.at(block, 32)), [halves(s, block)])


class Q4_1(Packing):  # noqa: N801
    name, values, nbytes, bits = "Q4_1", 32, 20, 4

    @classmethod
    def pack_blocks(cls, blocks: np.ndarray) -> np.ndarray:
        return np.concatenate([by_row(blocks[..., :2]), by_row(blocks[..., 2:4]), interleave(blocks[..., 4:])], -1)

    @classmethod
    def span(cls, s: Simd, block: Value, index: Value) -> Span:
        return Span(nibbles(s, s.at(block, 64)), [halves(s, block)], [halves(s, s.at(block, 32))])


class Q8_0(Packing):  # noqa: N801
    name, values, nbytes, bits, signed = "Q8_0", 32, 34, 8, True

    @classmethod
    def pack_blocks(cls, blocks: np.ndarray) -> np.ndarray:
        return np.concatenate([by_row(blocks[..., :2]), interleave(blocks[..., 2:])], -1)

    @classmethod
    def span(cls, s: Simd, block: Value, index: Value) -> Span:
        return Span(whole_bytes(s, s.at(block, 32)), [halves(s, block)])


class Q5_0(Packing):  # noqa: N801
    name, values, nbytes, bits, offset = "Q5_0", 32, 22, 5, 16

    @classmethod
    def pack_blocks(cls, blocks: np.ndarray) -> np.ndarray:
        b: Any = BY_NAME[cls.name].blocks(blocks)[..., 0]
        fifth = group_words(np.unpackbits(b["qh"], axis=-1, bitorder="little"))
        codes = unpack_words(group_words(b["qs"]), 4, 16) | fifth << np.uint32(4)
        numbers = [words_by_row(b[field]) for field in ("d", "m") if field in b.dtype.names]
        return np.concatenate([*numbers, planes(codes, 4, 1)[..., 0, :]], -1)

    @classmethod
    def span(cls, s: Simd, block: Value, index: Value) -> Span:
        return Span(from_planes(s, s.at(block, 32), 4, 1), [halves(s, block)])


class Q5_1(Q5_0):  # noqa: N801
    name, nbytes, offset = "Q5_1", 24, 0

    @classmethod
    def span(cls, s: Simd, block: Value, index: Value) -> Span:
        return Span(from_planes(s, s.at(block, 64), 4, 1), [halves(s, block)], [halves(s, s.at(block, 32))])


class IQ4_NL(Q4_0):  # noqa: N801
    name, bits, signed, offset = "IQ4_NL", 8, True, 0

    @classmethod
    def span(cls, s: Simd, block: Value, index: Value) -> Span:
        return Span(nibbles(s, s.at(block, 32), IQ4_VALUES), [halves(s, block)])


class MXFP4(Packing):
    name, values, nbytes, bits, signed = "MXFP4", 32, 17, 5, True

    @classmethod
    def pack_blocks(cls, blocks: np.ndarray) -> np.ndarray:
        return np.concatenate([by_row(blocks[..., :1]), interleave(blocks[..., 1:])], -1)

    @classmethod
    def span(cls, s: Simd, block: Value, index: Value) -> Span:
        # half of 2^(e - 127), since the table is doubled; below 2 that half is subnormal
        b, c = s.b, partial(s.const, I32X)
        e = b.zext(s.load(I8X, block), I32X)
        subnormal, normal = b.shl(b.add(e, c(1)), c(21)), b.shl(b.sub(e, c(1)), c(23))
        scale = b.bitcast(b.select(b.icmp_unsigned("<", e, c(2)), subnormal, normal), F32X)
        return Span(nibbles(s, s.at(block, 16), MXFP4_VALUES), [scale])


class F32(Packing):
    name, values, nbytes, quantized = "F32", 1, 4, False

    @classmethod
    def pack_blocks(cls, blocks: np.ndarray) -> np.ndarray:
        return words_by_row(blocks.view(f"u{cls.nbytes}")[..., 0])

    @classmethod
    def floats(cls, s: Simd, block: Value) -> Value:
        return s.load(F32X, block)


class F16(F32):
    name, nbytes = "F16", 2

    @classmethod
    def floats(cls, s: Simd, block: Value) -> Value:
        return halves(s, block)


class BF16(F32):
    name, nbytes = "BF16", 2

    @classmethod
    def floats(cls, s: Simd, block: Value) -> Value:
        """bfloat16 is the upper half of a float."""
        return s.b.bitcast(s.b.shl(s.b.zext(s.load(I16X, block), I32X), s.const(I32X, 16)), F32X)


def packing(name: str) -> type[Packing] | None:
    """The packing of a GGUF block type by name, or None for types that hold no weights."""
    return Packing.by_name.get(name)


# The 256-value types register themselves. Last, because they derive from what stands above.
from edgeinfer.kernels import packing_k  # noqa: E402, F401
