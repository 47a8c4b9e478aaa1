"""What happened to slots, and which come next: why something did or did not run.

`why` answers for every instant, including one without a record: it was part of a skipped series, in
a pause, before the rule took effect, is in the future, or is so old that its record has expired.

`outcomes` shows the newest slots with their runs. A slot's record says whether its run was sent;
whether it succeeded is in the run's record, which expires a day after the run has ended. After that
the slot is only known to have been sent.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from holdfast import durations
from holdfast.broker import Bucket
from holdfast.client import Client
from holdfast.client.schedules import Schedules
from holdfast.clock import rfc3339
from holdfast.errors import InvalidInput
from holdfast.model import slot as slots
from holdfast.model.schedule import Schedule, due_at, instants, next_after
from holdfast.model.slot import SchedulerProgress, Slot, slot_id
from holdfast.names import kv_key, kv_subject, progress_key, slot_key
from holdfast.status.finding import read_record
from holdfast.status.messages import newest

MOST_NEXT = 1_000
"""Future slots that one request computes: bounds its time."""
LATE_SECONDS = 5.0
"""A slot that has been due for less than this may be in progress."""
COMING_MOST = 7
"""Future slots shown on the overview."""

_SKIPPED = {
    "catch_up": "it was missed, and catch_up={catch_up!r} does not include it",
    "limit": "it was missed, and more slots were missed than limit={limit} allows to catch up",
    "overlap": "the run of the previous slot had not ended, and overlap={overlap!r}",
    "removed": "its schedule was removed",
    "too_large": "its message is larger than the server accepts: put the data into an object store "
    "and send its key, or raise max_payload on the server",
}


@dataclass(frozen=True, slots=True)
class Why:
    """What happened to one slot, as a sentence and as facts."""

    schedule: str
    time: str
    verdict: str
    """dispatched, planned, waiting, skipped, paused, not_due, future, overdue, expired, removed."""
    explanation: str
    run: str = ""
    run_state: str = ""
    slot: Slot | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class SlotHistory:
    """Reads slots."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._bucket = Bucket(client.broker, client.broker.names.slots)
        self._schedules = Schedules(client)

    async def next(self, name: str, count: int = 10) -> list[tuple[int, float]]:
        """The next instants of a schedule, and when each is sent."""
        schedule = await self._schedules.show(name)
        await self._client.topology.measure_clock()
        found = []
        for moment in instants(schedule, self._client.broker.server_now()):
            found.append((moment, due_at(schedule, moment)))
            if len(found) >= min(count, MOST_NEXT):
                break
        return found

    async def recent(self, name: str, limit: int = 20) -> list[tuple[int, Slot]]:
        """The newest recorded slots of a schedule, newest first."""
        found = sorted([item async for item in self._recorded(name)], key=lambda item: -item[0])
        return found[:limit]

    async def _recorded(self, name: str) -> AsyncIterator[tuple[int, Slot]]:
        async for entry in self._bucket.entries(f"slot.{name}"):
            found = self._bucket.read(functools.partial(slots.decode_at, entry.key), entry)
            if found:
                yield found[1:]

    async def progress(self) -> SchedulerProgress:
        """How far the schedulers have come."""
        entry = await self._bucket.get(progress_key("scheduler"))
        found = self._bucket.read(slots.decode_progress, entry) if entry else None
        return found or SchedulerProgress()

    # ---- why

    async def why(self, name: str, at: float | None = None) -> Why:
        """What happened to the slot at a time, or to the newest one."""
        schedule = await self._schedules.show(name)
        await self._client.topology.measure_clock()
        if at is None:
            newest = await self.recent(name, 1)
            if not newest:
                return self._without_record(schedule, self._coming(schedule), await self.progress())
            return await self._recorded_why(schedule, *newest[0])
        moment = self._moment(schedule, at)
        entry = await self._bucket.get(slot_key(name, slots.stamp(moment)))
        recorded = self._bucket.read(slots.decode, entry) if entry else None
        if recorded:
            return await self._recorded_why(schedule, moment, recorded)
        async for first, slot in self._recorded(name):
            if first < moment <= slot.last and slot.reason:
                series = msgspec.structs.replace(slot, state="skipped")
                return await self._recorded_why(schedule, moment, series)
        return self._without_record(schedule, moment, await self.progress())

    def _coming(self, schedule: Schedule) -> int:
        found = next_after(schedule, self._client.broker.server_now())
        if found is None:
            raise InvalidInput(f"schedule {schedule.name!r} has no slot, neither past nor to come")
        return found

    def _moment(self, schedule: Schedule, at: float) -> int:
        """The slot's instant for a given time: to the second, or by its minute."""
        everything = _without_since(schedule)
        found = next_after(everything, int(at) - 1)
        if found == int(at):
            return found
        following = "none" if found is None else rfc3339(found)
        raise InvalidInput(
            f"{rfc3339(at)} is not an instant of schedule {schedule.name!r} ({schedule.rule}): "
            f"the next one after it is {following}"
        )

    async def _recorded_why(self, schedule: Schedule, moment: int, slot: Slot) -> Why:
        run = slot_id(schedule.name, moment)
        record = await self._client.read(run) if slot.state != "skipped" else None
        return Why(
            schedule.name,
            rfc3339(moment),
            slot.state,
            explain(schedule, slot),
            run=run if slot.state != "skipped" else "",
            run_state=record.state if record else "",
            slot=slot,
        )

    def _without_record(self, schedule: Schedule, moment: int, progress: SchedulerProgress) -> Why:
        now = self._client.broker.server_now()
        verdict, text = _judge(schedule, moment, now, progress)
        return Why(schedule.name, rfc3339(moment), verdict, text)


def _judge(
    schedule: Schedule, moment: int, now: float, progress: SchedulerProgress
) -> tuple[str, str]:
    due = due_at(schedule, moment)
    for pause in schedule.pauses:
        if pause.since <= due <= pause.until:
            return "paused", (
                f"the schedule was paused from {rfc3339(pause.since)} to {rfc3339(pause.until)}"
            )
    if schedule.paused and due >= schedule.paused:
        return "paused", f"the schedule is paused since {rfc3339(schedule.paused)}"
    if moment <= schedule.since:
        return "not_due", (
            f"the rule only applies since {rfc3339(schedule.since)}, when it was added, changed or "
            "resumed"
        )
    if due > now:
        return "future", f"it is due in {durations.text(due - now)}, at {rfc3339(due)}"
    if due > progress.watermark:
        heard = rfc3339(progress.watermark) if progress.watermark else "never"
        late = durations.text(now - due)
        return "overdue", (
            f"it has been due for {late} and no scheduler has recorded it; the last progress was "
            f"{heard}: is 'holdfast scheduler' running?"
        )
    return "expired", "it was recorded, and the record has expired since: see slots_kept"


def explain(schedule: Schedule, slot: Slot) -> str:
    """What happened to a recorded slot, in a sentence."""
    if slot.state == "skipped":
        text = _SKIPPED[slot.reason].format(
            catch_up=schedule.catch_up, limit=schedule.limit, overlap=schedule.overlap
        )
        many = f"; the same holds for {slot.count} slots until {rfc3339(slot.last)}"
        return f"skipped: {text}{many if slot.count > 1 else ''}"
    if slot.state == "waiting":
        return "it waits for the run of the previous slot to end (overlap)"
    if slot.state == "planned":
        return f"planned by {slot.node} at {rfc3339(slot.planned)} and not known to be sent yet"
    late = max(0.0, slot.dispatched - slot.due)
    text = f"sent at {rfc3339(slot.dispatched)}, {durations.text(late)} after it was due"
    text += f", by {slot.sender or slot.node} in the term of epoch {slot.epoch}"
    if slot.sender:
        text += f" (planned by {slot.node})"
    if slot.backfill:
        text += "; backfilled by hand"
    if slot.caught_up:
        text += f"; it was missed at its time and made up for (catch_up={schedule.catch_up!r})"
    if slot.duplicate:
        text += "; its message was known already, so the second one was dropped"
    return text


def _without_since(schedule: Schedule) -> Schedule:
    return msgspec.structs.replace(schedule, since=0.0)


# ---- all schedules at a glance


class Due(msgspec.Struct, frozen=True, order=True):
    """A future slot."""

    at: float
    name: str
    job: str
    rule: str


def coming(schedules: Sequence[Schedule], now: float) -> list[Due]:
    """The next slots of all schedules, earliest first."""
    found = []
    for schedule in schedules:
        moment = next_after(schedule, now) if schedule.active else None
        if moment is not None:
            due = due_at(schedule, moment)
            found.append(Due(due, schedule.name, schedule.job, schedule.rule))
    return heapq.nsmallest(COMING_MOST, found)


def overdue_since(schedules: Sequence[Schedule], watermark: float, now: float) -> float:
    """How long an unrecorded slot has been due; 0 if there is none."""
    worst = 0.0
    for schedule in schedules:
        if schedule.active:
            moment = next_after(schedule, watermark)
            late = now - due_at(schedule, moment) if moment is not None else 0.0
            worst = max(worst, late)
    return worst if worst > LATE_SECONDS else 0.0


OUTCOMES_LOOK: Final = 500  # bounds the reads when few slots match


class Outcome(msgspec.Struct, frozen=True):
    """One slot and its run."""

    moment: int
    slot: Slot
    run: str = ""
    """Empty when none was sent."""
    run_state: str = ""
    """Empty when it has no record: it waits in the queue, or the record has expired."""
    error: str = ""
    seconds: float = 0.0
    """How long the run took, from its first attempt to its end."""

    @property
    def verdict(self) -> str:
        """`done`, `failed`, `running`, …, else how far the slot came; `sent`: no record (yet)."""
        if self.slot.state != "dispatched":
            return self.slot.state
        return self.run_state or "sent"


async def outcomes(client: Client, schedule: str, limit: int = 20) -> list[Outcome]:
    """The newest slots of a schedule, the latest instant first."""
    names = client.broker.names
    bucket = Bucket(client.broker, names.slots)
    subject = kv_subject(bucket.name, f"slot.{schedule}.*")
    found: list[tuple[int, Slot]] = []
    looked = 0
    async for kept in newest(client.broker, bucket.stream, subject):
        looked += 1
        key = kv_key(bucket.name, kept.subject)
        decode = functools.partial(slots.decode_at, key)
        slot = client.broker.unreadable.read(decode, bucket.name, key, kept.body)
        found += [slot[1:]] if slot else []
        if len(found) >= limit or looked >= OUTCOMES_LOOK:
            break
    found.sort(key=lambda item: -item[0])
    return list(await asyncio.gather(*(_outcome(client, schedule, *one) for one in found)))


async def _outcome(client: Client, schedule: str, moment: int, slot: Slot) -> Outcome:
    if slot.state != "dispatched":
        return Outcome(moment, slot)
    run = slot_id(schedule, moment)
    entry = await client.runs.get(run)
    record = read_record(client.broker, run, entry.value) if entry else None
    if record is None:
        return Outcome(moment, slot, run)
    first = record.attempts[0].started if record.attempts else record.started
    seconds = max(0.0, record.ended - first) if record.ended and first else 0.0
    return Outcome(moment, slot, run, record.state, record.error, seconds)
