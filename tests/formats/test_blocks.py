"""Block types against the gguf package, an independent implementation of the same formats."""

import itertools

import gguf
import numpy as np
import pytest

from edgeinfer.formats import blocks

WEIGHT_TYPES = [t for t in blocks.BY_ID.values() if t.decodable]
F16_EDGES = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x3C00)  # as bits


def names(block_type):
    return block_type.name


def assert_decodes_like_gguf(block_type, raw):
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(block_type.id))
    decoded = block_type.decode(raw)
    assert decoded.dtype == np.float32
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(decoded), nan)
    bits = np.ascontiguousarray(expected).view(np.uint32)
    np.testing.assert_array_equal(decoded.view(np.uint32)[~nan], bits[~nan])  # -0.0 is not 0.0


def edge_blocks(block_type):
    """Every combination of edge values for the scales with extreme and alternating codes."""
    fields = block_type.dtype.fields or {}
    halves = [name for name, (dtype, *_) in fields.items() if dtype == np.float16]
    cases = []
    for codes in (0x00, 0xFF, 0x55, 0xAA, 0x80, 0x7F):
        for edges in itertools.product(F16_EDGES, repeat=len(halves)):
            block = np.full(block_type.nbytes, codes, np.uint8).view(block_type.dtype)
            for name, bits in zip(halves, edges, strict=True):
                block[name] = np.array(bits, np.uint16).view(np.float16)
            if "e" in fields:  # MXFP4's scale is a byte
                for e in (0, 1, 2, 127, 254, 255):
                    block["e"] = e
                    cases.append(block.view(np.uint8).copy())
            cases.append(block.view(np.uint8))
    return np.stack(cases)


@pytest.mark.parametrize("block_type", blocks.BY_ID.values(), ids=names)
def test_sizes_are_ggmls(block_type):
    known = gguf.GGMLQuantizationType(block_type.id)
    assert known.name == block_type.name
    assert gguf.GGML_QUANT_SIZES[known] == (block_type.values, block_type.nbytes)
    assert blocks.BY_NAME[block_type.name] is block_type
    assert getattr(blocks, block_type.name) is block_type


def test_the_types_are_these():
    floats, legacy = "F32 F16 BF16", "Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 IQ4_NL IQ4_XS MXFP4"
    expected = f"{floats} {legacy} Q2_K Q3_K Q4_K Q5_K Q6_K".split()
    assert {t.name for t in WEIGHT_TYPES} == set(expected)
    assert set(blocks.BY_NAME) == {*expected, "I8", "I16", "I32", "I64", "F64"}


@pytest.mark.parametrize("block_type", WEIGHT_TYPES, ids=names)
def test_random_blocks(block_type):
    rng = np.random.default_rng(block_type.id)
    assert_decodes_like_gguf(block_type, rng.integers(0, 256, (500, 2 * block_type.nbytes), dtype=np.uint8))


@pytest.mark.parametrize("block_type", WEIGHT_TYPES, ids=names)
def test_edge_blocks(block_type):
    assert_decodes_like_gguf(block_type, edge_blocks(block_type))


@pytest.mark.parametrize("block_type", [blocks.F16, blocks.BF16], ids=names)
def test_every_16_bit_float(block_type):
    assert_decodes_like_gguf(block_type, np.arange(65_536, dtype="<u2").view(np.uint8).reshape(256, 512))


@pytest.mark.parametrize("block_type", WEIGHT_TYPES, ids=names)
def test_any_leading_shape(block_type):
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (4, 3, 2 * block_type.nbytes), dtype=np.uint8)
    whole = block_type.decode(raw)
    assert whole.shape == (4, 3, 2 * block_type.values)
    one = block_type.decode(raw[2, 1])
    np.testing.assert_array_equal(one.view(np.uint32), whole[2, 1].view(np.uint32))
    strided = block_type.decode(raw[::2, ::-1])
    np.testing.assert_array_equal(strided.view(np.uint32), whole[::2, ::-1].view(np.uint32))
    second = block_type.decode(raw[..., block_type.nbytes :])  # rows that are not contiguous
    np.testing.assert_array_equal(second.view(np.uint32), whole[..., block_type.values :].view(np.uint32))
    assert block_type.decode(raw[:0]).shape == (0, 3, 2 * block_type.values)


def test_fields_are_views():
    raw = np.zeros((2, 144), np.uint8)
    raw[1, 4:16] = 7
    view = blocks.Q4_K.blocks(raw)
    assert view.shape == (2, 1)
    np.testing.assert_array_equal(view["scales"][1, 0], 7)
    assert np.shares_memory(view, raw)


def test_row_bytes():
    assert blocks.Q4_0.row_bytes(576) == 324
    assert blocks.F16.row_bytes(3) == 6
    with pytest.raises(ValueError, match="33 values is not a whole number of Q4_0 blocks of 32"):
        blocks.Q4_0.row_bytes(33)


def test_bad_bytes_are_refused():
    with pytest.raises(ValueError, match="whole 18-byte blocks"):
        blocks.Q4_0.decode(np.zeros(17, np.uint8))
    with pytest.raises(ValueError, match="uint8"):
        blocks.Q4_0.decode(np.zeros(18, np.int8))
    with pytest.raises(TypeError, match="I32 tensors"):
        blocks.I32.decode(np.zeros(4, np.uint8))
