"""Jinja's filters, tests and comparisons, made to pay before they work (see budget.py)."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any

from jinja2.filters import make_attrgetter

from edgeinfer.formats.budget import MAX_DIGITS, Exceeded, Meter

MAX_ATTRIBUTE = 100  # characters of a path such as "function.name"
MAX_PRECISION = 30

# Filters that walk through a text character by character, or make a list of it.
_WALKING = frozenset(
    "batch join list map max min reject rejectattr reverse select selectattr sort sum unique".split()
)
_ORDERING = frozenset("dictsort max min sort".split())  # they compare what the value holds
_UNREAD = frozenset("count d default first last length".split())
_WRITING = frozenset("capitalize e escape indent lower replace safe string title trim upper".split())

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
_COMPARING_TESTS = {
    "eq": "== eq equalto",
    "ne": "!= ne",
    "lt": "< lt lessthan",
    "lteq": "<= le",
    "gt": "> gt greaterthan",
    "gteq": ">= ge",
    "in": "in",
}
_UNPAID_TESTS = (
    "boolean callable defined escaped false float integer iterable mapping none number sameas sequence string true"
    " undefined"
).split()


def compared(meter: Meter, name: str, left: Any, right: Any) -> bool:
    """left <name> right, paid for; `name` is an operator of Jinja's syntax tree."""
    if isinstance(right, Iterator):
        right = list(right)
    meter.comparison(name, left, right)
    return bool(_COMPARISONS[name](left, right))


def paid_tests(meter: Meter, tests: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The tests of `tests` that a template may use."""
    allowed = {name: tests[name] for name in _UNPAID_TESTS}
    for name, spellings in _COMPARING_TESTS.items():
        allowed.update(dict.fromkeys(spellings.split(), partial(compared, meter, name)))
    for name in ("lower", "upper"):
        allowed[name] = _paid_case_test(meter, tests[name])
    for name in ("divisibleby", "even", "odd"):
        allowed[name] = _number_test(meter, tests[name])
    return allowed


def _paid_case_test(meter: Meter, function: Callable[..., Any]) -> Callable[..., bool]:
    def run(value: Any) -> bool:
        meter.step()
        meter.value(value)
        return bool(function(value))

    return run


def _number_test(meter: Meter, function: Callable[..., Any]) -> Callable[..., bool]:
    def run(*args: Any) -> bool:
        for value in args:
            meter.number(value)
            if not isinstance(value, (int, float)):  # these tests apply %, which formats a text
                raise Exceeded(f"tests a {type(value).__name__} like a number")
        return bool(function(*args))

    return run


def paid_filter(meter: Meter, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0
    plain = inspect.unwrap(function)  # Jinja's wrapper for asynchronous use may be passed an argument of its own
    parameters = list(inspect.signature(plain).parameters)[1 if hasattr(plain, "jinja_pass_arg") else 0 :]

    @wraps(function)  # keeps the marks by which Jinja passes an environment or context first
    def run(*args: Any, **kwargs: Any) -> Any:
        context, (value, *rest) = args[:passed], args[passed:]
        meter.step(1 + len(rest) + len(kwargs))
        if name not in ("d", "default"):
            for option in (*rest, *kwargs.values()):
                meter.contents(option)
        if isinstance(value, Iterator) and (name in _ORDERING or name in ("join", "sum", "unique")):
            value = list(value)
        options = {**dict(zip(parameters[1:], rest, strict=False)), **kwargs}
        if name in ("selectattr", "rejectattr"):
            options["attribute"] = rest[0] if rest else None
        _check(meter, name, value, options)
        _pay(meter, name, value, options)
        if name == "unique":
            value = list(value)
            attribute = make_attrgetter(context[0], options.get("attribute"))
            for item in value:
                meter.key(attribute(item))
        result = function(*context, value, *rest, **kwargs)
        meter.number(result)
        return _paid_items(meter, result) if isinstance(result, Iterator) else result

    return run


def _check(meter: Meter, name: str, value: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that make a filter work much longer than its value suggests."""
    attribute = options.get("attribute")
    if isinstance(attribute, str) and len(attribute) > MAX_ATTRIBUTE:
        raise Exceeded(f"names an attribute by more than {MAX_ATTRIBUTE} characters")
    if name == "int" and isinstance(value, str) and len(value) > MAX_DIGITS:
        raise Exceeded(f"makes a number of more than {MAX_DIGITS} characters")
    if name == "round":
        meter.number(value)
        if not -MAX_PRECISION <= options.get("precision", 0) <= MAX_PRECISION:
            raise Exceeded(f"rounds to more than {MAX_PRECISION} places")
    if name == "sum" and not isinstance(options.get("start", 0), (int, float)):
        raise Exceeded("sums up something other than numbers")
    if name == "batch" and options.get("fill_with") is not None:
        meter.step(max(0, int(options.get("linecount", 0))))


def _pay(meter: Meter, name: str, value: Any, options: Mapping[str, Any]) -> None:
    if name in _UNREAD:
        return
    if name in _WALKING and isinstance(value, str):
        meter.step(len(value))
    if name in _WRITING:
        size = meter.value(value)
        meter.text(_grown(meter, name, value if isinstance(value, str) else str(value), size, options))
    elif name in _ORDERING:
        meter.contents(value, ordered=True)
    else:
        meter.size(value)
    if name == "join":
        meter.join(options.get("d", ""), list(value))


def _grown(meter: Meter, name: str, text: str, size: int, options: Mapping[str, Any]) -> int:
    """The most characters that a filter makes of `text`."""
    if name in ("escape", "e"):
        return 5 * size
    if name == "trim" and isinstance(options.get("chars"), str):
        meter.search(text, options["chars"], backward=True)
    if name == "replace" and "old" in options and "new" in options:
        old, new = str(options["old"]), str(options["new"])
        meter.search(text, old)
        return size + text.count(old) * max(0, len(new) - len(old))
    if name == "title":
        return 8 * size  # it takes as long
    if name == "indent":
        width = options.get("width", 4)
        return size + (len(text.splitlines()) + 1) * (len(width) if isinstance(width, str) else int(width))
    return size


def _paid_items(meter: Meter, items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        meter.step()
        yield item
