"""Lists of runs, page by page: one implementation for the CLI, the API and the pages.

A run is its record; before its first attempt it has none and is only a message: `queued`, or
`delayed` until it is due. A list shows both, newest change first.

Each page costs the same, however many runs there are: it reads at most `LOOK` records and messages.
When fewer than requested match, it says how far it has read, and its cursor continues from there,
so a filter that matches one run in 100,000 is answered in parts instead of by one long scan.

A process that lists often has an index (`run_index`); then no record is read from the server and
all of them are searched. Each heartbeat names the runs that the node holds, so a filter for running
runs reads those first and finds one that started long ago at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.broker import Bucket
from holdfast.client import Client
from holdfast.errors import InvalidInput
from holdfast.model import node as nodes
from holdfast.model.message import cause_of
from holdfast.model.run import RunRecord
from holdfast.names import Names, check_name, encode, kv_key, kv_subject
from holdfast.status.finding import read_record
from holdfast.status.messages import Kept, newest

if TYPE_CHECKING:
    from holdfast.status.run_index import RunIndex

LOOK: Final = 2_000
"""Records and messages that one page reads: bounds its response time."""
HELD_MOST: Final = 1_000
"""Running runs looked up through node heartbeats: more than a page can show."""
_CHUNK: Final = 100
"""Reads in flight at once, when checking which messages have a record."""

STATES: Final = (
    "queued",
    "delayed",
    "running",
    "failed",
    "done",
    "cancelled",
    "dead",
    "lost",
)


class RunInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run in a list."""

    run: str
    state: str
    group: str
    job: str
    updated: float
    """When it last changed, by the server's clock."""
    created: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    due: float = 0.0
    """When a delayed run, or the next attempt of a failed one, is due."""
    attempts: int = 0
    failures: int = 0
    crashes: int = 0
    node: str = ""
    error: str = ""
    cause: str = ""


_EXACT: Final = ("job", "group", "state", "node")


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs to list; an empty member matches all."""

    job: str = ""
    group: str = ""
    state: str = ""
    node: str = ""
    prefix: str = ""
    """Prefix of the run's id or key."""
    since: float = 0.0

    def __post_init__(self) -> None:
        for name in ("job", "group"):
            if getattr(self, name):
                check_name(getattr(self, name), name)
        if self.state and self.state not in STATES:
            raise InvalidInput(f"{self.state!r} is not a state of a run: {', '.join(STATES)}")

    def matches(self, info: RunInfo) -> bool:
        return (
            (not self.job or info.job == self.job)
            and (not self.group or info.group == self.group)
            and (not self.state or info.state == self.state)
            and (not self.node or info.node == self.node)
            and (not self.prefix or _begins(self.prefix)(info))
            and info.updated >= self.since
        )

    def predicate(self) -> Callable[[RunInfo], bool]:
        """`matches`, compiled without the empty members: for large numbers of runs."""
        tests = [_equals(n, getattr(self, n)) for n in _EXACT if getattr(self, n)]
        if self.prefix:
            tests.append(_begins(self.prefix))
        if not tests:
            return lambda info: info.updated >= self.since
        return tests[0] if len(tests) == 1 and not self.since else self.matches


def _equals(name: str, value: str) -> Callable[[RunInfo], bool]:
    get = attrgetter(name)
    return lambda info: bool(get(info) == value)


def _begins(prefix: str) -> Callable[[RunInfo], bool]:
    """Match runs whose id or key starts with `prefix`."""
    key = f"/{encode(prefix)}"

    def begins(info: RunInfo) -> bool:
        run = info.run
        return run.startswith(prefix) or run.find(key, run.rfind("/")) >= 0

    return begins


# ---- pages


Found = tuple[RunInfo, int]
"""A run and its sequence in the stream where it was found."""


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """Where a page ended: records and messages before these positions are still to be read."""

    records: int = 0
    queued: int = 0
    delayed: int = 0

    def text(self) -> str:
        """Encode it for a URL."""
        return f"{self.records}-{self.queued}-{self.delayed}"

    @classmethod
    def read(cls, text: str) -> Cursor:
        """Decode a cursor; an empty text means the newest page."""
        parts = text.split("-") if text else ["0", "0", "0"]
        digits = all(p.isascii() and p.isdigit() and len(p) < 19 for p in parts)
        if len(parts) != 3 or not digits:
            raise InvalidInput("the place in the list is not readable: start from the newest page")
        return cls(*(int(part) for part in parts))


class RunPage(msgspec.Struct, frozen=True):
    """One page of runs, newest change first."""

    runs: list[RunInfo]
    older: str
    """The cursor of the next page; empty when there is none."""
    looked: int
    """How many records and messages were read."""
    back_to: float
    """The time of the oldest one read; 0 when everything was read."""
    places: dict[str, int] = {}
    """Where in the jobs stream the queued ones are: saves a search when one is opened."""


class _Walk:
    """One source, read backwards up to a bound."""

    def __init__(self, before: int) -> None:
        self.before = before
        self.found: list[Found] = []
        self.at = 0
        self.looked = 0
        self.oldest = 0.0
        self.ended = False

    def step(self, kept: Kept) -> None:
        self.at, self.oldest = kept.sequence, kept.stored
        self.looked += 1

    def next(self, taken: set[str]) -> int:
        """Where to continue: after the last one shown, or where reading stopped; 1 at the end."""
        left = [sequence for info, sequence in self.found if info.run not in taken]
        if left:
            return max(left) + 1
        return 1 if self.ended else self.at


class RunPages:
    """Reads runs page by page."""

    def __init__(self, client: Client, look: int = LOOK, index: RunIndex | None = None) -> None:
        self._client = client
        self._index = index if index is not None and index.complete else None
        self._broker = client.broker
        self._names = client.broker.names
        self._look = look

    async def page(self, wanted: RunFilter, limit: int = 50, cursor: str = "") -> RunPage:
        """The runs that match from a cursor on, at most `limit`."""
        start = Cursor.read(cursor)
        walks = [_Walk(start.records), _Walk(start.queued), _Walk(start.delayed)]
        asked = wanted.state == "running" and not cursor and self._index is None
        held = await self._held(wanted) if asked else []
        if wanted.state not in ("queued", "delayed"):
            await self._records(walks[0], wanted, limit)
        if wanted.state in ("", "queued") and not wanted.node:
            subject = self._names.job(wanted.group or "*", wanted.job or "*")
            await self._messages(walks[1], subject, wanted, limit)
        if wanted.state in ("", "delayed") and not wanted.node:
            subject = self._names.later(wanted.group or "*", wanted.job or "*", "*", "*")
            await self._messages(walks[2], subject, wanted, limit)
        return _merged(walks, held, limit)

    async def _records(self, walk: _Walk, wanted: RunFilter, limit: int) -> None:
        if self._index is not None and not self._indexed(self._index, walk, wanted, limit):
            return
        bucket = self._client.runs
        subject = kv_subject(bucket.name, ">")
        async for kept in newest(self._broker, bucket.stream, subject, walk.before):
            if self._enough(walk, kept, wanted, limit):
                return
            run = kv_key(bucket.name, kept.subject)
            record = read_record(self._broker, run, kept.body)
            if record:
                info = of_record(run, record, kept.stored)
                if wanted.matches(info):
                    walk.found.append((info, kept.sequence))
        walk.ended = True

    def _indexed(self, index: RunIndex, walk: _Walk, wanted: RunFilter, limit: int) -> bool:
        """Search the whole index; True when older records exist only on the server."""
        found, walk.looked = index.select(wanted, limit, walk.before)
        walk.found = [(info, sequence) for sequence, info in found]
        if len(found) >= limit:
            walk.at, walk.oldest = found[-1][0], found[-1][1].updated
            return False
        walk.ended = not index.floor
        walk.at = walk.before = min(walk.before or index.floor, index.floor)
        walk.looked = 0 if index.floor else walk.looked  # the server's records have their own bound
        return bool(index.floor)

    async def _messages(self, walk: _Walk, subject: str, wanted: RunFilter, limit: int) -> None:
        """Add runs that are only a message so far; runs with a record are listed by that."""
        chunk: list[Found] = []
        async for kept in newest(self._broker, self._names.jobs, subject, walk.before):
            if self._enough(walk, kept, wanted, limit):
                break
            info = of_message(kept, self._names)
            if info and wanted.matches(info):
                chunk.append((info, kept.sequence))
            if len(chunk) >= _CHUNK:
                walk.found += await self._without_record(chunk)
                chunk = []
        else:
            walk.ended = True
        walk.found += await self._without_record(chunk)

    def _enough(self, walk: _Walk, kept: Kept, wanted: RunFilter, limit: int) -> bool:
        """Whether to stop before this message; `since` stops the scan for good."""
        if kept.stored < wanted.since:
            walk.ended = True
            return True
        if walk.looked >= self._look or len(walk.found) >= limit:
            return True
        walk.step(kept)
        return False

    async def _without_record(self, found: list[Found]) -> list[Found]:
        if self._index is not None and not self._index.floor:
            return [one for one in found if one[0].run not in self._index]
        entries = await asyncio.gather(*(self._client.runs.get(info.run) for info, _ in found))
        return [one for one, entry in zip(found, entries, strict=True) if entry is None]

    async def _held(self, wanted: RunFilter) -> list[RunInfo]:
        """Running runs that the nodes report holding."""
        ids = [run async for run in self._held_ids(wanted)]
        entries = await asyncio.gather(*(self._client.runs.get(run) for run in ids[:HELD_MOST]))
        found = []
        for entry in entries:
            record = read_record(self._broker, entry.key, entry.value) if entry else None
            if entry and record:
                info = of_record(entry.key, record, entry.stored)
                found += [info] if wanted.matches(info) else []
        return found

    async def _held_ids(self, wanted: RunFilter) -> AsyncIterator[str]:
        async for _, record in Bucket(self._broker, self._names.nodes).records(nodes.decode):
            if record.alive and (not wanted.node or record.id == wanted.node):
                for held in record.held:
                    yield held.run


def _merged(walks: list[_Walk], held: list[RunInfo], limit: int) -> RunPage:
    known = {info.run: info for info in held}
    for walk in walks:
        known |= {info.run: info for info, _ in walk.found}
    runs = sorted(known.values(), key=lambda info: info.updated, reverse=True)[:limit]
    taken = {info.run for info in runs}
    ends = [walk.next(taken) for walk in walks]
    used = [walk for walk in walks if walk.looked or walk.ended]
    more = any(end != 1 for walk, end in zip(walks, ends, strict=True) if walk in used)
    cursor = Cursor(*(end or 1 for end in ends)).text() if more else ""
    looked = sum(walk.looked for walk in walks)
    back_to = max((walk.oldest for walk in used if not walk.ended), default=0.0) if more else 0.0
    places = {info.run: sequence for info, sequence in walks[1].found if info.run in taken}
    return RunPage(runs, cursor, looked, back_to, places)


# ---- entries of a list


def of_record(run: str, record: RunRecord, changed: float) -> RunInfo:
    """The list entry of a recorded run."""
    return RunInfo(
        run,
        record.state,
        record.group,
        record.job,
        changed,
        record.created,
        record.started,
        record.ended,
        record.due if record.state == "failed" else 0.0,
        len(record.attempts) + (record.state == "running"),
        record.failures,
        record.crashes,
        record.node if record.state == "running" else "",
        record.error,
        record.cause,
    )


def of_message(kept: Kept, names: Names) -> RunInfo | None:
    """The list entry of a run that is only a message so far."""
    where = names.parse_job(kept.subject) or names.parse_later(kept.subject)
    if where is None:
        return None
    return RunInfo(
        kept.run,
        "delayed" if kept.due else "queued",
        where[0],
        where[1],
        kept.stored,
        created=kept.stored,
        due=kept.due,
        cause=cause_of(kept.headers),
    )
