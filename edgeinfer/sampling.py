"""From logits to the next token: a chain of pure steps, built once, and a draw made from (seed, position) alone."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer import filters
from edgeinfer.formats.errors import EdgeInferError
from edgeinfer.kernels.elementary import exp, log
from edgeinfer.mirostat import Mirostat
from edgeinfer.penalties import dry, logit_bias, penalties
from edgeinfer.sampling_params import SamplingParams

__all__ = ["GenerationError", "Sampler", "SamplingParams", "draw", "logprobs"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

_DRAW_BITS = 53
_TOKEN, _XTC = 0, 1  # purposes of a draw
_FLOAT_MAX = np.finfo(np.float32).max


class GenerationError(EdgeInferError):
    """The model's logits cannot be sampled from: a NaN, or no token left."""


class Sampler:
    """Chooses tokens by `params` from a vocabulary of `n_vocab`.

    `seed` is the one in use: that of the parameters, or else a fresh one. The same seed, position, logits and history
    give the same token, whatever was sampled before; only mirostat remembers what it sampled, until `reset`.
    ValueError when a token id in the parameters is outside the vocabulary.
    """

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        self.params, self.n_vocab = params, n_vocab
        for name in ("logit_bias", "dry_sequence_breakers"):
            for token in getattr(params, name):
                if token >= n_vocab:
                    raise ValueError(f"{name} holds token {token}; the vocabulary ends at {n_vocab - 1}")
        self.seed = secrets.randbits(32) if params.seed is None else params.seed  # 32: short enough to type again
        self._adjustments = _adjustments(params)
        self._greedy = params.temperature == 0.0
        self._filters = _filters(params, self.seed)
        self._ranked = bool(self._filters or params.top_k or params.mirostat)
        self._all_ids = np.arange(n_vocab)
        self.reset()

    def reset(self) -> None:
        """Forgets what mirostat learned."""
        p = self.params
        self._mirostat = Mirostat(p.mirostat, p.mirostat_tau, p.mirostat_eta, self.n_vocab) if p.mirostat else None

    def sample(self, logits: F32, history: Sequence[int], position: int) -> int:
        """The id of the next token.

        logits: float32 (n_vocab,), left unchanged. history: the tokens so far, oldest first, the prompt included; only
        penalties and DRY read it. position: where in the sequence the new token will stand; it selects the draw.
        GenerationError for a NaN, or when no token is above -inf. +inf counts as the largest float32.
        """
        logits = np.asarray(logits, np.float32)
        if logits.shape != (self.n_vocab,):
            raise ValueError(f"logits have shape {logits.shape}; expected ({self.n_vocab},), one a token")
        with np.errstate(all="ignore"):
            top = _top(logits)
            if self._adjustments:
                for adjust in self._adjustments:
                    logits = adjust(logits, history)
                top = _top(logits)
            return top if self._greedy else self._drawn(np.minimum(logits, _FLOAT_MAX), position)

    def _drawn(self, logits: F32, position: int) -> int:
        if self.params.top_n_sigma:
            logits = filters.top_n_sigma(logits, self.params.top_n_sigma)
        if self._ranked:
            ids, scores = filters.rank(logits, self.params.top_k)
        else:
            ids, scores = self._all_ids, logits.astype(np.float64)
        for stays in self._filters:
            mask = stays(scores, position)
            ids, scores = ids[mask], scores[mask]
        scores = (scores - scores.max()) / self.params.temperature
        if self._mirostat:
            scores = scores[: self._mirostat.keep(scores)]
        weights = exp(scores)
        cumulative = np.cumsum(weights)
        # Below the total even when rounded, so that some entry lies above; the first that does has a weight above 0.
        target = draw(self.seed, position, _TOKEN) * 2.0**-_DRAW_BITS * cumulative[-1]
        chosen = int(np.searchsorted(cumulative, target, side="right"))
        if self._mirostat:
            self._mirostat.observe(float(weights[chosen] / cumulative[-1]))
        return int(ids[chosen])


def draw(seed: int, position: int, purpose: int = _TOKEN) -> int:
    """A uniform integer of 53 bits that depends on its arguments alone.

    Their hash by SplitMix64's mixer (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
    """
    state = 0
    for part in (seed, position, purpose):
        state = (state + (part + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> (64 - _DRAW_BITS)


def logprobs(logits: F32, n: int) -> list[tuple[int, float]]:
    """The n most likely (id, natural log of its probability) by the plain softmax: no temperature, bias or filter.

    logits: float32 (vocabulary,). Equal ones by rising id; those of logit -inf are left out. GenerationError for a NaN,
    or when all are -inf.
    """
    if n < 0:
        raise ValueError(f"n is {n}; it must be at least 0")
    logits = np.asarray(logits, np.float32)
    with np.errstate(all="ignore"):
        top = _top(logits)
        logits = np.minimum(logits, _FLOAT_MAX)
        total = log(np.cumsum(exp(logits.astype(np.float64) - logits[top]))[-1])
        ids, scores = filters.rank(logits, max(n, 1))
        return list(zip(ids.tolist(), (scores - scores[0] - total).tolist(), strict=True))[:n]


def _top(logits: F32) -> int:
    """The id of the highest logit, the lowest of equal ones. GenerationError when there is none."""
    top = int(logits.argmax())  # the first NaN, if there is one
    value = logits[top]
    if np.isnan(value):
        raise GenerationError(f"the logit of token {top} is NaN: the model file or its computation is broken")
    if value == -np.inf:
        raise GenerationError("every token has the logit -inf: the model, or the logit bias, forbids all of them")
    return top


def _adjustments(p: SamplingParams) -> list[Callable[[F32, Sequence[int]], F32]]:
    """The steps that change logits, in order; those that the parameters leave off are not there."""
    steps: list[Callable[[F32, Sequence[int]], F32]] = []
    if p.logit_bias:
        steps.append(lambda logits, history: logit_bias(logits, p.logit_bias))
    if (p.repeat_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0):
        values = p.repeat_last_n, p.repeat_penalty, p.presence_penalty, p.frequency_penalty
        steps.append(lambda logits, history: penalties(logits, history, *values))
    if p.dry_multiplier:
        settings = p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_penalty_last_n, p.dry_sequence_breakers
        steps.append(lambda logits, history: dry(logits, history, *settings))
    return steps


def _filters(p: SamplingParams, seed: int) -> list[Callable[[F64, int], filters.Mask]]:
    """The steps that look at ranked logits, in order; each says which stay."""
    steps: list[Callable[[F64, int], filters.Mask]] = []
    if p.typical_p < 1.0:
        steps.append(lambda scores, position: filters.typical(scores, p.typical_p))
    if p.top_p < 1.0:
        steps.append(lambda scores, position: filters.top_p(scores, p.top_p))
    if p.min_p:
        steps.append(lambda scores, position: filters.min_p(scores, p.min_p))
    if p.xtc_probability:
        chance = p.xtc_probability * 2.0**_DRAW_BITS
        steps.append(
            lambda scores, position: (
                filters.xtc(scores, p.xtc_threshold)
                if draw(seed, position, _XTC) < chance
                else np.ones(scores.size, np.bool_)
            )
        )
    return steps
