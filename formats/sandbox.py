"""Runs Jinja templates written by strangers, bounded in steps, text and depth.

Jinja's own sandbox keeps a template away from Python's internals, but lets it spin and fill the memory. Here every loop
turn, call, operator and filter pays from a budget before the work is done; what a template may call is an allow-list.
So that nothing is computed outside the budget, constants are not folded, and literal text is paid for like a value.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from string import Formatter
from types import BuiltinMethodType
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from edgeinfer.formats.budget import (
    MAX_DIGITS,
    MAX_INDENT,
    MAX_NESTING,
    MAX_OUTPUT,
    MAX_SOURCE,
    MAX_TOKENS,
    Exceeded,
    Meter,
)
from edgeinfer.formats.errors import TemplateError
from edgeinfer.formats.paid_filters import compared, paid_filter, paid_tests

_STR_METHODS = frozenset(
    "capitalize count endswith find isalnum isalpha isdigit islower isnumeric isspace isupper join lower lstrip"
    " partition removeprefix removesuffix replace rfind rpartition rsplit rstrip split splitlines startswith strip"
    " title upper".split()
)
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _STR_METHODS),
    (dict, frozenset(("get", "items", "keys", "values"))),
    (list, frozenset(("count", "index"))),
    (tuple, frozenset(("count", "index"))),
)
_FILTERS = (
    "abs batch capitalize count d default dictsort e escape first float indent int items join last length"
    " list lower map max min reject rejectattr replace reverse round safe select selectattr sort string sum title trim"
    " unique upper"
).split()
_GLOBALS = ("range", "dict", "namespace")
# Names that no template can write: the operations that the rewritten syntax tree calls.
_LOOP, _CONCAT, _COMPARE, _SLICE = "loop over!", "concatenate!", "compare!", "slice!"
_KEY, _BODY = "key!", "run a body!"
_NODES_PER_STEP = 10  # of the syntax tree of a body that can run more than once; evaluating one takes about 1 us
_SCOPES = ("_loop_vars", "_block_vars")  # what Jinja adds to a call inside a loop or block; no argument of the function


class Refused(Exception):
    """The template called raise_exception: it does not accept these messages. str() is the template's own sentence."""


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
            raise TemplateError(
                f"{where}: the chat template has {len(source)} characters: at most {MAX_SOURCE} are allowed"
            )
        self._template = self._guarded(lambda: self._compiled(source))

    def _compiled(self, source: str) -> jinja2.Template:
        for count, (_, kind, text) in enumerate(self._environment.lex(source)):
            if kind == "integer" and len(text) > MAX_DIGITS:
                raise Exceeded("has a huge number")
            if count == MAX_TOKENS:
                raise Exceeded(f"is too large: it has more than {MAX_TOKENS} tokens")
        return self._environment.from_string(_metered(self._environment.parse(source)))

    def render(self, context: Mapping[str, Any]) -> str:
        """The text for `context`, whose values must be plain data. Raises Refused; TemplateError on failure."""
        with self._lock:
            self._environment.meter.reset()
            return str(self._guarded(lambda: self._text(context)))

    def _text(self, context: Mapping[str, Any]) -> str:
        out: list[str] = []
        total = 0
        for piece in self._template.root_render_func(self._template.new_context(dict(context))):
            out.append(piece)
            total += len(piece)
            if total > MAX_OUTPUT:
                raise Exceeded(f"writes more than {MAX_OUTPUT} characters")
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
        except Exceeded as error:
            reason = str(error)
        except jinja2.TemplateSyntaxError as error:
            reason = f"has a syntax error in line {error.lineno}: {error.message}"
        except Exception as error:  # a template can make any operation of Python's fail
            reason = f"failed: {type(error).__name__}: {str(error):.300}"
        raise TemplateError(f"{self._where}: the chat template {reason}")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self) -> None:
        # trim_blocks, lstrip_blocks and loop controls as transformers sets them
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, cache_size=0, extensions=[loopcontrols, _Generation]
        )
        self.meter = meter = Meter()
        self.finalize = _finalize
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals.update(dict=self._dict, namespace=self._namespace)
        self.globals.update(raise_exception=self._raise_exception, strftime_now=_strftime_now)
        self.filters = {name: paid_filter(meter, name, FILTERS[name]) for name in _FILTERS}
        self.tests = cast(Any, paid_tests(meter, cast(Any, self.tests)))
        self.filters["tojson"] = self._to_json
        self.filters.update(
            {
                _LOOP: self._loop,
                _CONCAT: self._concatenate,
                _COMPARE: self._compared,
                _SLICE: self._sliced,
                _KEY: self._hashed,
                _BODY: self._started,
            }
        )

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        if isinstance(obj, (Namespace, LoopContext, Macro)):
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in _METHODS)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.meter.key(argument)
        return super().getitem(obj, argument)

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
            self.meter.step()
            parts.append(literal)
            if name is not None:
                if spec or conversion or not (name == "" or name.isdecimal() or name.isidentifier()):
                    raise Exceeded("formats text in a way that is not supported: only {} and {name} are")
                parts.append(next(unnamed) if name == "" else args[int(name)] if name.isdecimal() else kwargs[name])
        return self._concatenate(parts)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  # names as in the base class
        meter = __self.meter
        if isinstance(getattr(__obj, "__self__", None), str) and __obj.__name__ == "join" and len(args) == 1:
            args = (list(__self._loop(args[0])),)  # what a text joins is not always a list, whose length is known
        meter.call(__obj, args, {name: value for name, value in kwargs.items() if name not in _SCOPES})
        meter.depth += 1
        if meter.depth > MAX_NESTING:
            raise Exceeded(f"nests more than {MAX_NESTING} calls")
        try:
            return super().call(__context, __obj, *args, **kwargs)
        finally:
            meter.depth -= 1

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.meter.operation(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        self.meter.number(result)
        return result

    def _loop(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.meter.step()
            yield item

    def _concatenate(self, parts: list[Any]) -> str:
        self.meter.step()
        self.meter.text(sum(self.meter.value(part) for part in parts))
        return "".join(map(str, parts))

    def _compared(self, operands: list[Any], *operators: str) -> bool:
        return all(map(partial(compared, self.meter), operators, operands, operands[1:]))

    def _sliced(self, value: Any) -> Any:
        self.meter.step()
        self.meter.size(value)
        if not isinstance(value, (str, list, tuple, range, Undefined)):
            raise Exceeded(f"slices a {type(value).__name__}")
        return value

    def _hashed(self, value: Any) -> Any:
        self.meter.key(value)
        return value

    def _started(self, value: None, steps: int) -> None:
        self.meter.step(steps)

    def _dict(self, items: Any = (), /, **named: Any) -> dict[Any, Any]:
        result = {}
        for key, value in self._loop(items.items() if isinstance(items, dict) else items):
            self.meter.key(key)
            result[key] = value
        return {**result, **named}

    def _namespace(self, *args: Any, **named: Any) -> Namespace:
        return Namespace(self._dict(*args, **named))

    def _raise_exception(self, message: Any = "") -> NoReturn:
        self.meter.value(message)
        raise Refused(str(message)[:1000])

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
            raise Exceeded(f"indents JSON by {indent}: at most {MAX_INDENT} is allowed")
        if separators is not None and sum(map(len, separators)) > MAX_INDENT:
            raise Exceeded("separates JSON by a long text")
        self.meter.value(value, indent or 0)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_context  # that Jinja needs the context here also keeps it from computing constants when it compiles
def _finalize(context: Any, value: Any) -> Any:
    context.environment.meter.step()
    context.environment.meter.value(value)
    return value


def _strftime_now(form: str) -> str:
    if len(form) > 100 or any(char.isdigit() for char in form):
        raise Exceeded("formats the date in an unusual way")
    return datetime.datetime.now().strftime(form)


def _metered(tree: nodes.Template) -> nodes.Template:
    """The same program, in which every loop, concatenation, comparison and literal text is paid for."""
    level: list[nodes.Node] = [tree]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise Exceeded(f"is nested more than {MAX_NESTING} levels deep")
        level = [child for node in level for child in node.iter_child_nodes()]
    for repeated in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))):
        body = cast(nodes.For, repeated)  # each of these has a body
        steps = sum(1 for _ in body.find_all(nodes.Node)) // _NODES_PER_STEP
        body.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(None), _BODY, steps), lineno=body.lineno))
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filter(cast(nodes.Expr, loop.iter), _LOOP)
    for pair in list(tree.find_all(nodes.Pair)):
        pair.key = _filter(pair.key, _KEY)
    for item in list(tree.find_all(nodes.Getitem)):
        if isinstance(item.arg, nodes.Slice):
            item.node = _filter(item.node, _SLICE)
    for output in list(tree.find_all(nodes.Output)):
        output.nodes = [
            nodes.Const(n.data, lineno=n.lineno) if isinstance(n, nodes.TemplateData) else n for n in output.nodes
        ]
    return _without_operators(tree)


def _without_operators(tree: nodes.Template) -> nodes.Template:
    """Each a ~ b ~ c and a < b <= c replaced, wherever a node holds it, by the paid operation on [a, b, c]."""

    def replaced(value: Any) -> Any:
        if isinstance(value, nodes.Concat):
            return _filter(nodes.List(value.nodes, lineno=value.lineno), _CONCAT)
        if isinstance(value, nodes.Compare):
            operands = [value.expr, *(operand.expr for operand in value.ops)]
            return _filter(
                nodes.List(operands, lineno=value.lineno), _COMPARE, *(operand.op for operand in value.ops)
            )
        return value

    stack: list[nodes.Node] = [tree]
    while stack:
        node = stack.pop()
        for name, value in node.iter_fields():
            setattr(node, name, [replaced(item) for item in value] if isinstance(value, list) else replaced(value))
        stack.extend(node.iter_child_nodes())
    return tree


def _filter(node: nodes.Expr, name: str, *options: Any) -> nodes.Filter:
    constants: list[nodes.Expr] = [nodes.Const(option, lineno=node.lineno) for option in options]
    return nodes.Filter(node, name, constants, [], None, None, lineno=node.lineno)
