"""Each step of the sampler against a direct definition of it in plain Python."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer import filters
from edgeinfer.mirostat import Mirostat
from edgeinfer.penalties import dry, logit_bias, penalties

# Values of a coarse grid, so that ties are common.
logit_lists = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=30)
ranked = logit_lists.map(lambda values: np.array(sorted(values, reverse=True)))
fractions = st.floats(0.0, 1.0)
tokens = st.lists(st.integers(0, 5), max_size=40)
EPSILON = 1e-9


def f32(values) -> np.ndarray:
    return np.array(values, np.float32)


def probabilities(logits) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def until(order, p, mass) -> set[int]:
    """The first of `order` that have the mass together; one at least."""
    kept: list[int] = []
    while not kept or (math.fsum(p[i] for i in kept) < mass and len(kept) < len(order)):
        kept.append(order[len(kept)])
    return set(kept)


def staying(mask) -> set[int]:
    assert mask.dtype == np.bool_
    return set(np.flatnonzero(mask).tolist())


@given(logit_lists, st.integers(0, 35), st.data())
def test_rank(values, k, data):
    for i in data.draw(st.sets(st.integers(0, len(values) - 1), max_size=len(values) - 1)):
        values[i] = -math.inf
    order = sorted((i for i, x in enumerate(values) if x > -math.inf), key=lambda i: (-values[i], i))[: k or None]
    ids, scores = filters.rank(f32(values), k)
    assert ids.tolist() == order
    assert scores.tolist() == [values[i] for i in order]


@pytest.mark.parametrize("k", [1, 2, 40, 125, 126, 1999, 2000, 5000])
@pytest.mark.parametrize("distinct", [1, 30, 10_000])
def test_rank_of_many(k, distinct):
    values = np.random.default_rng(k).integers(0, distinct, 2005).astype(float)
    values[::7] = -math.inf
    order = sorted(np.flatnonzero(values > -math.inf).tolist(), key=lambda i: (-values[i], i))[:k]
    assert filters.rank(f32(values), k)[0].tolist() == order


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_rank_orders_every_float(values):
    ids, _ = filters.rank(f32(values), 0)
    assert ids.tolist() == sorted(range(len(values)), key=lambda i: (-values[i], i))


@given(ranked, fractions)
def test_top_p(logits, p):
    probs, order = probabilities(logits), range(logits.size)
    assert until(order, probs, p - EPSILON) <= staying(filters.top_p(logits, p)) <= until(order, probs, p + EPSILON)


@given(ranked, fractions)
def test_min_p(logits, p):
    probs = probabilities(logits)
    found = staying(filters.min_p(logits, p))
    for i, probability in enumerate(probs):
        if abs(probability / probs[0] - p) > EPSILON:
            assert (i in found) == (probability >= p * probs[0])
    assert 0 in found


@given(ranked, fractions)
def test_typical(logits, p):
    probs = probabilities(logits)
    entropy = -math.fsum(q * math.log(q) for q in probs)
    # rounded, so that equal distances tie here too
    order = sorted(range(len(probs)), key=lambda i: (round(abs(-math.log(probs[i]) - entropy), 9), i))
    found = staying(filters.typical(logits, p))
    mass = sorted(probs[i] for i in found)
    expected = until(order, probs, p)
    far = max(abs(-math.log(probs[i]) - entropy) for i in expected)
    assert all(abs(-math.log(probs[i]) - entropy) <= far + EPSILON for i in found)
    assert len(found) == 1 or math.fsum(mass) >= p - EPSILON
    assert abs(len(found) - len(expected)) <= sum(abs(abs(-math.log(q) - entropy) - far) < EPSILON for q in probs)


def test_typical_by_hand():
    """Probabilities 0.5 0.3 0.1 0.1: surprise 0.69 1.20 2.30 2.30, entropy 1.17, hence the order 1, 0, 2, 3."""
    logits = np.log([0.5, 0.3, 0.1, 0.1])
    assert [staying(filters.typical(logits, p)) for p in (0, 0.29, 0.31, 0.79, 0.85, 0.95)] == [
        {1},
        {1},
        {0, 1},
        {0, 1},
        {0, 1, 2},
        {0, 1, 2, 3},
    ]


@given(ranked, fractions)
def test_xtc(logits, threshold):
    probs = probabilities(logits)
    found = staying(filters.xtc(logits, threshold))
    if all(abs(q - threshold) > EPSILON for q in probs):
        above = [i for i, q in enumerate(probs) if q >= threshold]
        assert found == set(range(len(probs))) - set(above[:-1])


@given(logit_lists, st.floats(0.01, 5))
def test_top_n_sigma(values, n):
    mean = math.fsum(values) / len(values)
    floor = max(values) - n * math.sqrt(math.fsum((x - mean) ** 2 for x in values) / len(values))
    found = filters.top_n_sigma(f32([*values, -math.inf]), n)
    assert found.dtype == np.float32
    for x, y in zip(values, found, strict=False):
        assert y == x or (y == -math.inf and x < floor + EPSILON)
        assert y == -math.inf or x > floor - EPSILON
    assert found.max() == max(values) and found[-1] == -math.inf


def test_logit_bias():
    logits = f32([1, 2, 3, math.inf])
    biased = logit_bias(logits, {0: 1.5, 2: -math.inf, 3: -math.inf, 1: 1e9})
    assert biased.tolist() == [2.5, 1e9, -math.inf, -math.inf]
    assert logits.tolist() == [1, 2, 3, math.inf]


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=6, max_size=6),
    tokens,
    st.sampled_from([None, 0, 1, 3, 64]),
    st.floats(0.5, 2),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_penalties(values, history, last_n, repeat, presence, frequency):
    counts = Counter(history if last_n is None else history[len(history) - min(last_n, len(history)) :])
    expected = [
        (x / repeat if x > 0 else x * repeat) - counts[i] * frequency - presence if i in counts else x
        for i, x in enumerate(values)
    ]
    logits = f32(values)
    np.testing.assert_allclose(
        penalties(logits, history, last_n, repeat, presence, frequency), expected, rtol=1e-5, atol=2e-5
    )
    assert logits.tolist() == values


@given(tokens, st.integers(1, 4), st.sampled_from([None, 0, 5, 20]), st.sets(st.integers(0, 5), max_size=2))
def test_dry(history, allowed, last_n, breakers):
    recent = history if last_n is None else history[len(history) - min(last_n, len(history)) :]
    longest: dict[int, int] = {}
    for end in range(1, len(recent)):  # recent[:end] ends like the whole; recent[end] came next
        n = 0
        while n < end and recent[end - 1 - n] == recent[len(recent) - 1 - n] and recent[end - 1 - n] not in breakers:
            n += 1
        longest[recent[end]] = max(n, longest.get(recent[end], 0))
    expected = [-(0.5 * 1.5 ** (longest[i] - allowed)) if longest.get(i, 0) >= allowed else 0.0 for i in range(6)]
    found = dry(np.zeros(6, np.float32), history, 0.5, 1.5, allowed, last_n, breakers)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_dry_of_a_very_long_repetition_is_finite_and_quick():
    found = dry(np.zeros(2, np.float32), [0] * 50_000, 0.8, 1.75, 2, None, ())
    assert np.isfinite(found).all() and found[0] < -1e29 and found[1] == 0


@given(ranked, st.floats(0, 20))
def test_mirostat_2_cuts_what_surprises_more_than_mu(logits, mu):
    state = Mirostat(2, 5.0, 0.1, logits.size)
    state.mu = mu
    surprise = [-math.log2(q) for q in probabilities(logits)]
    kept = state.keep(logits - logits[0])
    if all(abs(s - mu) > EPSILON for s in surprise):
        assert kept == max(1, sum(s <= mu for s in surprise))


@pytest.mark.parametrize("exponent", [0.5, 0.9, 1.0, 1.3, 2.0])
@pytest.mark.parametrize("mu", [1.0, 4.0, 8.0])
def test_mirostat_1_finds_the_exponent_of_zipfs_law(exponent, mu):
    """Probabilities that follow the law exactly give the k of the paper's equation for that exponent."""
    n = 5000
    logits = -exponent * np.log(np.arange(1.0, n + 1))
    s = exponent + 1e-9  # the equation is 0 / 0 at 1
    k = ((s - 1) * 2**mu / (1 - n ** (1 - s))) ** (1 / s)
    state = Mirostat(1, 5.0, 0.1, n)
    state.mu = mu
    assert abs(state.keep(logits) - min(max(k, 1), n)) <= 0.51 + 1e-4 * k


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("logits", [[0.0], [0.0, 0.0], [0.0, -1e30], [0.0] * 300, [0.0, -800.0, -900.0]])
@pytest.mark.parametrize("mu", [-1e6, 0.0, 1e6])
def test_mirostat_keeps_at_least_one_and_at_most_all(version, logits, mu):
    state = Mirostat(version, 5.0, 0.1, len(logits))
    state.mu = mu
    assert 1 <= state.keep(np.array(logits)) <= len(logits)
