"""Generates malformed GGUF files: named cases with the reason that the reader must give, truncations, mutations.

Run as a script with a folder to write the named cases there as files, for trying them on a command.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def entry(key: bytes, type_id: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", type_id) + value


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def array(type_id: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", type_id, count) + data


def tensor(name: bytes = b"t", ne: tuple[int, ...] = (32,), type_id: int = 0, offset: int = 0) -> bytes:
    return string(name) + u32(len(ne)) + b"".join(map(u64, ne)) + struct.pack("<IQ", type_id, offset)


def gguf(
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    n_entries: int | None = None,
    n_tensors: int | None = None,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    n_entries = len(entries) if n_entries is None else n_entries
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    header = struct.pack("<4sIQQ", b"GGUF", version, n_tensors, n_entries) + b"".join(entries + tensors)
    return header + bytes(-len(header) % alignment) + data


def seed() -> bytes:
    """A small sound file with every kind of value and a few tensors; it ends where the last of them does."""
    numbers = {0: "<B", 1: "<b", 2: "<H", 3: "<h", U32: "<I", I32: "<i", F32: "<f", U64: "<Q", 11: "<q", 12: "<d"}
    entries = [entry(b"general.architecture", STRING, string(b"llama")), entry(b"general.alignment", U32, u32(32))]
    entries += [entry(b"n.%d" % id, id, struct.pack(code, 7)) for id, code in numbers.items()]
    entries += [
        entry(b"flag", BOOL, b"\1"),
        entry(b"tokens", ARRAY, array(STRING, 3, string(b"<s>") + string("é".encode()) + string(b""))),
        entry(b"scores", ARRAY, array(F32, 3, struct.pack("<3f", 0, -1, 2.5))),
        entry(b"flags", ARRAY, array(BOOL, 2, b"\0\1")),
    ]
    tensors = (tensor(b"a", (32, 2), 2, 0), tensor(b"b", (4,), 0, 64), tensor(b"c", (256, 1), 14, 96))
    return gguf(tuple(entries), tensors, bytes(range(256)) + bytes(50))


def named_cases() -> dict[str, tuple[bytes, str]]:
    """Case name -> (file, a part of the reason that must be given)."""
    return {**_foreign_files(), **_bad_counts(), **_bad_metadata(), **_bad_arrays(), **_bad_tensors()}


def _foreign_files() -> dict[str, tuple[bytes, str]]:
    cases = {
        "empty": (b"", "empty"),
        "magic only": (b"GGUF", "truncated header"),
        "part of the magic": (b"GGU", "truncated header"),
        "HTML": (b"<!DOCTYPE html><html><body>404</body></html>", "HTML page: the download failed?"),
        "HTML after blanks": (b"\r\n  <HTML>", "HTML page"),
        "XML": (b"<?xml version='1.0'?><Error/>", "HTML page"),
        "JSON error": (b'{"error":"Repository not found"}', "error message of a web server"),
        "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "git-lfs pointer"),
        "zip": (b"PK\3\4" + bytes(60), "zip archive"),
        "pickle 2": (b"\x80\x02}q\0.", "pickle"),
        "pickle 4": (b"\x80\x04\x95" + bytes(60), "pickle"),
        "safetensors": (u64(2) + b"{}" + bytes(8), "safetensors"),
        "gzip": (b"\x1f\x8b\x08" + bytes(20), "gzip"),
        "zeros": (bytes(64), "not a GGUF file"),
        "text": (b"hello, world", "not a GGUF file"),
        "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
    }
    for magic in (b"lmgg", b"fmgg", b"tjgg", b"algg", b"GGML", b"GGJT"):
        cases[f"magic {magic.decode()}"] = (magic + bytes(60), "from before GGUF")
    for version in (0, 1, 4, 2**32 - 1):
        cases[f"version {version}"] = (gguf(version=version), f"GGUF version {version} is not supported")
    return cases


def _bad_counts() -> dict[str, tuple[bytes, str]]:
    cases = {
        "one entry missing": (gguf((entry(b"k", U32, u32(1)),), n_entries=2), "metadata key"),
        "entries past the end": (gguf(n_entries=1), "truncated header"),
        "tensors past the end": (gguf(n_tensors=1), "truncated header"),
        "20-byte file": (gguf()[:20], "truncated header"),
    }
    for count in (2**16 + 1, 2**32, 2**40, 2**63, 2**64 - 1):
        cases[f"{count} entries"] = (gguf(n_entries=count), f"{count} metadata entries: at most 65536")
        cases[f"{count} tensors"] = (gguf(n_tensors=count), f"{count} tensors: at most 65536")
    return cases


def _bad_metadata() -> dict[str, tuple[bytes, str]]:
    one = entry(b"twice", U32, u32(1))

    def with_entry(raw: bytes) -> bytes:
        return gguf((raw,)) + bytes(32)

    cases = {
        "key of 10**12 bytes": (with_entry(u64(10**12)), "1000000000000 bytes: at most 65535"),
        "key of 2**64-1 bytes": (with_entry(u64(2**64 - 1)), "at most 65535"),
        "key past the end": (gguf((u64(40) + bytes(8),)), "truncated header"),
        "key of 65536 bytes": (with_entry(entry(b"k" * 65_536, U32, u32(0))), "at most 65535"),
        "key empty": (with_entry(entry(b"", U32, u32(0))), "key is empty"),
        "key with NUL": (with_entry(entry(b"a\0b", U32, u32(0))), "NUL"),
        "key not UTF-8": (with_entry(entry(b"a\xff", U32, u32(0))), "not valid UTF-8"),
        "key twice": (gguf((one, one)), "'twice' appears twice"),
        "value type 13": (with_entry(entry(b"k", 13, bytes(8))), "'k' has unknown value type 13"),
        "value type 2**31": (with_entry(entry(b"k", 2**31, bytes(8))), "unknown value type 2147483648"),
        "bool 2": (with_entry(entry(b"k", BOOL, b"\2")), "bool of value 2"),
        "string of 2**63 bytes": (with_entry(entry(b"k", STRING, u64(2**63))), "'k' of 9223372036854775808 bytes"),
        "string over 16 MiB": (with_entry(entry(b"k", STRING, u64((16 << 20) + 1))), "at most 16777216"),
        "string past the end": (gguf((entry(b"k", STRING, u64(33)),)), "truncated header"),
        "string not UTF-8": (with_entry(entry(b"k", STRING, string(b"\xc3"))), "not valid UTF-8"),
        "string a surrogate": (with_entry(entry(b"k", STRING, string(b"\xed\xa0\x80"))), "not valid UTF-8"),
    }
    wrong = {"0": u32(0), "3": u32(3), "13": u32(13), "2**31": u32(2**31), "131072": u32(131_072)}
    for name, value in wrong.items():
        cases[f"alignment {name}"] = (gguf((entry(b"general.alignment", U32, value),)), "general.alignment must be")
    mistyped = {"i32": (I32, u32(32)), "u64": (U64, u64(32)), "f32": (F32, struct.pack("<f", 32))}
    mistyped |= {"string": (STRING, string(b"32")), "array": (ARRAY, array(U32, 1, u32(32))), "bool": (BOOL, b"\1")}
    for name, (type_id, value) in mistyped.items():
        file = gguf((entry(b"general.alignment", type_id, value),)) + bytes(64)
        cases[f"alignment as {name}"] = (file, "general.alignment must be")
    return cases


def _bad_arrays() -> dict[str, tuple[bytes, str]]:
    def with_array(raw: bytes) -> bytes:
        return gguf((entry(b"k", ARRAY, raw),)) + bytes(32)

    nested = struct.pack("<IQ", ARRAY, 1)
    ok, unfinished = string(b"ok"), entry(b"k", ARRAY, array(STRING, 2, string(b"x" * 39)))
    return {
        "u8 x 2**60": (with_array(array(0, 2**60)), f"{2**60} elements in metadata key 'k': at most 16777216"),
        "u8 x 10**6": (with_array(array(0, 10**6)), "1000000 elements in metadata key 'k' need at least 1000000 bytes"),
        "u8 x 2**63": (with_array(array(0, 2**63)), "at most 16777216"),
        "u8 x 16 Mi + 1": (with_array(array(0, (16 << 20) + 1)), "at most 16777216"),
        "u8, one too many": (gguf((entry(b"k", ARRAY, array(0, 33)),)), "need at least 33 bytes"),
        "f64 x 2**61": (with_array(array(12, 2**61)), "at most 16777216"),
        "f64 x 1 Mi": (with_array(array(12, 1 << 20)), "need at least 8388608 bytes"),
        "strings x 10**9": (with_array(array(STRING, 10**9)), "at most 2097152"),
        "strings x 10**6": (with_array(array(STRING, 10**6)), "need at least 8000000 bytes"),
        "string 1 of 2**64-1 bytes": (with_array(array(STRING, 2, ok + u64(2**64 - 1))), "string 1 of metadata key"),
        "string 1 over 16 MiB": (with_array(array(STRING, 2, ok + u64(2**25))), "at most 16777216"),
        "string 0 past the end": (with_array(array(STRING, 1, u64(1000))), "string 0 of metadata key 'k' needs 1000"),
        "string 1 without length": (gguf((unfinished,)), "truncated header"),
        "string 1 not UTF-8": (with_array(array(STRING, 2, ok + string(b"\xff"))), "string 1 of metadata key 'k' is"),
        "element type 13": (with_array(array(13, 1)), "unknown element type 13"),
        "element type 2**32-1": (with_array(array(2**32 - 1, 1)), "unknown element type 4294967295"),
        "array of arrays": (with_array(array(ARRAY, 1, array(0, 1, b"\0"))), "array of arrays"),
        "arrays 1,000 deep": (with_array(nested * 1_000 + array(0, 1, b"\0")), "array of arrays"),
        "arrays 5,000 deep": (with_array(nested * 5_000 + array(0, 1, b"\0")), "array of arrays"),
        "bools besides 0 and 1": (with_array(array(BOOL, 3, b"\0\1\2")), "bools with values besides 0 and 1"),
        "array without count": (gguf((entry(b"k", ARRAY, u32(0)),))[:37], "truncated header"),
    }


def _bad_tensors() -> dict[str, tuple[bytes, str]]:
    def with_tensor(*args: object, data: int = 128) -> bytes:
        return gguf((), (tensor(*args),), bytes(data))  # type: ignore[arg-type]

    cases = {
        "name empty": (with_tensor(b""), "tensor name is empty"),
        "name of 256 bytes": (with_tensor(b"n" * 256), "256 bytes: at most 255"),
        "name of 10 MB": (with_tensor(b"n" * 10_000_000), "at most 255"),
        "name with NUL": (with_tensor(b"a\0"), "NUL"),
        "name not UTF-8": (with_tensor(b"\xfe"), "not valid UTF-8"),
        "no dimensions": (with_tensor(b"t", ()), "'t' has 0 dimensions"),
        "5 dimensions": (with_tensor(b"t", (1, 1, 1, 1, 1)), "'t' has 5 dimensions"),
        "2**32-1 dimensions": (gguf((), (string(b"t") + u32(2**32 - 1) + bytes(64),)), "has 4294967295 dimensions"),
        "dimension 0": (with_tensor(b"t", (0,)), "each must be 1 to 2**40"),
        "second dimension 0": (with_tensor(b"t", (4, 0)), "each must be 1 to 2**40"),
        "dimension 2**40 + 1": (with_tensor(b"t", (2**40 + 1,), 24), "each must be 1 to 2**40"),
        "dimension 2**63-1": (with_tensor(b"t", (2**63 - 1, 2), 24), "each must be 1 to 2**40"),
        "dimension 2**40": (with_tensor(b"t", (2**40,), 24), "ends at byte"),
        "size wraps 64 bits": (with_tensor(b"t", (2**32, 2**32), 24), "ends at byte"),
        "size wraps 64 bits, 4 dimensions": (with_tensor(b"t", (2**20,) * 4, 0), "ends at byte"),
        "size of Q4_0 wraps": (with_tensor(b"t", (2**40, 2**29), 2), "ends at byte"),
        "F32 of 2**62-1": (with_tensor(b"t", (2**62 - 1,), 0), "each must be 1 to 2**40"),
        "sum of sizes wraps": (
            gguf((), (tensor(b"a", (2**40, 2**22), 24), tensor(b"b", (2**40, 2**22), 24, 2**62)), bytes(64)),
            "ends at byte",
        ),
        "part of a Q4_0 block": (with_tensor(b"t", (33,), 2), "not a whole number of Q4_0 blocks of 32"),
        "part of a Q4_K block": (with_tensor(b"t", (128,), 12), "not a whole number of Q4_K blocks of 256"),
        "name twice": (gguf((), (tensor(b"twin"), tensor(b"twin", offset=128)), bytes(256)), "'twin' appears twice"),
        "offset 1": (with_tensor(b"t", (8,), 0, 1), "no multiple of the alignment 32"),
        "offset past the end": (with_tensor(b"t", (8,), 0, 128), "ends at byte"),
        "offset 2**63": (with_tensor(b"t", (8,), 0, 2**63), "ends at byte"),
        "offset 2**64-32": (with_tensor(b"t", (8,), 0, 2**64 - 32), "ends at byte"),
        "two at one offset": (gguf((), (tensor(b"a"), tensor(b"b")), bytes(128)), "'a' and 'b' overlap"),
        "half over another": (gguf((), (tensor(b"a"), tensor(b"b", offset=64)), bytes(192)), "overlap"),
        "no data": (with_tensor(b"t", (32,), 0, 0, data=0), "the download was cut short"),
        "data cut by a byte": (with_tensor(b"t", (32,), 0, 0, data=127), "the download was cut short"),
        "table cut": (gguf((), (tensor(),), bytes(128))[:56], "truncated header"),
        "offset no multiple of 64": (
            gguf((entry(b"general.alignment", U32, u32(64)),), (tensor(offset=32),), bytes(256), alignment=64),
            "no multiple of the alignment 64",
        ),
    }
    for type_id, name in {4: " (Q4_2, removed)", 5: " (Q4_3, removed)", 16: " (IQ2_XXS)", 40: " (NVFP4)"}.items():
        cases[f"type {type_id}"] = (with_tensor(b"t", (256,), type_id), f"unsupported tensor type {type_id}{name}")
    for type_id in (200, 2**31, 2**32 - 1):
        cases[f"type {type_id}"] = (with_tensor(b"t", (256,), type_id), f"unsupported tensor type {type_id}")
    return cases


def truncations(file: bytes) -> Iterator[bytes]:
    return (file[:length] for length in range(len(file)))


def boundary_sweep(file: bytes) -> Iterator[bytes]:
    """`file` with boundary values of 1, 4 and 8 bytes over each offset, and with each byte removed or doubled."""
    values = [bytes([b]) for b in (0, 1, 2, 0x7F, 0x80, 0xFF)]
    values += [u32(v) for v in (0, 5, 2**31 - 1, 2**31, 2**32 - 1)]
    values += [u64(v) for v in (0, 1, len(file), 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)]
    for at in range(len(file)):
        for value in values:
            yield (file[:at] + value + file[at + len(value) :])[: len(file)]
        yield file[:at] + file[at + 1 :]
        yield file[: at + 1] + file[at:]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for case, (content, _) in named_cases().items():
        (folder / (case.replace("/", "_").replace("*", "^") + ".gguf")).write_bytes(content)
