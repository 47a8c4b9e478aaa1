"""The memory app's client and outbox."""

from __future__ import annotations

import asyncio
import contextlib
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
from holdfast.client import Enqueued, Request, RunStatus, duplicates
from holdfast.client.bucket import Data
from holdfast.config import RecordConfig
from holdfast.errors import Conflict, NotFound, PayloadTooLarge, RunError, Unreadable
from holdfast.model import run as runs
from holdfast.model.history import Ended
from holdfast.model.job import JobSpec
from holdfast.model.journal import parent_of
from holdfast.model.message import RunMessage, first_message
from holdfast.model.run import RunRecord
from holdfast.model.runlog import LogLine
from holdfast.names import (
    H_CAUSE,
    H_ERROR,
    H_MSG_ID,
    H_PARENT,
    H_REASON,
    H_RUN,
    H_TRACEBACK,
    H_USER,
    Names,
    encode,
)
from holdfast.ownership.store import MemoryStore
from holdfast.server.node import MAX_PAYLOAD
from holdfast.testing.clock import FakeClock
from holdfast.testing.flows import MemoryJournals
from holdfast.testing.limits import MemoryLine
from holdfast.testing.queue import Headers, MemoryQueue, Scheduled
from holdfast.worker.attempt import Held, Interrupt
from holdfast.worker.settling import Letter, Quiet


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
    """What attempts send (`worker.settling.Outbox`), kept for inspection."""

    largest_result = MAX_PAYLOAD // 4

    def __init__(
        self, app: Holdfast, queue: MemoryQueue, names: Names, journals: MemoryJournals
    ) -> None:
        self.journals = journals
        self.dead: list[DeadLetter] = []
        self.events: list[PublishedEvent] = []
        self.objects: dict[str, bytes] = {}
        self.history: dict[str, RunRecord] = {}
        """How each run last ended."""
        self._app = app
        self._queue = queue
        self.names = names

    async def park(self, spec: JobSpec, message: RunMessage, subject: str, due: float) -> None:
        queue = self.names.parse_queue(message.subject)
        waiting = Scheduled(spec.group, spec.name, message.body, message.headers, due, queue)
        self._queue.later(subject, waiting, replace=True)

    async def quiet(self, subject: str) -> Quiet | None:
        found = self._queue.scheduled(subject)
        return Quiet(found.sequence, found.body, found.headers) if found else None

    async def make_quiet(
        self, message: RunMessage, subject: str, due: float, expected: int
    ) -> None:
        found = self._queue.scheduled(subject)
        if (found.sequence if found else 0) != expected:
            raise Conflict(f"{subject} has changed")
        group, job = self.names.parse_job(message.subject) or ("", "")
        queue = self.names.parse_queue(message.subject)
        waiting = Scheduled(group, job, message.body, message.headers, due, queue)
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

    async def file(
        self, run: str, record: RunRecord, payload: bytes | None, headers: Headers
    ) -> None:
        self.history[run] = record
        await self.tell(run, record)

    async def is_filed(self, run: str, record: RunRecord) -> bool:
        return run in self.history and self.history[run].ended == record.ended

    async def recall(self, run: str, group: str, job: str, since: float) -> Ended | None:
        found = self.history.get(run)
        return Ended(run, found) if found and found.ended >= since else None

    async def tell(self, run: str, record: RunRecord) -> None:
        if (parent := parent_of(record.parent)) is not None:
            await self.journals.tell(parent, run, record)

    async def fetch(self, name: str) -> bytes:
        if name not in self.objects:
            raise NotFound(f"object {name} does not exist")
        return self.objects[name]

    async def wake(self, spec: JobSpec, run: str, mark: str, due: float) -> None:
        await self.journals.wake(spec.group, spec.name, run, mark, due)


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
        """Does nothing: only the test itself writes here, and `get` raises the error."""


class MemoryProcess(Protocol):
    """What the backend needs of the app in memory."""

    clock: FakeClock
    lines: dict[str, list[LogLine]]

    async def record(self, run: str) -> RunRecord | None: ...
    async def until_ended(self, run: str, sequence: int, patient: bool) -> RunRecord: ...
    def held(self, run: str) -> tuple[Held, asyncio.Task[None]] | None: ...
    async def free(self, run: str) -> None: ...


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
        line: MemoryLine,
    ) -> None:
        self._process = process
        self._line = line
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
            queue=request.queue,
        )
        _check_size(message.body, message.headers)
        record = None
        if request.on_duplicate == "replace":
            message = await self._replacing(request)
        elif request.keyed:
            record = await self._recorded(request)
            if known := self._known(request, record):
                return duplicates.told(request, known)
        if not request.delayed:
            stored = self._queue.job(group, job, message.body, message.headers, request.queue)
            found = Enqueued(request.run, stored.seq, stored.duplicate, "queued")
        else:
            scheduled = Scheduled(group, job, message.body, message.headers, due, request.queue)
            stored = self._queue.later(message.subject, scheduled, replace=False)
            found = Enqueued(request.run, 0, stored.duplicate, "delayed")
        found = duplicates.beside(record, found)
        return duplicates.told(request, found) if found.duplicate else found

    async def _recorded(self, request: Request) -> RunRecord | None:
        with contextlib.suppress(Unreadable):  # the claim reports it
            return await self.read(request.run) if request.spec.recorded else None
        return None

    def _known(self, request: Request, record: RunRecord | None) -> Enqueued | None:
        """The key's run, if nothing has to be sent."""
        if found := duplicates.answered(request, record):
            return found
        subject = self._names.later(request.group, request.spec.name, request.run, 1)
        if not request.delayed and self._queue.waits(subject):
            return Enqueued(request.run, 0, duplicate=True, state="delayed")
        return None

    async def _replacing(self, request: Request) -> RunMessage:
        run, group, job = request.run, request.group, request.spec.name
        record = await self.read(run)
        if record is not None and not record.terminal:
            await self.cancel(run, group, job)
        entry = await self._store.get(run)
        record = runs.decode(entry.value) if entry else None
        now = self._process.clock.utc()
        started, message = duplicates.replacement(self._names, request, record, now)
        revision = entry.revision if entry else 0
        await self._store.put(run, runs.encode(started), expected=revision, ttl=None)
        self._queue.forget_later(self._names.later(group, job, run, 1))
        return message

    async def enqueue_many(self, requests: Sequence[Request]) -> list[Enqueued]:
        return [await self.enqueue(request) for request in requests]

    async def publish_event(self, event: str, body: bytes, headers: Headers) -> Stored:
        _check_size(body, headers)
        return self._outbox.publish(event, body, headers)

    # ---- asking

    async def read(self, run: str) -> RunRecord | None:
        return await self._process.record(run)

    async def recall(self, run: str) -> RunRecord | None:
        return self._outbox.history.get(run)

    async def wait(self, run: str, sequence: int, timeout: float | None) -> RunRecord:
        async with asyncio.timeout(timeout):
            return await self._process.until_ended(run, sequence, patient=timeout is None)

    async def queued(self, run: str, group: str, job: str, sequence: int) -> str:
        if sequence and self._queue.has(sequence):
            return "queued"
        known = [*self._queue.statuses(), *self._line.statuses()]
        if found := [one.state for one in known if one.run == run]:
            return found[0]
        if sequence:
            return "unknown"
        delayed = self._queue.has_later(self._names.later(group, job, run, ""))
        return "delayed" if delayed else "queued"

    async def result_bytes(self, record: RunRecord) -> bytes:
        if record.result_object:
            return self._outbox.objects[record.result_object]
        return bytes(record.result)

    async def logs(self, run: str, after: int = 0) -> list[LogLine]:
        return [line for line in self._process.lines.get(run, ()) if line.position > after]

    async def follow(self, run: str, after: int = 0) -> AsyncIterator[LogLine]:
        await self._process.until_ended(run, 0, patient=True)
        for line in await self.logs(run, after):
            yield line

    async def look(self, run: str) -> RunStatus:
        found = await self.list_runs("", "", "", 0)
        return next((s for s in found if s.run == run), RunStatus(run, "unknown"))

    async def retry(self, run: str) -> str:
        record = await self.read(run)
        letter = next((d for d in reversed(self._outbox.dead) if d.run == run), None)
        if record is None or record.state not in ("dead", "lost") or letter is None:
            state = record.state if record else "queued"
            raise RunError(f"run {run} is {state}: only a dead letter is sent again", run=run)
        spec = JobSpec(letter.job, letter.group)
        request = Request(spec, letter.group, run, letter.body, on_duplicate="replace")
        message = await self._replacing(request)
        self._queue.job(letter.group, letter.job, message.body, message.headers)
        return "its dead letter was sent again"

    async def list_runs(self, job: str, state: str, key: str, limit: int) -> list[RunStatus]:
        found = {s.run: s for s in (*self._queue.statuses(), *self._line.statuses())}
        for run in self._store.keys():  # noqa: SIM118 - not a dict
            if record := await self.read(run):
                found[run] = RunStatus.of(run, record)
        wanted = [
            s
            for s in reversed(found.values())
            if (not job or s.job == job)
            and (not state or s.state == state)
            and (not key or s.run.endswith(f"/{encode(key)}"))
        ]
        return wanted[:limit] if limit else wanted

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
            if record is not None and record.flow and entry is not None:
                await self._stop_flow(run, record, entry.revision)
                ended = await self._process.until_ended(run, 0, patient=True)
                return ended.state == "cancelled"
            if await self._write_cancelled(run, record, entry.revision if entry else 0, group, job):
                return True

    async def _stop_flow(self, run: str, record: RunRecord, revision: int) -> None:
        journals = self._outbox.journals
        await journals.stop(run, "cancelled")
        await journals.wake(record.group, record.job, run, f"x{revision}")

    async def cancel_child(self, request: Request) -> None:
        run = request.run
        entry = await self._store.get(run)
        record = runs.decode(entry.value) if entry else None
        if record is not None and record.terminal:
            await self._outbox.tell(run, record)
        elif running := self._process.held(run):
            running[0].interrupt(Interrupt.CANCEL)
        elif record is not None and entry is not None and record.flow:
            await self._stop_flow(run, record, entry.revision)
        else:
            revision = entry.revision if entry else 0
            where = request.group, request.spec.name
            await self._write_cancelled(run, record, revision, *where, request.headers)

    async def publish_signal(self, event: str, key: str, body: bytes, headers: Headers) -> Stored:
        _check_size(body, headers)
        by = headers.get(H_USER, "")
        sequence = await self._outbox.journals.signal(event, key, body, by)
        self._outbox.publish(event, body, headers)
        return Stored(seq=sequence)

    async def _write_cancelled(
        self,
        run: str,
        record: RunRecord | None,
        revision: int,
        group: str,
        job: str,
        parent: Headers | None = None,
    ) -> bool:
        ended = runs.cancelled(record, run, group, job, now=self._process.clock.utc())
        if parent and not ended.parent:
            ended = msgspec.structs.replace(ended, parent=parent.get(H_PARENT, ""))
        ttl = self._records.keyed_ttl_seconds
        try:
            await self._store.put(run, runs.encode(ended), expected=revision, ttl=ttl)
        except Conflict:
            return False
        await self._outbox.file(run, ended, None, {})
        for message in (ended.message, ended.message + 1):
            self._queue.forget_later(self._names.later(group, job, run, message))
        self._line.forget(run)
        await self._process.free(run)
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
