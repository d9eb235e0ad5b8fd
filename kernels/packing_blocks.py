"""The packings of GGUF's types with blocks of 32 values, and of float weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from edgeinfer.formats.blocks import BY_NAME, IQ4_VALUES, MXFP4_VALUES
from edgeinfer.kernels.cpu.simd import F32X, I8X, I16X, I32X, Simd, Value
from edgeinfer.kernels.packing import Packing, Span
from edgeinfer.kernels.packing_bits import (
    by_row,
    from_planes,
    group_words,
    halves,
    interleave,
    nibbles,
    planes,
    unpack_words,
    whole_bytes,
    words_by_row,
)


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
