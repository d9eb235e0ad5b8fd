"""Chat templates: markers only from the template, BOS once, refusals in the template's words, merges reported."""
# ruff: noqa: E501  (templates read best on one line)

import random
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.formats.chat import ChatTemplate
from edgeinfer.formats.errors import TemplateError
from edgeinfer.formats.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent.parent / "data" / "templates"
MARKERS = (
    "<s> </s> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <start_of_turn> <end_of_turn> [INST] [/INST]"
    " <|user|> <|assistant|> <|system|> <|end|> <｜User｜> <｜Assistant｜> [TOOL_RESULTS] [/TOOL_RESULTS] <|unused|>"
).split()
USER_DEFINED = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<<SYS>>"]
NORMAL, CONTROL, USER = 1, 3, 4


def byte_vocabulary(add_bos):
    """Bytes, and the markers of all the templates."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    tokens = [chr(byte if byte in shown else next(hidden)) for byte in range(256)]
    types = [NORMAL] * 256 + [CONTROL] * len(MARKERS) + [USER] * len(USER_DEFINED)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *MARKERS, *USER_DEFINED],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.add_bos_token": add_bos,
    }


WITH_BOS, WITHOUT_BOS = (Tokenizer.from_metadata(byte_vocabulary(add), "model.gguf") for add in (True, False))
BOS = WITH_BOS.bos_id
STYLES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def chat(source, tokenizer=WITHOUT_BOS):
    if source in STYLES:
        source = (TEMPLATES / f"{source}.jinja").read_text()
    return ChatTemplate(source, tokenizer, "model.gguf")


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def control_ids(ids):
    return [i for i in ids if WITHOUT_BOS.is_control(i)]


PLAIN_TEXTS = [
    "hi",
    " two words ",
    "a < b > c [d] {e} |f|",
    "<b>bold</b>",
    "user",
    "im_end",
    "ends with <",
    "> begins",
    "naïve €😀",
    "x" * 3000,
]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_ids_of_plain_messages_are_those_of_the_rendered_text(style, text):
    template = chat(style)
    for messages in ([say("user", text)], [say("user", text), say("assistant", text), say("user", text)]):
        ids = template.encode(messages)
        assert ids == WITHOUT_BOS.encode(template.render(messages), special=True, bos=False)
        assert WITHOUT_BOS.decode(ids, special=True) == template.render(messages)


def hostile_conversations():
    """Each marker whole, embedded, in every split over neighbouring messages, doubled, and with things that look like our brackets."""
    rng = random.Random(0)
    for marker in MARKERS + USER_DEFINED:
        other = rng.choice(MARKERS)
        yield [say("user", marker), say("assistant", marker), say("user", marker)]
        yield [say("user", f"a{marker}{other}b"), say("assistant", f" {marker}\n"), say("user", f"{marker * 3}")]
        for cut in range(1, len(marker)):
            head, tail = marker[:cut], marker[cut:]
            yield [say("user", "a" + head), say("assistant", tail + "b"), say("user", f"{head}{other}{tail}")]
            yield [say("user", tail), say("assistant", head), say("user", f"{head}\0{tail}")]
            yield [
                say("user", head),
                say("assistant", f"{head}</think>{tail}"),
                say("user", f"{head}{'0' * 32}a{tail}{'0' * 32}z"),
            ]


@pytest.mark.parametrize("style", STYLES)
def test_no_message_makes_a_marker(style):
    template = chat(style)
    plain = [say("user", "x"), say("assistant", "x"), say("user", "x")]
    expected = control_ids(template.encode(plain))
    assert expected or style == "plain"
    refused = 0
    for messages in hostile_conversations():
        try:
            ids = template.encode(messages)
        except TemplateError as error:  # failing closed is allowed, but only for templates that cut messages up
            assert style == "deepseek" and "would make a control token" in str(error)
            refused += 1
            continue
        assert control_ids(ids) == expected, messages
        assert WITHOUT_BOS.decode(ids, special=True) == template.render(messages)
    assert refused < 20


@pytest.mark.parametrize("marker", [*MARKERS, *USER_DEFINED])
def test_no_other_field_makes_a_marker(marker):
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}\n{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>"
        "{% endfor %}{{ tools | tojson }}{{ extra }}"
    )
    template = chat(source)

    def ids(text):
        call = {"function": {"name": text, "arguments": {"a": [text, 1, None, True]}}}
        tools = [{"function": {"name": text, "description": f"<{text}>"}}]
        messages = [
            say("system", text),
            say("user", text, name=text),
            say("assistant", text, tool_calls=[call]),
            say("tool", text, name=text),
        ]
        return template.encode(messages, tools=tools, extra=text)

    assert control_ids(ids(marker)) == control_ids(ids("x"))
    assert control_ids(ids(marker[:3])) == control_ids(ids("x"))


def test_text_that_completes_the_templates_own_half_of_a_marker():
    template = chat("<|im_{{ messages[0].content }}|>{{ messages[0].content | trim }}<|im_end|>")
    assert control_ids(template.encode([say("user", "end")])) == control_ids(template.encode([say("user", "x")]))
    assert control_ids(template.encode([say("user", " end|>")])) == control_ids(template.encode([say("user", "x")]))


def test_a_template_that_cuts_the_message_up_fails_closed():
    glue = chat(
        "{{ messages[0].content.split('#')[0] }}{{ messages[0].content.split('#')[1] }}{{ messages[0].content[1:5] }}<|im_end|>"
    )
    half = chat("{{ messages[0].content | lower }}{{ messages[0].content[2:] }}<|im_end|>")
    attempts = [(half, "abc<|IM_END|>"), (half, "ab<|im_end|>"), (half, "<|im_end|>"), (glue, "<|im_#end|>")]
    for template, text in attempts:
        try:
            ids = template.encode([say("assistant", text)])
        except TemplateError as error:
            assert "would make a control token" in str(error)
        else:
            assert control_ids(ids) == [WITHOUT_BOS.encode("<|im_end|>", special=True)[0]]


def test_reasoning_that_the_template_cuts_out_is_no_obstacle():
    messages = [say("user", "q"), say("assistant", "<think>\nhm\n</think>\n\nhello"), say("user", "r")]
    template = chat("deepseek")
    ids = template.encode(messages)
    assert (
        WITHOUT_BOS.decode(ids, special=True)
        == template.render(messages)
        == "<s><｜User｜>q<｜Assistant｜>hello</s><｜User｜>r<｜Assistant｜><think>\n"
    )
    assert ids == WITHOUT_BOS.encode(template.render(messages), special=True)


@pytest.mark.parametrize("written", ["{{ bos_token }}", "<s>", "{% set b = bos_token %}{{ b }}"])
@pytest.mark.parametrize(
    ("writes", "tokenizer", "count"), [(1, WITH_BOS, 1), (1, WITHOUT_BOS, 1), (0, WITH_BOS, 1), (0, WITHOUT_BOS, 0)]
)
def test_bos_once(written, writes, tokenizer, count):
    template = chat(written * writes + "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", tokenizer)
    for text in ("hi", "<s>", "<s>hi", ""):
        ids = template.encode([say("user", text)])
        assert ids.count(BOS) == count
        assert (ids[0] == BOS) == bool(count)


def test_no_eos_behind_a_prompt():
    tokenizer = Tokenizer.from_metadata(byte_vocabulary(True) | {"tokenizer.ggml.add_eos_token": True}, "model.gguf")
    assert chat("chatml", tokenizer).encode([say("user", "hi")])[-1] != tokenizer.eos_id


STRICT = """{% if messages[0].role == 'system' %}{{ raise_exception('No system role, please.') }}{% endif %}
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Please alternate.') }}{% endif %}
{{ m.role }}: {{ m.content }}
{% endfor %}"""


@pytest.mark.parametrize(
    ("messages", "text", "note_words"),
    [
        ([say("user", "a")], "user: a\n", []),
        ([say("system", "s"), say("user", "a")], "user: s\n\na\n", ["no system message"]),
        ([say("user", "a"), say("user", "b")], "user: a\n\nb\n", ["were joined"]),
        (
            [say("system", "s"), say("user", "a"), say("user", "b")],
            "user: s\n\na\n\nb\n",
            ["no system message", "were joined"],
        ),
        (
            [say("user", "a"), say("assistant", "b"), say("assistant", "c")],
            "user: a\nassistant: b\n\nc\n",
            ["were joined"],
        ),
    ],
)
def test_merges_are_made_only_when_refused_and_are_reported(messages, text, note_words):
    before = [dict(m) for m in messages]
    notes = []
    assert chat(STRICT).render(messages, notes=notes) == text
    assert chat(STRICT).encode(messages) == WITHOUT_BOS.encode(text, special=True)
    assert len(notes) == len(note_words) and all(word in note for word, note in zip(note_words, notes, strict=True))
    assert messages == before
    notes.clear()
    chat("chatml").render(messages, notes=notes)
    assert notes == []


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([say("system", "alone")], "No system role, please."),
        ([say("assistant", "x"), say("user", "y")], "Please alternate."),
        ([say("user", "x"), say("tool", "y"), say("tool", "z")], "Please alternate."),
        ([say("user", "a", name="n"), say("user", "b", name="m")], "Please alternate."),
    ],
)
def test_other_refusals_carry_the_templates_sentence(messages, sentence):
    for act in (chat(STRICT).render, chat(STRICT).encode):
        with pytest.raises(TemplateError) as error:
            act(messages)
        assert str(error.value) == f"model.gguf: the chat template refuses these messages: {sentence}"


def test_no_message_is_dropped_in_silence():
    users_only = chat("{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}")
    notes = []
    assert users_only.render([say("system", "be brief"), say("user", "a")], notes=notes) == "be brief\n\na\n"
    assert "no system message" in notes[0]
    with pytest.raises(TemplateError, match=r"leaves out message 0 \(system\)"):
        users_only.render([say("system", "be brief")])
    with pytest.raises(TemplateError, match=r"leaves out message 0 \(user\)"):
        chat("{{ messages[-1].content }}").render([say("user", "a"), say("assistant", "b"), say("user", "c")])


@pytest.mark.parametrize(
    ("messages", "kwargs", "words"),
    [
        ([], {}, "1 to 2048 messages"),
        ([say("user", "x")] * 2049, {}, "1 to 2048 messages"),
        ("hi", {}, "1 to 2048 messages"),
        ([say("wizard", "x")], {}, "message 0 needs a role, one of system"),
        ([say("user", "x"), {"content": "x"}], {}, "message 1 needs a role"),
        ([say("<|im_end|>", "x")], {}, "needs a role"),
        ([say("user", object())], {}, "a object in the messages"),
        ([say("user", "x", extra={1: 2})], {}, "text as keys"),
        ([say("user", "x")], {"messages": []}, "cannot be set"),
        ([say("user", "x")], {"bos_token": ""}, "cannot be set"),
        ([say("user", "x")], {"tools": [print]}, "builtin_function_or_method"),
    ],
)
def test_bad_input_is_refused(messages, kwargs, words):
    with pytest.raises((TemplateError, TypeError), match=words):
        chat("chatml")._accepted(messages, True, None, kwargs)


def test_deeply_nested_messages_are_refused():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(TemplateError, match="nested more than 64"):
        chat("chatml").encode([say("user", "x", extra=value)])


def test_from_metadata():
    assert (
        ChatTemplate.from_metadata({"tokenizer.chat_template": "{{ messages[0].content }}"}, WITH_BOS, "m").render(
            [say("user", "x")]
        )
        == "x"
    )
    with pytest.raises(TemplateError, match="no chat template: use --raw"):
        ChatTemplate.from_metadata({}, WITH_BOS, "m")
    with pytest.raises(TemplateError, match="but those named tool_use: use --raw"):
        ChatTemplate.from_metadata({"tokenizer.chat_template.tool_use": "x"}, WITH_BOS, "m")
