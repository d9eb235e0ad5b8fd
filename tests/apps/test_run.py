"""`edgeinfer run`: the answer and nothing else on stdout, whatever the locale; what goes wrong has an exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and locales of POSIX")

# sends this process Ctrl-C when it begins to import a certain module
INTERRUPTED_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == interrupted:
            os.kill(os.getpid(), signal.SIGINT)
interrupted = sys.argv.pop(1)
assert interrupted not in sys.modules
sys.meta_path.insert(0, Finder())
from edgeinfer.apps.main import main
main()
"""


def test_stdout_holds_only_the_answer(command: Any) -> None:
    done = command("run", command.model, "-p", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello there.", b"")
    assert command.sent == ["hi"] and command.events[-1] == {"closed": True}


def test_loading_comes_before_anything_slow_is_imported(command: Any) -> None:
    command("run", command.model, "-p", "hi")
    assert command.events[0]["heavy"] == []


@pytest.mark.parametrize("arguments", [["-p", "-"], []])
def test_stdin_is_one_prompt_to_the_last_byte(command: Any, arguments: list[str]) -> None:
    assert command("run", command.model, *arguments, stdin=b"a\nb\n").returncode == 0
    assert command.sent == ["a\nb\n"]


@posix
@pytest.mark.parametrize("locale", [{"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "C.UTF-8"}])
@pytest.mark.parametrize("by_pipe", [True, False])
def test_utf8_in_and_out(command: Any, locale: dict[str, str], by_pipe: bool) -> None:
    text = "Grüße, テスト 🙂"
    command.script["pieces"] = ["é", "テ", "🙂\n"]
    command.environment.update(locale, PYTHONUTF8="0", PYTHONIOENCODING="latin-1")
    done = command("run", command.model, "-p", "-" if by_pipe else text, stdin=text.encode())
    assert (done.stdout.decode("utf-8"), done.stderr) == ("éテ🙂\n", b"")
    assert command.sent == [text]


def test_input_that_is_not_utf8_is_refused(command: Any) -> None:
    done = command("run", command.model, stdin=b"caf\xe9")
    assert done.returncode == 2 and b"not UTF-8" in done.stderr and not done.stdout


def test_options_reach_the_model_and_defaults_are_those_of_a_conversation(command: Any) -> None:
    command("run", command.model, "-p", "x", "--threads", "3", "--ctx", "512")
    assert command.events[0]["threads"] == 3 and command.events[0]["context"] == 512
    drawn = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": None, "repeat_penalty": 1.1}
    assert command.events[2]["options"] == {"max_tokens": None, "stop": [], **drawn}
    options = "-n 5 --temp 0 --top-k 40 --top-p 0.9 --min-p 0.05 --seed 7 --stop A --stop B --raw".split()
    command("run", command.model, "-p", "x", *options)
    sampling = {"temperature": 0.0, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": 7, "repeat_penalty": 1.0}
    assert command.events[-2] == {"stream": "x", "options": {"max_tokens": 5, "stop": ["A", "B"], **sampling}}


@pytest.mark.parametrize("arguments", [["-p", ""], ["-p", " \n"], ["-p", "-"], []])
def test_an_empty_prompt_is_refused(command: Any, arguments: list[str]) -> None:
    done = command("run", command.model, *arguments, stdin=b"")
    assert done.returncode == 2 and b"the prompt is empty" in done.stderr and not done.stdout


def test_json_is_one_object(command: Any) -> None:
    command.script["pieces"] = ["é", '"\n']
    done = command("run", command.model, "-p", "x", "--json", "--seed", "9")
    timings = {"load_s", "ttft_s", "prefill_tps", "decode_tps", "prompt_tokens", "cached_tokens"}
    found = json.loads(done.stdout)
    assert found.pop("timings").keys() == timings | {"generated_tokens", "bandwidth_share"}
    assert found == {"text": 'é"\n', "tokens": [0, 1], "finish_reason": "stop", "seed": 9}


def test_a_model_without_template_needs_raw_and_says_so(command: Any) -> None:
    command.script["template"] = False
    done = command("run", command.model, "-p", "x")
    assert done.returncode == 2 and b"--raw" in done.stderr and not done.stdout
    assert command("run", command.model, "-p", "x", "--raw").stdout == b"Hello there."


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("EdgeInferError", 1),
        ("PermissionError", 1),
        ("ModelNotFoundError", 2),
        ("ModelFormatError", 2),
        ("TokenizerError", 2),
        ("TemplateError", 2),
        ("ContextLengthError", 2),
        ("DownloadError", 3),
        ("DiskSpaceError", 4),
        ("MemoryLimitError", 5),
        ("MemoryError", 5),
        ("KeyboardInterrupt", 130),
    ],
)
def test_every_error_has_its_exit_code_and_one_line(command: Any, error: str, code: int) -> None:
    command.script["error"] = error
    done = command("run", command.model, "-p", "x")
    lines = 0 if error == "KeyboardInterrupt" else 1
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (code, b"", lines)
    assert done.stderr.startswith(b"edgeinfer: ") or not lines


@pytest.mark.parametrize("arguments", [["run"], ["run", "m", "--temp", "-1"], ["run", "m", "--nope"], ["nonsense"]])
def test_wrong_usage_is_code_2(command: Any, arguments: list[str]) -> None:
    done = command(*arguments)
    assert done.returncode == 2 and not done.stdout and b"Error" in done.stderr


def test_a_wrong_name_suggests_the_near_ones(command: Any) -> None:
    done = command("run", "smollm2-135", "-p", "x")
    assert done.returncode == 2 and b"smollm2-135m" in done.stderr


def test_a_reader_that_leaves_is_no_drama(command: Any) -> None:
    command.script.update(pieces=["x" * 4000] * 25, delay=0.01)
    child = command.start("run", command.model, "-p", "x")
    child.stdin.close()
    child.stdout.read(10)
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait(30) == 1
    child.stderr.close()


@posix
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("as_json", [False, True])
def test_signals(command: Any, signum: int, code: int, as_json: bool) -> None:
    command.script.update(pieces=["one ", "two"], delay=1.0)
    child = command.start("run", command.model, "-p", "x", *(["--json"] if as_json else []))
    while not any("send" in event for event in command.events):
        pass
    if not as_json:
        assert child.stdout.read(4) == b"one "
    child.send_signal(signum)
    out, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (code, b"")
    assert command.events[-1] == {"closed": True}
    if as_json and signum == signal.SIGINT:
        assert json.loads(out)["finish_reason"] == "cancelled"
    else:
        assert out == b""


@posix
@pytest.mark.parametrize("module", ["edgeinfer.apps.terminal", "typer", "edgeinfer.apps.bench", "edgeinfer.library"])
def test_ctrl_c_while_starting_is_quiet(module: str) -> None:
    child = [sys.executable, "-c", INTERRUPTED_IMPORT, module, "--version"]
    done = subprocess.run(child, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@posix
def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """As a shell script's background commands have it."""
    child = [sys.executable, "-c", INTERRUPTED_IMPORT, "typer", "--version"]
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    done = subprocess.run([*shell, *child], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout.startswith(b"edgeinfer ")


def redirected(command: Any, redirection: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh"]
    argv = [*shell, *command.argv(*arguments)]
    environment = {key: value for key, value in command.environment.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, env=environment)


@posix
@pytest.mark.parametrize("name", ["run", "chat"])
def test_a_closed_stdin_is_an_error_only_where_it_is_read(command: Any, name: str) -> None:
    done = redirected(command, "<&-", name, command.model)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
    assert b"standard input is closed" in done.stderr
    done = redirected(command, "<&-", "run", command.model, "-p", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello there.", b"")


@posix
@pytest.mark.parametrize("arguments", [["run", "-p", "hi"], ["--version"]])
def test_a_closed_stdout_is_an_error(command: Any, arguments: list[str]) -> None:
    done = redirected(command, ">&-", *arguments[:1], *([command.model] if len(arguments) > 1 else []), *arguments[1:])
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1) and b"standard output is closed" in done.stderr
    assert command.events == []


@posix
def test_a_closed_stderr_takes_only_the_notices(command: Any) -> None:
    done = redirected(command, "2>&-", "run", command.model, "-p", "hi")
    assert (done.returncode, done.stdout) == (0, b"Hello there.")
    assert redirected(command, "2>&-", "run", "nonsense", "-p", "hi").returncode == 2
    assert redirected(command, "<&- >&- 2>&-", "run", command.model, "-p", "hi").returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["run", "MODEL", "-p", "hi"]])
def test_a_full_disk_behind_stdout_is_one_line(command: Any, arguments: list[str]) -> None:
    done = redirected(command, ">/dev/full", *(command.model if word == "MODEL" else word for word in arguments))
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert done.stderr.startswith(b"edgeinfer: standard output: ") and b"No space left" in done.stderr


def test_at_a_terminal(command: Any, terminal: Any) -> None:
    command.script["pieces"] = ["a\x1b[31mb", "\x9bc"]
    child = terminal("run", command.model, "-p", "x")
    assert child.wait() == 0
    assert child.seen.endswith("a\N{REPLACEMENT CHARACTER}[31mb\N{REPLACEMENT CHARACTER}c\r\n")
    child = terminal("run", command.model)
    assert child.wait() == 2 and "-p" in child.seen
