"""`edgeinfer run`: one prompt in, one answer on stdout and nothing else there."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from edgeinfer.apps.loading import Context, ModelName, Threads, arguments_checked, open_model
from edgeinfer.apps.terminal import ctrl_c_cancels, notice, printable, standard_input

if TYPE_CHECKING:
    from edgeinfer import Model, Reply

# how a conversation is sampled unless asked otherwise; the library's own default is greedy
TEMPERATURE, TOP_K, TOP_P, MIN_P, REPEAT_PENALTY = 0.7, 40, 0.95, 0.05, 1.1

Temperature = Annotated[float, typer.Option("--temp", min=0.0, help="0 always takes the likeliest token.")]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, help="The same seed gives the same text; default: a fresh one.")
]


def run(
    model: ModelName,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT|-", help="The prompt; `-`, or none in a pipe: stdin.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("-n", "--max-tokens", min=1, help="Generate at most this many tokens.")
    ] = None,
    temperature: Temperature = TEMPERATURE,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the k likeliest tokens; 0: from all.")] = TOP_K,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens that hold this probability.")
    ] = TOP_P,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Drop tokens below this share of the likeliest one.")
    ] = MIN_P,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given several times.")
    ] = None,
    threads: Threads = None,
    context: Context = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt, without the chat template.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object: text, tokens, finish_reason, seed, timings.")
    ] = False,
) -> None:
    """Answer one prompt: `edgeinfer run smollm2-135m -p "Why is the sky blue?"`.

    Stdout holds the answer only, so it can be piped: `git diff | edgeinfer run MODEL > summary.txt`.
    """
    text = read_text(prompt)
    if not text.strip():
        raise typer.BadParameter("the prompt is empty")
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    sampling["repeat_penalty"] = REPEAT_PENALTY if temperature else 1.0  # greedy stays greedy
    with open_model(model, threads, context) as loaded:
        if not raw:
            require_template(loaded)
        with arguments_checked():
            begin = loaded.stream if raw else loaded.session().send
            reply = begin(text, max_tokens=max_tokens, stop=tuple(stop or ()), **sampling)
        write_answer(reply, as_json)
    if reply.finish_reason == "length" and len(reply.tokens) != max_tokens:
        notice("[the context is full: the answer is cut]")


def read_text(argument: str | None) -> str:
    """An argument's text; for `-`, or for none where stdin is no terminal, stdin's. UTF-8 whatever the locale."""
    if argument is None and standard_input().isatty():
        raise typer.BadParameter('no prompt; give one with -p "...", or pipe it in')
    if argument is None or argument == "-":
        return standard_input().read()
    return os.fsencode(argument).decode("utf-8")  # the argument's own bytes: Python decoded them by the locale


def require_template(model: Model) -> None:
    """Raise TemplateError where the model has no chat template: another one would be a guess."""
    from edgeinfer.errors import TemplateError

    if model.chat_template is None:
        raise TemplateError(
            f"{model.path}: the file has no chat template; `edgeinfer run MODEL --raw` continues a text without one"
        )


def write_answer(reply: Reply, as_json: bool) -> None:
    """Run the reply to its end on stdout, as it comes, or as one JSON object. Raises KeyboardInterrupt after Ctrl-C."""
    at_terminal = sys.stdout.isatty()
    with ctrl_c_cancels(reply) as interrupt:
        for piece in reply:
            if not as_json:
                sys.stdout.write(printable(piece) if at_terminal else piece)
                sys.stdout.flush()
    if as_json:
        print(json.dumps(_as_dict(reply), ensure_ascii=False, allow_nan=False))
    elif at_terminal and not reply.text.endswith("\n"):
        print()
    sys.stdout.flush()
    if interrupt.came is not None:
        raise KeyboardInterrupt
    if reply.finish_reason == "error":
        raise typer.Exit(1)


def _as_dict(reply: Reply) -> dict[str, object]:
    return {
        "text": reply.text,
        "tokens": [int(token) for token in reply.tokens],
        "finish_reason": reply.finish_reason,
        "seed": reply.seed,
        "timings": reply.timings.as_dict(),
    }
