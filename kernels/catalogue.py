"""Every kernel there is: what can be compiled ahead, and what tests go through."""

from __future__ import annotations

from edgeinfer.kernels.cpu import attention, peaks, repack, rope, rows, stream, walk
from edgeinfer.kernels.cpu.matmul_float import matmul_kernel
from edgeinfer.kernels.jit import Kernel
from edgeinfer.kernels.levels import Level
from edgeinfer.kernels.packings import PACKINGS


def all_kernels(level: Level) -> list[Kernel]:
    """Every kernel there is at a level, the team's own included."""
    products = [matmul_kernel(name, level) for name in PACKINGS]
    single = [rows.NORM, rows.QUANTIZE, rows.TAKE, *rows.GATED.values(), *rope.ROPE.values(), attention.ATTENTION]
    return [*products, *single, *peaks.KERNELS, stream.STREAM, repack.REPACK, walk.BEGIN, walk.WALK, walk.SERVE]
