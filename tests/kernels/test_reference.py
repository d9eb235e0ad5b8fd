"""The reference itself: against exact fractions, plain loops, the gguf package, and transformers on real files."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import edgeinfer
from edgeinfer.formats.blocks import BY_NAME
from edgeinfer.kernels import elementary
from edgeinfer.kernels.packings import PACKINGS
from edgeinfer.kernels.reference import Reference
from edgeinfer.kernels.same_arithmetic import SameArithmetic, exp, fma, parts, quantized, tanh

TESTS = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("by_reference", TESTS / "runtime" / "by_reference.py")
assert _spec and _spec.loader
by_reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(by_reference)

QUANTIZED = [name for name, packing in PACKINGS.items() if packing.quantized]


def rounded(x: Fraction) -> np.float32:
    """The nearest f32, ties to even."""
    near = np.float32(float(x))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda f: (abs(Fraction(float(f)) - x), int(f.view(np.uint32)) & 1))


def test_fma_is_rounded_once() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(3000).astype(np.float32) for _ in range(2))
    c = (rng.standard_normal(3000) * 2.0 ** rng.integers(-40, 40, 3000)).astype(np.float32)
    c[:1000] = -(a * b)[:1000]  # what is left is the product's rounding error
    c[1000:1500] = (a * b)[1000:1500] * np.float32(2.0**24)
    a[-3:], b[-3:], c[-3:] = 1 + 2.0**-12, [2.0**-12, 2.0**-12, -(2.0**-12)], [1.0, 1 + 2.0**-23, 1.0]  # ties
    for x, y, z, found in zip(a, b, c, fma(a, b, c), strict=True):
        assert found == rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))


def test_fma_decides_ties_by_what_float64_loses() -> None:
    above, below = np.float32(1 + 2.0**-23), np.float32(2.0**-24 * (1 - 2.0**-23))
    product = Fraction(float(above)) * Fraction(float(below))  # 2^-24 - 2^-70
    assert float(1 + Fraction(2) ** -23 + product) == 1 + 2.0**-23 + 2.0**-24  # to float64 it is a tie of f32
    assert fma(above, below, np.array([above]))[0] == above


def test_exp_and_tanh_are_good() -> None:
    x = np.concatenate([np.linspace(-87.3, 88, 4001), np.linspace(-1, 1, 1001)]).astype(np.float32)
    true = elementary.exp(x)
    assert np.all(np.abs(exp(x) - true) <= 1.0 * np.spacing(true.astype(np.float32)))
    assert exp(np.array([0, -87.4, -1e30, -3e38, 100], np.float32)).tolist() == [1, 0, 0, 0, exp(np.array([88], np.float32))[0]]
    assert np.abs(tanh(x) - elementary.tanh(x)).max() < 2e-7


@pytest.mark.parametrize("name", QUANTIZED)
def test_parts_put_together_are_the_decoded_weights(name: str) -> None:
    kind = BY_NAME[name]
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (7, kind.row_bytes(512)), np.uint8)
    blocks = raw.view(kind.dtype)
    for field in {"d", "m", "dmin"} & set(kind.dtype.names or ()):
        blocks[field] = rng.uniform(0.005, 0.02, blocks.shape) * rng.choice([-1, 1], blocks.shape)
    if name == "MXFP4":
        blocks["e"] = rng.integers(110, 130, blocks.shape)
    codes, scales, minimums = parts(kind, raw)
    group = 512 // scales.shape[1]
    assert codes.dtype == np.int32 and np.abs(codes).max() <= 128
    values = codes * np.repeat(scales.astype(np.float64), group, axis=1)
    if minimums is not None:
        values += np.repeat(minimums.astype(np.float64), group, axis=1)
    true = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert np.abs(values - true).max() <= 2e-7 * np.abs(values).max()


def test_parts_of_scales_that_are_zero_are_no_problem() -> None:
    with np.errstate(all="raise"):
        _, scales, _ = parts(BY_NAME["Q4_K"], np.zeros((3, 144), np.uint8))
    assert not scales.any()


def test_quantized_activations_are_within_half_a_step() -> None:
    x = np.random.default_rng(2).standard_normal((5, 96)).astype(np.float32)
    quants, scales = quantized(x)
    assert quants.min() >= -127 and quants.max() <= 127
    assert np.all(np.abs(quants * np.repeat(scales, 32, axis=1) - x) <= 0.5001 * np.repeat(scales, 32, axis=1))


# operations against loops


class Vectors:
    def __init__(self, **vectors: np.ndarray) -> None:
        self._vectors = vectors

    def raw(self, name: str) -> Any:
        raise NotImplementedError

    def vector(self, name: str) -> np.ndarray:
        return self._vectors[name]

    def has(self, name: str) -> bool:
        return name in self._vectors


@pytest.mark.parametrize("kind", [Reference, SameArithmetic])
@pytest.mark.parametrize("window, softcap, with_sinks", [(0, 0.0, False), (3, 0.0, False), (0, 2.0, False), (70, 2.0, True)])
def test_attention_by_loops(kind: type[Reference], window: int, softcap: float, with_sinks: bool) -> None:
    """Two sequences of 80 and 3 tokens, interleaved; 4 heads share 2 KV heads of 8 values."""
    rng = np.random.default_rng(3)
    order = [(0, 0), (0, 1), (1, 0), *((0, p) for p in range(2, 80)), (1, 1), (1, 2)]
    q, k, v = (rng.standard_normal((len(order), heads * 8)).astype(np.float32) for heads in (4, 2, 2))
    sinks = rng.standard_normal(4).astype(np.float32)
    reference = kind(Vectors(sinks=sinks), q, [p for _, p in order], [s for s, _ in order], [])
    still = np.stack([np.ones((80, 4)), np.zeros((80, 4))], axis=1).astype(np.float32)
    reference.rope(0, q.astype(kind.dtype), k.astype(kind.dtype), v.astype(kind.dtype), heads=4, kv_heads=2, table=still, neox=True)
    found = reference.attention(0, q.astype(kind.dtype), heads=4, kv_heads=2, scale=0.7, window=window, softcap=softcap,
                                sinks="sinks" if with_sinks else None)  # fmt: skip
    for i, (sequence, position) in enumerate(order):
        seen = [j for j, (s, p) in enumerate(order) if s == sequence and p <= position and (not window or p > position - window)]
        for head in range(4):
            at, kv = slice(head * 8, head * 8 + 8), slice(head // 2 * 8, head // 2 * 8 + 8)
            scores = [0.7 * float(q[i, at].astype(float) @ k[j, kv]) for j in seen]
            if softcap:
                scores = [softcap * math.tanh(x / softcap) for x in scores]
            total = sum(map(math.exp, scores)) + (math.exp(float(sinks[head])) if with_sinks else 0.0)
            expected = sum(math.exp(x) / total * v[j, kv].astype(float) for x, j in zip(scores, seen, strict=True))
            assert np.abs(found[i, at] - expected).max() < (1e-12 if kind is Reference else 5e-3)


@pytest.mark.parametrize("neox", [True, False])
def test_rotation_turns_pairs_and_leaves_the_rest(neox: bool) -> None:
    """One head of 6 values, 2 pairs turned by position * (0.5, 0.1)."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((5, 6)) for _ in range(3))
    before = q.copy()
    angles = np.arange(5)[:, None] * np.array([0.5, 0.1])
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    reference = Reference(Vectors(), q, range(5), [0] * 5, [])
    reference.rope(0, q, k, v, heads=1, kv_heads=1, table=table, neox=neox)
    pairs = [(0, 2), (1, 3)] if neox else [(0, 1), (2, 3)]
    for position in range(5):
        for (i, j), angle in zip(pairs, angles[position], strict=True):
            turned = complex(before[position, i], before[position, j]) * complex(math.cos(angle), math.sin(angle))
            np.testing.assert_allclose([q[position, i], q[position, j]], [turned.real, turned.imag], atol=1e-14)
    assert np.array_equal(q[:, 4:], before[:, 4:])


@pytest.mark.parametrize("kind", [Reference, SameArithmetic])
def test_norm_and_gates_by_formula(kind: type[Reference]) -> None:
    x = np.random.default_rng(5).standard_normal((3, 40)).astype(np.float32)
    weight = np.linspace(0.5, 2, 40, dtype=np.float32)
    reference = kind(Vectors(weight=weight), x, [0] * 3, range(3), [2])
    wide = x.astype(np.float64)
    expected = wide * weight / np.sqrt((wide**2).mean(-1, keepdims=True) + 0.01)
    tolerance = 1e-14 if kind is Reference else 3e-7
    given = x.astype(kind.dtype)
    assert np.abs(reference.norm(given, "weight", 0.01) - expected).max() < 4 * tolerance
    assert np.abs(reference.norm(given, "weight", 0.01, add=given) - expected - wide).max() < 4 * tolerance
    silu = [[a / (1 + math.exp(-a)) * a for a in row] for row in wide.tolist()]
    gelu = [[a / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))) * a for a in row] for row in wide.tolist()]
    assert np.abs(reference.gated(given, given, "silu") - silu).max() < 10 * tolerance
    assert np.abs(reference.gated(given, given, "gelu") - gelu).max() < 10 * tolerance
    assert np.array_equal(reference.wanted(x), x[2:])


# real files

GOLDEN = [
    ("smollm2-135m", "smollm2-135m-q4_1.chat"),
    ("smollm2-135m", "smollm2-135m-q4_1.code"),
    ("gemma-3-270m", "gemma3-270m-q4_k_m.strings"),  # longer than its window
    ("qwen2.5-coder-0.5b", "qwen2.5-coder-0.5b-q4_k_m.chat"),
]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("model, prompt", GOLDEN)
def test_the_reference_gives_what_transformers_gives(model: str, prompt: str, real_model: Callable[[str], Path]) -> None:
    """Both on the dequantized weights; the file holds every 16th logit of the last position."""
    golden = np.load(TESTS / "data" / "golden" / f"{prompt}.npz")
    last = len(golden["ids"]) - 1
    logits = by_reference.reference_logits(real_model(model), golden["ids"], wanted=[last])[0]
    assert np.abs(logits[::16] - golden["last_logits"]).max() < 5e-4


@pytest.mark.model
@pytest.mark.slow
def test_kernels_give_a_real_model_the_defined_bits(real_model: Callable[[str], Path]) -> None:
    path, ids = real_model("smollm2-135m"), np.load(TESTS / "data" / "golden" / "smollm2-135m-q4_1.chat.npz")["ids"][:12]
    expected = by_reference.reference_logits(path, ids, SameArithmetic, wanted=[len(ids) - 1])[0]
    with edgeinfer.load(path) as loaded:
        assert np.array_equal(loaded.logits(ids.tolist())[-1], expected)
