"""What the demo counts: how many runs were accepted, how they ended, and whether one is missing.

`Tally` does no I/O: it is given accepted runs and changed records. An accepted run stays open until
its record says how it ended. `Watch` feeds it from the server, which republishes every write of a
record; a run that has not ended in time is read again, because a subscriber may miss a message.

A run is lost when nothing waits in its job's queue and it has no record, twice in a row: between
two reads its message may move from delayed to the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from holdfast.broker import Received
from holdfast.client import Client
from holdfast.errors import BrokerError
from holdfast.model.run import RunRecord
from holdfast.names import event_message_id, event_run
from holdfast.status.finding import read_record
from holdfast.status.jobs import Jobs

if TYPE_CHECKING:
    from holdfast.app import Holdfast

LOOK_SECONDS: Final = 1.0
"""How often overdue runs are looked up."""
OVERDUE_SECONDS: Final = 12.0
"""Longer than the longest run of the sample app with all of its retries."""
PUBLISHES: Final = {"charge": "order-paid"}
"""The event that a run of a job publishes when it is done."""
OFTEN: Final = 10
"""Of frequent events (retries, repeats), one in this many is printed."""


@dataclass(slots=True)
class OpenRun:
    """A run that has not ended."""

    job: str
    due: float
    """When it could start, on the monotonic clock."""
    accepted: bool = False
    state: str = "waiting"
    node: str = ""
    failures: int = 0
    missing: bool = False
    """Whether the last lookup found neither a record nor a message."""


class Tally:
    """The totals, and the runs that are still open."""

    def __init__(self, jobs: Iterable[str], say: Callable[[str], None]) -> None:
        self.say = say
        self.accepted = self.ended = self.lost = self.kills = 0
        self.counts = dict.fromkeys(("done", "retries", "dead", "discarded", "duplicates"), 0)
        self.open: dict[str, OpenRun] = {}
        self._jobs = frozenset(jobs)
        self._ended: set[str] = set()
        self._changes = asyncio.Event()

    @property
    def under_way(self) -> int:
        """Accepted and not ended."""
        return self.accepted - self.ended

    @property
    def summary(self) -> str:
        """The totals in one line."""
        counts = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        return (
            f"accepted {self.accepted}, ended {self.ended}, under way {self.under_way} ({counts}), "
            f"workers killed {self.kills}, lost: {self.lost}"
        )

    def accept(self, run: str, job: str, due: float) -> None:
        """Note an accepted run: from now on it must end eventually."""
        if run in self._ended:
            self.accepted += 1
            self.ended += 1
            return
        found = self.open.setdefault(run, OpenRun(job, due))
        if not found.accepted:
            found.accepted = True
            self.accepted += 1

    def duplicate(self, run: str) -> None:
        """Note that a key was sent again and detected as a repeat."""
        if self._count("duplicates"):
            self.say(f"{run} was sent again: detected, and not run twice")

    def change(self, run: str, record: RunRecord, now: float) -> bool:
        """Note a written record; True when the run has just ended."""
        if run in self._ended or record.job not in self._jobs:
            return False
        found = self.open.setdefault(run, OpenRun(record.job, now))
        failed = record.state == "failed" and record.failures > found.failures
        if failed and self._count("retries"):
            self.say(f"{run} failed ({record.error}): will be retried")
        found.state, found.node, found.failures = record.state, record.node, record.failures
        found.missing = False
        self._changes.set()
        if not record.terminal:
            return False
        self._end(run, found, record)
        return True

    def _end(self, run: str, found: OpenRun, record: RunRecord) -> None:
        del self.open[run]
        self._ended.add(run)
        self.ended += found.accepted
        ending = {"done": "done", "cancelled": "discarded"}.get(record.state, "dead")
        self._count(ending)
        if ending == "dead":
            self.say(f"{run} is a dead letter: {record.error}")

    def _count(self, name: str) -> bool:
        """Count an event; True when it should be printed."""
        self.counts[name] += 1
        return self.counts[name] % OFTEN == 1

    def missing(self, run: str) -> None:
        """Note that neither record nor message was found; the second time in a row, the run is
        lost."""
        found = self.open[run]
        if not found.missing:
            found.missing = True
            return
        del self.open[run]
        self.lost += 1
        self.say(f"{run} of {found.job} is LOST: no record and no message is left")

    async def changed(self) -> None:
        """Return after the next change of a record."""
        self._changes.clear()
        await self._changes.wait()

    def held_by(self, node: str) -> list[str]:
        """The runs that a node is executing; `node` is part of its id."""
        return [r for r, o in self.open.items() if o.state == "running" and node in o.node]

    def overdue(self, now: float, seconds: float) -> list[tuple[str, OpenRun]]:
        """Accepted runs that have not ended this long after they could start."""
        return [(r, o) for r, o in self.open.items() if o.accepted and now - o.due > seconds]


class Watch:
    """Keeps a tally up to date while it is open and `run` runs."""

    def __init__(self, app: Holdfast, tally: Tally) -> None:
        self.tally = tally
        self._app = app

    async def __aenter__(self) -> Self:
        backend = await self._app.backend()
        assert isinstance(backend, Client)
        self.client = backend
        await backend.topology.ensure()
        broker = backend.broker
        subject = broker.names.changed(backend.runs.name, ">")
        self._prefix = len(subject) - 1
        await broker.subscribe(subject, self._on_change)
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def run(self) -> None:
        """Look up overdue runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look(OVERDUE_SECONDS)
            except BrokerError as error:
                self.tally.say(f"the server does not answer: {error}")

    async def conclude(self) -> None:
        """Account for every run that is still open."""
        await self.look(0.0)
        if any(found.missing for found in self.tally.open.values()):
            await asyncio.sleep(LOOK_SECONDS)
            await self.look(0.0)

    async def look(self, overdue: float) -> None:
        """Read again the runs that should have ended."""
        busy = {
            info.job
            for info in await Jobs(self.client).list()
            if info.waiting or info.parked or info.in_flight
        }
        for run, found in self.tally.overdue(time.monotonic(), overdue):
            record = await self.client.read(run)
            if record is not None:
                self._changed(run, record)
            elif found.job not in busy and run in self.tally.open:
                self.tally.missing(run)

    async def _on_change(self, message: Received) -> None:
        run = message.subject[self._prefix :]
        record = read_record(self.client.broker, run, message.body)
        if record is not None:
            self._changed(run, record)

    def _changed(self, run: str, record: RunRecord) -> None:
        if self.tally.change(run, record, time.monotonic()) and record.state == "done":
            self._expect(run, record)

    def _expect(self, run: str, record: RunRecord) -> None:
        """An event starts a run of each job that subscribes to it."""
        event = PUBLISHES.get(record.job)
        for job in self._app.jobs.values():
            if event in job.spec.on:
                name = event_message_id(run, event, 1)
                started = event_run(job.spec.group, job.name, name)
                self.tally.accept(started, job.name, time.monotonic())
