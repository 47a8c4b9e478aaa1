"""`HAScheduleSource`: any taskiq schedule source, in as many scheduler processes as you like.

    pre_send   not the leader?            cancelled, and remembered
               slot marked?               cancelled: a leader before has sent it
    (taskiq sends)
    post_send  slot marked, as sent

The marker is written *after* the dispatch: a crash between the two gives a duplicate, never a gap.
With `ResilientPullBroker` that duplicate is dropped by the server: the slot is the message id.
`prefer="gap"` writes it *before*, by a write of which only one can succeed: then a crash between
the two loses the slot, and nothing is ever sent twice, on any broker.

What fell due while this process did not lead is remembered until its marker is heard of. Whoever
becomes leader sends what has none: so nothing is missed that was due while nobody led, or that a
dying leader had before it and did not send. For that the source must know the scheduler: a
`K8sScheduler` attaches itself, another calls `attach`. Of a long time without any leader, the last
minute is made up for, and the newest slot of each schedule however old.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Final, Literal, NamedTuple

from taskiq import ScheduledTask, ScheduleSource
from taskiq.exceptions import ScheduledTaskCancelledError
from taskiq.schedule_sources import LabelScheduleSource
from taskiq.scheduler.scheduler import TaskiqScheduler
from taskiq.utils import maybe_awaitable

from holdfast.broker import Received
from holdfast.errors import BrokerError, ConfigError
from holdfast.integrations.taskiq.connection import patiently
from holdfast.integrations.taskiq.election import LeaderElection, ensure_bucket
from holdfast.integrations.taskiq.pull_broker import message_id
from holdfast.integrations.taskiq.slots import Markers, Slot, identities, slot_of
from holdfast.names import H_KV_OPERATION, H_MARKER, encode

log = logging.getLogger("holdfast.taskiq")

REMEMBERED_SECONDS: Final = 60.0
AGAIN_SECONDS: Final = 1.0
MARK_SECONDS: Final = 5.0

Prefer = Literal["duplicate", "gap"]

_due: ContextVar[Slot | None] = ContextVar("due", default=None)
"""The slot that is made up for, when it is not the present one."""
_slot: ContextVar[Slot | None] = ContextVar("slot", default=None)
"""For which slot the calling asyncio task dispatches."""


class _Missed(NamedTuple):
    task: ScheduledTask
    slot: Slot
    at: float


class HAScheduleSource(ScheduleSource):
    """A source whose schedules are sent by one of several schedulers."""

    def __init__(
        self,
        source: ScheduleSource,
        election: LeaderElection,
        *,
        prefer: Prefer = "duplicate",
        same_by: Literal["id", "content"] | None = None,
    ) -> None:
        """`same_by`: how two processes know the same schedule: by its id, or by what it says.

        By itself: by what it says for `LabelScheduleSource`, whose ids differ from start to start;
        by id for every other.
        """
        if prefer not in ("duplicate", "gap"):
            raise ConfigError(f"prefer is 'duplicate' or 'gap', not {prefer!r}")
        self.source = source
        self.election = election
        self.prefer = prefer
        labels = isinstance(source, LabelScheduleSource)
        self._by_content = same_by == "content" or (same_by is None and labels)
        self._send: Callable[[ScheduledTask], Awaitable[None]] | None = None
        self._names: dict[str, str] = {}
        self._missed: dict[str, _Missed] = {}
        """By the key of the slot's marker, oldest first."""

    def attach(self, scheduler: TaskiqScheduler) -> None:
        """Send what was missed through this scheduler."""
        self._send = lambda task: scheduler.on_ready(self, task)

    # ---- life

    async def startup(self) -> None:
        """Start the source, and take part in the election."""
        await self.source.startup()
        try:
            await self.election.startup()
        except BaseException:
            await self.source.shutdown()
            raise
        broker = self.election.connection
        await patiently(broker, lambda: ensure_bucket(broker, "taskiq_slots"))
        self._markers = Markers(broker)
        heard = broker.names.changed(broker.names.taskiq_slots, ">")
        await broker.subscribe(heard, self._heard)
        self._wake = asyncio.Event()
        self.election.on_change(self._wake.set)
        self._tending = asyncio.create_task(self._tend(), name="holdfast-taskiq-missed")

    async def shutdown(self) -> None:
        """Leave the election, and stop the source."""
        self._tending.cancel()
        await asyncio.gather(self._tending, return_exceptions=True)
        await self.election.shutdown()
        await self.source.shutdown()

    # ---- the source's own

    async def get_schedules(self) -> list[ScheduledTask]:
        """What the source has."""
        found = await self.source.get_schedules()
        self._names = identities(found, by_content=self._by_content)
        known = set(self._names.values())
        self._missed = {k: m for k, m in self._missed.items() if m.slot.schedule in known}
        return found

    async def add_schedule(self, schedule: ScheduledTask) -> None:
        """As the source does."""
        await self.source.add_schedule(schedule)

    async def delete_schedule(self, schedule_id: str) -> None:
        """As the source does."""
        await self.source.delete_schedule(schedule_id)

    # ---- the gate

    async def pre_send(self, task: ScheduledTask) -> None:
        """Let the leader through, once for each slot."""
        slot = _due.get() or self._slot_of(task)
        _slot.set(slot)
        self._check_leader(task, slot)
        if await self._is_marked(slot):
            self._missed.pop(slot.key, None)
            raise ScheduledTaskCancelledError
        await maybe_awaitable(self.source.pre_send(task))
        self._check_leader(task, slot)
        if self.prefer == "gap":
            await self._mark_first(task, slot)
        message_id.set((task.schedule_id, f"{encode(self.election.leader_key)}.{slot.key}"))

    async def post_send(self, task: ScheduledTask) -> None:
        """It was sent: mark the slot."""
        slot = _slot.get() or self._slot_of(task)
        self._missed.pop(slot.key, None)
        if self.prefer == "duplicate":
            await self._mark(slot)
        await maybe_awaitable(self.source.post_send(task))

    def _slot_of(self, task: ScheduledTask) -> Slot:
        name = self._names.get(task.schedule_id)
        if name is None:
            name = identities([task], by_content=self._by_content)[task.schedule_id]
        return slot_of(task, name, self.election.connection.clock.utc())

    def _check_leader(self, task: ScheduledTask, slot: Slot) -> None:
        if not self.election.is_leader:
            self.remember(task, slot)
            raise ScheduledTaskCancelledError

    async def _is_marked(self, slot: Slot) -> bool:
        """Whether it was sent; when nobody can say, as is preferred."""
        try:
            return await self._markers.has(slot)
        except BrokerError as error:
            log.warning("whether slot %s was sent is not known: %s", slot.key, error)
            return False

    async def _mark_first(self, task: ScheduledTask, slot: Slot) -> None:
        try:
            won = await self._markers.set(slot, self.election.node)
        except BrokerError as error:
            log.warning("slot %s is not sent, it could not be marked: %s", slot.key, error)
            won = False
        if not won:
            raise ScheduledTaskCancelledError

    async def _mark(self, slot: Slot) -> None:
        broker, node = self.election.connection, self.election.node
        try:
            await patiently(broker, lambda: self._markers.set(slot, node), seconds=MARK_SECONDS)
        except BrokerError as error:
            log.warning("slot %s was sent and could not be marked: %s", slot.key, error)

    # ---- what was due and not sent

    def remember(self, task: ScheduledTask, slot: Slot | None = None) -> None:
        """It is due and cannot be sent now."""
        slot = slot or _due.get() or _slot.get() or self._slot_of(task)
        now = self.election.connection.clock.monotonic()
        self._missed.setdefault(slot.key, _Missed(task, slot, now))
        newest = {m.slot.schedule: key for key, m in self._missed.items()}
        self._missed = {
            key: m
            for key, m in self._missed.items()
            if now - m.at < REMEMBERED_SECONDS or newest[m.slot.schedule] == key
        }

    async def _heard(self, message: Received) -> None:
        """The server repeats each write to the markers: what another has sent is done."""
        if H_KV_OPERATION in message.headers or H_MARKER in message.headers:
            return
        names = self.election.connection.names
        prefix = names.changed(names.taskiq_slots, "")
        self._missed.pop(message.subject.removeprefix(prefix), None)

    async def _tend(self) -> None:
        while True:
            try:
                async with asyncio.timeout(AGAIN_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if self.election.is_leader and self._missed and self._send:
                await self._make_up(self._send)

    async def _make_up(self, send: Callable[[ScheduledTask], Awaitable[None]]) -> None:
        for key, missed in list(self._missed.items()):
            if not self.election.is_leader:
                return
            if await self._is_marked(missed.slot):
                self._missed.pop(key, None)
                continue
            log.info("sending slot %s, which fell due while this process did not lead", key)
            _due.set(missed.slot)
            try:
                await send(missed.task)
            except Exception:
                log.exception("slot %s could not be sent, trying again", key)
                return
            finally:
                _due.set(None)
