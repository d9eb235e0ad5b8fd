"""Packed weights: one layout for every processor, made from GGUF's blocks when a model is loaded.

16 output rows are interleaved, 4 input values deep: a 64-byte vector holds 4 values of each of 16 rows, so a 32-bit
lane belongs to one row and a row's sum never crosses lanes. Rows are padded to 16 with zero blocks; otherwise packed
bytes are GGUF's bytes in another order. A *span* is 32 input values, eight such vectors.

A block's scales stand before its weights, so that a kernel reads memory from front to back: reaching ahead for them
costs a wait that the processor does not foresee, and with blocks of 256 values half the speed.

A packing says how a block type is laid out (`pack`, NumPy) and how a kernel reads it back (`span`, emitted code).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgeinfer.kernels.cpu.simd import Simd, Value

ROWS = 16  # output rows of a tile
SPAN = 32  # input values that share an activation scale
STEPS = 4  # in a span
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


class Packing:
    """A block type's packed layout, under the GGUF type's name. All of them: kernels/packings.py."""

    name: ClassVar[str]
    values: ClassVar[int]  # per block, in a row
    nbytes: ClassVar[int]  # per block of one row; a packed block holds 16 rows
    quantized: ClassVar[bool] = True  # read by `span`, for int8 activations; else by `floats`, for f32 ones
    bits: ClassVar[int]  # of a weight byte as read, with its sign if it has one
    signed: ClassVar[bool] = False
    offset: ClassVar[int] = 0  # subtracted from every stored weight

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
