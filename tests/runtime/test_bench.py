"""Measuring: bytes and multiply-adds against hand-written sums, medians, the kept peaks, and what is left afterwards. No speeds."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

import edgeinfer
from edgeinfer import bench
from edgeinfer.bench import Limits, Need, Profile, Sequences, Speed
from edgeinfer.kernels.cpu import peaks
from edgeinfer.kernels.jit import code, compile_kernel
from edgeinfer.kernels.levels import LEVELS, native_level
from edgeinfer.model import Model

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
assert _spec and _spec.loader
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

# the tiny model: two layers
WIDTH, Q, KV, FFN, VOCABULARY, LAYERS, HEADS, HEAD_DIM = 64, 64, 32, 96, 288, 2, 4, 16
MATRICES = [(Q, WIDTH), (KV, WIDTH), (KV, WIDTH), (WIDTH, Q), (FFN, WIDTH), (FFN, WIDTH), (WIDTH, FFN)]
HEAD = (VOCABULARY, WIDTH)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written: Path = tiny.tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=256)
    return written


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with edgeinfer.load(path, threads=2, chunk=32) as loaded:
        yield loaded


def by_name(profile: Profile) -> dict[str, Need]:
    assert [n.seconds for n in profile.needs] == sorted((n.seconds for n in profile.needs), reverse=True)
    assert all(n.seconds > 0 for n in profile.needs) and profile.seconds > 0
    return {need.op: need for need in profile.needs}


# --- what ops need ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "batch"), [(0, 1), (70, 1), (5, 3)])
def test_a_decode_step(model: Model, depth: int, batch: int) -> None:
    profile = bench.profile_decode(model, depth, batch)
    assert (profile.rows, profile.position) == (batch, depth)
    needs = by_name(profile)
    matmul = needs["matmul_q4_0"]
    assert matmul.count == LAYERS * len(MATRICES) + 1 and matmul.kind == "int8"
    weights = sum(n * k for n, k in [*MATRICES * LAYERS, HEAD])
    assert matmul.macs == batch * weights
    # of each matrix 18 bytes for 32 weights; per row: its inputs (1 byte, and 16 for each 32), its outputs, and for
    # attn_output and ffn_down the residual
    rows = sum(k * 48 // 32 + 4 * n for n, k in [*MATRICES * LAYERS, HEAD]) + LAYERS * 2 * 4 * WIDTH
    assert matmul.bytes == weights * 18 // 32 + batch * rows
    attention = needs["attention"]
    assert attention.kind == "f32" and attention.count == LAYERS
    assert attention.macs == batch * LAYERS * 2 * (depth + 1) * HEADS * HEAD_DIM
    keys_and_values = LAYERS * (depth + 1) * 2 * KV * 2
    assert attention.bytes == batch * (keys_and_values + LAYERS * 2 * 4 * Q)
    rope = needs["rope_norm"]
    # q, k and v; a cosine and a sine of each pair; k and v rounded to half precision
    assert rope.bytes == batch * LAYERS * (4 * (Q + 2 * KV) + 4 * HEAD_DIM + 2 * 2 * KV) and rope.macs == 0
    assert needs["take"].bytes == batch * 2 * 4 * WIDTH


def test_a_prompt_is_profiled_by_its_last_chunk(model: Model) -> None:
    profile = bench.profile_prefill(model, 80)  # chunks of 32: the last has 16 rows, at 64 .. 79
    assert (profile.rows, profile.position) == (16, 79)
    needs = by_name(profile)
    seen = sum(range(65, 81))
    assert needs["attention"].macs == LAYERS * 2 * seen * HEADS * HEAD_DIM
    assert needs["attention"].bytes == LAYERS * (80 * 2 * KV * 2 + 16 * 2 * 4 * Q)
    body = sum(n * k for n, k in MATRICES * LAYERS)
    assert needs["matmul_q4_0"].macs == 16 * body + VOCABULARY * WIDTH  # the head for one row
    norms = needs["norm"]
    quantized = WIDTH * 48 // 32
    assert norms.count == 2 * LAYERS + 1
    assert norms.bytes == norms.count * 4 * WIDTH + (16 * 2 * LAYERS + 1) * (2 * 4 * WIDTH + quantized)


def test_windows_bound_what_is_read(tmp_path: Path) -> None:
    file = tiny.tiny_gguf(tmp_path / "windows.gguf", "gemma3", "F32", layers=6, window=32)
    with edgeinfer.load(file, threads=1) as model:
        decode, prefill = by_name(bench.profile_decode(model, 99, 1)), by_name(bench.profile_prefill(model, 50))
    tokens = 100 + 5 * 32
    assert decode["attention"].macs == 2 * tokens * HEADS * HEAD_DIM
    assert decode["attention"].bytes == tokens * 2 * KV * 2 + 6 * 2 * 4 * Q
    assert decode["matmul_f32"].kind == "f32"
    assert decode["matmul_f32"].macs == sum(n * k for n, k in [*MATRICES * 6, HEAD])
    pairs = sum(range(1, 51)) + 5 * sum(min(n, 32) for n in range(1, 51))
    assert prefill["attention"].macs == 2 * pairs * HEADS * HEAD_DIM
    assert prefill["attention"].bytes == 6 * (50 * 2 * KV * 2 + 50 * 2 * 4 * Q)


def test_profiling_changes_no_result(model: Model) -> None:
    ids = list(range(40))
    before = model.logits(ids)
    bench.profile_decode(model, 40, 2)
    bench.profile_prefill(model, 40)
    assert np.array_equal(before, model.logits(ids))


# --- speeds ----------------------------------------------------------------------------------------------------------


def test_sides_take_turns_after_a_warm_up() -> None:
    seen: list[str] = []
    values = {"a": [1.0, 10.0, 40.0, 20.0], "b": [1.0, 5.0, 5.0, 5.0]}

    def side(name: str) -> bench.Sampler:
        def measure() -> float:
            seen.append(name)
            return values[name][seen.count(name) - 1]

        return measure

    assert bench.sample([side("a"), side("b")], 3) == [Speed(20.0, 1.5), Speed(5.0, 0.0)]
    assert "".join(seen) == "abababab"


def test_speeds_are_positive_and_sequences_are_returned(model: Model) -> None:
    steps: list[tuple[list[int], list[int]]] = []
    step = model.step

    def noted(tokens: Any, positions: Any, sequences: Any, wanted: Any, take: Any) -> None:
        steps.append((list(positions), list(wanted)))
        step(tokens, positions, sequences, wanted, take)

    model.step = noted  # type: ignore[method-assign, assignment]
    try:
        with bench.prefill(model, 70) as read:
            assert read() > 0
        assert steps == [(list(range(32)), []), (list(range(32, 64)), []), (list(range(64, 70)), [5])]
        steps.clear()
        with bench.decode(model, 2, 3, 2) as decode:
            assert steps == [([0, 1, 2], [2])] * 2  # each sequence is filled once
            assert decode() > 0 and decode() > 0
        assert steps[2:] == [([3, 3], [0, 1]), ([4, 4], [0, 1])] * 2
    finally:
        del model.step
    every = [model.cache.open() for _ in range(model.cache.sequences)]
    for sequence in every:
        model.cache.close(sequence)


def test_too_much_is_refused_and_nothing_kept(model: Model) -> None:
    with pytest.raises(ValueError, match="a batch of 17 sequences; this model's cache holds 16"):
        Sequences(model, 17, 1)
    with pytest.raises(ValueError, match="257 tokens; the context holds 256"):
        Sequences(model, 3, 257)
    with Sequences(model, 16, 1) as every:
        assert len(set(every.indices)) == 16


# --- limits ----------------------------------------------------------------------------------------------------------


def test_the_binding_limit() -> None:
    limits = Limits(read=1e9, int8=4e9, f32=2e9, op=1e-6)
    need = Need("matmul_q4_0", 2, 4.0, 10**9, 2 * 10**9, "int8")
    assert limits.binding(need) == ("memory", 0.25)
    assert limits.binding(Need("matmul_q4_0", 2, 4.0, 10**9, 8 * 10**9, "int8")) == ("int8", 0.5)
    assert limits.binding(Need("attention", 2, 4.0, 10**9, 8 * 10**9, "f32")) == ("f32", 1.0)
    assert limits.binding(Need("take", 10, 1e-4, 4, 0, "")) == ("overhead", pytest.approx(0.1))


def test_peaks_are_positive_and_kept_for_a_day(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    measured: list[int] = []
    real = peaks.measure

    def measure(*arguments: Any) -> peaks.Peaks:
        measured.append(1)
        return real(*arguments) if len(measured) == 1 else peaks.Peaks(1e9, 2e9, 3e-9 * len(measured))

    monkeypatch.setattr(peaks, "measure", measure)
    first = bench.limits(model)
    assert min(first.read, first.int8, first.f32, first.op) > 0 and first.op < 1e-2
    again = bench.limits(model)
    assert (again.int8, again.f32, again.op) == (first.int8, first.f32, first.op) and len(measured) == 1
    (kept,) = (tmp_path / "peaks").iterdir()
    yesterday = time.time() - 25 * 3600
    os.utime(kept, (yesterday, yesterday))
    assert bench.limits(model).int8 == 1e9 and len(measured) == 2
    for torn in ("", "[]", '{"int8": "x"}', '{"int8": 0, "f32": 1, "op": 1}', '{"int8": NaN, "f32": 1, "op": 1}'):
        kept.write_text(torn)
        before = len(measured)
        bench.limits(model)
        assert len(measured) == before + 1
    kept.unlink()
    bench.limits(model, keep=False)
    assert not kept.exists()


def test_a_cache_that_cannot_be_used_only_costs_time(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(peaks, "measure", lambda *_: peaks.Peaks(1e9, 2e9, 3e-9))
    assert bench.limits(model).f32 == 2e9


def test_last_level_cache() -> None:
    assert bench.last_level_cache() is None or 2**15 < bench.last_level_cache() < 2**34  # type: ignore[operator]


@pytest.mark.skipif(not llvm.get_process_triple().startswith("x86_64"), reason="instructions of x86")
@pytest.mark.parametrize(
    ("level", "kernel", "instruction", "count"),
    [
        ("avx512vnni", peaks.INT8, "vpdpbusd", 8 * 12),
        ("avxvnni", peaks.INT8, "vpdpbusd", 8 * 5 * 2),
        ("avx2", peaks.INT8, "vpmaddubsw", 8 * 2 * 2),
        ("avx512vnni", peaks.FLOAT, "vfmadd", 8 * 12),
        ("avx2", peaks.FLOAT, "vfmadd", 8 * 5 * 2),
    ],
)
def test_peak_kernels_are_multiply_adds_and_little_else(level: str, kernel: Any, instruction: str, count: int) -> None:
    lines = [line.split() for line in compile_kernel(kernel, LEVELS[level], assembly=True).splitlines() if line.strip()]
    assert sum(word.startswith(instruction) for words in lines for word in words) == count
    assert sum("(%rsp)" in word for words in lines for word in words) <= 2  # nothing is spilled


def test_time_ops_runs_every_op_of_the_table() -> None:
    level = native_level()
    table = peaks.op_table(3)
    data = np.ones(4096 + 1024, np.uint8)
    for row, turns in zip(table, (10, 20_000, 10), strict=True):
        row[peaks.OP_KERNEL], row[peaks.OP_UNITS] = code(level).address(peaks.INT8), 2
        row[peaks.OP_ROWS_PER_CHUNK] = row[peaks.OP_BARRIER] = 1
        row[peaks.DATA], row[peaks.TURNS] = data.ctypes.data, turns
    step = peaks.Step(1, 1)
    step.block[peaks.ROWS] = 1
    seconds = peaks.time_ops(code(level), 2, table, step.block)
    assert seconds.shape == (3,) and (seconds > 0).all() and seconds.argmax() == 1
