"""Indexes the history of ended runs, and adds it up by minute and hour; samples the lag.

One coordinator at a time does this, without being elected: each step ends with a compare-and-swap
of the head, which says how far the history was read and has the totals of the current minute and
hour. A coordinator that loses a write stands by, and takes over if the head stops changing.

Jobs without records have no lines; what their workers counted is added in the same way.

Guaranteed: each line is counted once, because the totals move together with the position up to
which they count. The index is complete up to its newest block. After a crash a block, or the record
of a minute, may be written twice, with the same content. A line that is in the history twice is
counted twice; for that, a worker has to die at one certain point and an answer has to be lost too.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from holdfast.broker import Broker, Received
from holdfast.broker.kv import direct_page, parse_time, ttl_text
from holdfast.durations import HOUR, MINUTE
from holdfast.errors import Conflict
from holdfast.model import history, totals
from holdfast.model.totals import Head, JobTotals, Totals
from holdfast.names import H_EXPECTED, H_ROLLUP, H_RUN, H_SEQUENCE, H_TTL
from holdfast.ownership.history import read_head, stored_since
from holdfast.status.figures import JobLag

log = logging.getLogger("holdfast.coordinator")

STEP_SECONDS: Final = 2.0
"""How often to index new lines; until then, readers read them one by one."""
STANDBY_SECONDS: Final = 30.0
"""How long after another coordinator's last step this one takes over: three missed samples."""
BLOCK_LINES: Final = 4_096
"""Lines in a block of the index. Lines that are not indexed yet are read one by one, which takes
milliseconds."""
MINUTES_SECONDS: Final = 26 * HOUR
"""How long minutes are kept: charts of a day are drawn from them, longer ones from hours."""
MOST_JOBS: Final = 2_000
"""Jobs in the totals of one period; the rest are counted together. The head must fit a message."""
OTHERS: Final = "* *"
SAMPLE_SECONDS: Final = 10.0
"""How often the lag of each job is looked up: six times in each minute of a chart."""

Lags = Callable[[], Awaitable[Sequence[JobLag]]]
"""Reads the lag of every job."""


def stored_at(message: Received) -> float:
    """When the server stored a message."""
    return parse_time(message.headers["Nats-Time-Stamp"])


class Indexer:
    """Indexes and counts new lines of one namespace's history."""

    def __init__(self, broker: Broker, node: str, lags: Lags | None = None) -> None:
        self._broker = broker
        self._lags = lags
        self._sampled = -SAMPLE_SECONDS
        self._names = broker.names
        self._node = node
        self._head = Head()
        self._revision = -1
        """The revision of the head that we wrote last; -1 if somebody else may have written it
        since."""
        self._next = 1
        self._entries: list[tuple[int, int]] = []
        """Checksums and sequences of lines that are read but not indexed."""
        self._counts: deque[Received] = deque()
        """What workers counted and is not in the totals yet."""

    async def step(self) -> None:
        """Read what is new, if no other coordinator does."""
        head, revision = await read_head(self._broker)
        if revision != self._revision:
            recent = self._broker.server_now() - head.at < STANDBY_SECONDS
            if recent and head.by not in ("", self._node):
                return
            self._head, self._next, self._entries = head, head.indexed + 1, []
        self._revision = -1  # new lines count only once the head is written
        try:
            revision = await self._read(revision)
        except Conflict:
            return
        self._revision = revision

    async def _read(self, revision: int) -> int:
        added = self._head.added
        self._counts = deque([message async for message in self._new_counts()])
        subject, more = self._names.ended("*", "*", "*"), True
        while more:
            page = await direct_page(self._broker, self._names.history, subject, self._next)
            more = page.more
            for message in page.messages:
                await self._take(message)
                if len(self._entries) >= BLOCK_LINES:
                    await self._write_blocks()
            if page.messages:
                self._next = page.last + 1
                revision = await self._write_head(revision)
        await self._add_counts(math.inf)
        if await self._sample() or self._head.added != added:
            revision = await self._write_head(revision)
        return revision

    async def _sample(self) -> bool:
        """Add the lag of each job to the current minute, if it is time for that."""
        now = self._broker.clock.monotonic()
        if self._lags is None or now - self._sampled < SAMPLE_SECONDS:
            return False
        self._sampled = now
        found = [one for one in await self._lags() if one.waiting or one.in_flight]
        await self._turn(int(self._broker.server_now()) // MINUTE * MINUTE)
        self._head.minute.sampled += 1  # idle is not the same as not counted
        for one in found:
            job = self._totals(f"{one.group} {one.job}")
            job.waiting = max(job.waiting, one.waiting)
            job.in_flight = max(job.in_flight, one.in_flight)
        return True

    def _totals(self, job: str) -> JobTotals:
        """The totals of a job in the current minute."""
        jobs = self._head.minute.jobs
        return self._head.minute.of(job if job in jobs or len(jobs) < MOST_JOBS else OTHERS)

    def _new_counts(self) -> AsyncIterator[Received]:
        stream, subject = self._names.history_index, self._names.indexed("counts")
        return stored_since(self._broker, stream, subject, 0.0, self._head.added)

    async def _add_counts(self, until: float) -> None:
        """Add what workers had counted by an instant."""
        while self._counts and (at := stored_at(self._counts[0])) <= until:
            message = self._counts.popleft()
            await self._turn(int(at) // MINUTE * MINUTE)
            read, place = self._broker.unreadable.read, message.headers[H_SEQUENCE]
            if found := read(totals.TOTALS.decode, self._names.history_index, place, message.body):
                for job, counted in found.jobs.items():
                    self._totals(job).merge(counted)
            self._head.added = int(place)

    async def _take(self, message: Received) -> None:
        sequence = int(message.headers[H_SEQUENCE])
        for run in message.headers.get(H_RUN, "").split(history.SEPARATOR):
            self._entries += [(totals.checksum(n), sequence) for n in totals.names_of(run)]
        if sequence <= self._head.counted:
            return  # whoever wrote the head has counted it; only its index is missing
        at = stored_at(message)
        await self._add_counts(at)
        await self._turn(int(at) // MINUTE * MINUTE)
        read, place = self._broker.unreadable.read, message.headers[H_SEQUENCE]
        for line in message.body.split(b"\n"):
            if found := read(totals.LINE.decode, self._names.history, place, line):
                job = f"{found.record.group} {found.record.job}"
                totals.count(self._totals(job), found.record)
        self._head.counted = sequence

    async def _turn(self, minute: int) -> None:
        """Write the totals of a minute that is over, and of an hour."""
        over = self._head.minute
        if over.at >= minute:
            return  # a line that was stored before the lag of its successor was sampled
        if over.jobs or over.sampled:
            await self._store("minute", over, {H_TTL: ttl_text(MINUTES_SECONDS)})
            hour = over.at // HOUR * HOUR
            if self._head.hour.at != hour:
                if self._head.hour.jobs or self._head.hour.sampled:
                    await self._store("hour", self._head.hour)
                self._head.hour = Totals(hour)
            self._head.hour.merge(over)
        self._head.minute = Totals(minute)

    async def _store(self, kind: str, found: Totals, headers: dict[str, str] | None = None) -> None:
        found.every = totals.added(found.jobs.values())
        await self._broker.store(self._names.indexed(kind), totals.TOTALS.encode(found), headers)

    async def _write_blocks(self) -> None:
        """Index what was read; every part is written, so that a reader sees how far each goes."""
        first, last = self._head.indexed + 1, self._entries[-1][1]
        first = max(first, self._entries[0][1])
        parts = totals.blocks(self._entries, first, last)
        store, names = self._broker.store, self._names
        await asyncio.gather(*(store(names.indexed(part), body) for part, body in parts.items()))
        self._head.indexed, self._entries = last, []

    async def _write_head(self, revision: int) -> int:
        self._head.by, self._head.at = self._node, self._broker.server_now()
        headers = {H_EXPECTED: str(revision), H_ROLLUP: "sub"}
        body = totals.HEAD.encode(self._head)
        return (await self._broker.store(self._names.indexed("head"), body, headers)).seq
