"""`edgeinfer pull`, `models`, `warmup` and `doctor`: files in the cache, compiled kernels, and whether all is well."""

from __future__ import annotations

from typing import Annotated

import typer

from edgeinfer.apps.loading import ModelName, find_model
from edgeinfer.apps.terminal import ProgressLine, megabytes, print_table


def pull(name: ModelName) -> None:
    """Fetch a model, or the rest of one, and print its path: `edgeinfer pull smollm2-135m`."""
    print(find_model(name))


def models() -> None:
    """List the known models and the files in the cache."""
    from edgeinfer.library import KNOWN_MODELS, cache_folder, cached_models

    cache = cache_folder()
    rows = []
    for name, known in KNOWN_MODELS.items():
        here = "in the cache" if (cache / known.file).exists() else "not fetched yet"
        rows.append((name, megabytes(known.nbytes), known.licence, here, known.about))
    print_table("Known models", ["name", "size", "licence", "", ""], rows)
    files = [(str(file.relative_to(cache)), megabytes(file.stat().st_size)) for file in cached_models()]
    print_table(f"\nIn {cache}", ["file", "size"], files)


def warmup(
    model: Annotated[str | None, typer.Argument(help="Compile only what this model needs.")] = None,
) -> None:
    """Compile the kernels now, so that the first answer comes soon."""
    import edgeinfer

    path = None if model is None else find_model(model)
    with ProgressLine() as line:
        edgeinfer.warmup(path, line.stage)


def doctor() -> None:
    """Check this machine: CPU features, kernels chosen, cache folders, a self-test (exit code 1 where it fails)."""
    import edgeinfer
    from edgeinfer.library import cache_folder

    report = {**edgeinfer.doctor_report(), "models": cache_folder()}
    print_table("edgeinfer", ["", ""], [(key, value) for key, value in report.items()])
    if not str(report["self-test"]).startswith("passed"):
        raise typer.Exit(1)
