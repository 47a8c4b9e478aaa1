"""Runs in memory: the newest ends, and records that the server's republished writes keep current.

For a process that lists runs often, as the web does: a filter that matches one run in 100,000 is
answered at once and completely. It starts with the first list, loads in the background, and is used
once complete; until then, and in every other process, lists are read from the server.

Advisory only: never a basis for a decision. A record leaves when its TTL expires, or soon after its
run has ended: what has ended is in the history, of which `EndedIndex` holds the newest lines. Each
holds `MOST`; older ones are read from the server. After a lost connection the records are loaded
again, because changes may have been missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.broker import Broker
from holdfast.broker.kv import direct_page, parse_time
from holdfast.broker.wire import Headers, parse_headers
from holdfast.client import Client
from holdfast.errors import BrokerError
from holdfast.names import H_KV_OPERATION, H_MARKER, H_TTL, kv_key, kv_subject
from holdfast.ownership.history import MOST_LINES
from holdfast.status.finding import read_record
from holdfast.status.listing import RunFilter, RunInfo, of_record
from holdfast.status.messages import newest

log = logging.getLogger("holdfast.status")

MOST: Final = 100_000
"""Runs kept by each index: about 50 MB, so that both fit into what a web process may use."""
MOST_ERRORS: Final = 20_000_000
"""Characters of errors kept in all: if all runs fail differently, each error has 2,000."""
PAGE: Final = 200
"""Records decoded in one go: bounds how long a concurrent request waits."""
SWEEP_SECONDS: Final = 30.0
"""How often expired records are removed; until then reads skip them."""
AGAIN_SECONDS: Final = 2.0
"""Pause before loading again after a failure: pages fall back to the server meanwhile."""
FILED_SECONDS: Final = 30.0
"""How long the record of an ended run is kept here; then it is in the history, which has its own
index."""
FOLLOW_SECONDS: Final = 1.0
"""How often new lines of the history are read; until then a run is listed by its record."""
REST_SECONDS: Final = 0.005
"""The shortest pause between two pages of loading, so that requests are answered meanwhile."""
_UNITS: Final = (("ms", 0.001), ("h", 3600.0), ("m", 60.0), ("s", 1.0))


class Known(NamedTuple):
    """A record in the index."""

    sequence: int
    info: RunInfo
    expires: float


class RunIndex:
    """The newest records of runs; `complete` says whether it may be used."""

    def __init__(self, client: Client, most: int = MOST) -> None:
        self.complete = False
        self.floor = 0
        """Live records below this sequence were left out; 0 if none were."""
        self._client = client
        self._broker = client.broker
        self._most = most
        self._known: dict[str, Known] = {}
        """By run, in the order of their last write."""
        self._swept = -math.inf
        """When expired records were last removed to make room."""
        self._fresh: dict[str, Known | None] = {}
        """Changes heard while loading; None for a removed record."""
        self._task: asyncio.Task[None] | None = None
        self._subscription: Any = None
        self._forget: Callable[[], None] = lambda: None
        self._stale = asyncio.Event()

    def __len__(self) -> int:
        return len(self._known)

    # ---- life

    def start(self) -> None:
        """Start loading, once; returns at once."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="holdfast-run-index")

    async def close(self) -> None:
        self.complete = False
        self._forget()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._subscription is not None:
            await self._broker.unsubscribe(self._subscription)

    async def _run(self) -> None:
        self._forget = self._broker.on_reconnect(self._stale.set)
        while True:
            try:
                await self._load()
                await self._keep()
            except BrokerError as error:
                log.debug("the index of runs is not complete: %s", error)
                await self._broker.clock.sleep(AGAIN_SECONDS)
            self.complete = False

    async def _load(self) -> None:
        """Subscribe first, then read, so that concurrent changes are heard; those win."""
        self._stale.clear()
        self._known, self._fresh, self.floor = {}, {}, 0
        if self._subscription is None:
            names = self._broker.names
            subject = names.changed(names.runs, ">")
            self._subscription = await self._broker.listen(subject, self._on_change)
            await self._broker.flush()
        await self._read_all()
        fresh, self._fresh = self._fresh, {}
        for run, known in fresh.items():
            old = self._known.get(run)
            if known is None or old is None or known.sequence >= old.sequence:
                self._put(run, known)
        self.complete = not self._stale.is_set()

    async def _read_all(self) -> None:
        bucket = self._client.runs
        subject, start, more = kv_subject(bucket.name, ">"), 1, True
        while more:
            begun = self._broker.clock.monotonic()
            page = await direct_page(self._broker, bucket.stream, subject, start, PAGE)
            for message in page.messages:
                run = kv_key(bucket.name, message.headers["Nats-Subject"])
                self._put(run, _known(self._broker, run, message.body, message.headers))
            start, more = page.last + 1, page.more
            # Requests go first: loading takes at most half of the time.
            await asyncio.sleep(max(REST_SECONDS, self._broker.clock.monotonic() - begun))

    async def _keep(self) -> None:
        """Stay current until something may have been missed."""
        while not self._stale.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_SECONDS):
                    await self._stale.wait()
            self._sweep()

    def _sweep(self) -> None:
        now = self._broker.server_now()
        for run in [run for run, known in self._known.items() if known.expires < now]:
            del self._known[run]

    # ---- writing

    def _on_change(self, to: bytes, _: bytes, body: bytes, raw: bytes | None) -> None:
        names = self._broker.names
        run = to.decode()[len(names.changed(names.runs, "")) :]
        known = _known(self._broker, run, body, parse_headers(raw))
        if self.complete:
            self._put(run, known)
        else:
            self._fresh.pop(run, None)
            self._fresh[run] = known

    def _put(self, run: str, known: Known | None) -> None:
        self._known.pop(run, None)
        if known is None or known.expires < self._broker.server_now():
            return
        self._known[run] = known
        now = self._broker.clock.monotonic()
        if len(self._known) > self._most and now - self._swept > FOLLOW_SECONDS:
            self._swept = now
            self._sweep()  # those are in the history, and leave no gap in this index
        if len(self._known) > self._most:
            oldest = next(iter(self._known))
            self.floor = max(self.floor, self._known.pop(oldest).sequence + 1)

    # ---- reading

    def __contains__(self, run: str) -> bool:
        known = self._known.get(run)
        return known is not None and known.expires >= self._broker.server_now()

    def states(self) -> Counter[tuple[str, str, str]] | None:
        """How many runs have not ended, by group, job and state; None while that is not known."""
        if not self.complete or self.floor:
            return None
        return Counter(
            (info.group, info.job, info.state)
            for _, info, _ in self._known.values()
            if not info.ended
        )

    def select(
        self, wanted: RunFilter, limit: int, before: int = 0
    ) -> tuple[list[tuple[int, RunInfo]], int]:
        """The newest matching records before a sequence (0: from the end), and how many were read.

        Fewer than `limit` means that the index has no more.
        """
        now, below, matches = self._broker.server_now(), before or math.inf, wanted.predicate()
        found: list[tuple[int, RunInfo]] = []
        looked = 0
        for sequence, info, expires in reversed(self._known.values()):
            if sequence >= below or expires < now:
                continue
            if info.updated < wanted.since:
                break
            looked += 1
            if matches(info):
                found.append((sequence, info))
                if len(found) >= limit:
                    break
        return found, looked


class EndedIndex:
    """The newest lines of the history, for a process that lists runs often.

    Bounded by `most` lines; older ones are read from the server. It follows the stream by reading
    what is new every second: a run that has just ended is listed by its record until then.
    """

    def __init__(self, client: Client, most: int = MOST) -> None:
        self.complete = False
        self.floor = 0
        """Lines before this position were left out; 0 if none were."""
        self._client = client
        self._broker = client.broker
        self._most = most
        self._lines: deque[tuple[int, RunInfo]] = deque()
        """Positions and runs, oldest first."""
        self._errors = 0
        """Characters of their errors."""
        self._next = 1
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._lines)

    def start(self) -> None:
        """Start loading, once; returns at once."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="holdfast-ended-index")

    async def close(self) -> None:
        self.complete = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                if not self.complete:
                    await self._load()
                await self._follow()
            except BrokerError as error:
                log.debug("the index of ended runs is not complete: %s", error)
            await self._broker.clock.sleep(FOLLOW_SECONDS)

    async def _load(self) -> None:
        """Read backwards until there are enough."""
        names = self._broker.names
        self._lines.clear()
        self.floor, self._next, self._errors = 0, 1, 0
        async for kept in newest(self._broker, names.history, names.ended("*", "*", "*")):
            self._next = max(self._next, kept.sequence + 1)
            found = self._infos(kept.sequence, kept.body, kept.stored)
            self._lines.extendleft(reversed(found))
            if self._is_full:
                self.floor = self._lines[0][0]
                break
            await asyncio.sleep(0)  # requests go first
        self.complete = True

    async def _follow(self) -> None:
        """Read what was appended since."""
        names, more = self._broker.names, True
        while more:
            page = await direct_page(
                self._broker, names.history, names.ended("*", "*", "*"), self._next, PAGE
            )
            for message in page.messages:
                sequence = int(message.headers["Nats-Sequence"])
                stored = parse_time(message.headers["Nats-Time-Stamp"])
                self._lines.extend(self._infos(sequence, message.body, stored))
                self._next = sequence + 1
            more = page.more
            while len(self._lines) > 1 and self._is_full:
                self._errors -= len(self._lines.popleft()[1].error)
                self.floor = self._lines[0][0]

    @property
    def _is_full(self) -> bool:
        return len(self._lines) > self._most or self._errors > MOST_ERRORS

    def _infos(self, sequence: int, body: bytes, stored: float) -> list[tuple[int, RunInfo]]:
        lines = enumerate(self._client.history.read(sequence, body))
        found = [
            (sequence * MOST_LINES + n, _shared(of_record(line.run, line.record, stored)))
            for n, line in lines
        ]
        self._errors += sum(len(info.error) for _, info in found)
        return found

    def select(
        self, wanted: RunFilter, limit: int, before: int = 0
    ) -> tuple[list[tuple[int, RunInfo]], int]:
        """The newest matching lines before a position (0: from the end), and how many were read."""
        below, matches = before or math.inf, wanted.predicate()
        found: list[tuple[int, RunInfo]] = []
        looked = 0
        for place, info in reversed(self._lines):
            if place >= below:
                continue
            if info.updated < wanted.since:
                break
            looked += 1
            if matches(info):
                found.append((place, info))
                if len(found) >= limit:
                    break
        return found, looked


def _known(broker: Broker, run: str, body: bytes, headers: Headers) -> Known | None:
    """The index entry of a write; None when it removes the record, or is not a run's."""
    if headers.get(H_KV_OPERATION) or H_MARKER in headers:
        return None
    record = read_record(broker, run, body)
    if record is None:
        return None
    stored = parse_time(headers["Nats-Time-Stamp"])
    expires = stored + _seconds(headers.get(H_TTL, ""))
    if record.terminal and expires < math.inf:
        expires = min(expires, stored + FILED_SECONDS)
    info = _shared(of_record(run, record, stored))
    return Known(int(headers["Nats-Sequence"]), info, expires)


def _seconds(ttl: str) -> float:
    """Parse a TTL header (`90000ms`, `1h`); infinity without one."""
    for unit, factor in _UNITS:
        if ttl.endswith(unit):
            with contextlib.suppress(ValueError):
                return float(ttl.removesuffix(unit)) * factor
    return math.inf


def _shared(info: RunInfo) -> RunInfo:
    """The same, with texts that many runs share stored once."""
    shared = {name: sys.intern(getattr(info, name)) for name in ("state", "group", "job", "node")}
    return msgspec.structs.replace(info, **shared)
