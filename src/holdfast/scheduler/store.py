"""The leader's store of slots: plan, send, mark, and find unfinished ones.

`plan` writes slots and progress in one atomic batch. Each slot must be new (expected revision 0),
and the progress record expects the term to be at the leader's epoch: the server rejects a slot that
exists, and a leader that was replaced (`StaleTerm`). It does not say which of the two it was, so
the term is read; if it still holds, existing slots are left out of the batch and returned with
their own revisions, to be sent like the rest if they are not marked as sent.

`send` publishes runs with the slot's id as message id: a repeat within the stream's window is
dropped and reported as a duplicate. A run that is too large for the server gives `TOO_LARGE`:
retrying would not help. `mark` is fenced like `plan`.

Without an answer the outcome is unknown (`OutcomeUnknown`): the caller repeats the call, and every
call is idempotent.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from holdfast.broker import Broker, Bucket, Received
from holdfast.broker.batch import LARGEST_BATCH, Write, store_batch
from holdfast.broker.kv import Entry, ttl_text
from holdfast.broker.wire import read_ack
from holdfast.errors import (
    BrokerError,
    Conflict,
    HoldfastError,
    NotFound,
    OutcomeUnknown,
    PayloadTooLarge,
    StaleTerm,
    Unavailable,
)
from holdfast.model import run as runs
from holdfast.model import slot as slots
from holdfast.model.message import RunMessage, first_message
from holdfast.model.slot import SchedulerProgress, Slot
from holdfast.names import (
    H_EXPECTED,
    H_EXPECTED_SUBJECT,
    H_TTL,
    kv_key,
    kv_subject,
    progress_key,
    slot_key,
    term_key,
)

T = TypeVar("T")

ROLE = "scheduler"
MOST_PLANNED = LARGEST_BATCH - 1
"""Slots in one batch: the progress record is its last message."""
STALE_SECONDS = 0.1
STALE_TRIES = 50
"""Pause and tries: together five seconds, longer than a healthy replica lags."""
READS_AT_ONCE = 200
"""Concurrent requests: enough to fill the connection, few enough to keep answering pings."""
KEPT_LEAST_SECONDS = 3600.0
"""The shortest time a slot's record is kept: longer than it takes to replace a leader, so that no
slot is recorded twice."""
BATCH_HEADER_BYTES = 512
"""An upper bound for the headers of one write of a batch."""
_EXCEEDS_STREAM = "(10054)"
"""The server's error code for a message larger than its stream allows."""


class Planned(NamedTuple):
    """A slot and the revision of its record; 0 while there is none."""

    schedule: str
    moment: int
    slot: Slot
    revision: int = 0
    unread: bool = False
    """The record at that revision is unreadable."""

    @property
    def id(self) -> str:
        return slots.slot_id(self.schedule, self.moment)


class Sent(NamedTuple):
    """The jobs stream's answer to a run."""

    sequence: int
    duplicate: bool


class TooLarge(enum.Enum):
    """The answer to a run that the server will never accept."""

    TOO_LARGE = "too_large"


TOO_LARGE = TooLarge.TOO_LARGE
Answer = Sent | TooLarge | None
"""None if there was no answer or nothing could be sent; try again."""


class SlotStore(Protocol):
    """What a leader needs; on NATS, or in memory for the tests that crash it at each step."""

    async def progress(self) -> SchedulerProgress: ...
    def fits(self, planned: Planned) -> bool: ...
    async def plan(
        self, planned: Sequence[Planned], progress: SchedulerProgress, epoch: int
    ) -> list[Planned]: ...
    def send(self, planned: Sequence[Planned]) -> Awaitable[list[Answer]]: ...
    async def mark(
        self, planned: Sequence[Planned], progress: SchedulerProgress, epoch: int
    ) -> int: ...
    async def left_over(self, after: int, epoch: int) -> list[Planned]: ...
    async def active(self, planned: Sequence[Planned]) -> list[bool]: ...
    async def last(self, schedule: str) -> Planned | None: ...
    async def get(self, schedule: str, moment: int) -> Planned | None: ...
    def cancel(self, planned: Planned) -> None: ...


Ttl = Callable[[Planned], float]
Cancel = Callable[[Planned], None]


class NatsSlots:
    """Slots on NATS."""

    def __init__(self, broker: Broker, ttl: Ttl, cancel: Cancel) -> None:
        self._broker = broker
        self._bucket = Bucket(broker, broker.names.slots)
        self._runs = Bucket(broker, broker.names.runs)
        self._ttl = ttl
        self._cancel = cancel

    # ---- progress

    async def progress(self) -> SchedulerProgress:
        """The instant up to which schedulers have planned.

        If it is unreadable, planning starts an hour before it was stored; slots planned again have
        a record, so none fires twice.
        """
        entry = await self._bucket.get(progress_key(ROLE))
        if entry is None:
            return SchedulerProgress()
        found = self._bucket.read(slots.decode_progress, entry)
        return found or SchedulerProgress(watermark=max(0.0, entry.stored - KEPT_LEAST_SECONDS))

    # ---- planning

    def fits(self, planned: Planned) -> bool:
        """Whether the server accepts a slot's record, which is larger than its run."""
        slot, limit = planned.slot, self._broker.max_message_bytes
        if slots.room(slot.body, slot.headers) <= limit:
            return True
        return len(slots.encode(slot)) + BATCH_HEADER_BYTES <= limit

    async def plan(
        self, planned: Sequence[Planned], progress: SchedulerProgress, epoch: int
    ) -> list[Planned]:
        """Record slots that are not recorded yet; returns all of them as recorded now."""
        missing, there = list(planned), []
        while True:
            try:
                last = await self._commit(missing, progress, epoch)
            except Conflict:
                await self._check_term(epoch)
                found = await self._read(missing)
                if not any(found):
                    raise OutcomeUnknown("slots rejected and not stored; retry") from None
                there += [f for f in found if f and not f.unread]
                missing = [
                    p if f is None else p._replace(revision=f.revision)
                    for p, f in zip(missing, found, strict=True)
                    if f is None or f.unread
                ]
                continue
            first = last - len(missing)
            new = [p._replace(revision=first + n) for n, p in enumerate(missing)]
            return [*there, *new]

    async def mark(
        self, planned: Sequence[Planned], progress: SchedulerProgress, epoch: int
    ) -> int:
        """Record the state of slots; returns the newest revision."""
        try:
            return await self._commit(planned, progress, epoch)
        except Conflict:
            await self._check_term(epoch)
        found = await self._read(planned)
        open_ones = [
            p._replace(revision=f.revision)
            for p, f in zip(planned, found, strict=True)
            if f is not None and (f.slot.pending or f.unread)
        ]
        return await self._commit(open_ones, progress, epoch)

    async def _commit(
        self, planned: Sequence[Planned], progress: SchedulerProgress, epoch: int
    ) -> int:
        bucket = self._bucket.name
        writes = [
            Write(
                kv_subject(bucket, slot_key(p.schedule, slots.stamp(p.moment))),
                slots.encode(p.slot),
                {H_EXPECTED: str(p.revision), H_TTL: ttl_text(self._ttl(p))},
            )
            for p in planned
        ]
        fence = {
            H_EXPECTED: str(epoch),
            H_EXPECTED_SUBJECT: kv_subject(bucket, term_key(ROLE)),
        }
        subject = kv_subject(bucket, progress_key(ROLE))
        writes.append(Write(subject, slots.encode(progress), fence))
        if len(writes) == 1:
            return (await self._broker.store(*writes[0])).seq
        return (await store_batch(self._broker, writes)).seq

    async def _check_term(self, epoch: int) -> None:
        revision, _ = await self._bucket.last(term_key(ROLE))
        if revision != epoch:
            raise StaleTerm(f"the term of epoch {epoch} is over: it is {revision} now")

    async def _read(self, planned: Sequence[Planned]) -> list[Planned | None]:
        return await in_groups(planned, self._recorded)

    async def _recorded(self, p: Planned) -> Planned | None:
        """A slot as recorded. An unreadable record is replaced: a run sent twice is still detected
        by its message id and at its claim."""
        _, entry = await self._bucket.last(slot_key(p.schedule, slots.stamp(p.moment)))
        if entry is None:
            return None
        return self._planned(entry) or p._replace(revision=entry.revision, unread=True)

    # ---- sending

    def send(self, planned: Sequence[Planned]) -> Awaitable[list[Answer]]:
        """Publish runs concurrently: they are sent at once, and the answers can be awaited."""
        futures: list[asyncio.Future[Received] | TooLarge | None] = []
        for p in planned:
            try:
                futures.append(self._broker.post(*self._message(p)))
            except PayloadTooLarge:
                futures.append(TOO_LARGE)
            except HoldfastError:
                futures.append(None)
        return _answers(futures)

    def _message(self, p: Planned) -> RunMessage:
        slot, names = p.slot, self._broker.names
        return first_message(
            names, slot.group, slot.job, p.id, bytes(slot.body), slot.headers, slot=p.moment
        )

    # ---- left over by earlier leaders

    async def left_over(self, after: int, epoch: int) -> list[Planned]:
        """Slots recorded after a revision and not sent, up to the term of `epoch`.

        A lagging replica would show too few: the term itself must be in the listing.
        """
        for _ in range(STALE_TRIES):
            newest, found = await self._list(after)
            if newest >= epoch:
                return found
            await self._broker.clock.sleep(STALE_SECONDS)
        raise Unavailable("the slots' bucket is read from a replica that is behind")

    async def _list(self, after: int) -> tuple[int, list[Planned]]:
        start, newest, found = after + 1, 0, []
        while True:
            page = await self._bucket.page(start)
            newest = max(newest, page.last)
            for message in page.messages:
                key = kv_key(self._bucket.name, message.headers["Nats-Subject"])
                revision = int(message.headers["Nats-Sequence"])
                p = self._planned(Entry(key, message.body, revision, 0.0))
                if p and p.slot.pending:
                    found.append(p)
            if not page.more:
                return newest, found
            start = page.last + 1

    # ---- runs of earlier slots

    async def active(self, planned: Sequence[Planned]) -> list[bool]:
        """Whether the runs of these slots are still queued or running."""
        return await in_groups(planned, self._is_active)

    async def _is_active(self, p: Planned) -> bool:
        entry = await self._runs.get(p.id)
        if entry is not None:
            record = self._runs.read(runs.decode, entry)
            return record is None or not record.terminal
        if not p.slot.sequence:
            return p.slot.pending
        try:
            stream = self._broker.names.jobs
            await self._broker.api(f"STREAM.MSG.GET.{stream}", {"seq": p.slot.sequence})
        except NotFound:
            return False
        return True

    async def last(self, schedule: str) -> Planned | None:
        """The newest slot of a schedule that was sent or will be."""
        _, entry = await self._bucket.last(slot_key(schedule, "*"))
        newest = self._planned(entry) if entry else None
        if newest is None or newest.slot.state != "skipped":
            return newest
        if not newest.slot.previous:
            return None
        return await self.get(schedule, newest.slot.previous)

    async def get(self, schedule: str, moment: int) -> Planned | None:
        """A slot as recorded."""
        found = await self._bucket.get(slot_key(schedule, slots.stamp(moment)))
        return self._planned(found) if found else None

    def cancel(self, planned: Planned) -> None:
        """Request the cancellation of a slot's run; `active` shows later whether it has ended."""
        self._cancel(planned)

    def _planned(self, entry: Entry) -> Planned | None:
        """A slot's record, or None for another key or an unreadable record."""
        found = self._bucket.read(lambda body: slots.decode_at(entry.key, body), entry)
        return Planned(*found, entry.revision) if found else None


async def _answers(
    futures: Sequence[asyncio.Future[Received] | TooLarge | None],
) -> list[Answer]:
    return [await _sent(future) for future in futures]


async def _sent(future: asyncio.Future[Received] | TooLarge | None) -> Answer:
    if not isinstance(future, asyncio.Future):
        return future
    try:
        stored = await read_ack(future)
    except BrokerError as error:
        return TOO_LARGE if _EXCEEDS_STREAM in str(error) else None
    return Sent(stored.seq, stored.duplicate)


async def in_groups(
    planned: Sequence[Planned], ask: Callable[[Planned], Coroutine[Any, Any, T]]
) -> list[T]:
    """Call `ask` for many slots, `READS_AT_ONCE` at a time."""
    found: list[T] = []
    for start in range(0, len(planned), READS_AT_ONCE):
        found += await asyncio.gather(*map(ask, planned[start : start + READS_AT_ONCE]))
    return found
