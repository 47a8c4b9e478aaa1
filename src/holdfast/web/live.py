"""What changes, told to every open page of this process through one shared feed.

The feed listens to what the server repeats of each write anyway (records of runs, schedules and
slots, the fleet, the ledger, dead letters); it makes no consumer. It says only *what kind of thing*
changed, at most twice a second whatever the load, and the page then fetches itself. So a page that
is open costs one idle connection, and a busy queue costs no more than a quiet one.

A notice has a number. Who reconnects names the last one it has heard and gets what it missed as
one notice; a number that this process does not know any more, or that another one gave, is answered
with `all`. Every few seconds the lag is measured and a `tick` is told, for what changes without a
write: queues that grow, heartbeats, uptimes. A comment is sent as a sign of life. A stream ends
after a minute and is resumed by the browser. `close` ends all streams at once: a server that waits
for its connections to end would otherwise wait for them.

The feed starts when the first page is opened: a process that nobody looks at listens to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from holdfast.broker.wire import parse_headers
from holdfast.client import Client
from holdfast.errors import BrokerError, Unreadable
from holdfast.names import kv_subject
from holdfast.status.figures import lags
from holdfast.status.messages import newest, stream_state
from holdfast.web.rates import CHANGE, KEPT_SECONDS, PAST, Rates

log = logging.getLogger("holdfast.web")

GATHER_SECONDS: Final = 0.5
TICK_SECONDS: Final = 3.0
ALIVE_SECONDS: Final = 15.0
STREAM_SECONDS: Final = 60.0
"""A stream ends after so long and is resumed: who was logged out meanwhile is asked again, and an
app that this is mounted in, which tells nobody that it stops, waits no longer than this."""
KEPT_NOTICES: Final = 500
STREAMS_MOST: Final = 500
STREAMS_EACH: Final = 25
"""Streams of one user: hidden pages hold none, so this is plenty, and twenty such users fit."""
READ_BACK_MOST: Final = 5_000
REST_SECONDS: Final = 0.02
SAMPLES_KEPT: Final = KEPT_SECONDS // 3

TOPICS: Final = ("runs", "jobs", "dead", "schedules", "nodes", "fleet")

Sample = tuple[float, int, int]
"""When, how many were waiting, how many in flight."""


class Feed:
    """One process's view of what happens."""

    def __init__(self, client: Client) -> None:
        self.rates = Rates()
        self.samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)
        self.viewers: Counter[str] = Counter()
        """How many streams are open, by the name of who looks."""
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
        """Begin to listen, once."""
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
            if subject not in self._subscriptions:  # a start that failed is tried again
                self._subscriptions[subject] = await self._broker.listen(subject, listener)
        self._broker.on_reconnect(lambda: self.changed("all"))

    def close(self) -> None:
        """End every stream; nothing is told any more."""
        self._closed.set()
        self._news.set()
        for task in self._tasks:
            task.cancel()

    async def aclose(self) -> None:
        """The same, and give back what the server holds for us."""
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subscription in self._subscriptions.values():
            await self._broker.unsubscribe(subscription)
        self._subscriptions = {}

    # ---- hearing

    def changed(self, *topics: str) -> None:
        """Something of that kind is not as it was."""
        self._topics.update(topics)

    def _on(self, *topics: str) -> Callable[[bytes, bytes, bytes, bytes | None], None]:
        def heard(_: bytes, __: bytes, ___: bytes, ____: bytes | None) -> None:
            self._topics.update(topics)

        return heard

    def _on_run(self, _: bytes, __: bytes, body: bytes, headers: bytes | None) -> None:
        self._topics.add("runs")
        if int(parse_headers(headers).get("Nats-Sequence", 0)) <= self._read_to or not body:
            return  # it is among the records that are read back, or a marker
        try:
            record = CHANGE.decode(body)
        except Unreadable:
            return  # the index of runs notes it
        if record.state != "running":
            at = record.ended or self._broker.server_now()
            self.rates.count((record.group, record.job), record.state, at)

    async def _read_back(self) -> None:
        """Count what ended before we listened, from the newest records."""
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
                with contextlib.suppress(Unreadable):  # the index of runs notes it
                    self.rates.read_back(PAST.decode(kept.body))
                if looked % 100 == 0:
                    await asyncio.sleep(REST_SECONDS)  # pages that wait go first
            else:
                reached = now - KEPT_SECONDS  # all there is
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
                log.debug("the lag is not known: %s", error)
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
            self.viewers += Counter()  # forget who has none

    def _event(self, topics: str) -> bytes:
        return f"event: changed\nid: {self._mark}.{self._number}\ndata: {topics}\n\n".encode()

    def _resume(self, after: str) -> tuple[int, bool]:
        """Where to go on, and whether something was missed that is not known any more."""
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
