"""Attention over paged keys and values, with the softmax computed online (Milakov, Gimelshein 2018; Dao et al. 2022).

A tile is up to four queries (rows times the heads that share a KV head) of one sequence against one page of 64 tokens.
Pages lie on absolute positions and are visited in rising order; a query's sums run over tokens in order, one fused
multiply-add each, so its bits depend neither on the tile it sits in nor on how the prompt was cut.
"""

from __future__ import annotations

from edgeinfer.kernels.cpu.simd import F32, F32X, I16X, I64, I64X, Simd, Value
from edgeinfer.kernels.cpu.walk import OP_ARGS, OP_ROWS_PER_CHUNK, word
from edgeinfer.kernels.jit import Kernel, Routine, routine
from edgeinfer.kernels.pages import GROUP, PAGE
from edgeinfer.kernels.step import POSITIONS, ROWS, SEQUENCES

(Q, Q_STRIDE, OUT, OUT_STRIDE, SHARING, KV_HEADS, HEAD_DIM) = range(OP_ARGS, OP_ARGS + 7)
(SCALE, SOFTCAP, WINDOW, SINKS) = range(OP_ARGS + 7, OP_ARGS + 11)
(ARENA, PAGE_BYTES, HEAD_BYTES, PAGE_TABLE, RING) = range(OP_ARGS + 11, OP_ARGS + 16)

MAX_HEAD_DIM = 512
GROUPS = PAGE // GROUP
_MASKED = -3.0e38  # finite: a query whose first page is all masked must not make infinity minus infinity
_LOWEST = -1.0e30


def _tile(queries: int) -> Routine:
    abreast = 4 // queries  # sums side by side for each query: one alone would wait for every multiply-add

    @routine
    def attend(s: Simd, op: Value, kv_head: Value, first: Value, valid: Value, row: Value, positions: Value,
               sequence: Value) -> None:  # fmt: skip
        """Queries first .. first + valid - 1 of the pairs (row, head that shares kv_head); the last stands in for missing ones."""
        b = s.b

        def argument(index: int) -> Value:
            return s.load(I64, s.at(op, index * 8))

        head_dim, sharing, window = argument(HEAD_DIM), argument(SHARING), argument(WINDOW)
        scale, cap, ring = s.float_of(argument(SCALE)), s.float_of(argument(SOFTCAP)), argument(RING)
        last = b.sub(valid, s.i64(1))
        q, out, heads, limit, start = [], [], [], [], []
        for t in range(queries):
            pair = b.add(first, b.select(b.icmp_signed("<", last, s.i64(t)), last, s.i64(t)))
            r = b.add(row, b.sdiv(pair, sharing))
            head = b.add(b.mul(kv_head, sharing), b.srem(pair, sharing))
            heads.append(head)
            at = b.mul(b.mul(head, head_dim), s.i64(4))
            q.append(b.add(b.add(argument(Q), b.mul(r, argument(Q_STRIDE))), at))
            out.append(b.add(b.add(argument(OUT), b.mul(r, argument(OUT_STRIDE))), at))
            position = s.load(I64, s.at(positions, r, 8))
            limit.append(position)
            oldest = b.add(b.sub(position, window), s.i64(1))
            inside = b.and_(b.icmp_signed(">", window, s.i64(0)), b.icmp_signed(">", oldest, s.i64(0)))
            start.append(b.select(inside, oldest, s.i64(0)))
        newest, oldest = limit[0], start[0]
        for t in range(1, queries):
            newest = b.select(b.icmp_signed(">", limit[t], newest), limit[t], newest)
            oldest = b.select(b.icmp_signed("<", start[t], oldest), start[t], oldest)

        sums = [s.scratch(F32, MAX_HEAD_DIM) for _ in range(queries)]
        scores = [s.scratch(F32, PAGE) for _ in range(queries)]
        shares = [s.variable(s.const(F32X, 0.0)) for _ in range(queries)]  # of the softmax's denominator, by lane
        highest = [s.variable(s.f32(_LOWEST)) for _ in range(queries)]
        chunks = b.sdiv(head_dim, s.i64(16))
        with s.loop(chunks) as i:
            for t in range(queries):
                s.store(s.const(F32X, 0.0), s.at(sums[t], i, 64))

        page = s.i64(PAGE)
        with s.loop(b.add(b.sdiv(newest, page), s.i64(1)), b.sdiv(oldest, page)) as number:
            slot = s.load(I64, s.at(argument(PAGE_TABLE), b.add(b.mul(sequence, ring), b.srem(number, ring)), 8))
            base = b.add(b.add(argument(ARENA), b.mul(slot, argument(PAGE_BYTES))), b.mul(kv_head, argument(HEAD_BYTES)))
            begin = b.mul(number, page)
            with s.loop(s.i64(GROUPS // abreast)) as i:
                groups = [b.add(b.mul(i, s.i64(abreast)), s.i64(k)) for k in range(abreast)]
                keys = [s.at(base, b.mul(g, head_dim), 2 * GROUP) for g in groups]
                products = [[s.variable(s.const(F32X, 0.0)) for _ in groups] for _ in range(queries)]
                with s.loop(head_dim) as d:
                    for k, address in enumerate(keys):
                        key = s.half_to_f32(s.load(I16X, s.at(address, d, 2 * GROUP)))
                        for t in range(queries):
                            total = products[t][k]
                            total.set(s.fma(s.splat(s.load(F32, s.at(q[t], d, 4))), key, total.get()))
                for k, g in enumerate(groups):
                    token = b.add(s.splat(b.add(begin, b.mul(g, s.i64(GROUP)))), s.const(I64X, list(range(GROUP))))
                    for t in range(queries):
                        score = s.variable(b.fmul(products[t][k].get(), s.splat(scale)))
                        with b.if_then(b.fcmp_ordered(">", cap, s.f32(0.0))):
                            score.set(b.fmul(s.splat(cap), s.tanh(b.fdiv(score.get(), s.splat(cap)))))
                        seen = b.and_(
                            b.icmp_signed("<=", token, s.splat(limit[t])), b.icmp_signed(">=", token, s.splat(start[t]))
                        )
                        s.store(b.select(seen, score.get(), s.const(F32X, _MASKED)), s.at(scores[t], g, 64))
            factors = []
            for t in range(queries):
                values = [s.load(F32X, s.at(scores[t], 64 * g)) for g in range(GROUPS)]
                top = values[0]
                for v in values[1:]:
                    top = s.max(top, v)
                before = highest[t].get()
                now = s.max(before, s.largest(top))
                highest[t].set(now)
                factor = s.exp(s.splat(b.fsub(before, now)))
                factors.append(factor)
                total = b.fmul(shares[t].get(), factor)
                for g, v in enumerate(values):
                    weight = s.exp(b.fsub(v, s.splat(now)))
                    s.store(weight, s.at(scores[t], 64 * g))
                    total = b.fadd(total, weight)
                shares[t].set(total)
            from_token = _clamp(s, b.sub(oldest, begin))
            to_token = _clamp(s, b.add(b.sub(newest, begin), s.i64(1)))

            def add_values(first: Value, count: int) -> None:
                """Columns 16 * first .. of the queries' sums, `count` vectors of them."""
                places = [b.add(first, s.i64(k)) for k in range(count)]
                totals = [
                    [s.variable(b.fmul(s.load(F32X, s.at(sums[t], i, 64)), factors[t])) for i in places] for t in range(queries)
                ]
                columns = [s.at(s.at(base, head_dim, 2 * PAGE), i, 32) for i in places]
                with s.loop(to_token, from_token) as j:
                    for k, column in enumerate(columns):
                        value = s.half_to_f32(s.load(I16X, s.at(column, b.mul(j, head_dim), 2)))
                        for t in range(queries):
                            total = totals[t][k]
                            total.set(s.fma(s.splat(s.load(F32, s.at(scores[t], j, 4))), value, total.get()))
                for t in range(queries):
                    for i, total in zip(places, totals[t], strict=True):
                        s.store(total.get(), s.at(sums[t], i, 64))

            whole = b.sdiv(chunks, s.i64(abreast))
            with s.loop(whole) as i:
                add_values(b.mul(i, s.i64(abreast)), abreast)
            if abreast > 1:
                with s.loop(chunks, b.mul(whole, s.i64(abreast))) as i:
                    add_values(i, 1)

        for t in range(queries):
            total, factor = s.variable(s.total(shares[t].get())), s.variable(s.f32(1.0))
            sinks = argument(SINKS)
            with b.if_then(b.icmp_unsigned("!=", sinks, s.i64(0))):  # a learned logit that takes part in the softmax alone
                sink = s.load(F32, s.at(sinks, heads[t], 4))
                now = s.max(highest[t].get(), sink)
                lower = b.extract_element(s.exp(s.splat(b.fsub(highest[t].get(), now))), s.i32(0))
                added = b.extract_element(s.exp(s.splat(b.fsub(sink, now))), s.i32(0))
                factor.set(lower)
                total.set(s.fma(total.get(), lower, added))
            share = s.splat(b.fdiv(factor.get(), total.get()))
            with s.loop(chunks) as i:
                s.store(b.fmul(s.load(F32X, s.at(sums[t], i, 64)), share), s.at(out[t], i, 64))

    return attend


def _clamp(s: Simd, token: Value) -> Value:
    """A token's place within the page, 0 .. 64."""
    b = s.b
    token = b.select(b.icmp_signed("<", token, s.i64(0)), s.i64(0), token)
    return b.select(b.icmp_signed(">", token, s.i64(PAGE)), s.i64(PAGE), token)


_ONE, _TWO, _FOUR = _tile(1), _tile(2), _tile(4)


def _attention(op: int, step: int, chunk: int) -> int:
    kv_heads, sharing, per_chunk = word(op, KV_HEADS), word(op, SHARING), word(op, OP_ROWS_PER_CHUNK)
    positions, sequences = word(step, POSITIONS), word(step, SEQUENCES)
    kv_head = chunk % kv_heads
    row = chunk // kv_heads * per_chunk
    end = row + per_chunk
    if end > word(step, ROWS):
        end = word(step, ROWS)
    while row < end:
        sequence = word(sequences, row)
        after = row + 1
        while after < end and word(sequences, after) == sequence:
            after += 1
        pairs = (after - row) * sharing
        pair = 0
        while pair < pairs:
            left = pairs - pair
            if left == 1:
                _ONE(op, kv_head, pair, 1, row, positions, sequence)
            elif left == 2:
                _TWO(op, kv_head, pair, 2, row, positions, sequence)
            elif left == 3:
                _FOUR(op, kv_head, pair, 3, row, positions, sequence)
            else:
                _FOUR(op, kv_head, pair, 4, row, positions, sequence)
            pair += 4
        row = after
    return 0


ATTENTION = Kernel("attention", _attention, (word, _ONE, _TWO, _FOUR))
