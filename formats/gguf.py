"""Opens GGUF model files: memory-mapped, read-only, a split model's files joined into one.

The header is checked as a whole when the file is opened (gguf_header.py); after that every tensor is known to lie
inside its file.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from types import TracebackType
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from edgeinfer.formats.errors import ModelFormatError
from edgeinfer.formats.gguf_header import MAX_ENTRIES, Header, TensorInfo, parse_header

__all__ = ["GGUF", "TensorInfo", "open_gguf"]

_T = TypeVar("_T")
_D = TypeVar("_D")
_REQUIRED: Any = object()  # the default of `get`: a missing key is an error
_SPLIT_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
_DECODE_VALUES = 1 << 20  # decoded at a time by `array`: temporaries stay small


def open_gguf(path: str | os.PathLike[str]) -> GGUF:
    """Open the model at `path`; any part of a split model (name-00001-of-00003.gguf) opens all of them.

    Raises ModelFormatError when a file is not a sound GGUF file of version 3 or 2; OSError when it cannot be opened.
    """
    path = os.fspath(path)
    maps: list[mmap.mmap] = []
    headers: list[Header] = []
    try:
        for shard, part in enumerate(_parts(path)):
            if part != path and not os.path.exists(part):
                raise ModelFormatError(path, f"part {shard + 1} of the model is missing: expected {part}")
            maps.append(_map(part))
            headers.append(parse_header(maps[-1], part, shard=shard))
            _check_split(headers[-1], part, shard)
        return GGUF(path, maps, *_join(headers, path))
    except BaseException:
        for m in maps:
            m.close()
        raise


class GGUF:
    """An open model file. A context manager; `close` drops the map, which lives on while arrays from `raw` do."""

    def __init__(
        self, path: str, maps: list[mmap.mmap], metadata: dict[str, Any], tensors: dict[str, TensorInfo]
    ) -> None:
        self.path, self.metadata, self.tensors = path, metadata, tensors
        self.nbytes = sum(len(m) for m in maps)
        self._maps = maps

    def __enter__(self) -> GGUF:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the map: it is unmapped now, or when the last array from `raw` is gone."""
        self._maps = []

    @overload
    def get(self, key: str, kind: type[_T]) -> _T: ...
    @overload
    def get(self, key: str, kind: type[_T], default: _D) -> _T | _D: ...
    @overload
    def get(self, key: str, kind: tuple[type, ...], default: Any = ...) -> Any: ...
    def get(self, key: str, kind: Any, default: Any = _REQUIRED) -> Any:
        """The metadata value of `key`, which must be of `kind`: str, int, float, bool, list, np.ndarray or several.

        Kinds are exact (a bool is no int); asked for as a list, an array of numbers becomes one. Without a `default`, a
        missing key is an error. Raises ModelFormatError.
        """
        return _typed(self.metadata, self.path, key, kind, default)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes: a read-only uint8 view of the map, (rows, row_bytes); rows: all dimensions but the last."""
        tensor = self._tensor(name)
        row_bytes = tensor.type.row_bytes(tensor.shape[-1])
        flat = np.frombuffer(self._map_of(tensor), np.uint8, tensor.nbytes, tensor.offset)
        return flat.reshape(-1, row_bytes)

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor's values as float32 of its shape; ModelFormatError when it holds integers or doubles."""
        raw, tensor = self.raw(name), self.tensors[name]
        if not tensor.type.decodable:
            raise ModelFormatError(self.path, f"tensor {name!r} is {tensor.type.name}: expected weights", tensor.offset)
        values = np.empty((len(raw), tensor.shape[-1]), np.float32)
        step = max(1, _DECODE_VALUES // tensor.shape[-1])
        for row in range(0, len(raw), step):
            values[row : row + step] = tensor.type.decode(raw[row : row + step])
        return values.reshape(tensor.shape)

    def release(self, name: str) -> None:
        """Let the system drop the pages wholly inside a tensor from memory; the next access reads them again."""
        tensor, page = self._tensor(name), mmap.PAGESIZE
        start, end = -(-tensor.offset // page) * page, (tensor.offset + tensor.nbytes) // page * page
        if end > start and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self._map_of(tensor).madvise(mmap.MADV_DONTNEED, start, end - start)

    def _tensor(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ModelFormatError(self.path, f"tensor {name!r} is missing")
        return self.tensors[name]

    def _map_of(self, tensor: TensorInfo) -> mmap.mmap:
        if not self._maps:
            raise ValueError(f"{self.path} has been closed")
        return self._maps[tensor.shard]


def _typed(metadata: dict[str, Any], path: str, key: str, kind: Any, default: Any) -> Any:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    expected = " or ".join(k.__name__ for k in kinds)
    if key not in metadata:
        if default is _REQUIRED:
            raise ModelFormatError(path, f"metadata key {key!r} is missing: expected {expected}")
        return default
    value = metadata[key]
    if type(value) in kinds:
        return value
    if isinstance(value, np.ndarray):
        if list in kinds:
            return value.tolist()
        found = f"an array of {value.dtype}"
    else:
        found = "an array of strings" if isinstance(value, list) else f"the {type(value).__name__} {value!r:.60}"
    raise ModelFormatError(path, f"metadata key {key!r} is {found}: expected {expected}")


def _parts(path: str) -> list[str]:
    """The files of the model that `path` belongs to, in order."""
    match = _SPLIT_NAME.fullmatch(path)
    if match is None:
        return [path]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= number <= count:
        raise ModelFormatError(path, f"the name says part {number} of {count}")
    return [f"{stem}-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]


def _map(path: str) -> mmap.mmap:
    # not blocking: a pipe would wait for its writer
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFormatError(path, "this is not a regular file: expected a GGUF file")
        if status.st_size == 0:
            raise ModelFormatError(path, "the file is empty: the download failed?", 0)
        return mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def _check_split(header: Header, path: str, shard: int) -> None:
    """The file's own account of the split (split.no, split.count) must agree with its name."""
    match = _SPLIT_NAME.fullmatch(path)
    count = int(match[3]) if match else 1
    number = _typed(header.metadata, path, "split.no", int, 0)
    total = _typed(header.metadata, path, "split.count", int, 1)
    if (number, total) != (shard, count):
        hint = "" if match else " (parts are named NAME-00001-of-00003.gguf)"
        reason = f"the file says that it is part {number + 1} of {total}, its name says {shard + 1} of {count}{hint}"
        raise ModelFormatError(path, reason)


def _join(headers: list[Header], path: str) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """One set of metadata and tensors. Only what describes a single file may be in more than one."""
    metadata, tensors = dict(headers[0].metadata), dict(headers[0].tensors)
    for header in headers[1:]:
        for key, value in header.metadata.items():
            if not key.startswith("split.") and key != "general.alignment" and key in metadata:
                raise ModelFormatError(path, f"metadata key {key!r:.100} appears in two parts of the split model")
            metadata.setdefault(key, value)
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ModelFormatError(path, f"tensor {name!r} appears in two parts of the split model")
            tensors[name] = tensor
    expected = _typed(metadata, path, "split.tensors.count", int, len(tensors))
    if expected != len(tensors) or len(tensors) > MAX_ENTRIES:
        limit = f"expected {expected}, at most {MAX_ENTRIES}"
        raise ModelFormatError(path, f"{len(tensors)} tensors in all parts of the model: {limit}")
    return metadata, tensors
