"""A bucket with group commit: while some writes are in flight, the next ones are collected.

On a server that syncs every write (`sync_interval: always`) a sync costs more than anything else,
and an atomic batch needs one for all of its writes. So a write is sent at once if few are in
flight; those that arrive meanwhile are sent together when one is confirmed. No write waits only to
form a group, and the slower the server, the larger the groups. Where syncs cost nothing, batches
cost more than they save. The server does not say which applies, so the bucket compares the speed of
its writes both ways, while enough of them are in flight for a group.

Guaranteed: each write succeeds or fails by its own expected revision, as in a plain `Bucket`. A
batch is all or nothing, so when one is refused or its answer is lost, its writes are repeated one
by one: what had been applied after all is then refused, and recognised by its writer's token.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, NamedTuple

from holdfast import errors
from holdfast.broker.batch import Write, store_batch
from holdfast.broker.connection import Broker
from holdfast.broker.kv import Bucket, write_head

log = logging.getLogger("holdfast.broker")

FLIGHTS: Final = 2
"""One is in transit while the next is stored."""
LARGEST_GROUP: Final = 200
"""Well below the 1,000 messages that a server accepts in a batch."""
APART_SECONDS: Final = 2.0
"""How long writes go one by one after a failed batch: the server may have too many open."""
SMALLEST_GROUP: Final = 24
"""A batch costs about as much as twenty single writes, whatever its size (ADR 0017)."""
MEASURED_WRITES: Final = 100
"""Writes in one measurement: a tenth of a second on a server that syncs each of them."""
GAIN: Final = 1.5
"""How much faster groups must be: a smaller difference may be noise."""
COMPARE_SECONDS: Final = 60.0
"""How often the other way is tried again: an election may have distorted the first comparison."""


class _Waiting(NamedTuple):
    write: Write
    done: asyncio.Future[int]


class GroupedBucket(Bucket):
    """One bucket, with group commit where that pays."""

    def __init__(self, broker: Broker, name: str, *, grouping: bool | None = None) -> None:
        """`grouping`: whether to group; None measures which is faster."""
        super().__init__(broker, name)
        self.grouping = bool(grouping)
        self._adapts = grouping is None
        self._pace: dict[bool, float] = {}
        """Seconds per write, grouped and not."""
        self._in_progress = 0
        self._counted = 0
        self._counted_since = 0.0
        self._counted_seconds = 0.0
        self._compare_at = 0.0
        self._under_way = 0
        self._gathering: list[_Waiting] = []
        self._flights: set[asyncio.Task[None]] = set()
        self._apart_until = 0.0

    def put(
        self, key: str, value: bytes, *, expected: int | None, ttl: float | None = None
    ) -> asyncio.Future[int]:
        """Write if the key is still at `expected` (None: in any case); gives the new revision."""
        if self.grouping:
            sending = self._send(self._write(key, value, expected, ttl))
            written: asyncio.Future[int] = asyncio.create_task(sending, name="holdfast-write")
            written.add_done_callback(self._over)
        else:
            head = write_head(expected, ttl)
            written = self._broker.put(self._prefix + key, value, head, self._over)
        self._in_progress += 1
        if self._in_progress == SMALLEST_GROUP:
            self._counted_since = self._broker.clock.monotonic()
        return written

    def _over(self, _: object) -> None:
        """A write has ended."""
        if self._in_progress >= SMALLEST_GROUP:
            self._count()
        self._in_progress -= 1

    async def _send(self, write: Write) -> int:
        if self._broker.clock.monotonic() < self._apart_until:
            return await self._alone(write)
        if self._under_way >= FLIGHTS:
            done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._gathering.append(_Waiting(write, done))
            return await done
        self._under_way += 1
        try:
            return await self._alone(write)
        finally:
            self._landed()

    def _count(self) -> None:
        """Measure the speed while there are enough writes for a group."""
        self._counted += 1
        last = self._in_progress == SMALLEST_GROUP
        if not last and self._counted < MEASURED_WRITES:
            return
        now = self._broker.clock.monotonic()
        self._counted_seconds += now - self._counted_since
        self._counted_since = now
        if self._counted >= MEASURED_WRITES:
            self._pace[self.grouping] = self._counted_seconds / self._counted
            self._counted, self._counted_seconds = 0, 0.0
            if self._adapts:
                self._choose(now)

    def _choose(self, now: float) -> None:
        if now >= self._compare_at:
            self._compare_at = now + COMPARE_SECONDS
            self._pace.pop(not self.grouping, None)
        if len(self._pace) < 2:
            self.grouping = not self.grouping  # not measured yet
            return
        together, apart = self._pace[True], self._pace[False]
        self.grouping = together * GAIN < apart
        log.debug("a write takes %.2g s in a group, %.2g s alone", together, apart)

    def _landed(self) -> None:
        """Send the next group, if one has gathered."""
        group = self._gathering[:LARGEST_GROUP]
        if not group:
            self._under_way -= 1
            return
        del self._gathering[:LARGEST_GROUP]
        task = asyncio.create_task(self._fly(group), name="holdfast-group")
        self._flights.add(task)
        task.add_done_callback(self._flights.discard)

    async def _fly(self, group: list[_Waiting]) -> None:
        try:
            revisions = await self._together([waiting.write for waiting in group])
            for waiting, revision in zip(group, revisions, strict=True):
                _tell(waiting.done, revision)
        finally:
            for waiting in group:  # only if this task was cancelled
                _tell(waiting.done, errors.OutcomeUnknown("the write was cut off"))
            self._landed()

    async def _together(self, writes: list[Write]) -> list[int | BaseException]:
        if len(writes) >= SMALLEST_GROUP:
            try:
                return await self._batch(writes)
            except errors.Conflict:
                pass  # one of them lost its race: each finds out on its own
            except errors.BrokerError:
                self._apart_until = self._broker.clock.monotonic() + APART_SECONDS
        return await self._each(writes)

    async def _batch(self, writes: list[Write]) -> list[int | BaseException]:
        last = (await store_batch(self._broker, writes)).seq
        return list(range(last - len(writes) + 1, last + 1))

    async def _each(self, writes: list[Write]) -> list[int | BaseException]:
        return await asyncio.gather(*map(self._alone, writes), return_exceptions=True)

    async def _alone(self, write: Write) -> int:
        return (await self._broker.store(*write)).seq


def _tell(done: asyncio.Future[int], outcome: int | BaseException) -> None:
    if done.done():  # set already, or its writer was cancelled
        return
    if isinstance(outcome, BaseException):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)
