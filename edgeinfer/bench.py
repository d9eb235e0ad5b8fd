"""Measuring a loaded model: tokens a second, what each op of a step needs and takes, and what the machine can do at most.

Nothing here prints; `edgeinfer bench` (apps/bench.py) shows what it finds.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np

from edgeinfer.kernels import pages
from edgeinfer.kernels.builder import Op
from edgeinfer.kernels.cache import cache_root, private_folder
from edgeinfer.kernels.cpu import attention, matmul, peaks, rope
from edgeinfer.kernels.jit import cache_key, code
from edgeinfer.kernels.levels import LEVELS
from edgeinfer.kernels.packing import ROWS as TILE_ROWS
from edgeinfer.kernels.packing import SPAN
from edgeinfer.kernels.step import WANTED
from edgeinfer.model import Model

_KEEP_SECONDS = 24 * 3600
_PROFILES = 5
Sampler = Callable[[], float]  # one measurement: tokens per second


# --- tokens a second -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """Median of tokens per second, and spread: (largest - smallest) / median."""

    tps: float
    spread: float


def sample(sides: Sequence[Sampler], repeat: int) -> list[Speed]:
    """Let the sides take turns `repeat` times, after a round that warms up; the speed of each."""
    rounds = [[side() for side in sides] for _ in range(repeat + 1)][1:]
    medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
    spreads = [(max(values) - min(values)) / median for values, median in zip(zip(*rounds, strict=True), medians, strict=True)]
    return [Speed(median, spread) for median, spread in zip(medians, spreads, strict=True)]


class Sequences:
    """`batch` sequences of a model with room for `tokens` tokens each; steps on them may be repeated. A context manager.

    Raises ValueError for more sequences than the model's cache holds, or more tokens than its context.
    """

    def __init__(self, model: Model, batch: int, tokens: int) -> None:
        if batch > model.cache.sequences:
            raise ValueError(f"a batch of {batch} sequences; this model's cache holds {model.cache.sequences}")
        self._model, self._exit = model, ExitStack()
        self.indices: list[int] = []
        with ExitStack() as undo:
            for _ in range(batch):
                sequence = model.cache.open()
                undo.callback(model.cache.close, sequence)
                model.cache.reserve(sequence, tokens)
                self.indices.append(sequence.index)
            self._exit = undo.pop_all()

    def __enter__(self) -> Sequences:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def read(self, tokens: int) -> None:
        """Read `tokens` tokens from the first position on into each sequence, in the model's chunks."""
        for index in self.indices:
            for first in range(0, tokens, self._model.chunk):
                positions = range(first, min(first + self._model.chunk, tokens))
                last = [len(positions) - 1] if positions[-1] == tokens - 1 else []
                self._model.step(self._tokens(positions), positions, [index] * len(positions), last, _choose)

    def decode(self, first: int, steps: int) -> None:
        """Steps of one token for each sequence, at positions from `first` on."""
        rows = range(len(self.indices))
        for position in range(first, first + steps):
            positions = [position] * len(rows)
            self._model.step(self._tokens(positions), positions, self.indices, rows, _choose)

    def profile(self, positions: Sequence[int], wanted: int) -> tuple[float, list[tuple[Op, float]]]:
        """Seconds of a step, and of each of its ops alone. One position a sequence, or all of the only sequence."""
        sequences = self.indices if len(positions) == len(self.indices) else self.indices * len(positions)
        tokens, last = self._tokens(positions), range(len(positions) - wanted, len(positions))
        whole = [_seconds(lambda: self._model.step(tokens, positions, sequences, last, _choose)) for _ in range(_PROFILES)]
        return statistics.median(whole), self._model.time_ops(tokens, positions, sequences, wanted)

    def _tokens(self, positions: Sequence[int]) -> list[int]:
        """Tokens without a pattern; which ones they are does not change the time."""
        return [(7919 * p + 101 * row) % self._model.n_vocab for row, p in enumerate(positions)]


def _choose(first: int, logits: np.ndarray) -> None:
    logits.argmax(axis=-1)  # greedy decoding looks at every logit


@contextmanager
def prefill(model: Model, tokens: int) -> Iterator[Sampler]:
    """Within the block: a call reads a prompt of so many tokens; tokens per second."""
    with Sequences(model, 1, tokens) as sequences:
        yield lambda: tokens / _seconds(lambda: sequences.read(tokens))


@contextmanager
def decode(model: Model, tokens: int, depth: int, batch: int) -> Iterator[Sampler]:
    """Within the block: a call decodes so many tokens in each of `batch` sequences that hold `depth`; tokens per second of all."""
    with Sequences(model, batch, depth + tokens) as sequences:
        sequences.read(depth)
        yield lambda: batch * tokens / _seconds(lambda: sequences.decode(depth, tokens))


def _seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# --- what the machine can do -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Of the model's threads together: bytes read per second, multiply-adds per second; and the seconds of an empty op."""

    read: float
    int8: float
    f32: float
    op: float

    def binding(self, need: Need) -> tuple[str, float]:
        """Which limit holds an op back, and the share of it that the op reaches; above 1 where bytes came from a cache."""
        seconds = {"memory": need.bytes / self.read, "overhead": need.count * self.op}
        if need.kind:
            seconds[need.kind] = need.macs / (self.int8 if need.kind == "int8" else self.f32)
        bound = max(seconds, key=lambda name: seconds[name])
        return bound, seconds[bound] / need.seconds if need.seconds else 0.0


def limits(model: Model, keep: bool = True) -> Limits:
    """Bandwidth is measured now, on the model's weights; the peaks once a day. keep: whether they are to serve for a day."""
    found = _kept(model)
    if found is None:
        found = peaks.measure(code(LEVELS[model.level]), model.threads)
        if keep:
            _store(model, found)
    return Limits(model.read_bandwidth(), found.int8, found.f32, found.op)


def _peaks_file(model: Model) -> Path | None:
    root = private_folder(cache_root())
    folder = private_folder(root / "peaks") if root else None
    name = f"{llvm.get_host_cpu_name()}-{cache_key(LEVELS[model.level])}-{model.threads}.json"
    return folder / name if folder else None


def _kept(model: Model) -> peaks.Peaks | None:
    path = _peaks_file(model)
    try:
        if path is None or not 0 <= time.time() - path.stat().st_mtime < _KEEP_SECONDS:
            return None
        fields = json.loads(path.read_text("utf-8"))
        found = peaks.Peaks(*(float(fields[name]) for name in ("int8", "f32", "op")))
    except (OSError, ValueError, TypeError, KeyError):  # absent, torn, or not ours
        return None
    return found if all(0 < value < 1e18 for value in astuple(found)) else None


def _store(model: Model, found: peaks.Peaks) -> None:
    path = _peaks_file(model)
    if path is None:
        return
    with suppress(OSError):  # then they are measured anew next time
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(asdict(found)), "utf-8")
        os.replace(temporary, path)


def last_level_cache() -> int | None:
    """Bytes of the processor's largest cache, None where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            text = path.read_text("ascii").strip()
            sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return max(sizes, default=None)


# --- what an op needs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """All ops of one kernel in a step: how many, their seconds, the bytes they touch (each operand once: weights, activations,
    keys and values), their multiply-adds (of matrix products and attention), and which kind those are: int8, f32 or "".
    """

    op: str
    count: int
    seconds: float
    bytes: int
    macs: int
    kind: str


@dataclass(frozen=True)
class Profile:
    """A step: its rows, the last one's position, its seconds as a whole, and its ops run one by one, the longest first."""

    rows: int
    position: int
    seconds: float
    needs: list[Need]


def profile_decode(model: Model, depth: int, batch: int) -> Profile:
    """Of a step that decodes one token in each of `batch` sequences that hold `depth` tokens."""
    with Sequences(model, batch, depth + 1) as sequences:
        sequences.read(depth)
        seconds, times = sequences.profile([depth] * batch, batch)
        return Profile(batch, depth, seconds, _needs(times, [[depth]] * batch))


def profile_prefill(model: Model, tokens: int) -> Profile:
    """Of the last chunk in which a prompt of so many tokens is read."""
    with Sequences(model, 1, tokens) as sequences:
        sequences.read(tokens)
        positions = range((tokens - 1) // model.chunk * model.chunk, tokens)
        seconds, times = sequences.profile(positions, 1)
        return Profile(len(positions), tokens - 1, seconds, _needs(times, [positions]))


def _needs(times: Sequence[tuple[Op, float]], positions: Sequence[Sequence[int]]) -> list[Need]:
    """positions: of each sequence's rows."""
    every = [_need(op, seconds, positions) for op, seconds in times]
    merged = []
    for name in dict.fromkeys(need.op for need in every):
        same = [need for need in every if need.op == name]
        seconds, nbytes, macs = (sum(values) for values in zip(*((n.seconds, n.bytes, n.macs) for n in same), strict=True))
        merged.append(Need(name, len(same), seconds, int(nbytes), int(macs), same[0].kind))
    return sorted(merged, key=lambda need: -need.seconds)


def _need(op: Op, seconds: float, positions: Sequence[Sequence[int]]) -> Need:
    rows = len(positions) if op.count == WANTED else sum(map(len, positions))
    kind, macs = "", 0
    skipped: tuple[int, ...] = ()  # arguments of which only a part is touched
    touched = 0
    if op.kernel is attention.ATTENTION:
        skipped = attention.ARENA, attention.PAGE_TABLE
        touched, macs, kind = *_attended(op.arguments, positions), "f32"
    elif op.kernel in rope.ROPE.values():
        skipped = rope.ARENA, rope.PAGE_TABLE
        touched = rows * op.arguments[rope.KV_HEADS] * op.arguments[rope.HEAD_BYTES] // pages.PAGE
    elif op.kernel.name.startswith("matmul_"):
        skipped = (matmul.WEIGHTS,)
        touched = op.memory[matmul.WEIGHTS][1]
        kind = "int8" if matmul.RECORDS in op.memory else "f32"
        columns = op.arguments[matmul.SPANS] * (SPAN if kind == "int8" else 1)
        macs = rows * columns * op.arguments[matmul.TILES] * TILE_ROWS
    for index, (array, nbytes) in op.memory.items():
        if index not in skipped:
            touched += rows * array.strides[0] if array.ndim > 1 else nbytes  # rows of a table, or all of a vector
    return Need(op.kernel.name, 1, seconds, touched, macs, kind)


def _attended(arguments: dict[int, int], positions: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Bytes of keys and values that rows at these positions see, those of a sequence together, and their multiply-adds."""
    heads = arguments[attention.KV_HEADS]
    window = arguments[attention.WINDOW]

    def oldest(position: int) -> int:
        return max(0, position - window + 1) if window else 0

    tokens = sum(max(rows) + 1 - oldest(min(rows)) for rows in positions)
    pairs = sum(p + 1 - oldest(p) for rows in positions for p in rows)
    nbytes = tokens * heads * arguments[attention.HEAD_BYTES] // pages.PAGE
    return nbytes, 2 * pairs * heads * arguments[attention.SHARING] * arguments[attention.HEAD_DIM]
