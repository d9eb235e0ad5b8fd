"""One answer being generated: prefill, then a token at a time, as the caller iterates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeinfer.kernels.team import Cancelled
from edgeinfer.kv import CacheSequence
from edgeinfer.sampling import Sampler, SamplingParams
from edgeinfer.text import TextStream

if TYPE_CHECKING:
    from edgeinfer.model import Model


@dataclass(frozen=True)
class Timings:
    """Seconds, tokens per second and token counts. None where there is nothing to divide."""

    load_s: float
    ttft_s: float | None
    prefill_tps: float | None
    decode_tps: float | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    bandwidth_share: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Cached:
    """What a session's sequence holds: the tokens whose keys and values are in its pages."""

    sequence: CacheSequence
    tokens: list[int]


class Reply:
    """Iterate it for pieces of text; afterwards text, tokens and finish_reason are complete. cancel() works from any thread.

    Attributes: text (so far), tokens (generated ids, the end token included), seed, prompt_tokens,
    finish_reason (None while running; then "stop", "length", "cancelled" or "error"), timings.
    """

    def __init__(self, model: Model, prompt: list[int], cached: Cached | None, max_tokens: int | None,
                 stop: Sequence[str], params: SamplingParams,
                 finished: Callable[[Reply], None] | None = None, limit: int | None = None) -> None:  # fmt: skip
        """cached: the sequence to continue, default one of its own. limit: most tokens of prompt and answer together."""
        if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0):
            raise ValueError(f"max_tokens is {max_tokens!r}; expected a whole number of 0 or more")
        model.check_length(len(prompt))
        if model.closed:
            raise ValueError("the model is closed")
        model.check_ids(prompt)
        room = (limit or model.context) - len(prompt)
        self._model, self._prompt, self._cached, self._finished = model, prompt, cached, finished
        self._room = room if max_tokens is None else min(room, max_tokens)
        self._sampler = Sampler(params, model.n_vocab)
        self._text = TextStream(model.tokenizer.token_bytes, stop)
        self._cancelled = threading.Event()
        self._pieces: list[str] = []
        self._advancing = threading.Lock()  # held while the generator runs
        self._generator: Generator[str, None, None] | None = None  # made on first use: it holds the reply, a cycle
        self.seed = self._sampler.seed
        self.tokens: list[int] = []
        self.prompt_tokens, self.cached_tokens = len(prompt), 0
        self.finish_reason: str | None = None
        self._begun = self._prefilled = self._last = 0.0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        with self._advancing:
            if self._generator is None:
                if self.finish_reason is not None:
                    raise StopIteration
                self._generator = self._run()
            piece = next(self._generator)
            self._pieces.append(piece)
            return piece

    def __del__(self) -> None:
        if getattr(self, "_generator", self) is None:
            self.cancel()

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def cancel(self) -> None:
        """End the reply now, in mid-step if need be; what was generated stays. One never begun leaves no trace."""
        self._cancelled.set()
        if not self._advancing.acquire(blocking=False):
            self._model.stop_step()  # it runs, and will see that it is cancelled
            return
        try:
            if self._generator is not None:
                self._generator.close()
            elif self.finish_reason is None:
                self._end()
        finally:
            self._advancing.release()

    @property
    def started(self) -> bool:
        return self._generator is not None

    def _end(self) -> None:
        if self.finish_reason is None:  # the caller stopped iterating
            self.finish_reason = "cancelled"
            self._pieces.append(self._text.finish())
        if self._finished:
            self._finished(self)

    @property
    def timings(self) -> Timings:
        new = self.prompt_tokens - self.cached_tokens
        n = len(self.tokens)
        prefill, decode = self._prefilled - self._begun, self._last - self._prefilled
        decode_tps = (n - 1) / decode if n > 1 and decode > 0 else None
        return Timings(
            load_s=self._model.load_seconds,
            ttft_s=prefill if n else None,
            prefill_tps=new / prefill if n and prefill > 0 else None,
            decode_tps=decode_tps,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=n,
            bandwidth_share=self._model.bandwidth_share(decode_tps) if decode_tps else None,
        )

    def _run(self) -> Generator[str, None, None]:
        own: Cached | None = None
        try:
            state = self._cached
            if state is None:
                state = own = Cached(self._model.cache.open(), [])
            for token in self._generate(state):
                if piece := self._text.push(token):
                    yield piece
                if self._text.stopped is not None:
                    break
            rest = self._text.finish()  # may complete a stop string that was waited for
            if self._text.stopped is not None:
                self.finish_reason = "stop"
            elif self.finish_reason is None:
                self.finish_reason = "cancelled" if self._cancelled.is_set() else "length"
            if rest:
                yield rest
        except Exception:
            self.finish_reason = "error"
            raise
        finally:
            if own is not None:
                self._model.cache.close(own.sequence)
            self._end()

    def _generate(self, state: Cached) -> Iterator[int]:
        """Yield tokens to show; sets finish_reason when the model ends its turn."""
        model = self._model
        self._begun = time.perf_counter()
        self.cached_tokens = _reuse(model, state, self._prompt)
        history = list(self._prompt)
        pending = self._prompt[self.cached_tokens :]
        try:
            while len(self.tokens) < self._room:
                logits = self._advance(state, pending)
                token = self._sampler.sample(logits[: model.n_vocab], history, len(history))
                self._last = time.perf_counter()
                if not self.tokens:
                    self._prefilled = self._last
                self.tokens.append(token)
                if token in model.tokenizer.eog_ids:
                    self.finish_reason = "stop"
                    return
                history.append(token)
                yield token
                if self._cancelled.is_set():
                    return
                pending = [token]
        except Cancelled:  # by cancel(), or because the model was closed
            self._cancelled.set()
            return

    def _advance(self, state: Cached, tokens: list[int]) -> np.ndarray:
        """Append tokens to the sequence, a chunk at a time; the last one's logits, f32 (vocabulary,)."""
        model, sequence = self._model, state.sequence
        out = np.empty(model.config.vocabulary, np.float32)

        def take(first: int, logits: np.ndarray) -> None:
            out[:] = logits[0]

        model.cache.reserve(sequence, sequence.length + len(tokens))
        for first in range(0, len(tokens), model.chunk):
            part = tokens[first : first + model.chunk]
            last = first + len(part) == len(tokens)
            positions = range(sequence.length, sequence.length + len(part))
            wanted = [len(part) - 1] if last else []
            sequence.written = max(sequence.written, sequence.length + len(part))
            model.step(part, positions, [sequence.index] * len(part), wanted, take, self._cancelled)
            sequence.length += len(part)
            state.tokens.extend(part)
        return out


def _reuse(model: Model, state: Cached, prompt: list[int]) -> int:
    """Roll the sequence back to what it shares with the prompt; how many tokens need not be read again.

    At least the last token is read, since its logits are wanted.
    """
    shared = 0
    for old, new in zip(state.tokens, prompt[:-1], strict=False):
        if old != new:
            break
        shared += 1
    try:
        model.cache.rollback(state.sequence, shared)
    except ValueError:  # a sliding window has dropped what the shared text would attend to
        model.cache.rollback(state.sequence, 0)
        shared = 0
    del state.tokens[shared:]
    return shared
