"""Packing as a copy: for block types whose packed form holds GGUF's bytes in another order, by pairs.

The NumPy definition in kernels/packing*.py says what the order is; this does the same without the GIL.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from edgeinfer.kernels.cpu.simd import I16, I32, Simd, Value
from edgeinfer.kernels.jit import Code, Kernel, routine
from edgeinfer.kernels.packing import ROWS, Packing
from edgeinfer.kernels.packings import PACKINGS


@routine
def copy_block(s: Simd, source: Value, order: Value, pairs: Value, out: Value) -> None:
    """out[i] = the two bytes at source + order[i]. order: i32 (pairs,)."""
    with s.loop(pairs) as i:
        s.store(s.load(I16, s.at(source, s.wide(s.load(I32, s.at(order, i, 4))))), s.at(out, i, 2))


def _repack(raw: int, row_bytes: int, block_bytes: int, order: int, blocks: int, tiles: int, out: int) -> int:
    pairs = ROWS * block_bytes // 2
    for tile in range(tiles):
        for block in range(blocks):
            source = raw + tile * ROWS * row_bytes + block * block_bytes
            copy_block(source, order, pairs, out + (tile * blocks + block) * 2 * pairs)
    return 0


REPACK = Kernel("repack", _repack, (copy_block,))


@cache
def _order(name: str) -> np.ndarray | None:
    """For each pair of bytes of a packed block, where it stands among 16 rows of blocks; None where packing is no such copy."""
    packing = PACKINGS[name]
    n = ROWS * packing.nbytes
    index = np.arange(n)
    low, high = (packing.pack((part % 256).astype(np.uint8).reshape(ROWS, -1), packing.values) for part in (index, index >> 8))
    found = low.astype(np.int64) + 256 * high.astype(np.int64)
    found = found.reshape(-1)
    if not np.array_equal(np.sort(found), index) or (found[1::2] != found[::2] + 1).any():
        return None
    return found[::2]


def pack(packing: type[Packing], raw: np.ndarray, columns: int, code: Code) -> np.ndarray:
    """What packing.pack gives, by this kernel where the type allows it. raw: uint8 (rows, row_bytes), rows contiguous."""
    order, whole = _order(packing.name), len(raw) // ROWS
    if order is None or not raw.flags.c_contiguous:
        return packing.pack(raw, columns)
    row_bytes = raw.shape[1]
    offsets = (order // packing.nbytes * row_bytes + order % packing.nbytes).astype(np.int32)
    tiles = np.empty((-(-len(raw) // ROWS), packing.tile_bytes(columns)), np.uint8)
    run = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * REPACK.arguments)(code.address(REPACK))
    run(raw.ctypes.data, row_bytes, packing.nbytes, offsets.ctypes.data, columns // packing.values, whole, tiles.ctypes.data)
    if whole < len(tiles):
        tiles[whole:] = packing.pack(raw[whole * ROWS :], columns)
    return tiles
