"""A model file's logits by the reference operations: what the runtime's are compared with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from edgeinfer.config import ModelConfig
from edgeinfer.formats.blocks import BlockType
from edgeinfer.formats.gguf import GGUF, open_gguf
from edgeinfer.kernels.reference import Reference
from edgeinfer.models._transformer import Network


class FileRawWeights:
    def __init__(self, file: GGUF) -> None:
        self._file = file

    def raw(self, name: str) -> tuple[BlockType, np.ndarray]:
        return self._file.tensors[name].type, self._file.raw(name)

    def vector(self, name: str) -> np.ndarray:
        return self._file.array(name)

    def has(self, name: str) -> bool:
        return name in self._file.tensors


def reference_logits(path: str | os.PathLike[str], ids: Sequence[int] | np.ndarray, kind: type[Reference] = Reference,
                     wanted: Sequence[int] | None = None) -> Any:  # fmt: skip
    """Logits of one pass over `ids`, (wanted, vocabulary); wanted: rows, all by default."""
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
        table = file.tensors["token_embd.weight"]
        embeddings = table.type.decode(file.raw("token_embd.weight")[np.asarray(ids)]) * np.float32(config.embedding_scale)
        rows = range(len(ids))
        backend = kind(FileRawWeights(file), embeddings, rows, [0] * len(ids), rows if wanted is None else wanted)
        factors = file.array("rope_freqs.weight") if "rope_freqs.weight" in file.tensors else None
        network = Network(config, backend, len(ids), "output.weight" not in file.tensors, factors)
        for rope in network.tables.values():
            rope.reach(len(ids))
        import_module(f"edgeinfer.models.{config.architecture}").describe(network)
        return backend.logits
