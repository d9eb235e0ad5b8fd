"""Every architecture on tiny random models: the reference against transformers' logits, the kernels against the reference."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.config import architectures
from edgeinfer.errors import ModelFormatError
from edgeinfer.kernels.levels import LEVELS, host_features
from edgeinfer.kernels.reference import Reference
from edgeinfer.kernels.same_arithmetic import SameArithmetic

HERE = Path(__file__).parent


def helper(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny, by_reference = helper("tiny"), helper("by_reference")

GOLDEN = np.load(HERE.parent / "data" / "transformers_golden.npz")
CASES: dict[str, tuple[str, dict[str, Any]]] = json.loads(str(GOLDEN["cases"]))
IDS: list[int] = GOLDEN["ids"].tolist()
WIDE = {"embedding": 256, "ffn": 512, "heads": 8, "head_dim": 32, "kv_heads": 4}  # for blocks of 256 values


def kernel_logits(path: Path, **options: Any) -> np.ndarray:
    with edgeinfer.load(path, **options) as model:
        logits: np.ndarray = model.logits(IDS)
        return logits


@pytest.mark.parametrize("name", CASES)
def test_the_reference_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    arch, options = CASES[name]
    path = tiny.tiny_gguf(tmp_path / "model.gguf", arch, "F32", **options)
    found = by_reference.reference_logits(path, IDS)[GOLDEN["positions"]]
    assert np.abs(found - GOLDEN[name]).max() < 1e-4  # transformers turns and norms in f32, whatever it is told


@pytest.mark.parametrize("name", CASES)
def test_kernels_on_exact_weights_are_near_the_reference(name: str, tmp_path: Path) -> None:
    """All that is rounded here is f32, and keys and values to half precision."""
    arch, options = CASES[name]
    path = tiny.tiny_gguf(tmp_path / "model.gguf", arch, "F32", **options)
    exact = by_reference.reference_logits(path, IDS)
    error = kernel_logits(path) - exact
    assert np.sqrt((error**2).mean()) < 4e-3 * exact.std()


@pytest.mark.parametrize("name", CASES)
def test_kernels_with_eight_bit_weights_are_as_near_as_eight_bits_allow(name: str, tmp_path: Path) -> None:
    arch, options = CASES[name]
    path = tiny.tiny_gguf(tmp_path / "model.gguf", arch, "Q8_0", **options)
    exact = by_reference.reference_logits(path, IDS)  # of the same weights: activations are what is rounded
    error = kernel_logits(path) - exact
    assert np.sqrt((error**2).mean()) < 0.15 * exact.std()


@pytest.mark.parametrize("name", CASES)
def test_kernels_have_the_bits_of_the_defined_arithmetic(name: str, tmp_path: Path) -> None:
    arch, options = CASES[name]
    path = tiny.tiny_gguf(tmp_path / "model.gguf", arch, {"*": "Q4_0", "ffn_down": "Q5_1", "attn_v": "F16"}, **options)
    expected = by_reference.reference_logits(path, IDS, SameArithmetic)
    assert np.array_equal(kernel_logits(path), expected)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_every_level_of_simd_has_the_same_bits(arch: str, tmp_path: Path) -> None:
    path = tiny.tiny_gguf(tmp_path / "model.gguf", arch, "Q4_1", layers=7 if arch == "gemma3" else 2, window=16)
    here = [level.name for level in LEVELS.values() if host_features().issuperset(level.needs)]
    first, *others = (kernel_logits(path, level=name) for name in here)
    assert all(np.array_equal(first, other) for other in others)
    assert len(others) >= 1  # plain runs everywhere, so there are two at least on what is tested on


@pytest.mark.slow
@pytest.mark.parametrize("kind", "BF16 Q4_1 Q5_0 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS IQ4_NL MXFP4".split())
def test_every_block_type_has_the_bits_of_the_defined_arithmetic(kind: str, tmp_path: Path) -> None:
    path = tiny.tiny_gguf(tmp_path / "model.gguf", "qwen2", kind, layers=1, **WIDE)
    expected = by_reference.reference_logits(path, IDS, SameArithmetic)
    assert np.array_equal(kernel_logits(path), expected)


def test_every_architecture_is_compared() -> None:
    assert {arch for arch, _ in CASES.values()} == set(architectures())


@pytest.mark.parametrize("found, put", [(b"qwen3", b"qwen2"), (b"blk.1.attn_k.weight", b"blk.1.attn_x.weight")])
def test_tensors_left_over_or_missing_are_refused(found: bytes, put: bytes, tmp_path: Path) -> None:
    """Weights that an architecture does not use mean that the file was made for another one."""
    path = tiny.tiny_gguf(tmp_path / "model.gguf", "qwen3")
    path.write_bytes(path.read_bytes().replace(found, put))
    with pytest.raises(ModelFormatError, match="attn_[xkq]"):
        edgeinfer.load(path)


def test_reference_wants_whole_sequences() -> None:
    with pytest.raises(ValueError, match="from 0 on"):
        Reference(None, np.zeros((2, 4)), [0, 2], [0, 0], [0])  # type: ignore[arg-type]
