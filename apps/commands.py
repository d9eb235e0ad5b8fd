"""The sub-commands of `edgeinfer`, and the exit code of everything that can go wrong in them.

Start-up counts, so the modules of the commands import the runtime, rich, prompt_toolkit and the network only when used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from edgeinfer import errors
from edgeinfer.apps import bench, chat, inspect, manage, run
from edgeinfer.apps.terminal import notice

FAILED, USAGE, DOWNLOAD, DISK, MEMORY, INTERRUPTED = 1, 2, 3, 4, 5, 130

EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (  # the first that fits
    (errors.DownloadError, DOWNLOAD),
    (errors.DiskSpaceError, DISK),
    (errors.MemoryLimitError, MEMORY),
    (errors.ModelNotFoundError, USAGE),
    (errors.ModelFormatError, USAGE),
    (errors.TokenizerError, USAGE),
    (errors.TemplateError, USAGE),
    (errors.ContextLengthError, USAGE),
    (errors.EdgeInferError, FAILED),
    (UnicodeDecodeError, USAGE),  # input that is not UTF-8
    (MemoryError, MEMORY),
    (OSError, FAILED),
    (KeyboardInterrupt, INTERRUPTED),
)


class _Commands(TyperGroup):
    """Whose errors, from parsing (which prints the help) to the end, are one line and an exit code."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _errors_reported():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _errors_reported():
            return super().invoke(ctx)


@contextmanager
def _errors_reported() -> Iterator[None]:
    """Turns the errors within the block into one line on stderr and an exit code. Any other is our bug: a traceback."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, so that a full disk or a reader who left is noticed here
    except tuple(kind for kind, _ in EXIT_CODES) as error:
        where = "standard output: " if isinstance(error, OSError) and _output_lost() else ""
        if not isinstance(error, (KeyboardInterrupt, BrokenPipeError)):  # of these the person knows
            notice(f"edgeinfer: {where}{_sentence(error)}")
        raise typer.Exit(next(code for kind, code in EXIT_CODES if isinstance(error, kind))) from None


def _output_lost() -> bool:
    """Whether stdout takes nothing more; it is then closed off, lest the interpreter's own flush at exit complain too."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _sentence(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"the input is not UTF-8 ({error.reason} at byte {error.start})"
    if isinstance(error, MemoryError):
        return "out of memory; take a smaller context or a smaller model"
    return str(error)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 failed, 2 usage, bad file or prompt too long, 3 download, 4 disk full, 5 memory, "
    "130 interrupted, 143 terminated.",
)
for command in (
    chat.chat,
    run.run,
    bench.bench,
    inspect.inspect,
    inspect.plan,
    inspect.tokenize,
    manage.pull,
    manage.models,
    manage.warmup,
    manage.doctor,
):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"edgeinfer {version('edgeinfer')}")
        raise typer.Exit


@app.callback()
def _front_door(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run language models on this machine: `edgeinfer chat` fetches a small model on first use and talks.

    Every command takes a GGUF file or a known name. `edgeinfer COMMAND --help` explains one.
    """


cli = typer.main.get_command(app)
