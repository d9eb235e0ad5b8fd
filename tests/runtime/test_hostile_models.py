"""Model files whose parts do not fit together: refused by name before a kernel sees them (no kernel checks bounds)."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import EdgeInferError, ModelFormatError, TokenizerError
from edgeinfer.formats.blocks import BY_NAME
from edgeinfer.formats.gguf import open_gguf
from edgeinfer.formats.gguf_write import write_gguf
from edgeinfer.sampling import GenerationError

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
assert _spec and _spec.loader
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

Tensors = dict[str, tuple[tuple[int, ...], Any, np.ndarray]]


def rewrite(path: Path, change: Callable[[dict[str, Any], Tensors], None], out: Path | None = None) -> Path:
    """The file with its metadata and tensors changed."""
    with open_gguf(path) as file:
        metadata = dict(file.metadata)
        tensors = {name: (t.shape, t.type, file.raw(name).copy()) for name, t in file.tensors.items()}
    change(metadata, tensors)
    out = out or path
    write_gguf(out, metadata, [(name, *rest) for name, rest in tensors.items()])
    return out


def refusal(path: Path, planned: bool = True) -> str:
    """What load() says; plan() refuses the file as well, unless it needs to look for tensors that are not there."""
    with pytest.raises(ModelFormatError) as error:
        edgeinfer.load(path, threads=1).close()
    assert str(path) in str(error.value) and len(str(error.value)) < 2000
    if planned:
        with pytest.raises(ModelFormatError):
            edgeinfer.plan(path)
    return error.value.reason


def f32(*shape: int) -> tuple[tuple[int, ...], Any, np.ndarray]:
    return shape, BY_NAME["F32"], np.ones(shape, np.float32)


# --- hyper-parameters ------------------------------------------------------------------------------------------------

COUNTS = ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
          "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count"]  # fmt: skip
BAD_COUNTS = [0, 2**32 - 1, np.int32(-1), "4", np.float32(math.nan), 1.0, True, np.array([4, 4], np.uint32), ["4"], 2**63]


@pytest.mark.parametrize("value", BAD_COUNTS, ids=[repr(v) for v in BAD_COUNTS])
@pytest.mark.parametrize("key", COUNTS)
def test_counts(tmp_path: Path, key: str, value: Any) -> None:
    assert f"llama.{key}" in refusal(tiny.tiny_gguf(tmp_path / "m.gguf", metadata={f"llama.{key}": value}))


@pytest.mark.parametrize("key", ["block_count", "context_length", "embedding_length", "feed_forward_length",
                                 "attention.head_count", "attention.layer_norm_rms_epsilon"])  # fmt: skip
def test_a_missing_key(tmp_path: Path, key: str) -> None:
    assert f"llama.{key}" in refusal(tiny.tiny_gguf(tmp_path / "m.gguf", metadata={f"llama.{key}": None}))


@pytest.mark.parametrize(
    "key, value",
    [
        ("block_count", 1), ("block_count", 3), ("block_count", 1000), ("embedding_length", 32), ("embedding_length", 128),
        ("feed_forward_length", 64), ("feed_forward_length", 128), ("feed_forward_length", 1 << 20),
        ("attention.head_count", 2), ("attention.head_count", 8), ("attention.head_count", 4096),
        ("attention.head_count", 3), ("attention.head_count_kv", 1), ("attention.head_count_kv", 4),
        ("attention.head_count_kv", 3), ("attention.key_length", 32), ("attention.key_length", 8),
        ("attention.value_length", 32), ("rope.dimension_count", 18), ("rope.dimension_count", 15),
    ],
)  # fmt: skip
def test_a_count_that_does_not_fit_the_tensors(tmp_path: Path, key: str, value: int) -> None:
    path = tiny.tiny_gguf(tmp_path / "m.gguf", metadata={f"llama.{key}": value, "llama.attention.value_length": None}
                          if key == "attention.key_length" else {f"llama.{key}": value})  # fmt: skip
    reason = refusal(path)
    assert key.rpartition(".")[2] in reason and "llama." in reason


@pytest.mark.parametrize(
    "key, values",
    [
        ("attention.layer_norm_rms_epsilon", [0.0, -1e-5, math.nan, math.inf, 2.0, "1e-5", 1]),
        ("rope.freq_base", [0.0, -1.0, 1.0, math.nan, math.inf, 10000, "10000"]),
        ("rope.scale_linear", [0.0, -1.0, math.nan, np.array([1.0], np.float32)]),
        ("attention.sliding_window", [2**32 - 1, np.int32(-1), 1.5]),
        ("rope.scaling.type", ["longrope", "", 3, ["yarn"], np.array([1, 2], np.int32)]),
        ("expert_count", [8, np.array([8, 8], np.uint32)]),
        ("attn_logit_softcapping", [50.0, math.nan]),
        ("attention.clamp_kqv", [8.0, ["a", "b"]]),
    ],
)
def test_other_keys(tmp_path: Path, key: str, values: list[Any]) -> None:
    for value in values:
        reason = refusal(tiny.tiny_gguf(tmp_path / "m.gguf", metadata={f"llama.{key}": value}))
        assert f"llama.{key.removesuffix('.type')}" in reason, value


@pytest.mark.parametrize(
    "kind, options, named",
    [
        ("linear", {}, "factor"),
        ("linear", {"factor": 0.0}, "factor"),
        ("linear", {"factor": math.nan}, "factor"),
        ("llama3", {"factor": 8.0}, "original_context_length"),
        ("llama3", {"factor": 8.0, "original_context_length": 0}, "original_context_length"),
        ("llama3", {"factor": 8.0, "original_context_length": 64, "low_freq_factor": 4.0}, "freq_factor"),
        ("yarn", {"factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 0.0}, "yarn_beta_fast"),
        ("yarn", {"factor": 4.0, "original_context_length": 64, "yarn_beta_slow": -1.0}, "yarn_beta_slow"),
        ("yarn", {"factor": 4.0, "original_context_length": 64, "attn_factor": math.inf}, "attn_factor"),
    ],
)
def test_rope_scaling(tmp_path: Path, kind: str, options: dict[str, Any], named: str) -> None:
    metadata = {"llama.rope.scaling.type": kind, **{f"llama.rope.scaling.{key}": value for key, value in options.items()}}
    assert named in refusal(tiny.tiny_gguf(tmp_path / "m.gguf", metadata=metadata))


@pytest.mark.parametrize("value", [None, "", "llamas", "../llama", "_transformer", "LLAMA", "llama\0", 7, "\u212aama"])
def test_architecture(tmp_path: Path, value: Any) -> None:
    reason = refusal(tiny.tiny_gguf(tmp_path / "m.gguf", metadata={"general.architecture": value}))
    assert "general.architecture" in reason


# --- tensors ---------------------------------------------------------------------------------------------------------

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_tensor_missing_or_of_another_shape(tmp_path: Path, architecture: str) -> None:
    """Smaller, larger, transposed, flattened, a dimension more: every tensor, every way."""
    good = tiny.tiny_gguf(tmp_path / "m.gguf", architecture, "F32", embedding=64, ffn=96, tied=False)
    edgeinfer.load(good, threads=1).close()
    with open_gguf(good) as file:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    bad = tmp_path / "bad.gguf"
    for name, shape in shapes.items():
        if name.startswith("blk.1."):
            continue
        rewrite(good, lambda _, tensors, name=name: tensors.pop(name), bad)  # type: ignore[misc]
        if name == "output.weight" or name.endswith(".bias"):
            edgeinfer.load(bad, threads=1).close()  # tied, or without a bias: another sound model
        else:
            assert name in refusal(bad, planned=name == "token_embd.weight")
        others = [tuple(n - 16 for n in shape), tuple(n + 16 for n in shape), (*shape, 1), (shape[0], *shape), (1, *shape)]
        others += [shape[::-1], (math.prod(shape),), (shape[0] * 2, *(n // 2 for n in shape[1:])), (1,)]
        for other in others:
            if other != shape and all(n > 0 for n in other):
                rewrite(good, lambda _, tensors, name=name, other=other: tensors.update({name: f32(*other)}), bad)  # type: ignore[misc]
                assert name in refusal(bad) or name == "token_embd.weight"


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "blk.0.attn_output.bias", "blk.0.ffn_gate_inp.weight", "other.weight",
                                  "rope_factors_long.weight", "noname", "", "blk.0.attn_q.scale"])  # fmt: skip
def test_a_tensor_that_nothing_uses(tmp_path: Path, name: str) -> None:
    """A bias that the architecture has no place for would be left out in silence."""
    path = tiny.tiny_gguf(tmp_path / "m.gguf", "llama", "F32")
    try:
        rewrite(path, lambda _, tensors: tensors.update({name: f32(64)}))
    except ModelFormatError:
        assert name == ""  # not even writable
        return
    if name == "blk.0.attn_output.bias":
        edgeinfer.load(path, threads=1).close()  # applied like any bias
        return
    with pytest.raises(ModelFormatError) as error:
        edgeinfer.load(path, threads=1)
    assert name in str(error.value)


@pytest.mark.parametrize("block", ["2", "4294967296", "-1", "00", "01", "1e0", "\u0661", "", "0x0", "9" * 40])
def test_block_numbers_in_names(tmp_path: Path, block: str) -> None:
    path = tiny.tiny_gguf(tmp_path / "m.gguf", "llama", "F32")
    shape = f32(64, 64)
    rewrite(path, lambda _, tensors: tensors.update({f"blk.{block}.attn_q.weight": shape}))
    assert "block" in refusal(path) or "blk." in refusal(path)


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight", "blk.1.ffn_down.weight"])
@pytest.mark.parametrize("kind", ["I8", "I32", "F64"])
def test_types_that_hold_no_weights(tmp_path: Path, name: str, kind: str) -> None:
    path = tiny.tiny_gguf(tmp_path / "m.gguf", "llama", "F32", tied=False)

    def change(_: dict[str, Any], tensors: Tensors) -> None:
        shape = tensors[name][0]
        tensors[name] = shape, BY_NAME[kind], np.zeros(math.prod(shape) * BY_NAME[kind].nbytes, np.uint8)

    assert name in refusal(rewrite(path, change))


@pytest.mark.parametrize("shape", [(1,), (7,), (9,), (16,), (8, 1), (64,)])
def test_rope_factors_of_a_wrong_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tiny.tiny_gguf(tmp_path / "m.gguf", "llama", "F32")
    rewrite(path, lambda _, tensors: tensors.update({"rope_freqs.weight": f32(8)}))
    edgeinfer.load(path, threads=1).close()
    rewrite(path, lambda _, tensors: tensors.update({"rope_freqs.weight": f32(*shape)}))
    assert "rope_freqs.weight" in refusal(path)


@pytest.mark.parametrize("value", [0.0, math.nan, -1.0, math.inf])
def test_rope_factors_that_are_no_factors(tmp_path: Path, value: float) -> None:
    path = tiny.tiny_gguf(tmp_path / "m.gguf", "llama", "F32")
    shape, kind, data = f32(8)
    data[3] = value
    rewrite(path, lambda _, tensors: tensors.update({"rope_freqs.weight": (shape, kind, data)}))
    with pytest.raises(ModelFormatError, match="rope_freqs.weight"):
        edgeinfer.load(path, threads=1)


# --- vocabulary ------------------------------------------------------------------------------------------------------


def test_more_tokens_than_embeddings(tmp_path: Path) -> None:
    path = tiny.tiny_gguf(tmp_path / "m.gguf", "llama", "F32")
    rewrite(path, lambda _, tensors: tensors.update({"token_embd.weight": f32(287, 64)}))
    with pytest.raises(ModelFormatError, match="288.*287"):
        edgeinfer.load(path, threads=1)


def test_more_embeddings_than_tokens(tmp_path: Path) -> None:
    """Padding, as many models have it: never sampled."""
    path = tiny.tiny_gguf(tmp_path / "m.gguf", "llama", "F32")

    def change(_: dict[str, Any], tensors: Tensors) -> None:
        _, kind, data = tensors["token_embd.weight"]
        padded = np.concatenate([data, data[:32] * 0 + 66])
        tensors["token_embd.weight"] = (320, 64), kind, padded

    with edgeinfer.load(rewrite(path, change), threads=1) as model:
        assert model.logits([1, 319]).shape == (2, 320) and model.n_vocab == 288
        assert max(model.generate("hello", max_tokens=100, temperature=3.0).tokens) < 288


def test_a_broken_vocabulary(tmp_path: Path) -> None:
    for changes in ({"tokenizer.ggml.tokens": None}, {"tokenizer.ggml.model": "none"}, {"tokenizer.ggml.eos_token_id": 288}):
        path = tiny.tiny_gguf(tmp_path / "m.gguf", metadata=changes)
        with pytest.raises(TokenizerError):
            edgeinfer.load(path, threads=1)


# --- values ----------------------------------------------------------------------------------------------------------


def set_values(path: Path, name: str, value: float) -> Path:
    """All weights of a tensor, or the scales of its blocks, set to a value; one of them if it is no finite one."""

    def change(_: dict[str, Any], tensors: Tensors) -> None:
        _, block_type, data = tensors[name]
        if block_type.name == "BF16":
            data.view(np.uint16)[-1, -1] = np.array(value, np.float32).view(np.uint32) >> 16
            return
        values = data.view(block_type.dtype) if block_type.dtype.names is None else data.view(block_type.dtype)["d"]
        if math.isfinite(value):
            values[:] = value
        else:
            values.reshape(-1)[-1] = value

    return rewrite(path, change)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "kind, name",
    [
        ("F32", "blk.0.attn_k.weight"), ("F32", "output_norm.weight"), ("F16", "blk.0.attn_v.weight"),
        ("BF16", "blk.1.ffn_up.weight"), ("Q4_0", "blk.1.attn_q.weight"), ("Q4_0", "token_embd.weight"),
    ],
)  # fmt: skip
def test_weights_that_are_no_numbers(tmp_path: Path, kind: str, name: str, value: float) -> None:
    path = tiny.tiny_gguf(tmp_path / "m.gguf", "llama", kind)
    edgeinfer.load(path, threads=1).close()
    assert name in refusal(set_values(path, name, value), planned=False)


def test_embeddings_that_are_no_numbers(tmp_path: Path) -> None:
    """Only looked up, a row at a time: too much to check beforehand, and the error comes with the token."""
    path = tiny.tiny_gguf(tmp_path / "m.gguf", "llama", "F16", tied=False)
    with edgeinfer.load(set_values(path, "token_embd.weight", math.nan), threads=2) as model:
        assert model.generate([1, 2, 3], max_tokens=2).tokens
        with pytest.raises(GenerationError, match="NaN"):
            model.generate([1, 2, 287], max_tokens=2)
        assert model.generate([1, 2, 3], max_tokens=2).tokens


@pytest.mark.parametrize("value", [0.0, 6e4])
@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight", "blk.1.ffn_down.weight"])
@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
def test_extreme_weights(tmp_path: Path, name: str, value: float, kind: str) -> None:
    """A reply or an error, never a hang or a crash."""
    path = set_values(tiny.tiny_gguf(tmp_path / "m.gguf", "llama", kind), name, value)
    with edgeinfer.load(path, threads=2) as model:
        try:
            assert len(model.generate([1, 2, 3], max_tokens=5).tokens) > 0
        except GenerationError:
            assert np.isnan(model.logits([1, 2, 3])).any()


# --- many failures, and random ones, in a process that would be missed -----------------------------------------------

CHILD = """
import faulthandler, json, os, sys, time
faulthandler.enable()
faulthandler.dump_traceback_later(100, exit=True)
import numpy as np
import edgeinfer
def state():
    time.sleep(0.1)  # the system's list still holds a thread that has just been joined
    rss = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), rss
good = open(sys.argv[1], "rb").read()
path = sys.argv[2]
random = np.random.default_rng(int(sys.argv[3]))
header = len(good) - int(sys.argv[4])
counts = {}
for round in range(240):
    data = bytearray(good)
    for _ in range(int(random.integers(1, 4))):
        at = int(random.integers(24, header))
        data[at] = int(random.choice([0, 1, 255, data[at] ^ 1, data[at] + 16 & 255, int(random.integers(256))]))
    if round % 8 == 0:
        data = data[: int(random.integers(0, len(data)))]
    open(path, "wb").write(data)
    try:
        with edgeinfer.load(path, threads=1, chunk=16) as model:
            model.generate([1, 2, 3] * 8, max_tokens=4)
        name = "ok"
    except edgeinfer.EdgeInferError as error:
        name = type(error).__name__
    counts[name] = counts.get(name, 0) + 1
    if round == 40:
        first = state()
print(json.dumps([first, state(), counts]))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_two_hundred_random_mutations(tmp_path: Path, architecture: str) -> None:
    """Bytes of the header changed at random: a typed error or a working model; nothing is left of the failures."""
    good = tiny.tiny_gguf(tmp_path / "good.gguf", architecture)
    with open_gguf(good) as file:
        data = sum(tensor.nbytes for tensor in file.tensors.values())
    arguments = [sys.executable, "-c", CHILD, str(good), str(tmp_path / "bad.gguf"), "3", str(data)]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    first, last, counts = json.loads(done.stdout)
    assert last[:2] == first[:2] and last[2] - first[2] < 10 << 20
    assert counts["ModelFormatError"] > 30 and counts["ok"] > 3


def test_the_error_is_of_this_package() -> None:
    assert issubclass(ModelFormatError, EdgeInferError) and issubclass(GenerationError, EdgeInferError)


@pytest.mark.parametrize("factor", [1e-6, 1e-30, 1e-45])
def test_rotary_angles_too_wide_to_be_exact(tmp_path: Path, factor: float) -> None:
    path = tiny.tiny_gguf(tmp_path / "m.gguf", "llama", "F32")
    shape, kind, data = f32(8)
    rewrite(path, lambda _, tensors: tensors.update({"rope_freqs.weight": (shape, kind, data * np.float32(factor))}))
    assert "radians" in refusal(path, planned=False)


@pytest.mark.parametrize("name", [np.array([1, 2], np.int32), ["a", "b"], 7, ""])
def test_an_odd_name_is_no_name(tmp_path: Path, name: Any) -> None:
    path = tiny.tiny_gguf(tmp_path / "m.gguf", "llama", "F32")
    rewrite(path, lambda metadata, _: metadata.update({"general.name": name}))
    with edgeinfer.load(path, threads=1) as model:
        assert model.name == path.stem
