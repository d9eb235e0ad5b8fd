"""Rotary frequencies and tables: plain, linear, llama3 and YaRN scaling.

Everything is computed in float64 from + - x / and our own elementary functions, then rounded to f32, so that tables are
the same bits on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgeinfer.kernels.elementary import MAX_ANGLE, exp, log, sin_cos


@dataclass(frozen=True)
class RopeScaling:
    """How positions are stretched beyond those trained for.

    kind: "none", "linear", "llama3" (Llama 3.1) or "yarn" (Peng et al. 2023); unknown kinds are refused. factor: context
    now / context trained for. original: that trained context, in tokens (llama3, yarn).
    """

    kind: str = "none"
    factor: float = 1.0
    original: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float = 1.0

    KINDS = ("none", "linear", "llama3", "yarn")

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise ValueError(f"rope scaling {self.kind!r} is not supported; supported are {', '.join(self.KINDS)}")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"a rope scaling factor of {self.factor}; it must be positive")
        if self.kind in ("llama3", "yarn") and self.original < 1:
            raise ValueError(f"rope scaling {self.kind!r} needs the context length that the model was trained for")


def frequencies(dims: int, base: float, scaling: RopeScaling, factors: np.ndarray | None = None) -> np.ndarray:
    """Radians per position of each rotated pair, float64 (dims / 2,).

    factors: float (dims / 2,), what a file's rope_freqs.weight divides each frequency by.
    """
    exponents = np.arange(0, dims, 2, dtype=np.float64) / dims
    plain: np.ndarray = exp(-exponents * log(np.array([base], np.float64)))
    if factors is not None:
        plain = plain / np.asarray(factors, np.float64)
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        # long wavelengths are stretched, short ones kept, and those between are blended
        turns = scaling.original * plain / (2 * math.pi)  # within the original context
        blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return np.asarray((1.0 - blend) * plain / scaling.factor + blend * plain)
    if scaling.kind == "yarn":
        def correction(rotations: float) -> float:
            """The pair that makes this many turns within the original context."""
            ratio = np.array([scaling.original / (rotations * 2 * math.pi), base], np.float64)
            over, under = log(ratio)
            return float(dims * over / (2 * under))

        low = max(0.0, math.floor(correction(scaling.beta_fast)))
        high = min(dims - 1.0, math.ceil(correction(scaling.beta_slow)))
        ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
        return np.asarray(plain * (1.0 - ramp) + plain / scaling.factor * ramp)
    return plain


def magnitude(scaling: RopeScaling) -> float:
    """What cosines and sines are multiplied by: YaRN's temperature, 1 otherwise."""
    if scaling.kind != "yarn" or scaling.factor <= 1.0:
        return 1.0
    return scaling.attention_factor * (1.0 + 0.1 * float(log(np.array([scaling.factor], np.float64))[0]))


class RopeTable:
    """Cosines and sines by position, f32 (context, 2, pairs), filled in as positions are reached."""

    _BLOCK = 256  # positions filled at a time

    def __init__(self, context: int, frequency: np.ndarray, scale: float = 1.0) -> None:
        widest = float(np.max(frequency)) * context
        if not widest <= MAX_ANGLE:
            raise ValueError(f"rotary angles of up to {widest:.3g} radians in this context; at most {MAX_ANGLE:.0f} are exact")
        self.data = np.zeros((context, 2, len(frequency)), np.float32)
        self._frequency, self._scale, self._filled = frequency, scale, 0

    def reach(self, positions: int) -> None:
        """Make the table good for positions 0 .. positions - 1."""
        while self._filled < min(positions, len(self.data)):
            end = min(self._filled + self._BLOCK, len(self.data))
            angles = np.arange(self._filled, end, dtype=np.float64)[:, None] * self._frequency
            sine, cosine = sin_cos(angles)
            self.data[self._filled : end, 0] = cosine * self._scale
            self.data[self._filled : end, 1] = sine * self._scale
            self._filled = end
