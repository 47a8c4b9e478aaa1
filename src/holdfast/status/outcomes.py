"""The newest slots of a schedule with what became of their runs: what a strip of them shows.

A slot's record says whether its run was sent; whether it went well is in the run's record, which
expires a day after the run has ended. Then the slot is only known to have been sent.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Final

import msgspec

from holdfast.broker import Bucket
from holdfast.client import Client
from holdfast.model import slot as slots
from holdfast.model.slot import Slot, slot_id
from holdfast.names import kv_key, kv_subject
from holdfast.status.finding import read_record
from holdfast.status.messages import newest

LOOK: Final = 500


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
        if len(found) >= limit or looked >= LOOK:
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
