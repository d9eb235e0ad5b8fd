"""Weights of a file, packed for the kernels ahead of their use, each name used exactly once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgeinfer.config import ModelConfig
from edgeinfer.formats.errors import ModelFormatError
from edgeinfer.formats.gguf import GGUF
from edgeinfer.formats.gguf_header import TensorInfo
from edgeinfer.kernels.cpu.repack import pack
from edgeinfer.kernels.jit import Code
from edgeinfer.kernels.packing import Packing
from edgeinfer.kernels.packings import PACKINGS

ROPE_FACTORS = "rope_freqs.weight"  # taken by the rotary tables


def check_tensors(file: GGUF, config: ModelConfig) -> None:
    """Raises ModelFormatError for a tensor whose shape is not what the hyper-parameters say: kernels check no bounds.

    A tensor without a known role is left for FileWeights.finish to refuse.
    """
    size = {
        "embedding_length": config.embedding,
        "feed_forward_length": config.feed_forward,
        "attention.key_length": config.head_dim,
        "attention.head_count * key_length": config.heads * config.head_dim,
        "attention.head_count_kv * key_length": config.kv_heads * config.head_dim,
        "rope.dimension_count / 2": config.rope_dims // 2,
        "vocabulary": config.vocabulary,
    }
    blocks = set()
    for name, tensor in file.tensors.items():
        *place, role, kind = ["", "", *name.rsplit(".", 2)]
        dimensions = _SHAPES.get(role, ())
        if kind == "bias":
            dimensions = dimensions[:1]
        if dimensions and tensor.shape != tuple(size[key] for key in dimensions):
            wanted = ", ".join(f"{config.architecture}.{key} = {size[key]}" for key in dimensions)
            raise ModelFormatError(file.path, f"{name} has shape {tensor.shape}; expected ({wanted})")
        if not tensor.type.decodable:
            raise ModelFormatError(file.path, f"{name} is {tensor.type.name}: expected weights")
        if place[-1].startswith("blk."):
            blocks.add(place[-1])
    if len(blocks) != config.layers:
        counted = f"{config.architecture}.block_count is {config.layers} and the file has tensors of {len(blocks)} blocks"
        raise ModelFormatError(file.path, counted)


_WIDE, _KV_WIDE = "attention.head_count * key_length", "attention.head_count_kv * key_length"
_SHAPES = {  # role -> what its dimensions are; a bias has the first of its matrix
    "token_embd": ("vocabulary", "embedding_length"),
    "output": ("vocabulary", "embedding_length"),
    "attn_q": (_WIDE, "embedding_length"),
    "attn_k": (_KV_WIDE, "embedding_length"),
    "attn_v": (_KV_WIDE, "embedding_length"),
    "attn_output": ("embedding_length", _WIDE),
    "ffn_gate": ("feed_forward_length", "embedding_length"),
    "ffn_up": ("feed_forward_length", "embedding_length"),
    "ffn_down": ("embedding_length", "feed_forward_length"),
    "attn_q_norm": ("attention.key_length",),
    "attn_k_norm": ("attention.key_length",),
    "rope_freqs": ("rope.dimension_count / 2",),
    **dict.fromkeys(("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), ("embedding_length",)),
    "output_norm": ("embedding_length",),
}


_EXPONENTS = {"<f2": (2, 0x7C00), "<f4": (4, 0x7F800000)}  # bytes, and the bits of the exponent


class FileWeights:
    """What a Builder asks for (kernels.builder.Weights), from a GGUF file. Leftovers are errors: see finish().

    Matrices are packed by `threads` threads from the start, in the file's order, while the caller does other things; leave
    the context to end them.
    """

    def __init__(self, file: GGUF, code: Code, threads: int, progress: Callable[[float], None] | None = None) -> None:
        self._file, self._code = file, code
        self._left = {name for name in file.tensors if name != ROPE_FACTORS}
        self._total = sum(t.nbytes for t in file.tensors.values())
        self._done = 0
        self._progress = progress
        self._workers = ThreadPoolExecutor(threads, "edgeinfer-pack")
        looked_up = "token_embd.weight" if self.has("output.weight") else None  # not multiplied: it stays in the file
        self._packed = {
            name: self._workers.submit(self._pack, tensor)
            for name, tensor in file.tensors.items()
            if len(tensor.shape) == 2 and name != looked_up
        }

    def __enter__(self) -> FileWeights:
        return self

    def __exit__(self, *exception: object) -> None:
        self._workers.shutdown(cancel_futures=True)

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def packed(self, name: str) -> tuple[type[Packing], np.ndarray, int, int]:
        """Packing, tiles uint8 (tiles, tile_bytes), rows, columns. Raises ModelFormatError for a missing or odd tensor."""
        tensor = self._take(name, 2)
        packing, tiles = self._packed.pop(name).result()
        self._done += tensor.nbytes
        if self._progress:
            self._progress(self._done / self._total)
        rows, columns = tensor.shape
        return packing, tiles, rows, columns

    def _pack(self, tensor: TensorInfo) -> tuple[type[Packing], np.ndarray]:
        packing = PACKINGS.get(tensor.type.name)
        if packing is None:
            raise ModelFormatError(self._file.path, f"{tensor.name} is {tensor.type.name}, which no kernel here multiplies")
        self._check_finite(tensor)
        tiles = pack(packing, self._file.raw(tensor.name), tensor.shape[1], self._code)
        self._file.release(tensor.name)
        return packing, tiles

    def vector(self, name: str) -> np.ndarray:
        """f32 (n,)."""
        self._check_finite(self._take(name, 1))
        return np.ascontiguousarray(self._file.array(name))

    def _check_finite(self, tensor: TensorInfo) -> None:
        """Raises ModelFormatError for a scale or weight that is infinite or NaN: better here, by name, than in an answer."""
        blocks = tensor.type.blocks(self._file.raw(tensor.name))
        fields = [blocks[name] for name in blocks.dtype.names] if blocks.dtype.names else [blocks]
        for field in fields:
            # on the bits: an exponent of ones is infinity or NaN (and NumPy tests halves one by one)
            width, exponent = (2, 0x7F80) if tensor.type.name == "BF16" else _EXPONENTS.get(field.dtype.str, (0, 0))
            if width and (field.view(f"<u{width}") & exponent).max() == exponent:
                raise ModelFormatError(self._file.path, f"{tensor.name} holds infinite values or NaN")

    def finish(self) -> None:
        """Raises ModelFormatError when tensors are left that the architecture did not ask for."""
        self._left.discard("token_embd.weight")  # looked up in the file itself
        if self._left:
            some = ", ".join(sorted(self._left)[:5])
            raise ModelFormatError(self._file.path, f"{len(self._left)} tensors that this architecture does not use: {some}")

    def _take(self, name: str, dimensions: int) -> TensorInfo:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise ModelFormatError(self._file.path, f"tensor {name} is missing")
        if len(tensor.shape) != dimensions:
            raise ModelFormatError(self._file.path, f"{name} has shape {tensor.shape}; expected {dimensions} dimensions")
        if name not in self._left:
            raise ModelFormatError(self._file.path, f"tensor {name} is asked for twice")
        self._left.remove(name)
        return tensor
