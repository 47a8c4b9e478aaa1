"""A scheduler: one of any number of processes that together fire every slot, once.

    connect ──► streams ──► node ──► clock measured ──► schedules loaded ──► leader or stand-by

All of them keep the live view of the schedules and the heap of what is due; one leads and fires.
The others follow its progress, which the server repeats to them, and so can go on within a tick:
- when the lease is given back, expires, or the leader's process is gone (`ownership.election`);
- when a slot is due and not recorded: then they ask the leader's node. Without an answer after
  `overdue_seconds`, or in any case after three times that, they take the term *first* and then
  fire. Progress of any kind that is heard meanwhile counts as a sign of life.

A scheduler whose clock differs from the server's by more than the tolerance fires nothing, gives
the lead away and says so. One that is refused because its term is over counts that and stands down.

`run` ends normally after `stop`, and raises when it cannot go on: a connection closed for good, a
node that was declared lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from holdfast import errors
from holdfast.app import Holdfast
from holdfast.broker import Broker, Received
from holdfast.broker.upkeep import Upkeep
from holdfast.client import Client
from holdfast.config import ConnectionConfig, RecordConfig, SchedulerConfig
from holdfast.errors import NodeLost, StaleTerm
from holdfast.health import Health, HealthServer
from holdfast.model import slot as slots
from holdfast.model.planner import Planner
from holdfast.model.schedule import Schedule, next_after
from holdfast.model.slot import Progress
from holdfast.names import progress_key
from holdfast.ownership.election import LeaderElection
from holdfast.ownership.heartbeat import new_node_id
from holdfast.ownership.membership import Membership
from holdfast.retrying import PATIENCE_SECONDS, repeating, retrying
from holdfast.scheduler.leader import Leader, until_next
from holdfast.scheduler.ready import ReadyFile
from holdfast.scheduler.registering import Registering
from holdfast.scheduler.store import KEPT_LEAST_SECONDS, ROLE, NatsSlots, Planned
from holdfast.scheduler.time import ServerTime
from holdfast.scheduler.view import ScheduleView
from holdfast.status.figures import Figures
from holdfast.status.jobs import Jobs
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.scheduler")

T = TypeVar("T")

TICK_SECONDS = 0.5
"""The longest a leader sleeps; it wakes for what is due and for what changes."""
FOLLOW_SECONDS = 0.25
AGAIN_SECONDS = 0.1
ANSWER_SECONDS = 0.3
SAY_SECONDS = 10.0
FINISH_SECONDS = 2.0
SILENT_SECONDS = 30.0
"""A slot overdue for so long is a problem of its own, whoever ought to have fired it."""
PAUSES_SECONDS = 5.0
"""How often the consumers of paused jobs are looked at, while there are any."""


class Scheduler:
    """Fires schedules until it is stopped."""

    def __init__(
        self,
        app: Holdfast | None = None,
        config: SchedulerConfig | None = None,
        *,
        connection: ConnectionConfig | None = None,
        records: RecordConfig | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        """With an app, the schedules defined in its code are registered first."""
        self.app = app
        self.config = config or SchedulerConfig()
        self.telemetry = telemetry or Telemetry()
        self.node = new_node_id(ROLE)
        self._records = records or RecordConfig()
        given = connection or (app.connection_config() if app else ConnectionConfig())
        self._broker = Broker(given, name=self.node)
        self._stop = asyncio.Event()
        self._wake = asyncio.Event()
        self._planner = Planner(self.config.missed_after_seconds)
        self._progress = Progress()
        self._heard_at = 0.0
        self._said_at = -SAY_SECONDS
        self._leader: Leader | None = None
        self._started = False
        self._cancelling: set[asyncio.Task[Any]] = set()

    def stop(self) -> None:
        """Give the lead away and end `run`."""
        self._stop.set()
        self._wake.set()

    # ---- life

    async def run(self) -> None:
        """Fire slots, or stand by, until `stop` is called."""
        ready = ReadyFile(self.config.ready_file)
        async with self._broker:
            self._assemble()
            await self._client.topology.ensure()
            self._broker.on_reconnect(self._reconnected)
            await self._start(self._member.start, "registering this node")
            try:
                await self._prepare()
                await self._live(ready)
            finally:
                ready.set(False)
                await self._member.stop()
            if self._member.heartbeat.lost.is_set():
                raise NodeLost("this scheduler was declared lost; another one fires its slots")

    async def _start(self, step: Callable[[], Awaitable[T]], what: str) -> T:
        """Streams may have no leaders yet, or be electing new ones."""
        clock = self._broker.clock
        return await retrying(step, clock=clock, what=what, seconds=PATIENCE_SECONDS)

    def _assemble(self) -> None:
        broker, config = self._broker, self.config
        ttl, renew, probe = config.lease
        self._client = Client(broker, self._records, self.telemetry)
        self._jobs = Jobs(self._client)
        self._figures = Figures(self._client, self.telemetry)
        self._member = Membership(broker, ROLE, node=self.node, stop=self.stop)
        self._time = ServerTime(broker, config.clock_tolerance_seconds)
        self._view = ScheduleView(broker, self._changed, self._gone)
        self._store = NatsSlots(broker, self._kept_seconds, self._cancel)
        self._upkeep = Upkeep(self._client.topology, on_made=lambda _: self._view.look_soon())
        self._registration = Registering(self._client, self.app, self.config, self._time.now)
        self._election = LeaderElection(
            broker,
            ROLE,
            self.node,
            ttl_seconds=ttl,
            renew_seconds=renew,
            probe_seconds=probe,
            probe_misses=config.probe_misses,
            term_bucket=broker.names.slots,
            telemetry=self.telemetry,
            on_change=self._wake.set,
        )

    async def _prepare(self) -> None:
        """Everything that must be known before a role is taken."""
        await self._start(self._time.measure, "reading the server's clock")
        await self._start(self._registration.register, "registering the app's schedules")
        subject = self._broker.names.changed(self._broker.names.slots, progress_key(ROLE))
        await self._broker.subscribe(subject, self._heard)
        self._follow(await self._start(self._store.progress, "reading the slots' progress"))
        await self._view.load()
        self._started = True
        log.info("%s: %d schedules", self.node, len(self._view.schedules))

    async def _live(self, ready: ReadyFile) -> None:
        working = self._spawn(self._work(), "scheduler")
        others = [
            self._spawn(self._election.run(), "election"),
            self._spawn(self._view.run(), "schedules"),
            self._spawn(self._time.run(), "time"),
            self._spawn(self._member.heartbeat.run(), "heartbeat"),
            self._spawn(self._tell(ready), "tell"),
            self._spawn(self._figures.run(), "figures"),
            self._spawn(self._upkeep.run(), "upkeep"),
            self._spawn(self._registration.run(), "registration"),
            self._spawn(
                repeating(
                    self._keep_paused,
                    clock=self._broker.clock,
                    every=PAUSES_SECONDS,
                    what="checking paused jobs",
                ),
                "pauses",
            ),
        ]
        try:
            async with HealthServer(self.config.health_host, self.config.health_port, self.health):
                await self._until_stopped([working, *others])
                await asyncio.wait([working], timeout=FINISH_SECONDS)
        finally:
            for task in (working, *others):
                task.cancel()
            await asyncio.gather(working, *others, return_exceptions=True)
        log.info("%s stopped", self.node)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return asyncio.create_task(work, name=f"holdfast-{name}")

    async def _until_stopped(self, tasks: list[asyncio.Task[None]]) -> None:
        stopping = asyncio.create_task(self._stop.wait())
        closed = asyncio.create_task(self._broker.closed.wait())
        watched: list[asyncio.Future[Any]] = [stopping, closed, *tasks]
        try:
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping, closed}:
                task.result()
            if closed in done and not self._stop.is_set():
                raise errors.NotConnected("the connection to NATS is closed for good")
        finally:
            stopping.cancel()
            closed.cancel()

    # ---- the loop

    async def _work(self) -> None:
        """One step after the other; what is under way is finished when told to stop."""
        while not self._stop.is_set():
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
        if not self._time.right:
            return await self._refuse_to_fire()
        if self._election.leader:
            return await self._lead()
        self._leader = None
        return await self._stand_by()

    async def _refuse_to_fire(self) -> float:
        """The clocks disagree: better another fires, or nobody, than this one at a wrong time."""
        now = self._broker.clock.monotonic()
        self._leader = None
        if now - self._said_at >= SAY_SECONDS:
            self._said_at = now
            log.error(
                "this machine's clock is off by %+.1f s against NATS: nothing is fired here until "
                "they agree within %g s (is NTP running?)",
                self._time.offset,
                self._time.tolerance,
            )
        self._election.hold_off()
        if self._election.epoch:
            await self._election.stand_down(f"its clock is off by {self._time.offset:+.1f} s")
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
        return until_next(self._planner.next_due, self._time.now(), longest)

    async def _begin(self) -> Leader:
        leader = Leader(
            self._store,
            self._planner,
            self.telemetry,
            node=self.node,
            epoch=self._election.epoch,
            now=self._time.now,
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
        return until_next(self._planner.next_due, self._time.now(), FOLLOW_SECONDS) or AGAIN_SECONDS

    async def _look_after(self, holder: str) -> None:
        """A slot is due and nobody has recorded it, nor anything else, for a while."""
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
        """How long the oldest open slot has been due, or since that moment if it is later."""
        due = self._planner.next_due
        return 0.0 if due is None else max(0.0, self._time.now() - max(due, since))

    async def _heard(self, message: Received) -> None:
        place = (self._broker.names.slots, progress_key(ROLE))
        progress = self._broker.unreadable.read(slots.decode_progress, *place, message.body)
        if progress is not None and progress.epoch >= self._progress.epoch:
            self._follow(progress)

    def _follow(self, progress: Progress) -> None:
        if progress != self._progress:
            self._heard_at = self._time.now()
        self._progress = progress
        if not self._election.epoch:
            self._planner.follow(progress.watermark)

    def _reconnected(self) -> None:
        self.telemetry.reconnects.inc()
        self._heard_at = self._time.now()
        self._wake.set()

    # ---- schedules

    def _changed(self, schedule: Schedule, revision: int) -> None:
        seen = revision <= self._progress.seen
        self._planner.add(schedule, self._progress.watermark, seen=seen)
        if self._started:
            self._wake.set()

    def _gone(self, name: str) -> None:
        self._planner.remove(name)

    def _kept_seconds(self, planned: Planned) -> float:
        """How long a slot's record stays: for so many slots, within bounds; unsent ones longest."""
        longest = float(self.config.slot_ttl_seconds)
        schedule = self._view.schedules.get(planned.schedule)
        if planned.slot.pending or schedule is None:
            return longest
        following = next_after(schedule, planned.moment)
        gap = following - planned.moment if following else longest
        return min(longest, max(KEPT_LEAST_SECONDS, gap * self.config.slots_kept))

    def _cancel(self, planned: Planned) -> None:
        """Ask for the end of a run, without waiting for it."""

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

    # ---- telling

    async def _tell(self, ready: ReadyFile) -> None:
        while True:
            ready.set(not self.problems())
            self.telemetry.leading.labels(ROLE).set(bool(self._election.leader))
            self.telemetry.schedules.set(len(self._planner))
            self.telemetry.slot_overdue.set(self._overdue())
            self.telemetry.dispatch_age.set(max(0.0, self._time.now() - self._heard_at))
            self.telemetry.clock_offset.set(self._time.offset)
            await self._broker.clock.sleep(FOLLOW_SECONDS)

    def problems(self) -> list[str]:
        """Why this scheduler is not ready; nothing when it is."""
        if not self._broker.connected:
            return ["not connected to NATS"]
        if not self._started or self._stop.is_set():
            return ["starting or stopping"]
        found = []
        if not self._time.right:
            found.append(f"the clock is off by {self._time.offset:+.1f} s")
        if not self._election.established:
            found.append("neither leader nor behind one")
        if self._leader is not None and self._leader.unsent:
            found.append(f"{self._leader.unsent} slots are recorded and could not be sent yet")
        if self._overdue() > SILENT_SECONDS:
            found.append(f"a slot is due for {self._overdue():.0f} s and was not fired")
        return found + self._upkeep.problems + self._registration.problems

    def health(self) -> Health:
        """For `/health` and `/metrics`."""
        problems = self.problems()
        more = self._figures.answer
        return Health(not problems, problems, self.telemetry.render, self.facts(), more)

    def facts(self) -> dict[str, Any]:
        """For health pages."""
        if not self._started:
            return {"node": self.node}
        return {
            "node": self.node,
            "role": "leader" if self._election.leader else "standby",
            "leader": self._election.holder,
            "epoch": self._progress.epoch,
            "schedules": len(self._planner),
            "overdue_seconds": round(self._overdue(), 3),
            "last_progress_seconds": round(max(0.0, self._time.now() - self._heard_at), 3),
        }
