"""Charts as coordinates of bars, lines and blocks; templates draw them as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.web.live import Bar
from holdfast.web.pages.rendering import clock, grouped

WIDTH: Final = 720
HEIGHT: Final = 180
LEFT: Final = 34
BOTTOM: Final = 20
TOP: Final = 8
STACK: Final = ("done", "cancelled", "failed", "dead", "lost")


@dataclass(slots=True)
class Block:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float
    look: str
    title: str = ""


@dataclass(slots=True)
class Mark:
    """A grid line with its label, or a label on the time axis."""

    at: float
    label: str


@dataclass(slots=True)
class Chart:
    """What a template draws."""

    blocks: list[Block] = field(default_factory=list)
    hits: list[Block] = field(default_factory=list)
    rows: list[Mark] = field(default_factory=list)
    columns: list[Mark] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    area: str = ""
    empty: bool = True
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    bottom: int = HEIGHT - BOTTOM


def nice(highest: float) -> int:
    """A round number at or above the highest value: the top of the axis."""
    if highest <= 4:
        return 4
    size = 10 ** math.floor(math.log10(highest))
    return int(next(step * size for step in (1, 2, 4, 5, 8, 10) if step * size >= highest))


def _frame(chart: Chart, top: int) -> None:
    room = HEIGHT - TOP - BOTTOM
    for part in range(5):
        value = top * part / 4
        y = HEIGHT - BOTTOM - room * part / 4
        if value == int(value):
            chart.rows.append(Mark(y, grouped(value) if value < 10_000 else f"{value / 1000:g}k"))


def bars(found: Sequence[Bar], width_seconds: int) -> Chart:
    """How many runs ended in each part of the time, stacked by outcome."""
    chart = Chart()
    top = nice(max((bar.total for bar in found), default=0))
    _frame(chart, top)
    room, each = HEIGHT - TOP - BOTTOM, (WIDTH - LEFT) / max(1, len(found))
    for n, bar in enumerate(found):
        x, y = LEFT + n * each, float(HEIGHT - BOTTOM)
        for outcome in STACK:
            height = bar.counts[outcome] / top * room
            if height:
                y -= height
                chart.blocks.append(Block(x + 1, y, each - 2, height, outcome))
        parts = ", ".join(f"{bar.counts[o]} {o}" for o in STACK if bar.counts[o]) or "no runs ended"
        title = f"{clock(bar.start)} – {clock(bar.start + width_seconds)} UTC: {parts}"
        chart.hits.append(Block(x, TOP, each, room, "", title))
        if n % max(1, len(found) // 6) == 0:
            chart.columns.append(Mark(x, clock(bar.start)[:5]))
    chart.empty = not any(bar.total for bar in found)
    return chart


def lines(samples: Sequence[tuple[float, int, int]], now: float, seconds: int) -> Chart:
    """Waiting and in-flight runs over time."""
    chart = Chart()
    inside = [sample for sample in samples if sample[0] >= now - seconds]
    top = nice(max((max(s[1], s[2]) for s in inside), default=0))
    _frame(chart, top)
    room = HEIGHT - TOP - BOTTOM

    def place(at: float, value: float) -> str:
        x = LEFT + (at - now + seconds) / seconds * (WIDTH - LEFT)
        return f"{x:.1f},{HEIGHT - BOTTOM - value / top * room:.1f}"

    if len(inside) > 1:
        waiting = [place(at, value) for at, value, _ in inside]
        chart.lines = [" ".join(waiting), " ".join(place(at, v) for at, _, v in inside)]
        ends = (place(inside[0][0], 0), place(inside[-1][0], 0))
        chart.area = " ".join((ends[0], *waiting, ends[1]))
        chart.empty = False
    for n in range(4):
        at = now - seconds + n * seconds / 4
        chart.columns.append(Mark(LEFT + n * (WIDTH - LEFT) / 4, clock(at)[:5]))
    return chart


def spark(values: Sequence[int], width: int = 104, height: int = 24) -> str:
    """The points of a small line."""
    top = max(max(values, default=0), 1)
    step = width / max(1, len(values) - 1)
    return " ".join(
        f"{n * step:.1f},{height - 2 - value / top * (height - 4):.1f}"
        for n, value in enumerate(values)
    )


def lane(
    spans: Sequence[tuple[float, float, str, str]], start: float, end: float, width: int = 1000
) -> list[Block]:
    """Spans of time (from, until, look, title) as blocks on one line."""
    found = []
    whole = max(end - start, 1e-9)
    for since, until, kind, title in spans:
        left, right = max(since, start), min(until, end)
        if right > left:
            x = (left - start) / whole * width
            found.append(Block(x, 0, max(2.0, (right - left) / whole * width), 18, kind, title))
    return found
