"""The demo's eyes: it follows every record, counts what waits, and looks overdue runs up.

The server repeats each write of a record to whoever listens; a listener may miss some, so what has
not ended in time is read again. Lost means: the job's queue was empty, and after that there was
still no record of the run.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Self

from holdfast.broker import Received
from holdfast.cli.demo_board import Board, OpenRun
from holdfast.cli.demo_traffic import PUBLISHES
from holdfast.client import Client
from holdfast.errors import BrokerError
from holdfast.model.run import RunRecord
from holdfast.names import event_message_id, event_run
from holdfast.status.finding import read_record
from holdfast.status.jobs import Jobs

if TYPE_CHECKING:
    from holdfast.app import Holdfast

LOOK_SECONDS = 1.0
OVERDUE_SECONDS = 12.0


class Watch:
    """Keeps a board up to date while it is open and `run` runs."""

    def __init__(self, app: Holdfast, board: Board) -> None:
        self.board = board
        self._app = app

    async def __aenter__(self) -> Self:
        backend = await self._app.backend()
        assert isinstance(backend, Client)
        self._client = backend
        await self._client.topology.ensure()
        broker = self._client.broker
        subject = broker.names.changed(self._client.runs.name, ">")
        self._prefix = len(subject) - 1
        await broker.subscribe(subject, self._on_change)
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def run(self) -> None:
        """Count what waits and look overdue runs up, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.account(OVERDUE_SECONDS)
            except BrokerError as error:
                self.board.say(f"the server does not answer: {error}")

    async def account(self, overdue: float) -> None:
        """Read again what should have ended; a run that is nowhere is lost."""
        busy = set()
        for job in await Jobs(self._client).list():
            if job.job in self.board.jobs:
                self.board.jobs[job.job].waiting = job.waiting + job.parked
                if job.waiting or job.parked or job.in_flight:
                    busy.add(job.job)
        for run, found in self.board.overdue(time.monotonic(), overdue):
            await self._look_up(run, found, found.job in busy)

    async def _look_up(self, run: str, found: OpenRun, busy: bool) -> None:
        record = await self._client.read(run)
        if record is not None:
            self._changed(run, record)
        elif not busy and run in self.board.open:
            del self.board.open[run]
            self.board.lost += 1
            self.board.say(f"{run} of {found.job} is LOST: no record and no message is left")

    async def _on_change(self, message: Received) -> None:
        run = message.subject[self._prefix :]
        record = read_record(self._client.broker, run, message.body)
        if record is not None:
            self._changed(run, record)

    def _changed(self, run: str, record: RunRecord) -> None:
        if self.board.change(run, record, time.monotonic()) and record.state == "done":
            self._expect(run, record)

    def _expect(self, run: str, record: RunRecord) -> None:
        """What a run published when it was done starts a run of each job that subscribes."""
        event = PUBLISHES.get(record.job)
        for job in self._app.jobs.values():
            if event in job.spec.on:
                name = event_message_id(run, event, 1)
                started = event_run(job.spec.group, job.name, name)
                self.board.accept(started, job.name, time.monotonic())
