"""A stand-in model that says what a script tells it, so that the commands can be tried without weights.

As a program it is the `edgeinfer` command over such a model; the environment variable SCRIPT holds the script as JSON:
pieces, delay (seconds before each), template (false: the file has none), error (a class of edgeinfer.errors, raised by
load) and log (a file that gets one JSON line per event: what was loaded, sent and asked for).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer import errors


@dataclass
class Script:
    pieces: list[str] = field(default_factory=lambda: ["Hello", " there", "."])
    delay: float = 0.0
    template: bool = True
    error: str = ""
    log: str = ""

    def note(self, **event: Any) -> None:
        if self.log:
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")


@dataclass
class Timings:
    load_s: float = 0.5
    ttft_s: float = 0.25
    prefill_tps: float = 1000.0
    decode_tps: float = 200.0
    prompt_tokens: int = 7
    cached_tokens: int = 2
    generated_tokens: int = 3
    bandwidth_share: float | None = 0.5

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Reply:
    def __init__(self, script: Script, seed: int) -> None:
        self._script, self.seed = script, seed
        self.text, self.finish_reason = "", "stop"
        self.tokens: list[int] = []
        self.timings = Timings()
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def __iter__(self) -> Iterator[str]:
        for number, piece in enumerate(self._script.pieces):
            until = time.monotonic() + self._script.delay
            while time.monotonic() < until and not self._cancelled:
                time.sleep(0.005)
            if self._cancelled:
                self.finish_reason = "cancelled"
                self._script.note(cancelled=True)
                return
            self.text += piece
            self.tokens.append(number)
            yield piece


class Session:
    def __init__(self, script: Script, system: str | None) -> None:
        self._script, self.system = script, system
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]

    def send(self, text: str, **options: Any) -> Reply:
        self._script.note(send=text, options=options)
        if text == "too long":
            raise errors.ContextLengthError(5000, 4096)
        self.messages.append({"role": "user", "content": text})
        return Reply(self._script, options["seed"] if options.get("seed") is not None else 42)

    def render(self, text: str) -> str:
        return f"<|user|>{text}<|end|>"

    def reset(self) -> None:
        self._script.note(reset=True)
        self.messages = self.messages[: self.system is not None]


class Model:
    name, context, path = "script", 4096, "script.gguf"

    def __init__(self, script: Script) -> None:
        self._script = script
        self.chat_template = "template" if script.template else None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self._script.note(closed=True)

    def session(self, context: int | None = None, system: str | None = None) -> Session:
        self._script.note(system=system)
        return Session(self._script, system)

    def stream(self, prompt: str, **options: Any) -> Reply:
        self._script.note(stream=prompt, options=options)
        return Reply(self._script, options["seed"] if options.get("seed") is not None else 42)


def loader(script: Script) -> Any:
    def load(path: Path, *, threads: int | None, context: int | None, progress: Any) -> Model:
        heavy = {"rich", "prompt_toolkit", "huggingface_hub", "urllib.request", "ssl"} & set(sys.modules)
        script.note(load=str(path), threads=threads, context=context, heavy=sorted(heavy))
        progress("kernels", 0.5)
        if script.error:
            raise {
                "ContextLengthError": lambda: errors.ContextLengthError(5000, 4096),
                "MemoryLimitError": lambda: errors.MemoryLimitError(2_000_000_000, 1_000_000_000),
                "ModelFormatError": lambda: errors.ModelFormatError("x.gguf", "bad magic", 0),
                "DiskSpaceError": lambda: errors.DiskSpaceError("/cache", 9_000_000, 1_000_000),
                "KeyboardInterrupt": KeyboardInterrupt,
                "MemoryError": MemoryError,
                "PermissionError": lambda: PermissionError(13, "Permission denied", "x.gguf"),
            }.get(script.error, lambda: getattr(errors, script.error)("it", "it broke"))()
        return Model(script)

    return load


if __name__ == "__main__":
    edgeinfer.load = loader(Script(**json.loads(os.environ.get("SCRIPT", "{}"))))  # type: ignore[attr-defined]
    from edgeinfer.apps.main import main

    main()
