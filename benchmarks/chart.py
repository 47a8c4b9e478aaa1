"""The chart: bars as SVG text, no library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from benchmarks.report import number
from benchmarks.results import Results

WIDTH = 860
LABEL = 250
VALUE = 110
ROW = 22
BAR = 14
TITLE = 44

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
COLOURS = {"holdfast": "#0f766e", "raw-fetch": "#9ca3af", "raw-callback": "#9ca3af"}
PEER = "#93a8c9"


@dataclass(frozen=True)
class Panel:
    """One measure of every system."""

    measure: str
    title: str
    more_is_better: bool
    longest: float = math.inf
    """Times the best value at which a bar is cut."""
    synced: bool = False
    """Whether figures on a server that writes to disk before it answers are shown too."""


PANELS = (
    Panel("drain", "Runs drained per second, one worker process (more is better)", True),
    Panel("latency_p50", "Milliseconds from enqueue to start, median (less is better)", False, 12),
    Panel("recovery", "Seconds until a killed worker's runs start again (less is better)", False),
)


def draw(results: Results) -> str:
    """All panels, one above the other."""
    parts: list[str] = []
    top = 16
    for panel in PANELS:
        bars = _bars(results, panel)
        if bars:
            parts.append(_panel(panel, bars, top, results.most.get(panel.measure, 0.0)))
            top += TITLE + ROW * len(bars) + 14
    machine = results.machine
    foot = f"{machine['cores']} cores, {machine['cpu']}, Python {machine['python']}"
    foot += f", {machine['date']}; no-op jobs of 100 bytes; python -m benchmarks"
    parts.append(f'<text x="16" y="{top + 10}" class="foot">{escape(foot)}</text>')
    style = f"text{{font:13px {FONT};fill:#1f2937}}.title{{font-size:15px;font-weight:600}}"
    style += ".own{font-weight:600}.foot{font-size:11px;fill:#6b7280}.value{fill:#374151}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 24}" '
        f'width="{WIDTH}" height="{top + 24}" role="img" aria-label="Benchmark results">\n'
        f"<style>{style}</style>\n"
        f'<rect width="{WIDTH}" height="{top + 24}" rx="8" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _bars(results: Results, panel: Panel) -> list[tuple[str, str, float]]:
    found = [
        (system, variant, value)
        for system, variant in results.subjects
        if (panel.synced or not variant.endswith("+always"))
        and (value := results.value(panel.measure, system, variant)) is not None
    ]
    return sorted(found, key=lambda bar: bar[2], reverse=panel.more_is_better)


def _panel(panel: Panel, bars: list[tuple[str, str, float]], top: int, most: float) -> str:
    values = [min(v, most) if math.isinf(v) else v for _, _, v in bars]
    longest = max(v for v in values)
    if not math.isinf(panel.longest):
        longest = min(longest, min(values) * panel.longest)
    scale = (WIDTH - LABEL - VALUE - 16) / (longest or 1)
    lines = [f'<text x="16" y="{top + 16}" class="title">{escape(panel.title)}</text>']
    for place, ((system, variant, value), shown) in enumerate(zip(bars, values, strict=True)):
        y = top + TITLE - 12 + ROW * place
        own = ' class="own"' if system == "holdfast" else ""
        name = system if variant == "default" else f"{system} {variant}"
        width = max(1.0, min(shown, longest) * scale)
        text = f"> {most:g}" if math.isinf(value) else number(value, panel.measure)
        cut = " »" if shown > longest else ""
        lines += [
            f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end"{own}>{escape(name)}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" '
            f'fill="{COLOURS.get(system, PEER)}"/>',
            f'<text x="{LABEL + width + 6:.1f}" y="{y + 12}" class="value">'
            f"{escape(text + cut)}</text>",
        ]
    return "\n".join(lines)
