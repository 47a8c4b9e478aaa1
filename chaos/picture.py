"""The picture of a chaos run: a lane per target with its faults, and the effects per second below.

A bar is a fault; the thin line after it lasts until the interrupted runs were started again. The
curve shows whether work continued meanwhile.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Final

from chaos.measures import Felt, Measures

WIDTH: Final = 1100
LEFT: Final = 110
LANE: Final = 20
CURVE: Final = 110
TOP: Final = 26
COLOURS: Final = {
    "kill": "#c62828",
    "stop": "#ef8f00",
    "freeze": "#1565c0",
    "cut": "#6a1b9a",
    "stall": "#8e6bbf",
    "isolate": "#00838f",
    "reclock": "#558b2f",
    "outage": "#37474f",
}


def draw(measures: Measures, seconds: float, pulse: Sequence[float]) -> str:
    """An SVG; `pulse` has the effects of each second."""
    lanes = sorted({(felt.role, felt.target) for felt in measures.faults})
    height = TOP + len(lanes) * LANE + 24 + CURVE + 24
    scale = (WIDTH - LEFT - 10) / max(seconds, 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="11">',
        "<title>Faults by target, and effects per second</title>",
        _legend(measures.faults),
        *(_lane(name, n) for n, (_, name) in enumerate(lanes)),
        *(_bar(felt, [name for _, name in lanes], scale) for felt in measures.faults),
        _curve(pulse, scale, TOP + len(lanes) * LANE + 24),
        _axis(seconds, scale, height),
        "</svg>",
    ]
    return "\n".join(parts)


def _legend(faults: Sequence[Felt]) -> str:
    shown, parts = sorted({felt.kind for felt in faults}), []
    for n, kind in enumerate(shown):
        x = LEFT + n * 95
        colour = COLOURS.get(kind, "#666")
        parts.append(f'<rect x="{x}" y="5" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="15">{html.escape(kind)}</text>')
    return "".join(parts)


def _lane(name: str, number: int) -> str:
    y = TOP + number * LANE
    return (
        f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 10}" height="{LANE - 2}" '
        f'fill="{"#f1f4f7" if number % 2 else "#e9eef3"}"/>'
        f'<text x="{LEFT - 6}" y="{y + 13}" text-anchor="end">{html.escape(name)}</text>'
    )


def _bar(felt: Felt, lanes: Sequence[str], scale: float) -> str:
    y = TOP + lanes.index(felt.target) * LANE
    x, width = LEFT + felt.began * scale, max(2.0, (felt.ended - felt.began) * scale)
    colour = COLOURS.get(felt.kind, "#666")
    again = ""
    if felt.restarted is not None:
        end = LEFT + (felt.began + felt.restarted) * scale
        again = (
            f'<line x1="{x:.1f}" y1="{y + LANE - 4}" x2="{end:.1f}" y2="{y + LANE - 4}" '
            f'stroke="{colour}" stroke-width="2"/>'
        )
    story = (
        f"{felt.number}: {felt.kind} of {felt.target} at {felt.began:.1f} s for "
        f"{felt.ended - felt.began:.1f} s; {felt.interrupted} runs interrupted"
        + (f", started again in {felt.restarted:.1f} s" if felt.restarted is not None else "")
    )
    return (
        f'<g><title>{html.escape(story)}</title><rect x="{x:.1f}" y="{y + 2}" '
        f'width="{width:.1f}" height="{LANE - 8}" rx="2" fill="{colour}"/>{again}</g>'
    )


def _curve(pulse: Sequence[float], scale: float, top: float) -> str:
    most = max(pulse, default=0.0) or 1.0
    bottom = top + CURVE
    points = [f"{LEFT},{bottom:.1f}"]
    for second, value in enumerate(pulse):
        points.append(f"{LEFT + (second + 0.5) * scale:.1f},{bottom - value / most * CURVE:.1f}")
    points.append(f"{LEFT + len(pulse) * scale:.1f},{bottom:.1f}")
    return (
        f'<polygon points="{" ".join(points)}" fill="#90b8dd"/>'
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{most:.0f}/s</text>'
        f'<text x="{LEFT - 6}" y="{bottom}" text-anchor="end">effects</text>'
    )


def _axis(seconds: float, scale: float, height: int) -> str:
    step = next(s for s in (10, 30, 60, 300, 600, 1800) if seconds / s <= 12 or s == 1800)
    marks = range(0, int(seconds) + 1, step)
    return "".join(
        f'<text x="{LEFT + second * scale:.1f}" y="{height - 6}" text-anchor="middle">'
        f"{_time(second)}</text>"
        for second in marks
    )


def _time(second: int) -> str:
    return f"{second // 60}:{second % 60:02d}"
