"""Steps of the sampler that change logits by what was said before: logit bias, repetition penalties, DRY.

Each is a pure function from logits (float32, one a token of the vocabulary) to new logits. A history holds token ids,
oldest first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

_MAX_PENALTY = 1e30  # far beyond any logit, and still a float32


def logit_bias(logits: F32, bias: Mapping[int, float]) -> F32:
    """Adds each bias to its token's logit; -inf forbids the token, whatever its logit."""
    out: F32 = logits.copy()
    for token, value in bias.items():
        out[token] = out[token] + np.float32(value) if value != -np.inf else -np.inf
    return out


def penalties(
    logits: F32, history: Sequence[int], last_n: int | None, repeat: float, presence: float, frequency: float
) -> F32:
    """Lowers the tokens that are among the last `last_n` of the history.

    repeat divides a logit, as in CTRL (Keskar et al. 2019, arXiv:1909.05858, section 4.1), but multiplies a negative
    one; presence is subtracted once and frequency for each time that the token is there, as in OpenAI's API.
    """
    tokens, counts = np.unique(np.asarray(_last(history, last_n), np.int64), return_counts=True)
    seen = logits[tokens]
    seen = np.where(seen > 0.0, seen / np.float32(repeat), seen * np.float32(repeat))
    out: F32 = logits.copy()
    out[tokens] = seen - (counts * frequency + presence).astype(np.float32)
    return out


def dry(
    logits: F32,
    history: Sequence[int],
    multiplier: float,
    base: float,
    allowed_length: int,
    last_n: int | None,
    breakers: Collection[int],
) -> F32:
    """Lowers tokens that would lengthen a repetition (DRY, by p-e-w: text-generation-webui, pull request 5677).

    Where the last n >= allowed_length tokens, no breaker among them, occurred before, the token that followed there
    loses multiplier * base ** (n - allowed_length), for its longest n. Linear in the length of the history.
    """
    backwards = _last(history, last_n)[::-1]
    limit = next((i for i, token in enumerate(backwards) if token in breakers), len(backwards))
    longest: dict[int, int] = {}
    for i, length in enumerate(_common_prefixes(backwards)):
        length = min(length, limit)
        if length >= allowed_length:
            longest[backwards[i - 1]] = max(length, longest.get(backwards[i - 1], 0))
    if not longest:
        return logits
    out: F32 = logits.copy()
    for token, length in longest.items():
        out[token] -= np.float32(min(multiplier * _power(base, length - allowed_length), _MAX_PENALTY))
    return out


def _last(history: Sequence[int], last_n: int | None) -> Sequence[int]:
    """The last `last_n` tokens; all for None."""
    return history if last_n is None else history[max(0, len(history) - last_n) :]


def _common_prefixes(tokens: Sequence[int]) -> list[int]:
    """For every i > 0, how many of tokens[i:] equal tokens[0:] (the Z algorithm, Gusfield 1997); 0 for i = 0."""
    lengths = [0] * len(tokens)
    left = right = 0  # the match that reaches furthest is tokens[left:right]
    for i in range(1, len(tokens)):
        length = min(lengths[i - left], right - i) if i < right else 0
        while i + length < len(tokens) and tokens[i + length] == tokens[length]:
            length += 1
        lengths[i] = length
        if i + length > right:
            left, right = i, i + length
    return lengths


def _power(base: float, exponent: int) -> float:
    """base ** exponent by multiplications alone, the same on every system; inf when it overflows."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
