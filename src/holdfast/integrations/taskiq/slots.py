"""Slots of taskiq's schedules: the due instants, and the record of what was sent.

taskiq remembers in memory what it last sent, separately in each process, counted from its start.
Here a slot is a window of the clock: the minute of a cron schedule, the n-th interval since 1970,
the instant of a one-off. Every process sees each window once and gives it the same name, whatever
its phase or clock error.

Each schedule of a leader key has one record of the slot sent last. It is written by
compare-and-swap, so of two leaders one wins, and it outlives every process: no slot is sent again
because a process forgot it. Apps with different leader keys do not see each other's records.

A schedule is identified by its id. One from a task's labels gets a new id each time taskiq starts,
so it is identified by its content.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import msgspec
from taskiq import ScheduledTask
from taskiq.cli.scheduler.run import CronValueError, is_cron_task_now

from holdfast.broker import Broker, Bucket
from holdfast.durations import MINUTE
from holdfast.errors import Conflict
from holdfast.model.codec import Codec, Instant
from holdfast.names import marker_key, sent_key, sent_keys

EARLY_SECONDS: Final = 0.05
"""A timer may fire slightly before its second."""
MADE_UP_SECONDS: Final = 120
"""How far back missed slots are caught up: enough for a failover or a restart of NATS, too short
for a burst of old work after a long outage."""
RECURRING_SECONDS: Final = 400 * 86_400
"""How long the record of a schedule is kept after its last slot: more than a year, for yearly
rules."""
ONCE_SECONDS: Final = 86_400
"""The same for a one-off with an id, which its source deletes once it was sent."""


class TaskiqSlot(NamedTuple):
    """One due instant of one schedule."""

    schedule: str
    at: float
    """When its window starts, by the clock of the process that names it."""
    period: int = 0
    """Seconds; 0 for a one-off."""

    @property
    def id(self) -> str:
        """Its part of a message id; the same in all versions, so two versions send one message."""
        window = f"{self.period:g}x{int(self.at) // self.period}" if self.period else self._once
        return marker_key(self.schedule, window)

    @property
    def _once(self) -> str:
        return f"at{self.at:.3f}"

    def is_after(self, sent: float | None) -> bool:
        """Whether it is still to be sent if `sent` was the last one."""
        return sent is None or (self.at > sent if self.period else self.at != sent)


def slot_of(task: ScheduledTask, schedule: str, now: float) -> TaskiqSlot:
    """The slot that is due at `now`."""
    periods = [MINUTE] if task.cron is not None else []
    if task.interval is not None:
        gap = task.interval
        periods.append(int(gap.total_seconds() if isinstance(gap, timedelta) else gap))
    if periods:
        period = min(periods)
        return TaskiqSlot(schedule, int(now + EARLY_SECONDS) // period * period, period)
    assert task.time is not None  # taskiq accepts no schedule without any of the three
    aware = task.time if task.time.tzinfo else task.time.replace(tzinfo=UTC)
    return TaskiqSlot(schedule, round(aware.timestamp(), 3))


def unsent(
    task: ScheduledTask, newest: TaskiqSlot, sent: float | None, known: float
) -> list[TaskiqSlot]:
    """The unsent slots up to the newest, oldest first.

    taskiq's loop skips a slot when it is late or still busy with the previous one, and there may
    have been no leader for a moment. Slots between the last one sent and the newest are made up,
    for `MADE_UP_SECONDS` and not from before this process knew the schedule.
    """
    if not newest.is_after(sent):
        return []
    if sent is None or not newest.period:
        return [newest]
    first = max(sent, known, newest.at - MADE_UP_SECONDS)
    begin = (int(first) // newest.period + 1) * newest.period
    between = range(begin, int(newest.at), newest.period)
    found = [newest._replace(at=at) for at in between if task.interval or _is_due(task, at)]
    return [*found, newest]


def _is_due(task: ScheduledTask, at: int) -> bool:
    try:
        return is_cron_task_now(task.cron or "", datetime.fromtimestamp(at, UTC), task.cron_offset)
    except CronValueError:
        return False


def identities(tasks: list[ScheduledTask], *, by_content: bool) -> dict[str, str]:
    """By schedule id: the name by which every process identifies the schedule."""
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
    """A short text that is the same for schedules with the same content."""
    said = task.model_dump(mode="json", exclude={"schedule_id", "task_id", "labels"})
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class SentRecord(msgspec.Struct, frozen=True):
    """The last slot of a schedule that was sent."""

    at: Instant
    by: str = ""


SENT: Final[Codec[SentRecord]] = Codec(SentRecord, "record of sent slots")


class SentSlots:
    """What was sent, for the schedules of one leader key."""

    def __init__(self, broker: Broker, leader_key: str, node: str, *, kept: bool) -> None:
        """`kept`: one-offs are also remembered for long, because their source keeps them."""
        self._bucket = Bucket(broker, broker.names.taskiq_slots)
        self._leader_key = leader_key
        self._node = node
        self._kept = kept

    async def read(self, slot: TaskiqSlot) -> tuple[int, float | None]:
        """The revision for the next write, and the last slot sent, from the stream's leader."""
        revision, entry = await self._bucket.last(sent_key(self._leader_key, slot.schedule))
        record = self._bucket.read(SENT.decode, entry) if entry else None
        if record is not None:
            return revision, record.at
        # Earlier versions marked each slot: one of them may have sent this one during a rollout.
        marked = await self._bucket.get(slot.id)
        return revision, slot.at if marked else None

    async def mark(self, slot: TaskiqSlot) -> bool:
        """Record a slot as sent; False when another process has recorded it or a later one.

        Safe to repeat: a write whose answer was lost is recognised by its node.
        """
        record = SENT.encode(SentRecord(slot.at, self._node))
        ttl = RECURRING_SECONDS if slot.period or self._kept else ONCE_SECONDS
        key = sent_key(self._leader_key, slot.schedule)
        while True:
            revision, entry = await self._bucket.last(key)
            found = self._bucket.read(SENT.decode, entry) if entry else None
            if found is not None and not slot.is_after(found.at):
                return found == SentRecord(slot.at, self._node)
            try:
                await self._bucket.put(key, record, expected=revision, ttl=ttl)
            except Conflict:
                continue
            return True

    async def all(self) -> dict[str, float]:
        """By schedule, encoded as in its key: the last slot sent."""
        prefix = sent_keys(self._leader_key)
        return {
            entry.key.removeprefix(f"{prefix}."): record.at
            async for entry, record in self._bucket.records(SENT.decode, prefix)
        }
