"""The roofline: how fast each op multiplies against how often it uses a byte, under the machine's limits; all axes logarithmic.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore architectures", 2009.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

SUFFIXES = (".svg", ".png")


@dataclass(frozen=True)
class Point:
    """An op: its letter and name, multiply-adds per byte, and billions of multiply-adds per second that it reaches."""

    letter: str
    name: str
    intensity: float
    rate: float


@dataclass(frozen=True)
class Roofline:
    """read: GB/s. roofs: billions of multiply-adds per second, by name."""

    title: str
    read: float
    roofs: dict[str, float]
    points: tuple[Point, ...]

    def limit(self, intensity: float, roof: float) -> float:
        return min(roof, self.read * intensity)

    @property
    def span(self) -> tuple[float, float, float, float]:
        """Of both axes, whole powers of ten: least and most intensity, least and most rate."""
        corners = [(roof / self.read, roof) for roof in self.roofs.values()]
        places = [*corners, *((point.intensity, point.rate) for point in self.points)]
        (x_low, x_high), (y_low, y_high) = (_decades([place[axis] for place in places]) for axis in (0, 1))
        return x_low, x_high, y_low, y_high


def _decades(values: list[float]) -> tuple[float, float]:
    """The powers of ten around the values, with some room above."""
    return 10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(1.5 * max(values)))


def check(path: Path) -> None:
    """Raises ValueError where `save` could not draw such a file."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: a plot is written as {' or '.join(SUFFIXES)}")
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{path}: PNG needs matplotlib, which is not installed; {path.with_suffix('.svg')} needs nothing")


def save(roofline: Roofline, path: Path) -> None:
    """Write an SVG or PNG file."""
    check(path)
    if path.suffix.lower() == ".svg":
        path.write_text(svg(roofline), "utf-8")
    else:
        _draw_png(roofline, path)


def terminal(roofline: Roofline, width: int = 72, height: int = 18) -> str:
    """The plot in characters: `/` is the memory's limit, `-` a roof, letters are ops, named below."""
    x_low, x_high, y_low, y_high = roofline.span
    column = _place(x_low, x_high, width - 1)
    row = _place(y_low, y_high, height - 1)
    grid = [[" "] * width for _ in range(height)]
    for name, roof in roofline.roofs.items():
        for x in range(width):
            intensity = x_low * (x_high / x_low) ** (x / (width - 1))
            reached = roofline.limit(intensity, roof)
            if reached >= y_low:
                grid[row(reached)][x] = "/" if reached < roof else "-"
        label = f" {name} {roof:.0f} "
        grid[row(roof)][width - len(label) :] = label
    for point in roofline.points:
        cells = grid[row(point.rate)]
        x = column(point.intensity)
        while cells[x].isalpha() and x < width - 1:  # beside another op
            x += 1
        cells[x] = point.letter
    lines = []
    for y in range(height - 1, -1, -1):
        label = f"{y_high:g}" if y == height - 1 else f"{y_low:g}" if y == 0 else ""
        lines.append(f"{label:>8} |{''.join(grid[y])}".rstrip())
    lines.append(f"{'GMAC/s':>8} +{'-' * width}")
    lines.append(f"{'':>9} {f'{x_low:g}':<{width // 2}}{f'{x_high:g} MAC/byte':>{width - width // 2}}")
    lines += [f"{point.letter:>8}  {point.name}" for point in roofline.points]
    return "\n".join(lines)


def _place(low: float, high: float, last: int) -> Callable[[float], int]:
    """The cell of a value, 0 .. last."""
    return lambda value: min(last, max(0, round(last * math.log(value / low) / math.log(high / low))))


_WIDTH, _HEIGHT, _MARGIN, _LEGEND = 760, 460, 60, 200


def svg(roofline: Roofline) -> str:
    """The plot as an SVG document."""
    x_low, x_high, y_low, y_high = roofline.span

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x = math.log(intensity / x_low) / math.log(x_high / x_low)
        y = math.log(rate / y_low) / math.log(y_high / y_low)
        return round(_MARGIN + x * (_WIDTH - 2 * _MARGIN), 1), round(_HEIGHT - _MARGIN - y * (_HEIGHT - 2 * _MARGIN), 1)

    def text(x: float, y: float, content: str, anchor: str = "start") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(content)}</text>'

    parts = [text(_WIDTH / 2, 24, roofline.title, "middle")]
    for low, high, vertical in ((x_low, x_high, True), (y_low, y_high, False)):
        for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
            value = 10.0**power
            (x1, y1), (x2, y2) = (
                (at(value, y_low), at(value, y_high)) if vertical else (at(x_low, value), at(x_high, value))
            )
            parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#ddd"/>')
            parts.append(text(x1, y1 + 16, f"{value:g}", "middle") if vertical else text(x1 - 6, y1 + 4, f"{value:g}", "end"))
    parts.append(text(_WIDTH / 2, _HEIGHT - 18, "multiply-adds per byte", "middle"))
    parts.append(text(8, 44, "billions of multiply-adds per second"))
    for name, roof in roofline.roofs.items():
        start = max(x_low, y_low / roofline.read)
        corners = [at(x, roofline.limit(x, roof)) for x in (start, roof / roofline.read, x_high)]
        line = " ".join(f"{x},{y}" for x, y in corners)
        parts.append(f'<polyline points="{line}" fill="none" stroke="#333" stroke-width="1.5"/>')
        parts.append(text(corners[2][0], corners[2][1] - 5, f"{name} {roof:.0f}", "end"))
    for line_number, point in enumerate(roofline.points):
        x, y = at(point.intensity, point.rate)
        parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="#c33"><title>{escape(point.name)}</title></circle>')
        parts.append(text(x + 6, y + 4, point.letter))
        parts.append(text(_WIDTH - _MARGIN + 20, _MARGIN + 18 * line_number, f"{point.letter}  {point.name}"))
    size = f'viewBox="0 0 {_WIDTH + _LEGEND} {_HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _draw_png(roofline: Roofline, path: Path) -> None:
    x_low, x_high, y_low, y_high = roofline.span
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(9.6, 4.6), layout="constrained")  # no global state
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlim=(x_low, x_high), ylim=(y_low, y_high), title=roofline.title)
    axes.set(xlabel="multiply-adds per byte", ylabel="billions of multiply-adds per second")
    for name, roof in roofline.roofs.items():
        corners = (x_low, roof / roofline.read, x_high)
        axes.plot(corners, [roofline.limit(x, roof) for x in corners], color="#333333")
        axes.annotate(f"{name} {roof:.0f}", (x_high, roof), ha="right", va="bottom")
    for point in roofline.points:
        what = f"{point.letter}  {point.name}"
        axes.plot([point.intensity], [point.rate], "o", color="#cc3333", markersize=4, label=what)
        axes.annotate(point.letter, (point.intensity, point.rate), xytext=(5, -3), textcoords="offset points")
    figure.legend(loc="outside right upper", markerscale=0, handlelength=0)
    figure.savefig(path, dpi=150)
