"""The integer dot product, spelled for each SIMD level: what the speed of a quantized model hangs on."""

from __future__ import annotations

import llvmlite.ir as ir

from edgeinfer.kernels.cpu.simd import BYTES, I1, I16, I32, I32X, LANES, PAIRS, Simd, Value


class Dot:
    """Integer dot of weight bytes with int8 activations, four products a lane and vector, exact at every level.

    Weights have at most `weight_bits` bits, a sign among them if `signed`; activations lie in -127..127. `vectors` are
    added in all, in steps of a loop; end_step() closes each. The result is too large by `excess` times the sum of the
    activations, which the caller knows and subtracts.
    """

    def __init__(self, s: Simd, weight_bits: int, signed: bool, vectors: int) -> None:
        self.s, self.signed = s, signed
        kind = s.level.dot
        self._multiply = {"plain": self._plain, "maddubs": self._maddubs}.get(kind, self._vnni)
        self.excess = 128 if signed and self._multiply == self._vnni else 0
        # maddubs adds two products in 16 bits: 2 * 15 * 127 = 3,810, so eight sums of 4-bit weights fit, two of 6-bit
        largest = 1 << weight_bits - 1 if signed else (1 << weight_bits) - 1
        self._room = 32767 // (2 * largest * 127)
        in_pairs = kind == "maddubs" and self._room >= vectors
        self._carried = s.variable(s.const(PAIRS if in_pairs else I32X, 0))
        self._pairs: Value | None = None  # 16-bit sums of this step
        self._pending = 0

    def add(self, w: Value, a: Value) -> None:
        """Add w . a, both BYTES."""
        self._multiply(w, a)

    def end_step(self) -> None:
        if self._pairs is None:
            return
        pairs, self._pairs, self._pending = self._pairs, None, 0
        carried = self._carried.get()
        self._carried.set(self.s.b.add(carried, pairs if carried.type == PAIRS else self._widen(pairs)))

    def result(self) -> Value:
        """The sums as 16 x i32."""
        carried = self._carried.get()
        return self._widen(carried) if carried.type == PAIRS else carried

    def _accumulate(self, sums: Value) -> None:
        self._carried.set(self.s.b.add(self._carried.get(), sums))

    def _vnni(self, w: Value, a: Value) -> None:
        s = self.s
        if self.signed:
            w = s.b.xor(w, s.const(BYTES, -128))  # vpdpbusd takes unsigned weights: w + 128
        width = 16 if s.level.dot == "vnni512" else 8
        lanes, name, total = ir.VectorType(I32, width), f"llvm.x86.avx512.vpdpbusd.{32 * width}", self._carried.get()
        parts = [
            s.call(name, lanes, s.part(total, i, width), s.part(w, 4 * i, 4 * width), s.part(a, 4 * i, 4 * width))
            for i in range(0, LANES, width)
        ]
        self._carried.set(parts[0] if len(parts) == 1 else s.join(*parts))

    def _maddubs(self, w: Value, a: Value) -> None:
        s = self.s
        halves = []
        for i in (0, 32):
            x, y = s.part(w, i, 32), s.part(a, i, 32)
            if self.signed:  # vpmaddubsw takes unsigned weights, and saturates: use |w|, its sign on the activation
                y = s.call("llvm.x86.avx2.psign.b", x.type, y, x)
                x = s.call("llvm.abs.v32i8", x.type, x, ir.Constant(I1, 0))
            halves.append(s.call("llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), x, y))
        products = s.join(*halves)
        self._pairs = products if self._pairs is None else s.b.add(self._pairs, products)
        self._pending += 1
        if self._pending == self._room:
            self.end_step()

    def _widen(self, pairs: Value) -> Value:
        s = self.s
        ones = ir.Constant(ir.VectorType(I16, 16), [1] * 16)
        return s.join(
            *(s.call("llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), s.part(pairs, i, 16), ones) for i in (0, 16))
        )

    def _plain(self, w: Value, a: Value) -> None:
        s, b = self.s, self.s.b
        eights, sixteens = s.const(PAIRS, 8), s.const(I32X, 16)
        w, a = b.bitcast(w, PAIRS), b.bitcast(a, PAIRS)
        down = b.ashr if self.signed else b.lshr
        low = down(b.shl(w, eights), eights), b.ashr(b.shl(a, eights), eights)
        high = down(w, eights), b.ashr(a, eights)
        for x, y in (low, high):
            product = b.bitcast(b.mul(x, y), I32X)  # at most 128 * 127: two 16-bit products a lane
            self._accumulate(b.add(b.ashr(b.shl(product, sixteens), sixteens), b.ashr(product, sixteens)))
