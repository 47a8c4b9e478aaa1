"""What `holdfast top` draws: a look at a namespace as lines for a terminal of any size.

Guaranteed: at most `height` lines of at most `width` cells, and no character of a name or an error
reaches the terminal as a control character. Sections share the lines; on a small terminal the most
important ones stay: the figures, then jobs, then failures, then nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast import visible
from holdfast.cli import out
from holdfast.durations import text as duration

if TYPE_CHECKING:
    from rich.text import Text

    from holdfast.status.glance import Glance

BARS = " ▁▂▃▄▅▆▇█"
GAP = 2
NARROWEST = 14
"""The least cells in which names can be told apart."""
COLOURS = {"dead": "red", "lost": "red", "failed": "yellow", "paused": "yellow"}


@dataclass(frozen=True, slots=True)
class Section:
    """A table; a column that is too wide is cut."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str
    spare: Sequence[int] = ()
    """The columns that a narrow terminal leaves out, in this order."""


@dataclass(frozen=True, slots=True)
class Header:
    """The parts of the first lines that are not figures."""

    where: str
    rate: float | None
    """Runs that ended per second since the snapshot before; None in the first one."""
    problem: str = ""
    keys: str = ""


def screen(look: Glance, header: Header, width: int, height: int) -> list[Text]:
    """The lines of a screen."""
    from rich.text import Text

    lines = [_line(text, width, style) for text, style in _head(look, header, width)]
    lines = lines[:height]
    sections = [_jobs(look), _failures(look), _nodes(look)]
    rows = shares(height - len(lines), [max(1, len(one.rows)) for one in sections])
    for section, share in zip(sections, rows, strict=True):
        if share:
            lines += [Text(""), *_table(section, share, width)]
    return lines[:height]


def shares(lines: int, wanted: Sequence[int]) -> list[int]:
    """How many rows each section gets: one each in order, then in turn; 0 leaves the section out.

    A section also needs an empty line and its titles.
    """
    found = [0] * len(wanted)
    left = lines
    for n in range(len(wanted)):
        if left >= 3:
            found[n], left = 1, left - 3
    while left > 0 and any(0 < f < w for f, w in zip(found, wanted, strict=True)):
        for n, most in enumerate(wanted):
            if left > 0 and 0 < found[n] < most:
                found[n], left = found[n] + 1, left - 1
    return found


# ---- the figures


def _head(look: Glance, header: Header, width: int) -> list[tuple[str, str]]:
    title = f"holdfast top  {header.where}  {out.clock_time(look.at)} UTC  {header.keys}"
    ended = ", ".join(f"{count:,} {state}" for state, count in look.ended.items()) or "none"
    states = (
        f"{look.queued:,} queued · {look.in_flight:,} in flight · {look.delayed:,} delayed · "
        f"{look.dead_letters:,} dead · ended in the last hour: {ended}"
    )
    rate = f"{header.rate:,.1f} runs/s" if header.rate is not None else "throughput"
    most = f"at most {max(look.minutes):,} a minute"
    room = max(0, width - len(rate) - len(most) - 2 * GAP)
    bars = f"{rate}  {spark(look.minutes[-room:] if room else [])}  {most}"
    first = (header.problem, "bold white on red") if header.problem else (title, "bold reverse")
    return [first, (states, ""), (bars, "")]


def spark(values: Sequence[int]) -> str:
    """Values as a row of bars; any that is not zero is visible."""
    most = max(values, default=0)
    steps = len(BARS) - 1
    return "".join(BARS[-(-value * steps // most)] if most else BARS[0] for value in values)


# ---- the tables


def _jobs(look: Glance) -> Section:
    rows = []
    for job in look.jobs:
        oldest = duration(round(job.oldest_seconds)) if job.oldest_seconds is not None else ""
        name = job.job if job.group == "default" else f"{job.group}/{job.job}"
        state = "paused" if job.paused else "" if job.served else "no worker yet"
        counts = (f"{n:,}" for n in (job.waiting, job.in_flight, job.parked, job.dead))
        rows.append((name, *counts, oldest, state))
    titles = ("JOB", "QUEUED", "IN FLIGHT", "DELAYED", "DEAD", "OLDEST", "")
    return Section(titles, rows, "no jobs yet", (3, 6, 2, 4, 5))


def _nodes(look: Glance) -> Section:
    rows = [
        (
            node.id,
            node.role,
            node.group,
            node.state.lower(),
            str(node.running),
            duration(round(node.uptime_seconds)),
            "" if node.state == "RUNNING" and not node.trouble else node.reason,
        )
        for node in look.nodes
    ]
    titles = ("NODE", "ROLE", "GROUP", "STATE", "RUNNING", "UP", "")
    return Section(titles, rows, "no nodes: start a worker", (2, 5, 4, 1))


def _failures(look: Glance) -> Section:
    rows = [
        (out.clock_time(one.at)[11:], one.state, one.run, out.shortened(one.error, 200))
        for one in look.failures
    ]
    return Section(("FAILED", "STATE", "RUN", "ERROR"), rows, "nothing has failed", (0, 1))


def _table(section: Section, share: int, width: int) -> list[Text]:
    if not section.rows:
        return [_line(section.titles[0], width, "bold"), _line(section.empty, width, "dim")]
    rows = [[_clean(cell) for cell in row] for row in section.rows[:share]]
    hidden = len(section.rows) - len(rows)
    titles = list(section.titles)
    kept = _columns([titles, *rows], section.spare, width)
    titles, *rows = [[row[n] for n in kept] for row in (titles, *rows)]
    if hidden:
        titles[-1] = f"{titles[-1]} (+{hidden} more)".strip()
    widths = _widths([titles, *rows], width)
    lines = [_row(titles, widths, width, "bold")]
    for row in rows:
        style = next((COLOURS[cell] for cell in row if cell in COLOURS), "")
        lines.append(_row(row, widths, width, style))
    return lines


def _columns(rows: Sequence[Sequence[str]], spare: Sequence[int], width: int) -> list[int]:
    """The columns that fit, if none of them is cut below `NARROWEST`."""
    from rich.cells import cell_len

    sizes = [max(cell_len(row[n]) for row in rows) for n in range(len(rows[0]))]
    kept = list(range(len(sizes)))
    for column in spare:
        if sum(min(sizes[n], NARROWEST) + GAP for n in kept) - GAP <= width:
            break
        kept.remove(column)
    return kept


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The width of each column; the widest one shrinks until all fit."""
    from rich.cells import cell_len

    found = [max(cell_len(row[n]) for row in rows) for n in range(len(rows[0]))]
    while sum(found) + GAP * (len(found) - 1) > width and max(found) > 4:
        found[found.index(max(found))] -= 1
    return found


def _row(cells: Sequence[str], widths: Sequence[int], width: int, style: str) -> Text:
    text = (" " * GAP).join(_fit(cell, size) for cell, size in zip(cells, widths, strict=True))
    return _line(text, width, style)


def _fit(text: str, size: int) -> str:
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= size or size < 2:
        return set_cell_size(text, size)
    return set_cell_size(text, size - 1) + "…"


def _line(text: str, width: int, style: str = "") -> Text:
    from rich.cells import cell_len, set_cell_size
    from rich.text import Text

    clean = _clean(text).rstrip()
    return Text(clean if cell_len(clean) <= width else set_cell_size(clean, width), style=style)


def _clean(value: Any) -> str:
    return visible.one_line(str(value))
