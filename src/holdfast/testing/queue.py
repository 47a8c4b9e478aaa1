"""The streams in memory, for `holdfast.testing.memory`.

They follow the server's rules that jobs can notice: a repeated message id is dropped within the
window; a message that is held is not delivered again; `nak` redelivers it after the delay; a
scheduled message is delivered when it is due, as a new message without its message id; a later
schedule for the same run and attempt replaces the earlier one; each job that subscribes to an event
gets its own copy.

Not covered: acknowledgement deadlines. A delivered message stays with its holder until it is
acknowledged, given back or `returned` by the simulated crash of its process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as replaced

from holdfast.broker import Stored
from holdfast.client import RunStatus
from holdfast.clock import Clock
from holdfast.durations import NANO
from holdfast.keeper.board import Board
from holdfast.model.message import read_heading
from holdfast.names import H_MSG_ID, H_RUN, SERVER_HEADERS, Names
from holdfast.worker.backlog import RANKS

_SAME_INSTANT = 1e-6  # sums of the same seconds in another order differ by less

Headers = dict[str, str]


@dataclass(eq=False)
class QueuedMessage:
    """A stored message of one consumer."""

    subject: str
    group: str
    job: str
    body: bytes
    headers: Headers
    sequence: int
    stored: float
    visible: float
    event: str = ""
    deliveries: int = 0
    held: bool = False


@dataclass(frozen=True)
class Scheduled:
    """A message that is delivered when it is due."""

    group: str
    job: str
    body: bytes
    headers: Headers
    due: float
    queue: str = ""
    sequence: int = 0


class MemoryDelivery:
    """One delivery of a message (`worker.attempt.Message`)."""

    def __init__(self, queue: MemoryQueue, message: QueuedMessage) -> None:
        self.subject = message.subject
        self.body = message.body
        self.headers = message.headers
        self.board: Board | None = None
        self.place = -1
        self.reply = f"memory.ack.{message.sequence}.{message.deliveries}"
        self.deliveries = message.deliveries
        self.sequence = message.sequence
        self.stored_ns = int(message.stored * NANO)
        self._queue = queue
        self._message = message

    async def ack(self) -> None:
        self._queue.remove(self._message)

    async def ack_confirmed(self) -> None:
        self._queue.remove(self._message)

    async def nak(self, delay: float = 0.0) -> None:
        self._queue.returned(self._message, delay)

    async def extend(self) -> None:
        """Nothing to do: there is no deadline."""


@dataclass
class Window:
    """The message ids that a stream knows."""

    seconds: float
    seen: dict[str, tuple[float, Stored]] = field(default_factory=dict)

    def known(self, headers: Headers, now: float) -> Stored | None:
        """What was stored under this id within the window."""
        found = self.seen.get(headers.get(H_MSG_ID, ""))
        if found is None or now - found[0] >= self.seconds:
            return None
        return Stored(found[1].stream, found[1].seq, duplicate=True)

    def remember(self, headers: Headers, now: float, stored: Stored) -> Stored:
        """Keep the id, if there is one."""
        if id := headers.get(H_MSG_ID):
            self.seen[id] = (now, stored)
        return stored


class MemoryQueue:
    """All streams of one namespace."""

    def __init__(self, clock: Clock, names: Names, window_seconds: float) -> None:
        self._clock = clock
        self._names = names
        self._windows = {s: Window(window_seconds) for s in (names.jobs, names.events, names.dead)}
        self._sequences = {stream: itertools.count(1) for stream in self._windows}
        self._messages: dict[QueuedMessage, None] = {}
        self._later: dict[str, Scheduled] = {}

    # ---- storing

    def job(self, group: str, job: str, body: bytes, headers: Headers, queue: str = "") -> Stored:
        """Store a run's message, unless its id is known."""
        now = self._clock.utc()
        window = self._windows[self._names.jobs]
        return window.known(headers, now) or window.remember(
            headers, now, self._put(group, job, body, headers, now, queue)
        )

    def _put(
        self, group: str, job: str, body: bytes, headers: Headers, now: float, queue: str
    ) -> Stored:
        sequence = next(self._sequences[self._names.jobs])
        subject = self._names.job(group, job, queue)
        message = QueuedMessage(subject, group, job, body, headers, sequence, now, now)
        self._messages[message] = None
        return Stored(self._names.jobs, sequence)

    def later(self, subject: str, scheduled: Scheduled, *, replace: bool) -> Stored:
        """Store a scheduled message, unless its id is known, or one waits and `replace` is off."""
        now = self._clock.utc()
        window = self._windows[self._names.jobs]
        if known := window.known(scheduled.headers, now):
            return known
        if subject in self._later and not replace:
            return Stored(self._names.jobs, duplicate=True)
        stored = Stored(self._names.jobs, next(self._sequences[self._names.jobs]))
        self._later[subject] = replaced(scheduled, sequence=stored.seq)
        return window.remember(scheduled.headers, now, stored)

    def event(
        self, event: str, body: bytes, headers: Headers, subscribers: Iterable[tuple[str, str]]
    ) -> Stored:
        """Store an event, with a copy for each subscribing job, unless its id is known."""
        now = self._clock.utc()
        window = self._windows[self._names.events]
        if known := window.known(headers, now):
            return known
        sequence = next(self._sequences[self._names.events])
        subject = self._names.event(event)
        for group, job in subscribers:
            copy = QueuedMessage(subject, group, job, body, headers, sequence, now, now, event)
            self._messages[copy] = None
        return window.remember(headers, now, Stored(self._names.events, sequence))

    def is_new_dead_letter(self, headers: Headers) -> bool:
        """Whether the dead letter's id is new; remembers it."""
        now = self._clock.utc()
        window = self._windows[self._names.dead]
        if window.known(headers, now):
            return False
        window.remember(
            headers, now, Stored(self._names.dead, next(self._sequences[self._names.dead]))
        )
        return True

    # ---- delivering

    def take(self, consumers: Mapping[tuple[str, str], int]) -> QueuedMessage | None:
        """The message of the highest priority that has been due longest, of these consumers.

        `consumers`: group and job, with the job's own priority.
        """
        self._fire()
        now = self._clock.utc() + _SAME_INSTANT
        due = [
            m
            for m in self._messages
            if not m.held and m.visible <= now and (m.group, m.job) in consumers
        ]
        if not due:
            return None
        own = self._names.parse_queue
        message = min(  # of equals the first stored
            due,
            key=lambda m: (RANKS.get(own(m.subject), consumers[m.group, m.job]), m.visible),
        )
        message.held = True
        message.deliveries += 1
        return message

    def _fire(self) -> None:
        now = self._clock.utc() + _SAME_INSTANT
        fired = [subject for subject, scheduled in self._later.items() if scheduled.due <= now]
        for subject in sorted(fired, key=lambda s: self._later[s].due):
            found = self._later.pop(subject)
            kept = {k: v for k, v in found.headers.items() if not k.startswith(SERVER_HEADERS)}
            self._put(found.group, found.job, found.body, kept, found.due, found.queue)

    def next_due(self) -> float | None:
        """When the next delayed item is due."""
        now = self._clock.utc() + _SAME_INSTANT
        waiting = [m.visible for m in self._messages if not m.held and m.visible > now]
        waiting += [scheduled.due for scheduled in self._later.values()]
        return min(waiting, default=None)

    # ---- what becomes of a message

    def remove(self, message: QueuedMessage) -> None:
        """It was acknowledged."""
        self._messages.pop(message, None)

    def returned(self, message: QueuedMessage, delay: float = 0.0) -> None:
        """It was given back, or its process died."""
        message.held = False
        message.visible = self._clock.utc() + delay

    def scheduled(self, subject: str) -> Scheduled | None:
        """What waits under a subject."""
        return self._later.get(subject)

    def forget_later(self, subject: str) -> None:
        """Remove a scheduled message, if there is one."""
        self._later.pop(subject, None)

    # ---- asking

    def has(self, sequence: int) -> bool:
        """Whether the jobs stream still has this message."""
        return any(m.sequence == sequence and not m.event for m in self._messages)

    def has_later(self, prefix: str) -> bool:
        """Whether a scheduled message waits under a subject with this prefix."""
        return any(subject.startswith(prefix) for subject in self._later)

    def statuses(self) -> list[RunStatus]:
        """Runs that wait as messages."""
        queued = [
            RunStatus(_run_of(m), "queued", job=m.job, group=m.group)
            for m in self._messages
            if not m.event
        ]
        later = [
            RunStatus(s.headers.get(H_RUN, ""), "delayed", job=s.job, group=s.group)
            for s in self._later.values()
        ]
        return [*queued, *later]

    def waits(self, subject: str) -> bool:
        """Whether a scheduled message waits under this subject."""
        return subject in self._later

    def waiting(self) -> int:
        """How many messages are stored in all."""
        return len(self._messages) + len(self._later)


def _run_of(message: QueuedMessage) -> str:
    return read_heading(message.headers, message.sequence, int(message.stored * 1e9)).run
