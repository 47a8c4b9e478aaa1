"""The report of a chaos run: a table for the terminal, a JSON summary, a page with a picture.

The page is one file without scripts or external resources, so it can be kept and sent.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from chaos.drill import Outcome
from chaos.measures import Felt
from chaos.picture import draw
from chaos.plan import KINDS
from holdfast.version import __version__

SHOWN_VIOLATIONS: Final = 200
KIND_HEAD: Final = ("fault", "of", "times", "interrupted", "again in", "at most", "silence")
HEAD: Final = ("fault", "target", "at", "lasted", "interrupted", "again in", "silence")
PROMISES: Final = {
    "lost": "accepted runs lost",
    "missed": "slots missed",
    "duplicated": "effects duplicated",
    "stale": "stale writes accepted",
    "phantom": "effects nobody asked for",
    "torn": "chains torn",
    "early": "delayed runs early",
    "wrong": "results of a replaced holder",
    "spared": "poison runs not given up",
    "unrestored": "lost by a restore",
    "unexplained": "repeats without a cause",
    "over": "limits exceeded",
    "overtaken": "ordered runs overtaken",
    "stuck": "flows stuck",
    "orphan": "children without a flow",
    "dead": "runs given up",
    "open": "faults or queues left open",
}


def summary(outcome: Outcome) -> dict[str, Any]:
    """Everything as JSON."""
    verdict, measures = outcome.verdict, outcome.measures
    return {
        "holdfast": __version__,
        "seed": outcome.plan.seed,
        "seconds": round(outcome.seconds, 1),
        "settled_seconds": round(outcome.settled_seconds, 1),
        "ok": not verdict.violations,
        "operations": dict(outcome.history.counts()),
        "promises": {kind: verdict.counts.get(kind, 0) for kind in PROMISES},
        "violations": [str(v) for v in verdict.violations],
        "effects": verdict.effects,
        "starts": verdict.starts,
        "repeats": dict(verdict.repeats.most_common()),
        "repeated_share": round(verdict.repeated_share, 5),
        "repeated_effects_refused": verdict.repeated_effects,
        "at_most_once_given_up": verdict.written_off,
        "stale_effects_refused": verdict.stale_refused,
        "unknown_that_happened": verdict.unknown_applied,
        "exits": [
            {"member": e.member, "code": e.code, "at": round(e.at, 1)} for e in outcome.exits
        ],
        "left_out": list(outcome.left_out),
        "memory_mb": msgspec.to_builtins(outcome.memory),
        "measures": msgspec.to_builtins(measures),
        "plan": msgspec.to_builtins(outcome.plan),
    }


def write(outcome: Outcome, root: Path) -> Path:
    """Write `summary.json` and `report.html`; returns the page."""
    (root / "summary.json").write_text(json.dumps(summary(outcome), indent=2) + "\n")
    page = root / "report.html"
    page.write_text(_page(outcome), encoding="utf-8")
    return page


# ---- the terminal


def table(outcome: Outcome) -> str:
    """The result for the terminal."""
    verdict = outcome.verdict
    parts = [
        _columns(HEAD, _rows(outcome)),
        "",
        _columns(KIND_HEAD, _kind_rows(outcome)),
        "",
        *(f"{name:28s} {value}" for name, value in _facts(outcome)),
        "",
        *(f"{text:28s} {verdict.counts.get(kind, 0)}" for kind, text in PROMISES.items()),
        "",
        *(f"left out: {what}" for what in outcome.left_out),
        *(f"VIOLATION {v}" for v in verdict.violations[:SHOWN_VIOLATIONS]),
        _conclusion(outcome),
    ]
    return "\n".join(parts)


def _conclusion(outcome: Outcome) -> str:
    count = len(outcome.verdict.violations)
    result = f"{count} violations" if count else "no violation"
    return f"seed {outcome.plan.seed}: {len(outcome.plan.faults)} faults, {result}"


def _facts(outcome: Outcome) -> list[tuple[str, str]]:
    verdict, measures = outcome.verdict, outcome.measures
    counts = outcome.history.counts()
    repeats = ", ".join(f"{n} {why}" for why, n in verdict.repeats.most_common()) or "none"
    return [
        ("operations", ", ".join(f"{n} {state}" for state, n in counts.items())),
        ("effects", f"{verdict.effects} (of unanswered operations: {verdict.unknown_applied})"),
        ("handler starts", str(verdict.starts)),
        (
            "started again",
            f"{verdict.repeated_share:.2%} of all starts beside those meant to fail: {repeats}",
        ),
        ("given up, at most once", str(verdict.written_off)),
        ("refused as a repeat", f"{verdict.repeated_effects} effects"),
        ("refused as stale", f"{verdict.stale_refused} effects"),
        ("slots", str(measures.slots)),
        (
            "slots late by",
            f"median {measures.slot_late_median} s, 99 % {measures.slot_late_p99} s, "
            f"most {measures.slot_late_most} s",
        ),
        ("longest silence", f"{measures.longest_silence} s"),
        ("settled after healing in", f"{outcome.settled_seconds:.1f} s"),
        ("processes that had to end", str(len(outcome.exits))),
        ("memory, early / most / late", _memory(outcome)),
    ]


def _memory(outcome: Outcome) -> str:
    """The process of each kind that grew most."""
    grown: dict[str, tuple[float, str]] = {}
    for name, used in outcome.memory.items():
        kind = name.rpartition("-")[0]
        told = f"{name} {used.early:.0f} / {used.most:.0f} / {used.late:.0f} MB"
        grown[kind] = max(grown.get(kind, (-1e9, "")), (used.late - used.early, told))
    return ", ".join(told for _, told in grown.values())


def _rows(outcome: Outcome) -> list[tuple[str, ...]]:
    return [
        (
            felt.kind,
            felt.target,
            f"{felt.began:.1f}",
            f"{felt.ended - felt.began:.1f}",
            str(felt.interrupted or ""),
            _seconds(felt.restarted),
            _seconds(felt.silence),
        )
        for felt in outcome.measures.faults
    ]


def _kind_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    return [
        (
            kind.kind,
            kind.role,
            str(kind.count),
            str(kind.interrupted or ""),
            _seconds(kind.restarted_median),
            _seconds(kind.restarted_most),
            _seconds(kind.silence_most),
        )
        for kind in outcome.measures.kinds
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [tuple(head), *rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


# ---- the page

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
       color: #1c2733; background: #fff }
h1 { font-size: 1.6rem; margin: 0 0 .2rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.good { color: #1a7f37 } .bad { color: #c62828 }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #e3e8ee }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
svg { width: 100%; height: auto } ul.violations { color: #c62828 }
@media (prefers-color-scheme: dark) { body { color: #dde5ee; background: #10161d }
  th, td { border-color: #2b3642 } svg { background: #f7f9fb; border-radius: 6px } }
"""


def _page(outcome: Outcome) -> str:
    bad = bool(outcome.verdict.violations)
    title = f"Chaos, {html.escape(_conclusion(outcome))}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{_STYLE}</style></head><body>
<h1 class="{"bad" if bad else "good"}">{title}</h1>
<p>{outcome.seconds:.0f} seconds with Holdfast {__version__}. Repeat it with
<code>python -m chaos --seed {outcome.plan.seed}</code>.</p>
{_violations(outcome)}
<h2>Faults and effects over time</h2>
{draw(outcome.measures, outcome.seconds, outcome.pulse)}
<h2>Promises</h2>
{_promises(outcome)}
<h2>Facts</h2>
{_table(("", ""), _facts(outcome), numbers=())}
{_left_out(outcome)}
<h2>By kind</h2>
{_table(KIND_HEAD, _kind_rows(outcome), numbers=(2, 3, 4, 5, 6))}
<h2>Each fault</h2>
{_faults(outcome.measures.faults)}
</body></html>
"""


def _promises(outcome: Outcome) -> str:
    counts = outcome.verdict.counts
    return _table(
        ("promise", "broken"), [(text, str(counts[kind])) for kind, text in PROMISES.items()]
    )


def _violations(outcome: Outcome) -> str:
    found = outcome.verdict.violations[:SHOWN_VIOLATIONS]
    items = "".join(f"<li>{html.escape(str(v))}</li>" for v in found)
    return f'<h2>Violations</h2><ul class="violations">{items}</ul>' if items else ""


def _left_out(outcome: Outcome) -> str:
    return "".join(f"<p>Left out: {html.escape(what)}.</p>" for what in outcome.left_out)


def _faults(faults: Sequence[Felt]) -> str:
    head = ("at", "fault", "target", "lasted", "runs interrupted", "started again", "silence")
    rows = [
        (
            f"{f.began:.1f} s",
            KINDS.get(f.kind, f.kind),
            f.target,
            f"{f.ended - f.began:.1f} s",
            str(f.interrupted),
            _seconds(f.restarted),
            _seconds(f.silence),
        )
        for f in faults
    ]
    return _table(head, rows, numbers=(0, 3, 4, 5, 6))


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (1,)
) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=number' if n in numbers else ''}>{html.escape(c)}</{tag}>"
            for n, c in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
