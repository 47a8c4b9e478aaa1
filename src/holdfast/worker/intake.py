"""What a worker takes from its queues, and what it holds.

It takes only what it can start soon: free places of the job's lane, plus what the lane's recent
speed would need in a moment; consumers that bring nothing ask for one message, busy ones share the
room. What was taken and cannot be started within a second is given back, for others to have; at
once, when every place of its lane is stuck. Everything held is extended, while the node is trusted.

Nothing is taken before every subscription of ours exists: what runs may publish an event, and a
consumer that is made after that would never see it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from holdfast import errors
from holdfast.app import Job
from holdfast.broker import Delivery, Pull
from holdfast.client import Client
from holdfast.config import WorkerConfig
from holdfast.keeper.board import LOOP, QUICK, Board
from holdfast.model.node import HeldRun
from holdfast.names import consumer
from holdfast.worker.canary import Canary
from holdfast.worker.execution import Executor
from holdfast.worker.held import Held, Interrupt
from holdfast.worker.slots import Lane, Left, Slots

log = logging.getLogger("holdfast.worker")

LATE_SECONDS = 1.0
"""A loop that stood still for less was only busy."""
SPEED_SECONDS = 0.1
LANE_SPEED_SECONDS = 0.5
"""Threads and processes have few places: with less in advance they would stand idle between two
short runs. Below `WAITING_SECONDS`, so that what is taken in advance is started, not given back."""
SPEED_TICK_SECONDS = 0.25
WAITING_SECONDS = 1.0
UNDER_WAY_SECONDS = 60.0
PLACES = {"loop": "places", "thread": "threads", "process": "processes"}
"""What the places of a lane are called."""
INDEX_SECONDS = 0.2
"""Runs held for less are not in the index: most end before anyone could read it."""
INDEX_UNCLAIMED = 500
"""So many messages without a claim are in it at most; the rest comes back after `ack_wait`."""


class Intake:
    """The pulls of one worker and the messages that it holds."""

    def __init__(
        self,
        client: Client,
        config: WorkerConfig,
        jobs: Iterable[Job[Any, Any]],
        executor: Executor,
        canary: Canary,
        board: Board,
        *,
        app: str = "",
        enough: Callable[[], None],
        lanes: Mapping[str, int] | None = None,
    ) -> None:
        self.slots = Slots(
            config.concurrency, self._start, self._freed, lanes, lambda held: held.job.lane
        )
        self._blocked: set[str] = set()
        self.board = board
        executor.on_begin = self._begun
        self._unsure: asyncio.Task[None] | None = None
        self.executed = 0
        self.speed = 0.0
        self.draining = False
        self._client = client
        self._broker = client.broker
        self._config = config
        self._executor = executor
        self._canary = canary
        self._app = app
        self._enough = enough
        self._held: dict[str, Held] = {}
        self._idle = asyncio.Event()
        self.pulls = [pull for job in jobs for pull in self._pulls_of(job)]
        self._to_subscribe = {
            p.consumer for p in self.pulls if p.stream == self._broker.names.events
        }

    # ---- pulling

    def _pulls_of(self, job: Job[Any, Any]) -> list[Pull]:
        names = self._broker.names
        spec = job.spec
        found = [self._pull(job, names.jobs, names.job(spec.group, spec.name), "")]
        found += [self._pull(job, names.events, names.event(event), event) for event in spec.on]
        return found

    def _pull(self, job: Job[Any, Any], stream: str, subject: str, event: str) -> Pull:
        spec = job.spec
        topology = self._client.topology
        name = consumer(spec.group, spec.name, event)

        async def ensure() -> None:
            await topology.ensure_consumer(
                stream,
                name,
                subject,
                self._config.ack_wait_seconds,
                new=bool(event),
                since=self._missed_since(pull),
                app=self._app,
            )
            self._exists(name)

        def deliver(delivery: Delivery) -> None:
            self.delivered(delivery, job, event)

        pull = Pull(
            self._broker,
            stream,
            name,
            ensure=ensure,
            deliver=deliver,
            want=lambda: self.wanted(pull, job.lane),
        )
        return pull

    def _exists(self, name: str) -> None:
        """A consumer is there; with the last subscription everything may start."""
        if name in self._to_subscribe:
            self._to_subscribe.remove(name)
            if not self._to_subscribe:
                self.wake()

    def wake(self) -> None:
        """Look again at how much every consumer may bring."""
        for pull in self.pulls:
            pull.wake()

    def _missed_since(self, pull: Pull) -> float | None:
        """From when on a subscription that has vanished must be read again; None if it is new.

        What was under way when it vanished is included: what has run is known by its record.
        """
        if pull.known is None:
            return None
        away = self._broker.clock.monotonic() - pull.known
        return self._broker.server_now() - away - UNDER_WAY_SECONDS

    def wanted(self, pull: Pull, lane_name: str) -> int:
        """How many messages one consumer may have under way: idle ones one, busy ones the rest."""
        if self.draining or self._to_subscribe or self.slots.reserved:
            return 0
        slots, lane = self.slots, self.slots.lanes[lane_name]
        room = slots.limit + int(self.speed * SPEED_SECONDS) - slots.busy - slots.stuck
        room = min(room - slots.waiting, self._lane_room(lane))
        if room <= 0:
            return 0
        if not pull.active:
            return 1
        busy = sum(1 for p in self.pulls if p.active)
        return max(1, room // max(1, busy))

    def _lane_room(self, lane: Lane) -> int:
        if lane.blocked:
            return 0
        ahead = SPEED_SECONDS if lane.name == "loop" else LANE_SPEED_SECONDS
        return lane.free + int(lane.speed * ahead) - len(lane.backlog)

    def delivered(self, delivery: Delivery, job: Job[Any, Any], event: str) -> None:
        """A message of a job has come."""
        now = self._broker.clock.monotonic()
        if self._may_be_old(now):
            return  # it comes again, to whoever has it by then
        held = Held(delivery, job, now, event)
        if self.draining or self.slots.reserved or self.slots.lanes[job.lane].blocked:
            self._give_back_soon(held)
            return
        self._held[delivery.reply] = held
        delivery.board = self.board
        mark = QUICK if job.spec.restart == "immediately" else 0
        delivery.place = self.board.take(delivery.reply, now, mark)
        self.slots.submit(held)

    def _may_be_old(self, now: float) -> bool:
        """Whether what arrives now may be an old delivery that somebody else has by now.

        While the loop was blocked, the server kept delivering, and gave to others what was not
        extended. Whatever arrives before the answer to a request sent now is not executed.
        """
        if self._unsure is not None and not self._unsure.done():
            return True
        moved = self.board.times[LOOP]
        if not moved or now - moved < max(LATE_SECONDS, self._config.ack_wait_seconds / 2):
            return False
        self._unsure = asyncio.create_task(self._ask_server())
        return True

    async def _ask_server(self) -> None:
        with contextlib.suppress(errors.BrokerError):
            await self._broker.flush()

    def _start(self, held: Held) -> Awaitable[Left]:
        """Execute a message, unless the keeper has given it back while the loop was blocked."""
        place = getattr(held.message, "place", -1)
        if place >= 0 and not (self.board.start(place) and self._was_extended(place)):
            return _nothing()
        return self._executor.execute(held)

    def _was_extended(self, place: int) -> bool:
        """Whether the server cannot have given a message to somebody else while it waited."""
        age = self._broker.clock.monotonic() - self.board.extended[place]
        return age < self._config.ack_wait_seconds

    def _begun(self, held: Held) -> None:
        """Its handler is about to start."""
        place = getattr(held.message, "place", -1)
        if place >= 0:
            self.board.name(place, held.run, held.claim.epoch if held.claim else 0)

    def claim_lost(self, run: str) -> None:
        """Somebody else holds a run: nothing more may be sent about its message."""
        for held in self._held.values():
            if held.run == run and isinstance(held.message, Delivery):
                held.message.abandon()

    def executed_by(self, task: asyncio.Task[Any] | None) -> tuple[str, str]:
        """The run and the job that a task executes; called from another thread."""
        for held in list(self._held.values()):
            if task is not None and held.call is not None and held.call.task is task:
                return held.run, held.job.spec.name
        return "", ""

    def give_back_waiting(self) -> None:
        """What was taken and cannot be started soon, because the slots are full of long runs."""
        now = self._broker.clock.monotonic()
        for held in self.slots.given_back(now - WAITING_SECONDS):
            self._held.pop(held.message.reply, None)
            self._give_back_soon(held)

    @property
    def blocked(self) -> list[str]:
        """Why some runs cannot be taken: the lanes that are blocked, in words."""
        return [
            f"all {lane.limit} {PLACES[lane.name]} are stuck in handlers that do not end"
            for lane in self.slots.lanes.values()
            if lane.blocked
        ]

    def _tell_blocked(self) -> None:
        for lane in self.slots.lanes.values():
            if lane.blocked and lane.name not in self._blocked:
                self._blocked.add(lane.name)
                log.error(
                    "all %d %s are stuck in handlers whose attempts are over: nothing that needs "
                    "one is taken until one of them ends",
                    lane.limit,
                    PLACES[lane.name],
                )
            elif not lane.blocked and lane.name in self._blocked:
                self._blocked.remove(lane.name)
                log.info("some of the %s are free again", PLACES[lane.name])
                self.wake()

    def _give_back_soon(self, held: Held) -> None:
        task = asyncio.create_task(self._executor.give_back(held))
        self._held[held.message.reply] = held
        task.add_done_callback(lambda _: self._held.pop(held.message.reply, None))

    def _freed(self, held: Held) -> None:
        self._held.pop(held.message.reply, None)
        if getattr(held.message, "place", -1) >= 0 and isinstance(held.message, Delivery):
            held.message.abandon()
        self.executed += 1
        self._canary.travelled()
        if self.draining:
            if not self.slots.busy:
                self._idle.set()
            return
        lane = self.slots.lanes[held.job.lane]
        if len(lane.backlog) <= lane.limit // 2:
            for pull in self.pulls:
                pull.wake_if_low()
        if self._config.max_runs and self.executed >= self._config.max_runs:
            self._enough()

    # ---- keeping what is held

    async def extend(self, trusted: Callable[[], bool]) -> None:
        """Tell the server every so often that what we hold is in good hands."""
        clock = self._broker.clock
        every = self._config.extend_seconds
        while True:
            await clock.sleep(every / 3)
            if not self._broker.connected or not trusted():
                continue
            now = clock.monotonic()
            with contextlib.suppress(errors.NotConnected):
                for held in list(self._held.values()):
                    if now - held.extended >= every * 2 / 3 and not held.lost:
                        held.extended = now
                        await held.message.extend()

    def index(self) -> tuple[HeldRun, ...]:
        """What this node holds for longer than a moment, for whoever must give it back."""
        settled = self._broker.clock.monotonic() - INDEX_SECONDS
        claimed, unclaimed = [], []
        for held in self._held.values():
            if held.lost or held.since >= settled:
                continue
            if held.claim is not None:
                claimed.append(HeldRun(held.run, held.claim.revision, held.message.reply))
            elif held.job.spec.restart == "immediately":
                unclaimed.append(HeldRun("", 0, held.message.reply))
        return (*claimed, *unclaimed[:INDEX_UNCLAIMED])

    async def measure(self) -> None:
        """Keep the recent speed, by which to take in advance."""
        lanes = list(self.slots.lanes.values())
        last = {lane.name: 0 for lane in lanes}
        while True:
            await self._broker.clock.sleep(SPEED_TICK_SECONDS)
            for lane in lanes:
                speed = (lane.executed - last[lane.name]) / SPEED_TICK_SECONDS
                lane.speed = speed if speed > lane.speed else (lane.speed + speed) / 2
                last[lane.name] = lane.executed
            self.speed = sum(lane.speed for lane in lanes)
            self.give_back_waiting()
            self._tell_blocked()

    def held(self) -> list[Held]:
        """Everything that is held now."""
        return list(self._held.values())

    # ---- draining

    async def return_waiting(self) -> None:
        """Give back what was not started, and take nothing any more."""
        self.draining = True
        for held in list(self.slots.given_back(float("inf"))):
            self._held.pop(held.message.reply, None)
            await self._executor.give_back(held)

    def interrupt_all(self) -> None:
        """The grace period is over: stop what still runs and give it back."""
        for held in self.held():
            held.interrupt(Interrupt.SHUTDOWN)

    async def wait_idle(self, limit: float) -> bool:
        """Wait for what runs; False when it took longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while self.slots.busy:
                    self._idle.clear()
                    await self._idle.wait()
        return not self.slots.busy


async def _nothing() -> Left:
    return ()
