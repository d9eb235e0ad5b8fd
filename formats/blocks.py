"""The block types of GGML: how a tensor's values are packed into bytes, and how they decode to float32.

A block type is one decorated function: the decorator gives its id, the values in a block and the fields of a block in
file order; the function turns an array of blocks into floats. Defining it registers it in `BY_ID` and `BY_NAME`.

The arithmetic is that of ggml's dequantize functions, operation by operation, so that results are equal bit for bit
(ggml-common.h has the layouts, ggml-quants.c the functions).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Blocks = npt.NDArray[np.void]  # structured: one element a block
Unpack = Callable[[Blocks], Floats]  # (..., n) blocks -> (..., n, values) float32

_F16 = "<f2"
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # E2M1, doubled so that all are integers


@dataclass(frozen=True, eq=False)
class BlockType:
    """One packing of values into bytes. `dtype` is the structured NumPy type of a block, with GGML's field names."""

    name: str
    id: int  # ggml's number for the type, as in the file
    values: int  # per block
    dtype: np.dtype[Any]
    unpack: Unpack | None = field(repr=False)  # None: an integer or double type, which carries no weights

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.dtype.itemsize

    @property
    def decodable(self) -> bool:
        """Whether `decode` works: true of every type that holds weights."""
        return self.unpack is not None

    def row_bytes(self, n_values: int) -> int:
        """Bytes of a row of `n_values`; ValueError when that is not a whole number of blocks."""
        blocks, rest = divmod(n_values, self.values)
        if rest:
            raise ValueError(f"a row of {n_values} values is not a whole number of {self.name} blocks of {self.values}")
        return blocks * self.nbytes

    def blocks(self, raw: Bytes) -> Blocks:
        """uint8 `raw` (..., row_bytes) -> structured (..., row_blocks), fields by name; no copy if contiguous."""
        if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] % self.nbytes:
            found = f"{raw.dtype} of shape {raw.shape}"
            raise ValueError(f"{self.name} needs uint8 rows of whole {self.nbytes}-byte blocks, not {found}")
        return np.ascontiguousarray(raw).view(self.dtype)

    def decode(self, raw: Bytes) -> Floats:
        """uint8 `raw` (..., row_bytes) -> float32 (..., row_values). TypeError when the type carries no weights."""
        if self.unpack is None:
            raise TypeError(f"{self.name} tensors hold integers or doubles, not weights")
        blocks = self.blocks(raw)
        with np.errstate(all="ignore"):  # a scale may be inf or NaN; whoever uses the values checks them
            return self.unpack(blocks).reshape(*blocks.shape[:-1], blocks.shape[-1] * self.values)


BY_ID: dict[int, BlockType] = {}
BY_NAME: dict[str, BlockType] = {}


def _register(block_type: BlockType) -> BlockType:
    BY_ID[block_type.id] = BY_NAME[block_type.name] = block_type
    return block_type


def _block_type(id: int, values: int, fields: Sequence[tuple[Any, ...]]) -> Callable[[Unpack], BlockType]:
    """Make the function below it the block type of its name."""
    return lambda unpack: _register(BlockType(unpack.__name__, id, values, np.dtype(list(fields)), unpack))


def _plain(name: str, id: int, dtype: str, unpack: Unpack | None = None) -> BlockType:
    return _register(BlockType(name, id, 1, np.dtype(dtype), unpack))


def unpack_bits(packed: Bytes, width: int, run: int) -> Bytes:
    """Split bytes (..., n) into fields of `width` bits: (..., n * 8 // width).

    Each run of `run` bytes yields the lowest fields of all its bytes first, then the next higher ones.
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    *lead, n = packed.shape
    fields: Bytes = (packed.reshape(*lead, n // run, 1, run) >> shifts) & np.uint8((1 << width) - 1)
    return fields.reshape(*lead, n * 8 // width)


def k_scales_mins(scales: Bytes) -> tuple[Bytes, Bytes]:
    """The 8 scales and 8 mins, 6 bits each, in the 12 bytes of a Q4_K or Q5_K block: (..., 12) -> two (..., 8)."""
    low, high, rest = scales[..., 0:4], scales[..., 4:8], scales[..., 8:12]
    scale = np.concatenate((low & 63, (rest & 15) | ((low >> 2) & 48)), axis=-1)
    minimum = np.concatenate((high & 63, (rest >> 4) | ((high >> 2) & 48)), axis=-1)
    return scale, minimum


def q3_k_scales(scales: Bytes) -> npt.NDArray[np.int8]:
    """The 16 signed scales, 6 bits each, in the 12 bytes of a Q3_K block: (..., 12) -> (..., 16) in -32..31."""
    codes = _joined(unpack_bits(scales[..., :8], 4, 8), unpack_bits(scales[..., 8:], 2, 4), 4)
    signed: npt.NDArray[np.int8] = codes.astype(np.int8) - np.int8(32)
    return signed


def _joined(low: Bytes, high: Bytes, low_bits: int) -> Bytes:
    """Codes from their low and their high bits."""
    codes: Bytes = low | (high << np.uint8(low_bits))
    return codes


def _centred(codes: npt.NDArray[Any], zero: int) -> Floats:
    """Unsigned codes as float32, with `zero` standing for 0."""
    values: Floats = codes.astype(np.float32) - np.float32(zero)
    return values


def _f32(values: npt.NDArray[Any]) -> Floats:
    return values.astype(np.float32)


def _each(values: npt.NDArray[Any]) -> Floats:
    """One number per block or group as float32, with an axis for the values that it applies to."""
    return values.astype(np.float32)[..., None]


def _grouped(values: npt.NDArray[Any], groups: int) -> Floats:
    """Codes (..., n) as float32 (..., groups, n // groups)."""
    *lead, n = values.shape
    return values.astype(np.float32).reshape(*lead, groups, n // groups)


F32 = _plain("F32", 0, "<f4", lambda b: _f32(b)[..., None])
F16 = _plain("F16", 1, "<f2", lambda b: _f32(b)[..., None])
BF16 = _plain("BF16", 30, "<u2", lambda b: (b.astype(np.uint32) << 16).view(np.float32)[..., None])
I8 = _plain("I8", 24, "i1")
I16 = _plain("I16", 25, "<i2")
I32 = _plain("I32", 26, "<i4")
I64 = _plain("I64", 27, "<i8")
F64 = _plain("F64", 28, "<f8")


@_block_type(2, 32, [("d", _F16), ("qs", "u1", 16)])
def Q4_0(b: Blocks) -> Floats:
    return _each(b["d"]) * _centred(unpack_bits(b["qs"], 4, 16), 8)


@_block_type(3, 32, [("d", _F16), ("m", _F16), ("qs", "u1", 16)])
def Q4_1(b: Blocks) -> Floats:
    return _each(b["d"]) * _f32(unpack_bits(b["qs"], 4, 16)) + _each(b["m"])


@_block_type(6, 32, [("d", _F16), ("qh", "u1", 4), ("qs", "u1", 16)])
def Q5_0(b: Blocks) -> Floats:
    q = _joined(unpack_bits(b["qs"], 4, 16), unpack_bits(b["qh"], 1, 1), 4)
    return _each(b["d"]) * _centred(q, 16)


@_block_type(7, 32, [("d", _F16), ("m", _F16), ("qh", "u1", 4), ("qs", "u1", 16)])
def Q5_1(b: Blocks) -> Floats:
    q = _joined(unpack_bits(b["qs"], 4, 16), unpack_bits(b["qh"], 1, 1), 4)
    return _each(b["d"]) * _f32(q) + _each(b["m"])


@_block_type(8, 32, [("d", _F16), ("qs", "i1", 32)])
def Q8_0(b: Blocks) -> Floats:
    return _each(b["d"]) * _f32(b["qs"])


@_block_type(10, 256, [("scales", "u1", 16), ("qs", "u1", 64), ("d", _F16), ("dmin", _F16)])
def Q2_K(b: Blocks) -> Floats:
    scale = _each(b["d"]) * _f32(b["scales"] & 15)  # (..., 16): one a group of 16 values
    minimum = _each(b["dmin"]) * _f32(b["scales"] >> 4)
    return _each(scale) * _grouped(unpack_bits(b["qs"], 2, 32), 16) - _each(minimum)


@_block_type(11, 256, [("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", _F16)])
def Q3_K(b: Blocks) -> Floats:
    q = _joined(unpack_bits(b["qs"], 2, 32), unpack_bits(b["hmask"], 1, 32), 2)
    return _each(_each(b["d"]) * _f32(q3_k_scales(b["scales"]))) * _grouped(_centred(q, 4), 16)


@_block_type(12, 256, [("d", _F16), ("dmin", _F16), ("scales", "u1", 12), ("qs", "u1", 128)])
def Q4_K(b: Blocks) -> Floats:
    return _k_affine(b, unpack_bits(b["qs"], 4, 32))


@_block_type(13, 256, [("d", _F16), ("dmin", _F16), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
def Q5_K(b: Blocks) -> Floats:
    return _k_affine(b, _joined(unpack_bits(b["qs"], 4, 32), unpack_bits(b["qh"], 1, 32), 4))


def _k_affine(b: Blocks, q: Bytes) -> Floats:
    scales, mins = k_scales_mins(b["scales"])  # (..., 8): one a group of 32 values
    return _each(_each(b["d"]) * _f32(scales)) * _grouped(q, 8) - _each(_each(b["dmin"]) * _f32(mins))


@_block_type(14, 256, [("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", _F16)])
def Q6_K(b: Blocks) -> Floats:
    q = _joined(unpack_bits(b["ql"], 4, 64), unpack_bits(b["qh"], 2, 32), 4)
    return _each(_each(b["d"]) * _f32(b["scales"])) * _grouped(_centred(q, 32), 16)


@_block_type(20, 32, [("d", _F16), ("qs", "u1", 16)])
def IQ4_NL(b: Blocks) -> Floats:
    return _each(b["d"]) * np.array(IQ4_VALUES, np.float32)[unpack_bits(b["qs"], 4, 16)]


@_block_type(23, 256, [("d", _F16), ("scales_h", "u1", 2), ("scales_l", "u1", 4), ("qs", "u1", 128)])
def IQ4_XS(b: Blocks) -> Floats:
    scales = _joined(unpack_bits(b["scales_l"], 4, 1), unpack_bits(b["scales_h"], 2, 1), 4)  # (..., 8)
    q = np.array(IQ4_VALUES, np.float32)[unpack_bits(b["qs"], 4, 16)]
    return _each(_each(b["d"]) * _centred(scales, 32)) * _grouped(q, 8)


@_block_type(39, 32, [("e", "u1"), ("qs", "u1", 16)])
def MXFP4(b: Blocks) -> Floats:
    e = b["e"].astype(np.uint32)  # half of 2^(e - 127), since the table is doubled; below 2 that half is subnormal
    scale = np.where(e < 2, np.uint32(0x00200000) << e, (e - np.uint32(1)) << np.uint32(23)).view(np.float32)
    return _each(scale) * np.array(MXFP4_VALUES, np.float32)[unpack_bits(b["qs"], 4, 16)]
