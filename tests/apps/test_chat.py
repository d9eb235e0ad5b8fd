"""`edgeinfer chat` in pipes and in a pseudo-terminal: pastes, Ctrl-C, the end of input, the commands."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PASTE = "\x1b[200~one\ntwo\nthree\x1b[201~"
CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"
PROMPT = "\x1b[?2004h"  # the prompt turns bracketed paste on

at_terminal = pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals of POSIX")


@pytest.mark.parametrize(
    ("stdin", "sent"),
    [
        (b"", []),
        (b"hi", ["hi"]),
        (b"hi\nyou\n", ["hi", "you"]),
        (b"\n  \nhi\r\n\n", ["hi"]),
        ("Grüße\n".encode(), ["Grüße"]),
        (b"hi\n/exit\nmore\n", ["hi"]),
        (b"/usr/bin is a folder\n", ["/usr/bin is a folder"]),
    ],
)
def test_in_a_pipe_each_line_is_a_message(command: Any, stdin: bytes, sent: list[str]) -> None:
    began = time.monotonic()
    done = command("chat", command.model, stdin=stdin)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello there.\n" * len(sent), b"")
    assert command.sent == sent
    assert time.monotonic() - began < 5


def test_a_name_that_no_file_can_have_is_not_saved(command: Any) -> None:
    done = command("chat", command.model, stdin=b"/save a\0b\nhi\n")
    assert (done.returncode, done.stdout) == (0, b"Hello there.\n")
    assert done.stderr.startswith(b"not saved: ") and done.stderr.count(b"\n") == 1


def test_errors_in_a_pipe_have_their_code(command: Any) -> None:
    done = command("chat", command.model, stdin=b"too long\nhi\n")
    assert done.returncode == 2 and b"5000" in done.stderr and b"4096" in done.stderr and not done.stdout


def test_options(command: Any) -> None:
    arguments = "--system S --temp 0.5 --seed 3 --show-prompt".split()
    done = command("chat", command.model, *arguments, stdin=b"hi\n")
    assert {"system": "S"} in command.events
    options = {"temperature": 0.5, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 3, "repeat_penalty": 1.1}
    assert {"send": "hi", "options": options} in command.events
    assert done.stderr == b"<|user|>hi<|end|>\n" and done.stdout == b"Hello there.\n"


def test_a_model_without_template_is_refused(command: Any) -> None:
    command.script["template"] = False
    done = command("chat", command.model, stdin=b"hi\n")
    assert done.returncode == 2 and b"--raw" in done.stderr and command.sent == []


@at_terminal
def test_a_paste_is_one_message_and_ctrl_d_leaves(command: Any, terminal: Any) -> None:
    chat = terminal("chat", command.model)
    chat.expect(PROMPT)
    chat.type(PASTE)
    chat.expect("three")
    assert command.sent == []
    chat.type(ENTER)
    chat.expect("Hello there.")
    chat.expect(PROMPT)
    chat.type(CTRL_D)
    assert chat.wait() == 0
    assert command.sent == ["one\ntwo\nthree"] and command.events[-1] == {"closed": True}


@at_terminal
def test_ctrl_c_stops_the_reply_and_the_chat_goes_on(command: Any, terminal: Any) -> None:
    command.script.update(pieces=["begun ", "never seen"], delay=1.5)
    chat = terminal("chat", command.model)
    chat.expect(PROMPT)
    chat.type("first" + ENTER)
    chat.expect("begun ")
    began = time.monotonic()
    chat.type(CTRL_C * 3)  # impatience does not end the chat
    chat.expect(PROMPT)
    assert time.monotonic() - began < 1
    chat.type("\x1b[A")  # history: the last message again
    chat.expect("first")
    chat.type(CTRL_C)  # clears the line
    time.sleep(0.2)
    chat.type("second" + ENTER)
    chat.expect("never seen")
    chat.expect(PROMPT)
    chat.type(CTRL_C)
    assert chat.wait() == 0
    assert command.sent == ["first", "second"]


@at_terminal
def test_a_paste_during_a_reply_is_one_message_too(command: Any, terminal: Any) -> None:
    command.script.update(pieces=["begun ", "ended"], delay=0.8)
    chat = terminal("chat", command.model)
    chat.expect(PROMPT)
    chat.type("first" + ENTER)
    chat.expect("begun ")
    chat.type("one\rtwo\r")
    assert "one" not in chat.expect("ended")  # no echo in the reply
    chat.expect("begun ")
    chat.expect("ended")
    chat.expect(PROMPT)
    chat.type("/exit" + ENTER)
    assert chat.wait() == 0
    assert command.sent == ["first", "one\ntwo"]


@at_terminal
@pytest.mark.parametrize(("typed", "kept"), [("one", True), ("one\x7f", False), ("\x1b[A", False), (CTRL_D, False)])
def test_what_is_typed_during_a_reply_waits_at_the_prompt_or_is_said_to_be_dropped(
    command: Any, terminal: Any, typed: str, kept: bool
) -> None:
    command.script.update(pieces=["begun ", "ended"], delay=0.5)
    chat = terminal("chat", command.model)
    chat.expect(PROMPT)
    chat.type("first" + ENTER)
    chat.expect("begun ")
    chat.type(typed)
    chat.expect("ended")
    assert ("is dropped" in chat.expect(PROMPT)) != kept
    chat.type("two" + ENTER)
    chat.expect("begun ")
    assert command.sent == ["first", "onetwo" if kept else "two"]


@at_terminal
def test_commands(command: Any, terminal: Any) -> None:
    saved = Path(command.folder, "talk.json")
    chat = terminal("chat", command.model)
    chat.expect("/help")
    chat.expect(PROMPT)
    for typed, shown in [
        ("/stats", "no reply yet"),
        ("/help", "/save"),
        ("/nonsense", "no command"),
        ("/system Be brief.", "Be brief."),
        ("hi", "Hello there."),
        ("too long", "5000"),
        ("/stats", "200.0 tokens/s, 50% of the bandwidth limit"),
        ("/save talk.json", "saved as talk.json"),
        ("/save talk.json", "not saved"),
        ("/reset", PROMPT),
    ]:
        chat.type(typed + ENTER)
        chat.expect(shown)
    chat.type("/exit" + ENTER)
    assert chat.wait() == 0
    assert command.sent == ["hi", "too long"] and {"reset": True} in command.events
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert json.loads(saved.read_text("utf-8")) == {"model": "script", "messages": messages}
    assert saved.stat().st_mode & 0o777 == 0o600
