"""Runs Jinja templates written by strangers, bounded in steps, text and depth.

Jinja's own sandbox keeps a template away from Python's internals, but lets it spin and fill the memory. Here every loop turn, call,
operator and filter first pays from a budget, before the work is done; what a template may call is an allow-list. So that nothing is
computed outside the budget, constants are not folded, and literal text is paid for like a value.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from string import Formatter
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from edgeinfer.formats.errors import TemplateError

MAX_SOURCE = 256 << 10  # characters
MAX_TOKENS = 16_000  # of the source, white space included; the largest templates in use have about 4,000
MAX_NESTING = 100  # of the syntax tree, and of calls
MAX_OUTPUT = 1 << 20  # characters, of the result and of any one string
MAX_WORK = 16 << 20  # characters read or written by all operations together
MAX_STEPS = 200_000
MAX_INT_BITS = 4096
MAX_INDENT = 16

_STR_METHODS = frozenset(
    "capitalize count endswith find isalnum isalpha isdigit islower isnumeric isspace isupper join lower lstrip partition"
    " removeprefix removesuffix replace rfind rpartition rsplit rstrip split splitlines startswith strip title upper".split()
)
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _STR_METHODS),
    (dict, frozenset(("get", "items", "keys", "values"))),
    (list, frozenset(("count", "index"))),
    (tuple, frozenset(("count", "index"))),
)
_FILTERS = (
    "abs batch capitalize count d default dictsort e escape first float indent int items join last length list lower map max min"
    " reject rejectattr replace reverse round safe select selectattr sort string sum title trim unique upper"
).split()
_GLOBALS = ("range", "dict", "namespace")
# Names that no template can write: the operations that the rewritten syntax tree calls.
_LOOP, _CONCAT, _COMPARE, _SLICE = "loop over!", "concatenate!", "compare!", "slice!"


class Refused(Exception):
    """The template called raise_exception: it does not accept these messages. str() is the template's own sentence."""


class _Exceeded(Exception):
    """The template exceeds a limit."""


class _Meter:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.steps = self.work = self.depth = 0

    def step(self, n: int = 1) -> None:
        self.steps += n
        if self.steps > MAX_STEPS:
            raise _Exceeded(f"takes more than {MAX_STEPS} steps")

    def text(self, n: int) -> None:
        """Pay for a string of `n` characters."""
        if n > MAX_OUTPUT:
            raise _Exceeded(f"makes a text of more than {MAX_OUTPUT} characters")
        self.work += n
        if self.work > MAX_WORK:
            raise _Exceeded(f"handles more than {MAX_WORK} characters in all")

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
                raise _Exceeded(f"handles data nested more than {MAX_NESTING} levels deep")
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


class _Generation(Extension):
    """{% generation %}...{% endgeneration %}: marks the assistant's words for training; here just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedTemplate:
    """A compiled template. `render` may be called from several threads; they take turns.

    Raises TemplateError when the source is not a template, or exceeds a limit; `where` begins every error text.
    """

    def __init__(self, source: str, where: str) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._environment = _Environment()
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"{where}: the chat template has {len(source)} characters: at most {MAX_SOURCE} are allowed")
        self._template = self._guarded(lambda: self._compiled(source))

    def _compiled(self, source: str) -> jinja2.Template:
        for count, _ in enumerate(self._environment.lex(source)):
            if count == MAX_TOKENS:
                raise _Exceeded(f"is too large: it has more than {MAX_TOKENS} tokens")
        return self._environment.from_string(_metered(self._environment.parse(source)))

    def render(self, context: Mapping[str, Any]) -> str:
        """The text for `context`, whose values must be plain data. Raises Refused, and TemplateError for every other failure."""
        with self._lock:
            self._environment.meter.reset()
            return self._guarded(lambda: self._text(context))

    def _text(self, context: Mapping[str, Any]) -> str:
        out: list[str] = []
        total = 0
        for piece in self._template.root_render_func(self._template.new_context(dict(context))):
            out.append(piece)
            total += len(piece)
            if total > MAX_OUTPUT:
                raise _Exceeded(f"writes more than {MAX_OUTPUT} characters")
        return "".join(out)

    def _guarded(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Refused:
            raise
        except RecursionError:
            reason = "is nested too deeply"
        except MemoryError:
            reason = "needs too much memory"
        except _Exceeded as error:
            reason = str(error)
        except jinja2.TemplateSyntaxError as error:
            reason = f"has a syntax error in line {error.lineno}: {error.message}"
        except Exception as error:  # a template can make any operation of Python's fail
            reason = f"failed: {type(error).__name__}: {str(error):.300}"
        raise TemplateError(f"{self._where}: the chat template {reason}")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # trim_blocks, lstrip_blocks and loop controls as transformers sets them
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, cache_size=0, extensions=[loopcontrols, _Generation])
        self.meter = meter = _Meter()
        self.finalize = _finalize
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters = {name: _paid_filter(meter, name, FILTERS[name]) for name in _FILTERS}
        self.tests = {name: _paid_test(meter, test) if name in _COMPARING_TESTS else test for name, test in self.tests.items()}
        self.filters["tojson"] = self._to_json
        self.filters.update({_LOOP: self._loop, _CONCAT: self._concatenate, _COMPARE: self._compared, _SLICE: self._sliced})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        if isinstance(obj, (Namespace, LoopContext, Macro)):
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in _METHODS)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """In place of str.format, one that only fills in; format_map is judged like any other method, and refused."""
        if isinstance(value, BuiltinMethodType) and isinstance(value.__self__, str) and value.__name__ == "format":
            return partial(self._filled, value.__self__)
        return None

    def _filled(self, form: str, *args: Any, **kwargs: Any) -> str:
        parts: list[Any] = []
        self.meter.size(form)
        unnamed = iter(args)
        for literal, name, spec, conversion in Formatter().parse(form):
            parts.append(literal)
            if name is not None:
                if spec or conversion or not (name == "" or name.isdecimal() or name.isidentifier()):
                    raise _Exceeded("formats text in a way that is not supported: only {} and {name} are")
                parts.append(next(unnamed) if name == "" else args[int(name)] if name.isdecimal() else kwargs[name])
        return self._concatenate(parts)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  # names as in the base class
        meter = __self.meter
        meter.call(__obj, args, kwargs)
        meter.depth += 1
        if meter.depth > MAX_NESTING:
            raise _Exceeded(f"nests more than {MAX_NESTING} calls")
        try:
            return super().call(__context, __obj, *args, **kwargs)
        finally:
            meter.depth -= 1

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = self.meter
        meter.step()
        ints = isinstance(left, int) and isinstance(right, int)
        if operator == "+":
            meter.size(left)
            meter.size(right)
            if isinstance(left, str) and isinstance(right, str):
                meter.text(len(left) + len(right))
        elif operator == "*" and not ints:
            times = left if isinstance(left, int) else right
            items = right if isinstance(left, int) else left
            if isinstance(items, str) and isinstance(times, int):
                meter.text(len(items) * max(0, times))
            elif isinstance(items, (list, tuple)) and isinstance(times, int):
                meter.step(len(items) * max(0, times))
        elif operator == "%" and isinstance(left, str):
            raise _Exceeded("formats text with %, which is not supported: use ~")
        elif operator == "**" and ints and left.bit_length() * max(0, right) > MAX_INT_BITS:
            raise _Exceeded("computes a huge number")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > MAX_INT_BITS:
            raise _Exceeded("computes a huge number")
        return result

    def _loop(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.meter.step()
            yield item

    def _concatenate(self, parts: list[Any]) -> str:
        self.meter.step()
        self.meter.text(sum(self.meter.value(part) for part in parts))
        return "".join(map(str, parts))

    def _compared(self, value: Any) -> Any:
        self.meter.step()
        self.meter.contents(value)
        return value

    def _sliced(self, value: Any) -> Any:
        self.meter.step()
        self.meter.size(value)
        return value

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers defines it: no HTML escapes, keys in their order."""
        if indent is not None and not 0 <= indent <= MAX_INDENT:
            raise _Exceeded(f"indents JSON by {indent}: at most {MAX_INDENT} is allowed")
        if separators is not None and sum(map(len, separators)) > MAX_INDENT:
            raise _Exceeded("separates JSON by a long text")
        self.meter.value(value, indent or 0)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_context  # that Jinja needs the context here also keeps it from computing constants when it compiles
def _finalize(context: Any, value: Any) -> Any:
    context.environment.meter.value(value)
    return value


def _raise_exception(message: Any = "") -> NoReturn:
    raise Refused(str(message)[:1000])


def _strftime_now(form: str) -> str:
    if len(form) > 100 or any(char.isdigit() for char in form):
        raise _Exceeded("formats the date in an unusual way")
    return datetime.datetime.now().strftime(form)


# Filters that walk through a text character by character, or make a list of it.
_WALKING = frozenset(("batch", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "sum", "unique"))


_ORDERING = frozenset(("dictsort", "max", "min", "sort", "unique"))  # they compare what the value holds
_COMPARING_TESTS = frozenset("== != < <= > >= eq equalto ne lt lessthan le gt greaterthan ge in lower upper".split())


def _paid_test(meter: _Meter, function: Callable[..., bool]) -> Callable[..., bool]:
    def run(*args: Any) -> bool:
        meter.step()
        for value in args:
            meter.contents(value)
        return function(*args)

    return run


def _paid_filter(meter: _Meter, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
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
        elif name in ("string", "safe", "escape", "e", "trim", "upper", "lower", "title", "capitalize", "replace", "indent"):
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
            raise _Exceeded("makes a huge batch")
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


def _paid_items(meter: _Meter, items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        meter.step()
        yield item


def _metered(tree: nodes.Template) -> nodes.Template:
    """The same program with every loop, concatenation, comparison and literal text paid for. Raises _Exceeded for a deeply nested one."""
    level: list[nodes.Node] = [tree]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise _Exceeded(f"is nested more than {MAX_NESTING} levels deep")
        level = [child for node in level for child in node.iter_child_nodes()]
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filter(loop.iter, _LOOP)
    for comparison in list(tree.find_all(nodes.Compare)):
        comparison.expr = _filter(comparison.expr, _COMPARE)
        for operand in comparison.ops:
            operand.expr = _filter(operand.expr, _COMPARE)
    for item in list(tree.find_all(nodes.Getitem)):
        if isinstance(item.arg, nodes.Slice):
            item.node = _filter(item.node, _SLICE)
    for output in list(tree.find_all(nodes.Output)):
        output.nodes = [nodes.Const(n.data, lineno=n.lineno) if isinstance(n, nodes.TemplateData) else n for n in output.nodes]
    return _without_concat(tree)


def _without_concat(tree: nodes.Template) -> nodes.Template:
    """Each a ~ b ~ c replaced, wherever a node holds it, by the paid operation on [a, b, c]."""

    def replaced(value: Any) -> Any:
        if isinstance(value, nodes.Concat):
            return _filter(nodes.List(value.nodes, lineno=value.lineno), _CONCAT)
        return value

    stack: list[nodes.Node] = [tree]
    while stack:
        node = stack.pop()
        for name, value in node.iter_fields():
            setattr(node, name, [replaced(item) for item in value] if isinstance(value, list) else replaced(value))
        stack.extend(node.iter_child_nodes())
    tree.set_environment(tree.environment)
    return tree


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
