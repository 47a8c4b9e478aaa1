"""Backfilling: firing past slots of a schedule by hand.

Each slot keeps its id, so one whose record says that it was sent is not sent again. One that was
skipped or never recorded is recorded as planned, sent, and marked as dispatched. A backfill that
was interrupted is finished by repeating the command.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from holdfast.broker import Bucket
from holdfast.client.client import Client
from holdfast.client.schedules import Schedules
from holdfast.clock import rfc3339
from holdfast.errors import Conflict, InvalidInput
from holdfast.model import slot as slots
from holdfast.model.message import first_message
from holdfast.model.schedule import NO_BODY, Schedule, due_at, instants
from holdfast.model.slot import Slot, slot_id
from holdfast.names import slot_key

KEPT_SECONDS = 7 * 86_400.0
"""How long the records of backfilled slots are kept: a repeat within it sends nothing twice."""
MOST = 10_000
"""Slots are sent one by one, each with three writes: more than this would take minutes."""


@dataclass(frozen=True, slots=True)
class Backfilled:
    """What a backfill did, by the times of the slots."""

    sent: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    """Sent before, by a scheduler or an earlier backfill."""


async def backfill(client: Client, name: str, start: float, end: float) -> Backfilled:
    """Fire every slot from `start` to `end` (inclusive) that was not fired."""
    schedule = await Schedules(client).show(name)
    await client.topology.measure_clock()
    if end > client.broker.server_now():
        raise InvalidInput("a backfill must end in the past: future slots fire by themselves")
    everything = msgspec.structs.replace(schedule, since=0.0)
    moments = []
    for moment in instants(everything, start - 1, end):
        if moment >= start:
            moments.append(moment)
        if len(moments) > MOST:
            raise InvalidInput(
                f"from {rfc3339(start)} to {rfc3339(end)} there are more than {MOST:,} slots: "
                "backfill them in parts"
            )
    found = Backfilled()
    for moment in moments:
        sent = await _fire(client, schedule, moment)
        (found.sent if sent else found.known).append(rfc3339(moment))
    return found


async def _fire(client: Client, schedule: Schedule, moment: int) -> bool:
    bucket = Bucket(client.broker, client.broker.names.slots)
    key = slot_key(schedule.name, slots.stamp(moment))
    revision, entry = await bucket.last(key)
    old = bucket.read(slots.decode, entry) if entry else None
    if old is not None and old.state == "dispatched":
        return False
    now = client.broker.server_now()
    slot = Slot(
        "planned",
        due_at(schedule, moment),
        planned=now,
        node="backfill",
        backfill=True,
        job=schedule.job,
        group=schedule.group,
        body=schedule.payload,
        headers=schedule.headers,
        reason=old.reason if old and old.last else "",  # one record may stand for a series of slots
        last=old.last if old else 0,
        count=old.count if old else 0,
    )
    try:
        revision = await bucket.put(key, slots.encode(slot), expected=revision, ttl=KEPT_SECONDS)
    except Conflict:
        return False  # a scheduler was faster
    stored = await client.store_surely(
        *first_message(
            client.broker.names,
            schedule.group,
            schedule.job,
            slot_id(schedule.name, moment),
            bytes(schedule.payload),
            schedule.headers,
            slot=moment,
        )
    )
    sent = msgspec.structs.replace(
        slot,
        state="dispatched",
        dispatched=client.broker.server_now(),
        sequence=stored.seq,
        duplicate=stored.duplicate,
        body=NO_BODY,
        headers={},
    )
    await bucket.put(key, slots.encode(sent), expected=revision, ttl=KEPT_SECONDS)
    return True
