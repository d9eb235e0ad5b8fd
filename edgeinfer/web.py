"""Bytes of a file, local or behind HTTP ranges, with the rules for whom to ask: redirects, credentials, retries."""

from __future__ import annotations

import http.client
import ipaddress
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from edgeinfer.errors import DownloadError

MAX_REDIRECTS = 5
TIMEOUT_S = 30.0
ATTEMPTS = 3  # in a row without a byte
RETRY_DELAY_S = 0.5
BLOCK_BYTES = 256 << 10

Origin = tuple[str, str, int]
"""Scheme, host, port."""


class Source(Protocol):
    name: str  # for messages
    size: int

    def blocks(self, start: int, stop: int) -> Iterator[bytes]:
        """Bytes [start, stop); fewer when the connection drops."""


class FileSource:
    def __init__(self, path: Path) -> None:
        self.name, self.path, self.size = str(path), path, path.stat().st_size

    def blocks(self, start: int, stop: int) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            file.seek(start)
            while start < stop and (block := file.read(min(BLOCK_BYTES, stop - start))):
                start += len(block)
                yield block


class HttpSource:
    """A file behind HTTP; without range support (`ranged` False) the bytes before `start` are read and dropped."""

    def __init__(self, url: str, web: Web) -> None:
        self.name, self._url, self._web = shown(url), url, web
        with web.get(url, {"Range": "bytes=0-0"}) as reply:
            self.ranged = reply.status == 206
            size = reply.headers.get("Content-Range", "").rpartition("/")[2] or reply.headers.get("Content-Length", "")
        if not size.isdecimal():
            raise DownloadError(self.name, "the server does not state the file's size")
        self.size = int(size)

    def blocks(self, start: int, stop: int) -> Iterator[bytes]:
        with self._web.get(self._url, {"Range": f"bytes={start}-{stop - 1}"} if self.ranged else {}) as reply:
            if self.ranged:
                as_promised = reply.headers.get("Content-Range") == f"bytes {start}-{stop - 1}/{self.size}"
            else:
                as_promised = reply.headers.get("Content-Length") == str(self.size)
            if not as_promised:
                raise DownloadError(self.name, "the server sent another range than asked for, or the file has changed")
            at = start if self.ranged else 0
            while at < stop and (block := reply.read(min(BLOCK_BYTES, (start if at < start else stop) - at))):
                at += len(block)
                if at > start:
                    yield block


def stream(source: Source, start: int, stop: int) -> Iterator[bytes]:
    """All bytes of [start, stop), reconnecting where a connection drops."""
    failures = 0
    while start < stop:
        before, reason = start, "the connection was closed early"
        try:
            for block in source.blocks(start, stop):
                start += len(block)
                yield block
        except (OSError, http.client.HTTPException) as error:
            reason = str(error)
        if start < stop:
            failures = failures + 1 if start == before else 0
            if failures == ATTEMPTS:
                raise DownloadError(source.name, f"{reason}; what has come is kept, and running again continues")
            time.sleep(RETRY_DELAY_S * failures)


class Web:
    """GET with at most five redirects, never from https to less, credentials for their own origin only."""

    def __init__(self, credentials: dict[Origin, str], cert: str | None = None, proxy: str | None = None) -> None:
        """`credentials`: the Authorization header of an origin; `cert`: a file of trusted certificates; `proxy`: a URL.

        Where the last two are None the system's settings hold.
        """
        self._credentials = credentials
        proxies = {"http": proxy, "https": proxy} if proxy else None
        self._opener = urllib.request.OpenerDirector()  # build_opener would add file:, ftp: and data:
        for handler in (
            urllib.request.ProxyHandler(proxies),
            urllib.request.UnknownHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(context=_tls_context(cert)),
            urllib.request.HTTPDefaultErrorHandler(),
            _Redirects(credentials),
            urllib.request.HTTPErrorProcessor(),
        ):
            self._opener.add_handler(handler)

    def get(self, url: str, headers: Mapping[str, str]) -> Any:
        """An open response, at status 200 or 206. Raises DownloadError."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "edgeinfer", **headers}
        request = urllib.request.Request(url, headers=headers)
        _authorize(request, self._credentials)
        reason = ""
        for attempt in range(ATTEMPTS):
            time.sleep(RETRY_DELAY_S * attempt)
            try:
                reply = self._opener.open(request, timeout=TIMEOUT_S)
            except urllib.error.HTTPError as error:
                error.close()
                reason = f"HTTP {error.code} {error.reason}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, http.client.HTTPException) as error:
                reason = str(getattr(error, "reason", error))
            else:
                if reply.headers.get("Content-Encoding", "identity") == "identity":
                    return reply
                reply.close()
                reason = "the server compresses what was asked for as it is"
        raise DownloadError(shown(url), reason)


def _tls_context(cert: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=cert)
    system = ssl.get_default_verify_paths()
    if cert is None and not (system.cafile or system.capath):  # a Python whose OpenSSL was given no certificates
        import certifi

        context.load_verify_locations(certifi.where())
    return context


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = max_repeats = MAX_REDIRECTS

    def __init__(self, credentials: dict[Origin, str]) -> None:
        self._credentials = credentials

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if problem := step_refused(req.full_url, newurl):
            raise DownloadError(shown(req.full_url), problem)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None:
            _authorize(request, self._credentials)
        return request


def step_refused(url: str, following: str) -> str:
    """Why one may not go from `url` to `following` (a redirect or a link on a page), or "" where one may."""
    old, new = urlsplit(url), urlsplit(following)
    if new.scheme != old.scheme and not (old.scheme in ("http", "file") and new.scheme == "https"):
        return f"leads from {old.scheme} to {new.scheme}: {shown(following)}"
    if _private(new.hostname) and not _private(old.hostname):
        return f"leads to a private address: {shown(following)}"
    return ""


def _private(host: str | None) -> bool:
    try:
        return host == "localhost" or not ipaddress.ip_address(host or "").is_global
    except ValueError:  # a name
        return False


def origin(url: str) -> Origin:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _authorize(request: urllib.request.Request, credentials: Mapping[Origin, str]) -> None:
    if authorization := credentials.get(origin(request.full_url)):
        request.add_unredirected_header("Authorization", authorization)


def shown(url: str) -> str:
    """A URL for a message: without credentials, and without the signatures that queries carry."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
