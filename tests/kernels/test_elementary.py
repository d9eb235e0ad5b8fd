"""The elementary functions against Python's decimal arithmetic, and against their own bits on other computers."""

import hashlib
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from edgeinfer.kernels.elementary import MAX_ANGLE, exp, log, sin_cos, tanh

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")


def decimal_sin(x: Decimal) -> Decimal:
    x = x.remainder_near(2 * PI)
    term = total = x
    n = 1
    while abs(term) > Decimal(10) ** -70:
        term = -term * x * x / ((n + 1) * (n + 2))
        total += term
        n += 2
    return total


def decimal_tanh(x: Decimal) -> Decimal:
    grown = (2 * x).exp()
    return (grown - 1) / (grown + 1)


def worst_ulp(function, truth, points) -> float:
    """The largest error, in units of the last place of the true value."""
    worst = 0.0
    with localcontext() as context:
        context.prec = 90
        for x, found in zip(points.tolist(), function(points).tolist(), strict=True):
            true = truth(Decimal(x))
            worst = max(worst, float(abs(Decimal(found) - true) / Decimal(math.ulp(float(true)))))
    return worst


def points(*ranges: tuple[float, float]) -> np.ndarray:
    return np.concatenate([np.random.default_rng(7).uniform(low, high, 400) for low, high in ranges])


def magnitudes(low: int, high: int) -> np.ndarray:
    """Numbers of both signs between 2**low and 2**high, every exponent as likely."""
    rng = np.random.default_rng(8)
    return np.ldexp(rng.uniform(-1, 1, 400), rng.integers(low, high, 400))


def test_exp_is_within_a_unit_and_a_half():
    x = np.concatenate([points((-1, 1), (-40, 40), (-745, 709.7), (-745, -708)), magnitudes(-60, 3)])
    assert worst_ulp(exp, Decimal.exp, x) <= 1.5


def test_log_is_within_a_unit_and_a_half():
    tiny = np.arange(1, 200) * 5e-324
    x = np.concatenate([points((0.3, 3), (0.99, 1.01), (1, 1e6)), np.abs(magnitudes(-1060, 1024)), tiny])
    assert worst_ulp(log, Decimal.ln, x) <= 1.5


def test_tanh_is_within_a_unit_and_a_half():
    x = np.concatenate([points((-0.7, 0.7), (-20, 20)), magnitudes(-60, 5)])
    assert worst_ulp(tanh, decimal_tanh, x) <= 1.5


def test_sin_and_cos_are_within_a_unit_and_a_half():
    near_zeros = np.arange(1, 4000, 13) * (math.pi / 2)  # nothing but the reduction's last pieces is left here
    whole = np.random.default_rng(9).integers(0, int(MAX_ANGLE), 500).astype(float)  # positions of tokens
    x = np.concatenate([points((-1, 1), (-100, 100), (-MAX_ANGLE, MAX_ANGLE)), magnitudes(-60, 3), near_zeros, whole])
    assert worst_ulp(lambda x: sin_cos(x)[0], decimal_sin, x) <= 1.5
    assert worst_ulp(lambda x: sin_cos(x)[1], lambda x: decimal_sin(x + PI / 2), x) <= 1.5


def test_edges():
    inf, nan = math.inf, math.nan
    x = np.array([0.0, -0.0, inf, -inf, nan, 800.0, -800.0, 1e308, -1e308])
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        np.testing.assert_array_equal(exp(x), [1, 1, inf, 0, nan, inf, 0, inf, 0])
        np.testing.assert_array_equal(log(x), [-inf, -inf, inf, nan, nan, log(800.0), nan, log(1e308), nan])
        np.testing.assert_array_equal(tanh(x), [0, 0, 1, -1, nan, 1, -1, 1, -1])
    assert math.copysign(1, tanh(np.array([-0.0]))[0]) == -1
    assert (*sin_cos(0.0), log(1.0)) == (0, 1, 0)


@pytest.mark.parametrize("angle", [math.nan, math.inf, -math.inf, MAX_ANGLE * 1.01, -MAX_ANGLE * 2])
def test_angles_that_cannot_be_reduced_are_refused(angle):
    with pytest.raises(ValueError, match="8388608 radians"):
        sin_cos(np.array([0.0, angle]))


@pytest.mark.parametrize("function", [exp, log, tanh, lambda x: sin_cos(x)[0], lambda x: sin_cos(x)[1]])
def test_a_value_does_not_depend_on_its_neighbours_or_the_shape(function):
    x = points((0.1, 90))
    whole = function(x)
    assert all(float(function(value)) == found for value, found in zip(x[:50], whole, strict=False))
    assert np.array_equal(function(x.reshape(20, 20)), whole.reshape(20, 20))
    assert np.array_equal(function(x[::3]), whole[::3])
    long = np.resize(x, 20_000)
    assert np.array_equal(function(long), np.resize(whole, 20_000))


def test_the_same_bits_on_every_computer():
    """Recorded once. A CPU, system or NumPy that gives other bits breaks the promise that sampling rests on."""
    x = np.arange(-4096, 4096) * 0.0859375
    found = [exp(x), log(np.abs(x) + 0.125), tanh(x / 64), *sin_cos(x * 1000)]
    digest = hashlib.sha256(np.stack(found).astype("<f8").tobytes()).hexdigest()
    assert digest == "7c23a73379674842f4b60be037bd726d57c3a20f298ded1b7ba7d3586cad206a"
