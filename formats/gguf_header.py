"""Parses the header of a GGUF file: version, metadata and the table of tensors. Trusts nothing in it.

Layout (ggml's docs/gguf.md, little-endian): magic, u32 version, u64 tensor count, u64 metadata count; per metadata
entry a string key, u32 type, value; per tensor a string name, u32 dimension count, u64 per dimension (fastest first),
u32 type, u64 offset; padding to the alignment; then the data, where the offsets count from. A string is a u64 length
and UTF-8 bytes.

Every count and length is compared with the bytes that are left before anything is made of it, and sizes are Python
ints, which cannot wrap. Whatever is wrong raises `ModelFormatError` with the byte where it was found.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from struct import Struct
from struct import error as StructError
from typing import Any, NoReturn

import numpy as np

from edgeinfer.formats.blocks import BY_ID, BlockType
from edgeinfer.formats.errors import ModelFormatError

MAX_ENTRIES = 65_536  # metadata entries, and tensors
MAX_HEADER_BYTES = 256 << 20  # the largest vocabularies in use need about 20 MiB
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 255  # of a tensor
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY = 16 << 20  # elements
MAX_STRINGS = 2 << 20  # elements of an array of strings: the most merges that a tokenizer may have
MAX_DIMENSIONS = 4
MAX_DIMENSION = 1 << 40
MAX_ALIGNMENT = 65_536
DEFAULT_ALIGNMENT = 32

STRING, ARRAY, U32, BOOL = 8, 9, 4, 7
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
NUMBER_TYPES = {id: np.dtype("<" + code) for id, code in _CODES.items()}  # value type -> NumPy type
_NUMBERS = {id: Struct("<" + code.replace("?", "B")) for id, code in _CODES.items()}  # a bool's byte is checked first
_U32, _U64 = _NUMBERS[U32], _NUMBERS[10]
_MIN_KEY_VALUE = 8 + 1 + 4 + 1  # bytes of the shortest metadata entry
_MIN_TENSOR = 8 + 1 + 4 + 8 + 4 + 8

# ggml's numbers for tensor types that are not read here, so that a refusal can name them
_OTHER_TENSOR_TYPES = {
    4: "Q4_2, removed", 5: "Q4_3, removed", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M", 31: "Q4_0_4_4, removed", 32: "Q4_0_4_8, removed",
    33: "Q4_0_8_8, removed", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip

# what is found under the name of a model file, and how it begins
_OTHER_FORMATS = {
    "an HTML page: the download failed?": (b"<!doctype", b"<html", b"<?xml", b"<head"),
    "an error message of a web server: the download failed?": (b'{"error', b'{"message'),
    "a git-lfs pointer, not the file itself: run 'git lfs pull', or download it": (b"version https://git-lfs",),
    "a GGML file from before GGUF: convert the model again": (b"lmgg", b"fmgg", b"tjgg", b"algg", b"GGML", b"GGJT"),
    "a zip archive (a PyTorch checkpoint?): convert the model to GGUF": (b"PK\x03\x04",),
    "a Python pickle, which is never loaded: convert the model to GGUF": (b"\x80\x02", b"\x80\x04", b"\x80\x05"),
    "a gzip archive: unpack it first": (b"\x1f\x8b",),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `shape` is in NumPy order: the contiguous dimension last."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int  # from the start of its file
    nbytes: int
    shard: int = 0  # which file of a split model


@dataclass(frozen=True)
class Header:
    """What the header of one file says."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data_offset: int  # where the tensor data starts


def parse_header(buffer: bytes | mmap.mmap, path: str, file_size: int | None = None, shard: int = 0) -> Header:
    """Parse the header at the start of `buffer`; `file_size` (default: the buffer's) is what tensors must fit into.

    Metadata values become str, int, float, bool, list[str], or a NumPy array for an array of numbers.
    """
    size = len(buffer) if file_size is None else file_size
    cursor = _Cursor(buffer, path)
    _check_magic(cursor)
    cursor.at = 4
    version = cursor.u32("version")
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version:
            cursor.fail("this is a big-endian GGUF file; convert it to little-endian (gguf_convert_endian)", 4)
        cursor.fail(f"GGUF version {version} is not supported: expected 3 or 2; convert the model again", 4)
    n_tensors = cursor.count("tensors", MAX_ENTRIES, _MIN_TENSOR)
    n_entries = cursor.count("metadata entries", MAX_ENTRIES, _MIN_KEY_VALUE)
    metadata = _read_metadata(cursor, n_entries)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    tensors = _read_tensors(cursor, n_tensors, alignment, shard)
    data_offset = -(-cursor.at // alignment) * alignment
    _check_extents(cursor, tensors, data_offset, size)
    placed = {t.name: replace(t, offset=data_offset + t.offset) for t in tensors}
    return Header(metadata, placed, data_offset)


def is_alignment(value: object) -> bool:
    """Whether `value` may be general.alignment: a power of two up to MAX_ALIGNMENT."""
    return type(value) is int and 1 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0


class _Cursor:
    """A position in a buffer. Each read first checks that the bytes are there."""

    def __init__(self, buffer: bytes | mmap.mmap, path: str) -> None:
        self.buffer, self.path, self.at = buffer, path, 0
        self.end = min(len(buffer), MAX_HEADER_BYTES)

    def fail(self, reason: str, at: int | None = None) -> NoReturn:
        raise ModelFormatError(self.path, reason, self.at if at is None else at)

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > self.end - self.at:
            if self.end < len(self.buffer):
                self.fail(f"the header is larger than {MAX_HEADER_BYTES} bytes")
            self.fail(f"truncated header: {what} needs {nbytes} bytes, but only {self.end - self.at} are left")

    def u32(self, what: str) -> int:
        return int(self.number(_U32, what))

    def u64(self, what: str) -> int:
        return int(self.number(_U64, what))

    def number(self, layout: Struct, what: str) -> Any:
        self.need(layout.size, what)
        (value,) = layout.unpack_from(self.buffer, self.at)
        self.at += layout.size
        return value

    def count(self, what: str, limit: int, min_bytes: int) -> int:
        """A u64 count of things of `min_bytes` or more; refused when the limit or the bytes left do not allow it."""
        start, count = self.at, self.u64(f"number of {what}")
        if count > limit:
            self.fail(f"{count} {what}: at most {limit} are allowed", start)
        if count * min_bytes > self.end - self.at:
            needed = f"need at least {count * min_bytes} bytes"
            self.fail(f"truncated header? {count} {what} {needed}, but only {self.end - self.at} are left", start)
        return count

    def string(self, what: str, limit: int) -> str:
        start, length = self.at, self.u64(f"length of {what}")
        if length > limit:
            self.fail(f"{what} of {length} bytes: at most {limit} are allowed", start)
        self.need(length, what)
        try:
            text = self.buffer[self.at : self.at + length].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8", start)
        self.at += length
        return text

    def name(self, what: str, limit: int) -> str:
        start, name = self.at, self.string(what, limit)
        if not name or "\0" in name:
            self.fail(f"{what} is empty" if not name else f"{what} {_quote(name)} holds a NUL character", start)
        return name


def _quote(name: str) -> str:
    return repr(name if len(name) <= 100 else name[:100] + "...")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        start = cursor.at
        key = cursor.name("metadata key", MAX_KEY_BYTES)
        what = f"metadata key {_quote(key)}"
        if key in metadata:
            cursor.fail(f"{what} appears twice", start)
        at = cursor.at
        type_id = cursor.u32(f"value type of {what}")
        value = metadata[key] = _read_value(cursor, type_id, what)
        if key == "general.alignment" and (type_id != U32 or not is_alignment(value)):
            cursor.fail(f"general.alignment must be a u32 power of two up to {MAX_ALIGNMENT}, not {value!r:.40}", at)
    return metadata


def _read_value(cursor: _Cursor, type_id: int, what: str) -> Any:
    if type_id == STRING:
        return cursor.string(f"value of {what}", MAX_STRING_BYTES)
    if type_id == ARRAY:
        return _read_array(cursor, what)
    layout = _NUMBERS.get(type_id)
    if layout is None:
        cursor.fail(f"{what} has unknown value type {type_id}: expected 0 to 12", cursor.at - 4)
    value = cursor.number(layout, f"value of {what}")
    if type_id != BOOL:
        return value
    if value > 1:
        cursor.fail(f"{what} is a bool of value {value}: expected 0 or 1", cursor.at - 1)
    return bool(value)


def _read_array(cursor: _Cursor, what: str) -> Any:
    start, type_id = cursor.at, cursor.u32(f"element type of {what}")
    if type_id == STRING:
        return _read_strings(cursor, cursor.count(f"strings in {what}", MAX_STRINGS, 8), what)
    dtype = NUMBER_TYPES.get(type_id)
    if dtype is None:
        kind = "an array of arrays" if type_id == ARRAY else f"an array of unknown element type {type_id}"
        cursor.fail(f"{what} is {kind}: expected numbers, bools or strings", start)
    count = cursor.count(f"elements in {what}", MAX_ARRAY, dtype.itemsize)
    # copied at once: an error that still held a view of the map would keep it from being closed
    data = np.frombuffer(cursor.buffer, np.uint8, count * dtype.itemsize, cursor.at).copy()
    if type_id == BOOL and (data > 1).any():
        cursor.fail(f"{what} is an array of bools with values besides 0 and 1")
    cursor.at += data.nbytes
    return data.view(dtype)


def _read_strings(cursor: _Cursor, count: int, what: str) -> list[str]:
    # Vocabularies have hundreds of thousands of these: the loop does what it must, and leaves explaining to `string`.
    buffer, at, end, unpack = cursor.buffer, cursor.at, cursor.end, _U64.unpack_from
    strings: list[str] = []
    try:
        for _ in range(count):
            start = at + 8
            at = start + unpack(buffer, at)[0]
            if at > end or at - start > MAX_STRING_BYTES:
                break
            strings.append(buffer[start:at].decode())
            cursor.at = at
        else:
            return strings
    except (StructError, UnicodeDecodeError):
        pass
    cursor.string(f"string {len(strings)} of {what}", MAX_STRING_BYTES)  # raises: it meets the same fault
    return strings


def _read_tensors(cursor: _Cursor, count: int, alignment: int, shard: int) -> list[TensorInfo]:
    """The table of tensors, with offsets as in the file: counted from the start of the data."""
    tensors: dict[str, TensorInfo] = {}
    for _ in range(count):
        start = cursor.at
        name = cursor.name("tensor name", MAX_NAME_BYTES)
        what = f"tensor {_quote(name)}"
        if name in tensors:
            cursor.fail(f"{what} appears twice", start)
        n_dims = cursor.u32(f"dimension count of {what}")
        if not 1 <= n_dims <= MAX_DIMENSIONS:
            cursor.fail(f"{what} has {n_dims} dimensions: expected 1 to {MAX_DIMENSIONS}", cursor.at - 4)
        ne = [cursor.u64(f"dimension of {what}") for _ in range(n_dims)]
        if not all(1 <= n <= MAX_DIMENSION for n in ne):
            cursor.fail(f"{what} has dimensions {ne}: each must be 1 to 2**40", cursor.at - 8 * n_dims)
        type_id = cursor.u32(f"type of {what}")
        block_type = BY_ID.get(type_id)
        if block_type is None:
            known = f" ({_OTHER_TENSOR_TYPES[type_id]})" if type_id in _OTHER_TENSOR_TYPES else ""
            cursor.fail(f"{what}: unsupported tensor type {type_id}{known}", cursor.at - 4)
        try:
            nbytes = block_type.row_bytes(ne[0])
        except ValueError as error:
            cursor.fail(f"{what}: {error}", cursor.at - 4)
        for n in ne[1:]:
            nbytes *= n
        offset = cursor.u64(f"offset of {what}")
        if offset % alignment:
            cursor.fail(f"{what} has offset {offset}, which is no multiple of the alignment {alignment}", cursor.at - 8)
        tensors[name] = TensorInfo(name, tuple(reversed(ne)), block_type, offset, nbytes, shard)
    return list(tensors.values())


def _check_extents(cursor: _Cursor, tensors: list[TensorInfo], data_offset: int, file_size: int) -> None:
    """Each tensor inside the file, no two over each other."""
    previous, end = "", 0
    for tensor in sorted(tensors, key=lambda t: t.offset):
        if tensor.offset < end:
            cursor.fail(f"tensors {_quote(previous)} and {_quote(tensor.name)} overlap", data_offset + tensor.offset)
        previous, end = tensor.name, tensor.offset + tensor.nbytes
        if data_offset + end > file_size:
            cursor.fail(
                f"tensor {_quote(tensor.name)} ends at byte {data_offset + end}, but the file has {file_size}: "
                "the download was cut short, or the header is wrong", min(data_offset + tensor.offset, file_size),
            )  # fmt: skip


def _check_magic(cursor: _Cursor) -> None:
    head = cursor.buffer[:256]
    if head[:4] == b"GGUF":
        return
    if not head:
        cursor.fail("the file is empty: the download failed?", 0)
    if b"GGUF".startswith(head):
        cursor.fail("truncated header: the file ends within the magic number", 0)
    for found, beginnings in _OTHER_FORMATS.items():
        if head.startswith(beginnings) or head.lstrip().lower().startswith(beginnings):
            cursor.fail(f"this is {found}", 0)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < len(cursor.buffer):
        cursor.fail("this is a safetensors file: convert the model to GGUF", 0)
    cursor.fail(f"not a GGUF file: it begins with {head[:4]!r}, expected b'GGUF'", 0)
