"""The KV cache: pages handed out and taken back, rings of sliding windows, and sequences rolled back."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import kv
from edgeinfer.config import LayerRope, ModelConfig
from edgeinfer.kernels.pages import PAGE
from edgeinfer.kernels.team import Cancelled
from edgeinfer.kv import MAX_SEQUENCES, CacheSequence, KVCache, ring_pages, sequence_bytes
from edgeinfer.rope import RopeScaling

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
assert _spec and _spec.loader
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)


def config(windows: tuple[int, ...]) -> ModelConfig:
    rope = LayerRope(10000.0, RopeScaling())
    return ModelConfig(
        architecture="gemma3", vocabulary=288, layers=len(windows), embedding=64, feed_forward=96, heads=4, kv_heads=2,
        head_dim=16, rope_dims=16, epsilon=1e-5, context=4096, windows=windows, ropes=(rope,) * len(windows),
        attention_scale=0.25, embedding_scale=1.0,
    )  # fmt: skip


def advance(cache: KVCache, sequence: CacheSequence, tokens: int) -> None:
    """What a step that appends so many tokens does."""
    cache.reserve(sequence, sequence.length + tokens)
    sequence.length += tokens
    sequence.written = max(sequence.written, sequence.length)


def pages_of(cache: KVCache, sequence: CacheSequence) -> list[list[int]]:
    """For each layer, the pages that the sequence has."""
    used = -(-sequence.written // PAGE)
    return [place.table[sequence.index, : min(used, place.ring)].tolist() for place in cache.layers()]


# --- rings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 8, 63, 64, 65, 1000])
@pytest.mark.parametrize("step", [1, 7, 64, 65, 512])
def test_a_ring_holds_the_window_of_every_row_of_a_step(window: int, step: int) -> None:
    """However a step lies on the pages: its last row is written before its first one looks back."""
    ring = ring_pages(window, 1 << 20, step)
    for first in range(2000, 2000 + PAGE):
        last = first + step - 1
        oldest_kept_page = last // PAGE - ring + 1  # the page after it in the ring has just been overwritten
        assert first - window + 1 >= oldest_kept_page * PAGE
    assert (ring - 2) * PAGE < window + step  # and not much more than that


def test_a_ring_is_never_longer_than_the_context() -> None:
    assert ring_pages(0, 4096, 512) == 64
    assert ring_pages(0, 65, 512) == 2
    assert ring_pages(4000, 100, 512) == 2


def test_bytes_of_a_sequence() -> None:
    """Two full layers of 1000 tokens and three with a ring; keys and values in half precision."""
    token = 2 * 2 * 16 * 2  # keys and values, heads, values each, bytes
    assert sequence_bytes(config((8, 8, 8, 0, 0)), 1000, 64) == 2 * 1024 * token + 3 * 3 * PAGE * token


# --- pages -----------------------------------------------------------------------------------------------------------


def test_no_two_sequences_share_a_page() -> None:
    cache = KVCache(config((8, 0)), 256, 64)
    sequences = [cache.open() for _ in range(MAX_SEQUENCES)]
    assert sorted(s.index for s in sequences) == list(range(MAX_SEQUENCES))
    for sequence in sequences:
        advance(cache, sequence, 256)
    for layer in range(2):
        taken = [page for sequence in sequences for page in pages_of(cache, sequence)[layer]]
        place = cache.layers()[layer]
        assert len(set(taken)) == len(taken) == MAX_SEQUENCES * place.ring == len(place.arena)
    with pytest.raises(RuntimeError, match=f"{MAX_SEQUENCES} sequences are open"):
        cache.open()


def test_pages_come_with_the_tokens() -> None:
    cache = KVCache(config((0,)), 512, 64)
    free = len(cache._groups[0].free)
    sequence = cache.open()
    for tokens, pages in ((0, 0), (1, 1), (64, 1), (65, 2), (64, 2), (512, 8)):
        cache.reserve(sequence, tokens)
        assert free - len(cache._groups[0].free) == pages
    with pytest.raises(ValueError, match="513 tokens; the context holds 512"):
        cache.reserve(sequence, 513)
    cache.close(sequence)
    assert len(cache._groups[0].free) == free


def test_a_closed_sequences_memory_is_given_back() -> None:
    cache = KVCache(config((0,) * 16), 2048, 64)
    arena = cache.layers()[0].arena
    for _ in range(3):
        sequence = cache.open()
        advance(cache, sequence, 2048)
        pages = pages_of(cache, sequence)[0]
        arena[pages] = 7
        cache.close(sequence)
        assert not arena[pages].any()  # the system dropped it: zeros again
    assert (sequence.length, sequence.written, sequence.pages) == (0, 0, 0)


def test_a_freed_cache() -> None:
    cache = KVCache(config((0,)), 128, 64)
    sequence = cache.open()
    cache.reserve(sequence, 100)
    cache.free()
    cache.close(sequence)  # harmless
    with pytest.raises(ValueError, match="the model is closed"):
        cache.open()
    with pytest.raises(Cancelled, match="the model is closed"):  # as from a step: whoever generates sees one or the other
        cache.reserve(sequence, 100)


# --- going back ------------------------------------------------------------------------------------------------------


def test_rollback_of_a_full_cache() -> None:
    cache = KVCache(config((0,)), 512, 64)
    sequence = cache.open()
    advance(cache, sequence, 500)
    cache.rollback(sequence, 500)
    cache.rollback(sequence, 3)
    assert sequence.length == 3
    for length in (4, -1):
        with pytest.raises(ValueError):
            cache.rollback(sequence, length)
    cache.rollback(sequence, 0)


def test_rollback_of_a_ring_counts_what_was_ever_written() -> None:
    """Tokens that were rolled back, or belong to a cancelled step, have pushed older ones out all the same."""
    window, step = 16, 16
    cache = KVCache(config((window,)), 4096, step)
    kept = cache.layers()[0].ring * PAGE
    sequence = cache.open()
    for _ in range(1000 // step):
        advance(cache, sequence, step)
    written = sequence.length
    lowest = written - kept + window - 1  # its window just reaches the oldest token that is left
    cache.rollback(sequence, lowest + 5)
    with pytest.raises(ValueError, match="have left the ring"):
        cache.rollback(sequence, lowest - 1)
    assert sequence.length == lowest + 5
    cache.rollback(sequence, lowest)
    cache.rollback(sequence, 0)
    assert sequence.written == 0
    advance(cache, sequence, step)
    cache.rollback(sequence, 1)


# --- through a model -------------------------------------------------------------------------------------------------


def ids_of(n: int, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 256, n)]


def logits(path: Path, ids: list[int], chunk: int) -> np.ndarray:
    with edgeinfer.load(path, threads=1, chunk=chunk) as model:
        return np.asarray(model.logits(ids))


@pytest.mark.parametrize("window", [8, 16, 63, 64])
def test_a_ring_with_any_chunking_is_a_full_cache(tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt runs several times around each ring."""
    path = tiny.tiny_gguf(tmp_path / "m.gguf", "gemma3", "F32", layers=6, window=window, context=1024)
    ids = ids_of(600)
    chunks = (1, 3, 8, 13, 32, 64)
    rings = [logits(path, ids, chunk) for chunk in chunks]
    assert all(ring_pages(window, 1024, chunk) * PAGE < 300 for chunk in chunks)
    monkeypatch.setattr(kv, "ring_pages", lambda window, context, step: -(-context // PAGE))
    full = logits(path, ids, 64)
    for ring in rings:
        assert (ring == full).all()


@pytest.mark.parametrize("window", [8, 40])
def test_a_token_sees_exactly_its_window(tmp_path: Path, window: int) -> None:
    """One layer: the logits at t change with the token at t - window + 1, and not with the one before it."""
    path = tiny.tiny_gguf(tmp_path / "m.gguf", "gemma3", "F32", layers=1, window=window, context=512)
    ids = ids_of(200)
    with edgeinfer.load(path, threads=1, chunk=16) as model:
        plain = model.logits(ids)
        for changed in (0, 5, 70, 150):
            other = list(ids)
            other[changed] = (other[changed] + 1) % 256
            differs = (model.logits(other) != plain).any(axis=1)
            assert np.flatnonzero(differs).tolist() == list(range(changed, min(changed + window, 200)))


@pytest.mark.parametrize("architecture, window", [("llama", None), ("gemma3", 16), ("gemma3", 100)])
def test_editing_a_long_conversation_again_and_again(tmp_path: Path, architecture: str, window: int | None) -> None:
    """Whatever of the cache is reused after rollbacks, cancelled replies and turns: the reply is that of a fresh run."""
    path = tiny.tiny_gguf(tmp_path / "m.gguf", architecture, layers=6, window=window, context=2048)
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 9}
    reused = 0
    random = np.random.default_rng(7)
    with edgeinfer.load(path, threads=2, chunk=16) as model, model.session() as chat:
        for turn in range(24):
            kind = turn % 4
            if kind == 1:
                chat.messages = chat.messages[:-2]  # edit the last turn
            if kind == 3:
                reply = chat.send("some words that are cut off " * 8, **options)
                next(reply, "")
                reply.cancel()
                chat.messages = chat.messages[: 2 * int(random.integers(0, len(chat.messages) // 2 + 1))]
            text = "the answer is in another word, " * int(random.integers(1, 7))
            expected = model.generate(model.tokenizer.encode(chat.render(text), special=True), **options)
            reply = chat.send(text, **options)
            assert "".join(reply) == expected.text and reply.tokens == expected.tokens
            reused += reply.cached_tokens
        assert reused > 300


def test_many_sequences_open_and_close(tmp_path: Path) -> None:
    path = tiny.tiny_gguf(tmp_path / "m.gguf")
    with edgeinfer.load(path, threads=1, chunk=64) as model:
        expected = model.logits(ids_of(40))
        chats = [model.session() for _ in range(MAX_SEQUENCES)]
        with pytest.raises(RuntimeError, match="close a session first"):
            model.session()
        with pytest.raises(RuntimeError, match="close a session first"):
            model.logits([1, 2, 3])
        chats[5].close()
        for _ in range(3 * MAX_SEQUENCES):
            assert (model.logits(ids_of(40)) == expected).all()
        with pytest.raises(RuntimeError):  # a batch that does not fit gives back what it took
            model.logits([[1], [2]])
        assert (model.logits(ids_of(40)) == expected).all()


def test_a_step_without_pages_is_refused(tmp_path: Path) -> None:
    """Kernels look up pages unchecked: a sequence or position that has none would read and write anywhere."""
    path = tiny.tiny_gguf(tmp_path / "model.gguf", type="Q4_0")
    with edgeinfer.load(path, threads=1) as model:
        sequence = model.cache.open()
        model.cache.reserve(sequence, 64)
        step = {"wanted": [0], "take": lambda first, logits: None}
        model.step([1], [63], [sequence.index], **step)
        for index, position in ((sequence.index, 64), (sequence.index, -1), (sequence.index + 1, 0), (-1, 0), (99, 0), (2**62, 0)):
            with pytest.raises(ValueError):
                model.step([1], [position], [index], **step)
        model.cache.close(sequence)
        with pytest.raises(ValueError):
            model.step([1], [0], [sequence.index], **step)
