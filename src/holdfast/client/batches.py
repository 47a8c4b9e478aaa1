"""Many runs at once: atomic batches, several under way, and what became of each.

They go in order. The first run goes alone: that creates the streams if they are missing. Each batch
has one confirmation, and one sync on a server that syncs. A batch that is refused (one repeated key
refuses all of it) or lost is sent again run by run, with the same message ids.

When a run cannot be stored, nothing more is sent. What is under way is waited for, and
`PartlyStored` says of each run whether it is stored, not sent, or unknown; if nothing was sent at
all, the plain error is raised. The same requests can be sent again without duplicates, since their
ids are made before the first send: by the message id, and beyond its window by the run's record.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from holdfast import errors
from holdfast.broker import Broker, Received
from holdfast.broker.batch import Write, send_batch
from holdfast.broker.wire import read_ack
from holdfast.client.run import Enqueued, Request

if TYPE_CHECKING:
    from holdfast.telemetry import Telemetry

BATCH = 500
"""Runs in one batch: half of what a server accepts."""
BATCHES = 4
"""Batches in flight: enough that neither side waits for a round trip."""
WINDOW = 100
"""Runs in flight when they are sent one by one: hides the round trip."""

log = logging.getLogger("holdfast.client")

Outcome = Enqueued | errors.HoldfastError
NOT_SENT = errors.NotConnected("not sent: an earlier run could not be stored")


class _Flight(NamedTuple):
    """A batch in flight: its answer, or why there will be none."""

    start: int
    requests: Sequence[Request]
    answer: asyncio.Future[Received] | errors.BrokerError | None
    """None: its runs must go one by one."""


class Batches:
    """One `enqueue_many`."""

    def __init__(
        self,
        broker: Broker,
        telemetry: Telemetry,
        enqueue: Callable[[Request], Awaitable[Enqueued]],
        write_of: Callable[[Request], Write],
    ) -> None:
        self._broker = broker
        self._telemetry = telemetry
        self._enqueue = enqueue
        self._write_of = write_of
        self._failed = False

    async def send(self, requests: Sequence[Request]) -> list[Enqueued]:
        """Store them all, or raise an error that says what became of each."""
        outcomes: list[Outcome] = [NOT_SENT] * len(requests)
        flying: deque[_Flight] = deque()

        async def land() -> None:
            flight = flying.popleft()
            landed = await self._land(flight)
            outcomes[flight.start : flight.start + len(landed)] = landed

        if requests:
            outcomes[0] = await self._one(requests[0])
        for start in range(1, len(requests), BATCH):
            if len(flying) >= BATCHES:
                await land()
            if self._failed:
                break
            flying.append(await self._depart(start, requests[start : start + BATCH]))
        while flying:
            await land()
        return _all_stored(requests, outcomes)

    async def _one(self, request: Request) -> Outcome:
        try:
            return await self._enqueue(request)
        except (errors.BrokerError, errors.NoWorker, errors.DuplicateRun) as error:
            self._failed = True
            return error

    async def _depart(self, start: int, chunk: Sequence[Request]) -> _Flight:
        if any(r.delayed or r.spec.fallback != "wait" or r.on_duplicate != "return" for r in chunk):
            return _Flight(start, chunk, None)
        writes = [self._write_of(request) for request in chunk]
        try:
            return _Flight(start, chunk, await send_batch(self._broker, writes))
        except errors.BrokerError as error:
            return _Flight(start, chunk, error)

    async def _land(self, flight: _Flight) -> list[Outcome]:
        before: errors.BrokerError = NOT_SENT
        try:
            if isinstance(flight.answer, errors.BrokerError):
                raise flight.answer
            if flight.answer is not None:
                return self._confirmed(flight.requests, (await read_ack(flight.answer)).seq)
        except errors.BrokerError as error:
            log.debug("a batch was refused or lost, its runs go one by one: %s", error)
            before = error if isinstance(error, errors.OutcomeUnknown) else NOT_SENT
        if self._failed:
            return [before] * len(flight.requests)
        gate = asyncio.Semaphore(WINDOW)

        async def one(request: Request) -> Outcome:
            async with gate:
                if self._failed:
                    return before
                return _together(before, await self._one(request))

        return await asyncio.gather(*(one(request) for request in flight.requests))

    def _confirmed(self, chunk: Sequence[Request], last: int) -> list[Outcome]:
        for (group, job), count in Counter((r.group, r.spec.name) for r in chunk).items():
            self._telemetry.enqueued.labels(group, job).inc(count)
        first = last - len(chunk) + 1
        return [Enqueued(r.run, seq, duplicate=False) for seq, r in enumerate(chunk, first)]


def _together(before: errors.BrokerError, after: Outcome) -> Outcome:
    """The outcome of a run that was sent twice: the first send may have arrived."""
    unknown = isinstance(before, errors.OutcomeUnknown)
    return before if unknown and isinstance(after, errors.HoldfastError) else after


def _all_stored(requests: Sequence[Request], outcomes: Sequence[Outcome]) -> list[Enqueued]:
    stored = [outcome for outcome in outcomes if isinstance(outcome, Enqueued)]
    if len(stored) == len(outcomes):
        return stored
    failures = [o for o in outcomes if isinstance(o, errors.HoldfastError) and o is not NOT_SENT]
    words = tuple(_word(outcome) for outcome in outcomes)
    if stored or "unknown" in words:
        raise errors.PartlyStored(tuple(requests), words, failures[0]) from failures[0]
    failures[0].requests = tuple(requests)
    raise failures[0]


def _word(outcome: Outcome) -> errors.SendOutcome:
    if isinstance(outcome, Enqueued):
        return "stored"
    return "unknown" if isinstance(outcome, errors.OutcomeUnknown) else "not sent"
