"""What a chat template may spend, and the meter that every operation of a rendering pays into before it works."""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from typing import Any

from jinja2.runtime import LoopContext, Undefined

MAX_SOURCE = 256 << 10  # characters
MAX_TOKENS = 16_000  # of the source, white space included; the largest templates in use have about 4,000
MAX_NESTING = 100  # of the syntax tree, and of calls
MAX_OUTPUT = 1 << 20  # characters, of the result and of any one string
MAX_WORK = 16 << 20  # characters read or written by all operations together
MAX_STEPS = 200_000
MAX_INT_BITS = 4096
MAX_DIGITS = 1200  # of a text or token that becomes an integer
MAX_INDENT = 16
MAX_KEY_BITS = 60  # Python's hashes of larger numbers can be made to collide

_KEYS = (int, float, type(None), Undefined)
_PLAIN = (*_KEYS, range)  # what takes constant time to write and to compare
_VIEWS = (KeysView, ValuesView, ItemsView)
_HOLDERS = (list, tuple, set, frozenset, *_VIEWS)
_FORWARD = frozenset(("count", "find", "partition", "replace", "split"))
_BACKWARD = frozenset(("lstrip", "rfind", "rpartition", "rsplit", "rstrip", "strip"))


class Exceeded(Exception):
    """The template exceeds a limit."""


class Meter:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.steps = self.work = self.depth = 0

    def step(self, n: int = 1) -> None:
        self.steps += n
        if self.steps > MAX_STEPS:
            raise Exceeded(f"takes more than {MAX_STEPS} steps")

    def text(self, n: int) -> None:
        """Pay for a string of `n` characters."""
        if n > MAX_OUTPUT:
            raise Exceeded(f"makes a text of more than {MAX_OUTPUT} characters")
        self.spend(n)

    def spend(self, n: int) -> None:
        """Pay for reading or comparing `n` characters."""
        self.work += n
        if self.work > MAX_WORK:
            raise Exceeded(f"handles more than {MAX_WORK} characters in all")

    def number(self, value: Any) -> None:
        """Refuse an integer so large that arithmetic on it takes long."""
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise Exceeded("computes a huge number")

    def key(self, value: Any) -> None:
        """Pay for hashing `value`, which must be a scalar: hashing or comparing a nested tuple can take for ever."""
        if isinstance(value, str):
            self.text(len(value))
        elif not isinstance(value, _KEYS) or (isinstance(value, int) and value.bit_length() > MAX_KEY_BITS):
            raise Exceeded(
                f"uses a value of type {type(value).__name__} as a key: only text and numbers below"
                f" 2**{MAX_KEY_BITS} can be"
            )

    def search(self, text: str, part: str, backward: bool = False) -> None:
        """Pay for looking for `part` in `text`: Python may take len(text) * len(part), forward only for short ones."""
        longest = len(part) if backward else 100 if len(text) > 30_000 else 1000
        self.spend(len(text) * min(len(part), longest) // 8)

    def value(self, value: Any, indent: int = 0, ordered: bool = False) -> int:
        """Pay for writing out `value`, containers included; returns about how many characters that takes.

        `ordered` pays for comparing by < instead, which reads an item again for every level that it is nested in.
        """
        if isinstance(value, str):
            self.text(len(value))
            return len(value)
        total, stack = 0, [(value, 1)]
        while stack:
            item, level = stack.pop()
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, dict):
                self.step(2 * len(item))
                stack += [(part, level + 1) for pair in item.items() for part in pair]
            elif isinstance(item, _HOLDERS):
                self.step(len(item) * (level if ordered else 1))
                stack += [(part, level + 1) for part in item]
            elif isinstance(item, int):
                total += item.bit_length() // 3
            elif not isinstance(item, _PLAIN):  # such as a namespace, whose text is not bounded by anything
                raise Exceeded(f"handles a {type(item).__name__} where plain data is needed")
            total += 16 + indent * level
            if level > MAX_NESTING:
                raise Exceeded(f"handles data nested more than {MAX_NESTING} levels deep")
            if total > MAX_OUTPUT:
                break
        self.text(total)
        return total

    def size(self, value: Any) -> None:
        """Pay for looking through `value` once, but not into what it holds."""
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, (dict, range, *_HOLDERS)):
            self.step(len(value))

    def contents(self, value: Any, ordered: bool = False) -> None:
        """Pay for reading `value`, and all that it holds, once."""
        if isinstance(value, (str, dict, *_HOLDERS)):
            self.value(value, ordered=ordered)

    def comparison(self, operator: str, left: Any, right: Any) -> None:
        """Pay for left <operator> right, an operator of Jinja's."""
        self.step()
        if operator not in ("in", "notin"):
            ordered = operator not in ("eq", "ne")
            self.contents(left, ordered)
            self.contents(right, ordered)
        elif isinstance(right, (dict, KeysView)):
            self.key(left)
        else:
            self.contents(left)
            self.contents(right)
            if isinstance(right, range):
                self.step(len(right))
            elif isinstance(right, str) and isinstance(left, str):
                self.search(right, left)

    def operation(self, operator: str, left: Any, right: Any) -> None:
        """Pay for the arithmetic left <operator> right."""
        self.step()
        self.number(left)
        self.number(right)
        if operator == "+":
            self.size(left)
            self.size(right)
            if isinstance(left, str) and isinstance(right, str):
                self.text(len(left) + len(right))
        elif operator == "*":
            times, items = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(items, str) and isinstance(times, int):
                self.text(len(items) * max(0, times))
            elif isinstance(items, (list, tuple)) and isinstance(times, int):
                self.step(len(items) * max(0, times))
        elif operator == "%" and isinstance(left, str):
            raise Exceeded("formats text with %, which is not supported: use ~")
        elif not all(isinstance(operand, (int, float, Undefined)) for operand in (left, right)):
            raise Exceeded(f"computes {type(left).__name__} {operator} {type(right).__name__}")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * max(0, right) > MAX_INT_BITS:
                raise Exceeded("computes a huge number")

    def call(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Pay for a call; of a method of a built-in type the size of the result is known before it is made."""
        self.step(1 + len(args) + len(kwargs))
        target, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        values = (*args, *kwargs.values())
        if isinstance(target, dict):
            for value in values[:1]:  # of get; its default is not looked at
                self.key(value)
        elif isinstance(target, (str, list, tuple)) or (isinstance(target, LoopContext) and name == "changed"):
            for value in (target, *values):
                self.contents(value)
        if isinstance(target, str):
            self._text_method(target, name, values)

    def _text_method(self, target: str, name: str, values: tuple[Any, ...]) -> None:
        part = values[0] if values else None
        if isinstance(part, str) and name in _FORWARD | _BACKWARD:
            self.search(target, part, name in _BACKWARD)
        if name == "replace" and len(values) >= 2:
            self.text(len(target) + target.count(values[0]) * max(0, len(values[1]) - len(values[0])))
        elif name == "join":
            self.join(target, part)
        elif name == "splitlines":
            self.step(len(target.splitlines()))
        elif name in ("split", "rsplit"):
            self.step(target.count(part) if isinstance(part, str) and part else len(target.split(None, MAX_STEPS)))

    def join(self, separator: Any, parts: Any) -> None:
        if isinstance(parts, (list, tuple)):
            self.text(sum(self.value(part) for part in parts) + len(str(separator)) * len(parts))
