"""Jobs: how many runs wait, are in flight, delayed and dead; pausing and purging.

A job is known once a worker has served it (its consumers exist) or something was sent to it.
`pause` stops the server from delivering to the job's queue and its events; what is running
continues. The pause is set on the consumers and also stored separately, so that a consumer that is
created again starts paused.

`purge` removes runs that wait or are delayed, without losing one that has started or leaving a
record behind. It pauses deliveries first, so that no run is delivered meanwhile. A run that has
been tried before is cancelled by compare-and-swap before its message is removed: a crash in between
leaves a message that the next worker drops, never a record that waits forever. Only messages that
existed at the start are removed; events stay, because all subscribed jobs share them. A purged key
still counts as a repeat until the server's deduplication window has passed.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator, MutableSequence, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

import msgspec

from holdfast.broker import Bucket
from holdfast.client import Client, Request
from holdfast.clock import rfc3339
from holdfast.errors import (
    BrokerError,
    Conflict,
    InvalidInput,
    InvalidPayload,
    NotFound,
    PermissionDenied,
    UnknownJob,
)
from holdfast.model import run as runs
from holdfast.names import (
    DEFAULT_GROUP,
    QUEUES,
    consumer,
    keyed_run,
    parse_consumer,
    parse_pause_key,
    pause_key,
)
from holdfast.payload.misfit import ignored, misfit
from holdfast.payload.published import LABEL, Published, key_in, read_label
from holdfast.status.finding import Finder
from holdfast.status.messages import delete, next_of, oldest, subject_counts

PAUSE_SECONDS: Final = 600.0
"""Longer than a purge takes; a purge that dies blocks the job for at most this long."""
_CHUNK: Final = 100
"""Requests in flight at once: enough to hide the round trip without flooding the server."""


class Purger:
    """Removes waiting and delayed runs, one job at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._broker = client.broker
        self._names = client.broker.names
        self._finder = Finder(client)

    async def waiting(self, group: str, job: str) -> int:
        """Remove the runs waiting in a job's queues; returns how many."""
        removed = 0
        for queue in ("", *QUEUES):
            subject = self._names.job(group, job, queue)
            async with self._paused(consumer(group, job, queue=queue)) as info:
                start = int(info["delivered"]["stream_seq"]) + 1 if info else 1
                alone = info is None or not info.get("num_ack_pending")
                removed += await self._remove(subject, start, whole=alone)
        return removed

    async def parked(self, group: str, job: str) -> int:
        """Remove delayed runs; returns how many."""
        return await self._remove(self._names.later(group, job, "*", "*"), 1, whole=True)

    async def _remove(self, subject: str, start: int, *, whole: bool) -> int:
        """Cancel records and remove messages; with `whole`, purge the subject in one request."""
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
        """End the record of a waiting run along with its message; leave any other record alone."""
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
            return  # it has just changed
        await self._client.history.try_append(run, ended)

    @asynccontextmanager
    async def _paused(self, name: str) -> AsyncIterator[dict[str, Any] | None]:
        """Pause a queue's consumer, and yield its state while nothing is delivered.

        The pause expires, so that a purge that dies blocks the job only for a while.
        """
        topology, stream = self._client.topology, self._names.jobs
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


Which = Literal["waiting", "parked", "all"]


class Subscription(msgspec.Struct, frozen=True):
    """A job's subscription to an event."""

    event: str
    waiting: int
    in_flight: int
    paused: bool


class JobInfo(msgspec.Struct, frozen=True):
    """One job and its numbers."""

    group: str
    job: str
    waiting: int = 0
    """Runs and events not yet delivered to a worker."""
    in_flight: int = 0
    """Delivered and not acknowledged: running, or waiting out a short retry."""
    parked: int = 0
    """Not due yet: delayed runs and long retries."""
    delayed: int = 0
    """Those of the delayed ones that wait for their first attempt."""
    dead: int = 0
    paused: bool = False
    served: bool = False
    """Whether a worker has ever served it."""
    oldest_seconds: float | None = None
    """How long the oldest waiting run has waited."""
    events: tuple[Subscription, ...] = ()


class Purged(msgspec.Struct, frozen=True):
    """How many runs a purge removed."""

    group: str
    job: str
    waiting: int = 0
    parked: int = 0


@dataclass(frozen=True, slots=True)
class _Consumer:
    stream: str
    name: str
    group: str
    job: str
    event: str
    info: dict[str, Any]

    @property
    def subject(self) -> str:
        return str(self.info["config"].get("filter_subject", ""))

    @property
    def waiting(self) -> int:
        return int(self.info.get("num_pending", 0))

    @property
    def in_flight(self) -> int:
        return int(self.info.get("num_ack_pending", 0))

    @property
    def paused(self) -> bool:
        return bool(self.info.get("paused"))

    @property
    def delivered(self) -> int:
        return int(self.info["delivered"]["stream_seq"])


@dataclass(frozen=True, slots=True)
class _Counts:
    """Messages by group and job."""

    waiting: dict[tuple[str, str], int]
    """In queues that no worker has served yet."""
    parked: dict[tuple[str, str], int]
    delayed: dict[tuple[str, str], int]
    dead: dict[tuple[str, str], int]
    paused: set[tuple[str, str]]
    """Jobs recorded as paused."""


class Jobs:
    """The jobs of one namespace."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._broker = client.broker
        self._names = client.broker.names
        self._pauses = Bucket(client.broker, client.broker.names.schedules)

    # ---- reading

    async def list(self, job: str = "", group: str = "") -> Sequence[JobInfo]:
        """Every known job, or those with a name or in a group."""
        consumers = await self._consumers()
        counts = await self._counts({c.subject for c in consumers})
        known = {(c.group, c.job) for c in consumers} | counts.paused
        known |= counts.waiting.keys() | counts.parked.keys() | counts.dead.keys()
        return [
            await self._info(g, j, consumers, counts)
            for g, j in sorted(known)
            if (not group or g == group) and (not job or j == job)
        ]

    async def _info(
        self, group: str, job: str, consumers: Sequence[_Consumer], counts: _Counts
    ) -> JobInfo:
        mine = [c for c in consumers if (c.group, c.job) == (group, job)]
        queues = [c for c in mine if not c.event]
        events = tuple(
            Subscription(c.event, c.waiting, c.in_flight, c.paused) for c in mine if c.event
        )
        waiting = sum(c.waiting for c in queues) + counts.waiting.get((group, job), 0)
        return JobInfo(
            group,
            job,
            waiting + sum(e.waiting for e in events),
            sum(c.in_flight for c in mine),
            counts.parked.get((group, job), 0),
            counts.delayed.get((group, job), 0),
            counts.dead.get((group, job), 0),
            all(c.paused for c in mine) if mine else (group, job) in counts.paused,
            bool(mine),
            await self._oldest(group, job, queues) if waiting else None,
            events,
        )

    async def _oldest(self, group: str, job: str, queues: Sequence[_Consumer]) -> float | None:
        starts = {c.subject: c.delivered + 1 for c in queues if c.waiting}
        if not starts:
            starts = dict.fromkeys(self._names.queues(group, job), 1)
        found = [
            await next_of(self._broker, self._names.jobs, subject, start)
            for subject, start in starts.items()
        ]
        stored = [kept.stored for kept in found if kept]
        return max(0.0, round(self._broker.server_now() - min(stored), 3)) if stored else None

    async def _consumers(self) -> Sequence[_Consumer]:
        found = []
        for stream in (self._names.jobs, self._names.events):
            for info in await self._client.topology.consumers(stream):
                name = info.get("name", "")
                where = parse_consumer(name)
                if where:
                    subject = info["config"].get("filter_subject", "")
                    event = self._names.parse_event(subject) or ""
                    found.append(_Consumer(stream, name, *where, event, info))
        return found

    async def _counts(self, served: Set[str]) -> _Counts:
        names = self._names
        queued = await subject_counts(self._broker, names.jobs, *names.queues())
        later = await subject_counts(self._broker, names.jobs, names.later("*", "*", "*", "*"))
        dead = await subject_counts(self._broker, names.dead, names.dead_letter("*", "*"))
        return _Counts(
            _by_job({s: names.parse_job(s) for s in queued if s not in served}, queued),
            _by_job({s: (names.parse_later(s) or ())[:2] or None for s in later}, later),
            _by_job({s: names.parse_delayed(s) for s in later}, later),
            _by_job({s: names.parse_dead(s) for s in dead}, dead),
            {
                where
                async for e in self._pauses.entries("pause")
                if (where := parse_pause_key(e.key))
            },
        )

    async def published(self, job: str, group: str) -> Published | None:
        """What a worker has published about a job's payload; None if none has."""
        try:
            info = await self._broker.api(
                f"CONSUMER.INFO.{self._names.jobs}.{consumer(group, job)}"
            )
        except (NotFound, PermissionDenied):
            return None
        return read_label((info["config"].get("metadata") or {}).get(LABEL))

    async def parameters(self) -> dict[str, tuple[str, ...] | None]:
        """The parameters of every published job, by name; None where groups differ."""
        found: dict[str, tuple[str, ...] | None] = {}
        for info in await self._client.topology.consumers(self._names.jobs):
            where = parse_consumer(info.get("name", ""))
            label = read_label((info["config"].get("metadata") or {}).get(LABEL))
            if where and label:
                own = label.parameters
                found[where[1]] = own if found.get(where[1], own) == own else None
        return found

    async def check(self, job: str, group: str, body: bytes) -> Sequence[str]:
        """Refuse a payload that no worker of the job would accept; returns remarks on members that
        the job would ignore."""
        known = await self.published(job, group)
        if known and (wrong := misfit(known, body)):
            raise InvalidPayload(f"{wrong} (job {job}); nothing was sent")
        return ignored(known, body) if known else []

    async def check_default_group(self, job: str) -> None:
        """Refuse a send that names no group if workers serve the job in other groups only."""
        try:
            groups = _groups_of(job, await self._consumers())
        except BrokerError:  # nothing was sent here yet, or no permission to look
            return
        if groups and DEFAULT_GROUP not in groups:
            raise InvalidInput(
                f"job {job} is served in group {', '.join(groups)} and not in {DEFAULT_GROUP}: "
                "name the group; nothing was sent"
            )

    async def keyed(self, request: Request) -> Request:
        """The request under the key that its job computes, as far as workers have published it.

        `InvalidInput` if it is to replace a run, or to fail if there is one, and has no key.
        """
        if request.keyed:
            return request
        known = await self.published(request.spec.name, request.group)
        key = key_in(known, request.body) if known and known.key else ""
        if not key and request.on_duplicate != "return":
            raise InvalidInput(f"on_duplicate={request.on_duplicate!r} needs a key")
        if not key:
            return request
        run = keyed_run(request.group, request.spec.name, key)
        return msgspec.structs.replace(request, run=run, keyed=True)

    async def computes_key(self, request: Request) -> bool:
        """Whether the worker will give a request a key that only the job can compute."""
        if request.keyed:
            return False
        known = await self.published(request.spec.name, request.group)
        return bool(known and known.key) and not (known and key_in(known, request.body))

    async def unserved(self, job: str, group: str) -> str:
        """A hint for a sender if no worker has ever served the job; otherwise empty.

        Sending to it is no error: its worker may be about to start.
        """
        try:
            return await self._unserved(job, group)
        except BrokerError:
            return ""  # the run is stored: failing to give a hint is no error

    async def _unserved(self, job: str, group: str) -> str:
        try:
            await self._broker.api(f"CONSUMER.INFO.{self._names.jobs}.{consumer(group, job)}")
            return ""
        except NotFound:
            served = await self._consumers()
        groups = _groups_of(job, served)
        if group in groups:
            return ""
        near = difflib.get_close_matches(job, {one.job for one in served}, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        elsewhere = f" (it is served in group {', '.join(groups)})" if groups else hint
        return (
            f"no worker has ever served job {job} of group {group}{elsewhere}: its runs wait until "
            "one does; check the name, or start that worker"
        )

    # ---- acting

    async def pause(self, job: str = "", group: str = "") -> Sequence[JobInfo]:
        """Stop deliveries of a job, or of all jobs of a group."""
        return await self._switch("pause", job, group)

    async def resume(self, job: str = "", group: str = "") -> Sequence[JobInfo]:
        """Resume deliveries."""
        return await self._switch("resume", job, group)

    async def _switch(
        self, verb: Literal["pause", "resume"], job: str, group: str
    ) -> Sequence[JobInfo]:
        targets = set(await self.targets(job, group))
        for target in targets:  # the record first, so that consumers created meanwhile start paused
            await self._write_down(verb, *target)
        switch = self._client.topology.pause if verb == "pause" else self._client.topology.resume
        for one in await self._consumers():
            if (one.group, one.job) in targets:
                await switch(one.stream, one.name)
        return [i for i in await self.list(job, group) if (i.group, i.job) in targets]

    async def pause_again(self, paused: Set[tuple[str, str]]) -> None:
        """Pause those consumers of these jobs that are not paused.

        Whoever resumed a job removed its record before its consumers: if the record is gone after
        our pause, the job was resumed meanwhile, and would stay paused for ever.
        """
        for one in await self._consumers():
            if (one.group, one.job) in paused and not one.paused:
                await self._client.topology.pause(one.stream, one.name)
                if await self._pauses.get(pause_key(one.group, one.job)) is None:
                    await self._client.topology.resume(one.stream, one.name)

    async def _write_down(self, verb: Literal["pause", "resume"], group: str, job: str) -> None:
        key = pause_key(group, job)
        if verb == "resume":
            await self._pauses.delete(key)
            return
        record = {"since": round(self._broker.server_now(), 3)}
        await self._pauses.put(key, msgspec.json.encode(record), expected=None)

    async def purge(
        self,
        job: str = "",
        group: str = "",
        which: Which = "all",
        *,
        done: MutableSequence[Purged] | None = None,
    ) -> Sequence[Purged]:
        """Remove runs that wait in the queue or are delayed; returns how many of each.

        `done` is filled during the purge, so an interrupted caller knows how far it got.
        """
        purger = Purger(self._client)
        done = [] if done is None else done
        for g, j in await self.targets(job, group):
            waiting = await purger.waiting(g, j) if which != "parked" else 0
            parked = await purger.parked(g, j) if which != "waiting" else 0
            done.append(Purged(g, j, waiting, parked))
        return done

    async def targets(self, job: str, group: str) -> Sequence[tuple[str, str]]:
        """The jobs selected; unknown and ambiguous ones are refused."""
        return [(info.group, info.job) for info in await self.meant(job, group)]

    async def meant(self, job: str, group: str) -> Sequence[JobInfo]:
        """The jobs selected, with their counts."""
        if not job and not group:
            raise InvalidInput("name a job, or a group for all of its jobs")
        every = await self.list()
        known = [(i.group, i.job) for i in every]
        targets = [k for k in known if (not job or k[1] == job) and (not group or k[0] == group)]
        if not targets:
            what = f"job {job!r}" + (f" in group {group!r}" if group else "")
            listed = ", ".join(f"{g}/{j}" for g, j in known) or "none"
            raise UnknownJob(
                f"there is no {what if job else f'group {group!r}'}: known are {listed}"
            )
        if job and len(targets) > 1:
            groups = ", ".join(g for g, _ in targets)
            raise InvalidInput(f"job {job!r} is in several groups ({groups}): say which")
        return [info for info in every if (info.group, info.job) in targets]


def check_which(text: str) -> Which:
    """Parse which runs to purge."""
    for which in get_args(Which):
        if text == which:
            return cast(Which, which)
    raise InvalidInput(f"{text!r} is not one of {', '.join(get_args(Which))}")


def _groups_of(job: str, served: Sequence[_Consumer]) -> list[str]:
    return sorted({one.group for one in served if one.job == job})


def _by_job(where: dict[str, Any], counts: dict[str, int]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for subject, home in where.items():
        if home:
            found[tuple(home)] = found.get(tuple(home), 0) + counts[subject]
    return found
