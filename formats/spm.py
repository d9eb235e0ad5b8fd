"""SentencePiece BPE ("SPM") cutting of text: the tokenizer of Llama 2, Mistral, Phi-3 and Gemma.

The `sentencepiece` library does the work. It wants a serialized ModelProto; that is written here field by field
(sentencepiece_model.proto: pieces = 1 {piece = 1, score = 2, type = 3}, trainer_spec = 2, normalizer_spec = 3).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgeinfer.formats.errors import TokenizerError
from edgeinfer.formats.vocabulary import TokenType, Vocabulary

_SPACE = "▁"


class SpmCutter:
    """Cuts text without markers into token ids. Raises TokenizerError when the vocabulary is not sound."""

    def __init__(self, vocab: Vocabulary) -> None:
        import sentencepiece

        if vocab.scores is None or not np.isfinite(vocab.scores).all():
            raise TokenizerError(
                f"{vocab.path}: tokenizer.ggml.scores is missing or not finite: expected a score for each token"
            )
        self._bytes = _byte_tokens(vocab)
        self._tokens = vocab.tokens
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(_model_proto(vocab, vocab.scores))
        except RuntimeError as error:
            raise TokenizerError(f"{vocab.path}: sentencepiece refuses the vocabulary: {error}") from error

    def cut(self, text: str) -> list[int]:
        """Token ids of `text`, spaces as they stand."""
        ids: list[int] = self._processor.EncodeAsIds(text)
        return ids

    def piece_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        if token in self._bytes:
            return self._bytes[token]
        return self._tokens[token].replace(_SPACE, " ").encode()


def _byte_tokens(vocab: Vocabulary) -> dict[int, bytes]:
    """{id: byte}: all 256 must be there, each once, spelled <0x00> to <0xFF>."""
    values = {f"<0x{value:02X}>": bytes([value]) for value in range(256)}
    found: dict[int, bytes] = {}
    for i in np.flatnonzero(vocab.types == TokenType.BYTE).tolist():
        if vocab.tokens[i] not in values:
            raise TokenizerError(
                f"{vocab.path}: byte token {i} is named {vocab.tokens[i]!r:.40}: expected <0x00> to <0xFF>"
            )
        found[i] = values[vocab.tokens[i]]
    if len(found) != 256:
        raise TokenizerError(
            f"{vocab.path}: {len(found)} of 256 byte tokens: text outside the vocabulary could not be encoded"
        )
    return found


def _model_proto(vocab: Vocabulary, scores: npt.NDArray[np.float32]) -> bytes:
    """The vocabulary as a serialized ModelProto. Markers become control pieces: the library makes none from text."""
    n = len(vocab.tokens)
    # One record of 5 bytes a token: the tag of `score` (field 2, 32 bits) and the value, little-endian.
    packed = np.empty(n, [("tag", "u1"), ("score", "<f4")])
    packed["tag"], packed["score"] = 2 << 3 | 5, scores
    score_fields = packed.tobytes()
    pieces = [text.encode() for text in vocab.tokens]
    heads = {size: _head(1, _head(1, b"", size), size + 5) for size in set(map(len, pieces))}
    out = [b""] * (3 * n)  # each token: head, text, score; the type is left out where it is normal, the default
    out[0::3] = map(heads.__getitem__, map(len, pieces))
    out[1::3] = pieces
    out[2::3] = [score_fields[i : i + 5] for i in range(0, 5 * n, 5)]
    marker_ids = frozenset(vocab.markers.values())
    for i in np.flatnonzero(vocab.types != TokenType.NORMAL).tolist():
        kind, text = int(vocab.types[i]), vocab.tokens[i] or f"[EMPTY_{i}]"
        if i in marker_ids:
            kind = TokenType.CONTROL
        elif kind == TokenType.USER_DEFINED:
            text = text.replace(" ", _SPACE)
        out[3 * i : 3 * i + 3] = (_message(1, _message(1, text.encode()) + _number(3, kind)), b"", b"")
    unknown = (
        "\N{DOUBLE QUESTION MARK}unknown"  # the library wants exactly one unknown piece: one more token, never made
    )
    known = set(vocab.tokens)
    while unknown in known:
        unknown += "?"
    out.append(_message(1, _message(1, unknown.encode()) + _number(3, TokenType.UNKNOWN)))
    out.append(_message(2, _number(3, 2) + _number(35, 1)))  # model_type = BPE, byte_fallback
    out.append(_message(3, _number(3, 0) + _number(4, 0) + _number(5, 1)))  # no dummy prefix, keep spaces, escape them
    return b"".join(out)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _head(field: int, start: bytes, rest: int) -> bytes:
    """The tag and length of a message of `start` and `rest` more bytes, and `start`."""
    return _varint(field << 3 | 2) + _varint(len(start) + rest) + start
