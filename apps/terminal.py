"""What every command does with its terminal: streams, sizes, tables, the progress line, Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from edgeinfer import Reply

_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def open_streams() -> None:
    """UTF-8 on all three streams, whatever the locale. Paths that are not UTF-8 pass through as they are.

    Exits with code 1 where stdout is closed. A closed stdin stays None: `standard_input` says so when it is needed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets this number, which a file opened later must not get
    if sys.stderr is None:
        sys.stderr = open(2, "w")  # noqa: SIM115 - for the life of the process
    if sys.stdout is None:
        sys.exit("edgeinfer: standard output is closed; send it to a file, a pipe or /dev/null")
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)


def standard_input() -> TextIO:
    """Stdin. Raises EdgeInferError where it is closed."""
    if sys.stdin is None:
        from edgeinfer.errors import EdgeInferError

        raise EdgeInferError("standard input is closed; give the prompt with `edgeinfer run MODEL -p TEXT`, or pipe it in")
    return sys.stdin


def printable(text: str) -> str:
    """`text` without control characters: neither a model nor a file may steer the terminal."""
    return text.translate(_CONTROLS)


def notice(text: str) -> None:
    """A line for the person, beside the answer: on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def megabytes(nbytes: float) -> str:
    """Decimal, like disks and download sizes."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """On stdout: a table at a terminal, tab-separated lines without title or head in a pipe."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in cells:
            print(*(cell.replace("\t", " ").replace("\n", "\\n") for cell in row), sep="\t")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=None, show_header=any(columns), pad_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))  # Text: nothing in a file is taken for markup
    Console(highlight=False).print(table)


class ProgressLine:
    """One line on stderr, rewritten in place and gone at the end; nothing at all where stderr is no terminal."""

    _STAGES = {"kernels": "compiling kernels for this CPU, once", "weights": "packing weights"}

    def __init__(self, what: str = "") -> None:
        self._on, self._what = sys.stderr.isatty(), what
        self._shown_at = self._began = time.monotonic()
        self._drawn = False
        self._first: int | None = None  # bytes that an earlier run had fetched

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def stage(self, name: str, fraction: float) -> None:
        """The callback of `edgeinfer.load`."""
        self._show(f"{self._STAGES.get(name, name)} {fraction:4.0%}")

    def download(self, present: int, total: int) -> None:
        """The callback of `edgeinfer.library.resolve`: first the size, then the progress."""
        if self._first is None:
            self._first, self._began = present, time.monotonic()
            if self._on:
                already = f", {megabytes(present)} of them already here" if present else ""
                notice(f"downloading {self._what}: {megabytes(total)}{already}")
        rate = (present - self._first) / max(time.monotonic() - self._began, 0.001)
        done = present / max(total, 1)
        bar = "#" * int(30 * done)
        self._show(f"[{bar:.<30}] {done:4.0%}  {megabytes(present)} of {megabytes(total)}  {megabytes(rate)}/s")

    def _show(self, text: str) -> None:
        now = time.monotonic()
        if self._on and now - self._shown_at >= 0.1:
            self._shown_at, self._drawn = now, True
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


class Interrupt:
    """When Ctrl-C came (a monotonic time), or None."""

    came: float | None = None


@contextmanager
def ctrl_c_cancels(reply: Reply) -> Iterator[Interrupt]:
    """Within the block Ctrl-C cancels `reply`, which then ends as usual; one a second later is a KeyboardInterrupt."""
    interrupt = Interrupt()

    def handle(signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if interrupt.came is None:
            interrupt.came = now
            reply.cancel()
        elif now - interrupt.came > 1.0:  # sooner it is an impatient finger, which must not end the program
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)
