"""`edgeinfer bench`: one JSON object and nothing else, entries in the order asked, the roofline, the peer. Never speeds."""

from __future__ import annotations

import importlib.util
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edgeinfer.apps import bench, plots
from edgeinfer.apps.commands import app
from edgeinfer.apps.plots import Point, Roofline

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parents[1] / "runtime" / "tiny.py")
assert _spec and _spec.loader
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

LLAMA = '''
import os, sys, time
__version__ = "9.8.7"
class Llama:
    def __init__(self, path, **options):
        print("a line that a library prints", file=sys.stderr)
        self.n_tokens, self.options = 0, options
        self.note(options["n_ctx"], options["n_threads"])
    def note(self, *words):
        with open(os.environ["PEER_LOG"], "a") as log:
            print(*words, file=log)
    def n_vocab(self):
        return 288
    def reset(self):
        self.n_tokens = 0
    def eval(self, ids):
        if len(ids) == 13:
            sys.exit("it broke")
        self.note(self.n_tokens, len(ids))
        self.n_tokens += len(ids)
        time.sleep(0.001)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=256))


@pytest.fixture
def invoke(model: str) -> Any:
    quick = ["--repeat", "1", "--prefill", "8", "--decode", "2"]
    return lambda *arguments: CliRunner().invoke(app, ["bench", model, *quick, *arguments])


def found(done: Any) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    assert done.stderr == "" and done.stdout.endswith("}\n") and done.stdout.count("\n") == 1
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_json_is_one_object_in_the_order_asked(invoke: Any) -> None:
    more = ["--prefill", "40,8", "--decode", "3,2", "--depth", "5,0", "--batch", "2,1", "--threads", "2", "--repeat", "2"]
    report = found(invoke("--json", *more))
    assert report["model"] == "tiny.gguf" and report["threads"] == 2 and report["context"] == 40
    assert [entry["n"] for entry in report["prefill"]] == [40, 8]
    asked = [(n, depth, batch) for n in (3, 2) for depth in (5, 0) for batch in (2, 1)]
    assert [(entry["n"], entry["depth"], entry["batch"]) for entry in report["decode"]] == asked
    assert all(entry["tps"] > 0 and entry["spread"] >= 0 for entry in report["prefill"] + report["decode"])
    assert set(report["peaks"]) == {"read_gbps", "int8_gmacs", "f32_gmacs"} and min(report["peaks"].values()) > 0
    assert report["peer"] is None and report["ratio"] is None and report["sweep"] == []
    assert [(s["phase"], s["rows"], s["position"]) for s in report["steps"]] == [("decode", 2, 5), ("prefill", 40, 39)]
    assert {op["phase"] for op in report["ops"]} == {"decode", "prefill"}
    for op in report["ops"]:
        assert op["bound"] in ("memory", "int8", "f32", "overhead") and op["share"] > 0 and op["ms"] > 0 and op["bytes"] > 0
    (matmul,) = (op for op in report["ops"] if op["phase"] == "decode" and op["op"] == "matmul_q4_0")
    assert matmul["count"] == 15 and matmul["macs"] == 2 * (2 * 30720 + 288 * 64)


def test_without_peaks_nothing_is_bound(invoke: Any) -> None:
    report = found(invoke("--json", "--no-peaks"))
    assert report["peaks"] is None and report["op_us"] is None
    assert {(op["bound"], op["share"]) for op in report["ops"]} == {(None, None)}
    shown = invoke("--no-peaks").stdout
    assert "MAC/byte" not in shown and "decode\tmatmul_q4_0\t15\t" in shown


def test_text_in_a_pipe(invoke: Any) -> None:
    done = invoke("--depth", "0,9")
    assert done.exit_code == 0
    cells = [line.split("\t") for line in done.stdout.splitlines()]
    speeds = [line[:4] for line in cells if len(line) == 7]
    assert speeds == [["prefill", "8", "", ""], ["decode", "2", "0", "1"], ["decode", "2", "9", "1"]]
    assert [line[:3] for line in cells if len(line) == 4] == [["decode", "1", "9"], ["prefill", "8", "7"]]
    assert "GMAC/s +---" in done.stdout and "a  decode matmul_q4_0" in done.stdout


def test_a_busy_machine_is_named(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (3.25, 1.0, 1.0), raising=False)
    assert "load average 3.25: something else runs" in invoke("--no-peaks").stderr
    report = found(invoke("--json", "--no-peaks"))
    assert report["load_average"] == [3.25, 1.0, 1.0] and len(report["warnings"]) == 1
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 1.0, 1.0), raising=False)
    assert invoke("--no-peaks").stderr == ""


def test_threads_auto(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.machine.default_threads", lambda: 2)
    report = found(invoke("--threads", "auto", "--json", "--no-peaks"))
    assert [row["threads"] for row in report["sweep"]] == [1, 2, 3]
    assert report["threads"] == bench._recommended(report["sweep"])
    assert "recommended: --threads " in invoke("--threads", "auto", "--no-peaks").stdout


@pytest.mark.parametrize(("speeds", "best"), [([100, 101, 102], 1), ([100, 103, 104], 2), ([50, 100, 90], 2), ([5], 1)])
def test_the_fewest_threads_within_two_percent(speeds: list[float], best: int) -> None:
    assert bench._recommended([{"threads": t, "decode_tps": tps} for t, tps in enumerate(speeds, 1)]) == best


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prefill", "0"], "--prefill 0"),
        (["--prefill", "8,"], "--prefill 8,"),
        (["--decode", "x"], "--decode x"),
        (["--depth", "-1"], "--depth -1"),
        (["--batch", "1,0"], "--batch 1,0"),
        (["--batch", "17"], "a batch of 17"),
        (["--threads", "two"], "--threads two"),
        (["--threads", "0"], "--threads 0"),
        (["--repeat", "0"], "repeat"),
        (["--depth", "255"], "trained for 1 to 256"),
        (["--plot", "x.pdf"], ".svg or .png"),
        (["--plot", "x.svg", "--no-peaks"], "--no-peaks"),
        (["--peer-python", "/no/such/python"], "/no/such/python"),
    ],
)
def test_options_out_of_range_are_code_2(invoke: Any, arguments: list[str], said: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2 and said in " ".join(done.stderr.replace("│", " ").split()) and not done.stdout


# --- the roofline ----------------------------------------------------------------------------------------------------

ROOFLINE = Roofline(
    "a <title>", 10.0, {"int8": 100.0, "f32": 20.0}, (Point("a", "decode x", 0.1, 0.5), Point("A", "prefill <y>", 100.0, 90.0))
)


def test_the_roofline_in_characters() -> None:
    lines = plots.terminal(ROOFLINE, width=41, height=31).splitlines()
    rows = [line[10:] for line in lines[:31]][::-1]  # from the bottom: 0.1 .. 1000 in 30 steps; 0.1 .. 1000 in 40
    assert lines[0].split() == ["1000", "|"] and lines[30].split()[0] == "0.1"
    assert rows[5][0] == "a" and rows[22][30] == "A"  # 30 * log(5) / 4 = 5.2; 30 * log(900) / 4 = 22.2
    assert rows[22].rstrip().endswith("int8 100") and rows[17].rstrip().endswith("f32 20")
    assert rows[15][10] == "/" and rows[22][20:].startswith("----") and rows[17][13:].startswith("/-----")
    assert lines[-2].split() == ["a", "decode", "x"] and "\x1b" not in "".join(lines)


def test_ops_at_the_same_place_stand_side_by_side() -> None:
    both = tuple(Point(letter, letter, 1.0, 1.0) for letter in "abc")
    assert "abc" in plots.terminal(Roofline("", 10.0, {"int8": 100.0}, both))


def test_svg(tmp_path: Path) -> None:
    path = tmp_path / "roof.svg"
    plots.save(ROOFLINE, path)
    root = ET.parse(path).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a <title>" in texts and "A  prefill <y>" in texts and "int8 100" in texts
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 2
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2


def test_png_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"PNG needs matplotlib.*roof\.svg needs nothing"):
        plots.save(ROOFLINE, tmp_path / "roof.png")
    assert not list(tmp_path.iterdir())


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots.save(ROOFLINE, tmp_path / "roof.PNG")
    assert (tmp_path / "roof.PNG").read_bytes().startswith(b"\x89PNG")


def test_plot_writes_the_file(invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "roof.svg"
    found(invoke("--json", "--plot", str(path)))
    assert "decode attention" in path.read_text("utf-8")


# --- the peer --------------------------------------------------------------------------------------------------------


@pytest.fixture
def peer_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "llama_cpp.py").write_text(LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PEER_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def test_the_peer_takes_its_turns(invoke: Any, peer_log: Path) -> None:
    report = found(invoke("--json", "--no-peaks", "--peer", "--depth", "4", "--batch", "1,2", "--threads", "1"))
    peer, ratio = report["peer"], report["ratio"]
    assert (peer["name"], peer["version"]) == ("llama-cpp-python", "9.8.7")
    assert [entry["n"] for entry in peer["prefill"]] == [8]
    assert [entry and (entry["n"], entry["depth"], entry["batch"]) for entry in peer["decode"]] == [(2, 4, 1), None]
    assert ratio["decode"][1] is None
    assert ratio["prefill"] == [pytest.approx(report["prefill"][0]["tps"] / peer["prefill"][0]["tps"], rel=1e-4)]
    # a round to warm up and one that counts; a depth is filled once, and every decode begins there
    assert peer_log.read_text().splitlines() == ["8 1", "0 8", "0 8", "0 4", "4 1", "5 1", "4 1", "5 1"]


def test_a_table_with_the_peer(invoke: Any, peer_log: Path) -> None:
    done = invoke("--no-peaks", "--peer-python", sys.executable, "--batch", "1,2")
    (single,) = (line for line in done.stdout.splitlines() if line.startswith("decode\t2\t0\t1\t"))
    assert done.exit_code == 0 and float(single.split("\t")[-1]) > 0


def test_a_missing_peer_is_named(invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('not built')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = invoke("--peer", "--json")
    assert done.exit_code == 2 and done.stdout == ""
    said = " ".join(done.stderr.replace("│", " ").split())
    assert "llama-cpp-python cannot be used by" in said and "not built" in said and "--peer-python" in said


def test_a_peer_that_ends_is_named(invoke: Any, peer_log: Path) -> None:
    done = invoke("--peer", "--prefill", "13", "--no-peaks")
    assert done.exit_code == 1 and "llama-cpp-python ended while it was measured: it broke" in done.stderr
