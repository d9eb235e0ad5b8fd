"""What this installation will do here, and whether it works: `doctor_report`, and `warmup`, which compiles ahead."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numpy as np

from edgeinfer import machine
from edgeinfer.formats.blocks import Q4_0
from edgeinfer.kernels.builder import Builder
from edgeinfer.kernels.catalogue import all_kernels
from edgeinfer.kernels.jit import Code, code
from edgeinfer.kernels.levels import LEVELS, native_level
from edgeinfer.kernels.packing import Packing
from edgeinfer.kernels.packings import PACKINGS
from edgeinfer.kernels.program import Program
from edgeinfer.kernels.step import Step


def doctor_report() -> dict[str, Any]:
    """Facts by name: processor, SIMD level, kernels, caches, threads, memory, and the outcome of a self-test."""
    level = native_level()
    kernels = code(level)
    every = all_kernels(level)
    cached = sum(kernels.is_cached(k) for k in every)
    memory = machine.available_memory()
    return {
        "processor": llvm.get_host_cpu_name(),
        "simd level": f"{level.name} (known: {', '.join(LEVELS)})",
        "kernels": f"{cached} of {len(every)} compiled and cached; the others are compiled when a model first needs them",
        "kernel cache": str(kernels.folder or "none: the folder cannot be used, so each start compiles anew"),
        "threads": machine.default_threads(),
        "memory free": "unknown" if memory is None else f"{memory / 1e9:.1f} GB",
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "llvmlite": llvmlite.__version__,
        "self-test": _self_test(),
    }


def warmup(model: str | os.PathLike[str] | None = None, progress: Callable[[str, float], None] | None = None) -> None:
    """Compile kernels now: those that a model needs, or all there are. progress(stage, fraction) as in load()."""
    if model is not None:
        from edgeinfer.model import load

        load(model, progress=progress).close()
        return
    kernels = code(native_level())
    every = all_kernels(kernels.level)
    for done, kernel in enumerate(every):
        if progress:
            progress("kernels", done / len(every))
        kernels.address(kernel)
    if progress:
        progress("kernels", 1.0)


def _self_test() -> str:
    """A small product of 4-bit weights by this processor's kernels, the plain ones, and NumPy in float64."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (32, 2 * Q4_0.nbytes), dtype=np.uint8)
    raw.reshape(32, 2, Q4_0.nbytes)[..., :2] = np.array([0.01], np.float16).view(np.uint8)
    x = rng.standard_normal((1, 64)).astype(np.float32)
    native, plain = (_product(code(level), raw, x) for level in (native_level(), LEVELS["plain"]))
    exact = x.astype(np.float64) @ Q4_0.decode(raw).astype(np.float64).T
    if not np.array_equal(native, plain):
        return f"FAILED: {native_level().name} and plain kernels differ"
    if np.abs(native - exact).max() > 0.02 * np.abs(exact).max():
        return "FAILED: the kernels' product is not NumPy's"
    return "passed: native and plain kernels give the same bits, and NumPy agrees"


class _OneMatrix:
    """The weights of the self-test (kernels.builder.Weights)."""

    def __init__(self, raw: np.ndarray) -> None:
        self._tiles = PACKINGS["Q4_0"].pack(raw, 64)

    def packed(self, name: str) -> tuple[type[Packing], np.ndarray, int, int]:
        return PACKINGS["Q4_0"], self._tiles, 32, 64

    def vector(self, name: str) -> np.ndarray:
        raise KeyError(name)

    def has(self, name: str) -> bool:
        return False


def _product(kernels: Code, raw: np.ndarray, x: np.ndarray) -> np.ndarray:
    builder = Builder(kernels, _OneMatrix(raw), Step(1, 1), [])
    (out,) = builder.linear(builder.wanted(builder.embed(64)), "output")
    builder.output(out)
    program = Program(builder, 1, lambda tokens: x, 32)
    result = np.empty((1, 32), np.float32)
    zero = np.zeros(1, np.int64)

    def take(first: int, logits: np.ndarray) -> None:
        result[:] = logits

    try:
        program.forward(zero, zero, zero, [0], take)
    finally:
        program.close()
    return result


