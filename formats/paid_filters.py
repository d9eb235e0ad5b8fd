"""Jinja's filters and tests, made to pay before they work (see budget.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from edgeinfer.formats.budget import MAX_STEPS, Exceeded, Meter

# Filters that walk through a text character by character, or make a list of it.
_WALKING = frozenset(
    (
        "batch",
        "list",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "sort",
        "sum",
        "unique",
    )
)


_ORDERING = frozenset(("dictsort", "max", "min", "sort", "unique"))  # they compare what the value holds
COMPARING_TESTS = frozenset("== != < <= > >= eq equalto ne lt lessthan le gt greaterthan ge in lower upper".split())


def paid_test(meter: Meter, function: Callable[..., Any]) -> Callable[..., bool]:
    def run(*args: Any) -> bool:
        meter.step()
        for value in args:
            meter.contents(value)
        return bool(function(*args))

    return run


def paid_filter(meter: Meter, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps the marks by which Jinja passes an environment or context first
    def run(*args: Any, **kwargs: Any) -> Any:
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0
        value, options = args[passed], (*args[passed + 1 :], *kwargs.values())
        meter.step()
        for option in options:
            meter.size(option)
        if name in _WALKING and isinstance(value, str):
            meter.step(len(value))
        elif name in ("length", "count", "default", "d", "first", "last"):
            pass  # nothing is read
        elif name in (
            "string",
            "safe",
            "escape",
            "e",
            "trim",
            "upper",
            "lower",
            "title",
            "capitalize",
            "replace",
            "indent",
        ):
            size = meter.value(value)
            meter.text(_grown(name, value if isinstance(value, str) else str(value), size, options))
        elif name in _ORDERING:
            meter.size(value)
            meter.contents(value)
        else:
            meter.size(value)
        if name == "join":
            args = (*args[:passed], value := list(value), *args[passed + 1 :])
            meter.join(options[0] if options else "", value)
        if name == "batch" and (options[:1] and int(options[0]) > MAX_STEPS):
            raise Exceeded("makes a huge batch")
        result = function(*args, **kwargs)
        return _paid_items(meter, result) if isinstance(result, Iterator) else result

    return run


def _grown(name: str, text: str, size: int, options: tuple[Any, ...]) -> int:
    """The most characters that a filter makes of `text`."""
    if name in ("escape", "e"):
        return 5 * size
    if name == "replace" and len(options) >= 2:
        old, new = str(options[0]), str(options[1])
        return size + text.count(old) * max(0, len(new) - len(old))
    if name == "title":
        return 8 * size  # it takes as long
    if name == "indent":
        width = options[0] if options else 4
        return size + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else int(width))
    return size


def _paid_items(meter: Meter, items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        meter.step()
        yield item
