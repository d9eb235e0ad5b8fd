"""How the next token is chosen: every setting with its default and range. `sampling.Sampler` does the choosing."""

from __future__ import annotations

import math
import numbers
import reprlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_MAX_COUNT = 2**31 - 1
_FILTERS = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability")


@dataclass(frozen=True)
class _Range:
    """The numbers a field takes: low <= value <= high, of one kind; `none` is what None means, where it is allowed."""

    kind: type[int] | type[float]
    low: float
    high: float
    none: str | None

    def __str__(self) -> str:
        noun = "an integer" if self.kind is int else "a finite number"
        span = f"{noun} from {self.low} to {self.high}" if self.high != math.inf else f"{noun} of at least {self.low}"
        return f"{span}, or None for {self.none}" if self.none else span

    def checked(self, name: str, value: Any) -> int | float | None:
        if value is None and self.none:
            return None
        known = isinstance(value, numbers.Integral if self.kind is int else numbers.Real) and not isinstance(
            value, bool
        )
        # the comparison refuses NaN, and is exact for integers too large for a float
        if known and self.low <= value <= min(self.high, sys.float_info.max):
            return self.kind(value)
        raise ValueError(f"{name} is {reprlib.repr(value)}; it must be {self}")


def _real(default: float, low: float, high: float = math.inf) -> Any:
    return field(default=default, metadata={"range": _Range(float, low, high, None)})


def _integer(default: int | None, low: int, high: int = _MAX_COUNT, none: str | None = None) -> Any:
    return field(default=default, metadata={"range": _Range(int, low, high, none)})


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one generation. A bad value is a ValueError that names the field, what was found and what is allowed.

    Steps run in the order of the fields, then the temperature divides the logits (llama.cpp's default order). Every
    step is off by default. At temperature 0 the most likely token after bias and penalties is taken (of a tie, the
    lowest id), and the filters, mirostat and seed have no say.
    """

    temperature: float = _real(0.0, 0.0)
    seed: int | None = _integer(None, 0, 2**63 - 1, none="a fresh one")

    # added to a token's logit, from -1e9 to 1e9; -inf forbids the token
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    # penalties for tokens among the last repeat_last_n (0: none), the prompt included
    repeat_last_n: int | None = _integer(64, 0, none="the whole history")
    repeat_penalty: float = _real(1.0, 0.01, 100.0)  # divides a seen token's positive logit, multiplies a negative one
    presence_penalty: float = _real(0.0, -2.0, 2.0)  # subtracted once from a seen token
    frequency_penalty: float = _real(0.0, -2.0, 2.0)  # subtracted for each time that it was seen

    # DRY ("don't repeat yourself"): a token that would lengthen a repetition of n >= allowed_length tokens
    # loses multiplier * base ** (n - allowed_length)
    dry_multiplier: float = _real(0.0, 0.0, 1e6)
    dry_base: float = _real(1.75, 1.0, 100.0)
    dry_allowed_length: int = _integer(2, 1)
    dry_penalty_last_n: int | None = _integer(None, 0, none="the whole history")
    dry_sequence_breakers: Collection[int] = frozenset()  # ids of tokens that end a repetition, such as a line's end

    # filters: which tokens may be drawn
    top_n_sigma: float = _real(0.0, 0.0, 1e6)  # those within n standard deviations of the highest logit; 0: all
    top_k: int = _integer(0, 0)  # the k most likely; 0: all
    typical_p: float = _real(1.0, 0.0, 1.0)  # those of surprise nearest the entropy, of this mass together; 1: all
    top_p: float = _real(1.0, 0.0, 1.0)  # the most likely, of this mass together; 1: all; 0: one
    min_p: float = _real(0.0, 0.0, 1.0)  # those at least this times as likely as the first; 0: all
    # with chance xtc_probability, of the tokens at or above the threshold only the least likely stays
    xtc_probability: float = _real(0.0, 0.0, 1.0)
    xtc_threshold: float = _real(0.1, 0.0, 1.0)

    # mirostat 1 or 2, instead of the filters: cuts unlikely tokens off so that the mean surprise nears tau bits
    mirostat: int = _integer(0, 0, 2)
    mirostat_tau: float = _real(5.0, 0.0, 100.0)
    mirostat_eta: float = _real(0.1, 0.0, 1.0)  # how fast it corrects itself

    def __post_init__(self) -> None:
        for f in fields(self):
            if "range" in f.metadata:
                object.__setattr__(self, f.name, f.metadata["range"].checked(f.name, getattr(self, f.name)))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "dry_sequence_breakers", _checked_breakers(self.dry_sequence_breakers))
        clashing = [f.name for f in fields(self) if f.name in _FILTERS and getattr(self, f.name) != f.default]
        if self.mirostat and clashing:
            names = ", ".join(clashing)
            raise ValueError(
                f"mirostat is {self.mirostat}, and {names} set; mirostat replaces the filters: leave them out"
            )


def _is_token(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and 0 <= int(value) <= _MAX_COUNT


def _checked_bias(bias: object) -> dict[int, float]:
    allowed = "it must map token ids to numbers from -1e9 to 1e9, or to -inf to forbid a token"
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias is {reprlib.repr(bias)}; {allowed}")
    for token, value in bias.items():
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not _is_token(token) or not number or not (-1e9 <= value <= 1e9 or value == -math.inf):
            raise ValueError(f"logit_bias holds {reprlib.repr(token)}: {reprlib.repr(value)}; {allowed}")
    return {int(token): float(value) for token, value in bias.items()}


def _checked_breakers(breakers: object) -> frozenset[int]:
    if not isinstance(breakers, Collection) or isinstance(breakers, str | bytes) or not all(map(_is_token, breakers)):
        raise ValueError(f"dry_sequence_breakers is {reprlib.repr(breakers)}; it must be a collection of token ids")
    return frozenset(map(int, breakers))
