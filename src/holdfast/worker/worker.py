"""A worker: one process that pulls the runs of its group and executes them.

    connect ──► streams, consumers ──► heartbeat ──► pull ──► (SIGTERM) drain ──► exit

It takes only what it can start soon: free slots, plus what a tenth of a second of its recent speed
would need. Everything it holds is extended while its heartbeat is trusted, so a long run is never
delivered twice because it is long; when the trust lapses it sends nothing until it has asked the
leader which claims are still its own.

`run` ends normally after a drain, and raises when it cannot go on: a connection closed for good, a
consumer that cannot be brought back. The command line turns that into an exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import logging
from collections.abc import Coroutine
from typing import Any

from holdfast import errors
from holdfast.app import Holdfast, Hook, Job
from holdfast.broker import Broker, Delivery, Pull, Received
from holdfast.client import Client
from holdfast.config import ConnectionConfig, LivenessConfig, RecordConfig, WorkerConfig, load
from holdfast.health import Health, HealthServer
from holdfast.model.liveness import Liveness, from_config
from holdfast.model.node import HeldRun
from holdfast.names import consumer
from holdfast.ownership.claims import Claims
from holdfast.ownership.heartbeat import NodeLost, new_node_id
from holdfast.ownership.membership import Membership
from holdfast.telemetry import Telemetry
from holdfast.worker.calling import Caller
from holdfast.worker.canary import Canary
from holdfast.worker.execution import Executor
from holdfast.worker.held import Held, Interrupt
from holdfast.worker.outbox import NatsOutbox
from holdfast.worker.slots import Slots

log = logging.getLogger("holdfast.worker")

SPEED_SECONDS = 0.1
SETTLE_SECONDS = 5.0
WAITING_SECONDS = 1.0
UNDER_WAY_SECONDS = 60.0
INDEX_SECONDS = 0.2
"""Runs held for less are not in the index: most end before anyone could read it."""


class Worker:
    """Executes the jobs of one group of an app until it is stopped."""

    def __init__(
        self,
        app: Holdfast,
        config: WorkerConfig | None = None,
        *,
        connection: ConnectionConfig | None = None,
        records: RecordConfig | None = None,
        liveness: Liveness | None = None,
        telemetry: Telemetry | None = None,
        health_path: str = "",
    ) -> None:
        """Health is served on the configuration's port, or on a Unix socket at `health_path`."""
        self.app = app
        self.config = config or WorkerConfig()
        self.jobs = {n: j for n, j in app.jobs.items() if j.spec.group == self.config.group}
        if not self.jobs:
            groups = sorted({j.spec.group for j in app.jobs.values()})
            raise errors.ConfigError(
                f"app {app.name!r} has no job in group {self.config.group!r}: "
                + (f"its groups are {', '.join(groups)}" if groups else "it has no jobs at all")
            )
        self.telemetry = telemetry or Telemetry()
        self.node = new_node_id("worker")
        self._records = records or load(RecordConfig)
        self._liveness = liveness or self._load_liveness()
        self._forced = False
        self._health_path = health_path
        self._broker = Broker(connection or app.connection_config(), name=self.node)
        self._stop = asyncio.Event()
        self._held: dict[str, Held] = {}
        self._pulls: list[Pull] = []
        self._executed = 0
        self._speed = 0.0
        self._draining = False

    def _load_liveness(self) -> Liveness:
        """As configured; the group's profile where none is."""
        config = load(LivenessConfig)
        group = self.app.groups.get(self.config.group)
        if group and group.profile and config.profile == LivenessConfig().profile:
            config = dataclasses.replace(config, profile=group.profile)
        return from_config(config, self.config.grace_seconds)

    def stop(self) -> None:
        """Drain and end `run`: stop pulling, finish within the grace period, give the rest back."""
        self._stop.set()

    # ---- life

    async def run(self) -> None:
        """Work until `stop` is called or the limit of runs is reached."""
        async with self._broker:
            self._assemble()
            await self._client.topology.ensure()
            self._broker.on_reconnect(self.telemetry.reconnects.inc)
            await self._member.start()
            try:
                with self.app.bound(self._client):
                    await self._live()
            finally:
                await self._member.stop(forced=self._forced)
            if self._member.heartbeat.lost.is_set():
                raise NodeLost("stopped after this node was declared lost")

    async def _live(self) -> None:
        await self._broker.subscribe(self._broker.names.cancel("*"), self._on_cancel)
        await _call_hooks(self.app.startup_hooks)
        try:
            await self._work()
        finally:
            self._caller.close()
            await _call_hooks(self.app.shutdown_hooks)

    def _assemble(self) -> None:
        broker, config, records = self._broker, self.config, self._records
        self._client = Client(broker, records, self.telemetry)
        self._member = Membership(
            broker,
            "worker",
            group=config.group,
            liveness=self._liveness,
            node=self.node,
            jobs=tuple(sorted(self.jobs)),
            stop=self.stop,
            on_gap=self._verify_claims,
            running=lambda: self._slots.busy,
            held=self._index,
            metrics=self._figures,
        )
        self._claims = Claims(
            self._client.runs,
            self.node,
            broker.clock,
            self.telemetry,
            now=broker.server_now,
            node_alive=self._member.alive,
            in_grace=self._member.in_grace,
            crash_limit=config.crash_limit,
            keyed_ttl=records.keyed_ttl_seconds,
            keyless_ttl=records.keyless_ttl_seconds,
        )
        self._caller = Caller(self.app.middlewares, config.concurrency, self.telemetry)
        self._executor = Executor(
            self._claims,
            NatsOutbox(self._client),
            self._caller,
            broker.clock,
            self.telemetry,
            node=self.node,
            now=broker.server_now,
            short_wait=config.short_wait_seconds,
        )
        self._slots = Slots(config.concurrency, self._executor.execute, self._freed)
        self._canary = Canary(broker, self._client.topology, config, self.node)
        self._pulls = [p for job in self.jobs.values() for p in self._pulls_of(job)]

    async def _work(self) -> None:
        health = HealthServer(
            self.config.health_host, self.config.health_port, self._health, path=self._health_path
        )
        async with health:
            background = [
                self._spawn(self._beat(), "heartbeat"),
                self._spawn(self._extend(), "extend"),
                self._spawn(self._measure(), "measure"),
                self._spawn(self._canary.run(), "canary"),
            ]
            pulling = [self._spawn(pull.run(), pull.consumer) for pull in self._pulls]
            self._log_start()
            try:
                await self._until_stopped([*background, *pulling])
                await self._drain(pulling)
            finally:
                for task in (*pulling, *background):
                    task.cancel()
                await asyncio.gather(*pulling, *background, return_exceptions=True)
                await self._slots.close()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return asyncio.create_task(work, name=f"holdfast-{name}")

    def _log_start(self) -> None:
        log.info(
            "%s: group %s, jobs %s, up to %d at a time",
            self.node,
            self.config.group,
            ", ".join(sorted(self.jobs)),
            self.config.concurrency,
        )

    async def _until_stopped(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for `stop`; the end of any task before that is a failure of the worker."""
        stopping = asyncio.create_task(self._stop.wait())
        closed = asyncio.create_task(self._broker.closed.wait())
        try:
            watched: list[asyncio.Future[Any]] = [stopping, closed, self._slots.failure, *tasks]
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping, closed}:
                task.result()
            if closed in done and not self._stop.is_set():
                raise errors.NotConnected("the connection to NATS is closed for good")
        finally:
            stopping.cancel()
            closed.cancel()

    async def _drain(self, pulling: list[asyncio.Task[None]]) -> None:
        self._draining = True
        with contextlib.suppress(errors.HoldfastError):
            await self._member.heartbeat.move("TERMINATING")
        for task in pulling:
            task.cancel()
        await asyncio.gather(*pulling, return_exceptions=True)
        waiting = list(self._slots.backlog)
        self._slots.backlog.clear()
        for held in waiting:
            self._held.pop(held.message.reply, None)
            await self._executor.give_back(held)
        if self._slots.busy:
            log.info(
                "stopping: %d running, up to %g s for them",
                self._slots.busy,
                self._liveness.grace_seconds,
            )
        if not await self._wait_idle(self._liveness.grace_seconds):
            self._forced = True
            log.warning("grace period over: giving %d runs back", self._slots.busy)
            for held in list(self._held.values()):
                held.interrupt(Interrupt.SHUTDOWN)
            await self._wait_idle(SETTLE_SECONDS)
        log.info("%s stopped after %d runs", self.node, self._executed)

    async def _wait_idle(self, limit: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while self._slots.busy:
                    self._idle = asyncio.Event()
                    await self._idle.wait()
        return not self._slots.busy

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
                self.config.ack_wait_seconds,
                new=bool(event),
                since=self._missed_since(pull),
            )

        def deliver(delivery: Delivery) -> None:
            self._delivered(delivery, job, event)

        pull = Pull(
            self._broker,
            stream,
            name,
            ensure=ensure,
            deliver=deliver,
            want=lambda: self._wanted(pull),
        )
        return pull

    def _missed_since(self, pull: Pull) -> float | None:
        """From when on a subscription that has vanished must be read again; None if it is new.

        What was under way when it vanished is included: what has run is known by its record.
        """
        if pull.known is None:
            return None
        away = self._broker.clock.monotonic() - pull.known
        return self._broker.server_now() - away - UNDER_WAY_SECONDS

    def _wanted(self, pull: Pull) -> int:
        """How many messages one consumer may have under way: idle ones one, busy ones the rest."""
        if self._draining:
            return 0
        slots = self._slots
        taken = slots.busy + len(slots.backlog)
        room = slots.limit + int(self._speed * SPEED_SECONDS) - taken
        if room <= 0:
            return 0
        if not pull.active:
            return 1
        busy = sum(1 for p in self._pulls if p.active)
        return max(1, room // max(1, busy))

    def _delivered(self, delivery: Delivery, job: Job[Any, Any], event: str) -> None:
        held = Held(delivery, job, self._broker.clock.monotonic(), event)
        if self._draining:
            self._give_back_soon(held)
            return
        self._held[delivery.reply] = held
        self._slots.submit(held)

    def _give_back_waiting(self) -> None:
        """What was taken and cannot be started soon, because the slots are full of long runs."""
        backlog, now = self._slots.backlog, self._broker.clock.monotonic()
        while backlog and now - backlog[0].since > WAITING_SECONDS:
            held = backlog.popleft()
            self._held.pop(held.message.reply, None)
            self._give_back_soon(held)

    def _give_back_soon(self, held: Held) -> None:
        task = asyncio.create_task(self._executor.give_back(held))
        self._held[held.message.reply] = held
        task.add_done_callback(lambda _: self._held.pop(held.message.reply, None))

    def _freed(self, held: Held) -> None:
        self._held.pop(held.message.reply, None)
        self._executed += 1
        self._canary.travelled()
        if self._draining:
            if not self._slots.busy and hasattr(self, "_idle"):
                self._idle.set()
            return
        if len(self._slots.backlog) <= self._slots.limit // 2:
            for pull in self._pulls:
                pull.wake_if_low()
        if self.config.max_runs and self._executed >= self.config.max_runs:
            self._stop.set()

    # ---- keeping what is held

    async def _extend(self) -> None:
        """Tell the server every so often that what we hold is in good hands."""
        clock = self._broker.clock
        every = self.config.extend_seconds
        while True:
            await clock.sleep(every / 3)
            if not self._broker.connected or not self._member.heartbeat.trusted:
                continue
            now = clock.monotonic()
            with contextlib.suppress(errors.NotConnected):
                for held in list(self._held.values()):
                    if now - held.extended >= every * 2 / 3 and not held.lost:
                        held.extended = now
                        await held.message.extend()

    async def _verify_claims(self) -> None:
        """The heartbeat had lapsed: what was taken over meanwhile is stopped, in silence."""
        for held in list(self._held.values()):
            if held.claim and not held.lost and not await self._claims.owns(held.claim):
                self.telemetry.fenced.labels("heartbeat").inc()
                held.interrupt(Interrupt.CLAIM_LOST)

    async def _beat(self) -> None:
        """Heartbeat; a node that was declared lost stops like one that was asked to."""
        await self._member.heartbeat.run()
        self.stop()
        await asyncio.Event().wait()

    def _index(self) -> tuple[HeldRun, ...]:
        """What this node holds for longer than a moment, for whoever must give it back."""
        settled = self._broker.clock.monotonic() - INDEX_SECONDS
        return tuple(
            HeldRun(held.run, held.claim.revision, held.message.reply)
            for held in self._held.values()
            if held.claim is not None and not held.lost and held.since < settled
        )

    def _figures(self) -> dict[str, float]:
        return {"executed": self._executed, "speed": round(self._speed, 1)}

    async def _on_cancel(self, message: Received) -> None:
        run = self._broker.names.parse_cancel(message.subject)
        for held in list(self._held.values()):
            if held.run == run and held.claim is not None:
                await self._broker.publish(message.reply, b"cancelling")
                held.interrupt(Interrupt.CANCEL)
                return

    # ---- telling

    async def _measure(self) -> None:
        """Recent speed, for how much to take in advance; and the gauges."""
        last = 0
        while True:
            await self._broker.clock.sleep(0.25)
            speed = (self._executed - last) * 4
            self._speed = speed if speed > self._speed else (self._speed + speed) / 2
            last = self._executed
            self._give_back_waiting()
            self.telemetry.running.set(self._slots.busy)
            self.telemetry.held.set(len(self._slots.backlog))
            self.telemetry.canary.set(self._canary.age)

    def _health(self) -> Health:
        problems = [f"consumer {p.consumer} is silent" for p in self._pulls if not p.healthy]
        if not self._broker.connected:
            problems = ["not connected to NATS"]
        if not self._canary.fresh:
            problems.append(f"no message has travelled for {self._canary.age:.0f} s")
        if self._draining:
            problems.append("stopping")
        return Health(
            ready=not problems,
            problems=problems,
            facts={
                "node": self.node,
                "group": self.config.group,
                "running": self._slots.busy,
                "executed": self._executed,
            },
            metrics=self.telemetry.render,
        )


async def _call_hooks(hooks: list[Hook]) -> None:
    for hook in hooks:
        result = hook()
        if inspect.isawaitable(result):
            await result
