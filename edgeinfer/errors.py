"""The runtime's errors, and those of `edgeinfer.formats` again, so that a caller needs one module for `except`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from edgeinfer.formats.errors import EdgeInferError, ModelFormatError, TemplateError, TokenizerError

__all__ = [
    "ContextLengthError",
    "DiskSpaceError",
    "DownloadError",
    "EdgeInferError",
    "MemoryLimitError",
    "ModelFormatError",
    "ModelNotFoundError",
    "TemplateError",
    "TokenizerError",
]


class ModelNotFoundError(EdgeInferError):
    """A model name is no file, no known name and nothing in the cache.

    Attributes: name (str), suggestions (tuple of near names, the nearest first).
    """

    def __init__(self, name: str, suggestions: Sequence[str] = (), reason: str = "no such file or known model") -> None:
        self.name, self.suggestions = name, tuple(suggestions)
        near = f"; did you mean {' or '.join(self.suggestions)}?" if self.suggestions else ""
        super().__init__(f"{name}: {reason}{near}")


class ContextLengthError(EdgeInferError):
    """A prompt does not fit the context. Nothing is ever cut silently.

    Attributes: prompt_tokens (int), limit (int, tokens).
    """

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        self.prompt_tokens, self.limit = prompt_tokens, limit
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and the context holds {limit};"
            " shorten it, or ask for a larger context"
        )


class MemoryLimitError(EdgeInferError):
    """A model with its context needs more memory than is free; raised before anything is allocated.

    Attributes: need, available (int, bytes).
    """

    def __init__(self, need: int, available: int) -> None:
        self.need, self.available = need, available
        super().__init__(
            f"needs {need / 1e6:.0f} MB of memory and {available / 1e6:.0f} MB are free; "
            "take a smaller context or a smaller model, or close other programs"
        )


class DownloadError(EdgeInferError):
    """A download failed, or what came is not what was asked for.

    Attributes: source (str: what was being fetched, without credentials), reason (str).
    """

    def __init__(self, source: str, reason: str) -> None:
        self.source, self.reason = source, reason
        super().__init__(f"{source}: {reason}")


class DiskSpaceError(EdgeInferError):
    """A file does not fit on the disk.

    Attributes: path (str), need, free (int, bytes).
    """

    def __init__(self, path: str | os.PathLike[str], need: int, free: int) -> None:
        self.path, self.need, self.free = os.fspath(path), need, free
        super().__init__(
            f"{self.path}: needs {need / 1e6:.0f} MB and the disk has {free / 1e6:.0f} MB free; make room and run again"
        )
