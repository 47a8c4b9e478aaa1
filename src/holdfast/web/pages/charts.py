"""Charts as coordinates of bars, lines and blocks; templates draw them as SVG."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.durations import DAY
from holdfast.status.totals import Counted, Period
from holdfast.web.pages.rendering import clock, exact, grouped, span

# Sizes in SVG units; the drawing is scaled to the width of the page. Left and bottom margins are
# for labels.
WIDTH: Final = 720
HEIGHT: Final = 180
LEFT: Final = 34
BOTTOM: Final = 20
TOP: Final = 8
LABEL: Final = 40
"""The width of a label on the time axis: one that begins further right would not fit."""
PERCENTILES: Final = ("p50", "p95", "p99")
NOT_COUNTED: Final = "not counted: no coordinator was running, or its totals are no longer kept"
STACK: Final = ("done", "cancelled", "failed", "dead", "lost")


@dataclass(slots=True)
class Bar:
    """How runs ended in one part of the time."""

    start: float
    counts: Counter[str] = field(default_factory=Counter)
    known: bool = True
    """Whether a coordinator was counting."""

    @property
    def total(self) -> int:
        return self.counts.total()


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
    series: list[tuple[str, str]] = field(default_factory=list)
    """Lines, each with the name of its style."""
    areas: list[str] = field(default_factory=list)
    empty: bool = True
    """Whether there is nothing to see except gaps."""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    bottom: int = HEIGHT - BOTTOM

    @property
    def gaps(self) -> bool:
        """Whether a part was not counted."""
        return any(block.look == "gap" for block in self.blocks)


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
    days = width_seconds * len(found) > 2 * DAY
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
        if not bar.known and not bar.total:
            parts = NOT_COUNTED
            chart.blocks.append(Block(x, TOP, each, room, "gap"))
        start, end = _moment(bar.start, days), _moment(bar.start + width_seconds, days)
        title = f"{start} – {end} UTC: {parts}"
        chart.hits.append(Block(x, TOP, each, room, "", title))
        if n % max(1, len(found) // 6) == 0 and x < WIDTH - LABEL:
            chart.columns.append(Mark(x, _label(bar.start, days)))
    chart.empty = not any(bar.total for bar in found)
    return chart


def _moment(at: float, days: bool) -> str:
    return exact(at)[5:16] if days else clock(at)


def _label(at: float, days: bool) -> str:
    return exact(at)[5:10] if days else clock(at)[:5]


def ended(found: Counted, now: float, seconds: int) -> Chart:
    """How runs ended over a range of the history, stacked by outcome."""
    first = int(now - seconds) // found.seconds * found.seconds
    starts = range(first, int(now) + 1, found.seconds)
    by_start = {
        period.at: Counter(period.ended) + Counter(failed=period.failures)
        for period in found.periods
    }
    known = set(_known(found, starts, now))
    made = [Bar(float(s), by_start.get(s, Counter()), s in known) for s in starts]
    return bars(made, found.seconds)


def _known(found: Counted, starts: Sequence[int], now: float) -> list[int]:
    """The parts that were counted, including the newest, which has no sample yet."""
    counted = {period.at for period in found.periods}
    counting = found.until > 0 and not found.behind(now)
    return [s for s in starts if s in counted or (counting and s + found.seconds > found.until)]


def spread(
    found: Counted, now: float, seconds: int, of: Callable[[Period], Sequence[float]]
) -> Chart:
    """Percentiles over a range of the history; a period without runs is a gap."""
    chart = Chart()
    values = {period.at: of(period) for period in found.periods if period.ended}
    highest = max((max(v) for v in values.values()), default=0.0)
    top = highest or 1.0
    room, whole = HEIGHT - TOP - BOTTOM, max(seconds, 1)
    for part in range(5):
        chart.rows.append(Mark(HEIGHT - BOTTOM - room * part / 4, brief(top * part / 4)))
    for n, name in enumerate(PERCENTILES):
        piece: list[str] = []
        for at in range(min(values, default=int(now)), int(now) + found.seconds, found.seconds):
            if at in values:
                x = LEFT + max(0.0, at - now + seconds) / whole * (WIDTH - LEFT)
                y = HEIGHT - BOTTOM - values[at][n] / top * room
                piece += [f"{x:.1f},{y:.1f}", f"{min(x + 1, WIDTH):.1f},{y:.1f}"]
            elif piece:
                chart.series.append((name, " ".join(piece)))
                piece = []
        if piece:
            chart.series.append((name, " ".join(piece)))
    _days(chart, now, seconds)
    chart.empty = not values
    return chart


def brief(seconds: float) -> str:
    """A duration with two digits: `12 ms`, `1.5 s`, `3 min`."""
    if seconds >= 60:
        return span(seconds)
    value, unit = (seconds * 1000, "ms") if seconds < 1 else (seconds, "s")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def lag(found: Counted, now: float, seconds: int) -> Chart:
    """The most runs that waited, and the most that were in flight; parts that were not counted are
    gaps."""
    chart = Chart()
    values = {period.at: period for period in found.periods}
    first = int(now - seconds) // found.seconds * found.seconds
    starts = range(first, int(now) + 1, found.seconds)
    top = nice(max((max(p.waiting, p.in_flight) for p in values.values()), default=0))
    _frame(chart, top)
    room, whole = HEIGHT - TOP - BOTTOM, max(seconds, 1)

    def across(at: float) -> float:
        return LEFT + min(1.0, max(0.0, at - now + seconds) / whole) * (WIDTH - LEFT)

    def place(at: float, value: float) -> str:
        return f"{across(at):.1f},{HEIGHT - BOTTOM - value / top * room:.1f}"

    for piece, known in _pieces(starts, set(_known(found, starts, now))):
        end = piece[-1] + found.seconds
        if not known:
            left, right = across(piece[0]), across(end)
            chart.blocks.append(Block(left, TOP, right - left, room, "gap", NOT_COUNTED))
            continue
        seen = [(at, values[at]) for at in piece if at in values]
        if not seen:
            continue
        seen.append((end, seen[-1][1]))  # a value counts for its whole part
        waiting = [place(at, p.waiting) for at, p in seen]
        chart.series.append(("waiting", " ".join(waiting)))
        chart.series.append(("second", " ".join(place(at, p.in_flight) for at, p in seen)))
        chart.areas.append(" ".join((place(piece[0], 0), *waiting, place(end, 0))))
    _days(chart, now, seconds)
    chart.empty = not any(p.lagging for p in values.values())
    return chart


def _pieces(starts: Sequence[int], known: set[int]) -> list[tuple[list[int], bool]]:
    """Neighbouring parts that were all counted, or all not."""
    grouped_ = itertools.groupby(starts, lambda at: at in known)
    return [(list(piece), is_known) for is_known, piece in grouped_]


def _days(chart: Chart, now: float, seconds: int) -> None:
    for n in range(4):
        at = now - seconds + n * seconds / 4
        chart.columns.append(Mark(LEFT + n * (WIDTH - LEFT) / 4, _label(at, seconds > DAY)))


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
