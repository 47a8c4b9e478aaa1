"""Stranded runs: their records wait for a message that does not exist.

A failed run waits for its next message; one whose holder is gone waits for its redelivery. If that
message is gone (the queue's stream was deleted or purged by hand, or a restored backup has a queue
older than its records), it will never be delivered. Coordinators look for such runs, `holdfast
doctor` shows them, and a restore repairs those it brought back.

A run is stranded when its record has not changed for a while, it has no parked message, and none in
its job's queue; then the record is read once more, from the leader, and must be unchanged. Messages
are stored before the record that expects them and removed after it has changed, so an existing
message is always seen. In a queue that is too long to search, a missing message proves nothing.

Repairs, in this order: an older message of the run that still exists carries it; a dead letter
being replayed, or the schedule of a slot, supplies the payload to send again; otherwise the payload
is gone, and the run ends as dead, with a letter that says so. Its key is then free: what is sent
under it afterwards is a new run. Each repair is a compare-and-swap: any number of processes may
repair, and a run that changed meanwhile is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from holdfast.broker import Received
from holdfast.broker.kv import Bucket, direct_page, parse_time
from holdfast.client import Client
from holdfast.errors import BrokerError, Conflict, HoldfastError, NotFound, Unreadable
from holdfast.model import run as runs
from holdfast.model import schedule as schedules
from holdfast.model.codec import MOST, whole_number
from holdfast.model.dead import dead_headers
from holdfast.model.message import next_message
from holdfast.model.run import RunRecord
from holdfast.names import (
    H_MSG_ID,
    is_event_run,
    keyed_run,
    kv_key,
    kv_subject,
    parse_consumer,
    parse_slot_run,
    schedule_key,
)
from holdfast.status.dead import DeadLetters
from holdfast.status.finding import Finder, replayed
from holdfast.status.messages import in_line, oldest, subject_counts
from holdfast.status.replaying import GONE, is_gone

log = logging.getLogger("holdfast.stranded")

QUIET_SECONDS: Final = 30.0
"""A record must be unchanged for this long: replicas that answer reads lag by far less."""
SEARCH_MOST: Final = 100_000
"""Most messages of one job's queue that are searched; more would take half a minute or longer."""

Job = tuple[str, str]
Alive = Callable[[str], Awaitable[bool]]


class WaitingRecord(NamedTuple):
    """A record that waits for a message, as a listing showed it."""

    record: RunRecord
    revision: int
    stored: float


class Case(NamedTuple):
    """A stranded run."""

    run: str
    record: RunRecord
    revision: int
    message: int
    """Its newest existing message, older than the one the record expects; 0 if none."""


class Stranded:
    """Finds and repairs stranded runs of one namespace.

    It remembers where it stopped listing, so that a later look reads only newer writes; waiting
    records are kept in memory.
    """

    def __init__(self, client: Client, alive: Alive) -> None:
        self._client = client
        self._broker = client.broker
        self._names = client.broker.names
        self._alive = alive
        self._created = ""
        self._next = 1
        self._waiting: dict[str, WaitingRecord] = {}
        self._known: dict[str, bool] = {}
        """Which holders are alive, as found by this search."""

    # ---- finding

    async def look(self, quiet: float | None = None) -> list[Case]:
        """Every stranded run whose record has not changed for `quiet` seconds."""
        await self._list()
        before = self._broker.server_now() - (QUIET_SECONDS if quiet is None else quiet)
        return await self._judge({r: w for r, w in self._waiting.items() if w.stored <= before})

    async def one(self, run: str) -> Case | None:
        """One run, if it is stranded."""
        entry = await self._client.runs.get(run)
        if entry is None or (record := runs.decode(entry.value)).terminal:
            return None
        if record.state == "parked":
            return None
        found = await self._judge({run: WaitingRecord(record, entry.revision, entry.stored)})
        return found[0] if found else None

    async def _judge(self, old: dict[str, WaitingRecord]) -> list[Case]:
        self._known.clear()
        if not old:
            return []
        parked = await self._parked()
        missing = {r: w for r, w in old.items() if parked.get(r, 0) < w.record.message}
        missing = {r: w for r, w in missing.items() if await self._is_ours(r, w.record)}
        queued = await self._queued(missing)
        cases = []
        for run, waiting in missing.items():
            job = waiting.record.group, waiting.record.job
            if job not in queued:
                continue  # not searched, so nothing is known
            found = max(queued[job].get(run, 0), parked.get(run, 0))
            if found < waiting.record.message and await self._stands(run, waiting):
                cases.append(Case(run, waiting.record, waiting.revision, found))
        return [c for c in cases if not (c.message and c.record.state == "running")]

    async def _list(self) -> None:
        """Read the records written since the last look."""
        bucket = self._client.runs
        info = await self._broker.api(f"STREAM.INFO.{bucket.stream}")
        if info.get("created", "") != self._created:
            self._created, self._next = info.get("created", ""), 1
            self._waiting.clear()
        subject = kv_subject(bucket.name, ">")
        while True:
            page = await direct_page(self._broker, bucket.stream, subject, self._next)
            for message in page.messages:
                self._take(kv_key(bucket.name, message.headers["Nats-Subject"]), message)
            self._next = max(self._next, page.last + 1)
            if not page.more:
                return

    def _take(self, run: str, message: Received) -> None:
        self._waiting.pop(run, None)
        if not runs.may_be_open(message.body):
            return
        try:
            record = runs.decode(message.body)
        except Unreadable:
            return
        if not record.terminal and record.state != "parked":  # a flow waits for no message
            revision = int(message.headers["Nats-Sequence"])
            stored = parse_time(message.headers["Nats-Time-Stamp"])
            self._waiting[run] = WaitingRecord(record, revision, stored)

    async def _is_ours(self, run: str, record: RunRecord) -> bool:
        """Whether the run waits for a message, and for one in its job's queue."""
        acked = record.once or record.body
        if record.state == "running" and (acked or await self._lives(record.node)):
            return False
        if record.message == 1 and is_event_run(record.alias or run):  # the event itself carries it
            return not await self._has_events(record.group, record.job)
        return True

    async def _lives(self, node: str) -> bool:
        if node not in self._known:
            self._known[node] = await self._alive(node)
        return self._known[node]

    async def _has_events(self, group: str, job: str) -> bool:
        for info in await self._client.topology.consumers(self._names.events):
            if parse_consumer(info.get("name", "")) == (group, job) and (
                info.get("num_pending") or info.get("num_ack_pending")
            ):
                return True
        return False

    async def _parked(self) -> dict[str, int]:
        """The newest parked message of each run, from the stream's leader."""
        found: dict[str, int] = {}
        pattern = self._names.later("*", "*", "*", "*")
        for subject in await subject_counts(self._broker, self._names.jobs, pattern):
            where = self._names.parse_later(subject)
            number = whole_number(subject.rpartition(".")[2].partition("-")[0], -1)
            if where and number >= 0:
                found[where[2]] = max(found.get(where[2], 0), number)
        for _, run in await in_line(self._broker):
            found[run] = MOST  # whatever its number, it is sent when its run has a place
        return found

    async def _queued(self, missing: dict[str, WaitingRecord]) -> dict[Job, dict[str, int]]:
        """For each job that could be searched, the newest queued message of each of these runs."""
        wanted: dict[Job, dict[str, str]] = {}
        for run, waiting in missing.items():
            ids = wanted.setdefault((waiting.record.group, waiting.record.job), {})
            ids[run] = ids[waiting.record.alias or run] = run
        found = {}
        for (group, job), ids in wanted.items():
            counts: dict[str, int] = {}
            for subject in self._names.queues(group, job):
                counts |= await subject_counts(self._broker, self._names.jobs, subject)
            count = sum(counts.values())
            if count > SEARCH_MOST:
                log.info("%d runs wait for %s: too many to search for stranded ones", count, job)
                continue
            found[group, job] = await self._search(counts, group, job, ids)
        return found

    async def _search(
        self, subjects: Iterable[str], group: str, job: str, ids: dict[str, str]
    ) -> dict[str, int]:
        found: dict[str, int] = {}
        for subject in subjects:
            async for kept in oldest(self._broker, self._names.jobs, subject):
                # The second: an id of two jobs.
                for id in (kept.run, keyed_run(group, job, kept.run)):
                    if run := ids.get(id):
                        found[run] = max(found.get(run, 0), kept.stamp)
        return found

    async def _stands(self, run: str, waiting: WaitingRecord) -> bool:
        """Whether the record, read from the leader, is still the one that was listed."""
        entry = await self._client.runs.get(run)
        return entry is not None and entry.revision == waiting.revision

    # ---- repairing

    async def repair(self, case: Case) -> str:
        """Repair a stranded run; returns what was done, or an empty text."""
        try:
            if case.record.flow:
                return await self._wake(case)
            if case.message:
                return await self._expect(case, case.message)
            if done := await self._send_again(case):
                return done
            return await self._end(case)
        except Conflict:
            return ""  # it has changed: not stranded, or repaired by another process

    async def _wake(self, case: Case) -> str:
        """A flow has its payload in its journal: any message that wakes it will do."""
        record = case.record
        where = record.group, record.job, case.run
        await self._client.journals.wake(*where, f"r{case.revision}")
        return "its flow was woken"

    async def _expect(self, case: Case, message: int) -> str:
        changed = msgspec.structs.replace(case.record, message=message)
        await self._write(case, changed, None)
        return f"message {message} still exists, and is expected now"

    async def _send_again(self, case: Case) -> str:
        record = case.record
        if replayed(record):
            letter = await Finder(self._client).letter(case.run, record.group, record.job)
            if letter is not None and not is_gone(letter):
                sent = await DeadLetters(self._client).replay([letter.sequence])
                if sent and sent[0].result == "replayed":
                    return "its dead letter was sent again"
        slot = parse_slot_run(case.run)
        if slot is None:
            return ""
        bucket = Bucket(self._broker, self._names.schedules)
        entry = await bucket.get(schedule_key(slot[0]))
        schedule = bucket.read(schedules.decode, entry) if entry else None
        if schedule is None or (schedule.group, schedule.job) != (record.group, record.job):
            return ""
        message = next_message(
            self._names,
            record.group,
            record.job,
            case.run,
            bytes(schedule.payload),
            schedule.headers,
            number=record.message + 1,  # the server may still remember the lost message's id
            failures=record.failures,
            created=record.created,
        )
        await self._client.store_surely(*message)
        return "the payload of its schedule was sent again"

    async def _end(self, case: Case) -> str:
        """End a run whose payload is gone with a dead letter that says why, and free its key."""
        record, now = case.record, self._broker.server_now()
        error = "its message is gone, and its payload with it: the queue was deleted or purged, or "
        error += "a backup was restored that did not have it. Enqueue it again"
        headers = dead_headers(
            run=case.run,
            message=record.message,
            subject=self._names.job(record.group, record.job),
            reason=GONE,
            error=error,
            now=now,
            failures=record.failures,
            crashes=record.crashes,
            attempts=record.attempts,
        )
        headers[H_MSG_ID] = f"{case.run}.{GONE}.{case.revision}"
        ended = msgspec.structs.replace(
            record, state="dead", error=error, ended=now, due=0.0, reply="", node="", vacant=True
        )
        letters = self._names.dead_letter(record.group, record.job)
        await self._client.store_surely(letters, b"", headers)
        await self._write(case, ended, self._client.records.keyed_ttl_seconds)
        await self._client.history.try_append(case.run, ended)
        self._client.telemetry.dead.labels(record.group, record.job, GONE).inc()
        return "its payload is gone: it ended as dead"

    async def _write(self, case: Case, record: RunRecord, ttl: float | None) -> None:
        body = runs.encode(msgspec.structs.replace(record, token=f"repair.{case.revision}"))
        await self._client.runs.put(case.run, body, expected=case.revision, ttl=ttl)


async def repair_all(stranded: Stranded, cases: list[Case]) -> dict[str, str]:
    """Repair them all; returns what was done with each that was still stranded."""
    done: dict[str, str] = {}
    for case in cases:
        try:
            if what := await stranded.repair(case):
                done[case.run] = what
                log.info("run %s was stranded: %s", case.run, what)
        except NotFound:
            raise
        except (BrokerError, HoldfastError) as error:
            log.warning("run %s is stranded and could not be repaired: %s", case.run, error)
    return done
