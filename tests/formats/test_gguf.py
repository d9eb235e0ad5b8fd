"""The GGUF reader on sound, split and hostile files; the writer against our reader and the gguf package's."""

import errno
import importlib.util
import os
import sys
import time
import tracemalloc
from math import isnan, prod
from pathlib import Path

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from edgeinfer.formats import blocks, gguf_header
from edgeinfer.formats.errors import ModelFormatError
from edgeinfer.formats.gguf import open_gguf
from edgeinfer.formats.gguf_header import parse_header
from edgeinfer.formats.gguf_write import write_gguf

_spec = importlib.util.spec_from_file_location("hostile_gguf", Path(__file__).with_name("hostile_gguf.py"))
hostile = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hostile)

NAMED = hostile.named_cases()
MIB = 1 << 20


def refused(file: bytes) -> ModelFormatError:
    with pytest.raises(ModelFormatError) as caught:
        parse_header(file, "model.gguf")
    return caught.value


def packed(block_type, shape, fill=0):
    return np.full(prod(shape[:-1]) * block_type.row_bytes(shape[-1]), fill, np.uint8)


def small_model(path, names=("a", "b"), **metadata):
    tensors = [(name, (3, 32), blocks.Q4_0, packed(blocks.Q4_0, (3, 32), 65 + i)) for i, name in enumerate(names)]
    write_gguf(path, {"general.architecture": "llama", **metadata}, tensors)
    return path


# Hostile files


@pytest.mark.parametrize("case", NAMED)
def test_malformed_file_is_refused_with_its_reason(case):
    file, reason = NAMED[case]
    tracemalloc.start()
    start = time.perf_counter()
    try:
        error = refused(file)
        seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reason in error.reason
    assert error.path == "model.gguf" and 0 <= error.offset <= len(file)
    assert len(str(error)) < 1_000
    assert seconds < 1 and peak < 64 * MIB


def test_there_are_many_named_cases():
    assert len(NAMED) >= 100


def test_the_same_on_disk_leaves_nothing_open(tmp_path):
    """Every named case and every truncation through open_gguf: one error type, no descriptor or map left."""
    path = tmp_path / "model.gguf"
    files = [file for file, _ in NAMED.values() if len(file) < MIB] + list(hostile.truncations(hostile.seed()))

    def open_files():
        return set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set()

    before = open_files()
    for file in files:
        path.write_bytes(file)
        with pytest.raises(ModelFormatError):
            open_gguf(path)
    assert open_files() == before
    if sys.platform == "linux":
        assert str(path) not in Path("/proc/self/maps").read_text()


def test_every_truncation_is_refused():
    seed = hostile.seed()
    parse_header(seed, "seed")
    for file in hostile.truncations(seed):
        refused(file)


def test_boundary_sweep():
    """Mutated files are refused in the one way, or what they say is consistent."""
    seed, count, accepted, slowest = hostile.seed(), 0, 0, 0.0
    for file in hostile.boundary_sweep(seed):
        count += 1
        start = time.perf_counter()
        try:
            header = parse_header(file, "mutant")
        except ModelFormatError:
            pass
        else:
            accepted += 1
            end = header.data_offset
            for tensor in sorted(header.tensors.values(), key=lambda t: t.offset):
                assert end <= tensor.offset and tensor.offset + tensor.nbytes <= len(file)
                assert tensor.nbytes == prod(tensor.shape[:-1]) * tensor.type.row_bytes(tensor.shape[-1])
                end = tensor.offset + tensor.nbytes
        slowest = max(slowest, time.perf_counter() - start)
    assert count >= 10_000 and 0 < accepted < count
    assert slowest < 1


AT_LIMIT = {
    "key of 65535 bytes": hostile.gguf((hostile.entry(b"k" * 65_535, 4, hostile.u32(0)),)),
    "name of 255 bytes": hostile.gguf((), (hostile.tensor(b"n" * 255),), bytes(128)),
    "4 dimensions": hostile.gguf((), (hostile.tensor(b"t", (32, 1, 1, 1)),), bytes(128)),
    "string of 16 MiB": hostile.gguf((hostile.entry(b"k", 8, hostile.string(b"s" * (16 * MIB))),)),
    "array of 16 Mi": hostile.gguf((hostile.entry(b"k", 9, hostile.array(0, 16 * MIB, bytes(16 * MIB))),)),
    "alignment 1": hostile.gguf((hostile.entry(b"general.alignment", 4, hostile.u32(1)),)),
    "alignment 65536": hostile.gguf((hostile.entry(b"general.alignment", 4, hostile.u32(65_536)),)),
    "65536 entries": hostile.gguf(tuple(hostile.entry(b"%x" % i, 0, b"\0") for i in range(65_536))),
    "version 2": hostile.gguf(version=2),
    "nothing": hostile.gguf(),
}


@pytest.mark.parametrize("case", AT_LIMIT)
def test_at_the_limit_is_accepted(case):
    parse_header(AT_LIMIT[case], "model.gguf")


@pytest.mark.slow
def test_tensors_and_strings_at_the_limit():
    table = tuple(hostile.tensor(b"%x" % i, (1,), 24, 32 * i) for i in range(65_536))
    assert len(parse_header(hostile.gguf((), table, bytes(32 * 65_536)), "t").tensors) == 65_536
    strings = hostile.gguf((hostile.entry(b"k", 9, hostile.array(8, 2 * MIB, bytes(16 * MIB))),))
    assert parse_header(strings, "s").metadata["k"] == [""] * (2 * MIB)


def test_a_header_may_not_be_endless(monkeypatch):
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 1_000)
    entry = hostile.entry(b"k", 8, hostile.string(b"s" * 960))
    assert "larger than 1000 bytes" in refused(hostile.gguf((entry,)) + bytes(100)).reason


def test_a_vocabulary_parses_without_a_pile_of_garbage():
    tokens = hostile.array(8, 50_000, b"".join(hostile.string(b"token%d" % i) for i in range(50_000)))
    file = hostile.gguf((hostile.entry(b"tokens", 9, tokens),))
    tracemalloc.start()
    metadata = parse_header(file, "vocabulary").metadata
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert metadata["tokens"][49_999] == "token49999"
    assert peak < 8 * len(file)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are POSIX")
def test_a_pipe_or_folder_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", tmp_path):
        with pytest.raises(ModelFormatError, match="not a regular file"):
            open_gguf(path)


def test_a_missing_file_is_the_systems_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_gguf(tmp_path / "no.gguf")


# Reading


def test_values_and_tensors(tmp_path):
    path = tmp_path / "seed.gguf"
    path.write_bytes(hostile.seed())
    with open_gguf(path) as model:
        assert model.path == str(path) and model.nbytes == path.stat().st_size
        numbers = [model.metadata[f"n.{i}"] for i in (0, 1, 2, 3, 4, 5, 10, 11)]
        assert numbers == [7] * 8 and all(type(n) is int for n in numbers)
        assert type(model.metadata["n.6"]) is type(model.metadata["n.12"]) is float
        assert model.metadata["flag"] is True
        assert model.metadata["tokens"] == ["<s>", "é", ""]
        np.testing.assert_array_equal(model.metadata["scores"], np.array([0, -1, 2.5], np.float32))
        assert model.metadata["scores"].dtype == np.float32
        np.testing.assert_array_equal(model.metadata["flags"], [False, True])
        a = model.tensors["a"]
        assert (a.name, a.shape, a.type, a.nbytes) == ("a", (2, 32), blocks.Q4_0, 36)
        data = np.array(list(range(256)) + [0] * 50, np.uint8)
        np.testing.assert_array_equal(model.raw("a"), data[:36].reshape(2, 18))
        np.testing.assert_array_equal(model.raw("c"), data[96 : 96 + 210].reshape(1, 210))
        np.testing.assert_array_equal(model.array("b"), data[64:80].view("<f4"))
        np.testing.assert_array_equal(model.array("a"), blocks.Q4_0.decode(data[:36].reshape(2, 18)))
        with pytest.raises(ModelFormatError, match="'d' is missing"):
            model.raw("d")


def test_get_is_typed(tmp_path):
    path = small_model(tmp_path / "m.gguf", n=5, f=0.5, b=True, s=["x"], a=np.array([1, 2], np.int32))
    with open_gguf(path) as model:
        assert model.get("n", int) == 5 and model.get("f", float) == 0.5 and model.get("b", bool) is True
        assert model.get("s", list) == ["x"] and model.get("a", list) == [1, 2]
        assert model.get("a", (int, np.ndarray)).dtype == np.int32
        assert model.get("n", (int, list)) == 5
        assert model.get("absent", int, None) is None
        for key, kind, reason in [
            ("absent", int, "'absent' is missing: expected int"),
            ("b", int, "'b' is the bool True: expected int"),
            ("n", float, "'n' is the int 5: expected float"),
            ("n", (str, list), "'n' is the int 5: expected str or list"),
            ("a", int, "'a' is an array of int32: expected int"),
            ("s", str, "'s' is an array of strings: expected str"),
        ]:
            with pytest.raises(ModelFormatError) as caught:
                model.get(key, kind)
            assert reason in caught.value.reason


def test_integer_tensors_are_no_weights(tmp_path):
    write_gguf(tmp_path / "m.gguf", {}, [("ids", (4,), blocks.I32, np.arange(4, dtype="<i4"))])
    with open_gguf(tmp_path / "m.gguf") as model:
        np.testing.assert_array_equal(model.raw("ids").view("<i4"), [[0, 1, 2, 3]])
        with pytest.raises(ModelFormatError, match="'ids' is I32: expected weights"):
            model.array("ids")


def test_a_large_tensor_decodes_in_pieces_to_the_same(tmp_path):
    shape = (5, 700, 512)
    raw = np.random.default_rng(0).integers(0, 256, packed(blocks.Q8_0, shape).size, dtype=np.uint8)
    write_gguf(tmp_path / "m.gguf", {}, [("w", shape, blocks.Q8_0, raw)])
    with open_gguf(tmp_path / "m.gguf") as model:
        values = model.array("w")
        assert values.shape == shape
        expected = blocks.Q8_0.decode(raw.reshape(3_500, -1)).reshape(shape)
        np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


def test_views_are_read_only_and_outlive_close(tmp_path):
    path = small_model(tmp_path / "m.gguf")
    with open_gguf(path) as model:
        view = model.raw("b")
        with pytest.raises(ValueError, match="read-only"):
            view[0, 0] = 1
        model.release("b")
        np.testing.assert_array_equal(view, 66)
    np.testing.assert_array_equal(view, 66)
    with pytest.raises(ValueError, match="closed"):
        model.raw("a")
    model.close()
    if sys.platform == "linux":
        del view
        assert str(path) not in Path("/proc/self/maps").read_text()


def test_release_keeps_the_values(tmp_path):
    data = np.arange(100_000, dtype="<f4")
    write_gguf(tmp_path / "m.gguf", {}, [("w", (100, 1_000), blocks.F32, data)])
    with open_gguf(tmp_path / "m.gguf") as model:
        before = model.array("w")
        model.release("w")
        np.testing.assert_array_equal(model.array("w"), before)


# Split models


def split_model(folder, names=(("a",), ("b", "c"), ("d",)), **changes):
    paths = []
    for number, part in enumerate(names):
        metadata = {
            "split.no": np.uint16(number),
            "split.count": np.uint16(len(names)),
            "split.tensors.count": np.int32(sum(map(len, names))),
        }
        if number == 0:
            metadata["general.architecture"] = "llama"
        metadata.update(changes.get(f"part{number}", {}))
        path = folder / f"m-{number + 1:05}-of-{len(names):05}.gguf"
        write_gguf(path, metadata, [(n, (2, 32), blocks.Q8_0, packed(blocks.Q8_0, (2, 32), ord(n))) for n in part])
        paths.append(path)
    return paths


def test_split_files_are_one_model(tmp_path):
    paths = split_model(tmp_path)
    for path in paths:
        with open_gguf(path) as model:
            assert model.nbytes == sum(p.stat().st_size for p in paths)
            assert list(model.tensors) == ["a", "b", "c", "d"]
            assert [model.tensors[n].shard for n in "abcd"] == [0, 1, 1, 2]
            assert model.get("general.architecture", str) == "llama"
            for name in "abcd":
                np.testing.assert_array_equal(model.raw(name), ord(name))
                model.release(name)


@pytest.mark.parametrize(
    ("names", "changes", "reason"),
    [
        ((("a",), ("b", "a")), {}, "tensor 'a' appears in two parts"),
        ((("a",), ("b",)), {"part1": {"general.architecture": "llama"}}, "'general.architecture' appears in two parts"),
        ((("a",), ("b",)), {"part1": {"split.no": np.uint16(0)}}, "part 1 of 2, its name says 2 of 2"),
        ((("a",), ("b",)), {"part0": {"split.count": np.uint16(3)}}, "part 1 of 3, its name says 1 of 2"),
        ((("a",), ("b",)), {"part0": {"split.count": "2"}}, "'split.count' is the str '2': expected int"),
        ((("a",), ("b",)), {"part1": {"split.no": np.array([1, 1])}}, "'split.no' is an array of int64: expected int"),
        ((("a",), ("b",)), {"part0": {"split.tensors.count": np.int32(3)}}, "2 tensors in all parts"),
    ],
)
def test_inconsistent_split_is_refused(tmp_path, names, changes, reason):
    path = split_model(tmp_path, names, **changes)[0]
    with pytest.raises(ModelFormatError) as caught:
        open_gguf(path)
    assert reason in caught.value.reason


def test_missing_or_misnamed_part_is_refused(tmp_path):
    first, second, _ = split_model(tmp_path)
    second.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelFormatError, match="part 2 of the model is missing: expected .*m-00002-of-00003.gguf"):
        open_gguf(first)
    with pytest.raises(ModelFormatError, match=r"part 2 of 3, its name says 1 of 1 \(parts are named"):
        open_gguf(tmp_path / "elsewhere.gguf")
    alone = small_model(tmp_path / "x-00001-of-00002.gguf")
    with pytest.raises(ModelFormatError, match="part 1 of 1, its name says 1 of 2"):
        open_gguf(alone)
    with pytest.raises(ModelFormatError, match="part 5 of 2"):
        open_gguf(tmp_path / "x-00005-of-00002.gguf")


# Writing


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
dtypes = [np.dtype(code) for code in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", "?")]
scalars = st.builds(lambda d, raw: of_bytes(d, raw)[0], st.sampled_from(dtypes), st.binary(min_size=8, max_size=8))
arrays = st.builds(lambda d, raw, n: of_bytes(d, raw * n), st.sampled_from(dtypes), st.binary(min_size=8, max_size=8),
                   st.integers(0, 3))  # fmt: skip
values = st.one_of(
    text, st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(width=32), st.lists(text), scalars, arrays
)


def of_bytes(dtype, raw):
    values = np.frombuffer(raw, "u1") & 1 if dtype == np.bool_ else np.frombuffer(raw, "u1")
    return values.view(dtype)


def same(written, read):
    if isinstance(written, np.ndarray):
        return written.dtype == read.dtype and written.tobytes() == read.tobytes()
    if isinstance(written, np.generic):
        written = written.item()
    if isinstance(written, float) and isnan(written):
        return isnan(read)
    return type(written) is type(read) and written == read


@settings(deadline=None, max_examples=150)
@given(
    metadata=st.dictionaries(keys.filter(lambda k: not k.startswith(("general.", "split."))), values, max_size=6),
    alignment=st.sampled_from([None, 1, 8, 32, 4096]),
    tensors=st.dictionaries(
        keys,
        st.tuples(st.sampled_from(list(blocks.BY_ID.values())), st.lists(st.integers(1, 3), min_size=1, max_size=4)),
        max_size=4,
    ),
)
def test_what_is_written_is_read(tmp_path_factory, metadata, alignment, tensors):
    path = tmp_path_factory.getbasetemp() / "round_trip.gguf"
    if alignment is not None:
        metadata["general.alignment"] = alignment
    rng, content = np.random.default_rng(0), []
    for name, (block_type, dims) in tensors.items():
        shape = (*dims[:-1], dims[-1] * block_type.values)
        content.append((name, shape, block_type, rng.bytes(packed(block_type, shape).size)))
    write_gguf(path, metadata, content)
    with open_gguf(path) as model:
        assert list(model.metadata) == list(metadata) and list(model.tensors) == list(tensors)
        assert all(same(value, model.metadata[key]) for key, value in metadata.items())
        for name, shape, block_type, data in content:
            info = model.tensors[name]
            assert (info.shape, info.type) == (shape, block_type) and info.offset % (alignment or 32) == 0
            assert model.raw(name).tobytes() == data


def test_the_gguf_package_reads_it(tmp_path):
    metadata = {
        "general.architecture": "llama", "general.alignment": 64, "u": 7, "big": 2**40, "minus": -3, "low": -(2**40),
        "f": 1e-5, "flag": False, "text": "é\n", "tokens": ["a", "", "▁b"], "scores": np.array([1.5, -2], np.float32),
        "d": np.float64(0.1), "short": np.uint16(9),
    }  # fmt: skip
    rng = np.random.default_rng(1)
    shapes = {"w": ((3, 512), blocks.Q6_K), "v": ((7,), blocks.F32), "x": ((2, 3, 64), blocks.Q5_1)}
    data = {name: rng.integers(0, 256, packed(t, shape).size, dtype=np.uint8) for name, (shape, t) in shapes.items()}
    write_gguf(tmp_path / "m.gguf", metadata, [(n, shape, t, data[n]) for n, (shape, t) in shapes.items()])
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    expected_types = {"u": "UINT32", "big": "UINT64", "minus": "INT32", "low": "INT64", "f": "FLOAT32", "d": "FLOAT64"}
    for key, type_name in {**expected_types, "short": "UINT16", "flag": "BOOL"}.items():
        assert reader.fields[key].types == [gguf.GGUFValueType[type_name]]
    for key, value in metadata.items():
        read = reader.fields[key].contents()
        assert read == (np.float32(value) if key == "f" else list(value) if key == "scores" else value)
    for tensor in reader.tensors:
        shape, block_type = shapes[tensor.name]
        assert tuple(tensor.shape) == shape[::-1] and tensor.tensor_type == block_type.id
        assert np.ascontiguousarray(tensor.data).tobytes() == data[tensor.name].tobytes()
        assert tensor.data_offset % 64 == 0
    assert (tmp_path / "m.gguf").stat().st_size % 64 == 0


def test_the_gguf_packages_files_are_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(3)
    writer.add_token_list(["x", "y"])
    writer.add_array("numbers", [1, 2, 3])
    weights = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32)
    writer.add_tensor("w", gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0), raw_dtype=8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "m.gguf") as model:
        assert model.get("llama.block_count", int) == 3 and model.get("tokenizer.ggml.tokens", list) == ["x", "y"]
        assert model.get("numbers", list) == [1, 2, 3]
        assert np.abs(model.array("w") - weights).max() < 0.02


Q4 = ("a", (2, 32), blocks.Q4_0, bytes(36))


@pytest.mark.parametrize(
    ("metadata", "tensors", "error", "reason"),
    [
        ({}, [Q4, Q4], ModelFormatError, "'a' appears twice"),
        ({"": 1}, [], ModelFormatError, "key is empty"),
        ({"general.alignment": 3}, [], ModelFormatError, "power of two"),
        ({"general.alignment": 0}, [], ModelFormatError, "power of two"),
        ({"k": "s" * (16 * MIB + 1)}, [], ModelFormatError, "at most 16777216"),
        ({}, [("n" * 256, (1,), blocks.I8, b"0")], ModelFormatError, "at most 255"),
        ({}, [("a", (1, 1, 1, 1, 1), blocks.I8, b"0")], ModelFormatError, "5 dimensions"),
        ({}, [("a", (2, 32), blocks.Q4_0, bytes(35))], ValueError, "'a' has 35 bytes of data: Q4_0 of shape"),
        ({}, [("a", (2, 33), blocks.Q4_0, bytes(36))], ValueError, "not a whole number"),
        ({}, [("a", (0, 32), blocks.Q4_0, b"")], ValueError, "positive dimensions"),
        ({}, [("a", (), blocks.Q4_0, b"")], ValueError, "positive dimensions"),
        ({"k": None}, [], TypeError, "'k' is a NoneType"),
        ({"k": [1, 2]}, [], TypeError, "'k' is a list"),
        ({"k": np.zeros((2, 2))}, [], TypeError, "'k' is a ndarray"),
        ({"k": np.float16(1)}, [], TypeError, "'k' has NumPy type float16"),
        ({"k": 2**64}, [], ValueError, "64 bits"),
        ({"k": 1e300}, [], ValueError, "too large for f32"),
        ({"k": "\ud800"}, [], ValueError, "surrogate"),
    ],
)
def test_the_writer_refuses_what_the_reader_would(tmp_path, metadata, tensors, error, reason):
    with pytest.raises(error, match=reason):
        write_gguf(tmp_path / "m.gguf", metadata, tensors)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync", "replace"])
def test_a_failed_write_changes_nothing(tmp_path, monkeypatch, call):
    if not hasattr(os, call):
        pytest.skip(f"no {call} here")
    path = small_model(tmp_path / "m.gguf")
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        small_model(path, ("c",))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["m.gguf"]


def test_a_file_system_without_fallocate_is_written(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    open_gguf(small_model(tmp_path / "m.gguf")).close()


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be replaced there")
def test_an_open_model_survives_being_replaced(tmp_path):
    path = small_model(tmp_path / "m.gguf")
    with open_gguf(path) as old:
        small_model(path, ("b", "a"))
        np.testing.assert_array_equal(old.raw("a"), 65)
        with open_gguf(path) as new:
            np.testing.assert_array_equal(new.raw("a"), 66)
