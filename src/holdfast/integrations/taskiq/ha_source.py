"""`HAScheduleSource`: any taskiq schedule source, in as many scheduler processes as you like.

    taskiq's loop says: due ──► remembered, by every process ──► the leader sends what is not sent
                                                                 and records it (`slots`)

In taskiq's loop, slots are only noted and nothing waits: a send that hangs would make the loop skip
the next slots. A separate task for each schedule sends them in order.

`prefer="duplicate"` records a slot *after* sending: a crash in between sends it again, and nothing
is lost. `ResilientPullBroker` sends the slot as message id, so the server drops the repeat.
`prefer="gap"` records it *before*: a crash in between loses the slot, and nothing is ever sent
twice, on any broker. A slot lost to an error, rather than a crash, is logged.

Slots that fell due while this process did not lead are remembered until they are recorded, so a new
leader sends what its predecessor left unsent. That needs the scheduler: `K8sScheduler` attaches
itself, others call `attach`. Without it, slots are only passed or held back as taskiq's loop asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Literal

from taskiq import ScheduledTask, ScheduleSource
from taskiq.exceptions import ScheduledTaskCancelledError
from taskiq.schedule_sources import LabelScheduleSource
from taskiq.scheduler.scheduler import TaskiqScheduler
from taskiq.utils import maybe_awaitable

from holdfast.broker.streams import Topology
from holdfast.broker.upkeep import Upkeep
from holdfast.config import RecordConfig
from holdfast.errors import BrokerError, ConfigError
from holdfast.integrations.taskiq.connection import surely
from holdfast.integrations.taskiq.election import LeaderElection
from holdfast.integrations.taskiq.pull_broker import ResilientPullBroker, message_id
from holdfast.integrations.taskiq.slots import SentSlots, TaskiqSlot, identities, slot_of, unsent
from holdfast.names import encode
from holdfast.retrying import repeating

log = logging.getLogger("holdfast.taskiq")

LOOK_SECONDS: Final = 1.0
"""How often the leader retries what it could not send: taskiq's own interval."""
CONFIRM_SECONDS: Final = 3.0
"""How long after a slot was due a process that does not lead checks whether it was sent."""
REPEAT_SECONDS: Final = 100.0
"""How long sending a marked slot is retried under its message id. The server recognises a repeat
for two minutes; later it could be stored twice."""
FINISH_SECONDS: Final = 5.0
"""How long a shutdown waits for sends in progress: a send gives up after that."""

Prefer = Literal["duplicate", "gap"]


@dataclass
class _Due:
    """The newest due slot of a schedule; older ones are found by what was sent last."""

    task: ScheduledTask
    slot: TaskiqSlot
    since: float
    """When it started to wait, on the monotonic clock; reset when the leader makes progress."""
    sent: float = 0.0
    """The last slot sent, as last read."""


@dataclass
class _Sending:
    slot: TaskiqSlot
    is_sent: bool = False


_sending: ContextVar[_Sending | None] = ContextVar("sending", default=None)
"""What the calling asyncio task is sending; None when taskiq's loop calls."""


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
        """`same_by`: whether processes recognise a schedule by its id or by its content.

        Default: by content for `LabelScheduleSource`, whose ids change with each start; by id for
        every other source.
        """
        if prefer not in ("duplicate", "gap"):
            raise ConfigError(f"prefer is 'duplicate' or 'gap', not {prefer!r}")
        self.source = source
        self.election = election
        self.prefer = prefer
        labels = isinstance(source, LabelScheduleSource)
        self._by_content = same_by == "content" or (same_by is None and labels)
        self._send: Callable[[ScheduledTask], Awaitable[None]] | None = None
        self._repeatable = False
        self._names: dict[str, str] = {}
        self._known: dict[str, float] = {}
        """When this process first saw each schedule."""
        self._due: dict[str, _Due] = {}
        self._sent: dict[str, float] = {}
        """What this process sent last, in case the record is lost."""
        self._marking: dict[str, tuple[ScheduledTask, TaskiqSlot]] = {}
        """Slots that are being marked before they are sent: if the answer is lost, they may be
        ours."""
        self._at_work: dict[str, asyncio.Task[None]] = {}
        self._trouble = ""
        self._upkeep: Upkeep | None = None

    def attach(self, scheduler: TaskiqScheduler) -> None:
        """Send through this scheduler."""
        self._send = lambda task: scheduler.on_ready(self, task)
        self._repeatable = isinstance(scheduler.broker, ResilientPullBroker)

    @property
    def is_sending(self) -> bool:
        """Whether the caller sends a slot, as opposed to taskiq's loop saying that one is due."""
        return _sending.get() is not None

    @property
    def problems(self) -> list[str]:
        """Why slots cannot be sent right now."""
        missing = self._upkeep.problems if self._upkeep else []
        return [*missing, *([self._trouble] if self._trouble else [])]

    @property
    def count(self) -> int:
        """How many schedules the source has."""
        return len(self._names)

    @property
    def overdue_seconds(self) -> float:
        """How long the oldest due slot has been unsent by any process."""
        now = self.election.connection.clock.monotonic()
        return max((now - due.since for due in self._due.values()), default=0.0)

    # ---- life

    async def startup(self) -> None:
        """Start the source, and join the election."""
        await self.source.startup()
        try:
            await self.election.startup()
        except BaseException:
            await self.source.shutdown()
            raise
        broker = self.election.connection
        topology = Topology(broker, RecordConfig())
        await topology.ensure_buckets("taskiq_slots")
        node, key = self.election.node, self.election.leader_key
        self._progress = SentSlots(broker, key, node, kept=self._by_content)
        self._upkeep = Upkeep(topology, core=False, buckets=["taskiq_slots"])
        self._wake = asyncio.Event()
        self.election.on_change(self._wake.set)
        looking = repeating(
            self._look,
            clock=broker.clock,
            every=LOOK_SECONDS,
            what="sending slots",
            wake=self._wake,
        )
        self._tasks = [
            asyncio.create_task(looking, name="holdfast-taskiq-slots"),
            asyncio.create_task(self._keep_bucket(), name="holdfast-taskiq-bucket"),
        ]

    async def _keep_bucket(self) -> None:
        assert self._upkeep is not None
        try:
            await self._upkeep.run()
        except BrokerError as error:
            self.election.give_up(str(error))

    async def shutdown(self) -> None:
        """Finish what is being sent, leave the election, and stop the source."""
        await self.finish()
        await self.election.shutdown()
        await self.source.shutdown()

    async def finish(self) -> None:
        """Start no more sends, and let those in progress end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.idle()
        for task in self._at_work.values():
            task.cancel()

    async def idle(self) -> None:
        """Wait until nothing is being sent, for a few seconds at most."""
        if self._at_work:
            await asyncio.wait(list(self._at_work.values()), timeout=FINISH_SECONDS)

    # ---- delegated to the source

    async def get_schedules(self) -> list[ScheduledTask]:
        """The source's schedules."""
        found = await self.source.get_schedules()
        self._names = identities(found, by_content=self._by_content)
        now = self._now()
        self._known = {name: self._known.get(name, now) for name in self._names.values()}
        self._due = {name: due for name, due in self._due.items() if name in self._known}
        return found

    async def add_schedule(self, schedule: ScheduledTask) -> None:
        """Add a schedule to the source."""
        await self.source.add_schedule(schedule)

    async def delete_schedule(self, schedule_id: str) -> None:
        """Delete a schedule from the source."""
        await self.source.delete_schedule(schedule_id)

    # ---- what taskiq's scheduler calls

    async def pre_send(self, task: ScheduledTask) -> None:
        """Before each dispatch. Called by taskiq's loop, this only notes what is due."""
        sending = _sending.get()
        if sending is None:
            slot = self.note(task)
            if self._send is not None or not await self._may_send(slot):
                raise ScheduledTaskCancelledError
            sending = _Sending(slot)
            _sending.set(sending)
        await maybe_awaitable(self.source.pre_send(task))
        key = encode(self.election.leader_key)
        message_id.set((task.schedule_id, f"{key}.{sending.slot.id}"))

    async def post_send(self, task: ScheduledTask) -> None:
        """After each dispatch: record the slot."""
        sending = _sending.get()
        if sending is not None:
            sending.is_sent = True
            self._sent[sending.slot.schedule] = sending.slot.at
            if self.prefer == "duplicate":
                await self._record(sending.slot)
        await maybe_awaitable(self.source.post_send(task))

    def note(self, task: ScheduledTask) -> TaskiqSlot:
        """Note that a schedule is due."""
        name = self._names.get(task.schedule_id)
        if name is None:
            name = identities([task], by_content=self._by_content)[task.schedule_id]
        slot = slot_of(task, name, self._now())
        known = self._due.get(name)
        if known is None:
            now = self.election.connection.clock.monotonic()
            self._due[name] = _Due(task, slot, now)
        elif slot.at >= known.slot.at:
            known.task, known.slot = task, slot
        self._begin(name)
        return slot

    def _now(self) -> float:
        return self.election.connection.clock.utc()

    async def _may_send(self, slot: TaskiqSlot) -> bool:
        """Without an attached scheduler: send or hold back; missed slots are not caught up."""
        self._due.pop(slot.schedule, None)
        if not self.election.is_leader:
            return False
        try:
            _, sent = await self._progress.read(slot)
            if not slot.is_after(sent):
                return False
            return self.prefer == "duplicate" or await self._progress.mark(slot)
        except BrokerError as error:
            log.warning("whether slot %s was sent is not known: %s", slot.id, error)
            return self.prefer == "duplicate"

    # ---- sending

    async def _look(self) -> None:
        """Send what waits, if this process leads; otherwise check whether it was sent."""
        for name in [*self._marking, *self._due]:
            self._begin(name)
        if not self.election.is_leader:
            self._trouble = ""  # these are from the time when it led; now the leader sends them
            await self._confirm()

    def _begin(self, name: str) -> None:
        """Send the due slots of a schedule in a separate task."""
        wanted = self.election.is_leader or name in self._marking
        if self._send is None or name in self._at_work or not wanted:
            return
        task = asyncio.create_task(self._work(name), name=f"holdfast-taskiq-{name}")
        self._at_work[name] = task
        task.add_done_callback(lambda _: self._at_work.pop(name, None))

    async def _work(self, name: str) -> None:
        try:
            if name in self._marking:
                await self._send_slot(*self._marking[name])
            while self.election.is_leader and (due := self._due.get(name)):
                newest = due.slot
                await self._send_until(due.task, newest)
                if due.slot is newest and self.election.is_leader:
                    self._due.pop(name, None)
        except Exception as error:  # noqa: BLE001 - whatever a user's broker or source raises
            self._trouble = f"schedule {name}: a slot cannot be sent: {error!r}"
            log.warning("%s; trying again", self._trouble)
        else:
            self._trouble = ""

    async def _send_until(self, task: ScheduledTask, newest: TaskiqSlot) -> None:
        """Send the newest slot, and any unsent ones before it."""
        name = newest.schedule
        _, recorded = await self._progress.read(newest)
        last = max((at for at in (self._sent.get(name), recorded) if at is not None), default=None)
        for slot in unsent(task, newest, last, self._known.get(name, newest.at)):
            if self.election.is_leader:
                await self._send_slot(task, slot)

    async def _send_slot(self, task: ScheduledTask, slot: TaskiqSlot) -> None:
        if self.prefer == "gap":
            self._marking[slot.schedule] = task, slot
            broker = self.election.connection
            if await surely(broker, lambda: self._progress.mark(slot), f"marking {slot.id}"):
                await self._send_marked(task, slot)
            del self._marking[slot.schedule]
            return
        sending = await self._dispatch(task, slot)
        if not sending.is_sent:  # the source declined it
            await self._record(slot)

    async def _send_marked(self, task: ScheduledTask, slot: TaskiqSlot) -> None:
        """Send a slot that this process has marked, even if another leads by now."""
        clock = self.election.connection.clock
        deadline = clock.monotonic() + REPEAT_SECONDS
        self._sent[slot.schedule] = slot.at
        while True:
            try:
                await self._dispatch(task, slot)
                return
            except Exception as error:  # a user's broker may raise anything
                if not self._repeatable or clock.monotonic() > deadline:
                    log.exception(
                        "slot %s of %s is lost: it is recorded as sent, as prefer='gap' asks, and "
                        "sending it failed",
                        slot.id,
                        task.task_name,
                    )
                    return
                self._trouble = f"slot {slot.id} cannot be sent: {error!r}"
            await clock.sleep(LOOK_SECONDS)

    async def _dispatch(self, task: ScheduledTask, slot: TaskiqSlot) -> _Sending:
        assert self._send is not None
        sending = _Sending(slot)
        _sending.set(sending)
        try:
            await self._send(task)
        finally:
            _sending.set(None)
        telemetry = self.election.telemetry
        telemetry.slots.labels("dispatched" if sending.is_sent else "skipped").inc()
        telemetry.slot_delay.observe(max(0.0, self._now() - slot.at))
        return sending

    async def _record(self, slot: TaskiqSlot) -> None:
        broker = self.election.connection
        try:
            await surely(broker, lambda: self._progress.mark(slot), f"recording {slot.id}")
        except BrokerError as error:
            log.warning("slot %s was sent and could not be recorded: %s", slot.id, error)

    async def _confirm(self) -> None:
        """Forget what the leader has sent."""
        now = self.election.connection.clock.monotonic()
        if self.overdue_seconds < CONFIRM_SECONDS:
            return
        recorded = await self._progress.all()
        for name, due in list(self._due.items()):
            sent = recorded.get(encode(name))
            if sent is None:
                continue
            if not due.slot.is_after(sent):
                self._due.pop(name, None)
            elif sent > due.sent:
                due.sent, due.since = sent, now
