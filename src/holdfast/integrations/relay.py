"""The relay of an outbox: moves runs from a table of your database to NATS.

An outbox row is written in the transaction that needs the run, so the run exists if, and only if,
that transaction commits. A relay takes rows in the order of their ids, sends them, and deletes them
in the transaction that read them. Any number of relays may run: the rows that one has read are
locked until it commits; the others wait, and take over when it ends.

Guaranteed: each row becomes one run. A relay that dies between sending and deleting leaves rows
that the next one sends again under the same run ids; the server and the run's record detect that
for as long as keys are remembered (24 hours by default). A job with `delivery="at_least_once"` has
no record, so there it may run again.

Rows with the same order key are stored in the queue in the order in which they were written: only
one row of each key is in flight at a time. Rows of concurrent transactions have no order.

A row that the server refuses stays in the table with the reason in its column `error`, and does not
delay the others: one that is too large or damaged, or for a group that the relay's login may not
send to. Later rows of its order key are sent.

While NATS or the database is away a relay waits. Any other error ends `run`, and so the process;
a relay that was started inside a worker logs it and tries again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from holdfast.app import Holdfast
from holdfast.client import Request
from holdfast.clock import SystemClock
from holdfast.errors import (
    BrokerError,
    InvalidInput,
    PartlyStored,
    PermissionDenied,
    Unreadable,
)
from holdfast.job import Sendable
from holdfast.model.codec import Codec, GivenName, Headers, Instant, Name, RunId
from holdfast.model.job import JobSpec
from holdfast.names import keyed_run
from holdfast.retrying import repeating

log = logging.getLogger("holdfast.outbox")

BATCH: Final = 500
"""Rows sent in one transaction: as many as fit one batch of messages."""
POLL_SECONDS: Final = 0.2
"""How often an empty table is read: a run waits half of that on average, and the query is an index
look-up."""
STUCK_SECONDS: Final = 30
"""How long a silent relay keeps its rows locked on Postgres: longer than the election of a stream's
leader, after which sending continues."""
AFTER_ERROR_SECONDS: Final = 10
"""The pause after an unexpected error inside a worker: short enough to notice soon that the cause
is gone, long enough not to fill the log with tracebacks."""


class OutboxEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run in the table."""

    job: GivenName
    group: GivenName
    run: RunId
    body: bytes
    at: Instant = 0.0
    """When it is due; 0 for at once."""
    headers: Headers = {}
    cause: RunId = ""
    queue: Name = ""
    """The priority queue, for a run with a priority of its own."""


REFUSED: Final = (InvalidInput, PermissionDenied)
"""Errors that would repeat however often the row is sent."""
ENTRY: Final = Codec[OutboxEntry](OutboxEntry, "an outbox row")


class WaitingRow(NamedTuple):
    """A row and its key."""

    id: int
    order_key: str | None
    entry: bytes


class Batch(Protocol):
    """Rows that are locked until their transaction ends."""

    rows: Sequence[WaitingRow]

    async def sent(self, ids: Sequence[int]) -> None:
        """Delete rows."""
        ...

    async def refused(self, row: int, why: str) -> None:
        """Keep a row, with the reason why it cannot be sent."""
        ...


class Table(Protocol):
    """The outbox of one database; raises `TryAgain` while the database does not answer."""

    def batch(self, most: int) -> AbstractAsyncContextManager[Batch]:
        """Lock the oldest rows; commit at the end of the block, or roll back on an error."""
        ...


def entry_of(job: Sendable[..., Any], args: Any, kwargs: Any) -> OutboxEntry:
    """The row of a run; its id is made here, so that sending it twice is one run.

    Options that need an answer while sending are left out: a job's `fallback`, since the
    transaction has ended by then, and `on_duplicate`, which would mistake a row that is sent twice
    for two runs.
    """
    request = job.request(*args, **kwargs)
    if request.on_duplicate != "return":
        raise InvalidInput(
            f"on_duplicate={request.on_duplicate!r} cannot be used with an outbox, which may send "
            "a row twice: leave it out, and the later run with the same key is dropped"
        )
    group, name = request.group, request.spec.name
    run = request.run if request.keyed else keyed_run(group, name, f"outbox-{request.run}")
    due = request.at or (time.time() + request.delay_seconds if request.delay_seconds else 0.0)
    return OutboxEntry(
        name, group, run, request.body, due, request.headers, request.cause, request.queue
    )


def _request(entry: OutboxEntry) -> Request:
    return Request(
        JobSpec(entry.job, entry.group),
        entry.group,
        entry.run,
        entry.body,
        keyed=True,
        at=entry.at or None,
        headers=entry.headers,
        cause=entry.cause,
        queue=entry.queue,
    )


def turns(rows: Iterable[WaitingRow]) -> Iterator[list[WaitingRow]]:
    """The rows in portions that hold at most one of each order key."""
    portions: list[list[WaitingRow]] = []
    before: Counter[str] = Counter()
    for row in rows:
        turn = before[row.order_key] if row.order_key else 0
        if row.order_key:
            before[row.order_key] += 1
        if turn >= len(portions):
            portions.append([])
        portions[turn].append(row)
    yield from portions


class Relay:
    """Sends the rows of an outbox until it is stopped.

    Run it as a separate process (`holdfast relay shop.db:relay`), or inside the workers:
    `app.on_startup(relay.start)` and `app.on_shutdown(relay.aclose)`.
    """

    def __init__(self, app: Holdfast, table: Table, *, batch: int = BATCH) -> None:
        if batch < 1:
            raise InvalidInput("batch must be 1 or more")
        self.app = app
        self._table = table
        self._batch = batch
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Send in the background, whatever fails."""
        if self._task is None:
            self._task = asyncio.create_task(self._send_surely(), name="holdfast-outbox")

    async def aclose(self) -> None:
        """Stop sending; rows that were not sent stay."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def stop(self) -> None:
        """End `run`."""
        self._stopped.set()

    async def run(self) -> None:
        """Send until `stop` is called or the task is cancelled; raises errors other than
        outages."""
        sending = asyncio.create_task(self._send_forever(), name="holdfast-outbox")
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            stopping.cancel()
            await asyncio.gather(sending, stopping, return_exceptions=True)
            await self.app.close()

    async def _send_surely(self) -> None:
        while True:
            try:
                await self._send_forever()
            except Exception:  # nobody waits for this task
                log.exception("the outbox's relay failed; retrying in %d s", AFTER_ERROR_SECONDS)
                await asyncio.sleep(AFTER_ERROR_SECONDS)

    async def _send_forever(self) -> None:
        await repeating(
            self.send_all,
            clock=SystemClock(),
            every=POLL_SECONDS,
            what="sending from the outbox",
            at_once=True,
        )

    async def send_all(self) -> int:
        """Send what is in the table now; returns the number of runs sent."""
        total = 0
        while True:
            moved, full = await self._send_batch()
            total += moved
            if not full:
                return total

    async def _send_batch(self) -> tuple[int, bool]:
        failure: BrokerError | None = None
        moved = 0
        async with self._table.batch(self._batch) as batch:
            for turn in turns(batch.rows):
                try:
                    sent = await self._send(turn, batch)
                except PartlyStored as error:
                    stored = {r.run for r in error.requests} - {r.run for r in error.unstored}
                    sent = [row for row in turn if _run_of(row) in stored]
                    failure = error
                except BrokerError as error:
                    sent, failure = [], error
                if sent:
                    await batch.sent([row.id for row in sent])
                moved += len(sent)
                if failure:  # a later row of the same key must not overtake an unsent one
                    break
            full = len(batch.rows) >= self._batch
        if failure:
            raise failure
        return moved, full

    async def _send(self, rows: Sequence[WaitingRow], batch: Batch) -> Sequence[WaitingRow]:
        """Send rows; returns those that are stored. Those that are refused for good are missing."""
        requests: dict[int, Request] = {}
        for row in rows:
            try:
                requests[row.id] = _request(ENTRY.decode(row.entry))
            except Unreadable as error:
                await self._refuse(batch, row, error)
        if await self._some_refused(
            requests.values()
        ):  # send them one by one to find the refused ones; stored ones are recognised
            for row in rows:
                if row.id not in requests:
                    continue
                try:
                    await self.app.enqueue_many([requests[row.id]])
                except REFUSED as error:
                    await self._refuse(batch, row, error)
                    del requests[row.id]
        return [row for row in rows if row.id in requests]

    async def _some_refused(self, requests: Iterable[Request]) -> bool:
        try:
            await self.app.enqueue_many(requests)
        except REFUSED:
            return True
        except PartlyStored as error:
            if not isinstance(error.__cause__, REFUSED):
                raise
            return True
        return False

    async def _refuse(self, batch: Batch, row: WaitingRow, error: Exception) -> None:
        log.error(
            "outbox row %d is refused and stays in the table; set its column `error` to NULL to "
            "have it sent again: %s",
            row.id,
            error,
        )
        await batch.refused(row.id, str(error))


def _run_of(row: WaitingRow) -> str:
    return ENTRY.decode(row.entry).run
