"""Flows in memory: journals, children and events for `holdfast.testing.memory`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from holdfast.clock import Clock
from holdfast.errors import Conflict
from holdfast.model.journal import (
    ENTRIES,
    EXPORTED_END,
    ChildEnd,
    ExportedEnd,
    FlowJournal,
    JournalEntry,
    KeyedEvent,
    Parent,
)
from holdfast.model.message import RunMessage
from holdfast.model.run import RunRecord
from holdfast.names import H_MSG_ID, Names
from holdfast.ownership.journals import child_end, wake_message
from holdfast.testing.queue import MemoryQueue, Scheduled


class MemoryJournals:
    """Where flows are stored (`ownership.journals.Journals`)."""

    def __init__(self, clock: Clock, queue: MemoryQueue, names: Names) -> None:
        self._clock = clock
        self._queue = queue
        self._names = names
        self._sequence = itertools.count(1)
        self.stored: dict[str, list[tuple[int, bytes]]] = {}
        """By run, its journal as messages."""
        self._ends: dict[tuple[str, int], dict[int, ChildEnd]] = {}
        self._stopped: dict[str, str] = {}
        self._signals: dict[tuple[str, str], KeyedEvent] = {}
        self._waits: dict[tuple[str, str], dict[str, RunMessage]] = {}

    async def load(self, run: str) -> FlowJournal:
        journal = FlowJournal(run)
        for sequence, body in self.stored.get(run, ()):
            journal.read(sequence, body)
        return journal

    def export(self, run: str) -> bytes:
        """A journal as one text: a line for each message, and for each child that has ended."""
        lines = [body for _, body in self.stored.get(run, ())]
        for (parent, number), ends in self._ends.items():
            if parent == run:
                lines += [EXPORTED_END.encode(ExportedEnd(number, end)) for end in ends.values()]
        return b"".join(line + b"\n" for line in lines)

    def restore(self, run: str, lines: Sequence[bytes]) -> None:
        """Store an exported journal without its epochs, which fence the writers of another
        system."""
        kept = self.stored.setdefault(run, [])
        for line in lines:
            if line.startswith(b"{"):
                told = EXPORTED_END.decode(line)
                self._ends.setdefault((run, told.number), {})[told.end.index] = told.end
            else:
                entries = (msgspec.structs.replace(e, epoch=0) for e in ENTRIES.decode(line))
                kept.append((next(self._sequence), ENTRIES.encode(tuple(entries))))

    async def append(
        self,
        run: str,
        entries: Sequence[JournalEntry],
        *,
        expected: int,
        epoch: int,
        ttl: float | None = None,
    ) -> int:
        kept = self.stored.setdefault(run, [])
        last = kept[-1][0] if kept else 0
        if last != expected:
            raise Conflict(f"the journal of {run} is at {last}, not {expected}")
        if ttl is not None:
            kept.clear()
        sequence = next(self._sequence)
        kept.append((sequence, ENTRIES.encode(tuple(entries))))
        return sequence

    async def ends(self, run: str, number: int, total: int) -> dict[int, ChildEnd]:
        return dict(self._ends.get((run, number), {}))

    async def forget(self, run: str) -> None:
        self._ends = {key: ends for key, ends in self._ends.items() if key[0] != run}
        await self.unstop(run)

    async def tell(self, parent: Parent, run: str, record: RunRecord) -> None:
        ends = self._ends.setdefault((parent.run, parent.n), {})
        ends.setdefault(parent.place, child_end(parent, run, record))
        if len(ends) >= parent.total:
            mark = f"c{parent.n}-{parent.place}"
            await self.wake(parent.group, parent.job, parent.run, mark)

    async def stop(self, run: str, why: str) -> None:
        self._stopped[run] = why

    async def stopped(self, run: str) -> str:
        return self._stopped.get(run, "")

    async def unstop(self, run: str) -> None:
        self._stopped.pop(run, None)

    async def wake(
        self, group: str, job: str, run: str, mark: str, due: float | None = None
    ) -> None:
        message = wake_message(self._names, group, job, run, mark)
        if due is None:
            self._queue.job(group, job, b"", message.headers)
            return
        del message.headers[H_MSG_ID]
        subject = self._names.later(group, job, run, f"w{mark}")
        self._queue.later(subject, Scheduled(group, job, b"", message.headers, due), replace=True)

    async def unwake(self, group: str, job: str, run: str, mark: str) -> None:
        self._queue.forget_later(self._names.later(group, job, run, f"w{mark}"))

    async def newest(self, event: str, key: str) -> KeyedEvent | None:
        return self._signals.get((event, key))

    async def wait(self, event: str, key: str, wake: RunMessage, run: str, after: int) -> bool:
        newest = self._signals.get((event, key))
        if newest is not None and newest.sequence != after:
            return False
        self._waits.setdefault((event, key), {})[run] = wake
        return True

    async def unwait(self, event: str, key: str, run: str) -> None:
        self._waits.get((event, key), {}).pop(run, None)

    async def signal(self, event: str, key: str, body: bytes, by: str) -> int:
        """Store an event with a key and wake those who wait for it."""
        sequence = next(self._sequence)
        self._signals[event, key] = KeyedEvent(sequence, self._clock.utc(), body, by)
        for run, message in list(self._waits.get((event, key), {}).items()):
            where = self._names.parse_job(message.subject)
            assert where is not None
            await self.wake(*where, run, f"s{sequence}")
        return sequence
