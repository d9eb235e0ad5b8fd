"""Steps of the sampler that say which tokens may be drawn.

`top_n_sigma` looks at the whole vocabulary and `rank` puts it in order. The others take the ranked logits (float64,
highest first) and return which of them stay (bool, the same length, at least one True). Sums are cumulative, hence in
one fixed order: the same bits everywhere.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edgeinfer.kernels.elementary import exp, log

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

_GROUP = 16


def top_n_sigma(logits: F32, n: float) -> F32:
    """-inf for tokens more than n standard deviations below the highest logit (Tang et al. 2024, arXiv:2411.07641).

    Tokens that are -inf already do not count towards the deviation.
    """
    values = logits[logits > -np.inf].astype(np.float64)
    mean = np.cumsum(values)[-1] / values.size
    sigma = math.sqrt(np.cumsum((values - mean) ** 2)[-1] / values.size)
    return np.where(logits >= values.max() - n * sigma, logits, np.float32(-np.inf))


def rank(logits: F32, k: int) -> tuple[I64, F64]:
    """(ids, logits) of the k highest logits (0: all), without those of -inf: highest first, equal ones by rising id.

    The logits hold no NaN, and one at least is above -inf.
    """
    floor = np.float32(-np.inf)
    groups = logits.size // _GROUP
    if 0 < k <= groups:
        # k groups have a maximum of at least the floor, so k logits have too: what lies below is out
        highest = logits[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        floor = np.partition(highest, groups - k)[groups - k]
    ids = np.flatnonzero(logits >= floor if floor > -np.inf else logits > floor)
    # One integer key a token, logit in the high half and id in the low one, so that any sort gives this order.
    bits = (logits[ids] + np.float32(0.0)).view(np.int32)  # + 0.0: -0.0 becomes 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    keys = np.sort((~rising).astype(np.int64) << 32 | ids)
    ids = keys[: k or None] & 0xFFFFFFFF
    return ids, logits[ids].astype(np.float64)


def typical(logits: F64, p: float) -> Mask:
    """Those with surprise nearest the entropy, until their mass reaches p (Meister et al. 2022, arXiv:2202.00666)."""
    weights = _weights(logits)
    total = np.cumsum(weights)[-1]
    surprise = log(total) - (logits - logits[0])
    entropy = np.cumsum(weights * surprise)[-1] / total
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    stays = np.zeros(logits.size, np.bool_)
    stays[order[: _reaching(weights[order], p)]] = True
    return stays


def top_p(logits: F64, p: float) -> Mask:
    """The most likely, until their mass reaches p (Holtzman et al. 2019, arXiv:1904.09751)."""
    return np.arange(logits.size) < _reaching(_weights(logits), p)


def min_p(logits: F64, p: float) -> Mask:
    """Those at least p times as likely as the most likely (Nguyen et al. 2024, arXiv:2407.01082)."""
    return _weights(logits) >= p


def xtc(logits: F64, threshold: float) -> Mask:
    """Without the tokens of at least this probability, but for the least likely of them.

    "Exclude top choices", by p-e-w: text-generation-webui, pull request 6335.
    """
    weights = _weights(logits)
    above = int(np.count_nonzero(weights >= threshold * np.cumsum(weights)[-1]))
    return np.arange(logits.size) >= above - 1


def _weights(logits: F64) -> F64:
    """Probabilities but for a factor: 1 for the first."""
    return exp(logits - logits[0])


def _reaching(weights: F64, p: float) -> int:
    """How many of the weights, from the first, have p of the whole together; at least 1."""
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, p * cumulative[-1])) + 1
