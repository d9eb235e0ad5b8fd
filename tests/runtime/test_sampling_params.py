"""Settings are checked where they are built: a bad one is refused with its name, what was found and what is allowed."""

import dataclasses
import math

import numpy as np
import pytest

from edgeinfer.sampling import Sampler, SamplingParams

INTEGERS = ["top_k", "seed", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "mirostat"]
REALS = [
    "temperature",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "top_n_sigma",
    "typical_p",
    "top_p",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
    "mirostat_tau",
    "mirostat_eta",
]
NO_NUMBERS = [True, False, np.True_, "1", "", b"1", [], {}, 1j, math.nan, math.inf, -math.inf, -3, 10**400, -(10**400)]


def test_every_field_is_covered():
    special = {"logit_bias", "dry_sequence_breakers"}
    assert {f.name for f in dataclasses.fields(SamplingParams)} == {*INTEGERS, *REALS} | special


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [*NO_NUMBERS, -1, 2**63, 1e308, 1.0, 0.5], ids=repr)
def test_integers(name, value):
    with pytest.raises(ValueError, match=f"^{name} is .* must be an integer from"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", REALS)
@pytest.mark.parametrize("value", [*NO_NUMBERS, None], ids=repr)
def test_reals(name, value):
    with pytest.raises(ValueError, match=f"^{name} is .* must be a finite number (from|of at least)"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1e-45),
        ("top_p", 1.0000001),
        ("min_p", 2),
        ("typical_p", -0.1),
        ("repeat_penalty", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("dry_base", 0.99),
        ("dry_allowed_length", 0),
        ("mirostat", 3),
        ("top_k", None),
        ("top_k", 2**31),
        ("xtc_probability", 1.01),
    ],
)
def test_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"^{name} is {value}; it must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "bias",
    [
        None,
        [(1, 2.0)],
        "1",
        {"1": 1.0},
        {-1: 1.0},
        {True: 1.0},
        {1.0: 1.0},
        {1: math.nan},
        {1: math.inf},
        {1: True},
        {1: "1"},
        {1: None},
        {1: 1.1e9},
        {1: 10**400},
        {2**40: 1.0},
    ],
    ids=repr,
)
def test_logit_bias(bias):
    with pytest.raises(ValueError, match="^logit_bias "):
        SamplingParams(logit_bias=bias)


@pytest.mark.parametrize("breakers", [None, 5, "", "\n", b"\n", ["\n"], [1.0], [True], [-1], [None]], ids=repr)
def test_dry_sequence_breakers(breakers):
    with pytest.raises(ValueError, match="^dry_sequence_breakers is .* token ids"):
        SamplingParams(dry_sequence_breakers=breakers)


def test_unknown_names_are_type_errors():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError):
        SamplingParams(0.5)


def test_a_long_value_is_not_repeated_in_full():
    with pytest.raises(ValueError) as error:
        SamplingParams(top_k="9" * 1_000_000)
    assert len(str(error.value)) < 300


def test_good_values_are_kept_as_plain_numbers():
    bias = {np.int64(3): np.float32(0.5), 4: 1, 5: -math.inf}
    p = SamplingParams(temperature=1, top_k=np.int32(5), top_p=np.float32(0.5), seed=2**63 - 1, logit_bias=bias)
    assert (type(p.temperature), type(p.top_k), type(p.top_p)) == (float, int, float)
    assert (p.temperature, p.top_k, p.top_p, p.seed) == (1.0, 5, 0.5, 2**63 - 1)
    assert p.logit_bias == {3: 0.5, 4: 1.0, 5: -math.inf}
    bias[6] = 1.0
    assert 6 not in p.logit_bias
    assert SamplingParams(dry_sequence_breakers=[1, 1, 2]).dry_sequence_breakers == {1, 2}
    assert SamplingParams(repeat_last_n=None, dry_penalty_last_n=None, seed=None) == SamplingParams(repeat_last_n=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.top_k = 3
    assert hash(p) == hash(dataclasses.replace(p))


@pytest.mark.parametrize("settings", [{"top_k": 40}, {"top_p": 0.9, "min_p": 0.1}, {"xtc_probability": 0.5}])
def test_mirostat_refuses_the_filters_that_it_replaces(settings):
    with pytest.raises(ValueError, match=f"mirostat is 2, and {', '.join(settings)} set"):
        SamplingParams(mirostat=2, **settings)


@pytest.mark.parametrize("settings", [{"logit_bias": {10: 1.0}}, {"dry_sequence_breakers": [3, 10]}])
def test_tokens_outside_the_vocabulary(settings):
    Sampler(SamplingParams(**settings), 11)
    with pytest.raises(ValueError, match=f"{next(iter(settings))} holds token 10; the vocabulary ends at 9"):
        Sampler(SamplingParams(**settings), 10)
