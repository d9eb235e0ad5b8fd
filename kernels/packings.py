"""Every packing there is, by the name of its GGUF type."""

from __future__ import annotations

from edgeinfer.kernels import packing_blocks, packing_k
from edgeinfer.kernels.packing import Packing

PACKINGS: dict[str, type[Packing]] = {
    packing.name: packing
    for packing in (
        packing_blocks.F32,
        packing_blocks.F16,
        packing_blocks.BF16,
        packing_blocks.Q4_0,
        packing_blocks.Q4_1,
        packing_blocks.Q5_0,
        packing_blocks.Q5_1,
        packing_blocks.Q8_0,
        packing_blocks.IQ4_NL,
        packing_blocks.MXFP4,
        packing_k.Q2_K,
        packing_k.Q3_K,
        packing_k.Q4_K,
        packing_k.Q5_K,
        packing_k.Q6_K,
        packing_k.IQ4_XS,
    )
}
