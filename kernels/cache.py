"""Where this package keeps what can be made or fetched again: compiled kernels, measurements, downloaded models."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path


def cache_root() -> Path:
    """The folder for what can be made again: $EDGEINFER_CACHE, or the platform's place for caches."""
    chosen = os.environ.get("EDGEINFER_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "edgeinfer"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "edgeinfer"
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "edgeinfer"  # XDG: relative paths count not


def private_folder(path: Path) -> Path | None:
    """Create `path` for this user alone (0700) and return it, or None where it cannot be made or others may write to it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(status.st_mode):
        return None
    if os.name == "posix" and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        return None
    return path if os.access(path, os.W_OK) else None
