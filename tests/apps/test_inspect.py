"""What the commands beside `run` and `chat` print, over a small file that the `gguf` package wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

import edgeinfer
from edgeinfer.apps import terminal
from edgeinfer.apps.commands import app

PIECES = [*"abcdefghijklmnopqrstuvwxyz", "ab", "Ġ", "Ã", "©", "<|end|>"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("A\x1b[31m[red]\tname")
    writer.add_license("mit")
    writer.add_float32("some.nan", float("nan"))
    writer.add_array("some.numbers", list(range(100)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(PIECES)
    writer.add_token_types([1] * (len(PIECES) - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_chat_template("{{ messages }}\nend")
    writer.add_tensor("big", np.zeros((4, 18 * 2), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("norm", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_inspect_json(invoke: Any, model: str) -> None:
    done = invoke("inspect", model, "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    bits = 8 * (4 * 36 + 64 * 4) / (4 * 64 + 64)
    assert (found["parameters"], found["bits_per_weight"], found["licence"]) == (320, round(bits, 3), "mit")
    assert found["types"] == {"Q4_0": {"tensors": 1, "nbytes": 144}, "F32": {"tensors": 1, "nbytes": 256}}
    assert found["nbytes"] == Path(model).stat().st_size and found["chat_template"] == "{{ messages }}\nend"
    big = found["tensors"][0]
    assert (big["name"], big["shape"], big["type"], big["nbytes"]) == ("big", [4, 64], "Q4_0", 144)
    assert found["metadata"]["some.numbers"] == list(range(100)) and found["metadata"]["some.nan"] == "nan"
    assert found["metadata"]["tokenizer.ggml.tokens"] == PIECES


def test_inspect_in_a_pipe_is_lines_that_no_file_can_disturb(invoke: Any, model: str) -> None:
    lines = invoke("inspect", model).stdout.splitlines()
    assert "licence\tmit" in lines and "bits_per_weight\t10.0" in lines
    assert "general.name\tA\N{REPLACEMENT CHARACTER}[31m[red] name" in lines
    assert "some.numbers\t[0, 1, 2, ... 100 in all]" in lines
    assert "big\t4 x 64\tQ4_0\t0.0 MB" in lines and lines[-2:] == ["{{ messages }}", "end"]


def test_tables_at_a_terminal_take_nothing_for_markup(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    terminal.print_table("[b]Title", ["a", "b"], [("[red]x", "y\x1b")])
    shown = capsys.readouterr().out
    assert "[b]Title" in shown and "[red]x" in shown and "y\x1b" not in shown


@pytest.mark.parametrize("command", ["inspect", "tokenize"])
def test_a_bad_file_is_code_2(invoke: Any, tmp_path: Path, command: str) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(8))
    done = invoke(command, str(bad), *(["x"] if command == "tokenize" else []))
    assert done.exit_code == 2 and str(bad) in done.stderr and not done.stdout


def test_tokenize(invoke: Any, model: str) -> None:
    ids = [PIECES.index(piece) for piece in ("ab", "Ã", "©")]
    assert invoke("tokenize", model, "abé").stdout == f'{ids[0]}\t"ab"\n{ids[1]}\t"\\\\xc3"\n{ids[2]}\t"\\\\xa9"\n'
    end = PIECES.index("<|end|>")
    assert invoke("tokenize", model, "a<|end|>", "--special").stdout == f'0\t"a"\n{end}\t"<|end|>"\n'


def test_plan(invoke: Any, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"context": 512, "weights": 1_000_000, "kv": 2, "scratch": 3, "process": 4, "available": 5_000_000_000}
    needs = edgeinfer.Plan(**fields)
    asked = []
    monkeypatch.setattr(edgeinfer, "plan", lambda *a: asked.append(a) or needs)
    found = json.loads(invoke("plan", model, "--ctx", "512", "--json").stdout)
    assert found == fields | {"total": 1_000_009, "fits": True}
    assert invoke("plan", model).stdout.splitlines()[-2:] == ["available\t5.00 GB", "fits"]
    assert asked == [(Path(model), 512), (Path(model), None)]


def test_models_and_pull(invoke: Any, model: str) -> None:
    done = invoke("models")
    assert done.exit_code == 0 and done.stdout.startswith("smollm2-135m\t98.4 MB\tApache-2.0\tnot fetched yet")
    assert invoke("pull", model).stdout == f"{model}\n"
    done = invoke("pull", "smollm2-135n")
    assert done.exit_code == 2 and "smollm2-135m" in done.stderr


def test_doctor_and_warmup(invoke: Any, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for outcome, code in [("passed: all of it", 0), ("FAILED: none of it", 1)]:
        monkeypatch.setattr(edgeinfer, "doctor_report", lambda outcome=outcome: {"self-test": outcome})
        done = invoke("doctor")
        assert (done.exit_code, done.stdout.splitlines()[0]) == (code, f"self-test\t{outcome}")
    asked = []
    monkeypatch.setattr(edgeinfer, "warmup", lambda path, progress: asked.append(path))
    assert invoke("warmup").exit_code == invoke("warmup", model).exit_code == 0
    assert asked == [None, Path(model)]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["chat", "-h"], ["run", "-h"], ["plan", "--help"]])
def test_help(invoke: Any, arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 0
