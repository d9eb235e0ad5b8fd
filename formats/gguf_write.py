"""Writes GGUF version 3 files: whole or not at all, and only what this package's reader accepts."""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from edgeinfer.formats.blocks import BlockType
from edgeinfer.formats.errors import ModelFormatError
from edgeinfer.formats.gguf_header import (
    ARRAY,
    BOOL,
    DEFAULT_ALIGNMENT,
    MAX_ALIGNMENT,
    NUMBER_TYPES,
    STRING,
    is_alignment,
    parse_header,
)

Tensor = tuple[str, Sequence[int], BlockType, "bytes | bytearray | memoryview | npt.NDArray[Any]"]
_NUMBER_IDS = {dtype: id for id, dtype in NUMBER_TYPES.items()}


def write_gguf(path: str | os.PathLike[str], metadata: Mapping[str, Any], tensors: Iterable[Tensor]) -> None:
    """Write a GGUF file of `metadata` and `tensors` (name, shape in NumPy order, type, the packed bytes).

    Metadata values: str; bool; int (the first of u32, i32, u64, i64 that fits); float (f32, as GGUF's own keys are);
    list of str; a NumPy scalar or one-dimensional array keeps its own type. `general.alignment` is obeyed (default 32).

    The bytes go to a temporary file beside `path` that replaces it at the end, so a reader never sees half a file.
    Raises ModelFormatError for what the reader would refuse (duplicate names, limits), TypeError or ValueError for
    values that GGUF cannot hold or data of the wrong size, OSError (a full disk: before writing if possible).
    """
    path = os.fspath(path)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not is_alignment(alignment):
        limit = f"a power of two up to {MAX_ALIGNMENT}"
        raise ModelFormatError(path, f"general.alignment must be {limit}, not {alignment!r}")
    entries = [_string(key, "metadata key") + _value(key, value) for key, value in metadata.items()]
    table: list[bytes] = []
    pieces: list[memoryview] = []
    offset = 0  # of the next tensor, from the start of the data
    for name, shape, block_type, data in tensors:
        pieces.append(_checked_bytes(name, shape, block_type, data))
        ne = [int(n) for n in reversed(shape)]
        table.append(_string(name, "tensor name") + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, block_type.id, offset))
        offset += _padded(pieces[-1].nbytes, alignment)
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(table), len(entries)) + b"".join(entries) + b"".join(table)
    header += bytes(_padded(len(header), alignment) - len(header))
    parse_header(header, path, file_size=len(header) + offset)  # the reader's own checks
    with _replacing(path, len(header) + offset) as file:
        file.write(header)
        for piece in pieces:
            file.write(piece)
            file.write(bytes(_padded(piece.nbytes, alignment) - piece.nbytes))


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _checked_bytes(name: str, shape: Sequence[int], block_type: BlockType, data: Any) -> memoryview:
    if not shape or min(shape) < 1:
        raise ValueError(f"tensor {name!r} has shape {tuple(shape)}: expected 1 to 4 positive dimensions")
    if isinstance(data, np.ndarray):
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    view = memoryview(data).cast("B")
    expected = prod(int(n) for n in shape[:-1]) * block_type.row_bytes(int(shape[-1]))
    if view.nbytes != expected:
        found = f"{view.nbytes} bytes of data"
        raise ValueError(f"tensor {name!r} has {found}: {block_type.name} of shape {tuple(shape)} takes {expected}")
    return view


def _string(text: str, what: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} {text[:100]!r} holds a lone surrogate, which UTF-8 cannot encode") from None
    return struct.pack("<Q", len(encoded)) + encoded


def _value(key: str, value: Any) -> bytes:
    """The type and bytes of a metadata value."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value, f"value of metadata key {key!r}:")
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        strings = b"".join(_string(item, f"a string of metadata key {key!r}:") for item in value)
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + strings
    if isinstance(value, np.ndarray) and value.ndim == 1:
        type_id, data = _numbers(key, value)
        return struct.pack("<IIQ", ARRAY, type_id, len(value)) + data
    if isinstance(value, np.generic):
        type_id, data = _numbers(key, np.asarray(value))
    elif isinstance(value, bool):
        type_id, data = BOOL, bytes([value])
    elif isinstance(value, int):
        type_id, data = _numbers(key, np.asarray(value, _int_type(key, value)))
    elif isinstance(value, float):
        type_id, data = _numbers(key, _float32(key, value))
    else:
        expected = "str, bool, int, float, list of str, or a NumPy scalar or one-dimensional array"
        raise TypeError(f"metadata key {key!r} is a {type(value).__name__} that GGUF cannot hold: expected {expected}")
    return struct.pack("<I", type_id) + data


def _numbers(key: str, values: npt.NDArray[Any]) -> tuple[int, bytes]:
    dtype = values.dtype.newbyteorder("<")
    if dtype not in _NUMBER_IDS:
        raise TypeError(f"metadata key {key!r} has NumPy type {values.dtype}, which GGUF does not know")
    return _NUMBER_IDS[dtype], values.astype(dtype).tobytes()


def _int_type(key: str, value: int) -> str:
    for dtype, low, high in (("u4", 0, 2**32), ("i4", -(2**31), 0), ("u8", 0, 2**64), ("i8", -(2**63), 0)):
        if low <= value < high:
            return dtype
    raise ValueError(f"metadata key {key!r} is {value}, which does not fit into 64 bits")


def _float32(key: str, value: float) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        rounded = np.asarray(value, np.float32)
    if np.isinf(rounded) and not np.isinf(value):
        raise ValueError(f"metadata key {key!r} is {value}, which is too large for f32: pass a numpy.float64")
    return rounded


@contextmanager
def _replacing(path: str, size: int) -> Iterator[BinaryIO]:
    """A new file of `size` bytes that takes the place of `path` when the block ends well, and vanishes otherwise."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name[:200]}.{secrets.token_hex(4)}.tmp")
    file = open(temporary, "xb")
    try:
        with file:
            _reserve(file.fileno(), size)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reserve(descriptor: int, size: int) -> None:
    """Take the disk space now, so that a full disk is known before gigabytes are written to it."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # what file systems without the call answer
            raise
