"""Byte-level BPE cutting of text: the tokenizer of Llama 3, Qwen, SmolLM, GPT-2, DeepSeek, Falcon and StarCoder.

The `tokenizers` library does the work, fed with the file's own tokens and merges. GGUF only names the pre-tokenizer
(the rules that split text into words before merging): they are listed here as published in each tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from edgeinfer.formats.errors import TokenizerError
from edgeinfer.formats.vocabulary import TokenType, Vocabulary


@dataclass(frozen=True)
class PreTokenizer:
    """`steps`: regular expressions, each of which isolates its matches in what the former ones left over."""

    steps: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is taken whole, whatever the merges say
    add_bos: bool = False  # when the file does not say


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The GPT-4 pattern, of which most later families change only how letters and digits group.
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?LETTERS|DIGITS"
    r"| ?[^\sSYMBOLS\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt4(digits: str, letters: str = r"\p{L}") -> str:
    return _GPT4.replace("LETTERS", f"[{letters}]+").replace("DIGITS", digits).replace("SYMBOLS", letters)


# Letters with case, as DeepSeek's first tokenizers list them (an older Unicode than the library's, hence the ranges).
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_GPT2_WORDS = PreTokenizer((_GPT2,))
_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_gpt4(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_gpt4(r"\p{N}"),))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_WORDS,
    "phi-2": _GPT2_WORDS,
    "mpt": _GPT2_WORDS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": PreTokenizer((_gpt4(r"\p{N}", r"\p{L}\p{M}"),)),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_DEEPSEEK_PUNCTUATION}]+", r"\s+$", _DEEPSEEK_CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
}


class BpeCutter:
    """Cuts text without markers into token ids. TokenizerError for an unknown pre-tokenizer or a broken vocabulary."""

    def __init__(self, vocab: Vocabulary) -> None:
        import tokenizers
        from tokenizers import models, pre_tokenizers

        pre = find_pre_tokenizer(vocab)
        normal = dict(zip(vocab.tokens, range(len(vocab.tokens)), strict=True))
        for i in np.flatnonzero(vocab.types != TokenType.NORMAL).tolist():
            del normal[vocab.tokens[i]]  # what the library does not know, it cannot make from text
        try:
            model = models.BPE(vocab=normal, merges=_merge_pairs(vocab), ignore_merges=pre.ignore_merges)
        except Exception as error:  # the library has no narrower class
            raise TokenizerError(f"{vocab.path}: tokenizer.ggml.merges does not fit the tokens: {error}") from error
        self._tokens, self._types = vocab.tokens, vocab.types
        self._missing = bytes(byte for byte, char in enumerate(_BYTE_CHARS) if char not in normal)
        self._tokenizer = tokenizers.Tokenizer(model)
        splits = [pre_tokenizers.Split(tokenizers.Regex(step), "isolated") for step in pre.steps]
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def cut(self, text: str) -> list[int]:
        """Token ids of `text`. TokenizerError when a byte has no token (some lack a few): the library drops it."""
        raw = text.encode()
        if len(raw.translate(None, self._missing)) < len(raw):
            char = next(char for char in text if char.encode().translate(None, self._missing) != char.encode())
            raise TokenizerError(
                f"the vocabulary has no token for a part of {char!r} (U+{ord(char):04X}): remove it from the text"
            )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def piece_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        text = self._tokens[token]
        if self._types[token] != TokenType.NORMAL:
            return text.encode()
        return b"".join(_CHAR_BYTES.get(char) or char.encode() for char in text)


def find_pre_tokenizer(vocab: Vocabulary) -> PreTokenizer:
    """The rules that the file names; TokenizerError when it names none or others than are listed here."""
    pre = PRE_TOKENIZERS.get(vocab.pre or "")
    if pre is None:
        found = (
            f"pre-tokenizer {vocab.pre!r:.60} is not supported"
            if vocab.pre
            else "tokenizer.ggml.pre, the pre-tokenizer's name, is missing"
        )
        raise TokenizerError(f"{vocab.path}: {found}; known: {', '.join(PRE_TOKENIZERS)}")
    return pre


def _merge_pairs(vocab: Vocabulary) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) for merge in vocab.merges]
    if not set(map(len, pairs)) <= {2}:
        wrong = next(i for i, pair in enumerate(pairs) if len(pair) != 2)
        raise TokenizerError(
            f"{vocab.path}: merge {wrong} is {vocab.merges[wrong]!r:.60}: expected two pieces with a space between them"
        )
    return cast("list[tuple[str, str]]", pairs)


def _byte_chars() -> list[str]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 onwards, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTE_CHARS = _byte_chars()
_CHAR_BYTES = {char: bytes([byte]) for byte, char in enumerate(_BYTE_CHARS)}
