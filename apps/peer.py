"""llama.cpp in a process of its own, on the same file, to take turns with: `edgeinfer bench --peer`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from edgeinfer.bench import Sampler

_SCRIPT = """
import json, sys, time
from llama_cpp import Llama, __version__
path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)
ids = [(i * 7919) % model.n_vocab() for i in range(context)]
print(json.dumps(__version__), flush=True)
for line in sys.stdin:
    kind, n, depth = json.loads(line)
    begun = time.perf_counter()
    if kind == "read":
        model.reset()
        if n:
            model.eval(ids[:n])
    else:
        model.n_tokens = depth
        for i in range(depth, depth + n):
            model.eval(ids[i : i + 1])
    print(json.dumps(n / (time.perf_counter() - begun)), flush=True)
"""


class Peer:
    """llama-cpp-python in a process of its own, one question at a time; its stages are those of edgeinfer.bench."""

    def __init__(self, python: str, path: Path, threads: int, context: int) -> None:
        self._errors = tempfile.TemporaryFile()
        command = [python, "-c", _SCRIPT, str(path), str(threads), str(context)]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"--peer-python {python}: {error.strerror}") from None
        try:
            self.version = str(self._answer())
        except EOFError as error:
            raise typer.BadParameter(
                f"llama-cpp-python cannot be used by {python}: {error}; install it there, or name another with --peer-python"
            ) from None

    def close(self) -> None:
        self._process.kill()  # it holds nothing that must be saved
        self._process.communicate()
        self._errors.close()

    def prefill(self, tokens: int) -> Sampler:
        return lambda: self._ask("read", tokens, 0)

    def decode(self, tokens: int, depth: int) -> Sampler:
        self._ask("read", depth, 0)
        return lambda: self._ask("decode", tokens, depth)

    def _ask(self, kind: str, tokens: int, depth: int) -> float:
        from edgeinfer.errors import EdgeInferError

        try:
            if self._process.stdin:
                print(json.dumps([kind, tokens, depth]), file=self._process.stdin, flush=True)
            return float(self._answer())
        except (EOFError, BrokenPipeError) as error:
            raise EdgeInferError(f"llama-cpp-python ended while it was measured: {error}") from None

    def _answer(self) -> Any:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if line:
            return json.loads(line)
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        raise EOFError(said[-1] if said else f"exit code {self._process.returncode}")


@contextmanager
def beside(python: str | None, path: Path, threads: int, context: int) -> Iterator[Peer | None]:
    """llama.cpp with the model loaded, by an interpreter that has llama-cpp-python; None where none is asked for."""
    if python is None:
        yield None
        return
    peer = Peer(python, path, threads, context)
    try:
        yield peer
    finally:
        peer.close()
