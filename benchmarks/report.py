"""The table and the goals, for a terminal and for the documentation."""

from __future__ import annotations

import math

from benchmarks.goals import GOALS
from benchmarks.measures import UNITS
from benchmarks.results import Results

COLUMNS = {
    "drain": "drain /s",
    "cpu_run": "µs CPU/run",
    "drain_2": "2 processes /s",
    "enqueue": "enqueue /s",
    "enqueue_bulk": "bulk /s",
    "io": "0.1 s I/O /s",
    "latency_p50": "p50 ms",
    "latency_p99": "p99 ms",
    "memory_idle": "idle MB",
    "memory_loaded": "loaded MB",
    "cpu_idle": "idle CPU %",
    "recovery": "recovery s",
}
SCHEDULES = {
    "lateness_1000": "1,000 due at once, last late by s",
    "lateness_10000": "10,000 due at once, last late by s",
    "slots_due": "slots due while schedulers were killed",
    "slots_missed": "missed",
    "slots_doubled": "doubled",
}
RATIO = "× raw-fetch"
FLOOR = "raw-fetch"


def table(results: Results) -> str:
    """Medians of every system and variant, with the ratio of its drain to the floor's."""
    head = ["system", "variant", *COLUMNS.values()]
    head.insert(3, RATIO)
    return _aligned([head, *(_line(results, s, v) for s, v in results.subjects)])


def schedules(results: Results) -> str:
    """What Holdfast's schedulers did; the peers have none that could be compared."""
    lines = [["system", "variant", *SCHEDULES.values()]]
    for system, variant in results.subjects:
        if (next(iter(SCHEDULES)), system, variant) in results.samples:
            cells = [_cell(results, measure, system, variant) for measure in SCHEDULES]
            lines.append([system, variant, *cells])
    return _aligned(lines) if len(lines) > 1 else ""


def _line(results: Results, system: str, variant: str) -> list[str]:
    cells = [system, variant]
    for measure in COLUMNS:
        cells.append(_cell(results, measure, system, variant))
        if measure == "drain":
            cells.append(_ratio(results, system, variant))
    if not any((m, system, variant) in results.samples for m in COLUMNS):
        notes = [t for (_, s, v), t in results.notes.items() if (s, v) == (system, variant)]
        cells = [system, variant, f"not measured: {notes[0]}" if notes else "not measured"]
    return cells


def _cell(results: Results, measure: str, system: str, variant: str) -> str:
    value = results.value(measure, system, variant)
    if value is None:
        return "failed" if (measure, system, variant) in results.notes else ""
    if math.isinf(value):
        return f"> {results.most[measure]:g}"
    return number(value, measure)


def number(value: float, measure: str) -> str:
    """A figure with as many digits as it is worth."""
    if UNITS[measure] == "runs/s":
        return f"{value:,.0f}"
    return (
        f"{value:.0f}"
        if measure.startswith(("memory", "slots"))
        else f"{value:.2g}"
        if value < 10
        else f"{value:.0f}"
    )


def _ratio(results: Results, system: str, variant: str) -> str:
    floor = "default+always" if variant.endswith("+always") else "default"
    ratio = results.ratio("drain", (system, variant), (FLOOR, floor))
    return "" if ratio is None else f"{ratio:.2f}"


def goals(results: Results) -> str:
    """Each goal with what was found."""
    lines = [["goal", "wanted", "found", "reached"]]
    for goal in GOALS:
        value = goal.found(results)
        sign = "≤" if goal.at_most else "≥"
        reached = {True: "yes", False: "NO", None: "not measured"}[goal.reached(results)]
        found = "" if value is None else f"{value:.2f}{goal.unit}"
        lines.append([goal.text, f"{sign} {goal.limit:.3g}{goal.unit}", found, reached])
    return _aligned(lines)


def spread(results: Results) -> str:
    """How far apart the samples of one figure lay, at most and typically."""
    lines = [["measure", "samples", "median spread", "largest spread"]]
    for measure in UNITS:
        wide = sorted(
            (max(s) - min(s)) / 2 / (sum(s) / len(s))
            for s in _samples(results, measure)
            if len(s) > 1 and sum(s) > 0 and not math.isinf(max(s))
        )
        if wide:
            most = max(map(len, _samples(results, measure)))
            middle = wide[len(wide) // 2]
            lines.append([measure, f"up to {most}", f"±{middle:.0%}", f"±{wide[-1]:.0%}"])
    return _aligned(lines) if len(lines) > 1 else ""


def _samples(results: Results, measure: str) -> list[list[float]]:
    return [list(s.values()) for (found, *_), s in results.samples.items() if found == measure]


def notes(results: Results) -> str:
    """What is missing, and why."""
    return "\n".join(f"- {s} {v}, {m}: {text}" for (m, s, v), text in results.notes.items())


def _aligned(lines: list[list[str]]) -> str:
    """A Markdown table that can also be read as it is."""
    width = max(map(len, lines))
    full = [line + [""] * (width - len(line)) for line in lines]
    sizes = [
        max(len(line[n]) for line, short in zip(full, lines, strict=True) if len(short) == width)
        for n in range(width)
    ]
    words = [n < 2 for n in range(width)]
    out = []
    for line in full:
        cells = [
            cell.ljust(size) if word else cell.rjust(size)
            for cell, size, word in zip(line, sizes, words, strict=True)
        ]
        out.append("| " + " | ".join(cells) + " |")
    rules = [
        "-" * (size + 1) + ("-" if word else ":") for size, word in zip(sizes, words, strict=True)
    ]
    out.insert(1, "|" + "|".join(rules) + "|")
    return "\n".join(out)
