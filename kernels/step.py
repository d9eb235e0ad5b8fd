"""The step block: what changes from step to step, as kernels read it.

A step is a ragged batch: for each row a token, a position and a sequence, and a list of rows whose logits are wanted.
Words of 64 bits: two row counts, then the addresses of arrays of 64-bit integers.
"""

from __future__ import annotations

import numpy as np

ROWS, WANTED = 0, 1  # how many rows; how many of them are wanted. An op names the one that counts for it.
POSITIONS, SEQUENCES, WANTED_ROWS = 2, 3, 4  # addresses: (rows,), (rows,), (wanted,)
STEP_WORDS = 5


class Step:
    """The step block of one program, with room for `rows` rows of which `wanted` may be wanted at once."""

    def __init__(self, rows: int, wanted: int) -> None:
        self.positions = np.zeros(rows, np.int64)
        self.sequences = np.zeros(rows, np.int64)
        self.wanted_rows = np.zeros(wanted, np.int64)
        self.block = np.zeros(STEP_WORDS, np.int64)
        self.block[POSITIONS] = self.positions.ctypes.data
        self.block[SEQUENCES] = self.sequences.ctypes.data
        self.block[WANTED_ROWS] = self.wanted_rows.ctypes.data
