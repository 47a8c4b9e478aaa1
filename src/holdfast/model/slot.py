"""A slot: one due instant of a schedule, and its state.

    (none) ──► planned ──► dispatched
      │           ▲
      │        waiting            for the run of the slot before (overlap="queue")
      └──────► skipped            by which policy; one record may stand for a series

A planned slot also becomes skipped when its run is too large for the server.

A slot's id is its run's id and its message's id. It consists of the schedule's name and the instant
in UTC, so every scheduler makes the same one, and sending the same slot again is prevented three
times: by the bucket (the record exists), by the stream (the message id is known) and by the
worker's claim (the run id is known).
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, Literal

import msgspec

from holdfast.errors import InvalidName
from holdfast.model.codec import Codec, Count, Headers, Instant, Moment, Name
from holdfast.model.schedule import NO_BODY
from holdfast.names import parse_slot_key, slot_run

State = Literal["planned", "waiting", "dispatched", "skipped"]
Reason = Literal["", "catch_up", "limit", "overlap", "removed", "too_large"]

PENDING: frozenset[str] = frozenset({"planned", "waiting"})
ROOM_BYTES = 4_096
"""Bytes reserved beside payload and headers: more than the record of a schedule or slot, or a
message, needs."""


class Slot(msgspec.Struct, omit_defaults=True, frozen=True):
    """The record of a slot. Unknown members of newer versions are ignored."""

    state: str
    """One of `State`; a newer version may know more."""
    due: Instant
    """When it was to be sent: its instant plus jitter."""
    planned: Instant = 0.0
    dispatched: Instant = 0.0
    node: Name = ""
    """Who planned it, in the term of `epoch`."""
    epoch: Count = 0
    sender: str = ""
    """Who sent its run, if not the one who planned it."""
    caught_up: bool = False
    """It was missed at its time and fired later."""
    backfill: bool = False
    duplicate: bool = False
    """The stream knew its message already: an earlier leader had sent it without recording that."""
    sequence: Count = 0
    """The sequence of its run in the jobs stream."""
    reason: str = ""
    """Why it was skipped: one of `Reason`."""
    last: Moment = 0
    """The last instant of the series, if this record stands for one."""
    count: Count = 0
    """How many instants that series has; 0 if they were not counted."""
    previous: Moment = 0
    """The instant of the last slot before it that was sent, if known: for the overlap policy."""
    body: msgspec.Raw = NO_BODY
    headers: Headers = {}
    job: Name = ""
    group: Name = ""

    @property
    def pending(self) -> bool:
        return self.state in PENDING


class SchedulerProgress(msgspec.Struct, omit_defaults=True, frozen=True):
    """How far the schedulers have come; written in one batch with the slots that it covers."""

    watermark: Instant = 0.0
    """Every slot due up to this instant is recorded."""
    settled: Count = 0
    """No slot recorded up to this revision still waits to be sent."""
    seen: Count = 0
    """The newest change of a schedule that it takes into account."""
    node: str = ""
    epoch: Count = 0


CODEC: Final = Codec[Slot](Slot, "a slot's record")
PROGRESS: Final = Codec[SchedulerProgress](SchedulerProgress, "the schedulers' progress")
decode = CODEC.decode
decode_progress = PROGRESS.decode


def encode(record: Slot | SchedulerProgress) -> bytes:
    """A record as it is stored."""
    return msgspec.json.encode(record)


def decode_at(key: str, body: bytes) -> tuple[str, int, Slot] | None:
    """Schedule, instant and record of a slot; None if the key is not a slot's."""
    parts = parse_slot_key(key)
    if parts is None:
        return None
    try:
        schedule, moment, slot = parts[0], parse_stamp(parts[1]), decode(body)
    except InvalidName as error:
        raise CODEC.unreadable(str(error)) from None
    if slot.pending and not (slot.job and slot.group):
        raise CODEC.unreadable("it is to be sent, and names no job")
    return schedule, moment, slot


def room(body: bytes | msgspec.Raw, headers: dict[str, str]) -> int:
    """The largest message that a slot needs, for its record or its run."""
    return len(bytes(body)) + (len(msgspec.json.encode(headers)) if headers else 0) + ROOM_BYTES


@lru_cache(maxsize=4096)
def stamp(moment: int) -> str:
    """An instant as the last part of a slot's id: `20261116T014500Z`."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y%m%dT%H%M%SZ")


def parse_stamp(text: str) -> int:
    """What `stamp` made."""
    try:
        found = datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise InvalidName(f"{text!r} is not a slot's time, such as 20261116T014500Z") from None
    return int(found.timestamp())


def slot_id(schedule: str, moment: int) -> str:
    """The id of a slot, of its run and of its message."""
    return slot_run(schedule, stamp(moment))
