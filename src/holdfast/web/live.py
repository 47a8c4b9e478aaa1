"""What changes: one feed per process tells every open page, and counts runs as they end.

The feed listens to what the server republishes of each write (records of runs, schedules and slots,
the fleet, the ledger, dead letters); it creates no consumer. It tells pages only *what kind of
thing* changed, at most twice a second whatever the load, and the page then fetches itself. So an
open page costs one idle connection, and a busy queue costs no more than a quiet one.

Notices are numbered. A browser that reconnects names the last one it got and receives what it
missed as one notice; a number this process does not know is answered with `all`. Every few seconds
the lag is measured and a `tick` is sent, for what changes without a write: growing queues,
heartbeats, uptimes. A comment keeps quiet streams alive. A stream ends after a minute and the
browser resumes it. `close` ends all streams at once; otherwise a server that waits for its
connections to end would wait for them.

`Rates` counts how runs ended in the last hour: by state when a run ends, and as `failed` when an
attempt failed and will be retried. What ended before the feed listened is counted once from the
newest records, so a restart leaves no gap unless more ended than is read back. Jobs that keep no
records (`delivery="at_least_once"`) are not counted.

The feed starts with the first page: a process without viewers subscribes to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from holdfast.broker.wire import parse_headers
from holdfast.client import Client
from holdfast.errors import BrokerError, Unreadable
from holdfast.model.codec import Codec, Instant
from holdfast.names import kv_subject
from holdfast.status.figures import lags
from holdfast.status.messages import newest, stream_state

log = logging.getLogger("holdfast.web")

GATHER_SECONDS: Final = 0.5
"""Changes within this time make one notice: pages refresh at most twice a second."""
TICK_SECONDS: Final = 3.0  # how stale values without a write may look
ALIVE_SECONDS: Final = 15.0
"""Proxies usually close a stream after 30 or 60 quiet seconds."""
STREAM_SECONDS: Final = 60.0
"""A stream ends after this time and is resumed, so a logout takes effect, and a host app that does
not announce its shutdown waits no longer than this."""
KEPT_NOTICES: Final = 500
"""About four minutes of notices; a browser that was away longer reloads everything."""
STREAMS_MOST: Final = 500  # bounds the connections that idle pages hold
STREAMS_EACH: Final = 25
"""Streams per user. Hidden pages hold none, so this is plenty, and twenty such users fit."""
READ_BACK_MOST: Final = 5_000
"""Records read back at the start; more would delay the first pages by seconds."""
REST_SECONDS: Final = 0.02
"""Pause after each hundred records read back, so that pages are answered first."""
STEP_SECONDS: Final = 5
"""Resolution of the counts: the finest chart has bars of five seconds."""
KEPT_SECONDS: Final = 3600
"""The longest range of the charts."""
SAMPLES_KEPT: Final = KEPT_SECONDS // 3  # one per tick

TOPICS: Final = ("runs", "jobs", "dead", "schedules", "nodes", "fleet")
OUTCOMES: Final = ("done", "failed", "dead", "lost", "cancelled")

JobKey = tuple[str, str]
"""A job's group and name."""
Sample = tuple[float, int, int]
"""When, how many were waiting, how many in flight."""


# ---- counts


class EndedAttempt(msgspec.Struct, frozen=True):
    """The part of an attempt that is counted."""

    ended: Instant = 0.0
    outcome: str | None = None


class EndedRun(msgspec.Struct, frozen=True):
    """The part of a run's record that is counted; the rest is not decoded."""

    state: str
    group: str
    job: str
    ended: Instant = 0.0
    attempts: tuple[EndedAttempt, ...] = ()


ENDED_RUN: Final = Codec[EndedRun](EndedRun, "a run's record")


@dataclass(slots=True)
class Bar:
    """How runs ended in one part of the time."""

    start: float
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.counts.total()


class Rates:
    """How many runs ended how in the last hour, by job."""

    def __init__(self) -> None:
        self._steps: dict[int, Counter[tuple[str, str, str]]] = {}
        self.since = 0.0
        """Counts are complete from this time on; 0 before the start."""

    def count(self, job: JobKey, outcome: str, at: float) -> None:
        """Count one; drops counts older than an hour."""
        step = int(at // STEP_SECONDS)
        counter = self._steps.get(step)
        if counter is None:
            counter = self._steps[step] = Counter()
            oldest = max(self._steps) - KEPT_SECONDS // STEP_SECONDS
            for old in [old for old in self._steps if old < oldest]:
                del self._steps[old]
        counter[(*job, outcome)] += 1

    def read_back(self, record: EndedRun) -> float:
        """Count a record as if each of its writes had been heard; returns its newest time."""
        job = (record.group, record.job)
        times = [record.ended]
        for attempt in record.attempts:
            if attempt.outcome in ("failed", "timeout", "crashed") and attempt.ended:
                times.append(attempt.ended)
                if attempt.ended != record.ended:
                    self.count(job, "failed", attempt.ended)
        if record.ended and record.state in OUTCOMES:
            self.count(job, record.state, record.ended)
        return max(times)

    def bars(self, now: float, seconds: int, parts: int) -> Sequence[Bar]:
        """The last `seconds` in equal parts, oldest first; the newest part is not over yet."""
        first, width = _start(now, seconds, parts)
        found = [Bar(float(first + n * width)) for n in range(parts)]
        for part, _, outcome, count in self._parted(first, width, parts):
            found[part].counts[outcome] += count
        return found

    def by_job(self, now: float, seconds: int, parts: int) -> dict[JobKey, list[int]]:
        """For each job, how many ended in each part of the last `seconds`."""
        first, width = _start(now, seconds, parts)
        found: dict[JobKey, list[int]] = {}
        for part, job, _, count in self._parted(first, width, parts):
            found.setdefault(job, [0] * parts)[part] += count
        return found

    def _parted(self, first: int, width: int, parts: int) -> Iterator[tuple[int, JobKey, str, int]]:
        for step, counter in self._steps.items():
            part = (step * STEP_SECONDS - first) // width
            if 0 <= part < parts:
                for (group, job, outcome), count in counter.items():
                    yield part, (group, job), outcome, count

    def totals(self, now: float, seconds: float) -> Counter[str]:
        """How many of each outcome in the last `seconds`."""
        found: Counter[str] = Counter()
        for step, counter in self._steps.items():
            if step * STEP_SECONDS >= now - seconds:
                for (_, _, outcome), count in counter.items():
                    found[outcome] += count
        return found


def _start(now: float, seconds: int, parts: int) -> tuple[int, int]:
    """Where the first part begins, and how long each is; parts begin at round times."""
    width = seconds // parts
    return int(now // width) * width - (parts - 1) * width, width


# ---- the feed


class Feed:
    """Listens for one process, and notifies its pages."""

    def __init__(self, client: Client) -> None:
        self.rates = Rates()
        self.samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)
        self.viewers: Counter[str] = Counter()
        """Open streams by user name."""
        self._client = client
        self._broker = client.broker
        self._mark = secrets.token_hex(4)
        self._number = 0
        self._topics: set[str] = set()
        self._told: deque[tuple[int, frozenset[str]]] = deque(maxlen=KEPT_NOTICES)
        self._news = asyncio.Event()
        self._closed = asyncio.Event()
        self._starting = asyncio.Lock()
        self._subscriptions: dict[str, Any] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._read_to = 0

    @property
    def streams(self) -> int:
        """How many streams are open."""
        return self.viewers.total()

    # ---- life

    async def start(self) -> None:
        """Start listening, once."""
        async with self._starting:
            if self._tasks or self._closed.is_set():
                return
            await self._listen()
            state = await stream_state(self._broker, self._client.runs.stream)
            self._read_to = int(state["last_seq"])
            self.rates.since = self._broker.server_now()
            self._tasks = [
                asyncio.create_task(self._tell(), name="holdfast-feed"),
                asyncio.create_task(self._tick(), name="holdfast-feed-tick"),
                asyncio.create_task(self._read_back(), name="holdfast-feed-past"),
            ]

    async def _listen(self) -> None:
        names = self._broker.names
        heard: dict[str, Callable[[bytes, bytes, bytes, bytes | None], None]] = {
            names.changed(names.runs, ">"): self._on_run,
            names.changed(names.schedules, ">"): self._on("schedules"),
            names.changed(names.slots, "slot.>"): self._on("schedules"),
            names.dead_letter("*", "*"): self._on("dead"),
            names.changed(names.fleet, ">"): self._on("fleet"),
            names.changed(names.returns, ">"): self._on("fleet"),
            names.log("node", "*"): self._on("nodes"),
            names.log("operator", "*"): self._on(*TOPICS),
        }
        for subject, listener in heard.items():
            if subject not in self._subscriptions:  # set already if an earlier start failed halfway
                self._subscriptions[subject] = await self._broker.listen(subject, listener)
        self._broker.on_reconnect(lambda: self.changed("all"))

    def close(self) -> None:
        """End every stream."""
        self._closed.set()
        self._news.set()
        for task in self._tasks:
            task.cancel()

    async def aclose(self) -> None:
        """End every stream, and unsubscribe."""
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subscription in self._subscriptions.values():
            await self._broker.unsubscribe(subscription)
        self._subscriptions = {}

    # ---- listening

    def changed(self, *topics: str) -> None:
        """Note that something of this kind changed."""
        self._topics.update(topics)

    def _on(self, *topics: str) -> Callable[[bytes, bytes, bytes, bytes | None], None]:
        def heard(_: bytes, __: bytes, ___: bytes, ____: bytes | None) -> None:
            self._topics.update(topics)

        return heard

    def _on_run(self, _: bytes, __: bytes, body: bytes, headers: bytes | None) -> None:
        self._topics.add("runs")
        if int(parse_headers(headers).get("Nats-Sequence", 0)) <= self._read_to or not body:
            return  # read back already, or a deletion marker
        try:
            record = ENDED_RUN.decode(body)
        except Unreadable:
            return  # the index of runs reports it
        if record.state != "running":
            at = record.ended or self._broker.server_now()
            self.rates.count((record.group, record.job), record.state, at)

    async def _read_back(self) -> None:
        """Count what ended before the feed listened, from the newest records."""
        bucket, looked = self._client.runs, 0
        now = self._broker.server_now()
        reached = now
        with contextlib.suppress(BrokerError):
            subject = kv_subject(bucket.name, ">")
            async for kept in newest(self._broker, bucket.stream, subject):
                if kept.sequence > self._read_to:
                    continue
                looked += 1
                if kept.stored < now - KEPT_SECONDS:
                    reached = now - KEPT_SECONDS
                    break
                if looked >= READ_BACK_MOST:
                    break
                reached = kept.stored
                with contextlib.suppress(Unreadable):  # the index of runs reports it
                    self.rates.read_back(ENDED_RUN.decode(kept.body))
                if looked % 100 == 0:
                    await asyncio.sleep(REST_SECONDS)  # let waiting pages go first
            else:
                reached = now - KEPT_SECONDS  # everything was read
        self.rates.since = min(self.rates.since, reached)
        self.changed("runs")

    # ---- telling

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(GATHER_SECONDS)
            if self._topics:
                self._number += 1
                self._told.append((self._number, frozenset(self._topics)))
                self._topics.clear()
                news, self._news = self._news, asyncio.Event()
                news.set()

    async def _tick(self) -> None:
        while True:
            try:
                found = await lags(self._client)
                waiting = sum(one.waiting for one in found)
                flying = sum(one.in_flight for one in found)
                self.samples.append((self._broker.server_now(), waiting, flying))
            except BrokerError as error:
                log.debug("cannot measure the lag: %s", error)
            self.changed("tick")
            await asyncio.sleep(TICK_SECONDS)

    async def stream(self, after: str = "", who: str = "") -> AsyncIterator[bytes]:
        """Server-sent events for one page, from the notice after `after`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STREAM_SECONDS
        seen, missed = self._resume(after)
        self.viewers[who] += 1
        try:
            yield b"retry: 1000\n\n"
            if missed:
                yield self._event("all")
            while not self._closed.is_set() and loop.time() < deadline:
                news = self._news
                topics = self._since(seen)
                if topics:
                    seen = self._number
                    yield self._event(" ".join(sorted(topics)))
                    continue
                try:
                    async with asyncio.timeout(ALIVE_SECONDS):
                        await news.wait()
                except TimeoutError:
                    yield b": alive\n\n"
        finally:
            self.viewers[who] -= 1
            self.viewers += Counter()  # drops users without streams

    def _event(self, topics: str) -> bytes:
        return f"event: changed\nid: {self._mark}.{self._number}\ndata: {topics}\n\n".encode()

    def _resume(self, after: str) -> tuple[int, bool]:
        """The number to continue from, and whether missed notices are no longer known."""
        if not after:
            return self._number, False
        mark, _, number = after.partition(".")
        oldest = self._told[0][0] if self._told else self._number + 1
        known = mark == self._mark and number.isascii() and number.isdigit() and len(number) < 16
        if not known or int(number) > self._number or int(number) + 1 < oldest:
            return self._number, True
        return int(number), False

    def _since(self, seen: int) -> frozenset[str]:
        fresh = [topics for number, topics in self._told if number > seen]
        return frozenset().union(*fresh)
