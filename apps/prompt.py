"""The chat's input at a terminal: history, editing, a paste as one message, a quiet keyboard during a reply."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from edgeinfer.apps.terminal import notice
from edgeinfer.library import cache_folder

_SIGN = "> "


class Prompt:
    """Reads messages from the person at the terminal."""

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession(
            _SIGN,
            multiline=True,  # so that a paste keeps its lines; Enter sends all the same
            key_bindings=_keys(),
            history=_history(),
            prompt_continuation=_continuation,
        )
        self._typed_ahead = ""

    def read(self) -> str | None:
        """The next message; None to leave (Ctrl-D, or Ctrl-C at an empty prompt)."""
        ahead, self._typed_ahead = self._typed_ahead, ""
        if ahead.endswith("\n"):  # entered, or pasted, during the reply: one message
            print(_SIGN + ahead, end="", flush=True)
            return ahead.strip("\n")
        try:
            return self._session.prompt(default=ahead)
        except (EOFError, KeyboardInterrupt):
            return None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Within the block keys are not echoed; Ctrl-C works, and other text typed becomes the next message."""
        if sys.platform == "win32":
            yield
            return
        import select
        import termios

        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
        quiet = termios.tcgetattr(keyboard)
        quiet[3] &= ~(termios.ECHO | termios.ICANON)  # ISIG stays
        termios.tcsetattr(keyboard, termios.TCSADRAIN, quiet)
        try:
            yield
            typed = b""
            while select.select([keyboard], [], [], 0)[0] and (data := os.read(keyboard, 1 << 16)):
                typed += data
            self._typed_ahead = _as_text(typed)
            if typed and not self._typed_ahead:
                notice("[what was typed during the reply is dropped: it held keys other than text and Enter]")
        finally:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _as_text(typed: bytes) -> str:
    """Typed bytes as text; nothing where they hold control keys, whose meaning is gone."""
    text = typed.decode("utf-8", "ignore").replace("\r", "\n")
    return text if text.replace("\n", "").replace("\t", "").isprintable() else ""


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return keys


def _history() -> History:
    """In the private cache folder; of this chat only, where that cannot be written."""
    try:
        path = cache_folder().parent / "chat_history"
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def _continuation(width: int, line_number: int, wraps: int) -> str:
    return " " * width
