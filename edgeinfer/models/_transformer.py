"""What the architectures are written in: a Builder's operations with the model's sizes filled in.

An architecture is a function describe(network). It must ask for every tensor of its files: leftovers are errors.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from edgeinfer.config import ModelConfig
from edgeinfer.rope import RopeTable, frequencies, magnitude

X = Any  # rows of activations, in whatever form the backend keeps them


class Backend(Protocol):
    """The operations: kernels.builder.Builder records them, kernels.reference computes them in NumPy at once."""

    def embed(self, columns: int) -> X: ...
    def norm(self, x: X, weight: str, epsilon: float, add: X | None = None) -> X: ...
    def linear(self, x: X, *names: str, add: X | None = None) -> tuple[X, ...]: ...
    def rope(self, layer: int, q: X, k: X, v: X, *, heads: int, kv_heads: int, table: np.ndarray, neox: bool,
             q_norm: str | None = None, k_norm: str | None = None, epsilon: float = 0.0) -> None: ...  # fmt: skip
    def attention(self, layer: int, q: X, *, heads: int, kv_heads: int, scale: float, window: int = 0) -> X: ...
    def gated(self, gate: X, up: X, activation: str) -> X: ...
    def wanted(self, x: X) -> X: ...
    def output(self, logits: X) -> None: ...


class Network:
    """One model being described to a backend."""

    def __init__(self, config: ModelConfig, backend: Backend, context: int, tied: bool,
                 rope_factors: np.ndarray | None = None) -> None:  # fmt: skip
        """tied: the output matrix is the embedding. rope_factors: a file's rope_freqs.weight."""
        self.config, self._backend, self._tied = config, backend, tied
        self.tables = {
            rope: RopeTable(
                context, frequencies(config.rope_dims, rope.base, rope.scaling, rope_factors), magnitude(rope.scaling)
            )
            for rope in set(config.ropes)
        }

    def embed(self) -> X:
        return self._backend.embed(self.config.embedding)

    def norm(self, x: X, name: str, add: X | None = None) -> X:
        return self._backend.norm(x, name + ".weight", self.config.epsilon, add)

    def linear(self, x: X, *names: str, add: X | None = None) -> tuple[X, ...]:
        return self._backend.linear(x, *names, add=add)

    def rope(self, layer: int, q: X, k: X, v: X, neox: bool, norms: tuple[str, str] | None = None) -> None:
        c = self.config
        q_norm, k_norm = (name + ".weight" for name in norms) if norms else (None, None)
        self._backend.rope(layer, q, k, v, heads=c.heads, kv_heads=c.kv_heads, table=self.tables[c.ropes[layer]].data,
                           neox=neox, q_norm=q_norm, k_norm=k_norm, epsilon=c.epsilon)  # fmt: skip

    def attention(self, layer: int, q: X) -> X:
        c = self.config
        return self._backend.attention(layer, q, heads=c.heads, kv_heads=c.kv_heads, scale=c.attention_scale,
                                       window=c.windows[layer])  # fmt: skip

    def gated(self, gate: X, up: X, activation: str) -> X:
        return self._backend.gated(gate, up, activation)

    def wanted(self, x: X) -> X:
        return self._backend.wanted(x)

    def output(self, x: X) -> None:
        (logits,) = self._backend.linear(x, "token_embd" if self._tied else "output")
        self._backend.output(logits)
