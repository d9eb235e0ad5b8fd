"""What each operation means, in NumPy: the definition that kernels are tested against, far too slow for anything else.

`Reference` is the textbook in float64, on exact weights. `SameArithmetic` rounds where the kernels round and adds in their
order, so it gives their bits: what differs between the two is what the kernels' arithmetic costs. Both take the calls of
kernels.program.Builder and compute at once, over one pass of whole sequences; there are no pages, steps or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer.formats.blocks import BlockType

Array = npt.NDArray[Any]

SPAN, LANES, PAGE = 32, 16, 64  # values that share an activation scale; lanes of a sum; tokens of a softmax's step
_MASKED, _LOWEST = np.float32(-3.0e38), np.float32(-1.0e30)


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

    # the operations of kernels.program.Builder

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
        self._kept[layer] = tuple(self._stored(rows.reshape(len(rows), kv_heads, -1)) for rows in (k, v))  # type: ignore[assignment]

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


class SameArithmetic(Reference):
    """The kernels' arithmetic: f32, int8 activations in spans of 32, half-precision keys and values, sums in their order."""

    dtype = np.float32

    def _normed(self, x: Array, weight: Array, epsilon: float) -> Array:
        columns = x.shape[-1]
        lanes = _padded(x, LANES).reshape(*x.shape[:-1], -1, LANES)
        squares = np.zeros((*x.shape[:-1], LANES), np.float32)
        for i in range(lanes.shape[-2]):
            squares = fma(lanes[..., i, :], lanes[..., i, :], squares)
        root = np.sqrt(_total(squares) / np.float32(columns) + np.float32(epsilon))
        return x * (np.float32(1.0) / root)[..., None] * weight

    def _product(self, x: Array, kind: BlockType, raw: Array) -> Array:
        total = np.zeros((len(x), len(raw)), np.float32)
        if kind.values == 1:
            for column, w in enumerate(np.ascontiguousarray(kind.decode(raw).T)):
                total = fma(w, x[:, column, None], total)
            return total
        codes, scales, minimums = parts(kind, raw)
        quants, span_scales = quantized(x)
        size = codes.shape[1] // scales.shape[1]
        q = quants.reshape(len(x), -1, size).astype(np.float32)
        w = codes.reshape(len(raw), -1, size).astype(np.float32)
        for g in range(q.shape[1]):
            scale = span_scales[:, g * size // SPAN, None]
            total = fma(q[:, g] @ w[:, g].T, scales[:, g] * scale, total)  # the product of integers is exact
            if minimums is not None:
                total = fma(minimums[:, g], scale * q[:, g].sum(-1, keepdims=True), total)
        return total

    def _turned(self, x: Array, y: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        return fma(x, cos, -(y * sin)), fma(x, sin, y * cos)

    def _stored(self, x: Array) -> Array:
        return np.clip(x, -65504.0, 65504.0).astype(np.float16).astype(np.float32)

    def _attended(self, q: Array, k: Array, v: Array, seen: Array, scale: Any, softcap: Any, sink: Array | None) -> Array:
        rows, heads, head_dim = q.shape
        k, v = (_padded(kept.transpose(1, 2, 0), PAGE) for kept in (k, v))  # (heads, head_dim, tokens)
        seen = _padded(seen, PAGE)[:, None]
        sums = np.zeros(q.shape, np.float32)
        shares = np.zeros((rows, heads, LANES), np.float32)  # of the softmax's denominator, by lane
        highest = np.full((rows, heads), _LOWEST)
        for start in range(0, k.shape[2], PAGE):
            page = slice(start, start + PAGE)
            scores = np.zeros((rows, heads, PAGE), np.float32)
            for d in range(head_dim):
                scores = fma(q[:, :, d, None], k[:, d, page], scores)
            scores = scores * scale
            if softcap:
                scores = softcap * tanh(scores / softcap)
            scores = np.where(seen[..., page], scores, _MASKED)
            before, highest = highest, np.maximum(highest, scores.max(-1))
            factor = exp(before - highest)[..., None]
            weights = exp(scores - highest[..., None])
            shares, sums = shares * factor, sums * factor
            for lane in range(0, PAGE, LANES):
                shares = shares + weights[..., lane : lane + LANES]
            for token in range(PAGE):
                sums = fma(weights[..., token, None], v[..., start + token], sums)
        total, factor = _total(shares), np.float32(1.0)
        if sink is not None:
            top = np.maximum(highest, sink)
            factor = exp(highest - top)
            total = fma(total, factor, exp(sink - top))
        return sums * (factor / total)[..., None]

    def _silu(self, x: Array) -> Array:
        return x / (np.float32(1.0) + exp(-x))

    def _gelu(self, x: Array) -> Array:
        inner = fma(x * x * x, np.float32(0.044715), x) * np.float32(0.7978845608)
        return x * np.float32(0.5) * (np.float32(1.0) + tanh(inner))


# weights and activations as integers

_ONES = {  # fields of a block that make every weight the integer 1, or 2 where a type has no 1
    "Q4_0": {"qs": 0x99}, "Q4_1": {"qs": 0x11}, "Q5_0": {"qs": 0x11, "qh": 0xFF}, "Q5_1": {"qs": 0x11, "qh": 0},
    "Q8_0": {"qs": 1}, "IQ4_NL": {"qs": 0x88}, "MXFP4": {"qs": 0x22}, "Q2_K": {"qs": 0x55}, "Q3_K": {"qs": 0x55, "hmask": 0xFF},
    "Q4_K": {"qs": 0x11}, "Q5_K": {"qs": 0x11, "qh": 0}, "Q6_K": {"ql": 0x11, "qh": 0xAA}, "IQ4_XS": {"qs": 0x88},
}  # fmt: skip
_SMALL_GROUPS = ("Q2_K", "Q3_K", "Q6_K")  # 16 values to a scale; 32 in all others


def parts(kind: BlockType, raw: Array) -> tuple[Array, Array, Array | None]:
    """Rows of blocks as integers i32 (rows, columns), and what multiplies and what is added to them, f32 (rows, groups).

    Read off what the type's own decoder makes of blocks whose weights, or whose minimums, are replaced.
    """

    def decoded(**fields: int) -> Array:
        blocks = kind.blocks(raw).copy()
        for field, value in fields.items():
            blocks[field] = value
        return kind.decode(blocks.view(np.uint8).reshape(raw.shape))

    group = 16 if kind.name in _SMALL_GROUPS else SPAN
    ones = _ONES[kind.name]
    no_minimum = {field: 0 for field in ("m", "dmin") if field in (kind.dtype.names or ())}
    scales = decoded(**ones, **no_minimum)[:, ::group] / np.float32(2 if kind.name == "MXFP4" else 1)
    codes = decoded(**no_minimum) / np.repeat(np.where(scales == 0, np.float32(1), scales), group, axis=1)
    minimums = decoded(**dict.fromkeys(ones, 0))[:, ::group] if no_minimum else None
    return np.rint(codes).astype(np.int32), scales, minimums


def quantized(x: Array) -> tuple[Array, Array]:
    """f32 (rows, columns) -> integers -127..127 i32 (rows, columns), scales f32 (rows, columns / 32)."""
    spans = x.reshape(len(x), -1, SPAN)
    top = np.abs(spans).max(-1)
    inverse = np.where(top > 0, np.float32(127.0) / np.where(top > 0, top, np.float32(1.0)), np.float32(0.0))
    quants = np.rint(spans * inverse[..., None]).astype(np.int32)
    return quants.reshape(x.shape), top / np.float32(127.0)


# functions of f32 arrays, rounded as the kernels round


def fma(a: Array | np.float32, b: Array | np.float32, c: Array) -> Array:
    """a * b + c in f32, rounded once: the product is exact in float64, the sum is rounded to odd there (Boldo, Melquiond 2008)."""
    p, z = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    s = p + z
    t = s - p
    error = (p - (s - t)) + (z - t)  # s + error is the exact sum (Knuth's TwoSum)
    bits = s.view(np.int64)
    inexact = (error != 0) & (bits & 1 == 0)
    bits += inexact * np.where((error > 0) == (s > 0), 1, -1)
    return s.astype(np.float32)


def exp(x: Array) -> Array:
    """e^x; 0 below -87.3, and above 88 as at 88. See Simd.exp."""
    low = x < np.float32(-87.3)
    x = np.clip(x, np.float32(-87.3), np.float32(88.0))
    n = np.rint(x * np.float32(1.44269504))
    r = fma(n, np.float32(-0.693145752), x)
    r = fma(n, np.float32(-1.42860677e-06), r)
    p = np.full_like(x, 0.00138144672)
    for coefficient in (0.00836878084, 0.0416683927, 0.166665196, 0.49999994, 1.0, 1.0):
        p = fma(p, r, np.full_like(x, coefficient))
    return np.where(low, np.float32(0.0), np.ldexp(p, n.astype(np.int32)))


def tanh(x: Array) -> Array:
    e = exp(np.minimum(x + x, np.float32(60.0)))
    return np.float32(1.0) - np.float32(2.0) / (e + np.float32(1.0))


def _total(lanes: Array) -> Array:
    """The sum over the last axis, 16 long: lane i with i + 8, then 4, 2, 1."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _padded(x: Array, unit: int) -> Array:
    """Zeros added to the last axis until it is a multiple of `unit` long."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % unit)])
