"""Weights of a file, packed for the kernels one tensor at a time, each name used exactly once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgeinfer.formats.errors import ModelFormatError
from edgeinfer.formats.gguf import GGUF
from edgeinfer.kernels.packing import ROWS, Packing

_BLOCK_ROWS = 4096  # rows packed at a time: bounds what packing needs beside its result
_UNUSED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # taken by the rotary tables


class FileWeights:
    """What a Builder asks for (kernels.program.Weights), from a GGUF file. Leftovers are errors: see finish()."""

    def __init__(self, file: GGUF, progress: Callable[[float], None] | None = None) -> None:
        self._file = file
        self._left = {name for name in file.tensors if name not in _UNUSED}
        self._total = sum(t.nbytes for t in file.tensors.values())
        self._done = 0
        self._progress = progress
        self.streamed_bytes = 0  # of packed weights: what one decode step reads

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def packed(self, name: str) -> tuple[type[Packing], np.ndarray, int, int]:
        """Packing, tiles uint8 (tiles, tile_bytes), rows, columns. Raises ModelFormatError for a missing or odd tensor."""
        tensor = self._take(name, 2)
        packing = Packing.by_name.get(tensor.type.name)
        if packing is None:
            raise ModelFormatError(self._file.path, f"{name} is {tensor.type.name}, which no kernel here multiplies")
        rows, columns = tensor.shape
        raw = self._file.raw(name)
        tiles = np.empty((-(-rows // ROWS), packing.tile_bytes(columns)), np.uint8)
        for row in range(0, rows, _BLOCK_ROWS):
            part = raw[row : row + _BLOCK_ROWS]
            tiles[row // ROWS : (row + len(part) + ROWS - 1) // ROWS] = packing.pack(part, columns)
        self._file.release(name)
        self._done += tensor.nbytes
        self.streamed_bytes += tiles.nbytes
        if self._progress:
            self._progress(self._done / self._total)
        return packing, tiles, rows, columns

    def vector(self, name: str) -> np.ndarray:
        """f32 (n,)."""
        self._take(name, 1)
        return np.ascontiguousarray(self._file.array(name))

    def finish(self) -> None:
        """Raises ModelFormatError when tensors are left that the architecture did not ask for."""
        self._left.discard("token_embd.weight")  # looked up in the file itself
        if self._left:
            some = ", ".join(sorted(self._left)[:5])
            raise ModelFormatError(self._file.path, f"{len(self._left)} tensors that this architecture does not use: {some}")

    def _take(self, name: str, dimensions: int):  # type: ignore[no-untyped-def]
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise ModelFormatError(self._file.path, f"tensor {name} is missing")
        if len(tensor.shape) != dimensions:
            raise ModelFormatError(self._file.path, f"{name} has shape {tensor.shape}; expected {dimensions} dimensions")
        if name not in self._left:
            raise ModelFormatError(self._file.path, f"tensor {name} is asked for twice")
        self._left.remove(name)
        return tensor
