"""What a worker takes from its queues.

It takes only what it can start soon: the free places of the job's lane, plus what the lane's recent
speed will need in a moment; idle consumers ask for one message, busy ones share the room. A message
that cannot start within a second is given back for others; at once if its lane is blocked.

Nothing is taken before all our subscriptions exist: a run may publish an event, and a consumer
created after that would never see it.

Besides the jobs' own consumers there are two kinds. The *canary* proves that a message can still
travel stream → consumer → process → ack, because being connected does not prove it. *Moved*
consumers are those that our subscribers had in another group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from holdfast import errors
from holdfast.broker import Bucket, Delivery, Pull
from holdfast.broker.pull import SLOW_HEARTBEAT_SECONDS
from holdfast.broker.streams import APP_LABEL
from holdfast.client import Client
from holdfast.config import WorkerConfig
from holdfast.durations import NANO
from holdfast.job import Job
from holdfast.keeper.board import LOOP, QUICK, Board
from holdfast.model import node as nodes
from holdfast.names import GRANTED, H_TTL, consumer, parse_consumer
from holdfast.payload.published import LABEL, published
from holdfast.retrying import repeating
from holdfast.worker.attempt import Held
from holdfast.worker.backlog import NORMAL, RANKS, shares
from holdfast.worker.execution import Executor
from holdfast.worker.places import SPEED_SECONDS, Lane, Left, Places

log = logging.getLogger("holdfast.worker")

LATE_SECONDS: Final = 1.0
"""A loop that did not move for less than this was only busy."""
AHEAD_SECONDS: Final = 0.1
"""How far ahead messages for the event loop are taken: longer than a round trip to the server."""
LANE_AHEAD_SECONDS: Final = 0.5
"""Threads and processes have few places: with less in advance they would idle between short runs.
Below `WAITING_SECONDS`, so that messages taken in advance are started, not given back."""
WAITING_SECONDS: Final = 1.0
"""A message that waits longer is given back for another worker."""
UNDER_WAY_SECONDS: Final = 60.0
"""How far back a vanished subscription is read again: longer than most runs take."""
CANARY_MISSED: Final = 3
"""One canary may be late on a busy server; three in a row are not."""
CANARY_KEPT_SECONDS: Final = 60
"""How long canaries and their consumer outlive a dead worker."""
MOVED_SECONDS: Final = 10.0
"""How often to search for consumers of moved subscribers: groups rarely move, and listing them
costs the server little at this rate."""
SENTINELS: Final = 24
"""How many consumers have quick heartbeats. In a cluster, the leaders of consumers are spread over
the servers: when one dies, some of these fall silent, and then all consumers ask again."""
PLACES: Final = {"loop": "places", "thread": "threads", "process": "processes"}
"""The word for a lane's places in log lines."""


class Intake:
    """The pulls of one worker's jobs."""

    def __init__(
        self,
        client: Client,
        config: WorkerConfig,
        jobs: Iterable[Job[Any]],
        places: Places,
        executor: Executor,
        canary: Canary,
        board: Board,
        *,
        app: str = "",
        enough: Callable[[], None],
    ) -> None:
        """`enough` is called when `max_runs` runs were executed."""
        self.draining = False
        self._client = client
        self._broker = client.broker
        self._config = config
        self._places = places
        self._executor = executor
        self._canary = canary
        self._board = board
        self._app = app
        self._enough = enough
        self._blocked: set[str] = set()
        self._unsure: asyncio.Task[None] | None = None
        self._shares = shares(config.low_share)
        self._ranks: dict[str, int] = {}
        """The priority of each consumer, unless all of them are normal."""
        self.pulls = [pull for job in jobs for pull in self._pulls_of(job)]
        for pull in self.pulls[SENTINELS:]:
            pull.heartbeat = SLOW_HEARTBEAT_SECONDS
        events = self._broker.names.events
        self._to_subscribe = {p.consumer for p in self.pulls if p.stream == events}
        places.open(self._start, self._freed)

    # ---- pulling

    def _pulls_of(self, job: Job[Any]) -> list[Pull]:
        names, spec = self._broker.names, job.spec
        found = [self._queue(job, "")]
        found += [self._pull(job, names.events, names.event(event), event) for event in spec.on]
        return found + ([self._queue(job, GRANTED)] if spec.ordered else [])

    def _queue(self, job: Job[Any], queue: str) -> Pull:
        names, spec = self._broker.names, job.spec
        return self._pull(job, names.jobs, names.job(spec.group, spec.name, queue), "", queue)

    def open(self, job: Job[Any], queue: str) -> Pull | None:
        """The pull of one more of a job's queues, to be run by the caller; None: it has one."""
        name = consumer(job.spec.group, job.spec.name, queue=queue)
        if any(pull.consumer == name for pull in self.pulls):
            return None
        pull = self._queue(job, queue)
        pull.heartbeat = SLOW_HEARTBEAT_SECONDS if len(self.pulls) >= SENTINELS else pull.heartbeat
        self.pulls.append(pull)
        return pull

    def _pull(self, job: Job[Any], stream: str, subject: str, event: str, queue: str = "") -> Pull:
        name = consumer(job.spec.group, job.spec.name, event, queue)
        labels = {APP_LABEL: self._app} | (
            {} if event or queue else {LABEL: published(job.signature, job.key, job.spec)}
        )
        rank = RANKS.get(queue, RANKS[job.spec.priority])
        if rank != NORMAL or self._ranks:
            self._ranks[name] = rank

        async def ensure() -> None:
            await self._client.topology.ensure_consumer(
                stream,
                name,
                subject,
                self._config.ack_wait_seconds,
                new=bool(event),
                since=self._missed_since(pull),
                labels=labels,
                in_order=job.spec.ordered and queue != GRANTED,
            )
            self._exists(name)

        pull = self.pull_for(job, event, stream, name, ensure, rank)
        return pull

    def pull_for(
        self,
        job: Job[Any],
        event: str,
        stream: str,
        name: str,
        ensure: Callable[[], Awaitable[None]],
        rank: int = NORMAL,
    ) -> Pull:
        """A pull whose messages are executed by a job."""
        pull = Pull(
            self._broker,
            stream,
            name,
            ensure=ensure,
            deliver=lambda delivery: self._delivered(delivery, job, event, rank),
            want=lambda: self._wanted(pull, job.lane, rank),
            on_silent=self._ask_again,
        )
        return pull

    def _ask_again(self) -> None:
        """A consumer's leader seems to be gone, perhaps with its server: ask all of them again."""
        for pull in self.pulls:
            pull.ask_again()

    def _exists(self, name: str) -> None:
        """A consumer exists; after the last subscription, pulling may start."""
        if name in self._to_subscribe:
            self._to_subscribe.remove(name)
            if not self._to_subscribe:
                self._wake()

    def _wake(self) -> None:
        for pull in self.pulls:
            pull.wake()

    def _missed_since(self, pull: Pull) -> float | None:
        """The instant from which a vanished subscription must be read again; None if it is new.

        That includes what was running when it vanished: runs that have ended are known by their
        record.
        """
        if pull.known is None:
            return None
        away = self._broker.clock.monotonic() - pull.known
        return self._broker.server_now() - away - UNDER_WAY_SECONDS

    def _wanted(self, pull: Pull, lane_name: str, rank: int) -> int:
        """How many messages a consumer may have in flight: one if idle, else its share."""
        places = self._places
        if self.draining or self._to_subscribe or places.reserved:
            return 0
        room = places.limit + int(places.speed * AHEAD_SECONDS) - places.busy - places.stuck
        lane = places.lanes[lane_name]
        room = min(room - places.waiting, self._lane_room(lane))
        if room <= 0:
            return self._at_hand(pull, lane, rank) if self._ranks else 0
        if not pull.active:
            return 1
        if self._ranks:
            others = (self._ranks.get(p.consumer, NORMAL) for p in self.pulls if p.active)
            return max(1, int(room * self._shares[rank] / sum(self._shares[r] for r in others)))
        busy = sum(1 for p in self.pulls if p.active)
        return max(1, room // max(1, busy))

    def _at_hand(self, pull: Pull, lane: Lane, rank: int) -> int:
        """How many messages to fetch while no place is free: some of each priority, so that the
        lane can choose.

        As many as the lane starts of that priority in a moment, at least one.
        """
        if lane.blocked or (rank == NORMAL and not pull.active):
            return 0
        soon = int(lane.speed * AHEAD_SECONDS * self._shares[rank])
        return max(0, max(1, soon) - lane.backlog.waiting(rank))

    def _lane_room(self, lane: Lane) -> int:
        if lane.blocked:
            return 0
        ahead = AHEAD_SECONDS if lane.name == "loop" else LANE_AHEAD_SECONDS
        return lane.free + int(lane.speed * ahead) - len(lane.backlog)

    # ---- a message

    def _delivered(self, delivery: Delivery, job: Job[Any], event: str, rank: int) -> None:
        now = self._broker.clock.monotonic()
        if self._may_be_old(now):
            return  # if it is ours, the server delivers it again
        held = Held(delivery, job, now, event, rank)
        if self.draining or self._places.reserved or self._places.lanes[job.lane].blocked:
            self._give_back_soon(held)
            return
        self._places.held[delivery.reply] = held
        delivery.board = self._board
        mark = QUICK if job.spec.restart == "immediately" else 0
        delivery.place = self._board.take(delivery.reply, now, mark)
        self._places.submit(held)

    def _may_be_old(self, now: float) -> bool:
        """Whether an arriving message may be an old delivery that another worker has received by
        now.

        While the loop was blocked, the server kept delivering, and redelivered to others what was
        not extended. Nothing that arrives before the answer to a request sent now is executed.
        """
        if self._unsure is not None and not self._unsure.done():
            return True
        moved = self._board.times[LOOP]
        if not moved or now - moved < max(LATE_SECONDS, self._config.ack_wait_seconds / 2):
            return False
        self._unsure = asyncio.create_task(self._ask_server())
        return True

    async def _ask_server(self) -> None:
        with contextlib.suppress(errors.BrokerError):
            await self._broker.flush()

    def _start(self, held: Held) -> Awaitable[Left]:
        """Execute a message, unless the keeper gave it back while the loop was blocked."""
        place = held.message.place
        if place >= 0 and not (self._board.start(place) and self._was_extended(place)):
            return _nothing()
        return self._executor.execute(held)

    def _was_extended(self, place: int) -> bool:
        """Whether the server cannot have redelivered the message while it waited."""
        age = self._broker.clock.monotonic() - self._board.extended[place]
        return age < self._config.ack_wait_seconds

    def _freed(self, held: Held) -> None:
        self._places.held.pop(held.message.reply, None)
        if held.message.place >= 0 and isinstance(held.message, Delivery):
            held.message.abandon()
        self._canary.travelled()
        if self.draining:
            return
        lane = self._places.lanes[held.job.lane]
        if len(lane.backlog) <= lane.limit // 2:
            for pull in self.pulls:
                pull.wake_if_low()
        if self._config.max_runs and self._places.executed >= self._config.max_runs:
            self._enough()

    # ---- giving back

    def _give_back_soon(self, held: Held) -> None:
        reply, all_held = held.message.reply, self._places.held
        task = asyncio.ensure_future(held.message.nak())
        all_held[reply] = held
        task.add_done_callback(lambda _: all_held.pop(reply, None))

    async def adjust(self) -> None:
        """Measure the speed, give back what cannot start soon, report blocked lanes."""
        while True:
            await self._broker.clock.sleep(SPEED_SECONDS)
            self._places.measure()
            late = self._broker.clock.monotonic() - WAITING_SECONDS
            for held in self._places.given_back(late):
                self._give_back_soon(held)
            self._report_blocked()

    async def return_waiting(self) -> None:
        """Give back what was not started, and take nothing more."""
        self.draining = True
        for held in list(self._places.given_back(float("inf"))):
            self._places.held.pop(held.message.reply, None)
            await held.message.nak()

    @property
    def blocked(self) -> list[str]:
        """Why some runs cannot be taken: the blocked lanes."""
        return [
            f"all {lane.limit} {PLACES[lane.name]} are stuck in handlers that do not end"
            for lane in self._places.lanes.values()
            if lane.blocked
        ]

    def _report_blocked(self) -> None:
        for lane in self._places.lanes.values():
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
                self._wake()


async def _nothing() -> Left:
    return ()


class Canary:
    """Sends itself a message every few seconds, unless real ones have just arrived."""

    def __init__(self, client: Client, config: WorkerConfig, node: str) -> None:
        self._client = client
        self._broker = broker = client.broker
        self._every = config.canary_seconds
        self._subject = broker.names.canary(config.group, node)
        self._name = f"canary-{node}"
        self._arrived = broker.clock.monotonic()
        self._pull = Pull(
            broker,
            broker.names.jobs,
            self._name,
            ensure=self._ensure,
            deliver=self._deliver,
            want=lambda: 1,
            heartbeat=SLOW_HEARTBEAT_SECONDS,  # its messages themselves come more often
        )

    @property
    def age(self) -> float:
        """Seconds since a message last arrived."""
        return self._broker.clock.monotonic() - self._arrived

    @property
    def fresh(self) -> bool:
        return self.age < CANARY_MISSED * self._every

    def travelled(self) -> None:
        """A message arrived."""
        self._arrived = self._broker.clock.monotonic()

    async def run(self) -> None:
        """Send canaries until cancelled."""
        sending = asyncio.create_task(
            repeating(
                self._send,
                clock=self._broker.clock,
                every=self._every,
                what="sending a canary",
                at_once=True,
            )
        )
        try:
            await self._pull.run()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(self) -> None:
        if self.age >= self._every * 0.9:
            await self._broker.store(self._subject, b"", {H_TTL: f"{CANARY_KEPT_SECONDS}s"})

    def _deliver(self, delivery: Delivery) -> None:
        self.travelled()
        self._acking = asyncio.ensure_future(delivery.ack())

    async def _ensure(self) -> None:
        await self._client.topology.create_consumer(
            self._broker.names.jobs,
            {
                "name": self._name,
                "ack_policy": "explicit",
                "ack_wait": 5 * NANO,
                "filter_subject": self._subject,
                "deliver_policy": "all",
                "replay_policy": "instant",
                "inactive_threshold": CANARY_KEPT_SECONDS * NANO,
                "mem_storage": True,
            },
        )


class Moved:
    """Drains and removes the consumers that our subscribers had in other groups.

    A subscriber's consumer is named after its group. When a job moves to another group, the old
    consumer keeps collecting events that nobody pulls. Each of them is executed once, under the run
    id of the new group, so an event that both consumers have is detected as a repeat.

    A consumer is taken over only if it is certainly ours: the same app created it (by its label),
    for a job and an event that we subscribe to, and no live worker serves it in its group. The
    doctor shows consumers without a label.

    Not prevented: while workers of both groups run, each group executes every event.
    """

    def __init__(self, client: Client, intake: Intake, app: str, jobs: Iterable[Job[Any]]) -> None:
        self._client = client
        self._broker = client.broker
        self._stream = client.broker.names.events
        self._intake = intake
        self._app = app
        self._jobs = {job.spec.name: job for job in jobs if job.spec.on}
        self._draining: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Search every `MOVED_SECONDS` until cancelled."""
        try:
            await repeating(
                self._look,
                clock=self._broker.clock,
                every=MOVED_SECONDS,
                what="searching for moved subscribers",
                on=errors.BrokerError,
            )
        finally:
            for name in list(self._draining):
                await self._stop(name)

    async def _look(self) -> None:
        left = {info["name"]: info for info in await self._left()} if self._jobs else {}
        for name in [n for n in self._draining if n not in left]:
            await self._stop(name)
        for name, info in left.items():
            if info.get("num_pending") or info.get("num_ack_pending"):
                self._drain(name, info)
            else:
                await self._remove(name)

    async def _left(self) -> list[dict[str, Any]]:
        """The consumers of our subscribers in groups that have no worker for them."""
        found = [c for c in await self._client.topology.consumers(self._stream) if self._is_old(c)]
        if not found:
            return []
        bucket = Bucket(self._broker, self._broker.names.nodes)
        known = [node async for _, node in bucket.records(nodes.decode)]
        served = {(n.group, job) for n in known if n.alive and n.role == "worker" for job in n.jobs}
        return [c for c in found if parse_consumer(c["name"]) not in served]

    def _is_old(self, info: dict[str, Any]) -> bool:
        where = parse_consumer(info.get("name", ""))
        job = self._jobs.get(where[1]) if where else None
        if where is None or job is None or where[0] == job.spec.group:
            return False
        label = (info["config"].get("metadata") or {}).get(APP_LABEL)
        return label == self._app and self._event(info) in job.spec.on

    def _event(self, info: dict[str, Any]) -> str:
        return self._broker.names.parse_event(info["config"].get("filter_subject", "")) or ""

    def _drain(self, name: str, info: dict[str, Any]) -> None:
        if name in self._draining:
            return
        group, job_name = parse_consumer(name) or ("", "")
        job, event = self._jobs[job_name], self._event(info)
        log.info("job %s moved from group %s: taking over its events %s", job_name, group, event)

        async def ensure() -> None:
            await self._broker.api(f"CONSUMER.INFO.{self._stream}.{name}")

        pull = self._intake.pull_for(job, event, self._stream, name, ensure)
        self._draining[name] = asyncio.create_task(pull.run(), name=f"holdfast-moved-{name}")

    async def _remove(self, name: str) -> None:
        await self._stop(name)
        try:
            await self._broker.api(f"CONSUMER.DELETE.{self._stream}.{name}")
        except errors.NotFound:
            return  # another worker of our group was faster
        log.info("consumer %s is empty and its job has moved: removed", name)

    async def _stop(self, name: str) -> None:
        if task := self._draining.pop(name, None):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
