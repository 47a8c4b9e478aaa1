"""A day of all schedules: what became of their slots, a quarter of an hour at a time.

It reads the records of slots, the newest first, and no more than `MOST`: a day with more is known
from some time on, which it says. `scheduler.slots_kept` and `scheduler.slot_ttl_seconds` say which
records are kept.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.broker import Bucket
from holdfast.client import Client
from holdfast.durations import DAY, MINUTE
from holdfast.model import slot as slots
from holdfast.model.schedule import Schedule, instants
from holdfast.model.slot import Slot
from holdfast.names import kv_key, kv_subject
from holdfast.status.messages import newest
from holdfast.status.schedules import LATE_SECONDS

CELL: Final = 15 * MINUTE
CELLS: Final = DAY // CELL
KINDS: Final = ("missed", "skipped", "late", "waiting", "fired", "due")
"""What a slot can be, the worst first: that is how its quarter of an hour looks."""
MOST: Final = 10_000
"""Records that one request reads: a second or less. A slot every ten seconds has 8,640 a day."""
MOST_DUE: Final = 200
"""Future slots of one schedule: enough to fill each quarter of an hour twice."""


class Day(msgspec.Struct, frozen=True):
    """The slots of one day, from midnight to midnight UTC."""

    first: int
    cells: dict[str, dict[int, Counter[str]]]
    """By schedule and quarter of an hour: how many slots of each kind."""
    since: float
    """From when on the records were read."""


async def day(client: Client, schedules: Sequence[Schedule], at: float) -> Day:
    """What became of the slots of the day that contains an instant, and what is still due."""
    first = int(at) // DAY * DAY
    cells: dict[str, dict[int, Counter[str]]] = {one.name: {} for one in schedules}
    since = await _recorded(client, first, cells)
    now = client.broker.server_now()
    for schedule in schedules:
        start = max(now, first - 1)
        if schedule.active and start < first + DAY:
            coming = instants(schedule, start, first + DAY - 1)
            for moment in itertools.islice(coming, MOST_DUE):
                _add(cells[schedule.name], first, moment, "due")
    return Day(first, cells, since)


async def _recorded(client: Client, first: int, cells: dict[str, dict[int, Counter[str]]]) -> float:
    """Add the recorded slots; returns from when on they were read."""
    bucket = Bucket(client.broker, client.broker.names.slots)
    looked = 0
    async for kept in newest(client.broker, bucket.stream, kv_subject(bucket.name, "slot.>")):
        looked += 1
        if looked > MOST:
            return kept.stored
        if kept.stored < first:  # a slot is recorded when it is due, or later
            break
        key = kv_key(bucket.name, kept.subject)
        decode = functools.partial(slots.decode_at, key)
        found = client.broker.unreadable.read(decode, bucket.name, key, kept.body)
        if found and found[0] in cells:
            name, moment, slot = found
            _add(cells[name], first, moment, kind(slot), slot)
    return float(first)


def kind(slot: Slot) -> str:
    """What became of a recorded slot."""
    if slot.state == "skipped":
        return "missed" if slot.reason in ("catch_up", "limit") else "skipped"
    if slot.state != "dispatched":
        return "waiting"
    late = slot.caught_up or (slot.dispatched - slot.due > LATE_SECONDS and not slot.backfill)
    return "late" if late else "fired"


def _add(
    cells: dict[int, Counter[str]], first: int, moment: int, what: str, slot: Slot | None = None
) -> None:
    """Count a slot, or a series of them, in the quarters of an hour that it covers."""
    last = max(moment, slot.last) if slot else moment
    start, end = (moment - first) // CELL, (last - first) // CELL
    for cell in range(max(0, start), min(CELLS - 1, end) + 1):
        single = start == end
        cells.setdefault(cell, Counter())[what] += max(1, slot.count) if slot and single else 1
