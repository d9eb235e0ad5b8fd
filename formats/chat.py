"""Chat templates: messages to the prompt text of a model, and to token ids in which a message can never forge a marker.

The text is rendered with brackets round every piece of a message that could take part in a marker; after rendering they
are taken out, and their places tell the tokenizer which characters are only text. Where nothing of the kind is in the
messages, the ids are those of the rendered text.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from edgeinfer.formats.brackets import Guard, map_texts, take_brackets
from edgeinfer.formats.errors import TemplateError
from edgeinfer.formats.finder import Spans
from edgeinfer.formats.sandbox import BoundedTemplate, Refused
from edgeinfer.formats.tokenizer import Tokenizer

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 2048
MAX_NESTING = 64
_OWN_NAMES = frozenset(("messages", "add_generation_prompt", "bos_token", "eos_token"))
_KEY = "tokenizer.chat_template"


class ChatTemplate:
    """The chat template of one model. Build it with `from_metadata`; it may be shared between threads."""

    def __init__(self, source: str, tokenizer: Tokenizer, path: str | os.PathLike[str]) -> None:
        """Raises TemplateError when `source` is not a template, or too large; `path` is named in errors."""
        self.source = source
        self._path = os.fspath(path)
        self._tokenizer = tokenizer
        self._template = BoundedTemplate(source, self._path)
        self._guard = Guard(tokenizer.marker_texts)
        self._special = {
            name: "" if token is None else tokenizer.text(token)
            for name, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
        }

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], tokenizer: Tokenizer, path: str | os.PathLike[str]
    ) -> ChatTemplate:
        """The default template of a GGUF file. Raises TemplateError when there is none."""
        source = metadata.get(_KEY)
        if not isinstance(source, str):
            named = [key.removeprefix(_KEY + ".") for key in metadata if key.startswith(_KEY + ".")]
            only = f" but those named {', '.join(named)}" if named else ""
            raise TemplateError(
                f"{os.fspath(path)}: the file holds no chat template{only}: use --raw to give the prompt as it stands"
            )
        return cls(source, tokenizer, path)

    def render(
        self, messages: list[Message], add_generation_prompt: bool = True, notes: list[str] | None = None, **kwargs: Any
    ) -> str:
        """The prompt as text, for display. See `encode`."""
        return self._accepted(messages, add_generation_prompt, notes, kwargs)[0]

    def encode(
        self, messages: list[Message], add_generation_prompt: bool = True, notes: list[str] | None = None, **kwargs: Any
    ) -> list[int]:
        """The prompt as token ids, with BOS once where the template writes it or the file wants it.

        messages: dicts of plain data with a `role` and mostly a `content`; kwargs: further variables, such as tools.
        notes: receives a sentence for each change that was necessary: a refused system message is put before the first
        user message, and consecutive messages of one role are joined.
        Raises TemplateError when the template refuses the messages otherwise (in its own words), loses one, or fails.
        """
        text, messages = self._accepted(messages, add_generation_prompt, notes, kwargs)
        bos = self._tokenizer.adds_bos
        if not self._guard.concerns([messages, kwargs]):
            return self._tokenizer.encode(text, special=True, bos=bos)
        spans = self._plain_spans(text, messages, add_generation_prompt, kwargs, self._guard.bracket_starts)
        if spans is None:
            # The template looks into the messages (to cut out reasoning, say): those brackets change what it writes.
            # Wider ones may not; but then the prompt must have the same markers as one made from messages without any.
            spans = self._plain_spans(text, messages, add_generation_prompt, kwargs, self._guard.bracket_markers) or []
            harmless = self._changed(self._guard.blank, messages, add_generation_prompt, kwargs)
            if harmless is None or self._marker_ids(harmless, []) != self._marker_ids(text, spans):
                raise TemplateError(
                    f"{self._path}: a message holds the text of a control token, in a place where the chat template"
                    " would make a control token of it: remove it from the message"
                )
        return self._tokenizer.encode(text, special=True, bos=bos, plain=spans)

    def _plain_spans(
        self,
        text: str,
        messages: list[Message],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
        bracket: Callable[[str, str], str],
    ) -> list[tuple[int, int]] | None:
        """The characters of `text` that come from what `bracket` marks; None when that changes the text."""
        nonce = secrets.token_hex(16)
        bracketed = self._changed(lambda part: bracket(part, nonce), messages, add_generation_prompt, kwargs)
        found = None if bracketed is None else take_brackets(bracketed, nonce)
        return found[1] if found is not None and found[0] == text else None

    def _changed(
        self,
        change: Callable[[str], str],
        messages: list[Message],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str | None:
        """The prompt for the same messages with every text changed; None when the template does not take them."""
        try:
            return self._render(map_texts(messages, change), map_texts(dict(kwargs), change), add_generation_prompt)
        except (Refused, TemplateError):
            return None

    def _marker_ids(self, text: str, plain: Spans) -> list[int]:
        return [token for _, _, token in self._tokenizer.find_markers(text, plain)]

    def _accepted(
        self, messages: list[Message], add_generation_prompt: bool, notes: list[str] | None, kwargs: Mapping[str, Any]
    ) -> tuple[str, list[Message]]:
        """The rendered text, and the messages as the template accepts them."""
        _check(messages, kwargs, self._path)
        refusal = ""
        for changed, made in _variants(messages):
            try:
                text = self._render(changed, kwargs, add_generation_prompt)
            except Refused as error:
                refusal = refusal or f"{self._path}: the chat template refuses these messages: {error}"
                continue
            lost = _lost(changed, text)
            if lost is None:
                if notes is not None:
                    notes += made
                return text, changed
            refusal = refusal or f"{self._path}: the chat template leaves out message {lost} ({changed[lost]['role']})"
        raise TemplateError(refusal)

    def _render(self, messages: list[Message], kwargs: Mapping[str, Any], add_generation_prompt: bool) -> str:
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return self._template.render({"tools": None, "documents": None, **kwargs, **self._special, **given})


def _check(messages: list[Message], kwargs: Mapping[str, Any], path: str) -> None:
    """Raises TemplateError unless this is plain data that a template may be given."""
    if not isinstance(messages, list) or not messages or len(messages) > MAX_MESSAGES:
        raise TemplateError(f"{path}: expected a list of 1 to {MAX_MESSAGES} messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise TemplateError(f"{path}: message {i} needs a role, one of {', '.join(ROLES)}")
    if not _OWN_NAMES.isdisjoint(kwargs):
        raise TemplateError(
            f"{path}: {', '.join(sorted(_OWN_NAMES & set(kwargs)))} cannot be set as a template variable"
        )
    level: list[Any] = [messages, dict(kwargs)]
    for _ in range(MAX_NESTING):
        inner: list[Any] = []
        for value in level:
            if type(value) is dict:
                inner += value.values()
                if not all(type(key) is str for key in value):
                    raise TemplateError(f"{path}: messages and template variables must have text as keys")
            elif type(value) in (list, tuple):
                inner += value
            elif not (value is None or type(value) in (str, int, float, bool)):
                raise TemplateError(
                    f"{path}: a {type(value).__name__} in the messages: expected text, numbers, lists and dicts"
                )
        level = inner
    if level:
        raise TemplateError(f"{path}: the messages are nested more than {MAX_NESTING} levels deep")


def _variants(messages: list[Message]) -> list[tuple[list[Message], list[str]]]:
    """The messages as they are, then as they may be changed for a template that refuses them; with notes on that."""
    joined, join_note = _join_turns(messages)
    folded, fold_note = _fold_system(messages)
    both, both_note = _join_turns(folded)
    variants = [(messages, []), (joined, join_note), (folded, fold_note), (both, fold_note + both_note)]
    return [variant for i, variant in enumerate(variants) if i == 0 or variant[0] != messages]


def _fold_system(messages: list[Message]) -> tuple[list[Message], list[str]]:
    system, user = messages[0], next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if (
        system["role"] not in ("system", "developer")
        or user is None
        or not _is_text(system)
        or not _is_text(messages[user])
    ):
        return messages, []
    first = {**messages[user], "content": f"{system['content']}\n\n{messages[user]['content']}"}
    note = "the chat template takes no system message: it was put before the first user message"
    return [*messages[1:user], first, *messages[user + 1 :]], [note]


def _join_turns(messages: list[Message]) -> tuple[list[Message], list[str]]:
    out: list[Message] = []
    for message in messages:
        last = out[-1] if out else None
        if last is not None and last["role"] == message["role"] != "tool" and _is_text(last) and _is_text(message):
            out[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            out.append(message)
    note = "the chat template wants alternating roles: consecutive messages of one role were joined"
    return out, [note] if len(out) < len(messages) else []


def _is_text(message: Message) -> bool:
    """Whether the message is text and nothing else."""
    return message.keys() == {"role", "content"} and isinstance(message["content"], str)


def _lost(messages: list[Message], text: str) -> int | None:
    """The first system or user message whose text is not in the prompt."""
    for i, message in enumerate(messages):
        content = message.get("content")
        if (
            message["role"] in ("system", "developer", "user")
            and isinstance(content, str)
            and content.strip() not in text
        ):
            return i
    return None
