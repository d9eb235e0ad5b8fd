"""What a chat template may spend, and the meter that every operation of a rendering pays into before it works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_SOURCE = 256 << 10  # characters
MAX_TOKENS = 16_000  # of the source, white space included; the largest templates in use have about 4,000
MAX_NESTING = 100  # of the syntax tree, and of calls
MAX_OUTPUT = 1 << 20  # characters, of the result and of any one string
MAX_WORK = 16 << 20  # characters read or written by all operations together
MAX_STEPS = 200_000
MAX_INT_BITS = 4096
MAX_INDENT = 16


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
        self.work += n
        if self.work > MAX_WORK:
            raise Exceeded(f"handles more than {MAX_WORK} characters in all")

    def value(self, value: Any, indent: int = 0) -> int:
        """Pay for writing out `value`, containers included; returns about how many characters that takes."""
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
            elif isinstance(item, (list, tuple, set, frozenset)):
                self.step(len(item))
                stack += [(part, level + 1) for part in item]
            elif isinstance(item, int):
                total += item.bit_length() // 3
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
        elif isinstance(value, (list, tuple, dict, range)):
            self.step(len(value))

    def contents(self, value: Any) -> None:
        """Pay for reading `value`, and all that it holds, once."""
        if isinstance(value, (str, list, tuple, dict)):
            self.value(value)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Pay for a method of a built-in type; the size of its result is known before it is made."""
        self.step()
        target, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        for value in (target, *args, *kwargs.values()):
            self.size(value)
        if isinstance(target, str):
            if name == "replace" and len(args) >= 2:
                self.text(len(target) + target.count(args[0]) * max(0, len(args[1]) - len(args[0])))
            elif name == "join" and args:
                self.join(target, args[0])
            elif name in ("split", "rsplit", "splitlines"):
                self.step(target.count(args[0]) if args and args[0] else len(target.split(None, MAX_STEPS)))

    def join(self, separator: Any, parts: Any) -> None:
        if isinstance(parts, (list, tuple)):
            self.text(sum(self.value(part) for part in parts) + len(str(separator)) * len(parts))
