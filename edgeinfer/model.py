"""A loaded model: its file, tokenizer, recorded program and KV cache. Sessions and replies borrow it."""

from __future__ import annotations

import math
import os
import reprlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from edgeinfer import machine
from edgeinfer.config import ModelConfig
from edgeinfer.errors import ContextLengthError, MemoryLimitError, ModelFormatError, TemplateError
from edgeinfer.formats.gguf import GGUF, open_gguf
from edgeinfer.formats.tokenizer import Tokenizer
from edgeinfer.kernels.builder import Builder
from edgeinfer.kernels.jit import Code, code
from edgeinfer.kernels.levels import LEVELS, host_features, native_level
from edgeinfer.kernels.locks import ForkSafeLock
from edgeinfer.kernels.program import Program
from edgeinfer.kernels.step import Step
from edgeinfer.kernels.team import Cancelled
from edgeinfer.kv import KVCache
from edgeinfer.library import resolve
from edgeinfer.models._transformer import Network
from edgeinfer.planning import DEFAULT_CHUNK, WANTED_ROWS, choose_context, is_count, plan, plan_for
from edgeinfer.reply import Reply
from edgeinfer.sampling import SamplingParams
from edgeinfer.session import Session
from edgeinfer.weights import ROPE_FACTORS, FileWeights, check_tensors

if TYPE_CHECKING:
    from edgeinfer.formats.chat import ChatTemplate
    from edgeinfer.kernels.builder import Op

MAX_CHUNK = 1024  # more would let a single call of a kernel run for longer than a cancellation may wait

Progress = Callable[[str, float], None]
_StepRows = tuple[np.ndarray, np.ndarray, np.ndarray]


def load(model: str | os.PathLike[str], *, threads: int | None = None, context: int | None = None,
         chunk: int = DEFAULT_CHUNK, download: bool = False, progress: Progress | None = None,
         level: str | None = None) -> Model:  # fmt: skip
    """Load a model: a GGUF file's path, a known name, or a file in the cache.

    threads: default one a physical core. context: most tokens of a sequence, default what the model was trained for, at
    most 4096. chunk: most tokens of one step; results do not depend on it. download: fetch a known name that is missing.
    progress(stage, fraction): called while kernels compile ("kernels") and weights are packed ("weights").
    level: a SIMD level of kernels.levels, default the fastest this processor has; results do not depend on it.

    Raises ModelNotFoundError, DownloadError, ModelFormatError, TokenizerError, TemplateError, MemoryLimitError (before
    anything large is allocated), ValueError for options out of range.
    """
    begun = time.perf_counter()
    path = resolve(model, download=download)
    file = open_gguf(path)
    try:
        return Model(file, Path(path), threads, context, chunk, progress, level, begun)
    except MemoryError:  # a limit that the plan did not foresee
        file.close()
        needed = plan(path, context, chunk)
        raise MemoryLimitError(needed.total, needed.available or 0) from None
    except BaseException:
        file.close()
        raise


class Model:
    """Made by load(). A context manager; close() frees memory at once. Safe to use from several threads.

    Attributes: path, name, config, tokenizer, chat_template (ChatTemplate, or None where the file has none), context,
    chunk, threads, n_vocab, level (of SIMD), load_seconds, compiled (kernels that were not in the cache).
    """

    def __init__(self, file: GGUF, path: Path, threads: int | None, context: int | None, chunk: int,
                 progress: Progress | None, level: str | None, begun: float) -> None:  # fmt: skip
        self.path, self._file = path, file
        self.config = ModelConfig.from_gguf(file)
        check_tensors(file, self.config)
        self.context = choose_context(self.config, context)
        if not is_count(chunk, MAX_CHUNK):
            raise ValueError(f"a chunk of {chunk} tokens; expected 1 to {MAX_CHUNK}")
        self.chunk = min(chunk, self.context)
        self.threads = machine.default_threads() if threads is None else threads
        if not is_count(self.threads, 256):
            raise ValueError(f"{threads} threads; expected 1 to 256")
        if level is not None and (not isinstance(level, str) or level not in LEVELS):
            raise ValueError(f"SIMD level {level!r}; known are {', '.join(LEVELS)}")
        if level is not None and not LEVELS[level].runs_here:
            missing = sorted(set(LEVELS[level].needs) - host_features())
            raise ValueError(f"SIMD level {level!r} needs {', '.join(missing)}, which this processor does not have")
        plan_for(file, self.config, self.context, self.chunk).require()
        kernels = code(LEVELS[level] if level else native_level())
        self.level = kernels.level.name
        pack_progress = (lambda done: progress("weights", done)) if progress else None
        with FileWeights(file, kernels, self.threads, pack_progress) as weights:
            self._prepare(weights, kernels, progress)
        self._bandwidth: float | None = None
        self._steps = ForkSafeLock()  # the rotary tables grow between steps
        self._closing = ForkSafeLock()
        self.load_seconds = time.perf_counter() - begun

    def _prepare(self, weights: FileWeights, kernels: Code, progress: Progress | None) -> None:
        """Everything else that a model has, while its weights are being packed."""
        file = self._file
        self.tokenizer = Tokenizer.from_metadata(file.metadata, file.path)
        self.n_vocab = self.tokenizer.n_vocab
        if self.n_vocab > self.config.vocabulary:
            raise ModelFormatError(
                file.path, f"the tokenizer has {self.n_vocab} tokens and token_embd.weight {self.config.vocabulary} rows"
            )
        self.chat_template = _template(file, self.tokenizer)
        name = file.metadata.get("general.name")
        self.name = name if isinstance(name, str) and name else self.path.stem
        already = len(kernels.compiled)
        self._cache = KVCache(self.config, self.context, self.chunk)
        self._program, self._network = self._record(kernels, weights, progress)
        self.compiled = kernels.compiled[already:]

    def _record(self, kernels: Code, weights: FileWeights, progress: Progress | None) -> tuple[Program, Network]:
        file, config = self._file, self.config
        builder = Builder(kernels, weights, Step(self.chunk, min(WANTED_ROWS, self.chunk)), self._cache.layers())
        factors = file.array(ROPE_FACTORS) if ROPE_FACTORS in file.tensors else None
        if factors is not None and not (np.isfinite(factors) & (factors > 0)).all():
            raise ModelFormatError(file.path, f"{ROPE_FACTORS} holds values that divide no frequency; expected positive ones")
        if factors is not None and any(rope.scaling.kind == "llama3" for rope in config.ropes):
            raise ModelFormatError(file.path, f"{ROPE_FACTORS} and llama3 rope scaling both: frequencies would be scaled twice")
        try:
            network = Network(config, builder, self.context, "output.weight" not in file.tensors, factors)
            import_module(f"edgeinfer.models.{config.architecture}").describe(network)
        except ValueError as error:
            raise ModelFormatError(file.path, str(error)) from error
        weights.finish()
        builder.compile((lambda done: progress("kernels", done)) if progress else None)
        return Program(builder, self.threads, partial(_embeddings, file, config.embedding_scale), config.vocabulary), network

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is running, wait for it, and free the memory."""
        with self._closing:
            if self._program.closed:
                return
            self._program.close()
            self._cache.free()
            self._file.close()
            with self._steps:
                del self._network

    @property
    def closed(self) -> bool:
        return self._program.closed

    def generate(self, prompt: str | Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = (),
                 **sampling: Any) -> Reply:  # fmt: skip
        """Continue a raw prompt (text, whose control tokens count, or token ids) to the end. See stream()."""
        reply = self.stream(prompt, max_tokens=max_tokens, stop=stop, **sampling)
        for _ in reply:
            pass
        return reply

    def stream(self, prompt: str | Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = (),
               **sampling: Any) -> Reply:  # fmt: skip
        """A Reply that continues a raw prompt as it is iterated.

        max_tokens: at most so many, default what the context leaves. stop: strings that end the text. sampling: fields of
        SamplingParams (temperature, top_k, seed, ...). Raises ContextLengthError, ValueError.
        """
        ids = self.tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else token_ids(prompt)
        return Reply(self, ids, None, max_tokens, stop, SamplingParams(**sampling))

    def session(self, context: int | None = None, system: str | None = None) -> Session:
        """A chat, in the model's own template. context: most tokens of the conversation, default the model's."""
        if self.chat_template is None:
            raise TemplateError(f"{self.path}: the file has no chat template; continue raw text with generate() (run --raw)")
        return Session(self, self.chat_template, context, system)

    def logits(self, ids: Sequence[int] | Sequence[Sequence[int]]) -> Any:
        """Logits of one fresh pass: float32 (len(ids), vocabulary). For a list of id lists, one batch, a list of such arrays."""
        if len(ids) and isinstance(ids[0], Sequence):
            return self._logits([token_ids(row) for row in cast("Sequence[Sequence[int]]", ids)])
        return self._logits([token_ids(ids)])[0]

    def _logits(self, batch: list[list[int]]) -> list[np.ndarray]:
        for ids in batch:
            self.check_length(len(ids))
            self.check_ids(ids)
        if self.closed:
            raise ValueError("the model is closed")
        out = [np.empty((len(ids), self.config.vocabulary), np.float32) for ids in batch]
        sequences = []
        try:
            for ids in batch:
                sequences.append(self._cache.open())
                self._cache.reserve(sequences[-1], len(ids))
            rows = [(b, i) for b, ids in enumerate(batch) for i in range(len(ids))]
            for first in range(0, len(rows), self.chunk):
                part = rows[first : first + self.chunk]

                def take(start: int, logits: np.ndarray, part: list[tuple[int, int]] = part) -> None:
                    for (b, i), row in zip(part[start:], logits, strict=False):
                        out[b][i] = row

                self.step(
                    [batch[b][i] for b, i in part], [i for _, i in part], [sequences[b].index for b, _ in part],
                    range(len(part)), take,
                )  # fmt: skip
        except Cancelled as error:
            raise ValueError(str(error)) from None
        finally:
            for sequence in sequences:
                self._cache.close(sequence)
        return out

    def step(self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int],
             take: Callable[[int, np.ndarray], None], cancelled: threading.Event | None = None) -> None:  # fmt: skip
        """One step of the program, for sequences whose pages are reserved. See kernels.program.Program.forward.

        Raises Cancelled once `cancelled` is set or the model is closed.
        """
        self._program.forward(*self._checked(tokens, positions, sequences), wanted, take, cancelled)

    def time_ops(self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int],
                 wanted: int) -> list[tuple[Op, float]]:  # fmt: skip
        """The ops of such a step that wants its last rows, each with the seconds it takes alone. See Program.time_ops."""
        return self._program.time_ops(*self._checked(tokens, positions, sequences), wanted)

    def _checked(self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int]) -> _StepRows:
        """A step's rows as int64 arrays, once their sequences have pages and the rotary tables reach their positions."""
        rows = (np.asarray(tokens, np.int64), np.asarray(positions, np.int64), np.asarray(sequences, np.int64))
        with self._steps:
            if self._program.closed:
                raise Cancelled("the model is closed")
            self._cache.check(rows[2], rows[1])
            for table in self._network.tables.values():
                table.reach(int(rows[1].max()) + 1)
        return rows

    def check_length(self, tokens: int) -> None:
        """Raises ContextLengthError for a prompt that does not fit, ValueError for an empty one."""
        if tokens == 0:
            raise ValueError("the prompt is empty: it has no tokens")
        if tokens > self.context:
            raise ContextLengthError(tokens, self.context)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raises ValueError for a token id outside the vocabulary."""
        outside = next((token for token in ids if not 0 <= token < self.config.vocabulary), None)
        if outside is not None:
            raise ValueError(f"token {outside} is outside the vocabulary of {self.config.vocabulary}")

    @property
    def cache(self) -> KVCache:
        return self._cache

    def stop_step(self) -> None:
        """Wake a step that is running, so that it sees its cancellation."""
        self._program.stop()

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights: what decoding a token reads."""
        return self._program.weight_bytes

    def read_bandwidth(self) -> float:
        """Bytes per second at which the model's threads can read its weights, measured now. ValueError once closed."""
        if self.closed:
            raise ValueError("the model is closed")
        return self._program.read_bandwidth()

    def bandwidth_share(self, tokens_per_second: float) -> float | None:
        """Which share of the memory's read bandwidth one-row decoding at that speed uses; measured once, on the weights.

        None when the model was closed before it was measured.
        """
        with self._closing:
            while self._bandwidth is None and not self.closed:
                with suppress(Cancelled):  # meant for a reply
                    self._bandwidth = self.read_bandwidth()
        if self._bandwidth is None:
            return None
        share = tokens_per_second * self.weight_bytes / self._bandwidth
        return share if math.isfinite(share) else 0.0


def token_ids(ids: object) -> list[int]:
    """Token ids as a list. Raises ValueError for anything else than whole numbers in a sequence."""
    if isinstance(ids, (Sequence, np.ndarray)) and not isinstance(ids, (str, bytes)):
        if all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in ids):
            return [int(i) for i in ids]
    raise ValueError(f"a prompt is a text or a list of token ids; found {reprlib.repr(ids)}")


def _embeddings(file: GGUF, scale: float, tokens: np.ndarray) -> np.ndarray:
    """f32 (n, embedding) of token ids, decoded from the file's own rows."""
    rows = file.tensors["token_embd.weight"].type.decode(file.raw("token_embd.weight")[tokens])
    return rows if scale == 1.0 else rows * np.float32(scale)


def _template(file: GGUF, tokenizer: Tokenizer) -> ChatTemplate | None:
    if "tokenizer.chat_template" not in file.metadata:
        return None
    from edgeinfer.formats.chat import ChatTemplate  # brings Jinja, which raw prompts do not need

    return ChatTemplate.from_metadata(file.metadata, tokenizer, file.path)
