"""The vocabulary of kernels: its arithmetic against exact arithmetic and NumPy in float64, and level against level."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import llvmlite.ir as ir
import numpy as np
import pytest

from edgeinfer.kernels import jit, levels
from edgeinfer.kernels.cpu.dot import Dot
from edgeinfer.kernels.cpu.simd import BYTES, F32, F32X, I8X, I16X, I32X, I64, Simd
from edgeinfer.kernels.jit import Kernel, routine

HERE = [level for level in levels.LEVELS.values() if levels.host_features().issuperset(level.needs)]
LINE = 64  # bytes of 16 f32 lanes

Run = Callable[..., list[np.ndarray]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(emit, data): the routine emit(s, address, out) over each 64-byte line of `data`; its bytes at every level.

    `emit` writes up to 64 bytes at `out` a line.
    """
    with pytest.MonkeyPatch.context() as patch:  # a cache of its own: these kernels' sources are not in the cache's key
        patch.setenv("EDGEINFER_CACHE", str(tmp_path_factory.mktemp("cache")))
        codes = [jit.Code(level) for level in HERE]

    def run_everywhere(emit: Any, data: np.ndarray) -> list[np.ndarray]:
        line = routine(emit)

        def control(source: int, out: int, count: int) -> int:
            for i in range(count):
                line(source + LINE * i, out + LINE * i)
            return 0

        kernel = Kernel(emit.__name__, control, (line,))
        data = np.ascontiguousarray(data)
        assert data.nbytes % LINE == 0
        outs = []
        for code in codes:
            out = np.zeros(data.nbytes, np.uint8)
            entry = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(code.address(kernel))
            entry(data.ctypes.data, out.ctypes.data, data.nbytes // LINE)
            outs.append(out)
        return outs

    return run_everywhere


def same(outs: list[np.ndarray]) -> np.ndarray:
    """The one answer of every level, as f32; NaNs count as equal."""
    floats = [out.view(np.float32) for out in outs]
    for other in floats[1:]:
        equal = (floats[0].view(np.uint32) == other.view(np.uint32)) | (np.isnan(floats[0]) & np.isnan(other))
        assert equal.all()
    return floats[0]


def unary(name: str) -> Any:
    def emit(s: Simd, x: Any, out: Any) -> None:
        s.store(getattr(s, name)(s.load(F32X, x)), out)

    emit.__name__ = name
    return emit


SPECIAL = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1e-38, 0.5, -0.5, 1.0, -1.0, 20.0, -20.0, 87.0, -87.3, 88.0, -89.0, 200.0, -200.0]
    + [3e38, -3e38, np.inf, -np.inf, np.nan, 65504.0, 65520.0, -1e30, 44.5, 104.0, -104.0]
    + [2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25],
    np.float32,
)


# --- rounding ---------------------------------------------------------------------------------------------------------


def rounded(x: Fraction) -> np.float32:
    """The nearest f32, ties to even; x is within f32's range."""
    near = np.float32(float(x))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda f: (abs(Fraction(float(f)) - x), int(f.view(np.uint32)) & 1))


def awkward_triples(rng: np.random.Generator, count: int) -> np.ndarray:
    """(count, 3) f32 for a * b + c: of like sizes, cancelling, far apart, on ties, and among the subnormals."""
    significands, exponents = rng.integers(-(2**24), 2**24, (2, count)), rng.integers(-40, 10, (2, count))
    a, b = np.ldexp(significands, exponents).astype(np.float32)
    product = a.astype(np.float64) * b
    c = np.ldexp(rng.standard_normal(count), rng.integers(-60, 30, count)).astype(np.float32)
    kinds = np.arange(count) % 6
    c[kinds == 1] = -product[kinds == 1]  # what is left is the product's own rounding
    c[kinds == 2] = product[kinds == 2] * 2.0**-24
    tie = kinds == 3  # 1 + 2^-24 +- a little: decided by what a double cannot hold beside it
    a[tie], b[tie] = rng.choice([1, -1], tie.sum()) * 2.0**-12, 2.0**-12
    c[tie] = rng.choice([1.0, 1.0 + 2.0**-23, -1.0], tie.sum())
    near = kinds == 4  # a product just off the tie by its 48th bit, then a far larger addend
    a[near], b[near] = 1 + 2.0**-23, rng.choice([1 - 2.0**-24, 1 + 2.0**-23, -1 - 2.0**-23], near.sum())
    c[near] = np.ldexp(1.0, rng.integers(20, 60, near.sum()))
    tiny = kinds == 5
    a[tiny] = np.ldexp(rng.standard_normal(tiny.sum()), -75)
    b[tiny] = np.ldexp(rng.standard_normal(tiny.sum()), -66)
    c[tiny] = np.ldexp(rng.standard_normal(tiny.sum()), -140)
    return np.stack([a, b, c], -1)


def test_fma_rounds_once_at_every_level(run: Run) -> None:
    triples = awkward_triples(np.random.default_rng(0), 3000)

    def fma_lanes(s: Simd, x: Any, out: Any) -> None:  # 5 triples a line: lanes 0..4 of a, b, c, each 5 lanes on
        values = s.load(F32X, x)
        a, b, c = (s.part(values, 5 * k, 5) for k in range(3))
        s.store(s.fma(a, b, c), out)

    def fma_scalar(s: Simd, x: Any, out: Any) -> None:
        a, b, c = (s.load(F32, s.at(x, 20 * k)) for k in range(3))
        s.store(s.fma(a, b, c), out)

    lines = np.zeros((600, 16), np.float32)
    lines[:, :15] = triples.reshape(600, 5, 3).transpose(0, 2, 1).reshape(600, 15)
    lanes = same(run(fma_lanes, lines)).reshape(600, 16)[:, :5]
    scalars = same(run(fma_scalar, lines)).reshape(600, 16)[:, 0]
    exact = [rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))) for a, b, c in triples]
    assert lanes.ravel().tolist() == exact
    assert scalars.tolist() == exact[::5]


def test_fma_of_infinities_and_nan_is_the_same_at_every_level(run: Run) -> None:
    def fma_special(s: Simd, x: Any, out: Any) -> None:
        a = s.load(F32X, x)
        s.store(s.fma(a, s.b.shuffle_vector(a, a, ir.Constant(I32X, [(i * 5 + 3) % 16 for i in range(16)])), a), out)

    same(run(fma_special, SPECIAL))


def test_every_half_becomes_its_f32(run: Run) -> None:
    def widen_halves(s: Simd, x: Any, out: Any) -> None:
        s.store(s.half_to_f32(s.load(I16X, x)), out)

    halves = np.arange(65536, dtype=np.uint16)
    lines = np.zeros((4096, 32), np.uint16)
    lines[:, :16] = halves.reshape(4096, 16)
    floats = same(run(widen_halves, lines))
    expected = halves.view(np.float16).astype(np.float32)
    number = ~np.isnan(expected)
    assert np.array_equal(floats[number].view(np.uint32), expected[number].view(np.uint32))
    assert np.isnan(floats[~number]).all()


def test_f32_becomes_the_nearest_half_and_saturates(run: Run) -> None:
    def narrow_to_half(s: Simd, x: Any, out: Any) -> None:
        s.store(s.f32_to_half(s.load(F32X, x)), out)

    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[1:] + halves[:-1]) / 2  # every tie, exact in f32
    beside = [np.nextafter(between, np.float32(end)) for end in (0, np.inf)]
    rng = np.random.default_rng(0)
    values = np.concatenate([halves, between, *beside, np.exp(rng.uniform(-30, 12, 20000)).astype(np.float32)])
    values = np.concatenate([values, -values, SPECIAL[~np.isnan(SPECIAL)]])
    values = np.resize(values, -(-len(values) // 16) * 16)
    outs = [out.reshape(-1, LINE)[:, :32].copy().view(np.uint16).ravel() for out in run(narrow_to_half, values)]
    expected = np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16)
    for out in outs:
        assert np.array_equal(out, expected)


def test_nearest_ties_to_even(run: Run) -> None:
    numbers = [0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, 4194303.5, -4194303.5, 126.5, 127.49, -127.5, 3, 0, 1e-30, 9, -2]
    values = np.array(numbers, np.float32)
    assert np.array_equal(same(run(unary("nearest"), values)), np.rint(values))


# --- elementary functions ---------------------------------------------------------------------------------------------


def spread(limit: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    near_zero = np.exp(rng.uniform(-30, np.log(limit), 8000)) * rng.choice([-1, 1], 8000)
    return np.concatenate([rng.uniform(-limit, limit, 8000), near_zero]).astype(np.float32)


def units_in_last_place(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    return np.abs(found.astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)


def test_exp_is_within_a_unit_in_the_last_place(run: Run) -> None:
    x = spread(87.0)
    assert units_in_last_place(same(run(unary("exp"), x)), np.exp(x.astype(np.float64))).max() <= 1


def test_exp_beyond_its_range(run: Run) -> None:
    x = np.array([-87.4, -1000, -np.inf, -88, 88, 89, 1000, np.inf, 0, -0.0, 1e-45, 0, 0, 0, 0, 0], np.float32)
    found = same(run(unary("exp"), x))
    assert np.all(found[:4] == 0)
    assert np.all(found[4:8] == found[4]) and np.isfinite(found[4])
    assert np.all(found[8:] == 1)


def test_tanh_silu_and_gelu_against_float64(run: Run) -> None:
    for limit in (1.0, 8.0, 80.0):
        x = spread(limit)
        wide = x.astype(np.float64)
        assert np.abs(same(run(unary("tanh"), x)) - np.tanh(wide)).max() <= 3e-7
        silu = wide / (1 + np.exp(-wide))
        assert np.all(np.abs(same(run(unary("silu"), x)) - silu) <= 4e-7 * np.abs(silu) + 1e-37)
        gelu = wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
        assert np.all(np.abs(same(run(unary("gelu"), x)) - gelu) <= 4e-7 * np.abs(wide))


@pytest.mark.parametrize("name", ["exp", "tanh", "silu", "gelu"])
def test_levels_agree_on_every_kind_of_number(run: Run, name: str) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 16 * 1000, np.uint32).view(np.float32)
    same(run(unary(name), np.concatenate([SPECIAL, bits])))


# --- lanes and bytes --------------------------------------------------------------------------------------------------


def test_total_and_largest_fold_in_the_stated_order(run: Run) -> None:
    def fold(s: Simd, x: Any, out: Any) -> None:
        v = s.load(F32X, x)
        s.store(s.total(v), out)
        s.store(s.largest(v), s.at(out, 4))
        s.store(s.total(s.b.bitcast(v, I32X)), s.at(out, 8))

    x = np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32)
    outs = [out.reshape(50, LINE)[:, :12].copy() for out in run(fold, x)]
    v, w = x, x.view(np.int32)
    for n in (8, 4, 2, 1):
        v, w = v[:, :n] + v[:, n:], w[:, :n] + w[:, n:]
    for out in outs:
        assert np.array_equal(out[:, :4].view(np.float32), v)
        assert np.array_equal(out[:, 4:8].copy().view(np.float32)[:, 0], x.max(1))
        assert np.array_equal(out[:, 8:].copy().view(np.int32), w)


TABLE = (-128, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)


def all_bytes() -> np.ndarray:
    return np.random.default_rng(0).permutation(np.arange(4096) % 256).astype(np.uint8)


def test_bits_and_lookup_work_on_single_bytes(run: Run) -> None:
    def cut(s: Simd, x: Any, out: Any) -> None:
        s.store(s.bits(s.load(BYTES, x), 3, 2, to=5), out)

    def cut_down(s: Simd, x: Any, out: Any) -> None:
        s.store(s.bits(s.load(BYTES, x), 4, 4), out)

    def look_up(s: Simd, x: Any, out: Any) -> None:
        s.store(s.lookup(TABLE, s.low_nibbles(s.load(BYTES, x))), out)

    x = all_bytes()
    for emit, expected in ((cut, (x >> 3 & 3) << 5), (cut_down, x >> 4), (look_up, np.array(TABLE, np.int8)[x & 15])):
        for out in run(emit, x):
            assert np.array_equal(out, expected.view(np.uint8))


def test_shift_right_by_a_count_known_at_run_time(run: Run) -> None:
    def shift(s: Simd, x: Any, out: Any) -> None:  # by the first byte's low 3 bits
        count = s.b.and_(s.load(I64, x), s.i64(7))
        s.store(s.shift_right(s.load(BYTES, x), count), out)

    x = all_bytes()
    words = x.view(np.uint32).reshape(-1, 16)
    expected = words >> (words[:, :1] & 7)
    for out in run(shift, x):
        assert np.array_equal(out.view(np.uint32).reshape(-1, 16), expected)


@pytest.mark.parametrize("width", [2, 4])
def test_lane_fields(run: Run, width: int) -> None:
    def fields(s: Simd, x: Any, out: Any) -> None:
        s.store(s.lane_fields(x, width), out)

    fields.__name__ = f"fields_{width}"
    x = all_bytes()
    stored = x.reshape(-1, LINE)[:, : 2 * width]
    expected = np.concatenate([stored >> (width * k) & ((1 << width) - 1) for k in range(8 // width)], 1)
    for out in run(fields, x):
        assert np.array_equal(out.reshape(-1, LINE)[:, :16], expected)


@pytest.mark.parametrize(
    ("weight_bits", "signed", "vectors"),
    [(bits, False, 4 if bits in (2, 3, 6) else 8) for bits in range(2, 8)] + [(5, True, 8), (8, True, 8)],
)
def test_dot_is_exact_at_both_ends(run: Run, weight_bits: int, signed: bool, vectors: int) -> None:
    """Weights at an end of their range times activations of +-127, `vectors` times, in steps of 2."""

    def dot(s: Simd, x: Any, out: Any) -> None:  # a lane's 4 bytes are its weights; the first 4 are the activations
        total = Dot(s, weight_bits, signed, vectors)
        weights, activations = s.load(BYTES, x), s.broadcast4(x)
        with s.loop(s.i64(vectors // 2)):
            for _ in range(2):
                total.add(weights, activations)
            total.end_step()
        s.store(total.result(), out)

    dot.__name__ = f"dot_{weight_bits}_{signed}_{vectors}"
    low, high = (-(2 ** (weight_bits - 1)), 2 ** (weight_bits - 1) - 1) if signed else (0, 2**weight_bits - 1)
    rng = np.random.default_rng(0)
    w = rng.choice([low, high], (64, 16, 4))
    w[:8], w[8:16] = high, low
    w[:, 0] = rng.choice([-127, 127], (64, 4))
    w[:16:2, 0] = 127
    a = w[:, :1]
    outs = run(dot, (w & 255).astype(np.uint8))
    expected = (w * a).sum(-1) * vectors
    for out in outs:
        assert np.array_equal(out.view(np.int32).reshape(64, 16)[:, 1:], expected[:, 1:])


def test_bytes_of_a_lane_widen_to_it(run: Run) -> None:
    def widen(s: Simd, x: Any, out: Any) -> None:
        s.store(s.to_f32(s.b.sext(s.load(I8X, x), I32X)), out)

    x = all_bytes()
    expected = x.view(np.int8).reshape(-1, LINE)[:, :16].astype(np.float32)
    assert np.array_equal(same(run(widen, x)).reshape(-1, 16), expected)
