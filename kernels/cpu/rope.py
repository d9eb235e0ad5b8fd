"""Rotary positions and the append to the KV cache, one op: q and k are (optionally) normed per head and rotated in place,
then k and v are rounded to half precision into their page, before any attention reads them.

Two layouts of the rotated pairs: NORM pairs (2i, 2i + 1), NEOX pairs (i, i + n_rot / 2). RoFormer, Su et al. 2021.
"""

from __future__ import annotations

import llvmlite.ir as ir

from edgeinfer.kernels.cpu.rows import rms_scale, scale_by
from edgeinfer.kernels.cpu.simd import F32, F32X, I32, Simd, Value
from edgeinfer.kernels.cpu.walk import OP_ARGS, word
from edgeinfer.kernels.jit import Kernel, Routine, routine
from edgeinfer.kernels.pages import GROUP, PAGE
from edgeinfer.kernels.step import POSITIONS, SEQUENCES

(Q, Q_STRIDE, K, K_STRIDE, V, V_STRIDE, HEADS, KV_HEADS, HEAD_DIM) = range(OP_ARGS, OP_ARGS + 9)
(PAIRS, TABLES, Q_NORM, K_NORM, EPSILON) = range(OP_ARGS + 9, OP_ARGS + 14)
(ARENA, PAGE_BYTES, HEAD_BYTES, PAGE_TABLE, RING) = range(OP_ARGS + 14, OP_ARGS + 19)

EIGHT = ir.VectorType(F32, 8)


def _turn(s: Simd, x: Value, y: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """The pair (x, y) turned by an angle."""
    b = s.b
    return s.fma(x, cos, b.fneg(b.fmul(y, sin))), s.fma(x, sin, b.fmul(y, cos))


def _rotate(neox: bool) -> Routine:
    @routine
    def rotate(s: Simd, head: Value, table: Value, pairs: Value) -> None:
        """Rotate one head in place. table: f32 (2, pairs): cosines, then sines."""
        b = s.b
        sines = s.at(table, pairs, 4)
        eights = b.sdiv(pairs, s.i64(8))
        with s.loop(eights) as i:
            cos, sin = s.load(EIGHT, s.at(table, i, 32)), s.load(EIGHT, s.at(sines, i, 32))
            if neox:
                first = s.at(head, i, 32)
                second = s.at(first, pairs, 4)
                x, y = _turn(s, s.load(EIGHT, first), s.load(EIGHT, second), cos, sin)
                s.store(x, first)
                s.store(y, second)
            else:
                at = s.at(head, i, 64)
                both = s.load(F32X, at)
                pick = [ir.Constant(ir.VectorType(I32, 8), list(range(j, 16, 2))) for j in (0, 1)]
                even, odd = (b.shuffle_vector(both, both, p) for p in pick)
                x, y = _turn(s, even, odd, cos, sin)
                weave = ir.Constant(ir.VectorType(I32, 16), [j // 2 + 8 * (j % 2) for j in range(16)])
                s.store(b.shuffle_vector(x, y, weave), at)
        with s.loop(pairs, b.mul(eights, s.i64(8))) as i:  # head sizes that are not multiples of 16
            first = s.at(head, i, 4 if neox else 8)
            second = s.at(first, pairs, 4) if neox else s.at(first, 4)
            cos, sin = s.load(F32, s.at(table, i, 4)), s.load(F32, s.at(sines, i, 4))
            x, y = _turn(s, s.load(F32, first), s.load(F32, second), cos, sin)
            s.store(x, first)
            s.store(y, second)

    return rotate


@routine
def append(s: Simd, k: Value, v: Value, page: Value, slot: Value, head_dim: Value) -> None:
    """Round one head's key and value into its page at token `slot` (0..63)."""
    b = s.b
    group, lane = b.sdiv(slot, s.i64(GROUP)), b.srem(slot, s.i64(GROUP))
    keys = s.at(s.at(page, b.mul(group, head_dim), 2 * GROUP), lane, 2)
    values = s.at(s.at(page, head_dim, 2 * PAGE), b.mul(slot, head_dim), 2)
    with s.loop(b.sdiv(head_dim, s.i64(16))) as i:
        half = s.f32_to_half(s.load(F32X, s.at(k, i, 64)))
        for j in range(16):
            s.store(b.extract_element(half, s.i32(j)), s.at(s.at(keys, i, 16 * 2 * GROUP), 2 * GROUP * j))
        s.store(s.f32_to_half(s.load(F32X, s.at(v, i, 64))), s.at(values, i, 32))


def _rope(name: str, neox: bool) -> Kernel:
    rotate = _rotate(neox)

    def control(op: int, step: int, row: int) -> int:
        head_dim, pairs = word(op, HEAD_DIM), word(op, PAIRS)
        position = word(word(step, POSITIONS), row)
        table = word(op, TABLES) + position * pairs * 8
        q, k = word(op, Q) + row * word(op, Q_STRIDE), word(op, K) + row * word(op, K_STRIDE)
        v = word(op, V) + row * word(op, V_STRIDE)
        for head in range(word(op, HEADS)):
            at = q + head * head_dim * 4
            if word(op, Q_NORM) != 0:
                scale_by(at, word(op, Q_NORM), rms_scale(at, head_dim, word(op, EPSILON)), at, 0, head_dim // 16)
            rotate(at, table, pairs)
        ring = word(op, RING)
        number = word(word(op, PAGE_TABLE), word(word(step, SEQUENCES), row) * ring + position // PAGE % ring)
        page = word(op, ARENA) + number * word(op, PAGE_BYTES)
        for head in range(word(op, KV_HEADS)):
            at = k + head * head_dim * 4
            if word(op, K_NORM) != 0:
                scale_by(at, word(op, K_NORM), rms_scale(at, head_dim, word(op, EPSILON)), at, 0, head_dim // 16)
            rotate(at, table, pairs)
            append(at, v + head * head_dim * 4, page + head * word(op, HEAD_BYTES), position % PAGE, head_dim)
        return 0

    return Kernel(name, control, (word, rms_scale, scale_by, rotate, append))


ROPE = {"norm": _rope("rope_norm", False), "neox": _rope("rope_neox", True)}
