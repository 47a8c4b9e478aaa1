"""Limits in memory: the worker's own code on a line and gates in this process.

Attempts are made one after the other, so a limit of `running` is full only while a handler waits
for another run, or while an ordered run waits for its retry. Limits of `starts` follow the test's
clock: `mem.advance` lets waiting runs start when their token is due.
"""

from __future__ import annotations

import itertools
from typing import Any

from holdfast.client import RunStatus
from holdfast.clock import Clock
from holdfast.model import limit as limits
from holdfast.model.limit import Entry, Limit, Rule
from holdfast.model.message import RunMessage, number_of
from holdfast.names import H_MSG_ID, Names, attempt_message_id
from holdfast.ownership.gates import GateKey, Gates, Waiter
from holdfast.ownership.store import MemoryEntry, MemoryStore
from holdfast.testing.queue import MemoryQueue


class MemoryLine:
    """The lines of an app in memory (`ownership.gates.Line`)."""

    def __init__(self, queue: MemoryQueue, names: Names) -> None:
        self._queue = queue
        self._names = names
        self._waiters: dict[tuple[GateKey, str], Waiter] = {}
        self._sequences = itertools.count(1)

    async def add(self, gate: GateKey, run: str, message: RunMessage) -> Entry:
        if (gate, run) not in self._waiters:
            entry = Entry(next(self._sequences), run, number_of(message.headers))
            id = f"{attempt_message_id(run, entry.number)}-{entry.sequence}"
            sent = message._replace(headers=message.headers | {H_MSG_ID: id})
            self._waiters[gate, run] = Waiter(entry, sent)
        return self._waiters[gate, run].entry

    async def next(self, gate: GateKey, start: int) -> Waiter | None:
        found = [w for w in self._line(gate) if w.entry.sequence >= start]
        return found[0] if found else None

    async def some(self, gate: GateKey, start: int) -> list[Waiter]:
        return []

    async def last(self, gate: GateKey) -> int:
        return max((w.entry.sequence for w in self._line(gate)), default=0)

    async def send(self, waiter: Waiter) -> None:
        subject, body, headers = waiter.message
        group, job = self._names.parse_job(subject) or ("", "")
        self._queue.job(group, job, body, headers, self._names.parse_queue(subject))

    async def remove(self, gate: GateKey, entry: Entry) -> None:
        found = self._waiters.get((gate, entry.run))
        if found and found.entry == entry:
            del self._waiters[gate, entry.run]

    def _line(self, gate: GateKey) -> list[Waiter]:
        return [waiter for (key, _), waiter in self._waiters.items() if key == gate]

    def forget(self, run: str) -> None:
        """A run that waits was cancelled."""
        for key in [key for key in self._waiters if key[1] == run]:
            del self._waiters[key]

    def statuses(self) -> list[RunStatus]:
        """Runs that wait for a place."""
        found = []
        for waiter in self._waiters.values():
            group, job = self._names.parse_job(waiter.message.subject) or ("", "")
            found.append(RunStatus(waiter.entry.run, "waiting", job=job, group=group))
        return found


class _GateStore(MemoryStore):
    async def last(self, key: str) -> tuple[int, MemoryEntry | None]:
        entry = await self.get(key)
        return (entry.revision if entry else 0), entry


class MemoryGates(Gates):
    """Gates whose tokens come with the test's clock."""

    def __init__(self, line: MemoryLine, clock: Clock, defined: dict[str, Limit]) -> None:
        self._due: dict[GateKey, float] = {}
        super().__init__(
            _GateStore(clock),
            line,
            clock,
            now=clock.utc,
            rules=lambda name: (Rule(code=defined[name].numbers), 0),
        )

    def _pace(self, key: GateKey, state: Any) -> None:
        gate = state.gate
        if gate.allowed.rate and gate.waiting:
            self._due[key] = limits.next_token(gate)
        else:
            self._due.pop(key, None)

    def next_due(self) -> float | None:
        """When the next token is due that a run waits for."""
        return min(self._due.values(), default=None)

    async def serve(self, now: float) -> None:
        """Grant the tokens that are due."""
        for key in [key for key, due in self._due.items() if due <= now]:
            await self.look(key)

    async def free(self, run: str) -> None:
        """Free the places of a run that has ended without a message."""
        for key, state in list(self._states.items()):
            if (number := state.gate.held.get(run)) is not None:
                await self.leave(key, run, number)
