"""A model's hyper-parameters, read once from its file and never changed.

Every value is checked for type, range and consistency here, so that what comes after may rely on it; a value that would
change results and that no code here knows is refused, not ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.formats.errors import ModelFormatError
from edgeinfer.formats.gguf import GGUF
from edgeinfer.rope import RopeScaling

_LIMITS = {  # inclusive; far beyond any model, and small enough that products of them stay sane
    "block_count": (1, 1024),
    "embedding_length": (1, 1 << 18),
    "feed_forward_length": (1, 1 << 20),
    "attention.head_count": (1, 4096),
    "attention.head_count_kv": (1, 4096),
    "attention.key_length": (2, 512),
    "attention.value_length": (2, 512),
    "attention.sliding_window": (0, 1 << 24),
    "rope.dimension_count": (2, 512),
    "context_length": (1, 1 << 24),
    "rope.scaling.original_context_length": (1, 1 << 24),
}


@dataclass(frozen=True)
class LayerRope:
    """How one kind of layer turns positions into angles."""

    base: float
    scaling: RopeScaling


@dataclass(frozen=True)
class ModelConfig:
    """windows: tokens that each layer sees, 0 for all of them. ropes: each layer's rotary settings."""

    architecture: str
    vocabulary: int
    layers: int
    embedding: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dims: int
    epsilon: float
    context: int
    windows: tuple[int, ...]
    ropes: tuple[LayerRope, ...]
    attention_scale: float
    embedding_scale: float

    @classmethod
    def from_gguf(cls, file: GGUF) -> ModelConfig:
        """Raises ModelFormatError naming the key."""
        return _Reader(file).config()


def architectures() -> tuple[str, ...]:
    """What runs: one file each in edgeinfer/models."""
    folder = Path(__file__).parent / "models"
    return tuple(sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_")))


class _Reader:
    def __init__(self, file: GGUF) -> None:
        self.file = file
        self.architecture = file.get("general.architecture", str)
        if self.architecture not in architectures():
            raise self.error(
                f"general.architecture is {self.architecture!r}; this version runs {', '.join(architectures())}"
            )

    def error(self, reason: str) -> ModelFormatError:
        return ModelFormatError(self.file.path, reason)

    def integer(self, key: str, default: int | None = None) -> int:
        full = f"{self.architecture}.{key}"
        value = self.file.get(full, int) if default is None else self.file.get(full, int, default)
        low, high = _LIMITS[key]
        if not low <= value <= high:
            raise self.error(f"{full} is {value}; expected {low} to {high}")
        return int(value)

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = 1e30) -> float:
        full = f"{self.architecture}.{key}"
        value = self.file.get(full, float) if default is None else self.file.get(full, float, default)
        if not (math.isfinite(value) and low <= value <= high):
            raise self.error(f"{full} is {value}; expected {low:g} to {high:g}")
        return float(value)

    def config(self) -> ModelConfig:
        arch = self.architecture
        layers, embedding = self.integer("block_count"), self.integer("embedding_length")
        heads = self.integer("attention.head_count")
        kv_heads = self.integer("attention.head_count_kv", heads)
        if heads % kv_heads:
            raise self.error(f"{arch}.attention.head_count {heads} is not a multiple of attention.head_count_kv {kv_heads}")
        if f"{arch}.attention.key_length" not in self.file.metadata and embedding % heads:
            raise self.error(f"{arch}.embedding_length {embedding} is not a multiple of attention.head_count {heads}")
        head_dim = self.integer("attention.key_length", max(2, embedding // heads))
        if self.integer("attention.value_length", head_dim) != head_dim:
            raise self.error(f"{arch}.attention.value_length differs from key_length {head_dim}; that is not supported")
        if head_dim % 16:
            raise self.error(
                f"heads of size {head_dim} ({arch}.attention.key_length, or embedding_length / attention.head_count);"
                " supported are multiples of 16"
            )
        rope_dims = self.integer("rope.dimension_count", head_dim)
        if rope_dims % 2 or rope_dims > head_dim:
            raise self.error(f"{arch}.rope.dimension_count is {rope_dims}; expected an even number up to {head_dim}")
        for key in ("attention.clamp_kqv", "attention.max_alibi_bias", "attn_logit_softcapping", "final_logit_softcapping",
                    "logit_scale", "residual_scale", "expert_count", "embedding_scale", "attention.scale"):  # fmt: skip
            value = self.file.metadata.get(f"{arch}.{key}")
            if isinstance(value, (list, np.ndarray)) or value:
                raise self.error(f"{arch}.{key} is set, and {arch} models that use it are not supported")
        windows, ropes = self._layers(layers)
        table = self.file.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2 or table.shape[1] != embedding:
            raise self.error(f"token_embd.weight is missing or not (vocabulary, {arch}.embedding_length = {embedding})")
        return ModelConfig(
            architecture=arch,
            vocabulary=table.shape[0],
            layers=layers,
            embedding=embedding,
            feed_forward=self.integer("feed_forward_length"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope_dims=rope_dims,
            epsilon=self.number("attention.layer_norm_rms_epsilon", low=1e-12, high=1.0),
            context=self.integer("context_length"),
            windows=windows,
            ropes=ropes,
            attention_scale=1.0 / math.sqrt(head_dim),
            # gemma multiplies by the square root, rounded to the activations' type when it was trained
            embedding_scale=math.sqrt(embedding) if arch == "gemma3" else 1.0,
        )

    def _layers(self, layers: int) -> tuple[tuple[int, ...], tuple[LayerRope, ...]]:
        scaling = self._scaling()
        everywhere = LayerRope(self.number("rope.freq_base", 10000.0, low=2.0), scaling)
        window = self.integer("attention.sliding_window", 0)
        if self.architecture == "gemma3":
            if window < 1:
                raise self.error("gemma3.attention.sliding_window is missing")
            # five local layers, then a global one; local layers have a base of their own and no scaling
            local = LayerRope(self.number("rope.freq_base_swa", 10000.0, low=2.0), RopeScaling())
            windows = tuple(window if i % 6 < 5 else 0 for i in range(layers))
            return windows, tuple(local if w else everywhere for w in windows)
        # qwen2 and qwen3 files may carry a window that their models do not use
        windows = (window,) * layers if self.architecture == "llama" else (0,) * layers
        return windows, (everywhere,) * layers

    def _scaling(self) -> RopeScaling:
        arch = self.architecture
        kind = self.file.get(f"{arch}.rope.scaling.type", str, "none")
        if kind == "none" and f"{arch}.rope.scale_linear" in self.file.metadata:
            return RopeScaling("linear", self.number("rope.scale_linear", low=1e-3))
        options: dict[str, Any] = {}
        if kind in ("llama3", "yarn"):
            options["original"] = self.integer("rope.scaling.original_context_length")
        if kind == "llama3":
            low = self.number("rope.scaling.low_freq_factor", 1.0, low=1e-3)
            options["low_freq_factor"] = low
            options["high_freq_factor"] = self.number("rope.scaling.high_freq_factor", 4.0, low=low + 1e-3)
        if kind == "yarn":
            options["beta_fast"] = self.number("rope.scaling.yarn_beta_fast", 32.0, low=1e-3)
            options["beta_slow"] = self.number("rope.scaling.yarn_beta_slow", 1.0, low=1e-3)
            options["attention_factor"] = self.number("rope.scaling.attn_factor", 1.0)
        factor = 1.0 if kind == "none" else self.number("rope.scaling.factor", low=1e-3)
        try:
            return RopeScaling(kind, factor, **options)
        except (TypeError, ValueError) as error:
            raise self.error(f"{arch}.rope.scaling: {error}") from None
