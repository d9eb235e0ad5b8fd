"""The same logits, bit for bit, whatever computes them: threads, chunks of a prompt, SIMD level, company in the batch."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import DownloadError
from edgeinfer.formats.gguf import open_gguf
from edgeinfer.kernels.levels import LEVELS, host_features
from edgeinfer.library import resolve
from edgeinfer.reply import Sampler

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
assert _spec and _spec.loader
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

CONTEXT = 512
RUNNABLE = [name for name, level in LEVELS.items() if host_features().issuperset(level.needs)]
EVERY = list(itertools.product((1, 2, 3), (1, 7, 64, 512), RUNNABLE))  # threads, chunk, level
# each value of one option beside several of the others
SOME = [(1, 512, RUNNABLE[0]), (2, 1, RUNNABLE[0]), (3, 7, RUNNABLE[0]), (2, 64, RUNNABLE[0])]
SOME += [run for level in RUNNABLE[1:] for run in ((1, 7, level), (2, 1, level), (3, 64, level), (2, 512, level))]
PLAIN_TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"]
WIDE_TYPES = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]
WIDE = {"embedding": 256, "head_dim": 64, "ffn": 512}


def write(folder: Path, type: str = "Q4_1", **options: Any) -> Path:
    wide = WIDE if type in WIDE_TYPES else {}
    path: Path = tiny.tiny_gguf(folder / "model.gguf", type=type, context=CONTEXT, **{**wide, **options})
    return path


def prompt(n: int, seed: int = 5) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 256, n)]


def digest(logits: np.ndarray) -> str:
    assert logits.dtype == np.float32 and np.isfinite(logits).all() and logits.std() > 0.01
    return hashlib.sha256(logits.tobytes()).hexdigest()


def digests(path: Path, ids: list[int], runs: list[tuple[int, int, str]]) -> dict[tuple[int, int, str], str]:
    found = {}
    for threads, chunk, level in runs:
        with edgeinfer.load(path, threads=threads, chunk=chunk, level=level) as model:
            found[threads, chunk, level] = digest(model.logits(ids))
    return found


@pytest.mark.parametrize("type", PLAIN_TYPES + WIDE_TYPES)
def test_every_block_type(tmp_path: Path, type: str) -> None:
    found = digests(write(tmp_path, type), prompt(70), SOME)
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize(
    "architecture, type, options",
    [
        ("llama", "Q4_1", {}),
        ("llama", "Q4_0", {"window": 24, "heads": 6, "kv_heads": 2, "embedding": 96, "tied": False}),
        ("qwen2", "Q8_0", {"heads": 6, "kv_heads": 1, "embedding": 96}),
        ("qwen3", "Q4_0", {"head_dim": 32}),
        ("gemma3", "Q5_1", {"layers": 7, "window": 20}),
    ],
)
def test_all_combinations(tmp_path: Path, architecture: str, type: str, options: dict[str, Any]) -> None:
    path = write(tmp_path, type, architecture=architecture, **options)
    found = digests(path, prompt(150), EVERY)
    assert len(set(found.values())) == 1, found


def test_the_digest_tells_models_apart(tmp_path: Path) -> None:
    """Else the tests above would pass on constants."""
    first, second = write(tmp_path, seed=1), tiny.tiny_gguf(tmp_path / "b.gguf", type="Q4_1", context=CONTEXT, seed=2)
    run = [(1, 64, RUNNABLE[0])]
    assert digests(first, prompt(20), run) != digests(second, prompt(20), run)
    assert digests(first, prompt(20), run) != digests(first, prompt(20, seed=6), run)


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_alone_or_among_others(tmp_path: Path, architecture: str, chunk: int) -> None:
    batch = [prompt(n, seed=n) for n in (1, 65, 13, 130, 64)]
    with edgeinfer.load(write(tmp_path, architecture=architecture), threads=2, chunk=chunk) as model:
        alone = [digest(model.logits(ids)) for ids in batch]
        assert [digest(logits) for logits in model.logits(batch)] == alone
        assert [digest(logits) for logits in model.logits(batch[::-1])] == alone[::-1]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """(position, digest) of every row of logits that a token is sampled from."""
    rows: list[tuple[int, str]] = []
    sample = Sampler.sample

    def recorded(self: Sampler, logits: np.ndarray, history: Any, position: int) -> int:
        rows.append((position, hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()))
        return sample(self, logits, history, position)

    monkeypatch.setattr(Sampler, "sample", recorded)
    yield rows


@pytest.mark.parametrize("architecture, window", [("llama", None), ("gemma3", 16), ("gemma3", 100)])
def test_a_cached_turn_is_a_cold_run(
    tmp_path: Path, seen: list[tuple[int, str]], architecture: str, window: int | None
) -> None:
    path = write(tmp_path, architecture=architecture, window=window, layers=6 if window else 2)
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "seed": 3}
    with edgeinfer.load(path, threads=2, chunk=32) as model, model.session() as chat:
        for text in ("the first question", "and then another one", "and the last"):
            ids = model.tokenizer.encode(chat.render(text), special=True)
            seen.clear()
            reply = chat.send(text, **options)
            list(reply)
            warm = list(seen)
            seen.clear()
            cold = model.generate(ids, **options)
            assert seen == warm and cold.tokens == reply.tokens and cold.text == reply.text
        assert reply.cached_tokens > 0 or window == 16  # a ring may have dropped what the shared text needs


def test_generated_tokens_depend_on_the_seed_alone(tmp_path: Path) -> None:
    path = write(tmp_path)
    tokens = set()
    for threads, chunk, level in SOME:
        with edgeinfer.load(path, threads=threads, chunk=chunk, level=level) as model:
            reply = model.generate(prompt(40), max_tokens=60, temperature=1.0, top_p=0.95, seed=42)
            assert reply.seed == 42
            tokens.add(tuple(reply.tokens))
            other = model.generate(prompt(40), max_tokens=60, temperature=1.0, top_p=0.95, seed=43)
            assert tuple(other.tokens) not in tokens
    assert len(tokens) == 1


@pytest.mark.slow
@pytest.mark.model
def test_smollm2(tmp_path: Path) -> None:
    try:
        path = resolve("smollm2-135m", download=True)
    except DownloadError as error:
        pytest.skip(str(error))
    with open_gguf(path) as file:
        tokenizer = edgeinfer.model.Tokenizer.from_metadata(file.metadata, path)
    ids = tokenizer.encode("The sky above the harbour was the colour of wet slate, and nobody had slept. " * 7)[:100]
    found = digests(path, ids, EVERY)
    assert len(ids) == 100 and len(set(found.values())) == 1, found
