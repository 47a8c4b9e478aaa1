"""What changes: one feed per process tells every open page.

The feed listens to what the server republishes of each write (records of runs, schedules and slots,
the fleet, the ledger, dead letters); it creates no consumer. It tells pages only *what kind of
thing* changed, at most twice a second whatever the load, and the page then fetches itself. So an
open page costs one idle connection, and a busy queue costs no more than a quiet one.

Notices are numbered. A browser that reconnects names the last one it got and receives what it
missed as one notice; a number this process does not know is answered with `all`. Every few seconds
a `tick` is sent, for values that change without a write: growing queues, heartbeats, uptimes. A
comment keeps quiet streams alive. A stream ends after a minute and the browser resumes it. `close`
ends all streams at once; otherwise a server that waits for its connections to end would wait for
them.

The feed starts with the first page: a process without viewers subscribes to nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from holdfast.client import Client

log = logging.getLogger("holdfast.web")

GATHER_SECONDS: Final = 0.5
"""Changes within this time make one notice: pages refresh at most twice a second."""
TICK_SECONDS: Final = 3.0  # how stale such values may be
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
TOPICS: Final = ("runs", "jobs", "dead", "schedules", "nodes", "fleet")

# ---- the feed


class Feed:
    """Listens for one process, and notifies its pages."""

    def __init__(self, client: Client) -> None:
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
            self._tasks = [
                asyncio.create_task(self._tell(), name="holdfast-feed"),
                asyncio.create_task(self._tick(), name="holdfast-feed-tick"),
            ]

    async def _listen(self) -> None:
        names = self._broker.names
        heard: dict[str, Callable[[bytes, bytes, bytes, bytes | None], None]] = {
            names.changed(names.runs, ">"): self._on("runs"),
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
