"""The shape of the repository: which room may import which, what ships, and what no file may hold."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# each room may import those left of it, and itself
ROOMS = ["formats", "kernels", "edgeinfer", "quantize", "apps"]
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "imp", "code", "codeop"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "print", "input", "breakpoint"}
BANNED_ATTRIBUTES = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("signal", "signal")}
LONGEST = 480  # lines; most are far shorter


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full module name of everything that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")
            if node.module == "edgeinfer":
                yield from ((node.lineno, f"edgeinfer.{alias.name}") for alias in node.names)


def room_of(module: str) -> str | None:
    """The room that a module of this package is in."""
    head, *rest = module.split(".")
    if head != "edgeinfer":
        return None
    return rest[0] if rest and rest[0] in ROOMS else "edgeinfer"


def packages() -> list[str]:
    """What pyproject.toml says that a wheel holds."""
    if sys.version_info < (3, 11):
        pytest.skip("needs tomllib")
    import tomllib

    listed: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    return listed


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 40 and {path.relative_to(ROOT).parts[0] for path in FILES} >= {"formats", "kernels", "edgeinfer", "apps"}


@pytest.mark.parametrize("path", FILES, ids=named)
def test_imports_point_to_the_left(path: Path) -> None:
    own = ROOMS.index(path.relative_to(ROOT).parts[0])
    for line, module in imports(path):
        assert not module.startswith("."), f"line {line}: relative import"
        head = module.partition(".")[0]
        assert head == "edgeinfer" or head not in ROOMS, f"line {line}: import edgeinfer.{module}, or it is loaded twice"
        if (room := room_of(module)) is not None:
            assert ROOMS.index(room) <= own, f"line {line}: {ROOMS[own]} may not import {module}"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_what_no_file_holds(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    in_apps = path.relative_to(ROOT).parts[0] == "apps"
    for _, module in imports(path):
        assert module.partition(".")[0] not in BANNED_MODULES
        assert "*" not in module
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names)
        if not isinstance(node, ast.Call):
            continue
        where = f"line {node.lineno}"
        if isinstance(node.func, ast.Name):
            assert node.func.id not in BANNED_CALLS or (in_apps and node.func.id in ("print", "input")), where
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and not in_apps:
            assert (node.func.value.id, node.func.attr) not in BANNED_ATTRIBUTES, where
        for keyword in node.keywords:
            on = not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
            assert not (keyword.arg in ("fastmath", "shell", "allow_pickle") and on), where


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_file_says_what_it_is_for(path: Path) -> None:
    text = path.read_text("utf-8")
    assert ast.get_docstring(ast.parse(text)), "a module docstring is missing"
    assert len(text.splitlines()) <= LONGEST
    if path.name == "__init__.py" and path.parent != ROOT / "edgeinfer":
        assert len(ast.parse(text).body) == 1, "a docstring and nothing else: others may import the folder by accident"


def test_every_package_ships() -> None:
    """A folder that is not listed works from the checkout and is missing from the wheel."""
    folders = {path.parent.relative_to(ROOT).parts for path in FILES}
    expected = {".".join(parts if parts[0] == "edgeinfer" else ("edgeinfer", *parts)) for parts in folders}
    assert set(packages()) == expected
    for path in {path.parent for path in FILES}:
        assert (path / "__init__.py").exists(), f"{path} is no package"


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))
