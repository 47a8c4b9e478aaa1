"""The planner: which slots are due, and what the policies make of those that are late.

It keeps the first unrecorded slot of every active schedule in a heap by due time, so the cost of a
tick depends on the slots that are due, not on the number of schedules. It decides and never writes;
`put_back` undoes a `take` whose decisions could not be written.

The rule of the watermark. Slots of a schedule are taken in the order of their instants, so the
recorded ones have no gap. A watermark W says that every slot due until W is recorded: the next one
of a schedule is then the first whose due time is after W. A schedule that the watermark did not yet
include begins at its own `since` instead; considering a slot twice is harmless, because a record
can be created only once.

Late and missed. A slot taken within `missed_after` of its time is late, and fires. Older ones were
missed: `catch_up` says whether all of them fire (at most the newest `limit`), the last one, or
none.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.model.schedule import Schedule, due_at, instants, next_after
from holdfast.model.slot import Reason

NEW_SECONDS = 60.0
"""If `since` is less than this before the watermark, its writer may not have seen the schedule."""
MOST_COUNTED = 20_000
"""Missed instants of one cron rule that are computed one by one: about a second of work, two
weeks of a rule that fires every minute."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one slot, or about a series of slots that are skipped together."""

    schedule: Schedule
    moment: int
    due: float
    skip: Reason = ""
    caught_up: bool = False
    last: int = 0
    count: int = 0


class _Entry:
    """A schedule and its next slot."""

    __slots__ = ("due", "mark", "moment", "schedule")

    def __init__(self, schedule: Schedule, moment: int, due: float, mark: int) -> None:
        self.schedule = schedule
        self.moment = moment
        self.due = due
        self.mark = mark


class Planner:
    """Knows the next slot of every schedule."""

    def __init__(self, missed_after: float = 10.0) -> None:
        self._missed_after = missed_after
        self._entries: dict[str, _Entry] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._marks = 0

    def __len__(self) -> int:
        return len(self._entries)

    # ---- what there is

    def add(self, schedule: Schedule, watermark: float, *, seen: bool = True) -> None:
        """Add or update a schedule. `seen`: the watermark includes it."""
        if not schedule.active:
            self.remove(schedule.name)
            return
        self._enter(schedule, first_open(schedule, watermark, seen=seen))

    def remove(self, name: str) -> None:
        """Forget a schedule."""
        self._entries.pop(name, None)

    def _enter(self, schedule: Schedule, moment: int | None) -> None:
        if moment is None:
            self._entries.pop(schedule.name, None)
            return
        self._marks += 1
        due = due_at(schedule, moment)
        self._entries[schedule.name] = _Entry(schedule, moment, due, self._marks)
        heapq.heappush(self._heap, (due, self._marks, schedule.name))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(e.due, e.mark, name) for name, e in self._entries.items()]
        heapq.heapify(self._heap)

    # ---- what is due

    @property
    def next_due(self) -> float | None:
        """When the next slot is due, or None when there is none."""
        entry = self._top()
        return entry.due if entry else None

    def _top(self) -> _Entry | None:
        while self._heap:
            _, mark, name = self._heap[0]
            entry = self._entries.get(name)
            if entry is not None and entry.mark == mark:
                return entry
            heapq.heappop(self._heap)
        return None

    def take(self, now: float, most: int = 100_000) -> list[Decision]:
        """Decide everything that is due until `now`, schedule by schedule, oldest first."""
        found: list[Decision] = []
        while len(found) < most:
            entry = self._top()
            if entry is None or entry.due > now:
                break
            heapq.heappop(self._heap)
            found += self._decide(entry, now)
        return found

    def _decide(self, entry: _Entry, now: float) -> list[Decision]:
        schedule = entry.schedule
        following = next_after(schedule, entry.moment)
        late = now - entry.due <= self._missed_after
        if late and (following is None or due_at(schedule, following) > now):
            self._enter(schedule, following)
            return [Decision(schedule, entry.moment, entry.due)]
        missed = _missed_until(schedule, entry.moment, now - self._missed_after)
        found = _by_policy(schedule, missed)
        newest = missed.newest if missed.newest is not None else entry.moment - 1
        for moment in instants(schedule, newest, now):
            due = due_at(schedule, moment)
            if due > now:
                break
            found.append(Decision(schedule, moment, due))
            newest = moment
        self._enter(schedule, next_after(schedule, newest))
        return found

    def put_back(self, decisions: Iterable[Decision]) -> None:
        """Make decisions due again whose records could not be written."""
        first: dict[str, Decision] = {}
        for decision in decisions:
            first.setdefault(decision.schedule.name, decision)
        for name, decision in first.items():
            entry = self._entries.get(name)
            schedule = entry.schedule if entry else decision.schedule
            if schedule.timing == decision.schedule.timing:
                self._enter(schedule, decision.moment)

    def follow(self, watermark: float) -> None:
        """Another scheduler has recorded every slot due until `watermark`."""
        while True:
            entry = self._top()
            if entry is None or entry.due > watermark:
                return
            heapq.heappop(self._heap)
            self._enter(entry.schedule, first_open(entry.schedule, watermark))


def first_open(schedule: Schedule, watermark: float, *, seen: bool = True) -> int | None:
    """The first slot of a schedule that a watermark leaves open."""
    if not seen and watermark - schedule.since <= NEW_SECONDS:
        return next_after(schedule, schedule.since)
    for moment in instants(schedule, watermark - schedule.jitter - 1):
        if due_at(schedule, moment) > watermark:
            return moment
    return None


@dataclass(frozen=True, slots=True)
class _Missed:
    """A series of missed instants: those to fire now, and whether others are dropped."""

    first: int
    newest: int | None = None
    made_up: tuple[int, ...] = ()
    dropped: bool = False
    count: int = 0
    """How many are dropped; 0 if they were not counted."""


def _missed_until(schedule: Schedule, first: int, cut: float) -> _Missed:
    """The instants from `first` on whose due time is not after `cut`."""
    keep = {"last": 1, "none": 0}.get(schedule.catch_up, schedule.limit)
    if schedule.every and first != schedule.first:
        return _missed_regular(schedule, first, cut, keep)
    start, jumped = first - 1, False
    while True:
        newest, number, kept = None, 0, deque[int](maxlen=keep)
        for moment in instants(schedule, start, cut):
            if due_at(schedule, moment) > cut:
                break
            newest, number = moment, number + 1
            kept.append(moment)
            if number >= MOST_COUNTED:
                break
        nearer = int(cut - ((newest or start) - start) / 2)
        if number < MOST_COUNTED or nearer <= (newest or start):
            dropped = jumped or number > len(kept)
            count = 0 if jumped else number - len(kept)
            return _Missed(first, newest, tuple(kept), dropped, count)
        start, jumped = (
            nearer,
            True,
        )  # too many to compute one by one: skip ahead, nearer to the end


def _missed_regular(schedule: Schedule, first: int, cut: float, keep: int) -> _Missed:
    """For a fixed interval, computed directly: one second makes 86,400 instants a day."""
    until = min(cut, schedule.end) if schedule.end else cut
    number = max(0, int((until - first) // schedule.every) + 1)
    while number and due_at(schedule, first + (number - 1) * schedule.every) > cut:
        number -= 1
    if not number:
        return _Missed(first)
    made_up = tuple(first + n * schedule.every for n in range(max(0, number - keep), number))
    newest = first + (number - 1) * schedule.every
    return _Missed(first, newest, made_up, number > len(made_up), number - len(made_up))


def _by_policy(schedule: Schedule, missed: _Missed) -> list[Decision]:
    """What the catch-up policy makes of missed slots: skipped ones first, as one series."""
    if missed.newest is None:
        return []
    found = []
    if missed.dropped:
        found.append(
            Decision(
                schedule,
                missed.first,
                due_at(schedule, missed.first),
                skip="limit" if schedule.catch_up == "all" else "catch_up",
                last=missed.made_up[0] - 1 if missed.made_up else missed.newest,
                count=missed.count,
            )
        )
    made_up = [Decision(schedule, m, due_at(schedule, m), caught_up=True) for m in missed.made_up]
    return found + made_up
