"""The client: accepted means stored.

`enqueue` returns when the stream has confirmed the message; until then it repeats the publish with
the same message id, so that a lost answer neither loses nor doubles the run. What cannot be
confirmed within the request timeout raises `OutcomeUnknown`, and a `key` makes trying again safe
for longer than the server's window of message ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast import errors
from holdfast.broker import Broker, Bucket, Received, Stored
from holdfast.broker.batch import Write
from holdfast.broker.kv import direct_batch, ttl_text
from holdfast.broker.objects import KEPT_SECONDS, Objects
from holdfast.broker.streams import Topology
from holdfast.broker.wire import ENVELOPE_BYTES, Headers, header_bytes
from holdfast.client import cancelling, duplicates
from holdfast.client.batches import Batches
from holdfast.client.bucket import Data, NatsData
from holdfast.client.run import Enqueued, Request, RunStatus
from holdfast.client.waiting import LOOK_AGAIN_SECONDS, Waiting, is_search_due
from holdfast.config import RecordConfig
from holdfast.model import node as nodes
from holdfast.model import run as runs
from holdfast.model.message import RunMessage, first_message
from holdfast.model.run import RunRecord
from holdfast.model.runlog import LOG_MESSAGE, LogLine, lines_of
from holdfast.names import (
    DEFAULT_GROUP,
    H_MSG_ID,
    H_TTL,
    IdMaker,
    check_event,
    check_event_id,
    check_run,
    keyed_run,
    parse_consumer,
)
from holdfast.ownership.history import History
from holdfast.ownership.journals import NatsJournals

if TYPE_CHECKING:
    from holdfast.telemetry import Telemetry

if TYPE_CHECKING:
    from holdfast.status.listing import RunInfo

READS_AT_ONCE = 100
"""Records read concurrently before many keyed runs are sent: hides the round trip."""
OWN_HEADERS_BYTES = 4096
"""More bytes than our own headers of a message can take."""
LAST_LINES_SECONDS = 1.0
"""After a run's end, how long its last log lines may take: workers send them every 0.25 s."""
SUBSCRIBERS_SECONDS = 5.0
"""How long a list of subscriptions is used: only a warning and a metric depend on it."""
WORKERS_SECONDS = 1.0
"""How long a list of workers is used: each one reads the whole bucket of nodes."""

log = logging.getLogger("holdfast.client")

_UNSURE = (errors.NotConnected, errors.Unavailable, errors.OutcomeUnknown)
_MAYBE = "an answer was lost: the message may or may not be stored; sending it again stores it once"


def _longest(records: RecordConfig) -> float:
    """The age limit of the object bucket; it also limits objects with a longer TTL."""
    return max(KEPT_SECONDS, records.keyed_ttl_seconds, records.dead_days * 86_400.0)


_make_event_id = IdMaker()


class EventSent(msgspec.Struct, frozen=True):
    """An event that was stored."""

    event: str
    id: str
    duplicate: bool
    """An event with this id is stored already: nothing was sent."""
    subscribed: bool
    """Whether a job subscribes to it."""


class Client:
    """Sends runs through one broker."""

    def __init__(
        self, broker: Broker, records: RecordConfig, telemetry: Telemetry | None = None
    ) -> None:
        self.broker = broker
        if telemetry is not None:
            self.telemetry = telemetry
            broker.unreadable.counter = telemetry.unreadable
        self.topology = Topology(broker, records)
        self.runs = Bucket(broker, broker.names.runs)
        self.objects = Objects(broker, ttl=_longest(records))
        self.history = History(broker)
        self.journals = NatsJournals(broker)
        self.records = records
        self._waiting = Waiting(
            broker, self.runs.name, self.read, self.recall, self._stored, self._carried
        )
        self._buckets: dict[str, NatsData] = {}
        self._subscribed: set[str] = set()
        self._looked = -1e9
        self._served: set[str] = set()
        self._served_at = -1e9

    @functools.cached_property
    def telemetry(self) -> Telemetry:
        """Its own metrics, unless some were passed in; made on first use, since many need none."""
        from holdfast.telemetry import Telemetry

        return Telemetry()

    # ---- enqueue

    async def enqueue(self, request: Request) -> Enqueued:
        """Store one run; an error carries the request, to be sent again under the same id."""
        try:
            if not await self._has_worker(request):
                return await self._without_worker(request)
            if not request.keyed:
                return self._accepted(request, await self._store_new(request))
            return await self._enqueue_keyed(request)
        except errors.BrokerError as error:
            error.requests = (request,)
            raise

    async def _enqueue_keyed(self, request: Request) -> Enqueued:
        if request.on_duplicate == "replace":
            self._message(request)  # check its size before changing anything
            return self._count(request, await duplicates.replace(self, request))
        record = await self._recorded(request)
        if found := duplicates.answered(request, record):
            return duplicates.told(request, self._count(request, found))
        sent = self._accepted(request, await self._store_new(request))
        found = duplicates.beside(record, sent)
        if found is sent and sent.duplicate:
            found = sent._replace(state="delayed" if await self._waits(request) else "queued")
        return duplicates.told(request, found) if found.duplicate else found

    async def _recorded(self, request: Request) -> RunRecord | None:
        """The key's current record. If it is missed here, the claim still decides."""
        if not request.spec.recorded:
            return None
        try:
            return await self.read(request.run)
        except (errors.BrokerError, errors.Unreadable) as error:
            log.debug("run %s: its record was not read: %s", request.run, error)
            return None

    async def _store_new(self, request: Request) -> Stored:
        """Store the message, unless a delayed one waits under the same key.

        The server decides that by the subject of the delayed message. A cluster also refuses a
        write while another one with the same key is in progress. Since the other one may still
        fail, this one is repeated until either is stored.
        """
        clock = self.broker.clock
        deadline = clock.monotonic() + self.broker.config.request_timeout_seconds
        while True:
            try:
                return await self.store_surely(*self._message(request))
            except errors.Conflict as error:
                if await self._waits(request):
                    return Stored(duplicate=True)
                if clock.monotonic() > deadline:
                    raise errors.OutcomeUnknown(
                        f"others are sending run {request.run}: {error}"
                    ) from None
            await clock.sleep(0.1)

    async def _waits(self, request: Request) -> bool:
        names = self.broker.names
        later = names.later(request.group, request.spec.name, request.run, 1)
        try:
            await self.broker.api(f"STREAM.MSG.GET.{names.jobs}", {"last_by_subj": later})
        except errors.NotFound:
            return False
        return True

    async def enqueue_many(self, requests: Sequence[Request]) -> list[Enqueued]:
        """Store many runs, in order; nothing is sent when one of them is refused.

        Only a connection lost on the way, or a repeated key, can change the order. When not all
        could be stored, the error says which; see `holdfast.client.batches`.
        """
        small = self._largest() - OWN_HEADERS_BYTES
        for request in requests:
            if request.headers or len(request.body) > small:
                self._message(request)
        records = await self._records(requests)
        batches = Batches(self.broker, self.telemetry, self.enqueue, self._write)
        known = {
            i: duplicates.told(r, self._count(r, answer))
            for i, r in enumerate(requests)
            if (answer := duplicates.answered(r, records.get(i)))
        }
        sent = iter(await batches.send([r for i, r in enumerate(requests) if i not in known]))
        return [
            known[i] if i in known else self._sent(r, records.get(i), next(sent))
            for i, r in enumerate(requests)
        ]

    async def _records(self, requests: Sequence[Request]) -> dict[int, RunRecord]:
        """The records of keyed runs, by the index of their requests; all other consequences of a
        known key are decided when they are sent one by one."""
        places = [i for i, r in enumerate(requests) if r.keyed and r.on_duplicate == "return"]
        found: dict[int, RunRecord] = {}
        for start in range(0, len(places), READS_AT_ONCE):
            part = places[start : start + READS_AT_ONCE]
            records = await asyncio.gather(*(self._recorded(requests[i]) for i in part))
            found |= {i: record for i, record in zip(part, records, strict=True) if record}
        return found

    def _sent(self, request: Request, record: RunRecord | None, sent: Enqueued) -> Enqueued:
        """The answer to one of many; those that were sent alone have their answers already."""
        found = duplicates.beside(record, sent)
        return found if sent.duplicate or not found.duplicate else duplicates.told(request, found)

    def _write(self, request: Request) -> Write:
        return Write(*self._message(request))

    def _accepted(self, request: Request, stored: Stored) -> Enqueued:
        duplicate = stored.duplicate and request.keyed  # otherwise it is our own repeated publish
        state = "delayed" if request.delayed else "queued"
        found = Enqueued(request.run, 0 if request.delayed else stored.seq, duplicate, state)
        return self._count(request, found)

    def _count(self, request: Request, found: Enqueued) -> Enqueued:
        self.telemetry.enqueued.labels(request.group, request.spec.name).inc()
        if found.duplicate:
            self.telemetry.duplicates.labels("publish").inc()
        return found

    def _message(self, request: Request) -> RunMessage:
        due = request.at
        if due is None and request.delayed:
            due = self.broker.server_now() + request.delay_seconds
        message = first_message(
            self.broker.names,
            request.group,
            request.spec.name,
            request.run,
            request.body,
            request.headers,
            cause=request.cause,
            keyed=request.keyed,
            due=due,
            queue=request.queue,
        )
        self._check_size(message.body, message.headers)
        return message

    def _largest(self) -> int:
        return self.broker.max_message_bytes - ENVELOPE_BYTES

    def _check_size(self, body: bytes, headers: Headers) -> None:
        size = len(body) + header_bytes(headers)
        limit = self._largest()
        if size > limit:
            raise errors.PayloadTooLarge(size, limit)

    async def store_surely(self, subject: str, body: bytes, headers: Headers) -> Stored:
        """Repeat a publish that carries a message id until it is confirmed or time is up.

        Once a try may have been applied, the error is `OutcomeUnknown`, however later tries fail.
        """
        clock = self.broker.clock
        deadline = clock.monotonic() + self.broker.config.request_timeout_seconds
        ensured = unknown = False
        while True:
            try:
                return await self.broker.store(subject, body, headers)
            except _UNSURE as error:
                unknown = unknown or isinstance(error, errors.OutcomeUnknown)
                if isinstance(error, errors.Unavailable) and not ensured:
                    ensured = True
                    await self._ensure(deadline)
                    continue
                if clock.monotonic() > deadline:
                    await self.broker.leave_if_useless()
                    if unknown:
                        raise errors.OutcomeUnknown(f"{_MAYBE} ({error})") from None
                    raise
            except errors.BrokerError as error:  # refused, but an earlier try may have been applied
                if unknown and not isinstance(error, errors.Conflict):
                    raise errors.OutcomeUnknown(f"{_MAYBE} ({error})") from None
                raise
            await clock.sleep(0.1)

    async def drop_stored(self, stream: str, sequence: int) -> None:
        """Remove one stored message, if possible."""
        request = {"seq": sequence, "no_erase": True}
        try:
            await self.broker.api(f"STREAM.MSG.DELETE.{stream}", request)
        except errors.BrokerError as error:
            log.debug("message %d of %s could not be removed: %s", sequence, stream, error)

    async def _ensure(self, deadline: float) -> None:
        """Create missing streams; if that takes too long, the next publish fails."""
        with contextlib.suppress(TimeoutError, *_UNSURE):
            async with asyncio.timeout(deadline - self.broker.clock.monotonic()):
                await self.topology.ensure()

    # ---- groups without a worker

    async def _has_worker(self, request: Request) -> bool:
        """Whether a live worker serves the group; asked only where the answer matters."""
        if request.spec.fallback == "wait":
            return True
        now = self.broker.clock.monotonic()
        if now - self._served_at > WORKERS_SECONDS:
            bucket = Bucket(self.broker, self.broker.names.nodes)
            found = bucket.records(nodes.decode)
            self._served = {r.group async for _, r in found if r.role == "worker" and r.alive}
            self._served_at = now
        return request.group in self._served

    async def _without_worker(self, request: Request) -> Enqueued:
        if request.spec.fallback == "fail":
            raise errors.NoWorker(
                f"group {request.group!r} has no live worker, and its fallback is 'fail': start "
                f"one with 'holdfast worker APP --group {request.group}'"
            )
        job = request.spec.name
        await cancelling.write_cancelled(
            self,
            request.run,
            None,
            0,
            request.group,
            job,
            why="no worker of its group was alive",
            parent=request.headers,
        )
        return Enqueued(request.run, 0, False)

    # ---- asking

    async def read(self, run: str) -> RunRecord | None:
        """A run's record."""
        entry = await self.runs.get(check_run(run))
        return runs.decode(entry.value) if entry else None

    async def recall(self, run: str) -> RunRecord | None:
        """The final record of a run from the history, if its own record has expired."""
        found = await self.history.find(check_run(run))
        return found.record if found else None

    async def wait(self, run: str, sequence: int, timeout: float | None) -> RunRecord:
        """A run's record once the run has ended; `TimeoutError` if it does not in time."""
        return await self._waiting.wait(check_run(run), sequence, timeout)

    async def _stored(self, sequence: int) -> bool:
        try:
            await self.broker.api(f"STREAM.MSG.GET.{self.broker.names.jobs}", {"seq": sequence})
        except errors.NotFound:
            return False
        return True

    async def queued(self, run: str, group: str, job: str, sequence: int) -> str:
        """Where a run without a record is."""
        if sequence and await self._stored(sequence):
            return "queued"
        if await self._waits_in_line(run):
            return "waiting"
        if sequence:
            return await self._where(run) or "unknown"
        subject = self.broker.names.later(group, job, check_run(run), "*")
        stream = self.broker.names.jobs
        info = await self.broker.api(f"STREAM.INFO.{stream}", {"subjects_filter": subject})
        return "delayed" if info["state"].get("subjects") else "queued"

    async def _where(self, run: str) -> str:
        """Where a later message than its first carries a run; empty if none does."""
        from holdfast.status.finding import Finder

        found = await Finder(self).search(run)
        return "" if found is None else "delayed" if found.later else "queued"

    async def _carried(self, run: str) -> bool:
        return bool(await self._where(run))

    async def _waits_in_line(self, run: str) -> bool:
        """Whether a run waits for a place in a limit."""
        names = self.broker.names
        subject = names.line("*", "*", check_run(run))
        info = await self.broker.api(f"STREAM.INFO.{names.jobs}", {"subjects_filter": subject})
        return bool(info["state"].get("subjects"))

    async def result_bytes(self, record: RunRecord) -> bytes:
        """A run's result as JSON."""
        if record.result_object:
            return await self.objects.get(record.result_object)
        return bytes(record.result)

    async def logs(self, run: str, after: int = 0) -> list[LogLine]:
        """What a run has logged so far; with `after`, only what was stored after that position."""
        broker, stream = self.broker, self.broker.names.run_logs
        subject = broker.names.run_log(check_run(run))
        found: list[LogLine] = []
        try:
            async for message in direct_batch(broker, stream, subject, after + 1):
                at = message.headers["Nats-Sequence"]
                read = broker.unreadable.read(LOG_MESSAGE.decode, stream, at, message.body)
                found += lines_of(read, int(at)) if read else ()
        except (errors.NotFound, errors.Unavailable):  # no worker has made the stream
            return []
        return found

    async def follow(self, run: str, after: int = 0) -> AsyncIterator[LogLine]:
        """What a run logs, until it has ended; the server notifies of each message."""
        changed = asyncio.Event()

        async def notice(_: Received) -> None:
            changed.set()

        names = self.broker.names
        subjects = names.run_log(check_run(run)), names.changed(self.runs.name, run)
        subscriptions = [await self.broker.subscribe(subject, notice) for subject in subjects]
        try:
            ended = False
            for looks in itertools.count():
                changed.clear()
                for line in await self.logs(run, after):
                    yield line
                    after = line.position
                if ended:
                    return
                if ended := await self._has_ended(run, looks):
                    await self.broker.clock.sleep(LAST_LINES_SECONDS)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                        await changed.wait()
        finally:
            for subscription in subscriptions:
                await self.broker.unsubscribe(subscription)

    async def _has_ended(self, run: str, looks: int) -> bool:
        """Whether a run has ended, or has neither a record nor a message."""
        try:
            record = await self.read(run) or await self.recall(run)
            if record is None and (looks == 0 or is_search_due(looks)):
                record = await self._waiting.left(run, 0)
        except errors.RunNotFound:
            return True
        except _UNSURE:
            return False
        return record is not None and record.terminal

    # Operators see runs the same way (`status`), which is built on this client.

    async def look(self, run: str) -> RunStatus:
        """Where a run is, by its id alone.

        The record and the history have every run that has ended, so dead letters, which a sender
        may not read, are not needed.
        """
        from holdfast.status.finding import Finder

        try:
            record = await self.read(run) or await self.recall(run)
            if record is not None:
                return RunStatus.of(run, record)
            found = await Finder(self).search(run)
            if found is None and (record := await self.read(run)) is not None:
                return RunStatus.of(run, record)  # claimed meanwhile, and perhaps done
        except errors.NotFound:  # nothing was ever sent here
            found = None
        if found is None:
            return RunStatus(run, "unknown")
        state = "delayed" if found.later else "queued"
        return RunStatus(run, state, job=found.job, group=found.group)

    async def retry(self, run: str) -> str:
        """Send a run again that was given up, or start its next attempt now."""
        from holdfast.status.runs import Runs

        return await Runs(self).retry(run)

    async def list_runs(self, job: str, state: str, key: str, limit: int) -> list[RunStatus]:
        """Runs that match, newest change first."""
        from holdfast.status.listing import RunFilter, first_runs

        wanted = RunFilter(job=job, state=state, key=key)
        if job and key:  # these are found without a list
            ids = [keyed_run(group, job, key) for group in await self._groups(job)]
            there = [found for run in ids if (found := await self.look(run)).known]
            return [found for found in there if state in ("", found.state)][:limit]
        return [_status(info) for info in await first_runs(self, wanted, limit)]

    async def _groups(self, job: str) -> list[str]:
        """The default group, and the groups in which a worker has served the job."""
        found: list[str] = []
        with contextlib.suppress(errors.BrokerError):  # nothing was ever sent, or no permission
            consumers = await self.topology.consumers(self.broker.names.jobs)
            homes = [home for one in consumers if (home := parse_consumer(one["name"]))]
            found = [group for group, name in homes if name == job and group != DEFAULT_GROUP]
        return [DEFAULT_GROUP, *dict.fromkeys(found)]

    async def data(self, name: str) -> Data:
        """A bucket of the program, created on first use."""
        if name not in self._buckets:
            data = NatsData(self.broker, self.topology, name)
            await data.ensure()
            self._buckets[name] = data
        return self._buckets[name]

    # ---- cancelling

    async def cancel(self, run: str, group: str, job: str, payload: bytes | None = None) -> bool:
        """Cancel a run in any state; see `holdfast.client.cancelling`."""
        return await cancelling.cancel(self, run, group, job, payload)

    async def cancel_child(self, request: Request) -> None:
        """Ask a flow's child to stop; the flow is told how it ended."""
        await cancelling.cancel_child(self, request)

    # ---- events

    async def publish(self, event: str, body: bytes, id: str | None = None) -> EventSent:
        """Publish an event from outside a run; with an `id`, repeats of it are detected."""
        headers = {H_MSG_ID: check_event_id(id) if id else _make_event_id("e")}
        stored = await self.publish_event(check_event(event), body, headers)
        subscribed = await self.has_subscriber(event)
        return EventSent(event, headers[H_MSG_ID], stored.duplicate, subscribed)

    async def publish_event(self, event: str, body: bytes, headers: Headers) -> Stored:
        """Publish an event; the stream has it when this returns."""
        stored = await self.store_event(event, body, headers)
        self.telemetry.published.labels(event).inc()
        if not await self.has_subscriber(event):
            self.telemetry.tell_unclaimed(event)
        return stored

    async def store_event(self, event: str, body: bytes, headers: Headers) -> Stored:
        """Store an event without counting it or warning that nobody subscribes."""
        self._check_size(body, headers)
        return await self.store_surely(self.broker.names.event(event), body, headers)

    async def publish_signal(self, event: str, key: str, body: bytes, headers: Headers) -> Stored:
        """Store an event for the flows that wait for it with this key, now or later, and for the
        jobs that subscribe to it."""
        kept = {H_TTL: ttl_text(self.records.event_days * 86_400.0)}
        self._check_size(body, headers)
        subject = self.broker.names.signal(event, key)
        id = {H_MSG_ID: f"{subject}.{headers[H_MSG_ID]}"}
        stored = await self.store_surely(subject, body, headers | kept | id)
        await self.store_event(event, body, headers)
        self.telemetry.published.labels(event).inc()
        return stored

    async def has_subscriber(self, event: str) -> bool:
        """Whether a job subscribes to the event, as of the last few seconds."""
        clock = self.broker.clock
        if event not in self._subscribed and clock.monotonic() - self._looked > SUBSCRIBERS_SECONDS:
            try:
                found = await self.topology.consumers(self.broker.names.events)
            except errors.BrokerError as error:
                log.debug("subscribers not read: %s", error)
                return True
            subjects = {c["config"].get("filter_subject", "") for c in found}
            parse = self.broker.names.parse_event
            self._subscribed = {name for s in subjects if (name := parse(s))}
            self._looked = clock.monotonic()
        return event in self._subscribed


def _status(info: RunInfo) -> RunStatus:
    return RunStatus(
        info.run,
        info.state,
        attempt=info.attempts,
        failures=info.failures,
        crashes=info.crashes,
        node=info.node,
        error=info.error,
        job=info.job,
        group=info.group,
    )
