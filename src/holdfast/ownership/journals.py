"""Flows on NATS: their journals, the ends of their children, the events they wait for.

    hf.flow.<run>               the journal; each message expects the sequence of the one before
    hf.flow.<run>.<number>      one message for each child of an operation that has ended
    hf.flow.<run>.stop          the flow was cancelled
    hf.signal.<event>.<key>     events with a key
    hf.wait.<event>.<key>.<run> a flow that waits for one

**Fence.** Streams cannot fence each other, so the journal is fenced by its own last sequence. A new
holder appends `open` with its epoch first; the next append of the old one is refused.

**Wakes.** A wake is a message of the flow's job without payload and number. It means "look again",
so a repeated or early one is harmless: the flow is replayed and parks again. Its message id names
who sends it.

**Children.** Whoever ends a child stores that end beside the parent's journal and then counts the
ends: if all are there, it sends the wake. A crash before the run's message is acknowledged repeats
both. An operation's number differs between the generations of a flow, and the ends are removed with
its journal. Ends that arrive later, of children that nobody waited for, are removed by
`forget_ends`.

**Events.** A wait is stored only if the newest event is still the one that the flow has seen. So
each event is either seen by the flow or stored after the wait, where the watcher of events finds
it.

Not guaranteed: that a wake is sent at once. If a process dies between the last end and its wake,
and nothing is redelivered (an `at_most_once` child), coordinators find the flow later.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, Protocol

from holdfast.broker import Broker
from holdfast.broker.kv import direct_batch, parse_time, ttl_text
from holdfast.broker.wire import parse_headers
from holdfast.clock import Clock, rfc3339
from holdfast.durations import DAY
from holdfast.errors import (
    BrokerError,
    ClaimLost,
    Conflict,
    NotFound,
    OutcomeUnknown,
    Unreadable,
)
from holdfast.model.journal import (
    CHILD_END,
    ENTRIES,
    MOST_OPERATIONS,
    ChildEnd,
    FlowJournal,
    JournalEntry,
    KeyedEvent,
    Parent,
)
from holdfast.model.message import RunMessage, delayed
from holdfast.model.run import RunRecord
from holdfast.names import (
    H_EPOCH,
    H_EXPECTED,
    H_EXPECTED_SUBJECT,
    H_MSG_ID,
    H_RUN,
    H_SEQUENCE,
    H_TTL,
    H_USER,
    H_WAKE,
    Names,
    wake_message_id,
)
from holdfast.retrying import retrying

log = logging.getLogger("holdfast.flows")

STOP_SECONDS: Final = DAY
"""How long a cancellation is kept: the flow ends within seconds of its next wake."""
READ_TRIES: Final = 3
"""Reads of a journal that changes meanwhile: the reader holds the claim, so the changes soon
stop."""

Found = dict[str, Any]


class Journals(Protocol):
    """Where flows are stored: NATS, or memory in unit tests."""

    async def load(self, run: str) -> FlowJournal:
        """A flow's journal as the leader knows it; `Unreadable` if it is damaged."""
        ...

    async def append(
        self,
        run: str,
        entries: Sequence[JournalEntry],
        *,
        expected: int,
        epoch: int,
        ttl: float | None = None,
    ) -> int:
        """Append if nobody else has, otherwise raise `Conflict`. `ttl`: fold the journal into these
        entries, which expire."""
        ...

    async def ends(self, run: str, number: int, total: int) -> dict[int, ChildEnd]:
        """The ended children of an operation by index, including the newest that the leader
        knows."""
        ...

    async def forget(self, run: str) -> None:
        """Once the flow has ended, remove what its children and a cancellation left. Best
        effort."""
        ...

    async def stop(self, run: str, why: str) -> None:
        """Store that a flow is cancelled."""
        ...

    async def stopped(self, run: str) -> str:
        """Why the flow was cancelled; empty if it was not."""
        ...

    async def unstop(self, run: str) -> None:
        """Remove a cancellation that came too late, so that it does not cancel a replay. Best
        effort."""
        ...

    async def wake(
        self, group: str, job: str, run: str, mark: str, due: float | None = None
    ) -> None:
        """Wake a flow, now or later."""
        ...

    async def unwake(self, group: str, job: str, run: str, mark: str) -> None:
        """Remove a scheduled wake. Best effort."""
        ...

    async def newest(self, event: str, key: str) -> KeyedEvent | None:
        """The newest event with a key."""
        ...

    async def wait(self, event: str, key: str, wake: RunMessage, run: str, after: int) -> bool:
        """Store that a flow waits for an event after that one; False if a newer one is stored."""
        ...

    async def unwait(self, event: str, key: str, run: str) -> None:
        """The flow no longer waits. Best effort."""
        ...

    async def tell(self, parent: Parent, run: str, record: RunRecord) -> None:
        """Store how a child has ended, and wake its flow if it was the last one."""
        ...


def wake_message(names: Names, group: str, job: str, run: str, mark: str) -> RunMessage:
    """The message that wakes a flow."""
    headers = {H_RUN: run, H_WAKE: mark, H_MSG_ID: wake_message_id(run, mark)}
    return RunMessage(names.job(group, job), b"", headers)


def child_end(parent: Parent, run: str, record: RunRecord) -> ChildEnd:
    """The end of a child, as its flow keeps it."""
    return ChildEnd(
        parent.place,
        run,
        record.state,
        record.ended,
        record.error,
        record.result,
        record.result_object,
    )


class NatsJournals:
    """The journals of one namespace."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._names = broker.names
        self._get = f"STREAM.MSG.GET.{broker.names.flows}"
        self._looks: dict[str, asyncio.Task[int]] = {}
        self._later_looks: dict[str, asyncio.Task[int]] = {}

    # ---- the journal

    async def load(self, run: str) -> FlowJournal:
        """Read a journal.

        Pages may come from a replica that lags, so its end is compared with the leader's.
        """
        subject, journal = self._names.flow(run), FlowJournal(run)
        for _ in range(READ_TRIES):
            last = await self._last(subject)
            if last is None:
                return FlowJournal(run)
            if int(last["seq"]) == journal.last:
                return journal
            journal = FlowJournal(run)
            async for message in direct_batch(self._broker, self._names.flows, subject):
                sequence = int(message.headers[H_SEQUENCE])
                try:
                    journal.read(sequence, message.body)
                except Unreadable as error:
                    self._broker.unreadable.note(
                        self._names.flows, str(sequence), error, message.body
                    )
                    raise Unreadable(
                        f"message {sequence} of {self._names.flows}, in the journal of flow {run}: "
                        f"{error}"
                    ) from None
            if journal.last >= int(last["seq"]):
                return journal
        raise OutcomeUnknown(f"the journal of {run} could not be read to its end")

    async def append(
        self,
        run: str,
        entries: Sequence[JournalEntry],
        *,
        expected: int,
        epoch: int,
        ttl: float | None = None,
    ) -> int:
        subject = self._names.flow(run)
        headers = {H_EXPECTED: str(expected), H_EPOCH: str(epoch)}
        if ttl is not None:
            headers[H_TTL] = ttl_text(ttl)
        stored = await self._store(run, subject, ENTRIES.encode(tuple(entries)), headers)
        if ttl is not None:
            request = {"filter": subject, "keep": 1}
            await self._broker.api(f"STREAM.PURGE.{self._names.flows}", request)
        return stored

    async def _store(self, run: str, subject: str, body: bytes, headers: dict[str, str]) -> int:
        expected, epoch = int(headers[H_EXPECTED]), headers[H_EPOCH]
        try:
            return (await self._broker.store(subject, body, headers)).seq
        except Conflict:
            # The conflict may be an earlier copy of this write, whose answer was lost.
            last = await self._last(subject)
            if last is not None and int(last["seq"]) > expected:
                same = base64.b64decode(last.get("data", "")) == body
                if same and _headers(last).get(H_EPOCH) == epoch:
                    return int(last["seq"])
            elif last is None or int(last["seq"]) == expected:  # another write is in progress
                raise OutcomeUnknown(f"the journal of {run} is being written") from None
            raise

    async def _last(self, subject: str) -> Found | None:
        try:
            answer = await self._broker.api(self._get, {"last_by_subj": subject})
        except NotFound as error:
            if "stream not found" in str(error):
                raise
            return None
        found: Found = answer["message"]
        return found

    # ---- children

    async def ends(self, run: str, number: int, total: int) -> dict[int, ChildEnd]:
        """Read the ends of children.

        A replica that lags may answer. If some seem to be missing, the leader is asked how many
        there are: the wake of the last one must not be mistaken for an early one.
        """
        subject = self._names.flow_children(run, number)
        for _ in range(READ_TRIES):
            found, count = await self._read_ends(subject)
            if len(found) >= total or count >= await self._look(subject, None):
                return found
        raise OutcomeUnknown(f"the ends of {run}'s children could not be read to their end")

    async def _read_ends(self, subject: str) -> tuple[dict[int, ChildEnd], int]:
        """The ends by index, and how many messages were read."""
        found: dict[int, ChildEnd] = {}
        count = 0
        async for message in direct_batch(self._broker, self._names.flows, subject):
            at, count = message.headers[H_SEQUENCE], count + 1
            read = self._broker.unreadable.read(
                CHILD_END.decode, self._names.flows, at, message.body
            )
            if read is not None:
                found.setdefault(read.index, read)
        return found, count

    async def forget(self, run: str) -> None:
        await self._purge(self._names.flows, self._names.flow_children(run, "*"))

    async def forget_ends(self) -> int:
        """Remove ends of children that no flow waits for; returns the number of operations they
        belonged to.

        The journal is read after the subject was found. So if it is missing, has ended or belongs
        to another generation, no flow will ever ask for these ends.
        """
        removed = 0
        async for subject in self._subjects(self._names.flow_children("*", "*")):
            found = self._names.parse_flow_children(subject)
            if found is not None and await self._is_over(*found):
                await self._purge(self._names.flows, subject)
                removed += 1
        return removed

    async def _is_over(self, run: str, number: int) -> bool:
        try:
            journal = await self.load(run)
        except Unreadable:
            return False
        if not journal.running:
            return True
        return number != journal.gather_number(number % MOST_OPERATIONS)

    async def tell(self, parent: Parent, run: str, record: RunRecord) -> None:
        """Store the end of a child beside its flow, and wake the flow if it was the last one."""
        subject = self._names.flow_children(parent.run, parent.n)
        body = CHILD_END.encode(child_end(parent, run, record))
        await self._broker.store(subject, body, {H_MSG_ID: f"{subject}.{parent.place}"})
        count, first = await self._count(subject)
        if count >= parent.total and first:
            mark = f"c{parent.n}-{parent.place}"
            await self.wake(parent.group, parent.job, parent.run, mark)

    async def _count(self, subject: str) -> tuple[int, bool]:
        """How many children have ended, at some time after this call began.

        Children that end together share one count; returns True to only one of them.
        """
        if subject in self._later_looks:
            return await asyncio.shield(self._later_looks[subject]), False
        running = self._looks.get(subject)
        task = asyncio.create_task(self._look(subject, running), name="holdfast-children")
        self._later_looks[subject] = task
        return await asyncio.shield(task), True

    async def _look(self, subject: str, before: asyncio.Task[int] | None) -> int:
        if before is not None:
            await asyncio.wait([before])
        ours = self._later_looks.pop(subject, None)
        if ours is not None:
            self._looks[subject] = ours
        try:
            request = {"subjects_filter": subject}
            info = await self._broker.api(f"STREAM.INFO.{self._names.flows}", request)
            return int((info["state"].get("subjects") or {}).get(subject, 0))
        finally:
            if self._looks.get(subject) is ours:
                self._looks.pop(subject, None)

    # ---- stopping and waking

    async def stop(self, run: str, why: str) -> None:
        headers = {H_TTL: ttl_text(STOP_SECONDS)}
        await self._broker.store(self._names.flow_stop(run), why.encode(), headers)

    async def stopped(self, run: str) -> str:
        last = await self._last(self._names.flow_stop(run))
        if last is None:
            return ""
        return base64.b64decode(last.get("data", "")).decode(errors="replace") or "cancelled"

    async def unstop(self, run: str) -> None:
        await self._purge(self._names.flows, self._names.flow_stop(run))

    async def wake(
        self, group: str, job: str, run: str, mark: str, due: float | None = None
    ) -> None:
        message = wake_message(self._names, group, job, run, mark)
        if due is not None:
            del message.headers[H_MSG_ID]  # a later one replaces it
            message = delayed(message, self._names.later(group, job, run, f"w{mark}"), due)
        await self._broker.store(*message)

    async def unwake(self, group: str, job: str, run: str, mark: str) -> None:
        subject = self._names.later(group, job, run, f"w{mark}")
        await self._purge(self._names.jobs, subject)

    # ---- events

    async def newest(self, event: str, key: str) -> KeyedEvent | None:
        last = await self._last(self._names.signal(event, key))
        if last is None:
            return None
        body, by = base64.b64decode(last.get("data", "")), _headers(last).get(H_USER, "")
        return KeyedEvent(int(last["seq"]), parse_time(last["time"]), body, by)

    async def wait(self, event: str, key: str, wake: RunMessage, run: str, after: int) -> bool:
        headers = {
            H_EXPECTED: str(after),
            H_EXPECTED_SUBJECT: self._names.signal(event, key),
        }
        subject = self._names.signal_wait(event, key, run)
        try:
            await self._broker.store(subject, wake.subject.encode(), headers)
        except Conflict:
            return False
        return True

    async def unwait(self, event: str, key: str, run: str) -> None:
        await self._purge(self._names.flows, self._names.signal_wait(event, key, run))

    async def signalled(self, subject: str, sequence: int) -> int:
        """Wake the flows that wait for an event that was stored; returns how many."""
        count = 0
        async for run, group, job in self.waiting(self._names.waits_of(subject)):
            await self.wake(group, job, run, f"s{sequence}")
            count += 1
        return count

    async def waiting(self, pattern: str) -> AsyncIterator[tuple[str, str, str]]:
        """The flows that wait for events, with the group and the job of each, from the leader."""
        async for subject in self._subjects(pattern):
            last = await self._last(subject)
            body = base64.b64decode(last.get("data", "")) if last else b""
            target = body.decode(errors="replace")
            if where := self._names.parse_job(target):
                yield subject.rpartition(".")[2], *where

    async def runs(self) -> AsyncIterator[str]:
        """The flows that have a journal."""
        async for subject in self._subjects(self._names.flow("*")):
            if run := self._names.parse_flow(subject):
                yield run

    async def _subjects(self, pattern: str) -> AsyncIterator[str]:
        """The subjects that have a message, from the leader."""
        offset = 0
        while True:
            request = {"subjects_filter": pattern, "offset": offset}
            info = await self._broker.api(f"STREAM.INFO.{self._names.flows}", request)
            page = info["state"].get("subjects") or {}
            for subject in page:
                yield subject
            offset += len(page)
            if not page or offset >= int(info.get("total", 0)):
                return

    async def forget_events(self, before: float) -> None:
        """Remove events that were stored before an instant.

        Events from our client have expired by then; those of others have no TTL. Newer events stay:
        if there are none, the purge ends at the sequence that was the last one before it began.
        """
        subject, stream = self._names.signal_any, self._names.flows
        end = int((await self._broker.api(f"STREAM.INFO.{stream}", {}))["state"]["last_seq"]) + 1
        request = {"next_by_subj": subject, "start_time": rfc3339(before)}
        try:
            end = int((await self._broker.api(self._get, request))["message"]["seq"])
        except NotFound as error:
            if "stream not found" in str(error):
                raise
        if end > 1:
            await self._broker.api(f"STREAM.PURGE.{stream}", {"filter": subject, "seq": end})

    async def _purge(self, stream: str, subject: str) -> None:
        try:
            await self._broker.api(f"STREAM.PURGE.{stream}", {"filter": subject})
        except BrokerError as error:
            log.debug("%s could not be cleaned up: %s", subject, error)


def _headers(found: Found) -> dict[str, str]:
    return parse_headers(base64.b64decode(found.get("hdrs", "")))


class Writer:
    """Appends to one journal for its holder; nothing is lost while NATS is away."""

    def __init__(
        self,
        journals: Journals,
        journal: FlowJournal,
        epoch: int,
        clock: Clock,
        lost: Callable[[], bool],
    ) -> None:
        """`lost` returns whether the claim is known to be lost."""
        self._journals = journals
        self.journal = journal
        self.epoch = epoch
        self._clock = clock
        self._lost = lost

    async def append(self, *entries: JournalEntry, ttl: float | None = None) -> None:
        """Store entries, however long that takes; `ClaimLost` if another holder has opened the
        journal."""
        journal = self.journal

        async def store() -> int:
            if self._lost():
                return 0
            try:
                return await self._journals.append(
                    journal.run, entries, expected=journal.last, epoch=self.epoch, ttl=ttl
                )
            except Conflict:
                return 0

        sequence = await retrying(
            store, clock=self._clock, what="writing a flow's journal", on=BrokerError
        )
        if not sequence:
            raise ClaimLost(f"flow {journal.run} was taken over by another node")
        for entry in entries:
            journal.add(entry)
        journal.last = sequence
