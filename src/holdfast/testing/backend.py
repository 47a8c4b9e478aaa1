"""The memory app's client and outbox."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from holdfast.app import Holdfast
from holdfast.broker import Stored
from holdfast.broker.kv import Entry
from holdfast.broker.wire import ENVELOPE_BYTES, header_bytes
from holdfast.client import Enqueued, Request
from holdfast.client.bucket import Data
from holdfast.config import RecordConfig
from holdfast.errors import Conflict, PayloadTooLarge
from holdfast.model import run as runs
from holdfast.model.job import JobSpec
from holdfast.model.message import RunMessage, first_message
from holdfast.model.run import RunRecord
from holdfast.names import H_CAUSE, H_ERROR, H_MSG_ID, H_REASON, H_RUN, H_TRACEBACK, Names
from holdfast.ownership.store import MemoryStore
from holdfast.server.node import MAX_PAYLOAD
from holdfast.testing.clock import FakeClock
from holdfast.testing.queue import Headers, MemoryQueue, Scheduled
from holdfast.worker.attempt import Held, Interrupt
from holdfast.worker.settling import Letter


@dataclass(frozen=True)
class DeadLetter:
    """A run that was given up."""

    run: str
    group: str
    job: str
    reason: str
    """`failed`, `timeout`, `invalid`, `crashed` or `lost`."""
    error: str
    traceback: str
    body: bytes
    headers: Headers

    @property
    def payload(self) -> Any:
        """The body as JSON."""
        return msgspec.json.decode(self.body)


@dataclass(frozen=True)
class PublishedEvent:
    """An event as it was published."""

    event: str
    data: Any
    id: str
    cause: str
    """The run that published it; empty when it came from outside a run."""


class MemoryOutbox:
    """What executions send (`worker.settling.Outbox`), kept to look at."""

    largest_result = MAX_PAYLOAD // 4

    def __init__(self, app: Holdfast, queue: MemoryQueue, names: Names) -> None:
        self.dead: list[DeadLetter] = []
        self.events: list[PublishedEvent] = []
        self.objects: dict[str, bytes] = {}
        self._app = app
        self._queue = queue
        self.names = names

    async def park(self, spec: JobSpec, message: RunMessage, subject: str, due: float) -> None:
        waiting = Scheduled(spec.group, spec.name, message.body, message.headers, due)
        self._queue.later(subject, waiting, replace=True)

    async def is_parked(self, group: str, job: str, run: str) -> bool:
        return self._queue.has_later(self.names.later(group, job, run, ""))

    async def event(self, event: str, body: bytes, headers: Headers) -> bool:
        subscribers = self._subscribers(event)
        self.publish(event, body, headers)
        return bool(subscribers)

    def publish(self, event: str, body: bytes, headers: Headers) -> Stored:
        stored = self._queue.event(event, body, headers, self._subscribers(event))
        if not stored.duplicate:
            data = msgspec.json.decode(body)
            id, cause = headers.get(H_MSG_ID, ""), headers.get(H_CAUSE, "")
            self.events.append(PublishedEvent(event, data, id, cause))
        return stored

    def _subscribers(self, event: str) -> list[tuple[str, str]]:
        specs = [job.spec for job in self._app.jobs.values()]
        return [(spec.group, spec.name) for spec in specs if event in spec.on]

    async def dead_letter(self, group: str, job: str, body: bytes, headers: Headers) -> Letter:
        if not self._queue.is_new_dead_letter(headers):
            return Letter()
        error, traceback = headers.get(H_ERROR, '""'), headers.get(H_TRACEBACK, '""')
        self.dead.append(
            DeadLetter(
                headers.get(H_RUN, ""),
                group,
                job,
                headers.get(H_REASON, ""),
                json.loads(error),
                json.loads(traceback),
                body,
                headers,
            )
        )
        return Letter(len(self.dead))

    async def withdraw(self, letter: Letter) -> None:
        if letter.sequence:
            del self.dead[letter.sequence - 1]

    async def keep(self, name: str, body: bytes, ttl: float | None = None) -> str:
        self.objects[name] = body
        return name

    async def forget(self, name: str) -> None:
        self.objects.pop(name, None)


class MemoryData:
    """A bucket of the program (`client.bucket.Data`)."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._store = MemoryStore(clock)
        self._stored: dict[str, float] = {}

    async def put(
        self, key: str, value: bytes, *, expected: int | None, ttl: float | None = None
    ) -> int:
        revision = await self._store.put(key, value, expected=expected, ttl=ttl)
        self._stored[key] = self._clock.utc()
        return revision

    async def get(self, key: str) -> Entry | None:
        found = await self._store.get(key)
        return Entry(key, found.value, found.revision, self._stored[key]) if found else None

    async def delete(self, key: str) -> None:
        await self._store.delete(key)

    async def entries(self, prefix: str = "") -> AsyncIterator[Entry]:
        below = f"{prefix}." if prefix else ""
        keys = [key for key in self._store.keys() if key.startswith(below)]  # noqa: SIM118
        found = [entry for key in keys if (entry := await self.get(key))]
        for entry in sorted(found, key=lambda e: e.revision):
            yield entry

    def pass_over(self, entry: Entry, error: Exception) -> None:
        """Not noted: only the test itself writes here, and `get` raises the error."""


class MemoryProcess(Protocol):
    """What the backend needs of the app in memory."""

    clock: FakeClock

    async def record(self, run: str) -> RunRecord | None: ...
    async def until_ended(self, run: str, sequence: int, patient: bool) -> RunRecord: ...
    def held(self, run: str) -> tuple[Held, asyncio.Task[None]] | None: ...


class MemoryBackend:
    """Accepts runs and answers questions about them (`client.run.Backend`)."""

    def __init__(
        self,
        process: MemoryProcess,
        queue: MemoryQueue,
        names: Names,
        store: MemoryStore,
        outbox: MemoryOutbox,
        records: RecordConfig,
    ) -> None:
        self._process = process
        self._queue = queue
        self._names = names
        self._store = store
        self._outbox = outbox
        self._records = records
        self._data: dict[str, MemoryData] = {}

    # ---- accepting

    async def enqueue(self, request: Request) -> Enqueued:
        group, job, now = request.group, request.spec.name, self._process.clock.utc()
        due = now + request.delay_seconds if request.at is None else _due(request.at, now)
        message = first_message(
            self._names,
            group,
            job,
            request.run,
            request.body,
            request.headers,
            cause=request.cause,
            due=due if request.delayed else None,
        )
        _check_size(message.body, message.headers)
        if request.keyed and await self._is_known(request):
            return Enqueued(request.run, 0, duplicate=True)
        if not request.delayed:
            stored = self._queue.job(group, job, message.body, message.headers)
            return Enqueued(request.run, stored.seq, stored.duplicate)
        scheduled = Scheduled(group, job, message.body, message.headers, due)
        stored = self._queue.later(message.subject, scheduled, replace=False)
        return Enqueued(request.run, 0, stored.duplicate)

    async def _is_known(self, request: Request) -> bool:
        """Whether a delayed run of the key waits; for a delayed request, whether it is recorded."""
        if not request.delayed:
            subject = self._names.later(request.group, request.spec.name, request.run, 1)
            return self._queue.waits(subject)
        return request.spec.recorded and await self._store.get(request.run) is not None

    async def enqueue_many(self, requests: Sequence[Request]) -> list[Enqueued]:
        return [await self.enqueue(request) for request in requests]

    async def publish_event(self, event: str, body: bytes, headers: Headers) -> Stored:
        _check_size(body, headers)
        return self._outbox.publish(event, body, headers)

    # ---- asking

    async def read(self, run: str) -> RunRecord | None:
        return await self._process.record(run)

    async def wait(self, run: str, sequence: int, timeout: float | None) -> RunRecord:
        async with asyncio.timeout(timeout):
            return await self._process.until_ended(run, sequence, patient=timeout is None)

    async def queued(self, run: str, group: str, job: str, sequence: int) -> str:
        if sequence:
            return "queued" if self._queue.has(sequence) else "unknown"
        delayed = self._queue.has_later(self._names.later(group, job, run, ""))
        return "delayed" if delayed else "queued"

    async def result_bytes(self, record: RunRecord) -> bytes:
        if record.result_object:
            return self._outbox.objects[record.result_object]
        return bytes(record.result)

    async def data(self, name: str) -> Data:
        return self._data.setdefault(name, MemoryData(self._process.clock))

    # ---- cancelling

    async def cancel(self, run: str, group: str, job: str) -> bool:
        while True:
            entry = await self._store.get(run)
            record = runs.decode(entry.value) if entry else None
            if record and record.terminal:
                return record.state == "cancelled"
            if running := self._process.held(run):
                held, task = running
                held.interrupt(Interrupt.CANCEL)
                await asyncio.shield(task)
                continue
            if await self._write_cancelled(run, record, entry.revision if entry else 0, group, job):
                return True

    async def _write_cancelled(
        self, run: str, record: RunRecord | None, revision: int, group: str, job: str
    ) -> bool:
        ended = runs.cancelled(record, run, group, job, now=self._process.clock.utc())
        ttl = self._records.keyed_ttl_seconds
        try:
            await self._store.put(run, runs.encode(ended), expected=revision, ttl=ttl)
        except Conflict:
            return False
        for message in (ended.message, ended.message + 1):
            self._queue.forget_later(self._names.later(group, job, run, message))
        return True


def _due(at: float, now: float) -> float:
    """When an instant is due on a fake clock that shows `now`.

    Code under test takes its instants from the wall clock, a test from its `FakeClock`: the clock
    that is nearer to the instant is assumed.
    """
    wall = time.time()
    return now + max(0.0, at - wall) if abs(at - wall) < abs(at - now) else at


def _check_size(body: bytes, headers: Headers) -> None:
    size, limit = len(body) + header_bytes(headers), MAX_PAYLOAD - ENVELOPE_BYTES
    if size > limit:
        raise PayloadTooLarge(size, limit)
