"""Removing runs that have not started: without losing one that has, or leaving a record behind.

Deliveries are paused first, so that "not handed to anybody" stays true while messages are removed.
A run that has been tried before has a record that waits with it: it is cancelled by
compare-and-swap before its message goes, so that a crash in between leaves a message that the next
worker drops, and never a record that waits for ever.

Only messages that were there at the start are removed. A key that was just purged is still known
as a repeat until the server's window of message ids is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from holdfast.client import Client
from holdfast.clock import rfc3339
from holdfast.errors import Conflict, NotFound
from holdfast.model import run as runs
from holdfast.names import consumer
from holdfast.status.finding import Finder
from holdfast.status.messages import delete, oldest

PAUSE_SECONDS: Final = 600.0
_CHUNK: Final = 100


class Purger:
    """Removes waiting and parked runs of one job at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._broker = client.broker
        self._names = client.broker.names
        self._finder = Finder(client)

    async def waiting(self, group: str, job: str) -> int:
        """Remove what waits in a job's queue; returns how many."""
        subject = self._names.job(group, job)
        async with self._paused(group, job) as info:
            start = int(info["delivered"]["stream_seq"]) + 1 if info else 1
            alone = info is None or not info.get("num_ack_pending")
            return await self._remove(subject, start, whole=alone)

    async def parked(self, group: str, job: str) -> int:
        """Remove what is put off until later; returns how many."""
        return await self._remove(self._names.later(group, job, "*", "*"), 1, whole=True)

    async def _remove(self, subject: str, start: int, *, whole: bool) -> int:
        """Cancel the records and remove the messages, at once when all of the subject goes."""
        sequences: list[int] = []
        tried: list[str] = []
        async for kept in oldest(self._broker, self._names.jobs, subject, start):
            sequences.append(kept.sequence)
            tried.append(kept.run)
        for n in range(0, len(tried), _CHUNK):
            await asyncio.gather(*(self._cancel_record(r) for r in tried[n : n + _CHUNK]))
        if not sequences:
            return 0
        if whole:
            request = {"filter": subject, "seq": sequences[-1] + 1}
            answer = await self._broker.api(f"STREAM.PURGE.{self._names.jobs}", request)
            return int(answer.get("purged", 0))
        count = 0
        for n in range(0, len(sequences), _CHUNK):
            count += sum(await asyncio.gather(*map(self._delete, sequences[n : n + _CHUNK])))
        return count

    async def _delete(self, sequence: int) -> bool:
        return await delete(self._broker, self._names.jobs, sequence)

    async def _cancel_record(self, run: str) -> None:
        """A waiting run's record ends with its message; any other record is not our business."""
        record, revision = await self._finder.record(run)
        if record is None or record.state != "failed":
            return
        now = self._broker.server_now()
        ended = runs.ended(record, "cancelled", error="purged", token=f"purge.{run}", now=now)
        records = self._client.records
        ttl = records.keyed_ttl_seconds if record.keyed else records.keyless_ttl_seconds
        try:
            await self._client.runs.put(run, runs.encode(ended), expected=revision, ttl=ttl)
        except Conflict:
            return  # it has just moved on

    @asynccontextmanager
    async def _paused(self, group: str, job: str) -> AsyncIterator[dict[str, Any] | None]:
        """The queue's consumer, as it stands while the server delivers nothing.

        The pause ends by itself, so that a purge that dies stops the job for a while only.
        """
        topology, stream, name = self._client.topology, self._names.jobs, consumer(group, job)
        try:
            info = await self._broker.api(f"CONSUMER.INFO.{stream}.{name}")
        except NotFound:
            yield None
            return
        if info.get("paused"):
            yield info
            return
        until = rfc3339(self._broker.server_now() + PAUSE_SECONDS)
        await topology.pause(stream, name, until=until)
        try:
            yield await self._broker.api(f"CONSUMER.INFO.{stream}.{name}")
        finally:
            await topology.resume(stream, name)
