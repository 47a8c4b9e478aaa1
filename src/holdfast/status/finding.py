"""Finding a run by its id alone: its record, its message, its dead letter and its payload.

A record is one read; once it has expired, the history says how the run ended. A message is looked
up directly if the id leads to it (the subject of a delayed or parked one has the run, the id of one
without headers is its sequence); otherwise its queue is searched, up to `SEARCH_MOST` messages: the
job's queue for a keyed run, all queues for any other.

The payload travels in the run's message: it is in the stream while the run waits or is running, in
the dead letter once it was given up, in the record of a run that starts at most once, and in the
history of a run that has ended, unless its job keeps none there.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.errors import RunNotFound
from holdfast.model import run as runs
from holdfast.model.codec import whole_number
from holdfast.model.history import Ended
from holdfast.model.replay import MARK
from holdfast.model.run import RunRecord
from holdfast.names import DEFAULT_GROUP, H_OBJECT, H_SUBJECT, check_run
from holdfast.status.messages import Kept, by_sequence, last_of, newest, oldest, subject_counts

SEARCH_MOST: Final = 100_000
"""Messages searched for one run before it counts as not found: bounds the time of a lookup."""

FILING_SECONDS: Final = 2.0
"""How long after its end a run may still be missing in the history: its worker writes the line
right after the record."""

_SEQUENCE_RUN = re.compile(r"s(\d{1,18})-[0-9A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Carrier:
    """The message that carries a run: in its queue, delayed until it is due, or waiting for a
    place in a limit."""

    kept: Kept
    group: str
    job: str
    later: bool


@dataclass(frozen=True, slots=True)
class Found:
    """Everything known about where a run is."""

    run: str
    record: RunRecord | None
    revision: int
    carrier: Carrier | None
    letter: Kept | None
    group: str
    job: str
    ended: Ended | None = None
    """Its line in the history, if its record has expired."""


class Finder:
    """Looks up runs in one namespace."""

    def __init__(self, client: Client, search: int = SEARCH_MOST) -> None:
        self._client = client
        self._broker = client.broker
        self._names = client.broker.names
        self._search = search

    async def find(self, run: str, hint: int = 0) -> Found:
        """Find a run; raises `RunNotFound` when there is no trace of it.

        `hint`: its message's last known place in the jobs stream; saves a search if still right.
        """
        check_run(run)
        record, revision = await self.record(run)
        group, job = (record.group, record.job) if record else home_of(run)
        waits = record is None or record.state == "failed"
        first = record.alias if record and record.message == 1 else ""
        carrier = await self.carrier(first or run, group, job, hint) if waits else None
        if carrier is None and record is None and job:
            carrier = await self.carrier(run)  # the id only looked like a keyed run's
        if carrier:
            group, job = carrier.group, carrier.job
        letter = None
        if record is None or record.state in ("dead", "lost") or replayed(record):
            letter = await self.letter(run, *((group, job) if record or carrier else ()))
        if letter and not (record or carrier):
            group, job = self._names.parse_dead(letter.subject) or ("", "")
        ended = None
        if record is None and carrier is None:
            ended = await self._client.history.find(run)
        if ended:
            record, group, job = ended.record, ended.record.group, ended.record.job
        if record is None and carrier is None and letter is None:
            raise RunNotFound(
                f"no trace of run {run}: it ended longer ago than the history goes back, it was "
                "purged, or it belongs to another namespace",
                run=run,
            )
        return Found(run, record, revision, carrier, letter, group, job, ended)

    async def record(self, run: str) -> tuple[RunRecord | None, int]:
        """A run's record and its revision, read from the leader."""
        entry = await self._client.runs.get(run)
        record = self._client.runs.read(runs.decode, entry) if entry else None
        return record, entry.revision if entry else 0

    async def search(self, run: str) -> Carrier | None:
        """The newest message of a run, by the run's id alone."""
        group, job = home_of(run)
        found = await self.carrier(run, group, job)
        if found is None and job:
            found = await self.carrier(run)  # the id only looked like a keyed run's
        return found

    async def carrier(
        self, run: str, group: str = "", job: str = "", hint: int = 0
    ) -> Carrier | None:
        """The newest message that carries a run."""
        found = await self._later(run)
        if found is None:
            found = await self._queued(run, group, job, hint)
        return found

    async def _later(self, run: str) -> Carrier | None:
        stream = self._names.jobs
        pattern = self._names.later("*", "*", run, "*")
        subjects = await subject_counts(self._broker, stream, pattern)
        best: Carrier | None = None
        for subject in subjects:
            kept = await last_of(self._broker, stream, subject)
            where = self._names.parse_later(subject)
            if kept and where and (best is None or kept.stamp > best.kept.stamp):
                best = Carrier(kept, where[0], where[1], later=True)
        return best or await self._in_line(run) or await self._quiet(run)

    async def _quiet(self, run: str) -> Carrier | None:
        """The message of a run that waits until it is quiet; its subject names only the key."""
        stream, pattern = self._names.jobs, self._names.quiet("*", "*", "*")
        if not await subject_counts(self._broker, stream, pattern):
            return None
        async for kept in oldest(self._broker, stream, pattern):
            where = self._names.parse_later(kept.subject)
            if where and kept.run == run:
                return Carrier(kept, where[0], where[1], later=True)
        return None

    async def _in_line(self, run: str) -> Carrier | None:
        """The message of a run that waits for a place in a limit."""
        stream, pattern = self._names.jobs, self._names.line("*", "*", run)
        for subject in await subject_counts(self._broker, stream, pattern):
            kept = await last_of(self._broker, stream, subject)
            where = self._names.parse_job(kept.headers.get(H_SUBJECT, "")) if kept else None
            if kept and where:
                return Carrier(kept, where[0], where[1], later=True)
        return None

    async def _queued(self, run: str, group: str, job: str, hint: int) -> Carrier | None:
        best: Carrier | None = None
        async for kept in self._candidates(run, group, job, hint):
            where = self._names.parse_job(kept.subject)
            if where and kept.run == run and (best is None or kept.stamp >= best.kept.stamp):
                best = Carrier(kept, where[0], where[1], later=False)
        return best

    async def _candidates(self, run: str, group: str, job: str, hint: int) -> AsyncIterator[Kept]:
        stream = self._names.jobs
        numbered = _SEQUENCE_RUN.fullmatch(run)
        sequence = int(numbered[1]) if numbered else hint
        if sequence:
            kept = await by_sequence(self._broker, stream, sequence)
            if kept and kept.run == run:
                yield kept
                return
        looked = 0
        for subject in self._names.queues(group or "*", job or "*"):
            async for kept in oldest(self._broker, stream, subject):
                looked += 1
                if looked > self._search:
                    return
                yield kept

    async def letter(self, run: str, group: str = "", job: str = "") -> Kept | None:
        """The newest dead letter of a run."""
        looked = 0
        subject = self._names.dead_letter(group or "*", job or "*")
        async for kept in newest(self._broker, self._names.dead, subject):
            looked += 1
            if kept.run == run:
                return kept
            if looked > self._search:
                break
        return None


def home_of(run: str) -> tuple[str, str]:
    """Group and job encoded in a keyed run's id; empty for any other."""
    parts = run.split("/")
    if len(parts) == 2:
        return DEFAULT_GROUP, parts[0]
    if len(parts) == 3:
        return parts[0], parts[1]
    return "", ""


def replayed(record: RunRecord) -> bool:
    """Whether an operator sent it again and no worker has claimed it since."""
    return record.state == "failed" and record.token.startswith(MARK)


def read_record(broker: Broker, run: str, body: bytes) -> RunRecord | None:
    """A run's record; None if it cannot be read, which is logged."""
    return broker.unreadable.read(runs.decode, broker.names.runs, run, body)


_ACK = "$JS.ACK."


async def payload_of(client: Client, found: Found) -> tuple[bytes, dict[str, str]] | None:
    """A run's payload and the sender's headers; None when they are gone."""
    record = found.record
    if record and (record.body or record.body_object):
        name = record.body_object
        return (await client.objects.get(name) if name else record.body), {}
    kept = await _message(client, found)
    if kept is None:
        return await _filed(client, found)
    name = kept.headers.get(H_OBJECT, "")
    body = await client.objects.get(name) if name else kept.body
    return body, kept.user_headers


async def _filed(client: Client, found: Found) -> tuple[bytes, dict[str, str]] | None:
    """The payload that the history has of an ended run."""
    record = found.record
    if record is None or not record.terminal:
        return None
    line = found.ended
    if line is None:
        line = await client.history.line_of(found.run, record, FILING_SECONDS)
    return (line.payload, line.headers) if line and line.payload is not None else None


async def _message(client: Client, found: Found) -> Kept | None:
    if found.carrier:
        return found.carrier.kept
    if found.letter:
        return found.letter
    reply = found.record.reply if found.record else ""
    place = place_of(reply) if client.broker.names.takes_acks(reply) else None  # not any stream's
    return await by_sequence(client.broker, *place) if place else None


def place_of(reply: str) -> tuple[str, int] | None:
    """Stream and sequence of a message, from its ack subject.

    `$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>…`, or with domain and account in front.
    """
    if not reply.startswith(_ACK):
        return None
    parts = reply.removeprefix(_ACK).split(".")
    parts = parts[2:] if len(parts) > 8 else parts
    sequence = whole_number(parts[3]) if len(parts) >= 7 else 0
    return (parts[0], sequence) if sequence else None
