"""`edgeinfer chat`: a conversation; where stdin is no terminal, one message a line until the end of input."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeinfer.apps.loading import Context, ModelName, Threads, arguments_checked, open_model
from edgeinfer.apps.run import MIN_P, REPEAT_PENALTY, TEMPERATURE, TOP_K, TOP_P, Seed, Temperature, read_text, require_template
from edgeinfer.apps.terminal import ctrl_c_cancels, notice, printable, standard_input
from edgeinfer.library import DEFAULT_MODEL

if TYPE_CHECKING:
    from edgeinfer import Model, Reply

HELP = """\
/help           this list
/reset          forget the conversation, keep the system message
/system [TEXT]  show the system message, or set it and begin anew
/stats          figures of the last reply
/save [FILE]    write the conversation to a new JSON file
/exit           leave (so do Ctrl-D, and Ctrl-C at an empty prompt)
A pasted text is one message, whatever its lines. Alt-Enter begins a new line. Ctrl-C stops a reply."""


def chat(
    model: ModelName = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message to begin with.")] = None,
    temperature: Temperature = TEMPERATURE,
    seed: Seed = None,
    threads: Threads = None,
    context: Context = None,
    show_prompt: Annotated[
        bool, typer.Option("--show-prompt", help="Show on stderr the templated text that each message becomes.")
    ] = False,
) -> None:
    """Talk with a model: `edgeinfer chat`, or `edgeinfer chat MODEL --system "Answer in verse."`.

    The first use fetches the default model. In the chat, /help lists what there is.
    Where stdin is not a terminal, each line is a message and stdout holds the answers only.
    """
    at_terminal = standard_input().isatty() and sys.stdout.isatty()
    with open_model(model, threads, context) as loaded:
        require_template(loaded)
        opening = None if system is None else read_text(system)
        sampling = {"temperature": temperature, "top_k": TOP_K, "top_p": TOP_P, "min_p": MIN_P, "seed": seed}
        sampling["repeat_penalty"] = REPEAT_PENALTY if temperature else 1.0
        talk = Conversation(loaded, opening, sampling, show_prompt)
        if at_terminal:
            _at_terminal(talk)
        else:
            for line in sys.stdin:
                if line.strip() and not talk.take(line.rstrip("\r\n")):
                    break


def _at_terminal(talk: Conversation) -> None:
    from edgeinfer.apps.prompt import Prompt
    from edgeinfer.errors import EdgeInferError

    notice(f"{talk.model.name}, {talk.model.context} tokens of context. /help lists commands, Ctrl-D leaves.")
    prompt = Prompt()
    while (text := prompt.read()) is not None:
        try:
            with prompt.busy():
                if text.strip() and not talk.take(text):
                    return
        except EdgeInferError as error:
            notice(str(error))


class Conversation:
    """One session of a model, and the commands that a line beginning with `/` can be."""

    def __init__(self, model: Model, system: str | None, sampling: dict[str, Any], show_prompt: bool) -> None:
        self.model, self._sampling, self._show_prompt = model, sampling, show_prompt
        self._session = model.session(system=system)
        self._last: Reply | None = None

    def take(self, text: str) -> bool:
        """Answer a message or obey a command; False to leave. Raises the library's errors and stays usable."""
        word, _, rest = text.strip().partition(" ")
        commands: dict[str, Callable[[], None]] = {
            "/help": lambda: notice(HELP),
            "/reset": self._session.reset,
            "/system": lambda: self._system(rest.strip()),
            "/stats": self._stats,
            "/save": lambda: self._save(rest.strip()),
        }
        if word == "/exit":
            return False
        if word in commands:
            commands[word]()
        elif word.startswith("/") and word[1:].isalpha() and "\n" not in text:
            notice(f"{word} is no command; /help lists them")
        else:
            self._answer(text)
        return True

    def _answer(self, text: str) -> None:
        if self._show_prompt:
            notice(self._session.render(text))
        with arguments_checked():
            reply = self._session.send(text, **self._sampling)
        self._last = reply
        at_terminal = sys.stdout.isatty()
        with ctrl_c_cancels(reply) as interrupt:
            for piece in reply:
                sys.stdout.write(printable(piece) if at_terminal else piece)
                sys.stdout.flush()
        print(flush=True)
        if interrupt.came is not None and not sys.stdin.isatty():
            raise KeyboardInterrupt
        if reply.finish_reason == "length":
            notice("[the context is full; /reset begins anew]")

    def _system(self, text: str) -> None:
        if text:
            self._session = self.model.session(system=text)
        notice(f"system message: {self._session.system or '(none)'}")

    def _stats(self) -> None:
        if self._last is None:
            notice("no reply yet")
            return
        t = self._last.timings
        notice(
            f"time to first token: {_figure(t.ttft_s, '.2f', 's')}\n"
            f"prompt: {t.prompt_tokens} tokens, {t.cached_tokens} of them cached, "
            f"the others read at {_figure(t.prefill_tps, '.0f', 'tokens/s')}\n"
            f"reply: {t.generated_tokens} tokens at {_figure(t.decode_tps, '.1f', 'tokens/s')}, "
            f"{_figure(t.bandwidth_share, '.0%', 'of the bandwidth limit')}\n"
            f"ended by: {self._last.finish_reason}; seed {self._last.seed}"
        )

    def _save(self, name: str) -> None:
        path = name or time.strftime("edgeinfer-chat-%Y%m%d-%H%M%S.json")
        conversation = {"model": self.model.name, "messages": self._session.messages}
        try:
            # private, and never over another file
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(conversation, file, ensure_ascii=False, indent=2)
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL character
            notice(f"not saved: {error}")
        else:
            notice(f"saved as {path}")


def _figure(value: float | None, form: str, unit: str) -> str:
    return f"{'-' if value is None else format(value, form)} {unit}"
