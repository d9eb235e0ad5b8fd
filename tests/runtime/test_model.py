"""Loading, generating and closing a model: options, errors, cancelling, threads, and what is left afterwards."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import ContextLengthError, DownloadError, ModelFormatError, ModelNotFoundError, TemplateError
from edgeinfer.kernels.levels import LEVELS
from edgeinfer.library import resolve
from edgeinfer.model import Model
from edgeinfer.reply import Sampler

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
assert _spec and _spec.loader
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

CONTEXT = 256


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written: Path = tiny.tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=CONTEXT)
    return written


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with edgeinfer.load(path, threads=2) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def slow_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prefill of 4000 tokens takes a second or so."""
    folder = tmp_path_factory.mktemp("slow")
    written: Path = tiny.tiny_gguf(
        folder / "slow.gguf", type="Q4_0", layers=8, embedding=256, heads=8, kv_heads=8, head_dim=64, ffn=512, context=4096
    )
    return written


def ids_of(n: int, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 256, n)]


# --- loading ---------------------------------------------------------------------------------------------------------


def test_what_a_model_knows(path: Path) -> None:
    stages: list[tuple[str, float]] = []
    with edgeinfer.load(str(path), threads=3, context=100, chunk=512, progress=lambda *stage: stages.append(stage)) as model:
        assert (model.context, model.chunk, model.threads, model.n_vocab) == (100, 100, 3, 288)
        assert model.name == "tiny llama" and model.path == path and model.chat_template is not None
        assert 0 < model.load_seconds < 60 and not model.closed
        weights = [fraction for stage, fraction in stages if stage == "weights"]
        assert weights == sorted(weights) and 0 < weights[0] <= weights[-1] <= 1
    assert model.closed


@pytest.mark.parametrize(
    "options",
    [
        {"context": 0}, {"context": -1}, {"context": CONTEXT + 1}, {"context": 2**40}, {"threads": 0}, {"threads": -2},
        {"threads": 100_000}, {"chunk": 0}, {"chunk": -5}, {"chunk": 10**6}, {"level": "sse9"},
        {"threads": 1.5}, {"chunk": 2.5}, {"context": 10.5}, {"context": True}, {"threads": "2"},
    ],
)  # fmt: skip
def test_options_out_of_range(path: Path, options: dict[str, Any]) -> None:
    value = str(next(iter(options.values())))
    with pytest.raises(ValueError, match="(?s).*" + value.replace(".", "[.]")):
        edgeinfer.load(path, **options)


def test_a_level_that_the_processor_lacks_is_refused(path: Path) -> None:
    """Its kernels would end the process at their first instruction."""
    for level in LEVELS.values():
        if not level.runs_here:
            with pytest.raises(ValueError, match="does not have"):
                edgeinfer.load(path, level=level.name)
    odd: Any
    for odd in ("sse9", ["plain"], 1):
        with pytest.raises(ValueError, match="known are"):
            edgeinfer.load(path, level=odd)


def test_numpy_integers_are_whole_numbers(path: Path) -> None:
    with edgeinfer.load(path, threads=1, context=np.int64(64), chunk=np.int64(8)) as model:  # type: ignore[arg-type]
        assert (model.context, model.chunk) == (64, 8)


def test_a_context_of_one(path: Path) -> None:
    with edgeinfer.load(path, threads=1, context=1) as model:
        assert model.logits([5]).shape == (1, 288)
        assert model.generate([5]).finish_reason == "length"


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        edgeinfer.load(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("<html>not found</html>")
    with pytest.raises(ModelFormatError):
        edgeinfer.load(tmp_path / "text.gguf")


def test_without_a_template(tmp_path: Path) -> None:
    with edgeinfer.load(tiny.tiny_gguf(tmp_path / "m.gguf", template=None), threads=1) as model:
        with pytest.raises(TemplateError, match="no chat template"):
            model.session()
        assert model.generate("raw", max_tokens=3).tokens


# --- prompts and options of a generation -----------------------------------------------------------------------------


def test_prompts_that_cannot_be(model: Model) -> None:
    for bad in ("", []):
        with pytest.raises(ValueError, match="empty"):
            model.generate(bad)
    for bad_ids in ([1, 288], [-1], [2**40]):
        with pytest.raises(ValueError, match=str(bad_ids[-1])):
            model.generate(bad_ids)
        with pytest.raises(ValueError):
            model.logits(bad_ids)
    odd: Any
    for odd in ([1.7], ["1"], b"abc", [2**63], [True], [None]):
        for call in (model.generate, model.logits):
            with pytest.raises(ValueError):
                call(odd)
    for call in (model.generate, model.stream, model.logits):
        with pytest.raises(ContextLengthError, match="300 tokens.*256") as error:
            call([1] * 300)
        assert (error.value.prompt_tokens, error.value.limit) == (300, CONTEXT)
    assert model.generate([1] * CONTEXT).finish_reason == "length"


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": -1}, {"max_tokens": 1.5}, {"max_tokens": True}, {"temperature": -1.0}, {"temperature": float("nan")},
        {"top_p": 2.0}, {"seed": -1}, {"logit_bias": {288: 1.0}},
    ],
)  # fmt: skip
def test_options_that_cannot_be(model: Model, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        model.generate("hello", **options)


def test_unknown_options(model: Model) -> None:
    with pytest.raises(TypeError, match="temprature"):
        model.generate("hello", temprature=1.0)


@pytest.mark.parametrize("max_tokens, expected", [(0, 0), (1, 1), (7, 7), (None, CONTEXT - 20), (10**6, CONTEXT - 20)])
def test_max_tokens(model: Model, max_tokens: int | None, expected: int) -> None:
    reply = model.generate(ids_of(20), max_tokens=max_tokens)
    assert len(reply.tokens) == expected == reply.timings.generated_tokens and reply.finish_reason == "length"
    assert reply.prompt_tokens == 20 and reply.cached_tokens == 0
    assert reply.timings.ttft_s is None if expected == 0 else reply.timings.ttft_s > 0
    assert (reply.timings.decode_tps is None) == (expected < 2)


def test_generate_is_the_joined_stream_and_greedy_is_argmax(model: Model) -> None:
    prompt = "the other one"
    whole = model.generate(prompt, max_tokens=50)
    stream = model.stream(prompt, max_tokens=50)
    pieces = list(stream)
    assert "".join(pieces) == whole.text == stream.text and len(pieces) > 5 and stream.tokens == whole.tokens
    ids = model.tokenizer.encode(prompt, special=True)
    logits = model.logits(ids + whole.tokens)
    assert logits[len(ids) - 1 : -1].argmax(axis=1).tolist() == whole.tokens
    assert model.generate(ids, max_tokens=50).tokens == whole.tokens


def test_stop_strings(model: Model) -> None:
    prompt = ids_of(20)
    text = model.generate(prompt, max_tokens=80).text
    for start in (5, 20, 33):
        stop = text[start : start + 3]
        reply = model.stream(prompt, max_tokens=80, stop=[stop, "never to be seen"])
        pieces = list(reply)
        assert "".join(pieces) == text[: text.index(stop)] == reply.text and reply.finish_reason == "stop"
        assert len(reply.tokens) < 80
    assert model.generate(prompt, max_tokens=80, stop=["never to be seen"]).text == text


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens that are sampled in turn, whatever the logits."""
    tokens: list[int] = []
    monkeypatch.setattr(Sampler, "sample", lambda self, logits, history, position: tokens.pop(0))
    yield tokens


def test_every_end_token_ends_a_reply(model: Model, forced: list[int]) -> None:
    names = {model.tokenizer.text(token) for token in model.tokenizer.eog_ids}
    assert names == {"<|im_end|>", "<|endoftext|>"}
    for token in model.tokenizer.eog_ids:
        forced[:] = [65, 66, token, 67]
        reply = model.generate("hello", max_tokens=10)
        assert reply.finish_reason == "stop" and reply.tokens == [65, 66, token] and forced == [67]
        assert reply.text == model.tokenizer.decode([65, 66])
        forced[:] = [token]
        assert model.generate("hello", max_tokens=10).text == ""


def test_a_stop_string_over_tokens_with_utf8_between(model: Model, forced: list[int]) -> None:
    spell = lambda text: [tiny.BYTES.index(tiny.BYTES[b]) for b in text.encode()]  # noqa: E731  # byte tokens are 0..255
    forced[:] = spell("x EN\u00e9") + spell("END-O") + spell("F y")
    reply = model.stream("hello", max_tokens=40, stop=["END-OF"])
    pieces = list(reply)
    assert "".join(pieces) == "x EN\u00e9" and reply.finish_reason == "stop" and not any("\ufffd" in p for p in pieces)
    forced[:] = spell("x END-Q\u20ac")[:-1]
    assert model.generate("hello", max_tokens=9, stop=["END-OF"]).text == "x END-Q\ufffd"


# --- seeds (case H08) ------------------------------------------------------------------------------------------------

DRAW = """
import sys, edgeinfer
options = {"seed": int(sys.argv[2])} if len(sys.argv) > 2 else {}
with edgeinfer.load(sys.argv[1], threads=1) as model:
    for _ in range(2):
        reply = model.generate("hello", max_tokens=64, temperature=5.0, **options)
        print(reply.seed, reply.tokens)
"""


def _drawn(path: Path, *seed: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", DRAW, str(path), *seed], capture_output=True, text=True, cwd=path.parent)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_seeds(path: Path) -> None:
    """No seed: every reply of every process is another one. A seed: all the same, also the first and the second."""
    assert len({*_drawn(path), *_drawn(path)}) == 4
    fixed = {*_drawn(path, "42"), *_drawn(path, "42")}
    assert len(fixed) == 1 and fixed.pop().startswith("42 ")


def test_the_seed_that_was_used_repeats_a_reply(model: Model) -> None:
    first = model.generate("hello", max_tokens=64, temperature=2.0)
    assert model.generate("hello", max_tokens=64, temperature=2.0, seed=first.seed).tokens == first.tokens
    assert model.generate("hello", max_tokens=64, temperature=2.0, seed=first.seed + 1).tokens != first.tokens


# --- logits ----------------------------------------------------------------------------------------------------------


def test_logits(model: Model) -> None:
    ids = ids_of(70)
    logits = model.logits(ids)
    assert logits.shape == (70, 288) and logits.dtype == np.float32
    assert (model.logits(np.array(ids)) == logits).all()  # type: ignore[arg-type]
    assert (model.logits(ids[:33]) == logits[:33]).all()  # causal
    batch = model.logits([ids, ids[:1], ids[5:50]])
    assert [len(rows) for rows in batch] == [70, 1, 45]
    assert (batch[0] == logits).all() and (batch[1] == logits[:1]).all() and (batch[2] == model.logits(ids[5:50])).all()
    with pytest.raises(ValueError, match="empty"):
        model.logits([])
    with pytest.raises(ValueError, match="empty"):
        model.logits([[1], []])


# --- cancelling ------------------------------------------------------------------------------------------------------


def _cancelled_after(reply: Any, seconds: float) -> tuple[float, str]:
    """Seconds from cancel() in another thread to the end of the iteration, and the text."""
    called: list[float] = []

    def cancel() -> None:
        called.append(time.monotonic())
        reply.cancel()

    timer = threading.Timer(seconds, cancel)
    timer.start()
    text = "".join(reply)
    ended = time.monotonic()
    timer.join()
    return ended - called[0], text


def test_cancel_from_another_thread(slow_path: Path) -> None:
    with edgeinfer.load(slow_path, threads=2, chunk=512) as model:
        short, long = ids_of(30), ids_of(4000)
        expected = model.logits(short)
        full = model.generate(short, max_tokens=300)
        latencies = []
        for attempt in range(12):  # in prefill
            reply = model.stream(long, max_tokens=5)
            latencies.append(_cancelled_after(reply, 0.01 * attempt)[0])
            assert (reply.finish_reason, reply.tokens) == ("cancelled", [])
            assert (model.logits(short) == expected).all()
        for attempt in range(12):  # in decode
            reply = model.stream(short, max_tokens=3000)
            next(reply)
            latency, text = _cancelled_after(reply, 0.005 * attempt)
            latencies.append(latency)
            assert reply.finish_reason == "cancelled" and 0 < len(reply.tokens) < 3000 and reply.text.endswith(text)
            assert full.tokens[: len(reply.tokens)] == reply.tokens[:300]
            assert reply.timings.generated_tokens == len(reply.tokens)  # measures bandwidth: a late stop must not disturb it
        assert (model.logits(short) == expected).all()
        assert sorted(latencies)[-2] < 0.2, latencies


def test_cancel_before_between_and_after(model: Model) -> None:
    unbegun = model.stream("hello")
    unbegun.cancel()
    assert unbegun.finish_reason == "cancelled" and list(unbegun) == []
    reply = model.stream("hello", max_tokens=50)
    first = [next(reply), next(reply)]
    reply.cancel()
    assert reply.finish_reason == "cancelled" and list(reply) == [] and reply.text.startswith("".join(first))
    done = model.generate("hello", max_tokens=5)
    text = done.text
    done.cancel()
    assert done.finish_reason == "length" and done.text == text
    assert done.timings.decode_tps


def test_an_abandoned_reply_gives_its_sequence_back(model: Model) -> None:
    for _ in range(40):  # far more than there are sequences
        for _ in model.stream("hello", max_tokens=50):
            break
        gc.collect()
    assert len(model.generate("hello", max_tokens=5).tokens) == 5


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_interrupts_leave_the_model_usable(slow_path: Path) -> None:
    """In a process of its own: Ctrl-C at any moment of prefill and decode."""
    script = """
import os, signal, sys, threading, edgeinfer
model = edgeinfer.load(sys.argv[1], threads=2)
short = list(range(40))
expected = model.generate(short, max_tokens=30).tokens
hit = 0
with model.session() as chat:
    for attempt in range(16):
        timer = threading.Timer(0.02 + 0.01 * attempt, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            reply = chat.send("word " * (700 if attempt % 2 else 10), max_tokens=3000)
            list(reply)
        except KeyboardInterrupt:
            hit += 1
        timer.join()
        assert reply.finish_reason == "cancelled", reply.finish_reason
        assert chat.messages[-1] == {"role": "assistant", "content": reply.text}
        chat.reset()
        assert model.generate(short, max_tokens=30).tokens == expected
assert hit == 16, hit
"""
    done = subprocess.run([sys.executable, "-c", script, str(slow_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- threads ---------------------------------------------------------------------------------------------------------


def test_several_threads_at_once(path: Path) -> None:
    """Generations, logits and cancelled replies in five threads: each result is that of a run alone."""
    prompts = [ids_of(n, seed=n) for n in (3, 40, 90, 130)]
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 5}
    with edgeinfer.load(path, threads=2, chunk=32) as model:
        alone = [model.generate(p, **options).tokens for p in prompts]
        logits = [model.logits(p) for p in prompts]
        wrong: list[Any] = []

        def work(i: int) -> None:
            for _ in range(6):
                if model.generate(prompts[i], **options).tokens != alone[i]:
                    wrong.append(("tokens", i))
                if not (model.logits(prompts[i]) == logits[i]).all():
                    wrong.append(("logits", i))

        def interfere() -> None:
            for n in range(30):
                reply = model.stream(prompts[3], max_tokens=100)
                _cancelled_after(reply, 0.001 * n)

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            threads = [threading.Thread(target=work, args=(i,)) for i in range(4)] + [threading.Thread(target=interfere)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
        finally:
            sys.setswitchinterval(before)
        assert not wrong and not any(thread.is_alive() for thread in threads)


# --- closing ---------------------------------------------------------------------------------------------------------


def test_a_closed_model(path: Path) -> None:
    model = edgeinfer.load(path, threads=2)
    chat, reply, unbegun = model.session(), model.stream("hello"), model.stream("hello")
    next(reply)
    model.close()
    model.close()
    for act in (
        lambda: model.generate("hello"), lambda: model.logits([1, 2]), lambda: model.session(),
        lambda: chat.send("hello"), lambda: model.stream([1]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="closed"):
            act()
    assert list(reply) == [] and reply.finish_reason == "cancelled"
    with pytest.raises(ValueError, match="closed"):
        list(unbegun)
    assert reply.timings.load_s > 0
    chat.close()
    assert model.tokenizer.encode("still text")


def test_close_while_threads_work(slow_path: Path) -> None:
    for attempt in range(4):
        model = edgeinfer.load(slow_path, threads=2)
        ends: list[str] = []

        def generate(model: Model = model, ends: list[str] = ends) -> None:
            reply = model.stream(ids_of(900), max_tokens=3000)
            list(reply)
            ends.append(str(reply.finish_reason))

        def evaluate(model: Model = model, ends: list[str] = ends) -> None:
            try:
                while True:
                    model.logits(ids_of(900))
            except ValueError as error:
                ends.append(str(error))

        threads = [threading.Thread(target=generate), threading.Thread(target=evaluate), threading.Thread(target=evaluate)]
        for thread in threads:
            thread.start()
        time.sleep(0.05 + 0.1 * attempt)
        begun = time.monotonic()
        closers = [threading.Thread(target=model.close) for _ in range(2)]
        for thread in closers:
            thread.start()
        for thread in closers + threads:
            thread.join(20)
            assert not thread.is_alive()
        assert time.monotonic() - begun < 2.0
        assert sorted(ends) == ["cancelled", "the model is closed", "the model is closed"]


def test_nothing_is_left_without_close(path: Path) -> None:
    """A model that is only forgotten goes at once, with its threads: nothing in it refers back to it."""
    gc.collect()
    before = threading.active_count()
    gc.disable()
    try:
        model = edgeinfer.load(path, threads=3)
        model.generate("hello", max_tokens=5)
        gone = weakref.ref(model)
        assert threading.active_count() == before + 2
        del model
        assert gone() is None and threading.active_count() == before
    finally:
        gc.enable()


ROUNDS = """
import gc, json, os, sys, threading, edgeinfer
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
def files():
    return len(os.listdir("/proc/self/fd"))
grown = []
for i in range(55):
    with edgeinfer.load(sys.argv[1], threads=2) as model:
        chat = model.session()
        list(chat.send("hello", max_tokens=8))
        model.logits([1, 2, 3])
    if i == 4:
        first = resident(), files(), threading.active_count()
last = resident(), files(), threading.active_count()
print(json.dumps([first, last]))
"""


def _rounds(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ROUNDS, str(path)], capture_output=True, text=True, cwd=path.parent)
    assert (done.returncode, done.stderr) == (0, "")
    first, last = json.loads(done.stdout)
    assert last[1:] == first[1:]  # files, threads
    assert last[0] - first[0] < 8 << 20, f"{(last[0] - first[0]) / 2**20:.1f} MiB in 50 rounds"


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_fifty_rounds_of_load_and_close(path: Path) -> None:
    _rounds(path)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_fifty_rounds_of_a_real_model() -> None:
    try:
        _rounds(resolve("smollm2-135m", download=True))
    except DownloadError as error:
        pytest.skip(str(error))


def test_nothing_is_printed(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with edgeinfer.load(path, threads=2) as model, model.session() as chat:
        list(chat.send("hello", max_tokens=5))
        model.generate("hello", max_tokens=5).timings  # noqa: B018
        with pytest.raises(ValueError):
            model.generate("")
    assert capfd.readouterr() == ("", "")
