"""SIMD levels: which machine instructions a kernel may use, and which level fits the processor that runs it.

Every kernel has one source. A level decides how its vocabulary (kernels/cpu/simd.py) is spelled in instructions and
for which processor LLVM emits code; the results are the same bits at every level.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import llvmlite.binding as llvm


@dataclass(frozen=True)
class Level:
    """name; LLVM's processor name and features; whether integer dots use VNNI; rows of activations a matmul tile takes."""

    name: str
    cpu: str
    features: str
    dot: str  # "vnni512", "vnni256", "maddubs" or "plain"
    has_fma: bool
    has_f16c: bool
    tile_rows: int
    needs: tuple[str, ...]  # what the processor must report for this level to run

    @property
    def runs_here(self) -> bool:
        return host_features().issuperset(self.needs)


# -prefer-256-bit: a 64-byte vector is to be one register, whatever the processor's tuning says
_V4 = "+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd,+avx512vnni,-prefer-256-bit"
_V3_NEEDS = ("avx2", "fma", "f16c", "bmi2")
_V4_NEEDS = (*_V3_NEEDS, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512vnni")

LEVELS = {
    level.name: level
    for level in (
        Level("avx512vnni", "x86-64-v4", _V4, "vnni512", True, True, 8, _V4_NEEDS),
        Level("avxvnni", "x86-64-v3", "+avxvnni", "vnni256", True, True, 4, (*_V3_NEEDS, "avxvnni")),
        Level("avx2", "x86-64-v3", "", "maddubs", True, True, 4, _V3_NEEDS),
        Level("plain", "", "", "plain", False, False, 4, ()),
    )
}


@lru_cache(maxsize=1)
def host_features() -> frozenset[str]:
    """The processor's features by LLVM's names; empty where LLVM cannot tell."""
    try:
        reported = llvm.get_host_cpu_features()
    except RuntimeError:
        return frozenset()
    return frozenset(name for name, present in reported.items() if present)


@lru_cache(maxsize=1)
def native_level() -> Level:
    """The fastest level that this processor can run."""
    return next(level for level in LEVELS.values() if level.runs_here)
