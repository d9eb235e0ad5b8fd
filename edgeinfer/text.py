"""Tokens to text that may be shown at once: holds back half characters and whatever may yet become a stop string."""

from __future__ import annotations

import codecs
import reprlib
from collections import deque
from collections.abc import Callable, Sequence


class TextStream:
    """The text of generated tokens, cut before the first stop string.

    token_bytes: the bytes of a token. stop: strings that end the text and are not shown, looked for in the generated
    text alone, across tokens. The earliest to begin wins; of two that begin at one place, the one complete first (the
    shorter). Bytes that are not UTF-8 become U+FFFD, as in `bytes.decode(errors="replace")` of the whole. The
    pieces, joined, do not depend on where tokens begin and end. Time is linear in the text, for each stop string.

    Attribute stopped: the stop string that ended the text, or None. After it no more text is shown, whatever is pushed.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop is {reprlib.repr(stop)}; it must be a sequence of strings, none of them empty")
        self.stopped: str | None = None
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_Matcher(text) for text in stop]
        self._held: deque[str] = deque()  # the characters not yet shown
        self._end = 0  # how many characters were decoded
        self._match: tuple[int, str] | None = None  # (start, stop string) of the earliest match so far

    def push(self, token_id: int) -> str:
        """The text that may be shown now that this token was generated."""
        return self._shown(self._decoder.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        """The rest of the text, once no more tokens come."""
        text = self._shown(self._decoder.decode(b"", True))
        return text + (self._stop(*self._match) if self._match else self._release(self._end))

    def _shown(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        if not self._matchers:
            return text
        for char in text:
            self._held.append(char)
            self._end += 1
            for matcher in self._matchers:
                if matcher.complete(char):
                    start = self._end - len(matcher.text)
                    if self._match is None or start < self._match[0]:
                        self._match = start, matcher.text
            if self._match and self._match[0] <= self._pending():  # no match can begin earlier any more
                return self._stop(*self._match)
        return self._release(self._pending())

    def _pending(self) -> int:
        """Where the earliest begins of the stop strings that the text may be in the middle of."""
        return self._end - max(matcher.matched for matcher in self._matchers)

    def _release(self, upto: int) -> str:
        return "".join(self._held.popleft() for _ in range(upto - self._end + len(self._held)))

    def _stop(self, start: int, stop: str) -> str:
        self.stopped = stop
        text = self._release(start)
        self._held.clear()
        return text


class _Matcher:
    """How many characters of one string the text now ends with (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0
        self._border = [0]  # of each beginning of the string, the longest proper one that is its end too
        for char in text[1:]:
            self._border.append(self._next(self._border[-1], char))

    def complete(self, char: str) -> bool:
        """Reads one character of the text; whether it completes the string."""
        self.matched = self._next(self.matched, char)
        return self.matched == len(self.text)

    def _next(self, matched: int, char: str) -> int:
        while matched and (matched == len(self.text) or self.text[matched] != char):
            matched = self._border[matched - 1]
        return matched + (self.text[matched] == char)
