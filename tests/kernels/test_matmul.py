"""Matrix products of every block type: against decoded weights in float64, exact arithmetic, level against level."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import gguf
import llvmlite.ir as ir
import numpy as np
import pytest

from edgeinfer.formats import blocks
from edgeinfer.kernels import jit, levels
from edgeinfer.kernels.cpu import matmul as args
from edgeinfer.kernels.cpu import repack
from edgeinfer.kernels.cpu.matmul_float import matmul_kernel
from edgeinfer.kernels.cpu.simd import Simd, Value
from edgeinfer.kernels.cpu.walk import OP_ROW_COUNT, OP_WORDS
from edgeinfer.kernels.packings import PACKINGS

QUANTIZED = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL MXFP4 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS".split()
FLOATS = ["F32", "F16", "BF16"]
HERE = [level for level in levels.LEVELS.values() if levels.host_features().issuperset(level.needs)]


def weights(name: str, rows: int, columns: int, fill: int | None = None, seed: int = 0) -> np.ndarray:
    """Rows of random GGUF blocks, uint8 (rows, row_bytes), or with every byte but the scales' set to `fill`."""
    rng = np.random.default_rng(seed)
    kind = blocks.BY_NAME[name]
    if name in FLOATS:
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        top = (values.view(np.uint32) >> 16).astype(np.uint16)
        return (top if name == "BF16" else values.astype(kind.dtype)).view(np.uint8).reshape(rows, -1)
    raw = rng.integers(0, 256, (rows, kind.row_bytes(columns)), np.uint8)
    if fill is not None:
        raw[:] = fill
    b = raw.view(kind.dtype)
    for field in {"d", "m", "dmin"} & set(b.dtype.names):
        b[field] = rng.uniform(0.005, 0.02, b.shape) * rng.choice([-1, 1], b.shape)
    if "e" in b.dtype.names:
        b["e"] = rng.integers(118, 132, b.shape)
    return raw


def decoded(name: str, raw: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]).astype(np.float64)


@dataclass
class Activations:
    """What a matmul reads, and the float64 values that it stands for."""

    quants: np.ndarray  # int8 (or f32) (rows, columns)
    records: np.ndarray  # f32 (rows, columns / 32, 4): scale, scale * sum, and the bits of two i32 half sums

    @property
    def values(self) -> np.ndarray:
        if self.quants.dtype == np.float32:
            return self.quants.astype(np.float64)
        scales = self.records[..., 0].astype(np.float64)
        return (self.quants.reshape(*scales.shape, 32) * scales[..., None]).reshape(self.quants.shape)

    def __getitem__(self, row: int) -> Activations:
        return Activations(self.quants[row : row + 1], self.records[row : row + 1])


def quantized(quants: np.ndarray, scales: np.ndarray) -> Activations:
    records = np.zeros((*scales.shape, 4), np.float32)
    half_sums = quants.reshape(*scales.shape, 2, 16).sum(-1, dtype=np.int32)
    records[..., 0] = scales
    records[..., 1] = scales * half_sums.sum(-1).astype(np.float32)
    records.view(np.int32)[..., 2:] = half_sums
    return Activations(np.ascontiguousarray(quants, np.int8), records)


def activations(name: str, rows: int, columns: int, seed: int = 1) -> Activations:
    rng = np.random.default_rng(seed)
    if name in FLOATS:
        return Activations(rng.standard_normal((rows, columns)).astype(np.float32), np.zeros((rows, 1, 4), np.float32))
    scales = rng.uniform(0.001, 0.05, (rows, columns // 32)).astype(np.float32)
    return quantized(rng.integers(-127, 128, (rows, columns)), scales)


def multiply(name: str, level: levels.Level, raw: np.ndarray, x: Activations, bias: np.ndarray | None = None,
             out: np.ndarray | None = None, grain: int = 5) -> np.ndarray:  # fmt: skip
    """f32 (rows of x, rows of raw padded to 16) by the kernel; added to `out`, in place, where that is given."""
    layout = PACKINGS[name]
    rows, columns = x.quants.shape
    packed = layout.pack(raw, columns)
    addend = 0 if out is None else out.ctypes.data
    out = np.full((rows, 16 * len(packed)), np.nan, np.float32) if out is None else out
    op, step = np.zeros(OP_WORDS, np.int64), np.array([99, rows], np.int64)
    op[OP_ROW_COUNT] = 1
    op[args.WEIGHTS], op[args.TILE_BYTES], op[args.TILES] = packed.ctypes.data, packed.shape[1], len(packed)
    op[args.GRAIN], op[args.SPANS] = grain, layout.spans(columns)
    op[args.QUANTS], op[args.QUANTS_STRIDE] = x.quants.ctypes.data, x.quants.strides[0]
    op[args.RECORDS], op[args.RECORDS_STRIDE] = x.records.ctypes.data, x.records.strides[0]
    op[args.OUT], op[args.OUT_STRIDE], op[args.ADDEND] = out.ctypes.data, out.strides[0], addend
    op[args.BIAS] = 0 if bias is None else bias.ctypes.data
    address = jit.code(level).address(matmul_kernel(name, level))
    kernel = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(address)
    for chunk in range(-(-len(packed) // grain)):
        kernel(op.ctypes.data, step.ctypes.data, chunk)
    return out


def check_close(out: np.ndarray, name: str, raw: np.ndarray, x: Activations) -> None:
    """Within 1e-6 of the sum of the terms' sizes, of which a scale and its minimum are two."""
    w, values = decoded(name, raw), x.values
    sizes = np.abs(w)
    if PACKINGS[name].quantized:
        sizes = np.broadcast_to(np.abs(w).max(-1, keepdims=True), w.shape)
    assert np.all(np.abs(out[:, : len(raw)] - values @ w.T) <= 1e-6 * (np.abs(values) @ sizes.T))
    assert np.all(out[:, len(raw) :] == 0)


@pytest.mark.parametrize("name", QUANTIZED + FLOATS)
def test_every_size_and_level_gives_a_row_the_same_right_bits(name: str) -> None:
    unit = blocks.BY_NAME[name].values if name in QUANTIZED else 7
    for outputs, columns in ((1, unit), (16, 2 * unit), (100, 3 * unit)):
        raw = weights(name, outputs, columns, seed=outputs)
        x = activations(name, 9, columns)
        alone = np.concatenate([multiply(name, HERE[0], raw, x[row], grain=1 + row % 7) for row in range(9)])
        check_close(alone, name, raw, x)
        for level in HERE:
            for rows in (1, 2, 3, 5, 9):
                some = Activations(x.quants[:rows], x.records[:rows])
                together = multiply(name, level, raw, some, grain=4 + rows % 3)
                assert np.array_equal(together.view(np.int32), alone[:rows].view(np.int32)), (level.name, rows)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x77, 0x80, 0x7F])
def test_extreme_weights_and_activations_do_not_saturate(name: str, fill: int) -> None:
    columns = 2 * max(32, blocks.BY_NAME[name].values)
    raw = weights(name, 16, columns, fill)
    ones = np.ones(columns)
    signs = np.array([ones, -ones, np.resize([1, -1], columns), np.repeat([1, -1], columns // 2)])
    x = quantized((127 * signs).astype(np.int8), np.full((4, columns // 32), 0.01, np.float32))
    outs = [multiply(name, level, raw, x) for level in HERE]
    check_close(outs[0], name, raw, x)
    assert all(np.array_equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_single_input_brings_out_each_weight(name: str) -> None:
    columns = max(32, blocks.BY_NAME[name].values)
    raw = weights(name, 20, columns)
    scales = np.zeros((columns, columns // 32), np.float32)
    scales[np.arange(columns), np.arange(columns) // 32] = 1 / 127
    w = decoded(name, raw)
    out = multiply(name, HERE[0], raw, quantized(127 * np.eye(columns, dtype=np.int64), scales))[:, :20].T
    # a weight may be a small difference of scale * code and minimum: its error is relative to those
    assert np.all(np.abs(out - w) <= 4e-7 * np.abs(w).max(-1, keepdims=True))


def test_mxfp4_scales_are_powers_of_two_to_the_smallest() -> None:
    exponents = np.array([0, 1, 2, 3, 127, 200, 254], np.uint8)
    raw = np.full((len(exponents), 17), 0x22, np.uint8)  # code 2 is 1.0, stored doubled
    raw[:, 0] = exponents
    quants = np.zeros((1, 32), np.int64)
    quants[0, 5] = 1
    x = quantized(quants, np.ones((1, 1), np.float32))
    for level in HERE:
        out = multiply("MXFP4", level, raw, x)[0, : len(exponents)]
        assert np.array_equal(out, 2.0 ** (exponents.astype(np.float64) - 127))


# --- the definition, in exact arithmetic ------------------------------------------------------------------------------


def rounded(x: Fraction) -> np.float32:
    """The nearest f32, ties to even."""
    near = np.float32(float(x))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda f: (abs(Fraction(float(f)) - x), int(f.view(np.uint32)) & 1))


def fma(a: float, b: float, c: float) -> float:
    return float(rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))))


def parts(name: str, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Integer weights (rows, columns); f32 scales and minimums (rows, groups)."""
    b = blocks.BY_NAME[name].blocks(raw)
    rows = len(raw)
    minimums = None
    if name == "Q4_1":
        codes = blocks.unpack_bits(b["qs"], 4, 16)
        scales, minimums = b["d"].astype(np.float32), b["m"].astype(np.float32)
    elif name == "Q8_0":
        codes, scales = b["qs"], b["d"].astype(np.float32)
    elif name == "Q2_K":
        codes = blocks.unpack_bits(b["qs"], 2, 32)
        scales = b["d"].astype(np.float32)[..., None] * (b["scales"] & 15).astype(np.float32)
        minimums = -(b["dmin"].astype(np.float32)[..., None] * (b["scales"] >> 4).astype(np.float32))
        minimums = minimums.reshape(rows, -1)
    elif name == "Q4_K":
        codes = blocks.unpack_bits(b["qs"], 4, 32)
        small, mins = blocks.k_scales_mins(b["scales"])
        scales = b["d"].astype(np.float32)[..., None] * small.astype(np.float32)
        minimums = -(b["dmin"].astype(np.float32)[..., None] * mins.astype(np.float32)).reshape(rows, -1)
    else:
        low, high = blocks.unpack_bits(b["ql"], 4, 64), blocks.unpack_bits(b["qh"], 2, 32)
        codes = (low | high << 4).astype(np.int32) - 32
        scales = b["d"].astype(np.float32)[..., None] * b["scales"].astype(np.float32)
    return codes.reshape(rows, -1).astype(np.int64), scales.reshape(rows, -1), minimums


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K"])
def test_the_result_is_the_defined_sequence_of_roundings(name: str) -> None:
    columns = 512
    raw, x = weights(name, 4, columns), activations(name, 1, columns)
    codes, scales, minimums = parts(name, raw)
    groups = scales.shape[1]
    size = columns // groups
    dots = (codes * x.quants[0].astype(np.int64)).reshape(4, groups, size).sum(-1)
    sums = x.quants[0].reshape(groups, size).sum(-1, dtype=np.int64)
    expected = []
    for row in range(4):
        total = 0.0
        for g in range(groups):
            scale = x.records[0, g * size // 32, 0]
            total = fma(float(dots[row, g]), scales[row, g] * scale, total)
            if minimums is not None:
                total = fma(minimums[row, g], scale * np.float32(sums[g]), total)
        expected.append(total)
    for level in HERE:
        assert multiply(name, level, raw, x)[0, :4].tolist() == expected


@pytest.mark.parametrize("name", FLOATS)
def test_a_float_result_is_one_fma_a_column_in_order(name: str) -> None:
    raw, x = weights(name, 3, 50), activations(name, 1, 50)
    w = decoded(name, raw)
    expected = []
    for row in range(3):
        total = 0.0
        for column in range(50):
            total = fma(w[row, column], x.quants[0, column], total)
        expected.append(total)
    for level in HERE:
        assert multiply(name, level, raw, x)[0, :3].tolist() == expected


# --- what is added, what is packed, what is compiled ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Q4_0", "F16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 6])
def test_bias_then_addend_are_added_and_the_addend_may_be_the_output(name: str, rows: int) -> None:
    raw, x = weights(name, 48, 64), activations(name, rows, 64)
    rng = np.random.default_rng(2)
    bias = rng.standard_normal(48).astype(np.float32)
    residual = rng.standard_normal((rows, 48)).astype(np.float32)
    for level in HERE:
        plain = multiply(name, level, raw, x)
        assert np.array_equal(multiply(name, level, raw, x, bias), plain + bias)
        assert np.array_equal(multiply(name, level, raw, x, bias, residual.copy()), (plain + bias) + residual)


@pytest.mark.parametrize("name", QUANTIZED + FLOATS)
def test_packed_weights_are_as_many_bytes_as_the_file_holds(name: str) -> None:
    raw = weights(name, 35, 512)
    packed = PACKINGS[name].pack(raw, 512)
    assert packed.nbytes == raw.nbytes // 35 * 48
    if name in ("Q8_0", *FLOATS):  # the same bytes in another order; the others are cut within bytes
        assert np.array_equal(np.bincount(packed.ravel())[1:], np.bincount(raw.ravel(), minlength=256)[1:])


def test_packing_in_parts_is_packing_at_once() -> None:
    raw = weights("Q4_K", 80, 65536)  # above what is packed at a time
    whole = PACKINGS["Q4_K"].pack(raw, 65536)
    by_tile = [PACKINGS["Q4_K"].pack(raw[i : i + 16], 65536) for i in range(0, 80, 16)]
    assert np.array_equal(whole, np.concatenate(by_tile))


def test_types_without_weights_have_no_kernel() -> None:
    assert "I32" not in PACKINGS
    with pytest.raises(KeyError):
        matmul_kernel("I32", levels.LEVELS["plain"])


def test_every_block_type_that_decodes_has_a_packing_of_its_size() -> None:
    for kind in blocks.BY_NAME.values():
        layout = PACKINGS.get(kind.name)
        assert (layout is not None) == kind.decodable
        if layout is not None:
            assert (layout.values, layout.nbytes) == (kind.values, kind.nbytes)


X86 = "x86_64-unknown-linux-gnu"
INSTRUCTION = {
    "avx512vnni": r"\bvpdpbusd\s.*%zmm",
    "avxvnni": r"\{vex\}\s+vpdpbusd\s.*%ymm",
    "avx2": r"\bvpmaddubsw\s.*%ymm",
    "plain": r"\bpmullw\s.*%xmm",
}


@pytest.mark.parametrize("level", levels.LEVELS.values(), ids=lambda level: level.name)
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q6_K", "IQ4_XS", "F16"])
def test_every_level_compiles_to_its_instructions(name: str, level: levels.Level) -> None:
    assembly = jit.compile_kernel(matmul_kernel(name, level), level, triple=X86, assembly=True)
    wanted = INSTRUCTION[level.name] if name in QUANTIZED else r"\bvfmadd" if level.has_fma else r"\bcvtpd2ps"
    assert re.search(wanted, assembly)


@pytest.mark.slow
@pytest.mark.parametrize("level", levels.LEVELS.values(), ids=lambda level: level.name)
@pytest.mark.parametrize("name", QUANTIZED + FLOATS)
def test_every_type_compiles_at_every_level(name: str, level: levels.Level) -> None:
    assert jit.compile_kernel(matmul_kernel(name, level), level, triple=X86)


def in_plain_code(s: Simd, name: str, result: ir.Type, *args: Value) -> Value:
    """AVX-512's vpdpbusd and vpshufb, spelled out: what `Simd.call` emits for them on a processor that lacks them."""
    b = s.b
    if ".vpdpbusd." in name:
        total, w, a = args
        wide = ir.VectorType(ir.IntType(32), w.type.count)
        products = b.mul(b.zext(w, wide), b.sext(a, wide))
        for part in range(4):
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), result.count), list(range(part, w.type.count, 4)))
            total = b.add(total, b.shuffle_vector(products, products, lanes))
        return total
    if ".pshuf.b.512" in name:
        table, codes = args
        halves = [call(s, "llvm.x86.avx2.pshuf.b", ir.VectorType(ir.IntType(8), 32), s.part(table, i, 32), s.part(codes, i, 32))
                  for i in (0, 32)]  # fmt: skip
        return s.join(*halves)
    return call(s, name, result, *args)


call = Simd.call


@pytest.mark.skipif("avx2" not in levels.host_features(), reason="a processor with AVX2")
@pytest.mark.parametrize("name", [name for name, layout in PACKINGS.items() if layout.quantized])
@pytest.mark.parametrize("dot", ["vnni512", "vnni256"])
def test_vnni_code_gives_the_same_bits(name: str, dot: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The code for processors with VNNI, with its few instructions that this one may lack spelled out in others."""
    monkeypatch.setattr(Simd, "call", in_plain_code)
    monkeypatch.setattr(jit, "cache_root", lambda: tmp_path)  # the key of a cached kernel knows nothing of this
    like = "avx512vnni" if dot == "vnni512" else "avxvnni"
    level = dataclasses.replace(levels.LEVELS[like], name=f"spelled-{dot}", cpu="x86-64-v3", features="")
    raw = weights(name, 100, 512)
    for rows in (1, 2, 5):
        x = activations(name, rows, 512)
        assert np.array_equal(multiply(name, level, raw, x), multiply(name, levels.LEVELS["plain"], raw, x))


@pytest.mark.parametrize("name", sorted(PACKINGS))
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_the_packing_kernel_gives_what_numpy_packing_gives(name: str, rows: int) -> None:
    layout = PACKINGS[name]
    columns = 2 * max(layout.values, 32)
    raw = np.random.default_rng(rows).integers(0, 256, (rows, columns // layout.values * layout.nbytes), np.uint8)
    assert np.array_equal(repack.pack(layout, raw, columns, jit.code(levels.native_level())), layout.pack(raw, columns))
