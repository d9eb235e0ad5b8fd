"""Name to loaded model, with what a person sees meanwhile: the download's size and progress, compiling, packing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeinfer.apps.terminal import ProgressLine

if TYPE_CHECKING:
    from edgeinfer import Model

ModelName = Annotated[
    str, typer.Argument(help="A GGUF file, a known name (see `models`), a file in the cache, or hf:OWNER/REPO/FILE.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads to compute with; default: one a core.")]
Context = Annotated[
    int | None, typer.Option("--ctx", min=1, help="Tokens of context; default: what it was trained for, at most 4096.")
]


def find_model(name: str) -> Path:
    """The file that `name` means; a known name is fetched where it is missing, with progress."""
    from edgeinfer.library import resolve

    with ProgressLine(name) as line:
        return resolve(name, download=True, progress=line.download)


@contextmanager
def arguments_checked() -> Iterator[None]:
    """The library's ValueError is about an argument, which here came from the command line: an error of usage."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def open_model(name: str, threads: int | None, context: int | None) -> Iterator[Model]:
    """The loaded model, closed at the end of the block."""
    path = find_model(name)
    import edgeinfer

    with ProgressLine() as line, arguments_checked():
        model = edgeinfer.load(path, threads=threads, context=context, progress=line.stage)
    with model:
        yield model
