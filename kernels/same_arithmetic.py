"""The reference operations with the kernels' roundings and orders of sums, so that bits can be compared.

Every sum runs over one axis in a fixed order, one fused multiply-add at a time; other axes are NumPy's to vectorize.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgeinfer.formats.blocks import BlockType
from edgeinfer.kernels.reference import Array, Reference

SPAN, LANES, PAGE = 32, 16, 64  # values that share an activation scale; lanes of a sum; tokens of a softmax's step
_MASKED, _LOWEST = np.float32(-3.0e38), np.float32(-1.0e30)


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
    present = (top > np.float32(1e-30)) & np.isfinite(top)
    inverse = np.where(present, np.float32(127.0) / np.where(present, top, np.float32(1.0)), np.float32(0.0))
    with np.errstate(invalid="ignore"):
        scaled = np.rint(spans * inverse[..., None])
        scales = top / np.float32(127.0) + (top - top)  # NaN where a span is not finite
    return np.where(np.isnan(scaled), 0, scaled).astype(np.int32).reshape(x.shape), scales


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
