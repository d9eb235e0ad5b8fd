"""The KV cache as kernels see it: pages of 64 tokens, half precision, one tile of the attention kernel.

Within a page each KV head has its keys, interleaved over 16 tokens so that a lane is a token and q.k needs no sum across
lanes, f16 (4 groups, head_dim, 16 tokens), and its values, f16 (64 tokens, head_dim).
A sequence finds its pages in a ring: token position p lies in slot (p // 64) % ring of its row in a table of page numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PAGE = 64  # tokens
GROUP = 16  # tokens whose keys are interleaved


def head_bytes(head_dim: int) -> int:
    """Bytes that one KV head of one layer takes in a page: keys, then values."""
    return 2 * PAGE * head_dim * 2


@dataclass(frozen=True)
class LayerPages:
    """Where a layer's pages are.

    arena: uint8 (pages, page_bytes), shared by the layers of a group; offset: this layer's bytes within a page.
    table: int64 (sequences, ring), page numbers.
    """

    arena: np.ndarray
    offset: int
    table: np.ndarray

    @property
    def page_bytes(self) -> int:
        return int(self.arena.strides[0])

    @property
    def ring(self) -> int:
        return int(self.table.shape[1])
