"""The client: accepted means stored.

`enqueue` returns when the stream has confirmed the message; until then it repeats the publish with
the same message id, so that a lost answer neither loses nor doubles the run. What cannot be
confirmed within the request timeout raises `OutcomeUnknown`, and a `key` makes trying again safe
for longer than the server's window of message ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from holdfast import errors
from holdfast.broker import Broker, Bucket, Received, Stored
from holdfast.broker.batch import Write
from holdfast.broker.objects import KEPT_SECONDS, Objects
from holdfast.broker.streams import Topology
from holdfast.broker.wire import ENVELOPE_BYTES, Headers, header_bytes
from holdfast.client.batches import Batches
from holdfast.client.bucket import Data, NatsData
from holdfast.client.run import Enqueued, Request
from holdfast.config import RecordConfig
from holdfast.model import node as nodes
from holdfast.model import run as runs
from holdfast.model.message import RunMessage, first_message
from holdfast.model.run import RunRecord
from holdfast.names import check_run
from holdfast.telemetry import Telemetry

OWN_HEADERS_BYTES = 4096
"""More than our own headers of a message can have."""
LOOK_AGAIN_SECONDS = 2.0
"""How often a waiting caller reads the record, in case the notice of its change was lost."""
CANCEL_SECONDS = 10.0
"""Longer than a stream's election (4 to 8 s), during which nothing can be written."""
SUBSCRIBERS_SECONDS = 5.0
"""How often the subscriptions are listed, at most: only a warning and a metric depend on it."""
WORKERS_SECONDS = 1.0
"""How long a listing of workers counts: each costs a read of the whole bucket of nodes."""

log = logging.getLogger("holdfast.client")

_UNSURE = (errors.NotConnected, errors.Unavailable, errors.OutcomeUnknown)
_MAYBE = "an answer was lost: the message may or may not be stored; sending it again stores it once"


def _longest(records: RecordConfig) -> float:
    """The age limit of the object bucket; it also limits objects with a longer TTL."""
    return max(KEPT_SECONDS, records.keyed_ttl_seconds, records.dead_days * 86_400.0)


class Client:
    """Sends runs through one broker."""

    def __init__(
        self, broker: Broker, records: RecordConfig, telemetry: Telemetry | None = None
    ) -> None:
        self.broker = broker
        self.telemetry = telemetry or Telemetry()
        broker.unreadable.counter = self.telemetry.unreadable
        self.topology = Topology(broker, records)
        self.runs = Bucket(broker, broker.names.runs)
        self.objects = Objects(broker, ttl=_longest(records))
        self.records = records
        self._buckets: dict[str, NatsData] = {}
        self._subscribed: set[str] = set()
        self._looked = -1e9
        self._served: set[str] = set()
        self._served_at = -1e9

    # ---- enqueue

    async def enqueue(self, request: Request) -> Enqueued:
        """Store one run; an error carries the request, to be sent again under the same id."""
        try:
            if not await self._has_worker(request):
                return await self._without_worker(request)
            if request.keyed and request.delayed and await self._is_recorded(request):
                return self._accepted(request, Stored(duplicate=True))
            return self._accepted(request, await self._store_new(request))
        except errors.BrokerError as error:
            error.requests = (request,)
            raise

    async def _is_recorded(self, request: Request) -> bool:
        """Whether the key has a record now, which may be gone when the delay is over."""
        try:
            return request.spec.recorded and await self.runs.get(request.run) is not None
        except errors.BrokerError as error:
            log.debug(
                "run %s: could not read its record, the claim will decide: %s", request.run, error
            )
            return False

    async def _store_new(self, request: Request) -> Stored:
        """Store the message, unless a delayed one waits under the same key.

        The server decides that by the subject of the delayed one. On a cluster it also refuses a
        write while another with the same key is in progress. That one may still fail, so this one
        is repeated until it is stored or the other one is.
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
        return await Batches(self.broker, self.telemetry, self.enqueue, self._write).send(requests)

    def _write(self, request: Request) -> Write:
        return Write(*self._message(request))

    def _accepted(self, request: Request, stored: Stored) -> Enqueued:
        self.telemetry.enqueued.labels(request.group, request.spec.name).inc()
        duplicate = stored.duplicate and request.keyed  # else it is our own publish, repeated
        if duplicate:
            self.telemetry.duplicates.labels("publish").inc()
        return Enqueued(request.run, 0 if request.delayed else stored.seq, duplicate)

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
        await self._write_cancelled(
            request.run, None, 0, request.group, job, why="no worker of its group was alive"
        )
        return Enqueued(request.run, 0, False)

    # ---- asking

    async def read(self, run: str) -> RunRecord | None:
        """A run's record."""
        entry = await self.runs.get(check_run(run))
        return runs.decode(entry.value) if entry else None

    async def wait(self, run: str, sequence: int, timeout: float | None) -> RunRecord:
        """A run's record once it has ended; the server notifies of each write."""
        changed = asyncio.Event()

        async def notice(_: Received) -> None:
            changed.set()

        subject = self.broker.names.changed(self.runs.name, check_run(run))
        subscription = await self.broker.subscribe(subject, notice)
        try:
            async with asyncio.timeout(timeout):
                return await self._until_ended(run, sequence, changed)
        finally:
            await self.broker.unsubscribe(subscription)

    async def _until_ended(self, run: str, sequence: int, changed: asyncio.Event) -> RunRecord:
        while True:
            changed.clear()
            try:
                record = await self.read(run)
                if (
                    record is not None
                    and record.terminal
                    and not (record.vacant and sequence and await self._stored(sequence))
                ):  # else the record is an earlier run's, and this one is still queued
                    return record
                if record is None:
                    await self._check_still_queued(run, sequence)
            except (*_UNSURE, errors.NotFound):  # the bucket itself: it is created again
                await self.broker.clock.sleep(0.2)
            try:
                async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _check_still_queued(self, run: str, sequence: int) -> None:
        if sequence and not await self._stored(sequence) and await self.read(run) is None:
            raise errors.RunNotFound(
                f"run {run} is neither queued nor recorded: it was purged, or its record expired",
                run=run,
            )

    async def _stored(self, sequence: int) -> bool:
        try:
            await self.broker.api(f"STREAM.MSG.GET.{self.broker.names.jobs}", {"seq": sequence})
        except errors.NotFound:
            return False
        return True

    async def queued(self, run: str, group: str, job: str, sequence: int) -> str:
        """Where a run without a record is."""
        if sequence:
            return "queued" if await self._stored(sequence) else "unknown"
        subject = self.broker.names.later(group, job, check_run(run), "*")
        stream = self.broker.names.jobs
        info = await self.broker.api(f"STREAM.INFO.{stream}", {"subjects_filter": subject})
        return "delayed" if info["state"].get("subjects") else "queued"

    async def result_bytes(self, record: RunRecord) -> bytes:
        """A run's result as JSON."""
        if record.result_object:
            return await self.objects.get(record.result_object)
        return bytes(record.result)

    async def data(self, name: str) -> Data:
        """A bucket of the program, created on first use."""
        if name not in self._buckets:
            data = NatsData(self.broker, self.topology, name)
            await data.ensure()
            self._buckets[name] = data
        return self._buckets[name]

    # ---- cancelling

    async def cancel(self, run: str, group: str, job: str) -> bool:
        """Cancel a run in any state; each step is a compare-and-swap, repeated on a conflict."""
        check_run(run)
        deadline = self.broker.clock.monotonic() + CANCEL_SECONDS
        while True:
            entry = await self.runs.get(run)
            record = runs.decode(entry.value) if entry else None
            if record and record.terminal:
                return record.state == "cancelled"
            if record and record.state == "running" and await self._ask_holder(run):
                return await self._ended_cancelled(run)
            if self.broker.clock.monotonic() > deadline:
                raise errors.RunError(
                    f"run {run} could not be cancelled: its holder does not answer", run=run
                )
            revision = entry.revision if entry else 0
            held = record and record.state == "running" and await self._alive(record.node)
            if not held and await self._write_cancelled(run, record, revision, group, job):
                return True
            await self.broker.clock.sleep(0.1)

    async def _write_cancelled(
        self,
        run: str,
        record: RunRecord | None,
        revision: int,
        group: str,
        job: str,
        why: str = "cancelled",
    ) -> bool:
        ended = runs.cancelled(record, run, group, job, now=self.broker.server_now(), why=why)
        try:
            await self.runs.put(
                run, runs.encode(ended), expected=revision, ttl=self.records.keyed_ttl_seconds
            )
        except errors.Conflict:
            return False
        # Only what is parked for this record: an operator may have sent the run again by now.
        names = self.broker.names
        for message in (ended.message, ended.message + 1):
            await self.topology.purge(names.jobs, names.later(group, job, run, message))
        return True

    async def _ask_holder(self, run: str) -> bool:
        try:
            answer = await self.broker.ask(self.broker.names.cancel(run), timeout=1)
        except _UNSURE:
            return False
        return answer.body == b"cancelling"

    async def _ended_cancelled(self, run: str) -> bool:
        try:
            record = await self.wait(run, 0, CANCEL_SECONDS)
        except TimeoutError:
            raise errors.RunError(
                f"run {run} was asked to stop but is still running: check again with status()",
                run=run,
            ) from None
        return record.state == "cancelled"

    async def _alive(self, node: str) -> bool:
        bucket = Bucket(self.broker, self.broker.names.nodes)
        entry = await bucket.get(node)
        if entry is None:
            return False
        record = bucket.read(nodes.decode, entry)
        return record is None or record.alive  # an unreadable node keeps what it holds

    # ---- events

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
