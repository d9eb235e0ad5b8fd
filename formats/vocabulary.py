"""The vocabulary stored in a GGUF file: its tokens, their types, and which of them are markers rather than text.

Everything a tokenizer needs is read here once, checked, and frozen; bpe.py and spm.py only cut text into pieces.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from edgeinfer.formats.errors import TokenizerError

MAX_TOKEN_CHARS, MAX_TOKENS, MAX_MERGES = 65_536, 1 << 20, 2 << 20

_T = TypeVar("_T")


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """One model's tokens. Ids are positions in `tokens`."""

    path: str
    model: str  # "gpt2" (byte-level BPE) or "llama" (SPM)
    pre: str | None  # the pre-tokenizer's name
    tokens: list[str]
    types: npt.NDArray[np.int32]  # (tokens,) of TokenType
    scores: npt.NDArray[np.float32] | None  # (tokens,), SPM only
    merges: list[str]  # "left right", best first, BPE only
    bos_id: int | None
    eos_id: int | None
    add_bos: bool | None  # None: the file does not say
    add_eos: bool
    add_space_prefix: bool
    eog_ids: frozenset[int]  # every token that ends a generation
    markers: Mapping[str, int]  # tokens that structure a prompt: never made from a user's text
    literals: Mapping[str, int]  # user-defined tokens that are plain text: white space, HTML tags
    strips_after: frozenset[int]  # markers that swallow the white space behind them


def read_vocabulary(metadata: Mapping[str, Any], path: str | os.PathLike[str]) -> Vocabulary:
    """Read and check the `tokenizer.*` metadata. Raises TokenizerError that names the key and what is wrong with it."""
    path = os.fspath(path)
    model = _get(metadata, path, "tokenizer.ggml.model", str)
    if model is None:
        raise TokenizerError(f"{path}: tokenizer.ggml.model is missing: the file holds no vocabulary")
    tokens = _strings(metadata, path, "tokenizer.ggml.tokens", MAX_TOKENS)
    types = _numbers(metadata, path, "tokenizer.ggml.token_type", np.int32, len(tokens)) if tokens else None
    if types is None:
        raise TokenizerError(f"{path}: tokenizer.ggml.tokens or tokenizer.ggml.token_type is missing or empty")
    if types.min() < TokenType.NORMAL or types.max() > TokenType.BYTE:
        raise TokenizerError(f"{path}: tokenizer.ggml.token_type holds {types.min()}..{types.max()}: expected 1..6")
    if max(map(len, tokens)) > MAX_TOKEN_CHARS:
        raise TokenizerError(f"{path}: a token is longer than {MAX_TOKEN_CHARS} characters")
    if len(set(tokens)) != len(tokens):
        raise TokenizerError(f"{path}: tokenizer.ggml.tokens holds the same token twice")

    bos_id, eos_id, eot_id, eom_id = (
        _token_id(metadata, path, f"tokenizer.ggml.{name}_token_id", len(tokens))
        for name in ("bos", "eos", "eot", "eom")
    )
    add_bos = _get(metadata, path, "tokenizer.ggml.add_bos_token", bool)
    add_eos = _get(metadata, path, "tokenizer.ggml.add_eos_token", bool) or False
    if (add_bos and bos_id is None) or (add_eos and eos_id is None):
        raise TokenizerError(f"{path}: the file wants a BOS or EOS token added, but does not say which token that is")
    markers, literals = _sort_out(tokens, types)
    strips_after: frozenset[int] = frozenset()
    if (
        model == "llama" and metadata.get("general.architecture") == "phi3"
    ):  # GGUF has no key for it; Phi-3's own files do
        strips_after = frozenset(i for text, i in markers.items() if text not in ("<unk>", "<s>", "<|endoftext|>"))
    add_space_prefix = _get(metadata, path, "tokenizer.ggml.add_space_prefix", bool)
    return Vocabulary(
        path=path,
        model=model,
        pre=_get(metadata, path, "tokenizer.ggml.pre", str),
        tokens=tokens,
        types=types,
        scores=_numbers(metadata, path, "tokenizer.ggml.scores", np.float32, len(tokens)) if model == "llama" else None,
        merges=_strings(metadata, path, "tokenizer.ggml.merges", MAX_MERGES) if model == "gpt2" else [],
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=model == "llama" and add_space_prefix is not False,
        eog_ids=_end_of_generation(markers) | {i for i in (eos_id, eot_id, eom_id) if i is not None},
        markers=markers,
        literals=literals,
        strips_after=strips_after,
    )


# Files name one end-of-sequence token, but chat models end a turn with others, found by their text.
_END_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>"
    " <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <｜end▁of▁sentence｜> <|EOT|>"
).split()

_HTML_NAMES = frozenset(
    "a b blockquote body br caption code div em footer h1 h2 h3 h4 h5 h6 head header html i iframe img li ol p pre s"
    " span strong sub sup table tbody td tfoot th thead tr u ul".split()
)


def _end_of_generation(markers: Mapping[str, int]) -> frozenset[int]:
    found = {text for text in _END_TEXTS if text in markers}
    if {"<|return|>", "<|call|>"} <= found or {"<|calls|>", "<|flush|>"} <= found:
        found.discard("<|end|>")  # harmony-style formats: it ends a message, not the turn
    return frozenset(markers[text] for text in found)


def _sort_out(tokens: list[str], types: npt.NDArray[np.int32]) -> tuple[dict[str, int], dict[str, int]]:
    """(markers, literals): the tokens that are found in text before it is cut into pieces.

    Control and unknown tokens are markers, and so are user-defined tokens in brackets, as in <tool_call> or <|user|>.
    Other user-defined tokens stand for the text that they show: runs of white space, rare letters, HTML tags (if both
    <x> and </x> are there).
    """
    control = np.flatnonzero((types == TokenType.CONTROL) | (types == TokenType.UNKNOWN)).tolist()
    markers = {tokens[i]: i for i in control}
    user = {tokens[i]: i for i in np.flatnonzero(types == TokenType.USER_DEFINED).tolist()}
    literals: dict[str, int] = {}
    for text, i in user.items():
        name = text.strip("</>")
        is_html = name in _HTML_NAMES and f"<{name}>" in user and f"</{name}>" in user
        bare = text.strip(" ▁_")
        is_bracketed = len(bare) > 2 and bare[0] in "<[{|>]" and bare[-1] in ">]}|<["
        (markers if is_bracketed and not is_html else literals)[text] = i
    for group in (markers, literals):
        group.pop("", None)
    return markers, literals


def _get(metadata: Mapping[str, Any], path: str, key: str, kind: type[_T]) -> _T | None:
    value = metadata.get(key)
    if value is None or type(value) is kind:
        return value
    raise TokenizerError(f"{path}: metadata key {key!r} is of type {type(value).__name__}: expected {kind.__name__}")


def _token_id(metadata: Mapping[str, Any], path: str, key: str, n_vocab: int) -> int | None:
    value = _get(metadata, path, key, int)
    if value is not None and not 0 <= value < n_vocab:
        raise TokenizerError(f"{path}: {key} is {value}: expected a token id below {n_vocab}")
    return value


def _strings(metadata: Mapping[str, Any], path: str, key: str, limit: int) -> list[str]:
    value = metadata.get(key, [])
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        raise TokenizerError(f"{path}: metadata key {key!r} is not an array of strings")
    if len(value) > limit:
        raise TokenizerError(f"{path}: {key} has {len(value)} entries: at most {limit} are allowed")
    return value


def _numbers(metadata: Mapping[str, Any], path: str, key: str, dtype: Any, n: int) -> npt.NDArray[Any] | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.shape != (n,):
        raise TokenizerError(
            f"{path}: metadata key {key!r} is not an array of {n} {np.dtype(dtype).name}, one for each token"
        )
    return value
