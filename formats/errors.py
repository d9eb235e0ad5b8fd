"""The errors this package raises on purpose. Each text says what was found, what was expected and what to do."""

from __future__ import annotations

import os


class EdgeInferError(Exception):
    """Base of every error that edgeinfer raises for bad input or a missing resource."""


class ModelFormatError(EdgeInferError):
    """A model file is malformed, truncated, inconsistent or not of a supported kind.

    Attributes: path (str), offset (byte position in the file, or None), reason (str).
    """

    def __init__(self, path: str | os.PathLike[str], reason: str, offset: int | None = None) -> None:
        self.path, self.reason, self.offset = os.fspath(path), reason, offset
        where = self.path if offset is None else f"{self.path} at byte {offset}"
        super().__init__(f"{where}: {reason}")


class TokenizerError(EdgeInferError):
    """The vocabulary in a file is broken, or names a tokenizer that is not supported."""


class TemplateError(EdgeInferError):
    """A chat template is missing, exceeds its limits, or refused the messages."""
