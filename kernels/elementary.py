"""exp, log, sin, cos and tanh of float64 arrays, with the same bits on every computer.

NumPy's and the C library's versions differ in the last bit between CPUs, systems and releases. These use only + - * /,
rounding to an integer, comparisons and exact bit operations, each its own NumPy call, so that nothing can be fused:
IEEE 754 leaves one answer. All are within 1.5 units in the last place (tests/kernels/test_elementary.py).

The argument is first reduced by a constant kept in several pieces, the leading ones so short that their product with
the multiple is exact (Cody & Waite, "Software Manual for the Elementary Functions", 1980). What is left is small enough
for the plain Taylor series; for tanh, Lambert's continued fraction. The form of log that adds the small terms first is
that of Tang, "Table-driven implementation of the logarithm function in IEEE floating-point arithmetic", ACM TOMS, 1990.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]

MAX_ANGLE = float(2**23)  # for sin_cos: the multiple of pi/2 has 23 bits, so its products with 30-bit pieces are exact

_BLOCK = 8192  # values of exp at once: the cache holds all that is between

_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
_LN2 = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")  # 32 bits, the rest
_TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
_HALF_PI = [  # 30 bits, 30, 30, the rest
    float.fromhex(piece) for piece in ("0x1.921fb54p+0", "0x1.10b46118p-30", "0x1.313198ap-61", "0x1.701b839a25205p-92")
]
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD

# Highest power first. On the reduced range the first term left out is below 2**-56 of the result.
_EXP = [1 / math.factorial(n) for n in range(13, 1, -1)]  # (e**r - 1 - r) / r**2 in r, |r| <= ln(2) / 2
_LOG = [2 / (2 * n + 1) for n in range(11, 0, -1)] + [0.0]  # log((1 + s) / (1 - s)) / s - 2 in s**2, |s| <= 0.172
_SIN = [(-1) ** n / math.factorial(2 * n + 1) for n in range(8, 0, -1)]  # (sin(r) - r) / r**3 in r**2, |r| <= pi / 4
_COS = [(-1) ** n / math.factorial(2 * n) for n in range(8, 1, -1)]  # (cos(r) - 1 + r**2 / 2) / r**4 in r**2


def exp(x: ArrayLike) -> F64:
    """e**x of float64 (any shape); 0 below -745.2, inf above 709.8, NaN for NaN."""
    x = np.asarray(x, np.float64)
    result = np.empty(x.shape)
    blocks = result.reshape(-1), x.reshape(-1)
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, x.size, _BLOCK):
            out, block = (array[start : start + _BLOCK] for array in blocks)
            block = np.clip(block, -746.0, 710.0)
            multiple = np.fmax(np.rint(block * _LOG2_E), -1100.0)  # fmax, because NaN has no integer
            r = (block - multiple * _LN2[0]) - multiple * _LN2[1]
            k = multiple.astype(np.int64)
            half = k >> 1  # two factors, because 2**k alone may be no float64
            out[:] = (1.0 + (r + r * r * _polynomial(r, _EXP))) * _power_of_two(half) * _power_of_two(k - half)
    return result


def log(x: ArrayLike) -> F64:
    """Natural logarithm of float64 (any shape); -inf for 0, NaN for less and for NaN."""
    x = np.asarray(x, np.float64)
    usual = np.where((x > 0.0) & (x < np.inf), x, 1.0)
    tiny = usual < 2.0**-1022
    bits = (usual * np.where(tiny, 2.0**54, 1.0)).view(np.int64)
    k = (bits - _SQRT_HALF_BITS) >> 52
    f = (bits - (k << 52)).view(np.float64) - 1.0  # x = 2**k (1 + f), 1 + f from sqrt(1/2) to sqrt(2)
    e = k - 54.0 * tiny
    s = f / (2.0 + f)
    h = 0.5 * f * f  # log(1 + f) = f - h + s (h + series)
    result = e * _LN2[0] + (f - (h - (s * (h + _polynomial(s * s, _LOG)) + e * _LN2[1])))
    return np.where(usual == x, result, np.where(x == 0.0, -np.inf, np.where(x > 0.0, np.inf, np.nan)))


def sin_cos(x: ArrayLike) -> tuple[F64, F64]:
    """(sine, cosine) of float64 angles in radians (any shape). ValueError unless every |x| <= MAX_ANGLE."""
    x = np.asarray(x, np.float64)
    if not np.all(np.abs(x) <= MAX_ANGLE):
        raise ValueError(f"found a NaN or an angle beyond {MAX_ANGLE:.0f} radians, the largest that is reduced exactly")
    multiple = np.rint(x * _TWO_OVER_PI)
    r, low = x, np.zeros_like(x)
    for piece in _HALF_PI:
        product = multiple * piece
        rest = r - product
        low = low + ((r - rest) - product)  # what rounding took from rest
        r = rest
    z = r * r
    sine = r + (r * z * _polynomial(z, _SIN) + low * (1.0 - 0.5 * z))
    cosine = 1.0 - (0.5 * z - (z * z * _polynomial(z, _COS) - r * low))
    quarter = multiple.astype(np.int64) & 3
    odd = quarter & 1 == 1
    return (
        np.where(odd, cosine, sine) * np.where(quarter >= 2, -1.0, 1.0),
        np.where(odd, sine, cosine) * np.where((quarter == 1) | (quarter == 2), -1.0, 1.0),
    )


def tanh(x: ArrayLike) -> F64:
    """Hyperbolic tangent of float64 (any shape); NaN for NaN."""
    x = np.asarray(x, np.float64)
    size = np.abs(x)
    near = size < 0.55
    small = np.where(near, size, 0.0)
    z = small * small
    c = np.zeros_like(z)
    for odd in range(17, 1, -2):  # tanh(x) = x / (1 + c), c = z / (3 + z / (5 + ...))
        c = z / (odd + c)
    far = 1.0 - 2.0 / (exp(2.0 * np.minimum(size, 20.0)) + 1.0)
    result: F64 = np.copysign(np.where(near, small - small * (c / (1.0 + c)), far), x)
    return result


def _power_of_two(k: NDArray[np.int64]) -> F64:
    """2**k for k from -1022 to 1023, by writing the exponent bits."""
    return ((k + 1023) << 52).view(np.float64)


def _polynomial(x: F64, coefficients: Sequence[float]) -> F64:
    """Horner's rule, highest power first."""
    total = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total *= x
        total += c
    return total
