"""The thread team: every chunk once and in order, whatever the threads, stops, forks, signals and exits around it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.kernels.cpu.walk import (
    OP_ARGS,
    OP_BARRIER,
    OP_BYTES,
    OP_KERNEL,
    OP_ROW_COUNT,
    OP_ROWS_PER_CHUNK,
    OP_UNITS,
    OP_WORDS,
    add,
    look,
    publish,
    word,
)
from edgeinfer.kernels.jit import Code, Kernel
from edgeinfer.kernels.levels import native_level
from edgeinfer.kernels.team import Cancelled, Team, aligned_zeros

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parents[1] / "runtime" / "tiny.py")
assert _spec and _spec.loader
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

MARKS, BEFORE, BEFORE_COUNT, ERRORS, WORK = range(OP_ARGS, OP_ARGS + 5)
CHUNKS, STAMP = 0, 1  # words of the step block
MOST = 64  # chunks of an op


def _probe(op: int, step: int, chunk: int) -> int:
    """Mark the chunk as done in this step. An error: it has been marked, or a chunk of the ops before it has not."""
    stamp = look(step + STAMP * 8)
    count = look(step + CHUNKS * 8)
    mark = word(op, MARKS) + chunk * 8
    errors = word(op, ERRORS)
    if chunk >= count or look(mark) == stamp:
        add(errors, 1)
    for before in range(word(op, BEFORE_COUNT)):
        for i in range(count):
            if look(word(op, BEFORE) + (before * MOST + i) * 8) != stamp:
                add(errors, 1)
    for _ in range(word(op, WORK)):
        look(mark)
    if look(step + STAMP * 8) != stamp:
        add(errors, 1)  # the step was over before its chunk
    publish(mark, stamp)
    return 0


PROBE = Kernel("team_probe", _probe, (word, look, publish, add))


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Code]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEINFER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Code(native_level())


class Probe:
    """A team over `ops` probing ops; groups of them run without a barrier between."""

    def __init__(self, code: Code, threads: int, ops: int = 40, group: int = 3, work: int = 20) -> None:
        self.marks = np.zeros((ops, MOST), np.int64)
        self.errors, self.step = np.zeros(1, np.int64), np.zeros(2, np.int64)
        self.table = aligned_zeros(ops * OP_BYTES).view(np.int64).reshape(ops, OP_WORDS)
        for number, row in enumerate(self.table):
            first = number // group * group
            row[OP_KERNEL], row[OP_UNITS], row[OP_ROWS_PER_CHUNK] = code.address(PROBE), 1, 1
            row[OP_ROW_COUNT], row[OP_BARRIER] = CHUNKS, number % group == group - 1 or number == ops - 1
            row[MARKS], row[ERRORS], row[WORK] = self.marks[number].ctypes.data, self.errors.ctypes.data, work
            if first:
                row[BEFORE], row[BEFORE_COUNT] = self.marks[first - group].ctypes.data, group
        self.team = Team(code, threads, self.table, self.step)
        self.stamp = 0

    def prepare(self, chunks: int) -> None:
        self.stamp += 1
        self.step[STAMP], self.step[CHUNKS] = self.stamp, chunks

    def run(self, chunks: int) -> None:
        self.prepare(chunks)
        self.team.run(0, len(self.table))
        self.check(chunks)

    def check(self, chunks: int) -> None:
        assert self.errors[0] == 0
        assert (self.marks[:, :chunks] == self.stamp).all()
        assert (self.marks[:, chunks:] < self.stamp).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_chunk_once_and_in_order(code: Code, threads: int) -> None:
    """Steps of varying size follow each other closely: a thread that is late must not count the next step's chunks."""
    probe = Probe(code, threads)
    end = time.monotonic() + 2.0
    steps = 0
    while time.monotonic() < end:
        probe.run((1, 5, 32, 7, 64, 1, 13)[steps % 7])
        steps += 1
        if steps % 300 == 0:
            time.sleep(0.004)  # long enough for members to fall asleep
    assert steps > 100
    probe.team.close()


def test_a_part_of_the_table(code: Code) -> None:
    probe = Probe(code, 2)
    probe.prepare(9)
    probe.team.run(0, 12)
    assert (probe.marks[:12, :9] == 1).all() and (probe.marks[12:] == 0).all()
    probe.team.run(12, 40)
    probe.check(9)
    probe.prepare(0)
    probe.team.run(0, 40)  # no rows: nothing to do
    probe.check(0)
    probe.team.close()


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_stop_in_mid_step_then_the_next_step_is_right(code: Code, threads: int) -> None:
    probe = Probe(code, threads, work=2_000)
    cancelled = 0
    for attempt in range(60):
        timer = threading.Timer(0.0005 * (attempt % 12), probe.team.stop)
        timer.start()
        probe.prepare(48)
        try:
            probe.team.run(0, len(probe.table))
            probe.check(48)
        except Cancelled:
            cancelled += 1
            assert probe.errors[0] == 0
        timer.join()
        while True:  # a stop that came too late for its step hits the next one, which is repeated
            try:
                probe.run(1 + attempt % 50)
                break
            except Cancelled:
                continue
    assert cancelled > 5
    probe.team.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_close_while_running(code: Code, threads: int) -> None:
    for _ in range(10):
        probe = Probe(code, threads, work=200_000)
        failures: list[BaseException] = []
        running = threading.Event()

        thread = threading.Thread(target=_run_to_failure, args=(probe, running, failures))
        thread.start()
        running.wait()
        time.sleep(0.01)
        begun = time.monotonic()
        probe.team.close()
        assert time.monotonic() - begun < 1.0
        thread.join(5)
        assert not thread.is_alive() and [type(f) for f in failures] == [Cancelled]
        with pytest.raises(Cancelled):
            probe.team.run(0, 1)
        probe.team.close()  # again: nothing happens


def _run_to_failure(probe: Probe, running: threading.Event, failures: list[BaseException]) -> None:
    probe.prepare(64)
    running.set()
    try:
        probe.team.run(0, len(probe.table))
    except BaseException as error:
        failures.append(error)


def test_two_threads_call_run(code: Code) -> None:
    """One step at a time: the second caller waits for its turn."""
    probe = Probe(code, 2)
    preparing = threading.Lock()

    def work() -> None:
        for i in range(200):
            with preparing:
                probe.run(1 + i % 64)

    def interfere() -> None:
        for _ in range(200):
            probe.team.run(0, 0)

    threads = [threading.Thread(target=target) for target in (work, work, interfere)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert probe.errors[0] == 0 and probe.stamp == 400
    probe.check(int(probe.step[CHUNKS]))
    probe.team.close()


def test_members_end_with_the_team(code: Code) -> None:
    before = threading.active_count()
    for closed in (True, False):
        probe = Probe(code, 4)
        probe.run(3)
        assert threading.active_count() == before + 3
        if closed:
            probe.team.close()
        del probe
        assert threading.active_count() == before


# --- in processes of their own: a whole model on top of the team -----------------------------------------------------

PRELUDE = """
import faulthandler, os, signal, sys, threading, time
faulthandler.enable()
faulthandler.dump_traceback_later(60, exit=True)
import numpy as np
import edgeinfer
model = edgeinfer.load(sys.argv[1], threads=int(sys.argv[2]), chunk=512)
long = [i % 256 for i in range(3000)]
short = long[:40]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    tiny.tiny_gguf(path, type="Q4_0", layers=4, embedding=256, head_dim=64, ffn=512, context=4096)
    return path


def child(model: Path, script: str, threads: int = 3, timeout: float = 60.0) -> str:
    """Run a script in a fresh interpreter; its standard output."""
    arguments = [sys.executable, "-c", PRELUDE + script, str(model), str(threads)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout, cwd=model.parent)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork(model: Path) -> None:
    """The child starts members of its own, and its cache is its own: both go on with a session in different ways."""
    script = """
expected = model.logits(short)
chat = model.session()
list(chat.send("first", max_tokens=20))
ids = model.tokenizer.encode(chat.render("other one"), special=True)
same = model.tokenizer.encode(chat.render("something"), special=True)
wanted, wanted_here = (model.generate(x, max_tokens=20).tokens for x in (ids, same))
for _ in range(5):
    child = os.fork()
    if child == 0:
        ok = (model.logits(short) == expected).all()
        reply = chat.send("other one", max_tokens=20)
        list(reply)
        ok = ok and reply.tokens == wanted and reply.cached_tokens > 0
        model.close()
        os._exit(0 if ok else 1)
    assert (model.logits(short) == expected).all()
    assert os.waitpid(child, 0)[1] == 0
reply = chat.send("something", max_tokens=20)
list(reply)
assert reply.tokens == wanted_here and reply.cached_tokens > 0
print("done")
"""
    for threads in (1, 3):
        assert child(model, script, threads) == "done\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_while_another_thread_is_in_mid_step(model: Path) -> None:
    """Whatever that thread held in the parent, it does not exist in the child."""
    script = """
expected = model.logits(short)
ended = threading.Event()
def work():
    while not ended.is_set():
        model.logits(long)
worker = threading.Thread(target=work)
worker.start()
for attempt in range(10):
    time.sleep(0.011 * attempt)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        ok = (model.logits(short) == expected).all()
        model.close()
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
ended.set()
worker.join()
print("done")
"""
    assert child(model, script) == "done\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_interrupt_in_mid_step(model: Path) -> None:
    script = """
expected = model.logits(short)
hit = 0
for attempt in range(20):
    timer = threading.Timer(0.002 + 0.003 * attempt, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        for _ in range(1000):
            model.logits(long)
    except KeyboardInterrupt:
        hit += 1
    timer.join()
    assert (model.logits(short) == expected).all()
assert hit == 20
model.close()
print("done")
"""
    for threads in (1, 3):
        assert child(model, script, threads) == "done\n"


EXITS = {
    "team alive": "model.logits(short)",
    "closed": "model.logits(short); model.close()",
    "never used": "",
    "step in a daemon thread": """
def work():
    while True:
        model.logits(long)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
""",
    "stream in a daemon thread": """
threading.Thread(target=lambda: list(model.stream(short)), daemon=True).start()
time.sleep(0.1)
""",
    "step in a thread that is joined": "threading.Thread(target=model.logits, args=(long,)).start(); time.sleep(0.05)",
    "reply left behind": "reply = model.stream(short); next(reply)",
}


@pytest.mark.parametrize("runs", [2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EXITS)
def test_interpreter_exit(model: Path, name: str, runs: int) -> None:
    for _ in range(runs):
        begun = time.monotonic()
        assert child(model, EXITS[name], timeout=30) == ""
        assert time.monotonic() - begun < 5.0
