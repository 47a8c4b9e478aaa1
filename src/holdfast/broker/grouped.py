"""A bucket whose writes travel in groups: while some are under way, the next ones gather.

On a server that syncs every write (`sync_interval: always`) a sync costs more than anything else,
and an atomic batch needs one for all of its writes. So a write that finds the way free leaves at
once, alone; those that come meanwhile leave together when another has landed. Nothing waits for
company, and a group is as large as the server is slow. Where syncs cost nothing, batches cost more
than they save: `calibrate` finds out, and without it every write goes alone.

Guaranteed: each write succeeds or fails by its own expected revision, as in a plain `Bucket`. A
batch is all or nothing, so when one is refused or its answer is lost, its writes go again one by
one: what had been applied after all is then refused, and known by its writer's token.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple

from holdfast import errors
from holdfast.broker.batch import Write, store_batch
from holdfast.broker.connection import Broker
from holdfast.broker.kv import Bucket, ttl_text
from holdfast.names import H_KV_OPERATION, H_TTL, kv_subject

log = logging.getLogger("holdfast.broker")

FLIGHTS: Final = 2
LARGEST_GROUP: Final = 200
APART_SECONDS: Final = 2.0
"""How long writes go one by one after a batch was refused: the server may have too many."""
SMALLEST_GROUP: Final = 24
"""A batch has a price of its own, whatever its size."""
TRIALS, TRIAL_WRITES, GAIN = 2, 100, 1.5


class _Waiting(NamedTuple):
    write: Write
    done: asyncio.Future[int]


class GroupedBucket(Bucket):
    """One bucket, with a group commit where that pays."""

    def __init__(self, broker: Broker, name: str) -> None:
        super().__init__(broker, name)
        self.grouping = False
        self._under_way = 0
        self._gathering: list[_Waiting] = []
        self._flights: set[asyncio.Task[None]] = set()
        self._apart_until = 0.0

    async def calibrate(self) -> None:
        """Group from now on if the server takes a batch in much less time than single writes.

        What is written for the trial are markers of deleted keys, which no listing shows, and which
        the server drops after a second.
        """
        apart = together = math.inf
        try:
            for _ in range(TRIALS):
                apart = min(apart, await self._timed(self._each(_trial(self.name))))
                together = min(together, await self._timed(self._batch(_trial(self.name))))
        except errors.BrokerError as error:
            log.debug("no trial of grouped writes: %s", error)
        self.grouping = together * GAIN < apart
        log.debug("%d writes: %.2g s apart, %.2g s together", TRIAL_WRITES, apart, together)

    async def _timed(self, trial: Coroutine[Any, Any, object]) -> float:
        begin = self._broker.clock.monotonic()
        await trial
        return self._broker.clock.monotonic() - begin

    async def put(
        self, key: str, value: bytes, *, expected: int | None, ttl: float | None = None
    ) -> int:
        """Write if the key is still at `expected` (None: in any case); returns the new revision."""
        write = self._write(key, value, expected, ttl)
        if not self.grouping or self._broker.clock.monotonic() < self._apart_until:
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

    def _landed(self) -> None:
        """The next group leaves, if one has gathered."""
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
            for waiting in group:  # only when this task was cancelled
                _tell(waiting.done, errors.OutcomeUnknown("the write was cut off"))
            self._landed()

    async def _together(self, writes: list[Write]) -> list[int | BaseException]:
        if len(writes) >= SMALLEST_GROUP:
            try:
                return await self._batch(writes)
            except errors.Conflict:
                pass  # one of them has lost its race: each finds out by itself
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
    if done.done():  # told already, or its writer was cancelled
        return
    if isinstance(outcome, BaseException):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)


def _trial(bucket: str) -> list[Write]:
    token = secrets.token_hex(4)
    headers = {H_KV_OPERATION: "DEL", H_TTL: ttl_text(1)}
    return [
        Write(kv_subject(bucket, f"trial-{token}-{number}"), b"", headers)
        for number in range(TRIAL_WRITES)
    ]
