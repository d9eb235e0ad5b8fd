"""`edgeinfer inspect`, `plan` and `tokenize`: what is in a file, and whether it fits, without loading the weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeinfer.apps.loading import Context, ModelName, arguments_checked, find_model
from edgeinfer.apps.run import read_text
from edgeinfer.apps.terminal import megabytes, print_table, printable

if TYPE_CHECKING:
    from edgeinfer.formats.gguf import GGUF

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def inspect(model: ModelName, as_json: AsJson = False) -> None:
    """Show a model file's metadata, tensors, types, bits per weight, licence and chat template."""
    from edgeinfer.formats.gguf import open_gguf

    with open_gguf(find_model(model)) as file:
        summary = _summary(file)
        tensors = list(file.tensors.values())
        metadata = {key: _plain(value) for key, value in file.metadata.items()}
    if as_json:
        listed = [
            {"name": t.name, "shape": t.shape, "type": t.type.name, "offset": t.offset, "nbytes": t.nbytes}
            for t in tensors
        ]
        print(json.dumps({**summary, "metadata": metadata, "tensors": listed}, ensure_ascii=False, allow_nan=False))
        return
    template, types = summary.pop("chat_template"), summary.pop("types")
    print_table("File", ["", ""], [(key, "not stated" if value is None else value) for key, value in summary.items()])
    rows = [(name, counts["tensors"], megabytes(counts["nbytes"])) for name, counts in types.items()]
    print_table("\nTypes", ["type", "tensors", "size"], rows)
    print_table("\nMetadata", ["key", "value"], [(key, _short(value)) for key, value in metadata.items()])
    shapes = [(t.name, " x ".join(map(str, t.shape)), t.type.name, megabytes(t.nbytes)) for t in tensors]
    print_table("\nTensors", ["name", "shape", "type", "size"], shapes)
    if template is not None:
        print(f"\nChat template\n{printable(template)}")


def _summary(file: GGUF) -> dict[str, Any]:
    types: dict[str, Counter[str]] = {}
    for tensor in file.tensors.values():
        types.setdefault(tensor.type.name, Counter()).update(tensors=1, nbytes=tensor.nbytes)
    parameters = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    weight_bytes = sum(tensor.nbytes for tensor in file.tensors.values())
    return {
        "path": str(file.path),
        "nbytes": file.nbytes,
        "architecture": file.metadata.get("general.architecture"),
        "parameters": parameters,
        "bits_per_weight": round(8 * weight_bytes / parameters, 3) if parameters else None,
        "licence": file.metadata.get("general.license"),
        "types": {name: dict(counts) for name, counts in types.items()},
        "chat_template": file.metadata.get("tokenizer.chat_template"),
    }


def _plain(value: Any) -> Any:
    """A metadata value as JSON has it; a NaN or infinity as text."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # a NumPy array or number
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 8:
        return f"[{', '.join(map(str, value[:3]))}, ... {len(value)} in all]"
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}... {len(text)} characters"


def plan(model: ModelName, context: Context = None, as_json: AsJson = False) -> None:
    """Show what memory a model needs with a context, and whether that is free, without loading it."""
    import edgeinfer

    path = find_model(model)
    with arguments_checked():
        needs = edgeinfer.plan(path, context)
    if as_json:
        print(json.dumps({**asdict(needs), "total": needs.total, "fits": needs.fits}))
        return
    rows = [
        ("weights", needs.weights),
        (f"kv, {needs.context} tokens", needs.kv),
        ("scratch", needs.scratch),
        ("process", needs.process),
        ("total", needs.total),
        ("available", needs.available),
    ]
    shown = [(name, "unknown" if nbytes is None else megabytes(nbytes)) for name, nbytes in rows]
    print_table("Memory", ["", ""], shown)
    print("fits" if needs.fits else "does not fit")


def tokenize(
    model: ModelName,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text; `-` reads stdin.")],
    special: Annotated[bool, typer.Option("--special", help="Parse control tokens in the text.")] = False,
) -> None:
    """Print the ids that a text becomes, one a line, with their pieces."""
    from edgeinfer.formats.gguf import open_gguf
    from edgeinfer.formats.tokenizer import Tokenizer

    path = find_model(model)
    with open_gguf(path) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata, path)
    for token in tokenizer.encode(read_text(text), special=special):
        piece = tokenizer.token_bytes(token).decode("utf-8", "backslashreplace") or tokenizer.text(token)
        print(f"{token}\t{printable(json.dumps(piece, ensure_ascii=False))}")
