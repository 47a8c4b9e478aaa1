"""A flow's journal, and the rules by which a flow is replayed from it.

A flow is a function that is called again from its beginning each time it wakes up. Each call of its
context is an **operation**; operations are numbered in the order of the calls. The journal holds
the result of each: an operation that is stored returns its result and does nothing; the first one
that is not stored, the *frontier*, is executed.

    start ──► open ──► step · tried · sleep · gather, sent · event, got · value · changed · publish
                │                                                   │
                └── one for each process that takes it over         └──► [unwind, undone …] ──► end

Guaranteed by these rules: every later replay sees the stored result; a replay that asks for another
operation than the stored one raises `FlowMismatch`, which names both, and changes nothing; a
process with a lower epoch than one that has opened the journal is refused.

Not guaranteed: that a step runs only once. Its result is stored after it has run, so a crash in
between runs it again. This module does no I/O: `ownership.journals` stores the entries, each fenced
by the sequence of the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from holdfast.errors import FlowMismatch, FlowTooLong, Unreadable
from holdfast.model.codec import Codec, Count, Headers, Instant, ObjectName
from holdfast.model.run import NO_RESULT
from holdfast.names import child_run

MOST_OPERATIONS: Final = 10_000
"""A replay reads the whole journal, which takes 0.3 s for this many operations. A longer flow moves
parts into child flows, each with its own journal."""
MOST_CHILDREN: Final = 10_000
"""Children of one gather: all their results are in memory when the flow continues."""
GENERATIONS: Final = 99_998
"""A number in a `Parent` has at most nine digits: version 0.1.0 cannot read longer ones."""
STORY_LINES: Final = 500
"""Lines kept of an ended flow's journal, which is then folded into one message."""
STORY_CHARS: Final = 300
"""Characters kept of an error in one of these lines."""

OPERATIONS: Final = frozenset({"step", "sleep", "gather", "event", "value", "changed", "publish"})
"""Entries that begin an operation."""
KINDS: Final = OPERATIONS | {"start", "open", "tried", "sent", "got", "unwind", "undone", "end"}


class StoryLine(msgspec.Struct, omit_defaults=True, frozen=True):
    """One operation, as the command line and the pages show it."""

    n: Count
    kind: str
    name: str
    since: Instant = 0.0
    until: Instant = 0.0
    """When it ended, or is due; 0: it has not ended."""
    attempts: Count = 0
    error: str = ""
    by: str = ""
    """Who sent the event."""
    total: Count = 0
    """How many children."""


class JournalEntry(msgspec.Struct, omit_defaults=True, frozen=True):
    """One line of a journal; which members matter depends on its kind."""

    kind: str
    n: Count = 0
    """The number of the operation or compensation."""
    name: str = ""
    at: Instant = 0.0
    since: Instant = 0.0
    epoch: Count = 0
    node: str = ""
    value: msgspec.Raw = NO_RESULT
    object: ObjectName = ""
    """Where a large value is."""
    error: str = ""
    attempt: Count = 0
    due: Instant = 0.0
    total: Count = 0
    """How many children; in the end of a flow, how often it was called."""
    sequence: Count = 0
    """The sequence of the event that was received."""
    missing: bool = False
    """The event did not come in time."""
    by: str = ""
    headers: Headers = {}
    state: str = ""
    generation: Count = 0
    """Of `start` and `end`: which life of the flow's id this is (`RunRecord.generation`)."""
    jobs: tuple[str, ...] = ()
    """Group and job of each child; one if all have the same. Of `start`, those of the flow."""
    parent: str = ""
    """Of `start`: the flow whose child this one is, in case its record is lost."""
    story: tuple[StoryLine, ...] = ()


ENTRIES: Final = Codec[tuple[JournalEntry, ...]](tuple[JournalEntry, ...], "a flow's journal")


class ChildEnd(msgspec.Struct, omit_defaults=True, frozen=True):
    """How a child of a flow has ended; kept with the flow, since the child's record expires."""

    index: Count
    run: str
    state: str
    at: Instant = 0.0
    error: str = ""
    result: msgspec.Raw = NO_RESULT
    result_object: ObjectName = ""


CHILD_END: Final = Codec[ChildEnd](ChildEnd, "the end of a flow's child")


class ExportedEnd(msgspec.Struct, frozen=True):
    """The end of a child in an exported journal, where it has no subject."""

    number: Count
    end: ChildEnd


EXPORTED_END: Final = Codec[ExportedEnd](ExportedEnd, "the end of a flow's child")


class Parent(NamedTuple):
    """Whose child a run is: the end of the run is stored beside that flow."""

    run: str
    group: str
    job: str
    n: int
    """The `gather_number` of the operation that waits."""
    place: int
    """Which child, counted from 0."""
    total: int

    def __str__(self) -> str:
        return " ".join(map(str, self))


def parent_of(text: str) -> Parent | None:
    """The parent in a header or a record; nonsense counts as absent."""
    parts = text.split(" ")
    if len(parts) != len(Parent._fields) or not all(parts):
        return None
    run, group, job, *numbers = parts
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in numbers):
        return None
    if any(c in "*>." or not c.isprintable() for c in run + group + job):
        return None
    n, place, total = map(int, numbers)
    return Parent(run, group, job, n, place, total) if place < total <= MOST_CHILDREN else None


def gather_number(n: int, generation: int) -> int:
    """The number under which the children of an operation are known.

    Each generation of a flow has its own: a child of an earlier one is no child of this one.
    """
    return n + MOST_OPERATIONS * (1 + generation % GENERATIONS) if generation else n


class KeyedEvent(NamedTuple):
    """An event with a key, as it is stored."""

    sequence: int
    at: float
    body: bytes
    by: str = ""


class FlowJournal:
    """What is stored of one flow."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.last = 0
        """The sequence of the last message: the next one expects it."""
        self._begin()

    def _begin(self) -> None:
        self.start: JournalEntry | None = None
        self.epoch = 0
        self.operations: dict[int, JournalEntry] = {}
        self.ends: dict[int, JournalEntry] = {}
        """What an event became, and which gathers were sent."""
        self.tried: dict[int, JournalEntry] = {}
        """The last failed attempt of a step, until it has ended."""
        self.undone: dict[int, JournalEntry] = {}
        self.undo_tried: dict[int, JournalEntry] = {}
        self.taken: dict[str, int] = {}
        """By event and key, the sequence of the last one that was received."""
        self.unwind: JournalEntry | None = None
        self.end: JournalEntry | None = None
        self.opened: list[JournalEntry] = []

    def read(self, sequence: int, body: bytes) -> None:
        """Add a stored message; `Unreadable` if it is damaged or of a newer version."""
        for entry in ENTRIES.decode(body):
            self.add(entry)
        self.last = sequence

    def add(self, entry: JournalEntry) -> None:
        """Add one entry."""
        if entry.kind not in KINDS:
            raise Unreadable(f"a newer version wrote {entry.kind[:40]!r} into this flow's journal")
        if entry.kind in OPERATIONS:
            self.operations.setdefault(entry.n, entry)
            self.tried.pop(entry.n, None)
        elif entry.kind == "start":
            self._begin()  # an operator's replay starts an ended flow again
            self.start, self.epoch = entry, entry.epoch
        elif entry.kind == "open":
            self.epoch = max(self.epoch, entry.epoch)
            self.opened.append(entry)
        elif entry.kind == "tried":
            tried = self.undo_tried if entry.state == "undo" else self.tried
            tried[entry.n] = entry
        elif entry.kind in ("sent", "got"):
            self.ends[entry.n] = entry
            if entry.sequence:
                self.taken[entry.name] = entry.sequence
        elif entry.kind == "undone":
            self.undone[entry.n] = entry
        elif entry.kind == "unwind":
            self.unwind = self.unwind or entry
        else:
            self.end = entry

    @property
    def running(self) -> bool:
        """Whether the flow has begun and not ended."""
        return self.start is not None and self.end is None

    @property
    def newest(self) -> JournalEntry | None:
        """The operation that began last: the one that it waits for, while it waits."""
        return self.operations.get(max(self.operations, default=-1))

    @property
    def created(self) -> float:
        """When the flow was accepted."""
        return self.start.since if self.start else 0.0

    @property
    def generation(self) -> int:
        """Which life of the flow's id this is."""
        known = self.start or self.end
        return known.generation if known else 0

    @property
    def calls(self) -> int:
        """How often its function was called; 0: an earlier build did not store it."""
        return self.end.total if self.end is not None else len(self.opened) + 1

    def gather_number(self, n: int) -> int:
        """The number under which the children of an operation are known."""
        return gather_number(n, self.generation)

    def leftovers(self) -> Sequence[JournalEntry]:
        """The operations that left something outside the journal: ends of children, a scheduled
        wake, a large result."""
        return [e for e in self.operations.values() if e.kind in ("gather", "event") or e.object]

    def story(self) -> tuple[StoryLine, ...]:
        """Its operations, to be shown; of very many, only the first and the last."""
        if self.end is not None and self.end.story:
            return self.end.story
        lines = [self._line(n) for n in sorted({*self.operations, *self.tried})]
        lines += [
            StoryLine(e.n, "undo", e.name, e.since, e.at, e.attempt, _short(e.error))
            for e in self.undone.values()
        ]
        if len(lines) > STORY_LINES:
            half = STORY_LINES // 2
            left = StoryLine(0, "…", f"{len(lines) - 2 * half} more operations")
            lines = [*lines[:half], left, *lines[-half:]]
        return tuple(lines)

    def _line(self, n: int) -> StoryLine:
        if n not in self.operations:
            tried = self.tried[n]
            return StoryLine(
                n, "step", tried.name, tried.since, 0.0, tried.attempt, _short(tried.error)
            )
        entry, end = self.operations[n], self.ends.get(n)
        until = {"sleep": entry.due, "gather": 0.0, "event": 0.0}.get(entry.kind, entry.at)
        if entry.kind == "event" and end is not None:
            until = end.at
        error = "did not come in time" if end is not None and end.missing else entry.error
        by = end.by if end is not None else ""
        return StoryLine(
            n,
            entry.kind,
            entry.name,
            entry.since or entry.at,
            until,
            entry.attempt,
            _short(error),
            by,
            entry.total,
        )


def _short(text: str) -> str:
    return text[:STORY_CHARS]


class FlowReplay:
    """One call of a flow's function, operation by operation, against its journal."""

    def __init__(self, journal: FlowJournal) -> None:
        self.journal = journal
        self.position = 0
        self._changed: dict[str, bool] = {}

    @property
    def replaying(self) -> bool:
        """Whether the next operation is stored."""
        return self.position in self.journal.operations

    def next(self, kind: str, name: str, total: int = 0) -> tuple[int, JournalEntry | None]:
        """The number of the requested operation, and its stored entry."""
        n = self.position = self._past_changes(self.position)
        stored = self.journal.operations.get(n)
        if stored is None and n in self.journal.tried:
            self._check(n, self.journal.tried[n], "step", kind, name, 0)
        if stored is not None:
            self._check(n, stored, stored.kind, kind, name, total)
        elif n >= MOST_OPERATIONS:
            raise FlowTooLong(
                f"a flow has at most {MOST_OPERATIONS:,} operations: move part of it into a child "
                "flow, `await ctx.call(part.request(...))`"
            )
        self.position += 1
        return n, stored

    def _check(
        self, n: int, stored: JournalEntry, was: str, kind: str, name: str, total: int
    ) -> None:
        named = stored.name == name or kind == "sleep"
        if was == kind and named and (stored.total == total or kind != "gather"):
            return
        raise FlowMismatch(
            f"operation {n + 1}: the journal has {described(was, stored.name, stored.total)}, and "
            f"the code asks for {described(kind, name, total)}. Put the old order back, or guard "
            'the new one with `if ctx.changed("…"):`, then resume the flow',
            operation=n + 1,
        )

    def changed(self, name: str) -> tuple[bool, bool]:
        """Whether the flow runs the changed code, and whether this answer has to be stored.

        A flow that had passed this place before the change keeps the old code.
        """
        if name in self._changed:
            return self._changed[name], False
        operations, past = self.journal.operations, self._past_changes(self.position)
        places = [n for n in range(self.position, past) if operations[n].name == name]
        new = past not in operations and past not in self.journal.tried
        self._changed[name] = bool(places) or new
        if places or new:
            self.position = 1 + (places[0] if places else past)
        return self._changed[name], new and not places

    def _past_changes(self, n: int) -> int:
        """The next operation other than `changed`, which may be removed from the code at any
        time."""
        while (stored := self.journal.operations.get(n)) is not None and stored.kind == "changed":
            n += 1
        return n

    def finish(self) -> None:
        """Check, once the function has returned, that it has asked for everything that is
        stored."""
        n = self._past_changes(self.position)
        stored = self.journal.operations.get(n)
        if stored is not None:
            raise FlowMismatch(
                f"operation {n + 1}: the journal has "
                f"{described(stored.kind, stored.name, stored.total)}, and the code ends without "
                "asking for it. Put it back, then resume the flow",
                operation=n + 1,
            )


def described(kind: str, name: str, total: int = 0) -> str:
    """An operation in words: `step 'charge_card'`."""
    if kind == "sleep":
        return "a sleep"
    if kind == "gather":
        return f"{total} × {name}" if total != 1 else f"child {name}"
    return f"{kind} {name!r}"


def check_epoch(journal: FlowJournal, epoch: int) -> bool:
    """Whether a process with this epoch may write: no later one has opened the journal."""
    return journal.epoch <= epoch


def children_of(journal: FlowJournal, gather: JournalEntry) -> list[tuple[str, str, str]]:
    """The run, the group and the job of each child of an operation."""
    homes = gather.jobs if len(gather.jobs) == gather.total else gather.jobs * gather.total
    number = journal.gather_number(gather.n)
    found = []
    for index, home in enumerate(homes):
        group, _, job = home.partition(" ")
        found.append((child_run(group, job, journal.run, number, index), group, job))
    return found


def missing(total: int, ends: Iterable[int]) -> Sequence[int]:
    """The children that have not ended."""
    known = set(ends)
    return [index for index in range(total) if index not in known]
