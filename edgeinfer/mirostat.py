"""Mirostat (Basu et al. 2020, arXiv:2007.14966) keeps a text's surprise near a target by dropping unlikely tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.kernels.elementary import exp, log

_LN2 = 0.6931471805599453
_ZIPF_TOKENS = 100  # version 1 estimates the exponent of Zipf's law from this many
_MIN_EXPONENT = 1e-6  # flat logits have none


class Mirostat:
    """Feedback control: `mu`, in bits, falls when a token surprises more than tau and rises when it surprises less."""

    def __init__(self, version: int, tau: float, eta: float, n_vocab: int) -> None:
        self.version, self.tau, self.eta, self.n_vocab = version, tau, eta, n_vocab
        self.mu = 2.0 * tau

    def keep(self, scores: NDArray[np.float64]) -> int:
        """How many of the ranked logits (highest first, the first 0) may be drawn; at least 1."""
        count = self._keep_1(scores) if self.version == 1 else self._keep_2(scores)
        return max(1, min(scores.size, count))

    def observe(self, probability: float) -> None:
        """Takes note of the probability, among those kept, of the token that was drawn."""
        self.mu -= self.eta * (-float(log(probability)) / _LN2 - self.tau)

    def _keep_1(self, scores: NDArray[np.float64]) -> int:
        """Algorithm 1 of the paper: k by the exponent s of Zipf's law, fitted to the most likely tokens."""
        steps = scores[:_ZIPF_TOKENS]
        if steps.size < 2:
            return 1
        i = np.arange(1.0, steps.size)
        t = log((i + 1.0) / i)
        s = max(float(np.cumsum(t * (steps[:-1] - steps[1:]))[-1] / np.cumsum(t * t)[-1]), _MIN_EXPONENT)
        ln_n = float(log(float(self.n_vocab)))
        epsilon = s - 1.0
        # k = (epsilon 2**mu / (1 - n**-epsilon)) ** (1 / s), by logarithms; at s = 1 the part below 2**mu is ln(n)
        part = (1.0 - float(exp(-epsilon * ln_n))) / epsilon if abs(epsilon) > 1e-9 else ln_n
        ln_k = (self.mu * _LN2 - float(log(part))) / s
        return round(float(exp(min(ln_k, ln_n))))

    def _keep_2(self, scores: NDArray[np.float64]) -> int:
        """Version 2: those whose own surprise is at most mu."""
        surprise = (log(np.cumsum(exp(scores))[-1]) - scores) / _LN2
        return int(np.count_nonzero(surprise <= self.mu))
