"""What the demo shows: counts per job, what happened, and whether any accepted run is missing.

It does no I/O: it is told of accepted runs and of changed records, and keeps the tally. A run that
was accepted stays open until its record says how it ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.model.run import RunRecord

HAPPENINGS = 12
_ENDINGS = {"done": "done", "dead": "dead", "cancelled": "discarded", "lost": "dead"}


@dataclass(slots=True)
class Tally:
    """The numbers of one job."""

    waiting: int = 0
    running: int = 0
    done: int = 0
    retries: int = 0
    crashes: int = 0
    dead: int = 0
    discarded: int = 0
    duplicates: int = 0


@dataclass(slots=True)
class OpenRun:
    """A run that has not ended yet."""

    job: str
    since: float
    """When it was accepted, or first heard of; by the monotonic clock, its delay added."""
    accepted: bool = False
    state: str = "waiting"
    node: str = ""
    failures: int = 0
    crashes: int = 0


@dataclass(slots=True)
class Board:
    """The whole picture."""

    jobs: dict[str, Tally]
    accepted: int = 0
    ended: int = 0
    lost: int = 0
    kills: int = 0
    happenings: deque[str] = field(default_factory=lambda: deque(maxlen=HAPPENINGS))
    news: list[str] = field(default_factory=list)
    """Happenings that were not printed yet."""
    open: dict[str, OpenRun] = field(default_factory=dict)
    _over: set[str] = field(default_factory=set)
    _changes: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def under_way(self) -> int:
        """Accepted and not ended."""
        return self.accepted - self.ended

    def say(self, text: str) -> None:
        """Something worth seeing happened."""
        self.happenings.append(text)
        self.news.append(text)

    def accept(self, run: str, job: str, now: float, *, delay: float = 0.0) -> None:
        """A run was accepted: from now on it has to end some day."""
        if run in self._over:
            self.accepted += 1
            self.ended += 1
            return
        found = self.open.setdefault(run, OpenRun(job, now + delay))
        if not found.accepted:
            found.accepted = True
            self.accepted += 1

    def duplicate(self, run: str, job: str) -> None:
        """A key was sent again and known as a repeat."""
        self.jobs[job].duplicates += 1
        if self.jobs[job].duplicates % 5 == 1:
            self.say(f"{run} was sent again: known as a repeat")

    def change(self, run: str, record: RunRecord, now: float) -> bool:
        """A record was written; True when the run has just ended."""
        if run in self._over or record.job not in self.jobs:
            return False
        found = self.open.setdefault(run, OpenRun(record.job, now))
        tally = self.jobs[record.job]
        tally.running += (record.state == "running") - (found.state == "running")
        tally.crashes += max(0, record.crashes - found.crashes)
        if record.failures > found.failures and record.state == "failed":
            tally.retries += 1
            if tally.retries % 10 == 1:
                self.say(f"{run} failed ({record.error}): it is tried again")
        found.state, found.node = record.state, record.node
        found.failures, found.crashes = record.failures, record.crashes
        self._changes.set()
        return record.terminal and self._end(run, found, record)

    async def changed(self) -> None:
        """Return after the next change of a record."""
        self._changes.clear()
        await self._changes.wait()

    def _end(self, run: str, found: OpenRun, record: RunRecord) -> bool:
        del self.open[run]
        self._over.add(run)
        tally = self.jobs[found.job]
        ending = _ENDINGS[record.state]
        setattr(tally, ending, getattr(tally, ending) + 1)
        self.ended += found.accepted
        if ending == "dead":
            self.say(f"{run} is a dead letter: {record.error}")
        return True

    def held_by(self, node: str) -> list[str]:
        """The runs that a node is executing; `node` is a part of its id."""
        return [r for r, o in self.open.items() if o.state == "running" and node in o.node]

    def overdue(self, now: float, seconds: float) -> Iterator[tuple[str, OpenRun]]:
        """Accepted runs that should have ended, as far as the records that were seen say."""
        return (
            (run, found)
            for run, found in list(self.open.items())
            if found.accepted and now - found.since > seconds
        )
