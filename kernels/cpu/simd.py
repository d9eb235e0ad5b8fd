"""The vocabulary that kernels are written in: 16-lane vectors, emitted as LLVM code through llvmlite.

A *routine* is a Python function `routine(s, a, b, ...)` that receives a `Simd` and LLVM values, and emits the body of a
function by calling the vocabulary; loops over Python ranges unroll. Addresses are 64-bit integers. A vector of 16 lanes
is one register with AVX-512, two with AVX2, four with SSE or NEON: LLVM splits it, the source does not change. Methods
that have a faster spelling on some processors choose it by the level, and give the same bits on every one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import llvmlite.ir as ir

from edgeinfer.kernels.levels import Level

LANES = 16
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F32, F64, HALF = ir.FloatType(), ir.DoubleType(), ir.HalfType()
F32X = ir.VectorType(F32, LANES)
F64X = ir.VectorType(F64, LANES)
I64X = ir.VectorType(I64, LANES)
I32X = ir.VectorType(I32, LANES)
I16X = ir.VectorType(I16, LANES)
I8X = ir.VectorType(I8, LANES)  # one byte a lane
BYTES = ir.VectorType(I8, 4 * LANES)  # four bytes a lane
PAIRS = ir.VectorType(I16, 2 * LANES)  # two 16-bit sums a lane

Value = Any  # llvmlite's values carry no useful static types


class Simd:
    """Emits vector code for one level into one function."""

    def __init__(self, level: Level, builder: ir.IRBuilder) -> None:
        self.level = level
        self.b = builder

    # constants and scalars

    def i64(self, x: int) -> Value:
        return ir.Constant(I64, x)

    def i32(self, x: int) -> Value:
        return ir.Constant(I32, x)

    def f32(self, x: float) -> Value:
        return ir.Constant(F32, x)

    def const(self, type_: ir.Type, x: float | Sequence[float]) -> Value:
        """A vector constant: one value in every lane, or a value for each."""
        return ir.Constant(type_, list(x) if isinstance(x, Sequence) else [x] * type_.count)

    def at(self, base: Value, offset: int | Value, scale: int = 1) -> Value:
        """base + offset * scale, in bytes."""
        if isinstance(offset, int):
            return base if offset == 0 else self.b.add(base, self.i64(offset * scale))
        return self.b.add(base, self.b.mul(offset, self.i64(scale)) if scale != 1 else offset)

    def narrow(self, x: Value) -> Value:
        return self.b.trunc(x, I32)

    def wide(self, x: Value) -> Value:
        return self.b.sext(x, I64)

    def float_of(self, bits: Value) -> Value:
        """The f32 whose bits are the low half of a 64-bit integer: how floats travel between routines."""
        return self.b.bitcast(self.b.trunc(bits, I32), F32)

    def bits_of(self, x: Value) -> Value:
        return self.b.zext(self.b.bitcast(x, I32), I64)

    # memory

    def load(self, type_: ir.Type, address: Value) -> Value:
        value = self.b.load(self.b.inttoptr(address, type_.as_pointer()), typ=type_)
        value.align = 1
        return value

    def store(self, value: Value, address: Value) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=1)

    def scratch(self, type_: ir.Type, count: int) -> Value:
        """Address of `count` elements on the stack, aligned to a cache line."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(ir.ArrayType(type_, count))
            slot.align = 64
            return self.b.ptrtoint(slot, I64)

    # control

    @contextmanager
    def loop(self, count: Value, start: Value | None = None) -> Iterator[Value]:
        """Run the body for index = start .. count - 1 (64-bit); the body keeps its state in variables."""
        b = self.b
        start = self.i64(0) if start is None else start
        entry = b.block
        body, done = b.append_basic_block("loop"), b.append_basic_block("done")
        b.cbranch(b.icmp_signed("<", start, count), body, done)
        b.position_at_end(body)
        index = b.phi(I64)
        index.add_incoming(start, entry)
        yield index
        following = b.add(index, self.i64(1))
        index.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, count), body, done)
        b.position_at_end(done)

    def variable(self, value: Value) -> Variable:
        """A mutable value; LLVM turns it into registers."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(value.type)
        self.b.store(value, slot)
        return Variable(self.b, slot, value.type)

    def call(self, name: str, result: ir.Type, *args: Value) -> Value:
        """Call an LLVM intrinsic by its full name."""
        module = self.b.module
        fn = module.globals.get(name)
        if fn is None:
            fn = ir.Function(module, ir.FunctionType(result, [a.type for a in args]), name)
        return self.b.call(fn, args)

    # lanes

    def splat(self, x: Value, lanes: int = LANES) -> Value:
        vector = ir.VectorType(x.type, lanes)
        first = self.b.insert_element(ir.Constant(vector, ir.Undefined), x, self.i32(0))
        zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return self.b.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)

    def part(self, v: Value, start: int, count: int) -> Value:
        """Lanes start .. start + count - 1."""
        indices = ir.Constant(ir.VectorType(I32, count), list(range(start, start + count)))
        return self.b.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), indices)

    def join(self, low: Value, high: Value) -> Value:
        n = 2 * low.type.count
        return self.b.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, n), list(range(n))))

    def tree(self, v: Value, combine: Any) -> Value:
        """Fold 16 lanes to one: lane i with i + 8, then 4, 2, 1. The order is part of the result."""
        n = LANES
        while n > 1:
            n //= 2
            v = combine(self.part(v, 0, n), self.part(v, n, n))
        return self.b.extract_element(v, self.i32(0))

    def total(self, v: Value) -> Value:
        add = self.b.fadd if v.type.element in (F32, F64) else self.b.add
        return self.tree(v, add)

    def largest(self, v: Value) -> Value:
        return self.tree(v, self.max)

    # float arithmetic

    def max(self, a: Value, b: Value) -> Value:
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def greater(self, a: Value, b: Value) -> Value:
        """The larger of signed integers."""
        return self.b.select(self.b.icmp_signed(">", a, b), a, b)

    def min(self, a: Value, b: Value) -> Value:
        return self.b.select(self.b.fcmp_ordered("<", a, b), a, b)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c rounded once (f32 lanes or scalar)."""
        if self.level.has_fma:
            suffix = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
            return self.call(f"llvm.fma.{suffix}", a.type, a, b, c)
        return self._shared("fma", Simd._fma_in_double, a, b, c)

    def _shared(self, name: str, body: Any, *args: Value) -> Value:
        """Call `body` as a function of its own: what takes many instructions would otherwise swell every use."""
        module = self.b.module
        types = [a.type for a in args]
        name = f"{name}.{'.'.join(str(t).strip('<>').replace(' ', '') for t in types)}"
        fn = module.globals.get(name)
        if fn is None:
            fn = ir.Function(module, ir.FunctionType(args[0].type, types), name)
            fn.attributes.add("noinline")
            builder = ir.IRBuilder(fn.append_basic_block("entry"))
            builder.ret(body(Simd(self.level, builder), *fn.args))
        return self.b.call(fn, args)

    def _fma_in_double(self, a: Value, b: Value, c: Value) -> Value:
        """Without the instruction: the product is exact in double; the sum is rounded to odd, then to float (Boldo and
        Melquiond, "Emulation of a FMA and correctly rounded sums", IEEE Transactions on Computers, 2008).
        """
        vector = isinstance(a.type, ir.VectorType)
        wide = ir.VectorType(F64, a.type.count) if vector else F64
        bits = ir.VectorType(I64, a.type.count) if vector else I64
        one = ir.Constant(bits, [1] * a.type.count) if vector else self.i64(1)
        zero = ir.Constant(wide, [0.0] * a.type.count) if vector else ir.Constant(F64, 0.0)
        x, y, z = (self.b.fpext(v, wide) for v in (a, b, c))
        p = self.b.fmul(x, y)
        s = self.b.fadd(p, z)
        t = self.b.fsub(s, p)
        e = self.b.fadd(self.b.fsub(p, self.b.fsub(s, t)), self.b.fsub(z, t))  # s + e is the exact sum (Knuth's TwoSum)
        raw = self.b.bitcast(s, bits)
        even = self.b.icmp_unsigned("==", self.b.and_(raw, one), self.b.sub(one, one))
        inexact = self.b.and_(self.b.fcmp_ordered("!=", e, zero), even)
        away = self.b.icmp_unsigned("==", self.b.fcmp_ordered(">", e, zero), self.b.fcmp_ordered(">", s, zero))
        nudged = self.b.select(away, self.b.add(raw, one), self.b.sub(raw, one))
        odd = self.b.bitcast(self.b.select(inexact, nudged, raw), wide)
        return self.b.fptrunc(odd, a.type)

    def to_f32(self, v: Value) -> Value:
        return self.b.sitofp(v, ir.VectorType(F32, v.type.count) if isinstance(v.type, ir.VectorType) else F32)

    def nearest(self, v: Value) -> Value:
        """Round to the nearest integer, ties to even, for |v| < 2^22 (adding 1.5 * 2^23 pushes the fraction out)."""
        magic = self.const(v.type, 12582912.0) if isinstance(v.type, ir.VectorType) else self.f32(12582912.0)
        return self.b.fsub(self.b.fadd(v, magic), magic)

    def half_to_f32(self, v: Value) -> Value:
        """<n x i16> holding IEEE half bits -> f32, exact."""
        n = v.type.count
        if self.level.has_f16c:
            return self.b.fpext(self.b.bitcast(v, ir.VectorType(HALF, n)), ir.VectorType(F32, n))
        ints = ir.VectorType(I32, n)
        c = partial(self.const, ints)
        w = self.b.zext(v, ints)
        magnitude = self.b.shl(self.b.and_(w, c(0x7FFF)), c(13))
        sign = self.b.shl(self.b.and_(w, c(0x8000)), c(16))
        floats = ir.VectorType(F32, n)
        scaled = self.b.fmul(self.b.bitcast(magnitude, floats), ir.Constant(floats, [2.0**112] * n))
        special = self.b.icmp_unsigned(">=", self.b.and_(w, c(0x7FFF)), c(0x7C00))  # infinity and NaN keep exponent 255
        bits = self.b.select(special, self.b.or_(magnitude, c(0x7F800000)), self.b.bitcast(scaled, ints))
        return self.b.bitcast(self.b.or_(bits, sign), floats)

    def f32_to_half(self, v: Value) -> Value:
        """f32 -> IEEE half bits as <n x i16>, ties to even; finite values beyond 65504 saturate."""
        n = v.type.count
        v = self.max(self.min(v, self.const(v.type, 65504.0)), self.const(v.type, -65504.0))
        shorts = ir.VectorType(I16, n)
        if self.level.has_f16c:
            return self.b.bitcast(self.b.fptrunc(v, ir.VectorType(HALF, n)), shorts)
        ints = ir.VectorType(I32, n)
        c = partial(self.const, ints)
        floats = v.type
        w = self.b.bitcast(v, ints)
        sign = self.b.lshr(self.b.and_(w, c(0x80000000)), c(16))
        magnitude = self.b.and_(w, c(0x7FFFFFFF))
        # below 2^-14 a half is denormal: adding 0.5 puts its last bit at the end of the float's mantissa, rounded
        tiny = self.b.bitcast(
            self.b.fadd(self.b.bitcast(magnitude, floats), ir.Constant(floats, [0.5] * n)), ints
        )
        tiny = self.b.sub(tiny, c(0x3F000000))
        odd = self.b.and_(self.b.lshr(magnitude, c(13)), c(1))
        normal = self.b.lshr(self.b.add(self.b.add(magnitude, c(0xFFF - (112 << 23) & 0xFFFFFFFF)), odd), c(13))
        small = self.b.icmp_unsigned("<", magnitude, c(113 << 23))
        return self.b.trunc(self.b.or_(self.b.select(small, tiny, normal), sign), shorts)

    def exp(self, x: Value) -> Value:
        """e^x for f32 lanes, within 1 ulp; 0 below -87.3, and x above 88 counts as 88. Cody-Waite reduction, then the
        degree-6 polynomial whose largest relative error over |r| <= ln(2) / 2 is least (3.1e-9; Taylor's is 1.2e-7).
        """
        return self._exp(x) if self.level.has_fma else self._shared("exp", Simd._exp, x)

    def _exp(self, x: Value) -> Value:
        b, t = self.b, x.type
        c = partial(self.const, t)
        low = b.fcmp_ordered("<", x, c(-87.3))
        x = self.max(self.min(x, c(88.0)), c(-87.3))
        n = self.nearest(b.fmul(x, c(1.44269504)))
        r = self.fma(n, c(-0.693145752), x)
        r = self.fma(n, c(-1.42860677e-06), r)
        p = c(0.00138144672)
        for coefficient in (0.00836878084, 0.0416683927, 0.166665196, 0.49999994, 1.0, 1.0):
            p = self.fma(p, r, c(coefficient))
        ints = ir.VectorType(I32, t.count)
        exponent = b.shl(b.fptosi(n, ints), ir.Constant(ints, [23] * t.count))
        scaled = b.bitcast(b.add(b.bitcast(p, ints), exponent), t)
        return b.select(low, c(0.0), scaled)

    def tanh(self, x: Value) -> Value:
        """tanh by 1 - 2 / (e^2x + 1), which saturates rightly at both ends."""
        c = partial(self.const, x.type)
        e = self.exp(self.min(self.b.fadd(x, x), c(60.0)))
        return self.b.fsub(c(1.0), self.b.fdiv(c(2.0), self.b.fadd(e, c(1.0))))

    def silu(self, x: Value) -> Value:
        """x / (1 + e^-x)."""
        one = self.const(x.type, 1.0)
        return self.b.fdiv(x, self.b.fadd(one, self.exp(self.b.fneg(x))))

    def gelu(self, x: Value) -> Value:
        """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the tanh form that Gemma uses."""
        c = partial(self.const, x.type)
        cube = self.b.fmul(self.b.fmul(x, x), x)
        inner = self.b.fmul(self.fma(cube, c(0.044715), x), c(0.7978845608))
        return self.b.fmul(self.b.fmul(x, c(0.5)), self.b.fadd(c(1.0), self.tanh(inner)))

    # small integers in bytes

    def low_nibbles(self, v: Value) -> Value:
        return self.b.and_(v, self.const(v.type, 15))

    def bits(self, v: Value, start: int, count: int, to: int = 0) -> Value:
        """Bits start .. start + count - 1 of each byte, moved to bit `to`. Whole lanes shift; the mask cuts strays."""
        lanes = ir.VectorType(I32, v.type.count // 4)
        w = self.b.bitcast(v, lanes)
        if start > to:
            w = self.b.lshr(w, ir.Constant(lanes, [start - to] * lanes.count))
        elif start < to:
            w = self.b.shl(w, ir.Constant(lanes, [to - start] * lanes.count))
        mask = ((1 << count) - 1) << to
        return self.b.and_(self.b.bitcast(w, v.type), self.const(v.type, mask))

    def shift_right(self, v: Value, count: Value) -> Value:
        """Every 32-bit lane of bytes, by a count (64-bit) known when it runs."""
        w = self.b.bitcast(v, ir.VectorType(I32, v.type.count // 4))
        return self.b.bitcast(self.b.lshr(w, self.splat(self.narrow(count), w.type.count)), v.type)

    def lane_fields(self, address: Value, width: int) -> Value:
        """16 unsigned numbers of 2 or 4 bits, as I8X. Byte j of n holds lanes j, j + n, j + 2n .., lowest first."""
        word = ir.VectorType(ir.IntType(LANES * width), 8 // width)
        copies = self.splat(self.load(word.element, address), word.count)
        shifted = self.b.lshr(copies, ir.Constant(word, [width * k for k in range(word.count)]))
        return self.b.and_(self.b.bitcast(shifted, I8X), self.const(I8X, (1 << width) - 1))

    def lookup(self, table: Sequence[int], v: Value) -> Value:
        """table[v] for bytes 0..15."""
        signed = [x - 256 if x > 127 else x for x in table]
        if self.level.dot == "plain":
            out = self.const(v.type, signed[0])
            for i in range(1, 16):
                here = self.b.icmp_unsigned("==", v, self.const(v.type, i))
                out = self.b.select(here, self.const(v.type, signed[i]), out)
            return out
        wide = self.level.dot == "vnni512"
        width, name = (64, "llvm.x86.avx512.pshuf.b.512") if wide else (32, "llvm.x86.avx2.pshuf.b")
        vector = ir.VectorType(I8, width)
        entries = ir.Constant(vector, signed * (width // 16))
        parts = [self.call(name, vector, entries, self.part(v, i, width)) for i in range(0, v.type.count, width)]
        return parts[0] if len(parts) == 1 else self.join(*parts)

    def broadcast4(self, address: Value) -> Value:
        """Four bytes at address, in each of the 16 lanes."""
        return self.b.bitcast(self.splat(self.load(I32, address)), BYTES)


class Variable:
    """A mutable value in the function being emitted."""

    def __init__(self, builder: ir.IRBuilder, slot: Value, type_: ir.Type) -> None:
        self._b, self._slot, self._type = builder, slot, type_

    def get(self) -> Value:
        return self._b.load(self._slot, typ=self._type)

    def set(self, value: Value) -> None:
        self._b.store(value, self._slot)
