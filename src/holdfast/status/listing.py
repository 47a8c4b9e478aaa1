"""Lists of runs, page by page: one implementation for the CLI, the API and the pages.

A run is its record; before its first attempt it has none and is only a message: `queued`, or
`delayed` until it is due; after its end it is in the history, where its record's TTL does not
matter. A list shows all of them, newest change first, and each end of a run once: one that was sent
again after it had ended may have several.

Each page costs the same, however many runs there are: it reads at most `LOOK` records, messages and
lines of history. When fewer than requested match, it says how far it has read, and its cursor
continues from there, so a filter that matches one run in 100,000 is answered in parts instead of by
one long scan. As far as the history goes back, only the newest records are read: all other ended
runs are in the history, running ones are named by their node, and waiting ones have a message.

A process that lists often has an index (`run_index`); then no record is read from the server and
all of them are searched. Each heartbeat names the runs that the node holds, so a filter for running
runs reads those first and finds one that started long ago at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.broker import Bucket
from holdfast.broker.kv import parse_time
from holdfast.client import Client
from holdfast.errors import InvalidInput
from holdfast.model import node as nodes
from holdfast.model.message import cause_of
from holdfast.model.run import TERMINAL, RunRecord
from holdfast.names import H_RUN, H_SUBJECT, H_WAKE, Names, check_name, encode, kv_key, kv_subject
from holdfast.ownership.history import MOST_LINES
from holdfast.status.finding import read_record
from holdfast.status.messages import Kept, newest, stream_state, subject_counts
from holdfast.status.searching import member

if TYPE_CHECKING:
    from holdfast.status.run_index import EndedIndex, RunIndex

LOOK: Final = 2_000
"""Records and messages that one page reads: bounds its response time."""
HELD_MOST: Final = 1_000
"""Running runs looked up through node heartbeats: more than a page can show."""
_CHUNK: Final = 100
"""Reads in flight at once, when checking which messages have a record."""

STATES: Final = (
    "queued",
    "delayed",
    "waiting",
    "running",
    "failed",
    "parked",
    "done",
    "cancelled",
    "dead",
    "lost",
)
CANCELLABLE: Final = ("queued", "delayed", "waiting", "running", "failed", "parked")
"""The states in which a run can be cancelled."""
SENT_AGAIN: Final = ("failed", "dead", "lost")
"""The states of runs that an operator may send again in bulk."""


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
    progress: float = -1.0
    """How much of a running run is done, from 0 to 1; negative if it does not say."""
    limit: str = ""
    """The limit that a waiting run waits for."""


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
    search: str = ""
    """Part of the run's id, key, job or error, in any case; or `name=value`, a member of its
    payload or one of its headers."""
    until: float = 0.0
    """Changed no later than this."""
    cause: str = ""
    """The run that led to it."""
    seen: Callable[[str], str] = str
    """Masks an error for the reader: only what they may see is searched."""
    key: str = ""
    """Exactly this key."""

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
            and (not self.key or _has_key(self.key)(info))
            and info.updated >= self.since
            and (not self.until or info.updated <= self.until)
            and (not self.cause or info.cause == self.cause)
            and (not self.search or _contains(self.search, self.seen)(info))
        )

    def matches_sent(self, info: RunInfo, body: bytes | None, headers: Mapping[str, str]) -> bool:
        """The same for a run whose message is at hand."""
        if self.matches(info):
            return True
        named = member(self.search)
        return (
            named is not None
            and replace(self, search="").matches(info)
            and named.matches(body or b"", headers)
        )

    def predicate(self) -> Callable[[RunInfo], bool]:
        """`matches` compiled without the empty members, for large numbers of runs."""
        tests = [_equals(n, getattr(self, n)) for n in _EXACT if getattr(self, n)]
        if self.prefix:
            tests.append(_begins(self.prefix))
        if self.key:
            tests.append(_has_key(self.key))
        if self.cause:
            tests.append(_equals("cause", self.cause))
        if self.search:
            tests.append(_contains(self.search, self.seen))
        if self.until:
            return self.matches
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


def _has_key(key: str) -> Callable[[RunInfo], bool]:
    """Match runs with this key."""
    ending = f"/{encode(key)}"
    return lambda info: info.run.endswith(ending)


def _contains(text: str, seen: Callable[[str], str]) -> Callable[[RunInfo], bool]:
    """Match runs whose id, key, job or error contains `text`."""
    parts = {text.casefold(), encode(text).casefold()}

    def contains(info: RunInfo) -> bool:
        run, job = info.run.casefold(), info.job.casefold()
        if any(part in run or part in job for part in parts):
            return True
        error = seen(info.error).casefold() if info.error else ""
        return any(part in error for part in parts)

    return contains


def _may_begin(prefix: str, runs: str) -> bool:
    """Whether one of these runs may start with `prefix`, by its id or its key."""
    return prefix in runs or encode(prefix) in runs


def _like(wanted: RunFilter, info: RunInfo, kept: Kept) -> bool:
    """Whether a message's run matches, whatever its state turns out to be."""
    if wanted.state == "failed" or member(wanted.search):
        wanted = replace(wanted, state="")
    return wanted.matches_sent(info, kept.body, kept.user_headers)


# ---- pages


Found = tuple[RunInfo, int]
"""A run and its sequence in the stream where it was found."""
End = tuple[str, float]
"""A run and the time it ended; 0 while it has not. A replayed run ends more than once."""


def _end(info: RunInfo) -> End:
    return info.run, info.ended


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """Where a page ended: records and messages before these positions are still to be read."""

    records: int = 0
    queued: int = 0
    delayed: int = 0
    ended: int = 0
    """In the history: the sequence times `MOST_LINES`, plus the line."""

    def text(self) -> str:
        """Encode it for a URL."""
        return f"{self.records}-{self.queued}-{self.delayed}-{self.ended}"

    @classmethod
    def read(cls, text: str) -> Cursor:
        """Decode a cursor; an empty text means the newest page."""
        parts = text.split("-") if text else ["0"] * 4
        digits = all(p.isascii() and p.isdigit() and len(p) < 19 for p in parts)
        if len(parts) != 4 or not digits:
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
    """The sequences of queued runs in the jobs stream: saves a search when one is opened."""


class _Walk:
    """One source, read backwards up to a bound."""

    def __init__(self, before: int) -> None:
        self.before = before
        self.found: list[Found] = []
        self.at = 0
        self.looked = 0
        self.oldest = 0.0
        self.ended = False

    def step(self, at: int, stored: float) -> None:
        self.at, self.oldest = at, stored
        self.looked += 1

    def next(self, taken: set[End]) -> int:
        """Where to continue: after the last one shown, or where reading stopped; 1 at the end."""
        left = [sequence for info, sequence in self.found if _end(info) not in taken]
        if left:
            return max(left) + 1
        return 1 if self.ended else self.at


class RunPages:
    """Reads runs page by page."""

    def __init__(
        self,
        client: Client,
        look: int = LOOK,
        index: RunIndex | None = None,
        ends: EndedIndex | None = None,
    ) -> None:
        self._client = client
        self._ends = ends if ends is not None and ends.complete else None
        self._index = index if index is not None and index.complete else None
        self._broker = client.broker
        self._names = client.broker.names
        self._look = look
        self._floor = 0
        """Records below this revision were not read."""

    async def page(self, wanted: RunFilter, limit: int = 50, cursor: str = "") -> RunPage:
        """The runs that match from a cursor on, at most `limit`."""
        start = Cursor.read(cursor)
        walks = [_Walk(at) for at in (start.records, start.queued, start.delayed, start.ended)]
        asked = wanted.state in ("", "running") and not cursor and self._index is None
        held = await self._held(wanted) if asked else []
        if wanted.state not in ("queued", "delayed", "waiting"):
            await self._records(walks[0], wanted, limit)
        sent = bool(member(wanted.search))  # found by their messages, whatever their state is
        if (sent or wanted.state in ("", "queued", "failed")) and not wanted.node:
            await self._messages(walks[1], await self._queues(wanted), wanted, limit)
        if wanted.state in ("", "delayed", "waiting", "failed") and not wanted.node:
            subject = self._names.later(wanted.group or "*", wanted.job or "*", "*", "*")
            if wanted.state != "delayed":
                subject = self._names.later_or_line
            await self._messages(walks[2], subject, wanted, limit)
        if wanted.state in ("", *TERMINAL) and not wanted.node:
            await self._ended(walks[3], wanted, limit)
        return _merged(walks, held, limit)

    async def _queues(self, wanted: RunFilter) -> str:
        """A pattern of the queues in which runs may wait; mostly that of one job's own queue."""
        group, names = wanted.group or "*", self._names
        if not wanted.job:
            return names.queues(group)[0]
        own, others = names.queues(group, wanted.job)
        more = await subject_counts(self._broker, names.jobs, others)
        return names.queues(group)[0] if more else own

    async def _records(self, walk: _Walk, wanted: RunFilter, limit: int) -> None:
        if self._index is not None and not self._indexed(self._index, walk, wanted, limit):
            return
        bucket = self._client.runs
        subject = kv_subject(bucket.name, ">")
        async for kept in newest(self._broker, bucket.stream, subject, walk.before, wanted.until):
            if self._enough(walk, kept.sequence, kept.stored, wanted, limit):
                if walk.looked >= self._look and await self._is_filed(kept.stored):
                    walk.ended, self._floor = True, walk.at
                return
            run = kv_key(bucket.name, kept.subject)
            record = read_record(self._broker, run, kept.body)
            if record:
                info = of_record(run, record, kept.stored)
                if wanted.matches(info):
                    walk.found.append((info, kept.sequence))
        walk.ended = True

    async def _is_filed(self, stored: float) -> bool:
        """Whether the history goes back to an instant: what ended since then is found there."""
        state = await stream_state(self._broker, self._names.history)
        return bool(state["messages"]) and parse_time(state["first_ts"]) <= stored

    def _indexed(
        self, index: RunIndex | EndedIndex, walk: _Walk, wanted: RunFilter, limit: int
    ) -> bool:
        """Search the whole index; True when older ones exist only on the server."""
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
        """Add runs that are only a message so far, and those that wait for their next attempt."""
        chunk: list[Found] = []
        async for kept in newest(
            self._broker, self._names.jobs, subject, walk.before, wanted.until
        ):
            if self._enough(walk, kept.sequence, kept.stored, wanted, limit):
                break
            info = of_message(kept, self._names)
            if info and _like(wanted, info, kept):
                chunk.append((info, kept.sequence))
            if len(chunk) >= _CHUNK:
                walk.found += await self._as_recorded(chunk, wanted)
                chunk = []
        else:
            walk.ended = True
        walk.found += await self._as_recorded(chunk, wanted)

    async def _ended(self, walk: _Walk, wanted: RunFilter, limit: int) -> None:
        """Add the ends of runs, without those that were sent again since."""
        ends = self._ends if member(wanted.search) is None else None  # it keeps no payloads
        if ends is None or self._indexed(ends, walk, wanted, limit):
            walk.ended = await self._walk_history(walk, wanted, limit) or walk.ended
        walk.found = await self._not_resent(walk.found)

    async def _walk_history(self, walk: _Walk, wanted: RunFilter, limit: int) -> bool:
        """Read lines, newest first; True when all were read."""
        names, history = self._names, self._client.history
        subject = names.ended(wanted.group or "*", wanted.job or "*", wanted.state or "*")
        before = -(-walk.before // MOST_LINES)
        async for kept in newest(self._broker, names.history, subject, before, wanted.until):
            first, prefix = kept.sequence * MOST_LINES, wanted.prefix or wanted.key
            if prefix and not _may_begin(prefix, kept.headers.get(H_RUN, "")):
                if self._enough(walk, first, kept.stored, wanted, limit):
                    return False
                continue
            for number, line in reversed(list(enumerate(history.read(kept.sequence, kept.body)))):
                at = first + number
                if walk.before and at >= walk.before:
                    continue
                if self._enough(walk, at, kept.stored, wanted, limit):
                    return False
                info = of_record(line.run, line.record, kept.stored)
                if wanted.matches_sent(info, line.payload, line.headers):
                    walk.found.append((info, at))
        return True

    async def _not_resent(self, found: list[Found]) -> list[Found]:
        """Leave out ends after which a run was sent again, as far as its record says so."""
        others = [info.run for info, _ in found if info.state != "done"]
        entries = await asyncio.gather(*(self._client.runs.get(run) for run in others))
        now = dict[str, float]()
        for entry in entries:
            record = read_record(self._broker, entry.key, entry.value) if entry else None
            if entry and record:
                now[entry.key] = record.ended
        return [one for one in found if now.get(one[0].run, one[0].ended) == one[0].ended]

    def _enough(self, walk: _Walk, at: int, stored: float, wanted: RunFilter, limit: int) -> bool:
        """Whether to stop before this one; `since` stops the scan for good."""
        if stored < wanted.since:
            walk.ended = True
            return True
        if walk.looked >= self._look or len(walk.found) >= limit:
            return True
        walk.step(at, stored)
        return False

    async def _as_recorded(self, found: list[Found], wanted: RunFilter) -> list[Found]:
        """Runs found by their message, in the state of their record; those that have begun or ended
        are left out, unless the search was for their message."""
        sent = bool(member(wanted.search))
        if sent:
            wanted = replace(wanted, search="")
        elif self._index is not None and not self._index.floor:
            new = [one for one in found if one[0].run not in self._index]
            return [one for one in new if wanted.matches(one[0])]
        entries = await asyncio.gather(*(self._client.runs.get(info.run) for info, _ in found))
        kept = []
        for (info, sequence), entry in zip(found, entries, strict=True):
            record = read_record(self._broker, entry.key, entry.value) if entry else None
            unread = entry and entry.revision < self._floor
            if entry and record and (sent or (unread and record.state == "failed")):
                info = of_record(entry.key, record, entry.stored)
            elif entry:
                continue
            kept += [(info, sequence)] if wanted.matches(info) else []
        return kept

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
    known = {_end(info): info for info in held}
    for walk in walks:
        known |= {_end(info): info for info, _ in walk.found}
    runs = sorted(known.values(), key=lambda info: info.updated, reverse=True)[:limit]
    taken = {_end(info) for info in runs}
    ends = [walk.next(taken) for walk in walks]
    used = [walk for walk in walks if walk.looked or walk.ended]
    more = any(end != 1 for walk, end in zip(walks, ends, strict=True) if walk in used)
    cursor = Cursor(*(end or 1 for end in ends)).text() if more else ""
    looked = sum(walk.looked for walk in walks)
    back_to = max((walk.oldest for walk in used if not walk.ended), default=0.0) if more else 0.0
    places = {info.run: sequence for info, sequence in walks[1].found if _end(info) in taken}
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
        record.due if record.state in ("failed", "parked") else 0.0,
        len(record.attempts) + (record.state == "running"),
        record.failures,
        record.crashes,
        record.node if record.state == "running" else "",
        record.error,
        record.cause,
        _progress(record),
    )


def _progress(record: RunRecord) -> float:
    done = record.progress.fraction if record.progress and not record.terminal else None
    return -1.0 if done is None else done


def of_message(kept: Kept, names: Names) -> RunInfo | None:
    """The list entry of a run that is only a message so far."""
    line = names.parse_line(kept.subject)
    waits = line is not None
    subject = kept.headers.get(H_SUBJECT, "") if waits else kept.subject
    where = names.parse_job(subject) or names.parse_later(subject)
    if where is None or H_WAKE in kept.headers:  # a flow that is woken has a record
        return None
    return RunInfo(
        kept.run,
        "waiting" if waits else "delayed" if kept.due else "queued",
        where[0],
        where[1],
        kept.stored,
        created=kept.stored,
        due=kept.due,
        cause=cause_of(kept.headers),
        limit=line[0][0] if line else "",
    )


async def first_runs(client: Client, wanted: RunFilter, limit: int) -> list[RunInfo]:
    """The runs that match, newest change first, read page by page up to `limit`."""
    pages, cursor = RunPages(client), ""
    found: dict[End, RunInfo] = {}
    while True:
        page = await pages.page(wanted, limit - len(found), cursor)
        found |= {_end(info): info for info in page.runs}
        cursor = page.older
        if not cursor or len(found) >= limit:
            return sorted(found.values(), key=lambda info: info.updated, reverse=True)
