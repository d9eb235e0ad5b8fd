"""The kernel cache: nothing compiles twice, and nothing is loaded that the user's own sources did not make."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.kernels import jit
from edgeinfer.kernels.cache import private_folder
from edgeinfer.kernels.catalogue import all_kernels
from edgeinfer.kernels.cpu import rows, walk
from edgeinfer.kernels.jit import Code, Kernel, cache_key, compile_kernel
from edgeinfer.kernels.levels import LEVELS, native_level

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parents[1] / "runtime" / "tiny.py")
assert _spec and _spec.loader
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

POSIX = pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
KERNELS = Path(jit.__file__).parent
LOAD = """
import json, sys
import edgeinfer
with edgeinfer.load(sys.argv[1], threads=1) as model:
    tokens = model.generate("hello", max_tokens=8).tokens
    print(json.dumps({"compiled": model.compiled, "tokens": tokens, "numba": "numba" in sys.modules}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tiny.tiny_gguf(tmp_path_factory.mktemp("model") / "model.gguf")
    return path


def start(model: Path, cache: Path, package: Path | None = None) -> subprocess.Popen[str]:
    """A fresh process that loads the model. package: a folder to import edgeinfer from."""
    environment = {**os.environ, "EDGEINFER_CACHE": str(cache)}
    if package:
        environment["PYTHONPATH"] = str(package)
    arguments = [sys.executable, "-B", "-c", LOAD, str(model)]
    return subprocess.Popen(
        arguments, env=environment, cwd=model.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    result: dict[str, Any] = json.loads(out)
    return result


def load(model: Path, cache: Path, package: Path | None = None) -> dict[str, Any]:
    return finish(start(model, cache, package))


@pytest.fixture(scope="module")
def filled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A cache that four processes filled at once, and what they reported."""
    cache = tmp_path_factory.mktemp("cache")
    results = [finish(p) for p in [start(model, cache) for _ in range(4)]]
    assert len({tuple(r["tokens"]) for r in results}) == 1
    compiled = sorted({name for r in results for name in r["compiled"]})  # some may have been there when another came
    assert len(compiled) > 5
    return cache, {**results[0], "compiled": compiled}


def objects(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_four_cold_processes_then_nothing_compiles(model: Path, filled: tuple[Path, dict[str, Any]]) -> None:
    cache, first = filled
    assert {path.name for path in objects(cache)} == set(first["compiled"])  # and no temporary file is left
    second = load(model, cache)
    assert second == {"compiled": [], "tokens": first["tokens"], "numba": False}


@POSIX
def test_the_cache_is_private(filled: tuple[Path, dict[str, Any]]) -> None:
    folders = [filled[0] / "kernels", *(path for path in filled[0].rglob("*") if path.is_dir())]
    assert len(folders) >= 2
    for path in folders:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in objects(filled[0]):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("spoil", ["empty", "half", "one bit", "no digest", "other kernel's", "other level's", "text"])
def test_a_spoiled_file_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    code, other_level = Code(native_level()), Code(LEVELS["plain"])
    assert code.folder and other_level.folder
    for kernel in (rows.TAKE, walk.BEGIN):
        code.address(kernel)
    body = (code.folder / "take").read_bytes()
    changed = bytearray(body)
    changed[len(body) // 2] ^= 1
    if spoil == "other level's":
        other_level.address(rows.TAKE)
        assert other_level.compiled == ["take"]
    spoiled = {"empty": b"", "half": body[: len(body) // 2], "one bit": bytes(changed), "no digest": body[32:],
               "other kernel's": (code.folder / "begin").read_bytes(), "text": b"#!/bin/sh\n",
               "other level's": (other_level.folder / "take").read_bytes() if spoil == "other level's" else b""}[spoil]  # fmt: skip
    (code.folder / "take").write_bytes(spoiled)
    second, third = Code(native_level()), Code(native_level())
    assert second.address(rows.TAKE) and second.address(walk.BEGIN) and second.compiled == ["take"]
    assert third.address(rows.TAKE) and third.compiled == []


def test_an_edited_helper_is_another_key(model: Path, tmp_path: Path) -> None:
    """A helper in a file of its own: what Numba's own cache does not notice."""
    package, cache = tmp_path / "package", tmp_path / "cache"
    _install(package)
    first = load(model, cache, package)
    assert len(first["compiled"]) > 5 and load(model, cache, package)["compiled"] == []
    helper = package / "edgeinfer" / "kernels" / "cpu" / "simd.py"
    helper.write_text(helper.read_text() + "\n# edited\n")
    assert load(model, cache, package) == first
    (helper.parent / "new_helper.py").write_text("")
    assert load(model, cache, package) == first


def _install(folder: Path) -> None:
    """A copy of the package with its rooms inside, as an installation has them."""
    root, ignore = Path(edgeinfer.__file__).parent, shutil.ignore_patterns("__pycache__")
    shutil.copytree(root, folder / "edgeinfer", ignore=ignore)
    for room in ("formats", "kernels"):
        source = Path(importlib.import_module(f"edgeinfer.{room}").__file__ or "").parent
        if source.parent != root:
            shutil.copytree(source, folder / "edgeinfer" / room, ignore=ignore)


def test_a_key_for_each_processor_version_and_level(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {cache_key(level) for level in LEVELS.values()}
    assert len(keys) == len(LEVELS)
    level = native_level()
    keys.add(before := cache_key(level))
    monkeypatch.setattr(jit, "host_features", lambda: frozenset({"sse2", "made-up"}))
    keys.add(cache_key(level))
    monkeypatch.setattr(jit.llvm, "get_process_triple", lambda: "riscv64-unknown-linux-gnu")
    keys.add(cache_key(level))
    monkeypatch.setattr(jit, "_compiler_versions", lambda: "0.0.1")
    keys.add(cache_key(level))
    assert len(keys) == len(LEVELS) + 3
    monkeypatch.undo()
    assert cache_key(level) == before


@POSIX
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722, 0o777, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    assert private_folder(folder) is None
    monkeypatch.setenv("EDGEINFER_CACHE", str(folder))
    assert Code(native_level()).folder is None
    folder.chmod(0o700)
    assert Code(native_level()).folder is not None
    (folder / "kernels").chmod(mode)  # between the root and the objects
    assert Code(native_level()).folder is None


@POSIX
def test_what_is_not_the_users_own_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    assert private_folder(mine) == mine
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(mine)
    file.write_text("")
    assert private_folder(link) is None
    assert private_folder(file) is None and private_folder(file / "below") is None
    monkeypatch.setattr(os, "geteuid", lambda: mine.stat().st_uid + 1)
    assert private_folder(mine) is None


@POSIX
def test_an_unusable_cache_only_costs_time(model: Path, filled: tuple[Path, dict[str, Any]]) -> None:
    result = load(model, Path("/dev/null/cache"))
    assert len(result["compiled"]) == len(filled[1]["compiled"]) and result["tokens"] == filled[1]["tokens"]


@POSIX
def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk or a read-only file system: the kernel is compiled in memory."""
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    code = Code(native_level())
    assert code.folder is not None

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jit.tempfile, "mkstemp", full)
    assert code.address(rows.TAKE) and code.compiled == ["take"]
    assert list(code.folder.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jit.os, "replace", full)
    jit._write_cached(tmp_path / "kernel", b"body")
    assert list(tmp_path.iterdir()) == []


def test_nothing_here_unpickles() -> None:
    """No object is rebuilt from the cache: its files are machine code behind a digest."""
    found = set()
    for path in KERNELS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    assert not found & {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def test_every_kernel_is_known() -> None:
    """Each Kernel bound to a name in a module is in all_kernels, which the next test compiles."""
    modules = [importlib.import_module(f"edgeinfer.kernels.cpu.{path.stem}") for path in (KERNELS / "cpu").glob("[a-z]*.py")]
    values = [value for module in modules for value in vars(module).values()]
    values += [kernel for value in values if isinstance(value, dict) for kernel in value.values()]
    names = {kernel.name for kernel in all_kernels(native_level())}
    assert {value.name for value in values if isinstance(value, Kernel)} <= names
    assert {"attention", "walk", "norm", "rope_neox", "gated_gelu", "matmul_q4_1", "matmul_mxfp4", "matmul_f32"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_every_kernel_compiles_at_every_level(level: str) -> None:
    """Also those that this processor cannot run. compile_kernel refuses undefined symbols."""
    for kernel in all_kernels(LEVELS[level]):
        assert len(compile_kernel(kernel, LEVELS[level])) > 100


def test_an_undefined_symbol_is_refused() -> None:
    from edgeinfer.kernels.cpu.simd import I64, Simd

    def stray(s: Simd) -> Any:
        return s.call("no_such_function", I64)

    def control() -> int:
        return stray()  # type: ignore[no-any-return, call-arg]

    with pytest.raises(jit.CompileError, match="no_such_function"):
        compile_kernel(Kernel("stray", control, (stray,)), native_level())
