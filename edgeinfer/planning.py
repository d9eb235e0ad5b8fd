"""What a model will need, from its header alone, before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from edgeinfer import machine
from edgeinfer.config import ModelConfig
from edgeinfer.errors import MemoryLimitError
from edgeinfer.formats.gguf import GGUF, open_gguf
from edgeinfer.kernels.packing import ROWS, SPAN
from edgeinfer.kernels.packings import PACKINGS
from edgeinfer.kv import sequence_bytes
from edgeinfer.weights import check_tensors

DEFAULT_CONTEXT = 4096
DEFAULT_CHUNK = 512
WANTED_ROWS = 64  # rows whose logits are computed at once
# measured, see tests/runtime/test_memory.py: Python and its packages; the tokenizer, for each token of the vocabulary
_PROCESS, _TOKEN = 115 << 20, 500


@dataclass(frozen=True)
class Plan:
    """Bytes of memory. kv: one sequence with a full context. available: free now, None where the system does not say."""

    context: int
    weights: int
    kv: int
    scratch: int
    process: int
    available: int | None

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.scratch + self.process

    @property
    def fits(self) -> bool:
        return self.available is None or self.total <= self.available

    def require(self) -> None:
        """Raises MemoryLimitError where it does not fit."""
        if not self.fits:
            raise MemoryLimitError(self.total, self.available or 0)


def is_count(value: object, most: int) -> bool:
    """Whether an option is a whole number of 1 to `most`."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(0 < value <= most)


def choose_context(config: ModelConfig, context: int | None) -> int:
    """The context to use: what was asked for, else the trained one, at most 4096. Raises ValueError out of range."""
    if context is None:
        return min(config.context, DEFAULT_CONTEXT)
    if not is_count(context, config.context):
        raise ValueError(f"a context of {context} tokens; this model was trained for 1 to {config.context}")
    return context


def plan(path: str | os.PathLike[str], context: int | None = None, chunk: int = DEFAULT_CHUNK) -> Plan:
    """What loading the file with that context takes. Raises ModelFormatError, and ValueError for a context out of range."""
    with open_gguf(path) as file:
        config = ModelConfig.from_gguf(file)
        check_tensors(file, config)
        chosen = choose_context(config, context)
        return plan_for(file, config, chosen, min(chunk, chosen))


def plan_for(file: GGUF, config: ModelConfig, context: int, chunk: int) -> Plan:
    tied = "output.weight" not in file.tensors
    weights = 0
    for name, tensor in file.tensors.items():
        if name == "token_embd.weight" and not tied:
            continue  # only looked up: it stays in the file's map
        packing = PACKINGS.get(tensor.type.name)
        if packing and len(tensor.shape) == 2:
            weights += -(-tensor.shape[0] // ROWS) * packing.tile_bytes(tensor.shape[1])
        else:
            weights += tensor.nbytes
    # rows of f32 and their quantized form, by role: see kernels.builder.Builder
    wide = config.heads * config.head_dim
    roles = 3 * config.embedding + 2 * wide + 2 * config.kv_heads * config.head_dim + 3 * config.feed_forward
    quantized = (config.embedding + wide + config.feed_forward) * (SPAN + 16) // SPAN
    logits = WANTED_ROWS * (config.vocabulary * 4 + config.embedding * 6)
    tables = len(set(config.ropes)) * context * config.rope_dims * 4
    scratch = chunk * (roles * 4 + quantized) + logits + tables
    kv = sequence_bytes(config, context, chunk)
    process = _PROCESS + _TOKEN * len(file.get("tokenizer.ggml.tokens", list, []))
    return Plan(context, weights, kv, scratch, process, machine.available_memory())
