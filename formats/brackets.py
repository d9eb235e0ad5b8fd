"""Which pieces of a message could take part in a marker, and the brackets that follow them through a chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edgeinfer.formats.finder import Finder


class Guard:
    """Knows the markers, and finds the pieces of a message that could become part of one."""

    def __init__(self, markers: Sequence[str]) -> None:
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

        map_texts(value, look)
        return found

    def bracket_starts(self, text: str, nonce: str) -> str:
        """Brackets round whole markers, fragments at the ends, and every character with which a marker can begin."""
        spans = self._marker_spans(text)
        return _bracket(text, spans + [(i, i + 1) for i, char in enumerate(text) if char in self._starts], nonce)

    def bracket_markers(self, text: str, nonce: str) -> str:
        """Brackets round whole markers and fragments at the ends only: templates look for </think> and the like."""
        return _bracket(text, self._marker_spans(text), nonce)

    def blank(self, text: str) -> str:
        """The text with no character left with which a marker can begin, nor a fragment of one."""
        for start, end in reversed(_union(self._marker_spans(text))):
            text = text[:start] + "x" + text[end:]
        return "".join("x" if char in self._starts else char for char in text)

    def _marker_spans(self, text: str) -> list[tuple[int, int]]:
        """Whole markers; and what, at an end or as a whole, could complete a marker with the template's own text."""
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


def take_brackets(text: str, nonce: str) -> tuple[str, list[tuple[int, int]]] | None:
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


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of plain data with every text changed, except roles and the names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: item if key == "role" else map_texts(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_texts(item, change) for item in value)
    return value
