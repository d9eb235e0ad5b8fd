"""Every op through a small recorded program: bit for bit what the reference defines, and near float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gguf
import numpy as np
import pytest

from edgeinfer.formats.blocks import BY_NAME, BlockType
from edgeinfer.kernels.builder import Builder, Rows
from edgeinfer.kernels.jit import code
from edgeinfer.kernels.levels import LEVELS, host_features, native_level
from edgeinfer.kernels.packings import PACKINGS
from edgeinfer.kernels.pages import LayerPages, head_bytes
from edgeinfer.kernels.program import Program
from edgeinfer.kernels.reference import Reference
from edgeinfer.kernels.same_arithmetic import SameArithmetic, quantized
from edgeinfer.kernels.step import Step
from edgeinfer.kernels.team import Cancelled

HERE = [level.name for level in LEVELS.values() if host_features().issuperset(level.needs)]
NATIVE = native_level().name
EVERY_LEVEL = pytest.mark.parametrize("level", HERE)

Describe = Callable[[Any], None]


def random(*shape: int, seed: int = 0, size: float = 1.0) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * size).astype(np.float32)


class Weights:
    """Made-up weights, as a builder and as a reference ask for them."""

    def __init__(self) -> None:
        self.matrices: dict[str, tuple[BlockType, np.ndarray, int]] = {}
        self.vectors: dict[str, np.ndarray] = {}

    def matrix(self, name: str, outputs: int, columns: int, kind: str = "F32") -> None:
        values = random(outputs, columns, seed=len(self.matrices), size=columns**-0.5)
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).view(np.uint8)
        self.matrices[name + ".weight"] = BY_NAME[kind], raw, columns

    def add(self, name: str, values: np.ndarray) -> None:
        self.vectors[name] = values

    def packed(self, name: str) -> Any:
        kind, raw, columns = self.matrices[name]
        layout = PACKINGS[kind.name]
        return layout, layout.pack(raw, columns), len(raw), columns

    def raw(self, name: str) -> tuple[BlockType, np.ndarray]:
        return self.matrices[name][:2]

    def vector(self, name: str) -> np.ndarray:
        return self.vectors[name]

    def has(self, name: str) -> bool:
        return name in self.vectors or name in self.matrices


def cache(layers: int, kv_heads: int, head_dim: int, sequences: int = 4, ring: int = 4) -> list[LayerPages]:
    """Pages of all layers in one arena, handed to sequences in no order, and full of what an earlier reply left."""
    layer_bytes = kv_heads * head_bytes(head_dim)
    arena = np.full((sequences * ring, layers * layer_bytes), 0x3C, np.uint8)  # halves a little above 1
    table = np.random.default_rng(5).permutation(sequences * ring).reshape(sequences, ring).astype(np.int64)
    return [LayerPages(arena, i * layer_bytes, table) for i in range(layers)]


class Recorded:
    """A program of one's own description. Its logits are whatever was given to output()."""

    def __init__(self, describe: Describe, weights: Weights, columns: int, rows: int, layers: Sequence[LayerPages] = (),
                 level: str = NATIVE, threads: int = 1, wanted: int | None = None) -> None:  # fmt: skip
        self.builder = Builder(code(LEVELS[level]), weights, Step(rows, wanted or rows), layers)
        describe(self.builder)
        assert self.builder.logits is not None
        self._inputs = np.zeros((0, columns), np.float32)
        self._nothing = np.zeros((0, self.builder.logits.columns), np.float32)
        self._program = Program(self.builder, threads, lambda tokens: self._inputs[tokens], self.builder.logits.columns)

    def __call__(self, inputs: np.ndarray, positions: Sequence[int] = (), sequences: Sequence[int] = (),
                 wanted: Sequence[int] | None = None) -> np.ndarray:  # fmt: skip
        """One step with a row for each of `inputs`. The program's tokens number them, so there are at most as many as logits."""
        self._inputs, n = inputs, len(inputs)
        taken: list[np.ndarray] = []
        positions, sequences = (np.array(x or [0] * n, np.int64) for x in (positions, sequences))
        self._program.vocabulary = n
        self._program.forward(np.arange(n), positions, sequences, range(n) if wanted is None else wanted,
                              lambda first, logits: taken.append(logits.copy()))  # fmt: skip
        return np.concatenate([self._nothing, *taken])

    def close(self) -> None:
        self._program.close()


def compare(describe: Describe, weights: Weights, inputs: np.ndarray, positions: Sequence[int] = (), sequences: Sequence[int] = (),
            layers: Sequence[LayerPages] = (), level: str = NATIVE) -> np.ndarray:  # fmt: skip
    """Kernels against the defined arithmetic, every bit; then the error against float64, relative to the result's spread."""
    n = len(inputs)
    program = Recorded(describe, weights, inputs.shape[1], n, layers, level)
    found = program(inputs, positions, sequences)
    program.close()
    by_kind = []
    for kind in (SameArithmetic, Reference):
        # where an op knows no positions, every row is a sequence
        reference = kind(weights, inputs, positions or [0] * n, sequences or range(n), range(n))
        describe(reference)
        by_kind.append(reference.logits)
    same, exact = by_kind
    assert found.dtype == same.dtype and np.array_equal(found, same)
    error: np.ndarray = np.abs(found - exact) / exact.std()
    return error


# single rows


def norm(columns: int, add: bool = False, epsilon: float = 1e-6) -> Describe:
    def describe(b: Any) -> None:
        x = b.embed(columns)
        y = b.norm(x, "norm.weight", epsilon)
        b.output(b.norm(y, "post.weight", epsilon, add=x) if add else y)

    return describe


@EVERY_LEVEL
@pytest.mark.parametrize("columns", [16, 40, 576])
@pytest.mark.parametrize("add", [False, True])
def test_norm(columns: int, add: bool, level: str) -> None:
    weights = Weights()
    weights.add("norm.weight", random(columns, seed=1))
    weights.add("post.weight", random(columns, seed=2))
    inputs = random(19, columns) * np.logspace(-4, 4, 19, dtype=np.float32)[:, None]
    inputs[3] = 0
    assert compare(norm(columns, add), weights, inputs, level=level).max() < 1e-6


def awkward(columns: int) -> np.ndarray:
    """Rows for quantizing: ties, zeros, one value, huge, tiny, and just random."""
    rows = random(10, columns)
    rows[0] = np.resize(np.arange(-127, 128), columns) + 0.5  # with 127 among them the scale is 1
    rows[0, ::32] = 127
    rows[1] = 0
    rows[2] = 0
    rows[2, 5] = -3
    rows[3] *= 1e37
    rows[4] *= 1e-37
    rows[5] *= 1e-43  # below the smallest normal number
    rows[6] = 1
    rows[7] = -rows[7, 0]
    return rows


@EVERY_LEVEL
@pytest.mark.parametrize("columns", [32, 544])  # more than a unit of work
def test_quantize(columns: int, level: str) -> None:
    kept: list[Rows] = []

    def describe(b: Builder) -> None:
        x = b.embed(columns)
        b.quantize(x)
        b.quantize(x)  # once is enough
        kept.append(x)
        b.output(x)

    inputs = awkward(columns)
    program = Recorded(describe, Weights(), columns, 16, level=level)
    assert [op.kernel.name for op in program.builder.ops] == ["quantize"]
    assert np.array_equal(program(inputs), inputs)
    (x,) = kept
    assert x.quants is not None and x.records is not None
    quants, records = x.quants[: len(inputs)], x.records[: len(inputs)].view(np.int32).reshape(len(inputs), -1, 4)
    expected, scales = quantized(inputs)
    halves = expected.reshape(len(inputs), -1, 2, 16).sum(-1)
    assert np.array_equal(quants, expected)
    assert np.array_equal(records[..., 0].view(np.float32), scales)
    assert np.array_equal(records[..., 1].view(np.float32), scales * halves.sum(-1).astype(np.float32))
    assert np.array_equal(records[..., 2:], halves)
    # and of its own: a value is off by half a step at most
    values = quants.astype(np.float64).reshape(len(inputs), -1, 32) * scales[..., None].astype(np.float64)
    steps = np.abs(inputs.astype(np.float64)).reshape(len(inputs), -1, 32).max(-1, keepdims=True) / 127
    assert np.all(np.abs(values - inputs.reshape(values.shape)) <= 0.5001 * steps + 1e-30)
    assert quants[0, 1:4].tolist() == [-126, -124, -124]  # -125.5, -124.5, -123.5: ties go to even
    program.close()


@EVERY_LEVEL
@pytest.mark.parametrize("producer", ["norm", "gated"])
def test_what_produces_rows_quantizes_them_to_the_same_bits(producer: str, level: str) -> None:
    columns = 544
    weights = Weights()
    weights.add("norm.weight", random(columns))
    weights.matrix("after", 16, columns, "Q8_0")

    def describe(b: Any) -> None:
        x = b.embed(columns)
        y = b.norm(x, "norm.weight", 1e-5) if producer == "norm" else b.gated(x, x, "silu")
        b.output(*b.linear(y, "after"))

    program = Recorded(describe, weights, columns, 4, level=level)
    assert "quantize" not in [op.kernel.name for op in program.builder.ops]
    program.close()
    compare(describe, weights, random(9, columns), level=level)


@EVERY_LEVEL
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_span_that_is_not_finite_has_the_scale_nan_and_spoils_no_other(bad: float, level: str) -> None:
    kept: list[Rows] = []

    def describe(b: Builder) -> None:
        kept.append(b.embed(96))
        b.quantize(kept[0])
        b.output(kept[0])

    inputs = random(16, 96)
    program = Recorded(describe, Weights(), 96, 16, level=level)
    clean = inputs.copy()
    program(clean)
    (x,) = kept
    assert x.quants is not None and x.records is not None
    quants, records = x.quants.copy(), x.records.copy()
    inputs[:, 40] = bad
    program(inputs)
    scales = x.records.view(np.float32).reshape(16, 3, 4)[..., 0]
    assert np.isnan(scales[:, 1]).all()
    for span in (0, 2):
        assert np.array_equal(x.quants[:, 32 * span : 32 * span + 32], quants[:, 32 * span : 32 * span + 32])
        assert np.array_equal(x.records[:, 16 * span : 16 * span + 16], records[:, 16 * span : 16 * span + 16])


@EVERY_LEVEL
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated(activation: str, level: str) -> None:
    columns = 1056  # more than two units of work

    def describe(b: Any) -> None:
        gate = b.embed(columns)
        b.output(b.gated(gate, b.norm(gate, "norm.weight", 1e-5), activation))

    weights = Weights()
    weights.add("norm.weight", np.ones(columns, np.float32))
    inputs = random(11, columns, size=3.0)
    inputs[0, :8] = [0, -0.0, 100, -100, 1e-30, -87.3, 88.8, 1e4]
    assert compare(describe, weights, inputs, level=level).max() < 1e-5


@pytest.mark.parametrize("wanted", [[0], [3, 4, 9], list(range(10)), []])
def test_the_head_runs_for_the_wanted_rows_only_in_as_many_parts_as_it_takes(wanted: list[int]) -> None:
    weights = Weights()
    weights.matrix("output", 32, 64, "Q4_0")

    def describe(b: Any) -> None:
        b.output(*b.linear(b.wanted(b.embed(64)), "output"))

    inputs = random(10, 64)
    program = Recorded(describe, weights, 64, 10, wanted=4)
    every = program(inputs)
    assert np.array_equal(program(inputs, wanted=wanted), every[wanted])
    program.close()


# matrix products


@EVERY_LEVEL
@pytest.mark.parametrize("rows", [1, 2, 3, 11])
def test_linear_in_three_formats_with_biases_and_a_residual(rows: int, level: str) -> None:
    weights = Weights()
    for name, outputs, kind in (("q", 48, "Q4_0"), ("k", 33, "Q5_1"), ("v", 17, "F16")):
        weights.matrix(name, outputs, 96, kind)
        weights.add(name + ".bias", random(outputs, seed=9))
    weights.matrix("o", 96, 48, "BF16")
    weights.add("o.bias", random(96))
    for outputs in ("q", "k", "v", "o"):

        def describe(b: Any, chosen: str = outputs) -> None:
            x = b.embed(96)
            results = dict(zip("qkv", b.linear(x, "q", "k", "v"), strict=True))
            (results["o"],) = b.linear(results["q"], "o", add=x)
            b.output(results[chosen])

        error = compare(describe, weights, random(rows, 96), level=level)
        if outputs == "v":  # alone takes floats as they are
            assert error.max() < 1e-5


def test_linear_that_does_not_fit_is_refused() -> None:
    weights = Weights()
    weights.matrix("wide", 16, 64)
    builder = Builder(code(LEVELS[NATIVE]), weights, Step(1, 1), [])
    x = builder.embed(32)
    with pytest.raises(ValueError, match=r"wide.weight has 64 columns; its input has 32"):
        builder.linear(x, "wide")
    with pytest.raises(ValueError, match=r"wide.weight has 16 rows; the residual has 32 columns"):
        builder.linear(builder._rows("other", 64, 0), "wide", add=x)


# rotation and attention


def table(positions: int, pairs: int) -> np.ndarray:
    angles = np.arange(positions)[:, None] * 100.0 ** -(np.arange(pairs) / pairs)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def attention(heads: int, kv_heads: int, head_dim: int, *, pairs: int | None = None, neox: bool = True,
              norms: bool = False, window: int = 0, softcap: float = 0.0, sinks: bool = False, layer: int = 0,
              size: float = 2.0) -> tuple[Describe, Weights]:  # fmt: skip
    """Three products, the rotation and an attention; and weights for them. size: times 1 / sqrt(head_dim), the scale."""
    weights = Weights()
    for name, outputs in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        weights.matrix(name, outputs * head_dim, 16)
    weights.add("q_norm.weight", random(head_dim, seed=1) + 1)
    weights.add("k_norm.weight", random(head_dim, seed=2) + 1)
    weights.add("sinks", random(heads, seed=3, size=2.0))
    angles = table(256, head_dim // 2 if pairs is None else pairs)

    def describe(b: Any) -> None:
        q, k, v = b.linear(b.embed(16), "q", "k", "v")
        q_norm, k_norm = ("q_norm.weight", "k_norm.weight") if norms else (None, None)
        b.rope(layer, q, k, v, heads=heads, kv_heads=kv_heads, table=angles, neox=neox, q_norm=q_norm, k_norm=k_norm, epsilon=1e-6)
        b.output(b.attention(layer, q, heads=heads, kv_heads=kv_heads, scale=size / math.sqrt(head_dim), window=window,
                             softcap=softcap, sinks="sinks" if sinks else None))  # fmt: skip

    return describe, weights


def ragged(*lengths: int) -> tuple[list[int], list[int]]:
    """Positions and sequences of whole sequences, cut into pieces of 50 that alternate within one step."""
    pieces = [(s, p) for s, n in enumerate(lengths) for p in range(0, n, 50)]
    rows = [(q, s) for s, p in sorted(pieces, key=lambda piece: piece[1]) for q in range(p, min(p + 50, lengths[s]))]
    return [p for p, _ in rows], [s for _, s in rows]


LONG = (201, 65, 1, 128)  # first and last tokens of pages, and a sequence of one
SHORT = (67, 3)
ATTENTION: list[tuple[str, tuple[int, ...], tuple[int, int, int], dict[str, Any]]] = [
    ("alone", LONG, (2, 2, 16), {}),
    ("shared by 2", LONG, (4, 2, 64), {}),
    ("shared by 3", SHORT, (6, 2, 32), {}),
    ("shared by 6", SHORT, (6, 1, 128), {}),
    ("256 wide", SHORT, (2, 1, 256), {}),
    ("window of 1", SHORT, (2, 1, 16), {"window": 1}),
    ("window within a page", LONG, (2, 1, 16), {"window": 40}),
    ("window of a page", LONG, (3, 1, 16), {"window": 64}),
    ("window over pages", LONG, (2, 1, 16), {"window": 100}),
    ("softcap", SHORT, (2, 1, 16), {"softcap": 1.5, "size": 8.0}),
    ("sinks", LONG, (4, 2, 16), {"sinks": True}),
    ("sinks, softcap, window", LONG, (4, 2, 16), {"sinks": True, "softcap": 3.0, "window": 70}),
    ("sharp", SHORT, (2, 1, 16), {"size": 300.0}),
    ("normal pairs", SHORT, (2, 1, 32), {"neox": False}),
    ("normed heads", SHORT, (4, 2, 48), {"norms": True}),
    ("normed heads, normal pairs", SHORT, (4, 2, 80), {"norms": True, "neox": False}),
    ("half turned", SHORT, (2, 1, 64), {"pairs": 16}),
    ("half turned, normal pairs", SHORT, (2, 1, 64), {"pairs": 16, "neox": False}),
    ("13 pairs", SHORT, (2, 1, 48), {"pairs": 13}),
    ("13 normal pairs", SHORT, (2, 1, 48), {"pairs": 13, "neox": False}),
    ("3 pairs", SHORT, (2, 1, 16), {"pairs": 3}),
    ("second layer", SHORT, (2, 1, 16), {"layer": 1}),
]


@pytest.mark.parametrize("lengths, heads, options", [c[1:] for c in ATTENTION], ids=[c[0] for c in ATTENTION])
def test_rotation_and_attention(lengths: tuple[int, ...], heads: tuple[int, int, int], options: dict[str, Any]) -> None:
    describe, weights = attention(*heads, **options)
    positions, sequences = ragged(*lengths)
    layers = cache(2, heads[1], heads[2])
    error = compare(describe, weights, random(len(positions), 16), positions, sequences, layers)
    # half precision of keys moves a sharp softmax more
    assert error.max() < (0.3 if options.get("size") == 300.0 else 0.01)


@pytest.fixture(scope="module")
def mixed() -> Iterator[tuple[Describe, Weights, np.ndarray, np.ndarray]]:
    """An attention of every feature, 201 inputs, and its outputs when they are one step."""
    describe, weights = attention(6, 2, 32, norms=True, window=80, softcap=20.0, sinks=True)
    inputs = random(201, 16)
    program = Recorded(describe, weights, 16, 201, cache(1, 2, 32))
    yield describe, weights, inputs, program(inputs, list(range(201)))
    program.close()


CUTS = [range(202), range(0, 257, 64), range(0, 251, 50), [0, 1, 3, 66, 67, 130, 201], [0, 63, 64, 65, 200, 201]]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("threads", [1, 3])
def test_any_chunking_gives_the_same_bits(mixed: Any, cuts: Sequence[int], threads: int) -> None:
    describe, weights, inputs, expected = mixed
    program = Recorded(describe, weights, 16, 201, cache(1, 2, 32), threads=threads)
    parts = [program(inputs[a:b], list(range(201))[a:b]) for a, b in zip(cuts, cuts[1:], strict=False) if a < 201]
    program.close()
    assert np.array_equal(np.concatenate(parts), expected)


def test_neighbours_in_a_step_do_not_change_a_sequence(mixed: Any) -> None:
    """Two sequences decode side by side, at other positions; one is the known one."""
    describe, weights, inputs, expected = mixed
    program = Recorded(describe, weights, 16, 201, cache(1, 2, 32))
    other = random(201, 16, seed=77)
    program(other[:100], list(range(100)), [3] * 100)
    found = []
    for i in range(0, 100, 2):
        rows = np.stack([inputs[i], other[100 + i // 2], inputs[i + 1]])
        found += list(program(rows, [i, 100 + i // 2, i + 1], [1, 3, 1])[[0, 2]])
    program.close()
    assert np.array_equal(np.stack(found), expected[:100])


def test_a_ring_shorter_than_the_text_holds_a_window(mixed: Any) -> None:
    describe, weights, inputs, expected = mixed
    program = Recorded(describe, weights, 16, 20, cache(1, 2, 32, ring=3))  # 192 tokens: the window's 80 and a step
    parts = [program(inputs[a : a + 20], list(range(201))[a : a + 20]) for a in range(0, 201, 20)]
    program.close()
    assert np.array_equal(np.concatenate(parts), expected)


@EVERY_LEVEL
def test_every_level_gives_the_same_bits(mixed: Any, level: str) -> None:
    describe, weights, inputs, expected = mixed
    program = Recorded(describe, weights, 16, 201, cache(1, 2, 32), level)
    assert np.array_equal(program(inputs, list(range(201))), expected)
    program.close()


def test_heads_of_other_sizes_are_refused() -> None:
    for head_dim in (24, 528):
        describe, weights = attention(1, 1, head_dim, pairs=4)
        with pytest.raises(ValueError, match=f"head size of {head_dim}"):
            describe(Builder(code(LEVELS[NATIVE]), weights, Step(1, 1), cache(1, 1, head_dim)))


# what is verified before a program runs, and before a step


def builder(rows: int = 4) -> tuple[Builder, Weights]:
    weights = Weights()
    weights.matrix("blk.0.a", 32, 32)
    weights.matrix("blk.1.a", 32, 32)
    weights.add("norm.weight", np.ones(32, np.float32))
    return Builder(code(LEVELS[NATIVE]), weights, Step(rows, rows), []), weights


def test_a_buffer_that_is_too_small_is_refused() -> None:
    b, _ = builder(rows=4)
    b.output(b.norm(b.embed(32), "norm.weight", 1e-5))
    b.norm(Rows(np.zeros((3, 32), np.float32), 32, 0), "norm.weight", 1e-5)
    with pytest.raises(ValueError, match=r"op 1 \(norm\): argument \d+ touches 512 bytes of an array of 384"):
        b.finish()


def test_a_vector_that_is_too_short_is_refused() -> None:
    b, weights = builder()
    q, k, v = (b._rows(name, 32, 0) for name in "qkv")
    b.layers = cache(1, 2, 16)
    weights.add("short.weight", np.ones(8, np.float32))
    b.rope(0, q, k, v, heads=2, kv_heads=2, table=table(4, 8), neox=True, q_norm="short.weight", k_norm="short.weight")
    b.output(b.embed(32))
    with pytest.raises(ValueError, match=r"op 0 \(rope_neox\): argument \d+ touches 64 bytes of an array of 32"):
        b.finish()


def test_ops_of_one_group_that_write_the_same_rows_are_refused() -> None:
    b, _ = builder()
    b.output(b.linear(b.embed(32), "blk.0.a", "blk.1.a")[0])  # one role, so one buffer, and no barrier between
    with pytest.raises(ValueError, match=r"op 1 \(matmul_f32\) and op 0 run at the same time and share memory that one writes"):
        b.finish()


def test_a_network_without_an_end_is_refused() -> None:
    b, _ = builder()
    b.embed(32)
    with pytest.raises(ValueError, match="output"):
        b.finish()


def test_steps_out_of_range_are_refused() -> None:
    b, _ = builder(rows=4)
    b.output(b.norm(b.embed(32), "norm.weight", 1e-5))
    program = Program(b, 1, lambda tokens: np.zeros((len(tokens), 32), np.float32), 32)

    def step(tokens: Sequence[int], wanted: Sequence[int] = (), positions: int | None = None) -> None:
        n = len(tokens) if positions is None else positions
        zeros = np.zeros(n, np.int64)
        program.forward(np.array(tokens, np.int64), zeros, zeros, wanted, lambda first, logits: None)

    step([0, 31], [1])
    for tokens, wanted, positions in (([], [], None), ([0] * 5, [], None), ([0], [], 2), ([32], [], None), ([-1], [], None),
                                      ([0], [1], None), ([0], [-1], None)):  # fmt: skip
        with pytest.raises(ValueError):
            step(tokens, wanted, positions)
    program.close()
    with pytest.raises(Cancelled):
        step([0])
