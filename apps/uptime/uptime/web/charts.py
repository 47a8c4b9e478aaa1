"""Charts as coordinates of bars and lines; the templates draw them as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from uptime.record import Day
from uptime.summary import date_of

WIDTH, HEIGHT = 720, 180
LEFT, BOTTOM, TOP = 52, 24, 10
MAJOR_SHARE = 0.05
FEW_SPANS = 6
SPAN_SECONDS = 600
"""A span is ten minutes; one that is missing had no answers."""
_NICE = (1, 2, 5)


def bars(days: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """One bar per day: its colour and its label."""
    return [_bar(Day(*day), number) for number, day in enumerate(days)]


def _bar(day: Day, number: int) -> dict[str, Any]:
    date = date_of(day.day)
    if not day.total:
        return {"x": number, "level": "none", "words": f"{date}: no results"}
    level = "good"
    if day.failed or day.degraded:
        level = "major" if day.failed / day.total >= MAJOR_SHARE else "minor"
    good = 100 * day.ok / day.total
    words = f"{date}: {good:.4g} % good, {day.failed} failed of {day.total:,} checks"
    return {"x": number, "level": level, "words": words}


def response_times(detail: dict[str, Any]) -> dict[str, Any] | None:
    """The line of response times: ten-minute means of a day, or single results at first."""
    if len(detail["spans"]) >= FEW_SPANS:
        pairs = [(at, mean) for at, mean, _ in detail["spans"]]
        breaks = {b for (a, _), (b, _) in pairwise(pairs) if b - a > SPAN_SECONDS}
        words = "mean of each ten minutes"
    else:
        points = detail["points"]
        pairs = [(at, ms) for at, ms, verdict in points if verdict != "failed"]
        breaks = {b[0] for a, b in pairwise(points) if a[2] == "failed"}
        words = "each check"
    if len(pairs) < 2:
        return None
    first, last = pairs[0][0], pairs[-1][0]
    top = nice_ceiling(max(ms for _, ms in pairs))

    def place(at: float, ms: float) -> str:
        x = LEFT + (WIDTH - LEFT - 8) * (at - first) / max(1, last - first)
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - ms / top)
        return f"{x:.1f},{y:.1f}"

    pieces: list[list[tuple[float, float]]] = []
    for at, ms in pairs:
        if at in breaks or not pieces:
            pieces.append([])
        pieces[-1].append((at, ms))
    times = (first, (first + last) // 2, last)
    return {
        "pieces": [_piece(piece, place) for piece in pieces],
        "rows": [_row(top * part / 4, place) for part in (0, 2, 4)],
        "times": [
            {"x": place(at, 0).partition(",")[0], "words": clock(at, last - first)} for at in times
        ],
        "words": f"Response time, {words}: from {min(m for _, m in pairs)} ms "
        f"to {max(m for _, m in pairs)} ms",
    }


def _piece(pairs: Sequence[tuple[float, float]], place: Any) -> dict[str, str]:
    """An unbroken part of the line; an outage lies between two of them."""
    line = [place(at, ms) for at, ms in pairs]
    if len(line) == 1:  # a single answer between outages would be invisible as a line
        x, _, y = line[0].partition(",")
        line.append(f"{float(x) + 1:.1f},{y}")
    floor = [place(pairs[-1][0], 0), place(pairs[0][0], 0)]
    return {"line": " ".join(line), "area": " ".join([*line, *floor])}


def _row(ms: float, place: Any) -> dict[str, str]:
    words = f"{ms:g} ms" if ms < 1000 else f"{ms / 1000:g} s"
    return {"y": place(0, ms).partition(",")[2], "words": words}


def nice_ceiling(value: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50 … that is not smaller; at least 10."""
    power = 10
    while True:
        for step in _NICE:
            if step * power >= value:
                return step * power
        power *= 10


def clock(at: int, around: int) -> str:
    """A time of day; with seconds where they matter."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M" if around >= 600 else "%H:%M:%S")
