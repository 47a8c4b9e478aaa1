"""A scheduler: one of any number of processes that together fire every slot once.

    connect ──► streams ──► node ──► clock measured ──► schedules loaded ──► leader or stand-by

Each keeps a live view of the schedules and the heap of due slots; one leads and fires. The others
follow its progress, which the server republishes, and can take over within a tick:
- when the lease is released or expires, or the leader's process is gone (`ownership.election`);
- when a slot is due and not recorded: then they ping the leader's node. Without an answer after
  `overdue_seconds`, or in any case after three times that, they take the term *first* and then
  fire. Any progress heard meanwhile counts as a sign of life.

A scheduler whose clock differs from the server's by more than the tolerance fires nothing, gives up
the lead and logs it. One that is rejected because its term is over counts that and stands down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from holdfast import errors
from holdfast.app import Holdfast
from holdfast.broker import Broker, Received
from holdfast.broker.upkeep import Upkeep
from holdfast.client import Client
from holdfast.config import ConnectionConfig, RecordConfig, SchedulerConfig
from holdfast.errors import StaleTerm
from holdfast.model import slot as slots
from holdfast.model.planner import Planner
from holdfast.model.schedule import Schedule, next_after
from holdfast.model.slot import SchedulerProgress
from holdfast.names import progress_key
from holdfast.ownership.election import LeaderElection
from holdfast.ownership.heartbeat import new_node_id
from holdfast.ownership.membership import Membership
from holdfast.retrying import repeating, starting
from holdfast.role import Role
from holdfast.scheduler.leader import Leader, until_next
from holdfast.scheduler.registering import Registering
from holdfast.scheduler.store import KEPT_LEAST_SECONDS, ROLE, NatsSlots, Planned
from holdfast.scheduler.view import ScheduleView
from holdfast.status.figures import Figures
from holdfast.status.jobs import Jobs
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.scheduler")

Step = Callable[[], Awaitable[object]]

TICK_SECONDS = 0.5
"""The longest a leader sleeps; due slots and changes wake it earlier."""
FOLLOW_SECONDS = 0.25
"""How often a stand-by checks for overdue slots, and a leader whether a waiting slot may be sent:
well below `overdue_seconds`."""
AGAIN_SECONDS = 0.1
"""The pause after a step that NATS did not complete: short, because slots are late meanwhile."""
ANSWER_SECONDS = 0.3
"""How long a leader has to answer before an overdue slot is taken from it: a healthy one answers at
once."""
SAY_SECONDS = 10.0
"""How often the log repeats that the clock is wrong: nothing fires meanwhile, so it must be
noticed."""
FINISH_SECONDS = 2.0
"""How long the current step may take on shutdown: a batch of slots is stored in far less."""
SILENT_SECONDS = 30.0
"""A slot overdue for this long makes every scheduler unready, leader or not: any takeover ends much
sooner."""
PAUSES_SECONDS = 5.0
"""How often the consumers of paused jobs are checked, while there are any: one that was created
again delivers until then."""
MEASURE_SECONDS = 5.0
"""How often the server's time is measured: twelve times in the window of `broker.time`, so that at
least one answer is fast."""


class Scheduler(Role):
    """Fires schedules until stopped."""

    role = ROLE
    member: Membership
    upkeep: Upkeep

    def __init__(
        self,
        app: Holdfast | None = None,
        config: SchedulerConfig | None = None,
        *,
        connection: ConnectionConfig | None = None,
        records: RecordConfig | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        """With an app, registers the schedules defined in its code first."""
        self.app = app
        self.config = config or SchedulerConfig()
        self.node = new_node_id(ROLE)
        given = connection or (app.connection_config() if app else ConnectionConfig())
        broker = Broker(given, name=self.node)
        ready_file = self.config.ready_file
        super().__init__(broker, telemetry or Telemetry(), self.config, ready_file=ready_file)
        self._wake = asyncio.Event()
        self._progress = SchedulerProgress()
        self._heard_at = 0.0
        self._said_at = -SAY_SECONDS
        self._leader: Leader | None = None
        self._cancelling: set[asyncio.Task[Any]] = set()
        self._client = Client(broker, records or RecordConfig(), self.telemetry)
        self.member = Membership(broker, ROLE, node=self.node, stop=self.stop)
        self._planner = Planner(self.config.missed_after_seconds)
        self._view = ScheduleView(broker, self._changed, self._planner.remove)
        self._store = NatsSlots(broker, self._kept_seconds, self._cancel)
        self.upkeep = Upkeep(self._client.topology, on_made=self._made_again)
        self._registration = Registering(self._client, app, self.config, broker.server_now)
        self._jobs = Jobs(self._client)
        self._figures = Figures(self._client, self.telemetry)
        ttl, renew, probe = self.config.lease
        self._election = LeaderElection(
            broker,
            ROLE,
            self.node,
            ttl_seconds=ttl,
            renew_seconds=renew,
            probe_seconds=probe,
            probe_misses=self.config.probe_misses,
            term_bucket=broker.names.slots,
            telemetry=self.telemetry,
            on_change=self._wake.set,
        )

    def stop(self) -> None:
        """Give up the lead and end `run`."""
        super().stop()
        self._wake.set()

    # ---- life

    async def prepare(self, ending: contextlib.AsyncExitStack) -> None:
        """Learn everything that must be known before leading or standing by."""
        self.broker.on_reconnect(self._reconnected)
        what = "registering the app's schedules"
        await starting(self._registration.register, clock=self.broker.clock, what=what)
        subject = self.broker.names.changed(self.broker.names.slots, progress_key(ROLE))
        await self.broker.subscribe(subject, self._heard)
        what = "reading the slots' progress"
        self._follow(await starting(self._store.progress, clock=self.broker.clock, what=what))
        await self._view.open()
        log.info("%s: %d schedules", self.node, len(self._view.schedules))

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Fire slots or stand by, and keep the inputs for that up to date."""
        measure = self._client.topology.measure_clock
        return {
            "scheduler": self._work(),
            "election": self._election.run(),
            "schedules": self._view.run(),
            "clock": self._every(MEASURE_SECONDS, measure, "reading the server's clock"),
            "gauges": self._set_gauges(),
            "figures": self._figures.run(),
            "registration": self._registration.run(),
            "pauses": self._every(PAUSES_SECONDS, self._keep_paused, "checking paused jobs"),
        }

    async def _every(self, seconds: float, step: Step, what: str) -> None:
        await repeating(step, clock=self.broker.clock, every=seconds, what=what)

    async def drain(self) -> None:
        """Finish the current step."""
        await asyncio.wait([self.running["scheduler"]], timeout=FINISH_SECONDS)

    def _made_again(self, _: str) -> None:
        self._view.look_soon()

    # ---- the loop

    async def _work(self) -> None:
        """One step after another; a stop lets the current one finish."""
        while not self.stopping.is_set():
            self._wake.clear()
            delay = await self._step()
            if delay:
                try:
                    async with asyncio.timeout(delay):
                        await self._wake.wait()
                except TimeoutError:
                    continue
            else:
                await asyncio.sleep(0)

    async def _step(self) -> float:
        if not self._is_clock_right:
            return await self._refuse_to_fire()
        if self._election.leader:
            return await self._lead()
        self._leader = None
        return await self._stand_by()

    @property
    def _is_clock_right(self) -> bool:
        """Whether the wall clock agrees with the server's, by which slots fire: people and jobs on
        this machine see the wall clock, and if the two differ it is unknown which is wrong."""
        time, tolerance = self.broker.time, self.config.clock_tolerance_seconds
        return time.known and abs(time.offset) <= tolerance

    async def _refuse_to_fire(self) -> float:
        """Leave the lead to a scheduler whose clock agrees with the server's."""
        now = self.broker.clock.monotonic()
        self._leader = None
        if now - self._said_at >= SAY_SECONDS:
            self._said_at = now
            log.error(
                "this machine's clock is off by %+.1f s against NATS: nothing is fired here until "
                "they agree within %g s (is NTP running?)",
                self.broker.time.offset,
                self.config.clock_tolerance_seconds,
            )
        self._election.hold_off()
        if self._election.epoch:
            await self._election.stand_down(f"its clock is off by {self.broker.time.offset:+.1f} s")
        return TICK_SECONDS

    async def _lead(self) -> float:
        try:
            leader = self._leader
            if leader is None or leader.epoch != self._election.epoch:
                leader = await self._begin()
            await leader.tick()
        except StaleTerm as refused:
            self.telemetry.fenced.labels("slots").inc()
            self._leader = None
            await self._election.stand_down(str(refused))
            return 0.0
        except errors.BrokerError as error:
            log.debug("slots wait: %s", error)
            return AGAIN_SECONDS
        self._follow(leader.progress)
        if leader.busy:
            return AGAIN_SECONDS
        longest = FOLLOW_SECONDS if leader.waiting else TICK_SECONDS
        return until_next(self._planner.next_due, self.broker.server_now(), longest)

    async def _begin(self) -> Leader:
        leader = Leader(
            self._store,
            self._planner,
            self.telemetry,
            node=self.node,
            epoch=self._election.epoch,
            now=self.broker.server_now,
            seen=lambda: self._view.seen,
            known=self._progress,
        )
        await leader.begin()
        self._leader = leader
        return leader

    # ---- standing by

    async def _stand_by(self) -> float:
        late = self._overdue(self._heard_at)
        if late >= self.config.overdue_seconds and self._election.holder:
            await self._look_after(self._election.holder)
        return (
            until_next(self._planner.next_due, self.broker.server_now(), FOLLOW_SECONDS)
            or AGAIN_SECONDS
        )

    async def _look_after(self, holder: str) -> None:
        """A slot is due, and neither it nor any other progress was recorded for a while."""
        try:
            self._follow(await self._store.progress())
        except errors.BrokerError:
            return
        late, limit = self._overdue(self._heard_at), self.config.overdue_seconds
        if late < limit:
            return
        if late < 3 * limit and await self._election.answers(holder, ANSWER_SECONDS):
            return
        if self._election.holder == holder:
            await self._election.take(f"a slot is due for {late:.1f} s and not recorded")

    def _overdue(self, since: float = 0.0) -> float:
        """How long the oldest open slot has been overdue, counted from `since` if that is later."""
        due = self._planner.next_due
        return 0.0 if due is None else max(0.0, self.broker.server_now() - max(due, since))

    async def _heard(self, message: Received) -> None:
        place = (self.broker.names.slots, progress_key(ROLE))
        progress = self.broker.unreadable.read(slots.decode_progress, *place, message.body)
        if progress is not None and progress.epoch >= self._progress.epoch:
            self._follow(progress)

    def _follow(self, progress: SchedulerProgress) -> None:
        if progress != self._progress:
            self._heard_at = self.broker.server_now()
        self._progress = progress
        if not self._election.epoch:
            self._planner.follow(progress.watermark)

    def _reconnected(self) -> None:
        self._heard_at = self.broker.server_now()
        self._wake.set()

    # ---- schedules

    def _changed(self, schedule: Schedule, revision: int) -> None:
        seen = revision <= self._progress.seen
        self._planner.add(schedule, self._progress.watermark, seen=seen)
        if self.started.is_set():
            self._wake.set()

    def _kept_seconds(self, planned: Planned) -> float:
        """How long a slot's record is kept: for `slots_kept` slots; unsent ones longest."""
        longest = float(self.config.slot_ttl_seconds)
        schedule = self._view.schedules.get(planned.schedule)
        if planned.slot.pending or schedule is None:
            return longest
        following = next_after(schedule, planned.moment)
        gap = following - planned.moment if following else longest
        return min(longest, max(KEPT_LEAST_SECONDS, gap * self.config.slots_kept))

    def _cancel(self, planned: Planned) -> None:
        """Request the cancellation of a run without waiting for it."""

        async def cancel() -> None:
            try:
                await self._client.cancel(planned.id, planned.slot.group, planned.slot.job)
            except errors.HoldfastError as error:
                log.warning("run %s was not cancelled: %s", planned.id, error)

        self._cancelling.add(task := asyncio.create_task(cancel()))
        task.add_done_callback(self._cancelling.discard)

    async def _keep_paused(self) -> None:
        """Pause consumers again that were created while the record of their pause was missing."""
        if self._view.paused:
            await self._jobs.pause_again(self._view.paused)

    # ---- health

    async def _set_gauges(self) -> None:
        while True:
            self.telemetry.leading.labels(ROLE).set(bool(self._election.leader))
            self.telemetry.schedules.set(len(self._planner))
            self.telemetry.slot_overdue.set(self._overdue())
            self.telemetry.dispatch_age.set(max(0.0, self.broker.server_now() - self._heard_at))
            self.telemetry.clock_offset.set(self.broker.time.offset)
            await self.broker.clock.sleep(FOLLOW_SECONDS)

    def trouble(self) -> list[str]:
        """What keeps slots from firing in time."""
        found = []
        if not self._is_clock_right:
            found.append(f"the clock is off by {self.broker.time.offset:+.1f} s")
        if not self._election.established:
            found.append("neither leading nor following a leader")
        if self._leader is not None and self._leader.unsent:
            found.append(f"{self._leader.unsent} slots are recorded and could not be sent yet")
        if self._overdue() > SILENT_SECONDS:
            found.append(f"a slot is due for {self._overdue():.0f} s and was not fired")
        return found + self._registration.problems

    async def answer(self, path: str) -> dict[str, Any] | None:
        """`/lag/<group>`, for autoscalers."""
        return await self._figures.answer(path)

    def describe(self) -> dict[str, Any]:
        """Who leads, and its progress."""
        return {
            "node": self.node,
            "role": "leader" if self._election.leader else "standby",
            "leader": self._election.holder,
            "epoch": self._progress.epoch,
            "schedules": len(self._planner),
            "overdue_seconds": round(self._overdue(), 3),
            "last_progress_seconds": round(max(0.0, self.broker.server_now() - self._heard_at), 3),
        }
