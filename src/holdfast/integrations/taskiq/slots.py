"""Slots of taskiq's schedules: which due instant a dispatch is for, and the markers of those sent.

taskiq remembers in memory when it last sent what, each process for itself, and counts from its own
start. So a slot is a window of the clock: the minute of a cron schedule, the n-th interval since
1970, the instant of a one-off. Every process comes by each window once, whatever its phase, and
names it the same. The marker's key has the window in it: it never stands in the way of the next.

A schedule is known by its id; one from a task's labels gets a new id at every start of taskiq, so
it is known by what it says.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from datetime import UTC, timedelta
from typing import Final, NamedTuple

from taskiq import ScheduledTask

from holdfast.broker import Broker, Bucket
from holdfast.errors import Conflict
from holdfast.names import marker_key

EARLY_SECONDS: Final = 0.05
"""A timer may ring a moment before the second that it was set to."""
MINUTE: Final = 60.0
KEPT_SECONDS: Final = 120.0
"""A marker outlives its window by this much, for processes that come late."""
ONCE_SECONDS: Final = 86_400.0


class Slot(NamedTuple):
    """One due instant of one schedule."""

    schedule: str
    window: str
    seconds: float
    """How long the window lasts."""

    @property
    def key(self) -> str:
        """The key of its marker."""
        return marker_key(self.schedule, self.window)

    @property
    def kept_seconds(self) -> float:
        """How long its marker is needed."""
        return self.seconds + KEPT_SECONDS


def slot_of(task: ScheduledTask, schedule: str, now: float) -> Slot:
    """The slot that a dispatch at `now` is for."""
    periods = [MINUTE] if task.cron is not None else []
    if task.interval is not None:
        gap = task.interval
        periods.append(gap.total_seconds() if isinstance(gap, timedelta) else float(gap))
    if not periods:
        return Slot(schedule, _instant(task), ONCE_SECONDS)
    period = min(periods)
    return Slot(schedule, f"{period:g}x{int((now + EARLY_SECONDS) // period)}", period)


def _instant(task: ScheduledTask) -> str:
    time = task.time
    if time is None:
        return "once"
    aware = time if time.tzinfo else time.replace(tzinfo=UTC)
    return f"at{aware.timestamp():.3f}"


def identities(tasks: list[ScheduledTask], *, by_content: bool) -> dict[str, str]:
    """By schedule id: under which name every process knows the schedule."""
    if not by_content:
        return {task.schedule_id: task.schedule_id for task in tasks}
    seen: Counter[str] = Counter()
    found = {}
    for task in tasks:
        content = content_of(task)
        seen[content] += 1
        found[task.schedule_id] = f"{content}-{seen[content]}"
    return found


def content_of(task: ScheduledTask) -> str:
    """A short text that is the same for schedules that say the same."""
    said = task.model_dump(mode="json", exclude={"schedule_id", "task_id", "labels"})
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class Markers:
    """The slots that were dispatched."""

    def __init__(self, broker: Broker) -> None:
        self._bucket = Bucket(broker, broker.names.taskiq_slots)

    async def has(self, slot: Slot) -> bool:
        """Whether a slot was dispatched, as the stream's leader knows it."""
        return await self._bucket.get(slot.key) is not None

    async def set(self, slot: Slot, by: str) -> bool:
        """Mark a slot; False when it is marked already. The server lets one win."""
        try:
            await self._bucket.put(slot.key, by.encode(), expected=0, ttl=slot.kept_seconds)
        except Conflict:
            return False
        return True
