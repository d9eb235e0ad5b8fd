"""`edgeinfer bench`: tokens a second, which limit holds each op back, and the same figures of llama.cpp beside them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeinfer.apps.loading import ModelName, arguments_checked, find_model, open_model
from edgeinfer.apps.terminal import ProgressLine, megabytes, notice, print_table, printable

if TYPE_CHECKING:
    from edgeinfer.apps import plots
    from edgeinfer.bench import Limits, Need, Profile, Speed

_BUSY = 0.5  # of a processor, by the load average


def bench(
    model: ModelName,
    prefill: Annotated[str, typer.Option(metavar="N[,N]", help="Prompts of so many tokens.")] = "512",
    decode: Annotated[str, typer.Option(metavar="N[,N]", help="Tokens to generate.")] = "64",
    depth: Annotated[str, typer.Option(metavar="N[,N]", help="Generate behind so many tokens.")] = "0",
    batch: Annotated[str, typer.Option(metavar="N[,N]", help="Generate in so many sequences at once.")] = "1",
    threads: Annotated[
        str | None, typer.Option(metavar="N|auto", help="Default: one a core; auto: try them and recommend.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Measure so often, after a round that warms up; medians count.")] = 5,
    peaks: Annotated[bool, typer.Option(" /--no-peaks", help="Do not measure what the machine can do.")] = True,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the roofline as .svg or .png too.")] = None,
    peer: Annotated[bool, typer.Option("--peer", help="Take turns with llama-cpp-python on the same file.")] = False,
    peer_python: Annotated[
        str | None, typer.Option(metavar="PATH", help="The Python that has llama-cpp-python; default: this one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object and nothing else.")] = False,
) -> None:
    """Measure a model's speed, and what limits it: `edgeinfer bench smollm2-135m --prefill 512 --decode 64 --depth 0,4096`.

    The table of ops is for one decode step at the first batch and the greatest depth, and for the last chunk of the first
    prompt, each op run by itself. Run it on a quiet machine: everything else that runs is measured too.
    """
    plan = _Plan(
        prefill=_numbers("--prefill", prefill, 1),
        decode=_numbers("--decode", decode, 1),
        depth=_numbers("--depth", depth, 0),
        batch=_numbers("--batch", batch, 1),
        repeat=repeat,
        peaks=peaks,
        peer=sys.executable if peer and not peer_python else peer_python,
    )
    from edgeinfer.apps import plots  # here, as what measures is: every other command starts faster without them

    if plot:
        with arguments_checked():
            plots.check(plot)
        if not peaks:
            raise typer.BadParameter("the roofline of --plot is made of the peaks that --no-peaks skips; give one of them")
    wanted = None if threads in (None, "auto") else _threads(str(threads))
    path = find_model(model)
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    warnings: list[str] = []

    def warn(text: str) -> None:
        warnings.append(text)
        if not as_json:
            notice(f"edgeinfer: {text}")

    busy = load is not None and load[0] > _BUSY
    if load and busy:
        warn(f"load average {load[0]:.2f}: something else runs, or just did; discard the figures if it still does")
    sweep = _sweep(path, plan) if threads == "auto" else []
    chosen = _recommended(sweep) if sweep else wanted
    report = {"model": path.name, **_report(path, plan, chosen, keep=not busy)}
    cache = report["cache_bytes"]
    if peaks and cache and report["weight_bytes"] < cache:
        weights = megabytes(report["weight_bytes"])
        warn(f"the weights ({weights}) fit the processor's cache ({megabytes(cache)}): the read bandwidth is the cache's")
    report |= {"load_average": load, "sweep": sweep, "warnings": warnings}
    roofline = _roofline(report) if peaks else None
    if as_json:
        print(json.dumps(report, ensure_ascii=False, allow_nan=False))
    else:
        _show(report, roofline)
    if plot and roofline:
        plots.save(roofline, plot)


@dataclass(frozen=True)
class _Plan:
    """What to measure. peer: the Python to run it with, or None."""

    prefill: list[int]
    decode: list[int]
    depth: list[int]
    batch: list[int]
    repeat: int
    peaks: bool
    peer: str | None

    @property
    def context(self) -> int:
        return max(*self.prefill, max(self.depth) + max(self.decode), *self.batch)

    @property
    def decodes(self) -> Iterator[tuple[int, int, int]]:
        """Tokens, depth, batch."""
        return ((n, depth, batch) for n in self.decode for depth in self.depth for batch in self.batch)


def _numbers(option: str, text: str, least: int) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) >= least for part in parts):
        raise typer.BadParameter(f"{option} {text}: expected whole numbers of at least {least}, like {least} or {least},512")
    return [int(part) for part in parts]


def _threads(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:9])):
        raise typer.BadParameter(f"--threads {text}: expected a whole number of at least 1, or auto")
    return int(text[:9])


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


# --- measuring -------------------------------------------------------------------------------------------------------


def _report(path: Path, plan: _Plan, threads: int | None, keep: bool) -> dict[str, Any]:
    from edgeinfer import bench as measure
    from edgeinfer.apps.peer import beside

    with ExitStack() as stack:
        model = stack.enter_context(open_model(str(path), threads, plan.context))
        peer = stack.enter_context(beside(plan.peer, path, model.threads, plan.context))
        line = stack.enter_context(ProgressLine())
        stack.enter_context(arguments_checked())
        prefill: list[tuple[dict[str, int], list[Speed]]] = []
        for n in plan.prefill:
            line.stage(f"prefill {n}", len(prefill) / len(plan.prefill))
            with measure.prefill(model, n) as ours:
                theirs = [peer.prefill(n)] if peer else []
                prefill.append(({"n": n}, measure.sample([ours, *theirs], plan.repeat)))
        decode: list[tuple[dict[str, int], list[Speed]]] = []
        for n, depth, batch in plan.decodes:
            line.stage(f"decode {n} at {depth}, batch {batch}", len(decode) / len(list(plan.decodes)))
            with measure.decode(model, n, depth, batch) as ours:
                theirs = [peer.decode(n, depth)] if peer and batch == 1 else []
                decode.append(({"n": n, "depth": depth, "batch": batch}, measure.sample([ours, *theirs], plan.repeat)))
        line.stage("ops", 0.0)
        phases = {
            "decode": measure.profile_decode(model, max(plan.depth), plan.batch[0]),
            "prefill": measure.profile_prefill(model, plan.prefill[0]),
        }
        line.stage("limits", 0.0)
        limits = measure.limits(model, keep) if plan.peaks else None
        return {
            "name": model.name,
            "architecture": model.config.architecture,
            "level": model.level,
            "threads": model.threads,
            "context": model.context,
            "weight_bytes": model.weight_bytes,
            "cache_bytes": measure.last_level_cache(),
            "prefill": [_entry(what, speeds[0]) for what, speeds in prefill],
            "decode": [_entry(what, speeds[0]) for what, speeds in decode],
            "peaks": _peaks(limits),
            "op_us": _rounded(1e6 * limits.op) if limits else None,
            "steps": [_step(phase, profile) for phase, profile in phases.items()],
            "ops": [_op(phase, need, limits) for phase, profile in phases.items() for need in profile.needs],
            "peer": peer and {
                "name": "llama-cpp-python",
                "version": peer.version,
                "prefill": [_entry(what, speeds[1]) for what, speeds in prefill],
                "decode": [_entry(what, speeds[1]) if len(speeds) > 1 else None for what, speeds in decode],
            },
            "ratio": peer and {"prefill": [_ratio(s) for _, s in prefill], "decode": [_ratio(s) for _, s in decode]},
        }  # fmt: skip


def _entry(what: dict[str, int], speed: Speed) -> dict[str, Any]:
    return {**what, "tps": _rounded(speed.tps), "spread": _rounded(speed.spread)}


def _ratio(speeds: Sequence[Speed]) -> float | None:
    return _rounded(speeds[0].tps / speeds[1].tps) if len(speeds) > 1 else None


def _peaks(limits: Limits | None) -> dict[str, float] | None:
    if limits is None:
        return None
    rates = {"read_gbps": limits.read, "int8_gmacs": limits.int8, "f32_gmacs": limits.f32}
    return {name: _rounded(rate / 1e9) for name, rate in rates.items()}


def _step(phase: str, profile: Profile) -> dict[str, Any]:
    return {"phase": phase, "rows": profile.rows, "position": profile.position, "ms": _rounded(1e3 * profile.seconds)}


def _op(phase: str, need: Need, limits: Limits | None) -> dict[str, Any]:
    bound, share = limits.binding(need) if limits else (None, None)
    seconds = max(need.seconds, 1e-9)
    return {
        "phase": phase,
        "op": need.op,
        "count": need.count,
        "ms": _rounded(1e3 * need.seconds),
        "bytes": need.bytes,
        "macs": need.macs,
        "gbps": _rounded(need.bytes / seconds / 1e9),
        "gmacs": _rounded(need.macs / seconds / 1e9),
        "bound": bound,
        "share": None if share is None else _rounded(share),
    }


def _sweep(path: Path, plan: _Plan) -> list[dict[str, Any]]:
    """The first prefill and decode with 1 thread, 2, ... and one more than the default."""
    from edgeinfer import bench as measure
    from edgeinfer.machine import default_threads

    rows = []
    for threads in range(1, default_threads() + 2):
        with open_model(str(path), threads, plan.context) as model, arguments_checked():
            with measure.prefill(model, plan.prefill[0]) as side:
                (prefill,) = measure.sample([side], plan.repeat)
            with measure.decode(model, *next(plan.decodes)) as side:
                (decode,) = measure.sample([side], plan.repeat)
        rows.append({"threads": threads, "prefill_tps": _rounded(prefill.tps), "decode_tps": _rounded(decode.tps)})
    return rows


def _recommended(sweep: Sequence[dict[str, Any]]) -> int:
    """The fewest threads whose decoding is within 2 % of the fastest: what is left over serves the person's other programs."""
    best = max(row["decode_tps"] for row in sweep)
    return next(int(row["threads"]) for row in sweep if row["decode_tps"] >= 0.98 * best)


# --- showing ---------------------------------------------------------------------------------------------------------


def _show(report: dict[str, Any], roofline: plots.Roofline | None) -> None:
    if report["sweep"]:
        rows = [(row["threads"], f"{row['prefill_tps']:.1f}", f"{row['decode_tps']:.1f}") for row in report["sweep"]]
        print_table("Threads", ["threads", "prefill tokens/s", "decode tokens/s"], rows)
        print(f"recommended: --threads {report['threads']}, the fewest within 2 % of the fastest decoding\n")
    facts = [report[key] for key in ("name", "level")] + [f"{report['threads']} threads", f"context {report['context']}"]
    if report["load_average"]:
        facts.append(f"load average {report['load_average'][0]:.2f}")
    peaks = report["peaks"]
    if peaks:
        facts.append(f"reads {peaks['read_gbps']:.1f} GB/s")
        facts.append(f"multiply-adds {peaks['int8_gmacs']:.1f} G/s int8, {peaks['f32_gmacs']:.1f} G/s f32")
    print_table("", [""], [(", ".join(map(str, facts)),)])
    columns = ["", "tokens", "depth", "batch", "tokens/s", "spread"]
    columns += ["of read bandwidth"] if peaks else []
    columns += [f"llama-cpp-python {report['peer']['version']}", "ratio"] if report["peer"] else []
    print_table("\nSpeed", columns, list(_speed_rows(report)))
    steps = [(s["phase"], s["rows"], s["position"], f"{s['ms']:.3f}") for s in report["steps"]]
    print_table("\nSteps", ["", "rows", "position", "ms"], steps)
    columns = ["", "op", "count", "ms", "bytes", "multiply-adds", "GB/s", "GMAC/s", "bound by", "share of that"]
    print_table("\nTheir ops, run one by one", columns, list(map(_op_row, report["ops"])))
    if roofline:
        from edgeinfer.apps import plots

        print(f"\n{plots.terminal(roofline)}")


def _speed_rows(report: dict[str, Any]) -> Iterator[list[object]]:
    peer, peaks = report["peer"], report["peaks"]
    for phase in ("prefill", "decode"):
        for i, entry in enumerate(report[phase]):
            row: list[object] = [phase, entry["n"], entry.get("depth", ""), entry.get("batch", "")]
            row += [f"{entry['tps']:.1f}", f"{entry['spread']:.1%}"]
            if peaks:
                steps = entry["tps"] / entry.get("batch", 1)
                share = steps * report["weight_bytes"] / peaks["read_gbps"] / 1e9
                row.append(f"{share:.0%}" if phase == "decode" else "")
            if peer:
                theirs, ratio = peer[phase][i], report["ratio"][phase][i]
                row += [f"{theirs['tps']:.1f}", f"{ratio:.2f}"] if theirs else ["", ""]
            yield row


def _op_row(op: dict[str, Any]) -> list[object]:
    row = [op["phase"], op["op"], op["count"], f"{op['ms']:.3f}", megabytes(op["bytes"]), f"{op['macs'] / 1e6:.1f} M"]
    row += [f"{op['gbps']:.1f}", f"{op['gmacs']:.1f}", op["bound"] or ""]
    return [*row, "" if op["share"] is None else f"{op['share']:.0%}"]


def _roofline(report: dict[str, Any]) -> plots.Roofline:
    """Ops that multiply, of decoding in small letters and of prefill in capitals."""
    from edgeinfer.apps import plots

    points = []
    for phase, letters in (("decode", "abcdefghijklmnopqrstuvwxyz"), ("prefill", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")):
        ops = [op for op in report["ops"] if op["phase"] == phase and op["macs"] and op["ms"]]
        for letter, op in zip(letters, ops, strict=False):
            points.append(plots.Point(letter, f"{phase} {op['op']}", op["macs"] / op["bytes"], op["gmacs"]))
    peaks = report["peaks"]
    title = f"{printable(report['name'])}, {report['threads']} threads, {report['level']}: {peaks['read_gbps']:.1f} GB/s"
    return plots.Roofline(
        title, peaks["read_gbps"], {"int8": peaks["int8_gmacs"], "f32": peaks["f32_gmacs"]}, tuple(points)
    )
