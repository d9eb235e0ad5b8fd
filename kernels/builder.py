"""A network recorded once, as the op table that every step replays, with its buffers.

An architecture (edgeinfer/models/) describes its network to a `Builder`; each call appends rows to a table: kernel
address, buffer addresses, sizes. Kernels have no bounds checks, so `Builder.finish` verifies every address and size
before the first run; `Program.forward` checks every step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from edgeinfer.kernels import pages
from edgeinfer.kernels.cpu import attention, matmul, peaks, rope, rows, stream, walk
from edgeinfer.kernels.cpu.matmul_float import matmul_kernel
from edgeinfer.kernels.jit import Code, Kernel
from edgeinfer.kernels.packing import ROWS as TILE_ROWS
from edgeinfer.kernels.packing import SPAN, Packing
from edgeinfer.kernels.pages import LayerPages
from edgeinfer.kernels.step import ROWS, WANTED, Step
from edgeinfer.kernels.team import aligned_zeros

_ALL = 1 << 40  # rows per chunk: a chunk takes every row
_CHUNK_BYTES = 32 << 10  # of weights in a unit of work: some microseconds for one row, well under 50 ms for 512
_FEW_ROWS = 8  # rows per chunk of ops on single rows


class Weights(Protocol):
    """Where a builder gets weights: each name once."""

    def packed(self, name: str) -> tuple[type[Packing], np.ndarray, int, int]:
        """The packing, packed tiles uint8 (tiles, tile_bytes), output rows and input columns of a matrix."""

    def vector(self, name: str) -> np.ndarray:
        """A norm's weight or a bias: f32 (n,)."""

    def has(self, name: str) -> bool: ...


Memory = tuple[np.ndarray, int]  # an array, and how many of its bytes a kernel may touch
Argument = int | Memory  # a number, or the address of memory


@dataclass
class Rows:
    """Rows of f32 in a buffer, (rows, columns padded to whole spans), and once needed their quantized form."""

    data: np.ndarray
    columns: int
    count: int  # ROWS or WANTED: which of the step's row counts applies
    producer: int | None = None  # the op that can quantize as it writes
    quants: np.ndarray | None = None
    records: np.ndarray | None = None

    @property
    def spans(self) -> int:
        return int(self.data.shape[1]) // SPAN


@dataclass
class Op:
    kernel: Kernel
    units: int
    rows_per_chunk: int
    count: int
    arguments: dict[int, int]
    memory: dict[int, Memory] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    barrier: bool = True


def _bits(x: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


class Builder:
    """Records a network. Every method appends ops; buffers with the same role are shared by all layers."""

    def __init__(self, code: Code, weights: Weights, step: Step, layers: Sequence[LayerPages]) -> None:
        self.code, self.weights, self.step, self.layers = code, weights, step, layers
        self.max_rows = {ROWS: len(step.positions), WANTED: len(step.wanted_rows)}
        self.ops: list[Op] = []
        self.body_end = 0
        self.tiles: list[np.ndarray] = []  # packed weights
        self.kept: list[np.ndarray] = []  # small constants: addresses alone do not keep arrays alive
        self.head_end = 0
        self._buffers: dict[tuple[str, int, int], np.ndarray] = {}
        self._quantized: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.embedded: Rows | None = None
        self.logits: Rows | None = None

    # the network

    def embed(self, columns: int) -> Rows:
        """The step's token embeddings, (rows, columns); `Program.forward` fills them in."""
        self.embedded = self._rows("residual", columns, ROWS)
        return self.embedded

    def norm(self, x: Rows, weight: str, epsilon: float, add: Rows | None = None) -> Rows:
        """RMSNorm over columns (Zhang, Sennrich 2019), times weight; plus `add`, into add's buffer."""
        scale = self._keep(_padded(self.weights.vector(weight), x.data.shape[1]))
        out = add or self._rows(_role(weight), x.columns, x.count)
        per_chunk = _FEW_ROWS
        index = self._emit(
            rows.NORM, 1, per_chunk, x.count,
            {**self._in_out(x, out), rows.OTHER: scale, rows.COLUMNS: x.columns, rows.EPSILON: _bits(epsilon),
             rows.ADDEND: self._memory(out) if add else 0, rows.ROWS_PER_CHUNK: per_chunk},
            {rows.OUT},
        )  # fmt: skip
        return Rows(out.data, x.columns, x.count, None if add else index)

    def linear(self, x: Rows, *names: str, add: Rows | None = None) -> tuple[Rows, ...]:
        """x @ weight^T + bias for each name (bias where the file has one); plus `add`, into add's buffer. One pass."""
        results = []
        for name in names:
            packing, tiles, outputs, columns = self.weights.packed(name + ".weight")
            if columns != x.columns:
                raise ValueError(f"{name}.weight has {columns} columns; its input has {x.columns}")
            out = Rows(add.data, outputs, x.count) if add else self._rows(_role(name), outputs, x.count)
            if add and outputs != add.columns:
                raise ValueError(f"{name}.weight has {outputs} rows; the residual has {add.columns} columns")
            bias: Argument = 0
            if self.weights.has(name + ".bias"):
                bias = self._keep(_padded(self.weights.vector(name + ".bias"), len(tiles) * TILE_ROWS))
            self.tiles.append(tiles)
            grain = matmul.WIDE * max(1, _CHUNK_BYTES // (matmul.WIDE * tiles.shape[1]))
            inputs: dict[int, Argument]
            if packing.quantized:
                self.quantize(x)
                assert x.quants is not None and x.records is not None
                inputs = {
                    matmul.QUANTS: self._span_memory(x.quants, x), matmul.QUANTS_STRIDE: x.quants.strides[0],
                    matmul.RECORDS: self._span_memory(x.records, x), matmul.RECORDS_STRIDE: x.records.strides[0],
                }  # fmt: skip
            else:
                inputs = {matmul.QUANTS: self._memory(x), matmul.QUANTS_STRIDE: x.data.strides[0]}
            self._emit(
                matmul_kernel(packing.name, self.code.level), -(-len(tiles) // grain), _ALL, x.count,
                {matmul.WEIGHTS: (tiles, tiles.nbytes), matmul.TILE_BYTES: tiles.shape[1], matmul.TILES: len(tiles),
                 matmul.GRAIN: grain, matmul.SPANS: packing.spans(columns), **inputs,
                 matmul.OUT: self._memory(out), matmul.OUT_STRIDE: out.data.strides[0],
                 matmul.ADDEND: self._memory(out) if add else 0, matmul.BIAS: bias},
                {matmul.OUT}, barrier=name is names[-1],
            )  # fmt: skip
            results.append(out)
        return tuple(results)

    def rope(self, layer: int, q: Rows, k: Rows, v: Rows, *, heads: int, kv_heads: int, table: np.ndarray, neox: bool,
             q_norm: str | None = None, k_norm: str | None = None, epsilon: float = 0.0) -> None:  # fmt: skip
        """Norm q and k per head where weights are named, rotate them in place, and append k and v to the layer's pages.

        table: f32 (positions, 2, pairs): cosines and sines of each position.
        """
        where = self.layers[layer]
        head_dim = q.columns // heads
        norms = [self._keep(self.weights.vector(name), head_dim) if name else 0 for name in (q_norm, k_norm)]
        self.kept.append(table)
        self._emit(
            rope.ROPE["neox" if neox else "norm"], 1, 1, ROWS,
            {rope.Q: self._memory(q), rope.Q_STRIDE: q.data.strides[0], rope.K: self._memory(k),
             rope.K_STRIDE: k.data.strides[0], rope.V: self._memory(v), rope.V_STRIDE: v.data.strides[0],
             rope.HEADS: heads, rope.KV_HEADS: kv_heads, rope.HEAD_DIM: head_dim, rope.PAIRS: table.shape[2],
             rope.TABLES: (table, table.nbytes), rope.Q_NORM: norms[0], rope.K_NORM: norms[1],
             rope.EPSILON: _bits(epsilon), **self._pages(where, head_dim, rope.ARENA)},
            {rope.Q, rope.K, rope.ARENA},
        )  # fmt: skip

    def attention(self, layer: int, q: Rows, *, heads: int, kv_heads: int, scale: float, window: int = 0,
                  softcap: float = 0.0, sinks: str | None = None) -> Rows:  # fmt: skip
        """Causal attention of each row over its sequence's pages; window: how many tokens a row sees, itself included (0: all)."""
        where = self.layers[layer]
        head_dim = q.columns // heads
        if head_dim % 16 or head_dim > attention.MAX_HEAD_DIM:
            raise ValueError(f"a head size of {head_dim}; supported are multiples of 16 up to {attention.MAX_HEAD_DIM}")
        out = self._rows("attention", q.columns, ROWS)
        sharing = heads // kv_heads
        self._emit(
            attention.ATTENTION, kv_heads, max(1, 16 // sharing), ROWS,
            {attention.Q: self._memory(q), attention.Q_STRIDE: q.data.strides[0], attention.OUT: self._memory(out),
             attention.OUT_STRIDE: out.data.strides[0], attention.SHARING: sharing, attention.KV_HEADS: kv_heads,
             attention.HEAD_DIM: head_dim, attention.SCALE: _bits(scale), attention.SOFTCAP: _bits(softcap),
             attention.WINDOW: window, attention.SINKS: self._keep(self.weights.vector(sinks), heads) if sinks else 0,
             **self._pages(where, head_dim, attention.ARENA)},
            {attention.OUT},
        )  # fmt: skip
        return out

    def gated(self, gate: Rows, up: Rows, activation: str) -> Rows:
        """activation(gate) * up; activation: silu or gelu."""
        out = self._rows("gated", gate.columns, gate.count)
        per_chunk = _FEW_ROWS
        index = self._emit(
            rows.GATED[activation], -(-gate.spans // rows.UNIT_SPANS), per_chunk, gate.count,
            {**self._in_out(gate, out), rows.OTHER: self._memory(up), rows.OTHER_STRIDE: up.data.strides[0],
             rows.ROWS_PER_CHUNK: per_chunk},
            {rows.OUT},
        )  # fmt: skip
        return Rows(out.data, gate.columns, gate.count, index)

    def wanted(self, x: Rows) -> Rows:
        """The rows whose logits are wanted. What follows is the head, which may run several times a step."""
        self.body_end = len(self.ops)
        out = self._rows("wanted", x.columns, WANTED)
        self._emit(rows.TAKE, 1, 1, WANTED, self._in_out(x, out), {rows.OUT})
        return out

    def output(self, logits: Rows) -> None:
        self.logits = logits

    def quantize(self, x: Rows) -> None:
        """Give rows their int8 form, by the op that writes them where it can."""
        if x.quants is not None:
            return
        key = x.data.ctypes.data
        if key not in self._quantized:
            n, spans = len(x.data), x.spans
            quants = self._array(n * spans * SPAN).view(np.int8).reshape(n, spans * SPAN)
            records = self._array(n * spans * matmul.RECORD).reshape(n, spans * matmul.RECORD)
            self._quantized[key] = quants, records
        x.quants, x.records = self._quantized[key]
        targets: dict[int, Argument] = {
            rows.QUANTS: self._span_memory(x.quants, x), rows.QUANTS_STRIDE: x.quants.strides[0],
            rows.RECORDS: self._span_memory(x.records, x), rows.RECORDS_STRIDE: x.records.strides[0],
        }  # fmt: skip
        if x.producer is not None:
            self._set(self.ops[x.producer], targets, {rows.QUANTS, rows.RECORDS})
            return
        arguments: dict[int, Argument] = {
            rows.X: self._memory(x), rows.X_STRIDE: x.data.strides[0], rows.SPANS: x.spans,
            rows.ROWS_PER_CHUNK: _FEW_ROWS, **targets,
        }  # fmt: skip
        units = -(-x.spans // rows.UNIT_SPANS)
        self._emit(rows.QUANTIZE, units, _FEW_ROWS, x.count, arguments, {rows.QUANTS, rows.RECORDS})

    # recording

    def compile(self, progress: Callable[[float], None] | None = None) -> None:
        """Compile or load every kernel that the ops need. progress(fraction) is called only while kernels compile."""
        kernels = list({op.kernel.name: op.kernel for op in self.ops}.values())
        missing = [k for k in kernels if not self.code.is_cached(k)]
        for done, kernel in enumerate(missing):
            if progress:
                progress(done / len(missing))
            self.code.address(kernel)
        if progress and missing:
            progress(1.0)

    def finish(self) -> np.ndarray:
        """Verify what was recorded and return the op table, int64 (ops, OP_WORDS). Raises ValueError, naming the op."""
        if self.embedded is None or self.logits is None:
            raise ValueError("a network needs embed() and output()")
        self.head_end = len(self.ops)
        for tiles in self.tiles:  # no part of the network: what Program.read_bandwidth replays
            units = -(-tiles.nbytes // stream.UNIT_BYTES)
            arguments: dict[int, Argument] = {stream.START: (tiles, tiles.nbytes), stream.BYTES: tiles.nbytes}
            self._emit(stream.STREAM, units, _ALL, ROWS, arguments, set(), barrier=tiles is self.tiles[-1])
        _verify(self.ops)
        table = peaks.op_table(len(self.ops))
        for row, op in zip(table, self.ops, strict=True):
            row[walk.OP_KERNEL] = self.code.address(op.kernel)
            row[walk.OP_UNITS], row[walk.OP_ROWS_PER_CHUNK] = op.units, op.rows_per_chunk
            row[walk.OP_ROW_COUNT], row[walk.OP_BARRIER] = op.count, op.barrier
            for index, value in op.arguments.items():
                row[index] = value
        return table

    def buffers(self) -> list[np.ndarray]:
        return [*self._buffers.values(), *(a for pair in self._quantized.values() for a in pair)]

    def _emit(self, kernel: Kernel, units: int, rows_per_chunk: int, count: int,
              arguments: dict[int, Argument], written: set[int], barrier: bool = True) -> int:  # fmt: skip
        op = Op(kernel, units, rows_per_chunk, count, {}, barrier=barrier)
        self._set(op, arguments, written)
        self.ops.append(op)
        return len(self.ops) - 1

    @staticmethod
    def _set(op: Op, arguments: dict[int, Argument], written: set[int]) -> None:
        for index, value in arguments.items():
            if isinstance(value, tuple):
                op.memory[index] = value
                value = value[0].ctypes.data
            op.arguments[index] = int(value)
        op.written |= written

    def _rows(self, role: str, columns: int, count: int) -> Rows:
        key = (role, columns, count)
        if key not in self._buffers:
            n, padded = self.max_rows[count], -(-columns // SPAN) * SPAN
            self._buffers[key] = self._array(n * padded * 4).view(np.float32).reshape(n, padded)
        return Rows(self._buffers[key], columns, count)

    def _array(self, nbytes: int) -> np.ndarray:
        return aligned_zeros(nbytes)

    def _keep(self, vector: np.ndarray, length: int = 0) -> Memory:
        """A vector of f32 of which a kernel reads `length`, by default all."""
        self.kept.append(vector)
        return vector, 4 * length or vector.nbytes

    def _memory(self, x: Rows) -> Memory:
        return x.data, self.max_rows[x.count] * x.data.strides[0]

    def _span_memory(self, array: np.ndarray, x: Rows) -> Memory:
        return array, self.max_rows[x.count] * array.strides[0]

    def _in_out(self, x: Rows, out: Rows) -> dict[int, Argument]:
        return {
            rows.X: self._memory(x), rows.X_STRIDE: x.data.strides[0], rows.OUT: self._memory(out),
            rows.OUT_STRIDE: out.data.strides[0], rows.SPANS: x.spans,
        }  # fmt: skip

    def _pages(self, where: LayerPages, head_dim: int, first: int) -> dict[int, Argument]:
        """ARENA, PAGE_BYTES, HEAD_BYTES, PAGE_TABLE, RING from argument `first` on."""
        arena = where.arena.reshape(-1)[where.offset :]
        return {
            first: (arena, arena.nbytes), first + 1: where.page_bytes, first + 2: pages.head_bytes(head_dim),
            first + 3: (where.table, where.table.nbytes), first + 4: where.ring,
        }  # fmt: skip


def _role(name: str) -> str:
    """attn_q of blk.3.attn_q.weight: buffers are shared by role."""
    return name.removesuffix(".weight").rsplit(".", 1)[-1]


def _padded(vector: np.ndarray, length: int) -> np.ndarray:
    out = aligned_zeros(length * 4).view(np.float32)
    out[: len(vector)] = vector
    return out


def _verify(ops: Sequence[Op]) -> None:
    """Every operand lies inside its array, and no op writes what another op of its group uses (in place is fine for one op)."""
    group: list[tuple[int, Op]] = []
    for number, op in enumerate(ops):
        name = f"op {number} ({op.kernel.name})"
        if op.units < 1 or op.rows_per_chunk < 1 or len(op.arguments) + walk.OP_ARGS > walk.OP_WORDS:
            raise ValueError(f"{name}: {op.units} units of {op.rows_per_chunk} rows, {len(op.arguments)} arguments")
        for index, (array, needed) in op.memory.items():
            if not array.flags.c_contiguous or needed > array.nbytes or needed <= 0:
                raise ValueError(f"{name}: argument {index} touches {needed} bytes of an array of {array.nbytes}")
        for index in op.written:
            if index not in op.memory:
                raise ValueError(f"{name}: argument {index} is written but has no memory")
        for other_number, other in group:
            for a, b in ((op, other), (other, op)):
                for index in a.written:
                    if any(_overlap(a.memory[index], used) for used in b.memory.values()):
                        raise ValueError(f"{name} and op {other_number} run at the same time and share memory that one writes")
        group = [] if op.barrier else [*group, (number, op)]


def _overlap(a: Memory, b: Memory) -> bool:
    (x, n), (y, m) = ((array.ctypes.data, size) for array, size in (a, b))
    return x < y + m and y < x + n
