"""What each operation means, in NumPy: the definition that kernels are tested against, far too slow for anything else.

`Reference` is the textbook in float64, on exact weights. It takes the calls of kernels.builder.Builder and computes at
once, over one pass of whole sequences; there are no pages, steps or threads. kernels/same_arithmetic.py rounds where the
kernels round, and so gives their bits: what differs between the two is what the kernels' arithmetic costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from edgeinfer.formats.blocks import BlockType

Array = Any  # a NumPy array: its static type is lost in the first product


class RawWeights(Protocol):
    """Where a reference gets weights."""

    def raw(self, name: str) -> tuple[BlockType, Array]:
        """A matrix as the file has it: its type, and uint8 (outputs, row_bytes)."""

    def vector(self, name: str) -> Array:
        """A norm's weight or a bias: f32 (n,)."""

    def has(self, name: str) -> bool: ...


class Reference:
    """One pass over rows of whole sequences, each row a token. Rows of activations are arrays (rows, columns)."""

    dtype: type[np.floating[Any]] = np.float64

    def __init__(self, weights: RawWeights, embeddings: Array, positions: Sequence[int], sequences: Sequence[int],
                 wanted: Sequence[int]) -> None:  # fmt: skip
        """embeddings: (rows, columns). wanted: rows whose logits are computed. A sequence's rows hold positions 0, 1, 2 .."""
        self.weights, self._embeddings = weights, np.asarray(embeddings, self.dtype)
        self.positions, self._wanted = np.asarray(positions), np.asarray(wanted)
        self._sequences = [np.flatnonzero(np.asarray(sequences) == s) for s in sorted(set(sequences))]
        if any(self.positions[rows].tolist() != list(range(len(rows))) for rows in self._sequences):
            raise ValueError("each sequence's rows must hold its positions from 0 on, in order")
        self._kept: dict[int, tuple[Array, Array]] = {}  # by layer: keys and values, (rows, kv_heads, head_dim)
        self.logits: Array | None = None  # (wanted, vocabulary)

    # the operations of kernels.builder.Builder

    def embed(self, columns: int) -> Array:
        return self._embeddings[:, :columns].copy()

    def norm(self, x: Array, weight: str, epsilon: float, add: Array | None = None) -> Array:
        y = self._normed(x, self.weights.vector(weight), epsilon)
        return y if add is None else add + y

    def linear(self, x: Array, *names: str, add: Array | None = None) -> tuple[Array, ...]:
        results = []
        for name in names:
            y = self._product(x, *self.weights.raw(name + ".weight"))
            if self.weights.has(name + ".bias"):
                y = y + self.weights.vector(name + ".bias")
            results.append(y if add is None else y + add)
        return tuple(results)

    def rope(self, layer: int, q: Array, k: Array, v: Array, *, heads: int, kv_heads: int, table: Array, neox: bool,
             q_norm: str | None = None, k_norm: str | None = None, epsilon: float = 0.0) -> None:  # fmt: skip
        pairs = table.shape[2]
        cos, sin = table[self.positions].astype(self.dtype).transpose(1, 0, 2)[:, :, None]  # (rows, 1, pairs) each
        first, second = (slice(pairs), slice(pairs, 2 * pairs)) if neox else (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        for rows, count, norm in ((q, heads, q_norm), (k, kv_heads, k_norm)):
            each = rows.reshape(len(rows), count, -1)  # a view: rotated in place
            if norm is not None:
                each[:] = self._normed(each, self.weights.vector(norm), epsilon)
            each[..., first], each[..., second] = self._turned(each[..., first], each[..., second], cos, sin)
        self._kept[layer] = tuple(self._stored(rows.reshape(len(rows), kv_heads, -1)) for rows in (k, v))

    def attention(self, layer: int, q: Array, *, heads: int, kv_heads: int, scale: float, window: int = 0,
                  softcap: float = 0.0, sinks: str | None = None) -> Array:  # fmt: skip
        out = np.zeros(q.shape, self.dtype)
        sink = self.weights.vector(sinks) if sinks else None
        for rows in self._sequences:
            k, v = (np.repeat(kept[rows], heads // kv_heads, axis=1) for kept in self._kept[layer])
            age = np.arange(len(rows))[:, None] - np.arange(len(rows))
            seen = (age >= 0) & (age < window) if window else age >= 0
            each = q[rows].reshape(len(rows), heads, -1)
            out[rows] = self._attended(each, k, v, seen, self.dtype(scale), self.dtype(softcap), sink).reshape(len(rows), -1)
        return out

    def gated(self, gate: Array, up: Array, activation: str) -> Array:
        silu = activation == "silu"
        return (self._silu(gate) if silu else self._gelu(gate)) * up

    def wanted(self, x: Array) -> Array:
        return x[self._wanted]

    def output(self, logits: Array) -> None:
        self.logits = logits

    # their arithmetic

    def _normed(self, x: Array, weight: Array, epsilon: float) -> Array:
        """RMSNorm over the last axis."""
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight

    def _product(self, x: Array, kind: BlockType, raw: Array) -> Array:
        """x @ weights^T."""
        out = np.empty((len(x), len(raw)), self.dtype)
        for row in range(0, len(raw), 4096):  # some at a time: a decoded vocabulary is large
            out[:, row : row + 4096] = x @ kind.decode(raw[row : row + 4096]).astype(self.dtype).T
        return out

    def _turned(self, x: Array, y: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        """The pairs (x, y) turned by an angle."""
        return x * cos - y * sin, x * sin + y * cos

    def _stored(self, x: Array) -> Array:
        """Keys or values as the cache keeps them."""
        return x.copy()

    def _attended(self, q: Array, k: Array, v: Array, seen: Array, scale: Any, softcap: Any, sink: Array | None) -> Array:
        """softmax(q k^T scale) v. q: (rows, heads, head_dim); k, v: (tokens, heads, head_dim); seen: (rows, tokens)."""
        scores = np.einsum("rhd,thd->rht", q, k) * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(seen[:, None], scores, -np.inf)
        top = scores.max(-1, keepdims=True) if sink is None else np.maximum(scores.max(-1), sink)[..., None]
        shares = np.exp(scores - top)
        total = shares.sum(-1) + (0.0 if sink is None else np.exp(sink - top[..., 0]))
        return np.einsum("rht,thd->rhd", shares / total[..., None], v)

    def _silu(self, x: Array) -> Array:
        return x / (1.0 + np.exp(-x))

    def _gelu(self, x: Array) -> Array:
        """The form with tanh."""
        return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))
