"""The template sandbox: legitimate templates come out as from plain Jinja, hostile ones stop early and harm nothing."""
# ruff: noqa: E501, UP031  (templates read best on one line)

import datetime
import json
import subprocess
import sys
import threading
from pathlib import Path

import jinja2
import pytest
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgeinfer.formats import budget
from edgeinfer.formats.errors import TemplateError
from edgeinfer.formats.sandbox import BoundedTemplate, Refused

TEMPLATES = Path(__file__).parent.parent / "data" / "templates"


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def plain_environment():
    """Jinja as transformers configures it (utils/chat_template_utils.py)."""

    def refuse(message):
        raise Refused(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.datetime.now().strftime(form))
    return environment


PLAIN = plain_environment()


def say(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}}
CONVERSATIONS = [
    [say("user", "hi")],
    [say("system", " Be brief. "), say("user", "<b>&amp; \"quotes\" 'n' ünïcode</b>")],
    [say("user", " hi  "), say("assistant", "<think>\nhm\n</think>\n\nhello"), say("user", "more?\n")],
    [say("user", "a"), say("user", "b")],
    [say("system", "alone")],
    [say("assistant", "x"), say("user", "y")],
    [
        say("user", "q"),
        say("assistant", "", tool_calls=[CALL]),
        say("tool", "12 °C", name="weather"),
        say("assistant", "12"),
        say("user", "ta"),
    ],
]


@pytest.mark.parametrize("conversation", range(len(CONVERSATIONS)))
@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_templates_render_as_in_plain_jinja(path, conversation):
    source = path.read_text()
    bounded, plain = BoundedTemplate(source, "model.gguf"), PLAIN.from_string(source)
    for generation in (True, False):
        for bos in ("<s>", ""):
            context = dict(
                messages=CONVERSATIONS[conversation],
                add_generation_prompt=generation,
                bos_token=bos,
                eos_token="</s>",
                tools=None,
            )
            assert outcome(bounded.render, context) == outcome(plain.render, context)


def outcome(render, context):
    try:
        return render(context)
    except Refused as error:
        return "refused", str(error)


@pytest.mark.parametrize(
    "source",
    [
        "{{ {'a': '<b>', 'c': [1, none, true, 'ü']} | tojson }}",
        "{{ [1, {'a': 2}] | tojson(indent=4) }}",
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for i in [1, 2, 3] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
        "{% macro m(a, b='x') %}[{{ a }}{{ b }}{{ caller() if caller }}]{% endmacro %}{{ m(1) }}{% call m(2, b='y') %}in{% endcall %}",
        "{% for x in [1, 2, 3] %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}",
        "{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }},{% endfor %}",
        "{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}={{ v }};{% endfor %}{{ {'a': 1}.items() | list }}{{ {'a': 1}.get('z', 'd') }}",
        "{% for x in [] %}never{% else %}empty{% endfor %}{% for x in [1, 2, 3] if x != 2 %}{{ x }}{% endfor %}",
        "{{ ' a b '.strip().split(' ') }}{{ 'abc'[::-1] }}{{ [1, 2, 3][1:] }}{{ 'a-b'.replace('-', '+') }}{{ 'ab'.startswith('a') }}{{ '-'.join(['a', 'b']) }}",
        "{{ 'x' ~ 1 ~ none ~ [1] }}{{ 'a' * 3 }}{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 10 }}{{ [1] + [2] }}{{ 'a' + 'b' }}{{ -3 | abs }}",
        "{{ ['b', 'a'] | sort | join(', ') }}{{ ['a', 'a'] | unique | list }}{{ ['a'] | map('upper') | list }}{{ [1, 2] | sum }}{{ [3, 1] | max }}",
        "{{ [{'r': 'u'}, {'r': 'a'}] | selectattr('r', 'equalto', 'u') | list }}{{ [{'r': 'u'}] | map(attribute='r') | first }}",
        "{{ undefined_thing }}|{{ none }}|{{ undefined_thing is defined }}|{{ undefined_thing | default('d') }}|{{ {}.y is not defined }}",
        "{% set x %}block {{ 1 }}{% endset %}{{ x }}{% filter upper %}up{% endfilter %}{{ 'a\nb' | indent(2, true) }}",
        "{{ 'Hello {} and {}'.format('a', 1) }}{{ '{0}{x}{0}'.format('z', x=2) }}",
        "a\n  {% if true %}\nb\n  {% endif %}\nc\n{# comment #}\n  {{- 'd' -}}  \n e",
        "{{ 1 if x else 2 }}{{ not true }}{{ 1 in [1] }}{{ 1 < 2 <= 2 }}{{ 'a' is string }}{{ {} is mapping }}{{ strftime_now('%Y') }}",
        "{{ '<' | e }}{{ '<' | safe }}{{ ('<' | escape) ~ '<' }}",
        "{{ 2.567 | round(2) }}{{ 7 | round(-1) }}{{ 1.2 | round(0, 'ceil') }}{{ [{'a': 1}, {'a': 2}] | sum(attribute='a') }}{{ '12' | int + 1 }}",
        "{{ {1: 'a', 'b': none, 2.5: true}[1] }}{{ dict(a=1, b=2) }}{{ dict([('x', 1)]) }}{{ dict({'a': 1}.items()) }}{{ namespace({'a': 3}).a }}",
        "{{ (1, 2) == (1, 2) }}{{ {'a': [1]} == {'a': [1]} }}{{ 1 not in [2] }}{{ 'a' in {'a': 1} }}{{ 'b' in 'abc' }}{{ 1 < 2 < 2 }}{{ 3 in range(5) }}{{ 1 == 1 and not 2 < 1 }}",
        "{{ 4 is even }}{{ 4 is odd }}{{ 9 is divisibleby(3) }}{{ 'a' is in ['a'] }}{{ 1 is lt 2 }}{{ 'a' is lower }}{{ none is none }}{{ 1 is sameas 1 }}",
        "{{ [3, 1, 2] | sort(reverse=true) }}{{ [{'n': 'b'}, {'n': 'a'}] | sort(attribute='n') }}{{ [1, 2, 3] | batch(2, 0) | list }}{{ [{'a': 1}, {'a': 1}] | unique(attribute='a') | list }}",
        "{{ ['a', 'b'] | map('upper') | join('-') }}{{ '-'.join(['a'] | map('upper')) }}{{ ','.join({'a': 1}.keys()) }}{{ 'xax' | trim('x') }}{{ 'a.b.c'.rsplit('.', 1) }}{{ {'a': 1}.values() | list }}",
        "{% for x in [1, 1, 2] %}{{ loop.changed(x) }}{{ loop.cycle('a', 'b') }}{% endfor %}{{ 7 - 2 }}{{ 7 / 2 }}{{ 1.5 * 2 }}{{ 2 ** 0.5 }}{{ -7 // 2 }}",
        "{%- generation -%} kept {%- endgeneration -%}",
    ],
)  # fmt: skip
def test_features_that_templates_use(source):
    assert BoundedTemplate(source, "model.gguf").render({}) == PLAIN.from_string(source).render()


def test_a_refusal_carries_the_templates_own_sentence():
    with pytest.raises(Refused, match=r"^Only 2 roles\.$"):
        BoundedTemplate("{{ raise_exception('Only ' ~ 2 ~ ' roles.') }}", "model.gguf").render({})


BIG = "{% set b = 'x' * 1000000 %}"
MANY = "{% for i in range(99999) %}"
NESTED = "{% set ns = namespace(s=(), t=()) %}{% for i in range(40) %}{% set ns.s = (ns.s, ns.s) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
COLLIDING = "{% set r = range(0, (2 ** 61 - 1) * 90000, 2 ** 61 - 1) %}"  # numbers whose hashes are all 0
HOSTILE = {
    # one operation that takes longer than the size of its operands suggests
    "hash: key": NESTED + "{{ {ns.s: 1} }}",
    "hash: subscript": NESTED + "{{ messages[0][ns.s] }}",
    "hash: get": NESTED + "{{ messages[0].get(ns.s) }}",
    "hash: in": NESTED + "{{ ns.s in messages[0] }}",
    "hash: in keys": NESTED + "{{ ns.s in messages[0].keys() }}",
    "hash: in items": NESTED + "{{ ('role', ns.s) in messages[0].items() }}{{ (ns.s, 1) in messages[0].items() }}",
    "hash: unique": NESTED + "{{ [ns.s, ns.t] | unique | list | length }}",
    "hash: unique attribute": NESTED + "{{ [{'a': ns.s}] | unique(attribute='a') | list | length }}",
    "hash: dict": NESTED + "{{ dict([(ns.s, 1)]) | length }}",
    "hash: namespace": NESTED + "{% set x = namespace([(ns.s, 1)]) %}",
    "hash: items minus items": NESTED + "{% set d = {1: ns.s} %}{{ (d.items() - d.items()) | length }}",
    "hash: map": NESTED + "{{ [1] | map(ns.s) | list | length }}",
    "hash: map attribute": NESTED + "{{ [{}] | map(attribute=ns.s) | list | length }}",
    "hash: select": NESTED + "{{ [1] | select(ns.s) | list | length }}",
    "hash: is filter": NESTED + "{{ ns.s is filter }}",
    "hash: round method": NESTED + "{{ 1 | round(1, ns.s) }}",
    "hash: slice": NESTED + "{{ messages[0][ns.s:1] }}",
    "compare: ==": NESTED + "{{ ns.s == ns.t }}",
    "compare: chain": NESTED + "{{ 1 < 2 != ns.s != ns.t }}",
    "compare: <": NESTED + "{{ ns.s < ns.t }}",
    "compare: in": NESTED + "{{ ns.s in [ns.t] }}",
    "compare: in values": NESTED + "{{ ns.s in {1: ns.t}.values() }}",
    "compare: in iterator": NESTED + "{{ ns.s in [ns.t] | map('default') }}",
    "compare: items": NESTED + "{{ {1: ns.s}.items() == {1: ns.t}.items() }}",
    "compare: test": NESTED + "{{ ns.s is eq ns.t }}",
    "compare: select": NESTED + "{{ [ns.s] | select('eq', ns.t) | list | length }}",
    "compare: index": NESTED + "{{ [ns.s].index(ns.t) }}",
    "compare: count": NESTED + "{{ (ns.s, 1).count(ns.t) }}",
    "compare: sort": NESTED + "{{ [ns.s, ns.t] | sort | length }}",
    "compare: sort iterator": NESTED + "{{ [ns.s, ns.t] | map('default') | sort | length }}",
    "compare: max": NESTED + "{{ [ns.s, ns.t] | max | length }}",
    "compare: dictsort": NESTED + "{{ {1: ns.s, 2: ns.t} | dictsort(by='value') | length }}",
    "compare: changed": NESTED + "{% for x in [ns.s, ns.t] %}{{ loop.changed(x) }}{% endfor %}",
    "write: output": NESTED + "{{ ns.s }}",
    "write: ~": NESTED + "{{ ns.s ~ '' }}",
    "write: string": NESTED + "{{ ns.s | string | length }}",
    "write: tojson": NESTED + "{{ ns.s | tojson }}",
    "write: values": NESTED + "{{ {1: ns.s}.values() }}",
    "write: namespace": NESTED + "{{ ns }}",
    "write: namespace in a list": NESTED + "{{ [ns] | string }}",
    "write: join": NESTED + "{{ [1, ns.s] | join }}",
    "write: separator": NESTED + "{{ [1, 2] | join(ns.s) }}",
    "write: replace": NESTED + "{{ 'a' | replace(ns.s, 'b') }}",
    "write: format": NESTED + "{{ '{}'.format(ns.s) }}",
    "write: lower": NESTED + "{{ ns.s is lower }}",
    "write: refusal": NESTED + "{{ raise_exception(ns.s) }}",
    "write: error": NESTED + "{{ messages[ns.s].x }}{{ (1)[ns.s:1].x }}",
    "collide: unique": COLLIDING + "{{ r | unique | list | length }}",
    "collide: dict": COLLIDING + "{{ dict(r | batch(2)) | length }}",
    "round": "{{ 1 | round(-5000000) }}",
    "round up": "{{ 1 | round(method='ceil', precision=5000000) }}",
    "sum of lists": "{{ ([['b'] * 1000] * 1000) | sum(start=[]) | length }}",
    "odd text": "{{ '%1000000000d' is odd }}",
    "even text": "{{ '%1000000000d' is even }}",
    "divisible text": "{{ ['%1000000000d'] | select('divisibleby', 1) | list | length }}",
    "division": "{% set n = ('f' * 1000000) | int(base=16) %}{{ n // 7 }}",
    "huge number": "{{ 0x" + "f" * 200_000 + " }}",
    "batch by name": "{{ [1] | batch(fill_with='1', linecount=10 ** 9) | list | length }}",
    "batches": MANY + "{% set x = [1] | batch(199999, 1) | list %}{% endfor %}",
    "indent by name": BIG + "{{ b | indent(first=true, width=10 ** 9) | length }}",
    "long attribute": "{{ (['a'] * 9999) | map(attribute='0.' * 50000 ~ '0') | list | length }}",
    "join a text": BIG + "{{ b.join(b) | length }}",
    "join an iterator": BIG + "{{ b.join(b[:9999] | map('upper')) | length }}",
    "find backward": BIG + "{{ b.rfind('xy' ~ b[:500000]) }}",
    "split backward": BIG + "{{ b.rsplit('xy' ~ b[:500000]) | length }}",
    "strip characters": BIG + "{{ b.strip('y' * 900000 ~ 'x') | length }}",
    "trim characters": BIG + "{{ b | trim('y' * 900000 ~ 'x') | length }}",
    "many prefixes": BIG + "{% for i in range(999) %}{% set x = b.startswith((b[1:] ~ 'y',) * 999) %}{% endfor %}",
    "collide: ranges": COLLIDING + "{{ {r: 1} }}",
    "in a range": MANY + "{% set x = 1.5 in range(99999) %}{% endfor %}",
    "many arguments": MANY + "{% set x = dict(*range(99999)) %}{% endfor %}",
    "large body": MANY + "{% if a %}{% endif %}" * 1000 + "{% endfor %}",
    "large macro": "{% macro m() %}" + "{% if a %}{% endif %}" * 1000 + "{% endmacro %}" + MANY + "{% set x = m() %}{% endfor %}",
    # time and memory
    "repeat": "{{ 'a' * 10 ** 9 }}",
    "repeat list": "{{ [1] * 10 ** 9 }}",
    "power": "{{ 7 ** (10 ** 7) }}",
    "squares": "{% set ns = namespace(n=7) %}" + MANY + "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "range": "{{ range(10 ** 9) | list }}",
    "doubling ~": "{% set ns = namespace(s='ab') %}" + MANY + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling +": "{% set ns = namespace(s='ab') %}" + MANY + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling list": "{% set ns = namespace(s=[1]) %}" + MANY + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "nested doubling": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format %": "{{ '%1000000000d' % 1 }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format attribute": "{{ '{0.__class__}'.format(1) }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "center method": "{{ 'a'.center(10 ** 9) }}",
    "indent": BIG + "{{ b | indent(10 ** 9) }}",
    "replace": BIG + "{{ b | replace('x', b) }}",
    "replace method": BIG + "{{ b.replace('', b) }}",
    "join": BIG + "{{ ([b] * 1000) | join(b) }}",
    "join method": BIG + "{{ b.join([b] * 1000) }}",
    "string": BIG + "{{ ([b] * 1000) | string }}",
    "tojson": BIG + "{{ ([b] * 1000) | tojson }}",
    "tojson indent": "{{ [1] | tojson(indent=1000000000) }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "slice filter": "{{ [1] | slice(10 ** 9) | list }}",
    "split": BIG + "{{ b.split('x') }}",
    "list of characters": BIG + "{{ b | list }}",
    "slicing": BIG + MANY + "{% set c = b[::-1] %}{% endfor %}",
    "searching": BIG + MANY + "{% if 'y' in b %}{% endif %}{% endfor %}",
    "comparing": BIG + "{% set c = 'x' * 1000000 %}" + MANY + "{% if b == c %}{% endif %}{% endfor %}",
    "testing": BIG + MANY + "{{ b is lower }}{% endfor %}",
    "upper": BIG + MANY + "{% set c = b.upper() %}{% endfor %}",
    "trim": "{% set b = ' ' * 1000000 %}" + MANY + "{{ b | trim }}{% endfor %}",
    "text": MANY + "A" * 100_000 + "{% endfor %}",
    "captured text": MANY + "{% set x %}" + "A" * 100_000 + "{% endset %}{% endfor %}",
    "sorting": "{{ range(99999) | sort | sort | sort | length }}",
    "sorting texts": "{{ (['x' * 900000, 'y' * 900000] * 9000) | sort | length }}",
    "map chain": "{{ (range(99999) | list)" + " | map('string')" * 20 + " | list }}",
    "dict": "{{ dict([(1, 2)] * 100000) }}",
    "date": "{{ strftime_now('%Y' * 1000000) }}",
    "date width": "{{ strftime_now('%1000000d') }}",
    # depth and size
    "macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "recursive loop": "{% set l = [1] %}{% for x in l recursive %}{{ loop(l) }}{% endfor %}",
    "6,000 parentheses": "{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}",
    "50,000 parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "6,000 ifs": "{% if 1 %}" * 6000 + "{% endif %}" * 6000,
    "long sum": "{{ " + "+".join(["1"] * 60_000) + " }}",
    "many outputs": "{{ a }}" * 30_000,
    "long source": "a" * (budget.MAX_SOURCE + 1),
    "long number": "{{ " + "9" * 5000 + " }}",
    # a way out
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr": "{{ '' | attr('__class__') }}",
    "cycler": "{{ cycler.__init__.__globals__ }}",
    "joiner": "{{ joiner.__init__.__globals__ }}",
    "lipsum": "{{ lipsum.__globals__['os'].system('touch canary') }}",
    "namespace": "{{ namespace.__init__.__globals__ }}",
    "self": "{{ self.__init__.__globals__ }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "format string": "{{ ('{0.__class__.__mro__}' | safe).format(1) }}",
    "map attribute": "{{ [''] | map(attribute='__class__') | list | first }}{{ raise_exception() }}",
    "change messages": "{{ messages.append(1) }}",
    "change a message": "{{ messages[0].update({'role': 'x'}) }}",
    "pop": "{{ messages.pop() }}",
}


def hostile_child():
    """Render every hostile template; print, for each, the seconds it took and how it ended. Runs in a process of its own."""
    import time

    messages = [{"role": "user", "content": "hi"}]
    for name, source in HOSTILE.items():
        start = time.perf_counter()
        try:
            ending = "rendered " + BoundedTemplate(source, "model.gguf").render({"messages": messages})[:20]
        except (TemplateError, Refused) as error:
            ending = type(error).__name__
        print(json.dumps([name, time.perf_counter() - start, ending]))
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_hostile_templates_stop_early(tmp_path):
    code = f"""
import importlib.util, resource, sys
spec = importlib.util.spec_from_file_location("hostile", {__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
module.hostile_child()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    *lines, grown = child.stdout.splitlines()
    results = [json.loads(line) for line in lines]
    assert [name for name, _, _ in results] == list(HOSTILE)
    assert [r for r in results if r[2] not in ("TemplateError", "Refused")] == []
    assert [r for r in results if r[1] > 2] == []  # usually below 0.25 s; the test machine may be busy
    assert int(grown) / (1024 if sys.platform == "linux" else 1 << 20) < 64
    assert list(tmp_path.iterdir()) == []


def test_deep_templates_on_a_small_stack():
    endings = []

    def run():
        for name in ("6,000 parentheses", "50,000 parentheses", "6,000 ifs", "long sum", "macro", "recursive loop"):
            with pytest.raises(TemplateError):
                BoundedTemplate(HOSTILE[name], "model.gguf").render({})
            endings.append(name)

    size = threading.stack_size(512 << 10)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
    assert len(endings) == 6


def test_limits_at_and_over():
    def render(source):
        return BoundedTemplate(source, "model.gguf").render({})

    assert len(render("{{ 'a' * %d }}" % budget.MAX_OUTPUT)) == budget.MAX_OUTPUT
    with pytest.raises(TemplateError, match="1048576 characters"):
        render("{{ 'a' * %d }}" % (budget.MAX_OUTPUT + 1))
    assert render("{% for i in range(99999) %}{% endfor %}") == ""
    with pytest.raises(TemplateError, match="200000 steps"):
        render("{% for i in range(99999) %}{% endfor %}" * 3)
    assert render("a" * budget.MAX_SOURCE) == "a" * budget.MAX_SOURCE
    with pytest.raises(TemplateError, match="at most 262144"):
        render("a" * (budget.MAX_SOURCE + 1))


def test_errors_name_the_file_and_the_line():
    with pytest.raises(TemplateError, match=r"^model\.gguf: the chat template has a syntax error in line 2: "):
        BoundedTemplate("a\n{% if %}", "model.gguf")
    with pytest.raises(TemplateError, match="UndefinedError"):
        BoundedTemplate("{{ a.b.c }}", "model.gguf").render({})


def test_no_budget_is_left_over_from_the_last_rendering():
    template = BoundedTemplate("{% for i in range(99999) %}{% endfor %}{{ n }}", "model.gguf")
    assert [template.render({"n": n}) for n in range(4)] == list("0123")


def test_jinja_is_new_enough():
    assert tuple(map(int, jinja2.__version__.split(".")[:3])) >= (3, 1, 6)  # older ones have sandbox escapes


def test_calls_inside_loops_carry_no_more_than_their_arguments() -> None:
    """Jinja hands the loop's variables to every call in its body: they are no arguments to be paid for or refused."""
    source = (
        "{% set ns = namespace(last='') %}"
        "{% macro shown(name, spec) %}{{ name }}={{ spec.get('type', '?') }};{% endmacro %}"
        "{% for tool in tools %}{% set count = tool | length %}{% set ns.last = tool['name'] %}"
        "{% for name, spec in tool['parameters'].items() %}{{ shown(name, spec) }}{{ name.upper() }}{% endfor %}"
        "{{ ns.last }}{{ count }}{% endfor %}"
    )
    tools = [{"name": "weather", "parameters": {"city": {"type": "string"}, "days": {}}}]
    assert BoundedTemplate(source, "t").render({"tools": tools}) == "city=string;CITYdays=?;DAYSweather2"
