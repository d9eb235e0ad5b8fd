"""Chat templates: messages to the prompt text of a model, and to token ids in which a message can never forge a marker.

The text is rendered with invisible brackets round every piece of a message that could take part in a marker; after rendering they are
taken out, and their places tell the tokenizer which characters are only text. Where nothing of the kind is in the messages, the ids are
those of the rendered text.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from edgeinfer.formats.errors import TemplateError
from edgeinfer.formats.finder import Finder
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
        self._guard = _Guard(tokenizer)
        self._special = {
            name: "" if token is None else tokenizer.text(token)
            for name, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer, path: str | os.PathLike[str]) -> ChatTemplate:
        """The default template of a GGUF file. Raises TemplateError when there is none."""
        source = metadata.get(_KEY)
        if not isinstance(source, str):
            named = [key.removeprefix(_KEY + ".") for key in metadata if key.startswith(_KEY + ".")]
            only = f" but those named {', '.join(named)}" if named else ""
            raise TemplateError(f"{os.fspath(path)}: the file holds no chat template{only}: use --raw to give the prompt as it stands")
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
        notes: receives a sentence for each change that the template made necessary: a system message that it refuses is put before
        the first user message, and consecutive messages of one role are joined.
        Raises TemplateError when the template refuses the messages otherwise (in its own words), loses one, or fails.
        """
        text, messages = self._accepted(messages, add_generation_prompt, notes, kwargs)
        bos = self._tokenizer.adds_bos
        if not self._guard.concerns([messages, kwargs]):
            return self._tokenizer.encode(text, special=True, bos=bos)
        for bracket in (self._guard.bracket_starts, self._guard.bracket_markers):
            nonce = secrets.token_hex(16)
            bracketed = self._try_render(*_map_texts((messages, kwargs), lambda s: bracket(s, nonce)), add_generation_prompt)  # noqa: B023
            split = None if bracketed is None else _take_brackets(bracketed, nonce)
            if split is not None and split[0] == text:
                return self._tokenizer.encode(text, special=True, bos=bos, plain=split[1])
        # The template looks into the messages (it may cut out reasoning, say), so the brackets change what it writes. Its text is still
        # safe if it has the same markers as one made from messages without any.
        harmless = self._try_render(*_map_texts((messages, kwargs), self._guard.blank), add_generation_prompt)
        if harmless is None or self._marker_ids(harmless) != self._marker_ids(text):
            raise TemplateError(f"{self._path}: a message holds text like {self._guard.example}, which the chat template would make a control token")
        return self._tokenizer.encode(text, special=True, bos=bos)

    def _marker_ids(self, text: str) -> list[int]:
        return [token for _, _, token in self._tokenizer.find_markers(text)]

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

    def _try_render(self, messages: list[Message], kwargs: Mapping[str, Any], add_generation_prompt: bool) -> str | None:
        try:
            return self._render(messages, kwargs, add_generation_prompt)
        except (Refused, TemplateError):
            return None


class _Guard:
    """Knows the markers, and finds the pieces of a message that could become part of one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        markers = tokenizer.marker_texts
        self.example = markers[0] if markers else ""
        self._finder = Finder(dict.fromkeys(markers, 0))
        self._starts = frozenset(text[0] for text in markers)
        self._all = "\0".join(("", *markers, ""))
        self._longest = max(map(len, markers), default=0)

    def concerns(self, value: Any) -> bool:
        """Whether any text in `value` could take part in a marker."""
        found = False

        def look(text: str) -> str:
            nonlocal found
            found = found or bool(self._marker_spans(text)) or not self._starts.isdisjoint(text)
            return text

        _map_texts(value, look)
        return found

    def bracket_starts(self, text: str, nonce: str) -> str:
        """Brackets round whole markers, fragments at the ends, and every character with which a marker can begin."""
        spans = self._marker_spans(text)
        return _bracket(text, spans + [(i, i + 1) for i, char in enumerate(text) if char in self._starts], nonce)

    def bracket_markers(self, text: str, nonce: str) -> str:
        """Brackets round whole markers and fragments at the ends only: templates look for tags such as </think> in messages."""
        return _bracket(text, self._marker_spans(text), nonce)

    def blank(self, text: str) -> str:
        """The text with no character left with which a marker can begin, nor a fragment of one."""
        for start, end in reversed(_union(self._marker_spans(text))):
            text = text[:start] + "x" + text[end:]
        return "".join("x" if char in self._starts else char for char in text)

    def _marker_spans(self, text: str) -> list[tuple[int, int]]:
        """Whole markers; and what, at an end or as a whole, would complete a marker together with the template's own text."""
        spans = [(start, end) for start, end, _ in self._finder.find(text)]
        core = text.strip()
        if core and "\0" not in core:
            start = text.index(core)
            end = start + len(core)
            if len(core) <= self._longest and core in self._all:
                spans.append((start, end))
            sizes = range(1, min(self._longest, len(core)) + 1)
            spans += [(start, start + n) for n in sizes if core[:n] + "\0" in self._all]
            spans += [(end - n, end) for n in sizes if "\0" + core[-n:] in self._all]
        return spans


def _union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same characters as ascending spans that do not touch."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((start, end))
    return out


def _bracket(text: str, spans: list[tuple[int, int]], nonce: str) -> str:
    for start, end in reversed(_union(spans)):
        text = f"{text[:start]}{nonce}a{text[start:end]}{nonce}z{text[end:]}"
    return text


def _take_brackets(text: str, nonce: str) -> tuple[str, list[tuple[int, int]]] | None:
    """(text without brackets, the spans they enclosed); None when the template tore a pair apart."""
    first, *rest = text.split(nonce)
    out, size, opened = [first], len(first), -1
    spans: list[tuple[int, int]] = []
    for part in rest:
        kind, part = part[:1], part[1:]
        if kind != ("a" if opened < 0 else "z"):
            return None
        if kind == "z":
            spans.append((opened, size))
        opened = size if kind == "a" else -1
        out.append(part)
        size += len(part)
    return ("".join(out), _union(spans)) if opened < 0 else None


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of plain data with every text changed, except the roles of messages. Names of fields change with those of others."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: item if key == "role" else _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map_texts(item, change) for item in value)
    return value


def _check(messages: list[Message], kwargs: Mapping[str, Any], path: str) -> None:
    """Raises TemplateError unless this is plain data that a template may be given."""
    if not isinstance(messages, list) or not messages or len(messages) > MAX_MESSAGES:
        raise TemplateError(f"{path}: expected a list of 1 to {MAX_MESSAGES} messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise TemplateError(f"{path}: message {i} needs a role, one of {', '.join(ROLES)}")
    if not _OWN_NAMES.isdisjoint(kwargs):
        raise TemplateError(f"{path}: {', '.join(sorted(_OWN_NAMES & set(kwargs)))} cannot be set as a template variable")
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
                raise TemplateError(f"{path}: a {type(value).__name__} in the messages: expected text, numbers, lists and dicts")
        level = inner
    if level:
        raise TemplateError(f"{path}: the messages are nested more than {MAX_NESTING} levels deep")


def _variants(messages: list[Message]) -> list[tuple[list[Message], list[str]]]:
    """The messages as they are, and as they may be changed for a template that refuses them; with notes on the changes."""
    joined, join_note = _join_turns(messages)
    folded, fold_note = _fold_system(messages)
    both, both_note = _join_turns(folded)
    variants = [(messages, []), (joined, join_note), (folded, fold_note), (both, fold_note + both_note)]
    return [variant for i, variant in enumerate(variants) if i == 0 or variant[0] != messages]


def _fold_system(messages: list[Message]) -> tuple[list[Message], list[str]]:
    system, user = messages[0], next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if system["role"] not in ("system", "developer") or user is None or not _is_text(system) or not _is_text(messages[user]):
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
        if message["role"] in ("system", "developer", "user") and isinstance(content, str) and content.strip() not in text:
            return i
    return None
