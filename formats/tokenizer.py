"""Text to token ids and back, with the vocabulary that a GGUF file carries.

Markers (control tokens and the like) are found first, and only when the caller says that the text may hold them; what
lies between is cut by byte-level BPE (bpe.py) or SentencePiece (spm.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from edgeinfer.formats.bpe import BpeCutter, find_pre_tokenizer
from edgeinfer.formats.errors import TokenizerError
from edgeinfer.formats.finder import Finder, Spans
from edgeinfer.formats.spm import SpmCutter
from edgeinfer.formats.vocabulary import Vocabulary, read_vocabulary


class _Cutter(Protocol):
    def cut(self, text: str) -> list[int]: ...
    def piece_bytes(self, token: int) -> bytes: ...


class Tokenizer:
    """The tokenizer of one model. Build it with `from_metadata`; it is immutable and may be shared between threads."""

    def __init__(self, vocab: Vocabulary) -> None:
        """Raises TokenizerError when the kind of vocabulary is not supported or its parts do not fit together."""
        if vocab.model == "gpt2":
            self._cutter: _Cutter = BpeCutter(vocab)
            default_bos = find_pre_tokenizer(vocab).add_bos
        elif vocab.model == "llama":
            self._cutter, default_bos = SpmCutter(vocab), True
        else:
            raise TokenizerError(
                f"{vocab.path}: tokenizer {vocab.model!r:.60} is not supported; known: gpt2 (BPE), llama (SPM)"
            )
        self._vocab = vocab
        self._add_bos = vocab.bos_id is not None and (default_bos if vocab.add_bos is None else vocab.add_bos)
        self._marker_ids = frozenset(vocab.markers.values())
        literals = vocab.literals if vocab.model == "gpt2" else {}  # SentencePiece finds them itself
        self._literals = Finder(literals)
        self._all = Finder({**literals, **vocab.markers}, self._marker_ids)
        self.name = vocab.model if vocab.model == "llama" else f"{vocab.model}/{vocab.pre}"
        self.n_vocab, self.bos_id, self.eos_id = len(vocab.tokens), vocab.bos_id, vocab.eos_id
        self.eog_ids = vocab.eog_ids

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], path: str | os.PathLike[str]) -> Tokenizer:
        """Build from a GGUF file's metadata; `path` is named in errors. Raises TokenizerError."""
        return cls(read_vocabulary(metadata, path))

    def encode(self, text: str, special: bool = False, bos: bool | None = None, plain: Spans = ()) -> list[int]:
        """Token ids of `text`.

        special: markers written in the text become their control ids; otherwise no text yields one.
        bos: None adds BOS (and EOS at the end) when the file says so, False never, True always; none is doubled.
        plain: character ranges (start, end), ascending, whose characters take part in no marker even when `special`.
        Raises TokenizerError when the text holds half of a surrogate pair, which has no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text holds half of a surrogate pair at character {error.start}: expected valid Unicode"
            ) from None
        ids: list[int] = []
        after_marker = True
        for part in self._split(text, special, plain):
            if isinstance(part, int):
                ids.append(part)
                after_marker = part in self._marker_ids
            else:
                ids += self._cutter.cut(" " + part if after_marker and self._vocab.add_space_prefix else part)
                after_marker = False
        if self._add_bos if bos is None else bos:
            if self.bos_id is None:
                raise TokenizerError(f"{self._vocab.path}: the file names no BOS token")
            if ids[:1] != [self.bos_id]:
                ids.insert(0, self.bos_id)
        if bos is None and self._vocab.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of `ids`; markers appear only when `special`, invalid UTF-8 as U+FFFD. The inverse of `encode`."""
        out: list[bytes] = []
        after_marker = True
        for token in ids:
            piece = self.token_bytes(token, special)
            is_marker = token in self._marker_ids
            if not is_marker and after_marker and self._vocab.add_space_prefix:
                piece = piece.removeprefix(b" ")
            out.append(piece)
            after_marker = is_marker
        return b"".join(out).decode("utf-8", "replace")

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token, which may be part of a character; b"" for a marker unless `special`."""
        text = self.text(token)
        if token in self._marker_ids:
            return text.encode() if special else b""
        return self._cutter.piece_bytes(token)

    def text(self, token: int) -> str:
        """The token as the vocabulary spells it. Raises TokenizerError when there is no such id."""
        if not 0 <= token < self.n_vocab:
            raise TokenizerError(f"token id {token} is outside the vocabulary of {self.n_vocab}")
        return self._vocab.tokens[token]

    def is_control(self, token: int) -> bool:
        """Whether `token` is a marker: it structures a prompt and is no text."""
        return token in self._marker_ids

    @property
    def adds_bos(self) -> bool:
        """Whether `encode` begins with BOS unless told otherwise."""
        return self._add_bos

    @property
    def marker_texts(self) -> Sequence[str]:
        """How the markers are spelled."""
        return tuple(self._vocab.markers)

    def find_markers(self, text: str, plain: Spans = ()) -> list[tuple[int, int, int]]:
        """(start, end, id) of each marker that `encode(text, special=True, plain=plain)` would make."""
        return [found for found in self._all.find(text, plain) if found[2] in self._marker_ids]

    def _split(self, text: str, special: bool, plain: Spans) -> Iterator[str | int]:
        """Text and ids of the tokens found in it whole."""
        at = 0
        for start, end, token in self._all.find(text, plain) if special else self._literals.find(text):
            if start > at:
                yield text[at:start]
            yield token
            at = end
            if token in self._vocab.strips_after:
                while at < len(text) and text[at].isspace():
                    at += 1
        if at < len(text):
            yield text[at:]
