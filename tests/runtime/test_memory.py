"""How much memory a model takes: the plan against what the system measured, and refusals before anything is allocated."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer import machine
from edgeinfer.errors import DownloadError, MemoryLimitError
from edgeinfer.library import resolve

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
assert _spec and _spec.loader
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")

USE = """
import json, sys
import edgeinfer
path, context = sys.argv[1], int(sys.argv[2])
with edgeinfer.load(path, context=context, threads=2) as model, model.session() as chat:
    word = len(model.tokenizer.encode(" stone"))
    begin = len(model.tokenizer.encode(chat.render(""), special=True))
    reply = chat.send(" stone" * ((context - begin - 8) // word), max_tokens=None)
    list(reply)
    used = reply.prompt_tokens + len(reply.tokens)
    compiled = model.compiled
for line in open("/proc/self/status"):
    if line.startswith("VmHWM:"):
        print(json.dumps({"peak": int(line.split()[1]) * 1024, "used": used, "compiled": compiled}))
"""


def run(script: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd)


def peak(path: Path, context: int) -> int:
    """Most memory that a process ever held which filled the whole context; with kernels compiled before."""
    for _ in range(2):  # the first may compile
        done = run(USE, path, context, cwd=path.parent)
        assert (done.returncode, done.stderr) == (0, "")
        result: dict[str, Any] = json.loads(done.stdout)
        assert context - 10 < result["used"] <= context
        if not result["compiled"]:
            return int(result["peak"])
    raise AssertionError("kernels are compiled again and again")


@needs_proc
def test_a_tiny_models_plan(tmp_path: Path) -> None:
    """Almost only the process itself."""
    path = tiny.tiny_gguf(tmp_path / "m.gguf", context=1024)
    assert peak(path, 1024) == pytest.approx(edgeinfer.plan(path).total, rel=0.10)


def _real_model() -> Path:
    try:
        return resolve("smollm2-135m", download=True)
    except DownloadError as error:
        pytest.skip(str(error))


@needs_proc
@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("context", [512, 4096])
def test_a_real_models_plan(context: int) -> None:
    path = _real_model()
    plan = edgeinfer.plan(path, context)
    measured = peak(path, context)
    assert measured == pytest.approx(plan.total, rel=0.10)
    assert measured <= path.stat().st_size + plan.kv + 250e6
    # 30 layers, 3 KV heads of 64 values, keys and values in half precision
    assert plan.kv == context * 30 * 3 * 64 * 2 * 2


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_refusal_names_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.tiny_gguf(tmp_path / "m.gguf")
    need = edgeinfer.plan(path).total
    monkeypatch.setattr(machine, "available_memory", lambda: need - 1)
    plan = edgeinfer.plan(path)
    assert not plan.fits and plan.available == need - 1
    with pytest.raises(MemoryLimitError, match=f"{need / 1e6:.0f} MB.*{(need - 1) / 1e6:.0f} MB") as error:
        edgeinfer.load(path)
    assert (error.value.need, error.value.available) == (need, need - 1)
    for available in (need, None):
        monkeypatch.setattr(machine, "available_memory", lambda available=available: available)
        assert edgeinfer.plan(path).fits
        edgeinfer.load(path, threads=1).close()


def test_a_smaller_context_needs_less(tmp_path: Path) -> None:
    path = tiny.tiny_gguf(tmp_path / "m.gguf", layers=8, context=1 << 20)
    small, large = edgeinfer.plan(path, 1 << 10), edgeinfer.plan(path, 1 << 20)
    assert edgeinfer.plan(path).context == 4096
    assert large.kv == 1024 * small.kv == (1 << 20) * 8 * 2 * 16 * 2 * 2
    assert large.weights == small.weights and large.total > small.total + (1 << 30)
    with pytest.raises(ValueError, match="1048576"):
        edgeinfer.plan(path, (1 << 20) + 1)


@needs_proc
def test_what_cannot_fit_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    """A context of 64 GiB on a machine, and of a few hundred MiB under a process limit."""
    path = tiny.tiny_gguf(tmp_path / "m.gguf", layers=64, context=1 << 23)
    script = """
import resource, sys, edgeinfer
path, context, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def size(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
edgeinfer.load(path, context=64, threads=1).close()
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (size("VmSize:") + limit, -1))
before = size("VmHWM:")
try:
    edgeinfer.load(path, context=context, threads=1)
except edgeinfer.errors.MemoryLimitError as error:
    print(error.need > error.available, size("VmHWM:") - before < 20 << 20)
edgeinfer.load(path, context=64, threads=1).close()
print(edgeinfer.load(path, context=64, threads=1).generate("hello", max_tokens=3).finish_reason)
"""
    for context, limit, refused in ((1 << 23, 0, True), (1 << 16, 300 << 20, True), (1 << 14, 500 << 20, False)):
        done = run("import edgeinfer.errors\n" + script, path, context, limit, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), (context, limit)
        # the last one fits, though addresses for sixteen sequences do not
        assert done.stdout == ("True True\n" if refused else "") + "length\n", (context, limit)


def test_an_allocation_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment of loading: the typed error, and the next load works."""
    path = tiny.tiny_gguf(tmp_path / "m.gguf")
    for target in ("edgeinfer.model.Tokenizer.from_metadata", "edgeinfer.model.Program", "edgeinfer.kv._reserved"):

        def failing(*args: Any, **options: Any) -> Any:
            raise OSError(12, "Cannot allocate memory") if target.endswith("reserved") else MemoryError  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(target, failing)
            with pytest.raises(MemoryLimitError):
                edgeinfer.load(path, threads=2)
        edgeinfer.load(path, threads=2).close()


def test_limits_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_GROUP", tmp_path)
    free = machine.available_memory()
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    assert machine.available_memory() == 100_000
    (tmp_path / "memory.stat").write_text("anon 1\nfile 700000\ninactive_file 600000\nactive_file 100000\n")
    assert machine.available_memory() == 700_000  # files that were read are dropped when memory is wanted
    (tmp_path / "memory.max").write_text("max\n")
    assert free is None or machine.available_memory() > free / 2
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").unlink()
    assert machine.available_memory() == 0


@pytest.mark.parametrize("quota, most", [("100000 100000", 1), ("50000 100000", 1), ("max 100000", 10**6), ("160000 100000", 2)])
def test_threads_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, most: int) -> None:
    monkeypatch.setattr(machine, "_GROUP", tmp_path)
    (tmp_path / "cpu.max").write_text(quota)
    assert 1 <= machine.default_threads() <= most
