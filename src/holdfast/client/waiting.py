"""Waiting for runs to end, however many at once.

The server republishes every write of a run's record, so a waiter is woken when its run ends. The
first few waiters subscribe to their own run; more share one subscription to the records of all
runs: 50,000 waiters cost the server no more than one.

A notice can be lost, so each waiter also reads the record from time to time; the more of them wait,
the less often, and never more than a few read at once. Guaranteed: `wait` returns the record of a
run that has ended, from the history if it has expired, and raises `RunNotFound` if the run is
neither queued nor recorded: at once if it is known where its message was stored, otherwise after
some reads and a search.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from holdfast import errors
from holdfast.broker import Broker
from holdfast.model import run as runs
from holdfast.model.run import RunRecord

OWN_MOST: Final = 16
"""Waiters with their own subscription: a shared one receives the records of all runs, which is too
much for one result of a busy namespace."""
LOOK_AGAIN_SECONDS: Final = 2.0
"""How often a single waiter reads the record, in case a notice was lost."""
LOOKS_A_SECOND: Final = 500
"""Reads a second of all waiters together: a small part of what a server can answer."""
READS_MOST: Final = 100
"""Reads in flight at once: enough to keep the server busy, too few to fill its buffers."""
SEARCH_AFTER: Final = 8
"""Reads without a record before the first search for the message of a run, if its place is not
known: a search may read a whole queue. Each later search comes after twice as many reads, at most
`SEARCH_MOST`."""
SEARCH_MOST: Final = 64  # two minutes for a single waiter

_AWAY = (errors.NotConnected, errors.Unavailable, errors.OutcomeUnknown, errors.NotFound)
"""NotFound means the bucket itself is missing: it is created again."""


def is_search_due(looks: int) -> bool:
    """Whether to search for a run after this many reads without a record."""
    if looks >= SEARCH_MOST:
        return looks % SEARCH_MOST == 0
    return looks >= SEARCH_AFTER and looks & (looks - 1) == 0  # 8, 16, 32


class Notice(asyncio.Event):
    """Set when a run has ended, or its record has to be read."""

    record: RunRecord | None = None
    """The record with which it ended; None if it has to be read."""


class Waiting:
    """The waiters of one client."""

    def __init__(
        self,
        broker: Broker,
        bucket: str,
        read: Callable[[str], Awaitable[RunRecord | None]],
        recall: Callable[[str], Awaitable[RunRecord | None]],
        stored: Callable[[int], Awaitable[bool]],
        carried: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._broker = broker
        self._prefix = broker.names.changed(bucket, "")
        self._read = read
        self._recall = recall
        self._stored = stored
        self._carried = carried
        self._notices: dict[str, set[Notice]] = {}
        self._shared: asyncio.Future[Any] | None = None
        self._sharing = 0
        self._count = 0
        self._reads = asyncio.Semaphore(READS_MOST)
        self._searching = asyncio.Semaphore(1)

    async def wait(self, run: str, sequence: int, timeout: float | None) -> RunRecord:
        """A run's record once it has ended; `TimeoutError` if it has not in time."""
        async with asyncio.timeout(timeout), self._noticed(run) as notice:
            looks = 0
            while True:
                record = await self._look(run, sequence, notice, looks)
                if record is not None:
                    return record
                looks += 1
                with contextlib.suppress(TimeoutError):
                    pause = max(LOOK_AGAIN_SECONDS, self._count / LOOKS_A_SECOND)
                    async with asyncio.timeout(pause):
                        await notice.wait()

    async def _look(self, run: str, sequence: int, notice: Notice, looks: int) -> RunRecord | None:
        record, notice.record = notice.record, None
        notice.clear()
        if record is not None and not record.vacant:
            return record
        try:
            async with self._reads:
                record_now = await self._read(run)
                if record_now is None and sequence and looks:
                    return await self.left(run, sequence)
                if record_now is not None and record_now.terminal:
                    # A vacant record belongs to an earlier run as long as this one is still queued.
                    queued = record_now.vacant and sequence and await self._stored(sequence)
                    return None if queued else record_now
            if record_now is None and not sequence and is_search_due(looks):
                async with self._searching:
                    return await self.left(run, sequence)
            return None
        except _AWAY:
            await self._broker.clock.sleep(0.2)
            return None

    async def left(self, run: str, sequence: int) -> RunRecord | None:
        """The final record of a run whose record has expired, from the history; None while it is
        queued."""
        for _ in range(2):  # a message that moves from its queue into a line may be missed once
            if (sequence and await self._stored(sequence)) or await self._carried(run):
                return None
            if await self._read(run) is not None:
                return None
        if ended := await self._recall(run):
            return ended
        raise errors.RunNotFound(
            f"run {run} is neither queued nor recorded: it was purged, it ended longer ago than "
            "the history goes back, or its job keeps no records",
            run=run,
        )

    # ---- notices

    @contextlib.asynccontextmanager
    async def _noticed(self, run: str) -> AsyncIterator[Notice]:
        notice = Notice()
        self._notices.setdefault(run, set()).add(notice)
        self._count += 1
        own = self._count <= OWN_MOST
        subscription: Any = None
        try:
            if own:
                subscription = await self._broker.listen(self._prefix + run, self._notify)
            else:
                await self._share()
            yield notice
        finally:
            self._count -= 1
            self._notices[run].discard(notice)
            if not self._notices[run]:
                del self._notices[run]
            if subscription is not None:
                await self._broker.unsubscribe(subscription)
            elif not own:
                await self._leave()

    async def _share(self) -> None:
        self._sharing += 1
        if self._shared is None:
            self._shared = asyncio.ensure_future(
                self._broker.listen(self._prefix + ">", self._notify)
            )
        await asyncio.shield(self._shared)

    async def _leave(self) -> None:
        self._sharing -= 1
        if self._sharing == 0 and self._shared is not None:
            shared, self._shared = self._shared, None
            with contextlib.suppress(errors.BrokerError):
                await self._broker.unsubscribe(await shared)

    def _notify(self, subject: bytes, _: bytes, body: bytes, headers: bytes | None) -> None:
        notices = self._notices.get(subject.decode().removeprefix(self._prefix))
        if notices is None:
            return  # of a run that nobody waits for
        try:
            record = runs.decode(body)
        except errors.Unreadable:
            record = None  # or it was deleted: a read tells
        if record is not None and not record.terminal:
            return
        for notice in notices:
            notice.record = record
            notice.set()
