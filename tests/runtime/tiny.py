"""Writes tiny random models: whole GGUF files with tokenizer and chat template, in milliseconds and without a network.

The weights come from a hash of (seed, tensor name), so a file is the same bytes wherever it is made. Tests load this
file by its path, as pytest's importlib mode has no folder of helpers:

    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from edgeinfer.formats.blocks import BY_NAME, BlockType
from edgeinfer.formats.gguf_write import write_gguf

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# GPT-2's printable stand-in for every byte, then 29 merges (Ġ is a space), then the control tokens: 288 tokens
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = [chr(b) if b in _PRINTABLE else chr(256 + sum(x not in _PRINTABLE for x in range(b))) for b in range(256)]
MERGES = (
    "Ġ t|h e|i n|r e|o n|Ġ a|e r|a t|Ġt he|o u|e n|i s|i t|o r|a n|e s|Ġ s|Ġ w|in g|a l|Ġ o|a r|e d|l l|Ġ b|Ġ c|Ġ f"
    "|Ġ m|t h"
).split("|")
ROPE_BASE = {"llama": 10000.0, "qwen2": 1e6, "qwen3": 1e6, "gemma3": 1e6}
_MATRIX_SIZE = {"token_embd": 0.5, "attn_q": 1.7, "attn_k": 1.7, "attn_output": 2.0}
_NORM_SIZE = {"output_norm": 6.0, "attn_q_norm": 1.7, "attn_k_norm": 1.7}

Types = str | Mapping[str, str]


def tiny_gguf(path: str | os.PathLike[str], architecture: str = "llama", type: Types = "Q4_0", *, layers: int = 2,
              embedding: int = 64, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, ffn: int = 96,
              vocabulary: int = 288, context: int = 256, seed: int = 0, window: int | None = None, tied: bool = True,
              template: str | None = CHATML, add_bos: bool | None = None,
              metadata: Mapping[str, Any] | None = None) -> Path:  # fmt: skip
    """Write a random model and return its path.

    type: of all matrices, or by role with "*" for the rest: {"*": "Q4_K", "attn_v": "Q6_K", "token_embd": "Q8_0"}.
    Types in blocks of 256 (Q2_K .. Q6_K, IQ4_XS) need embedding, heads * head_dim and ffn to be multiples of 256.
    window: of the layers that have one (gemma3: five of six, 32 by default; llama: all). vocabulary: at least 288.
    template: None for none. add_bos: None leaves the key out. metadata: keys to add or replace; None leaves a key out.
    """
    arch = architecture
    header: dict[str, Any] = {
        "general.architecture": arch,
        "general.name": f"tiny {arch}",
        f"{arch}.block_count": layers,
        f"{arch}.context_length": context,
        f"{arch}.embedding_length": embedding,
        f"{arch}.feed_forward_length": ffn,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.attention.sliding_window": 32 if window is None and arch == "gemma3" else window,
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.rope.freq_base": ROPE_BASE[arch],
        **_tokenizer(vocabulary),
        "tokenizer.ggml.add_bos_token": add_bos,
        "tokenizer.chat_template": template,
        **(metadata or {}),
    }
    q, kv = heads * head_dim, kv_heads * head_dim
    shapes = tensor_shapes(arch, layers, embedding, q, kv, head_dim, ffn, vocabulary, tied)
    tensors = [(name, shape, *_tensor(name, shape, type, seed)) for name, shape in shapes]
    write_gguf(path, {key: value for key, value in header.items() if value is not None}, tensors)
    return Path(path)


def tensor_shapes(arch: str, layers: int, embedding: int, q: int, kv: int, head_dim: int, ffn: int, vocabulary: int,
                  tied: bool) -> Iterator[tuple[str, tuple[int, ...]]]:  # fmt: skip
    """Every tensor of the architecture by GGUF's name. q, kv: widths of queries and of keys, all heads together."""
    yield "token_embd.weight", (vocabulary, embedding)
    yield "output_norm.weight", (embedding,)
    if not tied:
        yield "output.weight", (vocabulary, embedding)
    for layer in range(layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (embedding,),
            "attn_q.weight": (q, embedding),
            "attn_k.weight": (kv, embedding),
            "attn_v.weight": (kv, embedding),
            "attn_output.weight": (embedding, q),
            "ffn_norm.weight": (embedding,),
            "ffn_gate.weight": (ffn, embedding),
            "ffn_up.weight": (ffn, embedding),
            "ffn_down.weight": (embedding, ffn),
        }
        if arch == "qwen2":
            block |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if arch in ("qwen3", "gemma3"):
            block |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        if arch == "gemma3":
            block |= {"post_attention_norm.weight": (embedding,), "post_ffw_norm.weight": (embedding,)}
        for name, shape in block.items():
            yield f"blk.{layer}.{name}", shape


def _tensor(name: str, shape: tuple[int, ...], type: Types, seed: int) -> tuple[BlockType, npt.NDArray[Any]]:
    """Type and packed bytes. Sizes are such that every part of a layer counts and a greedy reply goes on and varies."""
    role = name.split(".")[-2]
    values = normal(f"{seed}/{name}", shape)
    if len(shape) == 1:
        values = values * 0.5 if name.endswith(".bias") else _NORM_SIZE.get(role, 1.0) * (1.0 + 0.2 * values)
        return BY_NAME["F32"], values.astype(np.float32)
    values *= _MATRIX_SIZE.get(role, 1.0) / math.sqrt(shape[1])
    if role in ("token_embd", "output"):
        first = 256 + len(MERGES)
        values[first : first + len(CONTROL)] *= 0.1  # hardly ever the likeliest token
    kind = type if isinstance(type, str) else type.get(role, type["*"])
    return BY_NAME[kind], packed(kind, values.astype(np.float32), f"{seed}/{name}")


def normal(key: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Nearly normal numbers (sums of four bytes) of mean 0 and variance 1, from the hash of the key."""
    n = math.prod(shape)
    raw = np.frombuffer(hashlib.shake_256(key.encode()).digest(4 * n), np.uint8).reshape(n, 4)
    return (raw.sum(-1, dtype=np.int64).reshape(shape) - 510) / 147.8


def packed(kind: str, values: npt.NDArray[np.float32], key: str) -> npt.NDArray[np.uint8]:
    """Rows quantized by the gguf package; where it has no quantizer, random blocks with their values' spread."""
    try:
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    except NotImplementedError:
        pass
    block_type = BY_NAME[kind]
    rows, columns = values.shape
    nbytes = rows * block_type.row_bytes(columns)
    noise = bytearray(hashlib.shake_256(f"{key}/blocks".encode()).digest(nbytes))
    raw = np.frombuffer(noise, np.uint8).reshape(rows, -1)
    blocks = raw.view(block_type.dtype)

    def decoded(scale: float, minimum: float) -> npt.NDArray[np.float32]:
        for field, number in (("d", scale), ("dmin", minimum)):
            if field in block_type.dtype.names:
                blocks[field] = number
        return block_type.decode(raw)

    minimum = 0.0
    if "dmin" in block_type.dtype.names:
        minimum = float(decoded(1, 0).mean() / -decoded(0, 1).mean())
    factor = float(values.std() / decoded(1, minimum).std())
    decoded(factor, minimum * factor)
    sizes = values.reshape(*blocks.shape, -1).std(-1) / values.std()
    for field in {"d", "dmin"} & set(block_type.dtype.names):
        blocks[field] *= sizes.astype(np.float16)
    return raw


def _tokenizer(vocabulary: int) -> dict[str, Any]:
    """A byte-level BPE vocabulary that can spell everything; tokens beyond the first 288 are never made from text."""
    spare = [f"<unused{i}>" for i in range(vocabulary - 256 - len(MERGES) - len(CONTROL))]
    tokens = [*BYTES, *("".join(merge.split()) for merge in MERGES), *CONTROL, *spare]
    if len(tokens) != vocabulary:
        raise ValueError(f"a vocabulary of {vocabulary}; expected at least {len(tokens)}")
    types = [1] * (256 + len(MERGES)) + [3] * len(CONTROL) + [5] * len(spare)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }
