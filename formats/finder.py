"""Finds tokens that are matched in text as whole strings, leftmost first, the longest of those that start together."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence

Spans = Sequence[tuple[int, int]]  # (start, end) character ranges, ascending, not overlapping


class Finder:
    """Matches the keys of `words` in time linear in the text, times the lengths of words with one beginning."""

    def __init__(self, words: Mapping[str, int], markers: Collection[int] = ()) -> None:
        """`markers`: the ids that must not be made of protected characters (see `find`)."""
        self._words, self._markers = words, markers
        self._lengths: dict[str, list[int]] = {}  # by the first two characters, longest first
        for word in words:
            lengths = self._lengths.setdefault(word[:2], [])
            if len(word) not in lengths:
                lengths.append(len(word))
        for lengths in self._lengths.values():
            lengths.sort(reverse=True)
        # Alternatives of one or two literal characters, two first: nothing in it can backtrack.
        starts = sorted(self._lengths, key=len, reverse=True)
        self._start = re.compile("|".join(map(re.escape, starts))) if starts else None

    def find(self, text: str, protected: Spans = ()) -> list[tuple[int, int, int]]:
        """(start, end, id) of each match, in order; a marker is not matched where it takes in a protected character."""
        found: list[tuple[int, int, int]] = []
        ends = [end for _, end in protected]
        at = 0
        while self._start is not None and (start := self._start.search(text, at)) is not None:
            at = start.start()
            match = self._match(text, at, protected, ends)
            if match is None:
                at += 1
            else:
                found.append(match)
                at = match[1]
        return found

    def _match(self, text: str, at: int, protected: Spans, ends: list[int]) -> tuple[int, int, int] | None:
        for beginning in (text[at : at + 2], text[at]):
            for length in self._lengths.get(beginning, ()):
                word = text[at : at + length]
                token = self._words.get(word)
                if token is None or len(word) < length:
                    continue
                nearest = bisect_left(ends, at + 1)  # the first protected range that ends behind `at`
                is_free = nearest == len(ends) or protected[nearest][0] >= at + length
                if is_free or token not in self._markers:
                    return at, at + length, token
        return None
