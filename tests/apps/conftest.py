"""The `edgeinfer` command over a scripted model: as a child with pipes, or in a pseudo-terminal."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT_MODEL = Path(__file__).with_name("script_model.py")


class Command:
    """Builds and runs child processes; `events` is what the scripted model saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = str(folder / "model.gguf")
        Path(self.model).write_bytes(b"GGUF")
        self.script: dict[str, Any] = {"log": str(folder / "log")}
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "200", "TERM": "xterm"}

    def argv(self, *arguments: str) -> list[str]:
        self.environment["SCRIPT"] = json.dumps(self.script)
        return [sys.executable, str(SCRIPT_MODEL), *arguments]

    def __call__(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.argv(*arguments), input=stdin, capture_output=True, timeout=60, env=self.environment, cwd=self.folder
        )

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.argv(*arguments), stdin=pipe, stdout=pipe, stderr=pipe, env=self.environment, cwd=self.folder
        )

    @property
    def events(self) -> list[dict[str, Any]]:
        path = Path(self.script["log"])
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []

    @property
    def sent(self) -> list[str]:
        return [event["send"] for event in self.events if "send" in event]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


class Terminal:
    """A child process in a pseudo-terminal, whose Ctrl-C is a real one."""

    def __init__(self, command: Command, *arguments: str) -> None:
        import pty

        argv = command.argv(*arguments)
        environment = {**command.environment, "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.chdir(command.folder)
            os.execve(argv[0], argv, environment)
        self.seen = ""
        self.code: int | None = None

    def expect(self, text: str, timeout: float = 30.0) -> str:
        """Wait until `text` appears; what came until then, and forget it."""
        end = time.monotonic() + timeout
        while text not in self.seen:
            if not self._read(end - time.monotonic()):
                raise AssertionError(f"{text!r} did not appear in {self.seen!r}")
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait(self, timeout: float = 30.0) -> int:
        """The exit code."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                return self.code
            self._read(0.05)
        raise AssertionError(f"still running; seen: {self.seen!r}")

    def _read(self, timeout: float) -> bool:
        if timeout <= 0 or not select.select([self.descriptor], [], [], timeout)[0]:
            return False
        try:
            self.seen += os.read(self.descriptor, 65536).decode("utf-8", "replace")
        except OSError:  # Linux's end of file
            return False
        return True

    def close(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.descriptor)


@pytest.fixture
def terminal(command: Command) -> Iterator[Callable[..., Terminal]]:
    if sys.platform == "win32":
        pytest.skip("pseudo-terminals of POSIX")
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(command, *arguments))
        return opened[-1]

    yield start
    for child in opened:
        child.close()
