"""How a fan-out run is shown while it runs: a line for each return, and a bar on a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from holdfast import visible
from holdfast.cli import out

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from holdfast.model.fleet import FleetRun, Return

WIDEST = 500
"""Characters of a return in a table; `--format json` shows all of it."""


class View:
    """Shows one run. On a terminal the bar stays below the lines; into a pipe there is none."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._ok = 0
        self._failed = 0
        self._told = False
        self._run = ""

    def __enter__(self) -> View:
        if not self._quiet and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeElapsedColumn as Elapsed

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                Elapsed(),
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()
        if self._run and kind is asyncio.CancelledError:  # Ctrl-C
            out.note(f"{self._run} continues: 'holdfast fleet cancel {self._run}' stops it")

    def record(self, record: FleetRun) -> None:
        """Show that the run has started or changed."""
        self._run = record.run
        if not self._quiet and not self._told:
            self._told = True
            many = len(record.targets)
            whom = "1 agent" if many == 1 else f"{many} agents"
            out.note(f"{record.run}: {record.request.function} for {whom}")
        if self._bar and self._task is None:
            named = visible.one_line(record.request.function)
            self._task = self._bar.add_task(named, total=len(record.targets))

    def returned(self, found: Return) -> None:
        """Show an agent's return."""
        self._ok += found.ok
        self._failed += not found.ok
        if self._quiet:
            return
        text = lines(found)
        if self._bar:
            from rich.text import Text

            self._bar.console.print(Text(visible.block(text), style="" if found.ok else "red"))
            if self._task is not None:
                counts = f"{self._ok} ok, {self._failed} failed"
                self._bar.update(self._task, advance=1, description=counts)
        else:
            out.block(text)

    def end(self, record: FleetRun) -> None:
        """Show the end of a run: who did not answer, and the totals."""
        if self._quiet:
            return
        missing = set(record.unreachable)
        for agent in record.unreachable:
            out.say("  ".join((agent, *verdict(record, agent))).rstrip())
        total, answered = len(record.targets), self._ok + self._failed
        silent = total - answered - len(missing) - len(record.unsent)
        away = len(missing) - len(record.refused)
        parts = [f"{self._ok} ok", f"{self._failed} failed", f"{away} unreachable"]
        if record.refused:
            parts.append(f"{len(record.refused)} refused")
        if silent > 0:
            parts.append(f"{silent} did not return in time")
        if record.unsent:
            parts.append(f"{len(record.unsent)} not reached by a command")
        out.note(f"{record.run}: {record.status}, {', '.join(parts)} of {total}")
        if record.reason:
            out.note(record.reason)


def lines(found: Return) -> str:
    """A return for people: on one line, or a program's output below the agent's name."""
    output = found.value.get("stdout") if found.ok and isinstance(found.value, dict) else None
    if isinstance(output, str):
        below = "".join(f"\n    {line}" for line in output.replace("\r\n", "\n").split("\n"))
        return f"{visible.one_line(found.agent)}  {found.outcome}{below.rstrip()}"
    return visible.one_line(f"{found.agent}  {found.outcome}  {shown(found)}".rstrip())


def shown(found: Return) -> str:
    """What an agent returned, on one line."""
    import msgspec

    if not found.ok:
        return out.shortened(found.error, WIDEST)
    value: Any = found.value
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return out.shortened(f"{text} [{found.note}]" if found.note else text, WIDEST)


def verdict(record: FleetRun, agent: str) -> tuple[str, str]:
    """Why an agent has no return: it was silent, or refused."""
    from holdfast.identity.commands import sentence

    why = record.refused.get(agent)
    return ("refused", sentence(why)) if why else ("unreachable", "")


def rows(record: FleetRun, returns: Mapping[str, Return]) -> list[tuple[str, str, str, str]]:
    """Every target of a run with its outcome."""
    unreachable, unsent = set(record.unreachable), set(record.unsent)
    found: list[tuple[str, str, str, str]] = []
    for agent in record.targets:
        if given := returns.get(agent):
            found.append((agent, given.outcome, f"{given.seconds:.3f}", shown(given)))
        else:
            silent = "no return" if record.over else "waiting"
            silent = "not sent" if agent in unsent else silent
            what, why = verdict(record, agent) if agent in unreachable else (silent, "")
            found.append((agent, what, "", why))
    return found
