"""A worker: one process that pulls the runs of its group and executes them.

    connect ──► streams, consumers ──► heartbeat ──► pull ──► (SIGTERM) drain ──► exit

Everything it holds is extended while its heartbeat is trusted, so a long run is never delivered
twice because it is long; when the trust lapses it sends nothing until it has asked the leader which
claims are still its own.

`run` ends normally after a drain, and raises when it cannot go on: a connection closed for good, a
consumer that cannot be brought back. The command line turns that into an exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from holdfast import errors
from holdfast.app import Holdfast, Hook, Job
from holdfast.broker import Broker, Received
from holdfast.broker.grouped import GroupedBucket
from holdfast.broker.pull import IN_PROGRESS, NAK
from holdfast.broker.upkeep import Upkeep
from holdfast.client import Client
from holdfast.config import ConnectionConfig, LivenessConfig, RecordConfig, WorkerConfig, load
from holdfast.errors import NodeLost
from holdfast.health import Health, HealthServer
from holdfast.identity import RequestRefused
from holdfast.identity.sparse import Sparse
from holdfast.keeper.board import Board
from holdfast.model.liveness import Liveness, from_config
from holdfast.model.settings import Settings
from holdfast.names import consumer
from holdfast.ownership.claims import Claims
from holdfast.ownership.heartbeat import ENDED_TTL_SECONDS, new_node_id
from holdfast.ownership.membership import Membership
from holdfast.process import cores
from holdfast.telemetry import Telemetry
from holdfast.worker.calling import Caller
from holdfast.worker.canary import Canary
from holdfast.worker.execution import Executor
from holdfast.worker.held import Interrupt
from holdfast.worker.intake import Intake
from holdfast.worker.keeping import SPARE_PLACES, Keeping, login_of
from holdfast.worker.moved import Moved
from holdfast.worker.outbox import NatsOutbox

log = logging.getLogger("holdfast.worker")

SETTLE_SECONDS = 5.0
GAUGE_SECONDS = 0.5
BACK_SECONDS = 0.2
"""How often a worker that was cut off checks whether NATS is back."""


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
        whole_process: bool = False,
    ) -> None:
        """Health is served on the configuration's port, or on a Unix socket at `health_path`.

        `whole_process`: the process is nothing but this worker, and may be killed when it is
        blocked for too long.
        """
        self.app = app
        self.config = config or WorkerConfig()
        self.jobs = {
            name: job.configured(self.config.restart, self.config.restarts)
            for name, job in app.jobs.items()
            if job.spec.group == self.config.group
        }
        if not self.jobs:
            groups = sorted({j.spec.group for j in app.jobs.values()})
            raise errors.ConfigError(
                f"app {app.name!r} has no job in group {self.config.group!r}: "
                + (f"its groups are {', '.join(groups)}" if groups else "it has no jobs at all")
            )
        self.telemetry = telemetry or Telemetry()
        self._records = records or load(RecordConfig)
        self._liveness = liveness or self._load_liveness()
        self._whole_process = whole_process
        self._health_path = health_path
        self._connection = connection or app.connection_config()
        self._stop = asyncio.Event()
        self._become_a_node()

    def _become_a_node(self) -> None:
        """Begin as a node that nobody knows yet."""
        self.node = new_node_id("worker")
        self._forced = False
        self._board = Board.create(self.config.concurrency + SPARE_PLACES)
        self._broker = Broker(self._connection, name=self.node)
        self._refusals = Sparse(log, self._broker.clock)
        self._cut = asyncio.Event()
        """It could not reach NATS for its timeout, and stops by its settings."""

    def _load_liveness(self) -> Liveness:
        """As configured; the group's profile where none is."""
        config = load(LivenessConfig)
        group = self.app.groups.get(self.config.group)
        if group and group.profile and config.profile == LivenessConfig().profile:
            config = dataclasses.replace(config, profile=group.profile)
        return from_config(config, self.config.grace_seconds)

    @property
    def pulling(self) -> bool:
        """Whether every one of its consumers answers."""
        return hasattr(self, "_intake") and all(pull.healthy for pull in self._intake.pulls)

    def stop(self) -> None:
        """Drain and end `run`: stop pulling, finish within the grace period, give the rest back."""
        self._stop.set()

    # ---- life

    async def run(self) -> None:
        """Work until `stop` is called or the limit of runs is reached.

        A node that has said it is DISCONNECTED never works again, because its runs may run
        elsewhere. The worker does, as a new node, once NATS is back.
        """
        while await self._live_as_a_node():
            log.warning("NATS is back: this worker continues as a new node")
            self._become_a_node()

    async def _live_as_a_node(self) -> bool:
        """Work; True when this node was cut off and another one is to follow."""
        async with self._broker:
            self._assemble()
            await self._client.topology.ensure()
            await self._runs.calibrate()
            self._broker.on_reconnect(self.telemetry.reconnects.inc)
            await self._member.start()
            self._member.heartbeat.deputy = self._keeping
            self._keeping.start()
            try:
                with self.app.bound(self._client):
                    await self._live()
            finally:
                await self._keeping.stop()
                await self._member.stop(forced=self._forced)
            if self._member.heartbeat.lost.is_set():
                raise NodeLost("stopped after this node was declared lost")
            return self._cut.is_set() and not self._stop.is_set()

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
            running=lambda: self._intake.slots.busy,
            held=lambda: self._intake.index(),
            metrics=self._figures,
            inbox=broker.pull_inbox,
            on_cut_off=self._cut.set,
        )
        self._upkeep = Upkeep(self._client.topology, on_made=self._made_again)
        self._runs = GroupedBucket(broker, broker.names.runs)
        self._claims = Claims(
            self._runs,
            self.node,
            broker.clock,
            self.telemetry,
            now=broker.server_now,
            node_alive=self._member.alive,
            in_grace=self._member.in_grace,
            to_blame=self._member.to_blame,
            on_lost=lambda run: self._intake.claim_lost(run),
            trusted=self._is_trusted,
            crash_limit=config.crash_limit,
            keyed_ttl=records.keyed_ttl_seconds,
            keyless_ttl=records.keyless_ttl_seconds,
        )
        self._caller = Caller(
            self.app.middlewares,
            config.threads or cores(),
            self.telemetry,
            config.pool_processes or cores(),
        )
        self._executor = Executor(
            self._claims,
            NatsOutbox(self._client),
            self._caller,
            broker.clock,
            self.telemetry,
            node=self.node,
            now=broker.server_now,
            short_wait=config.short_wait_seconds,
            unknown_seconds=config.unknown_payload_seconds,
            cleanup=config.cleanup_seconds,
            settings=_settings_of(config),
        )
        self._canary = Canary(broker, self._client.topology, config, self.node)
        self._intake = Intake(
            self._client,
            config,
            self.jobs.values(),
            self._executor,
            self._canary,
            self._board,
            app=self.app.name,
            enough=self.stop,
            lanes=self._caller.places(self.jobs.values()),
        )
        self._moved = Moved(self._client, self._intake, self.app.name, self.jobs.values())
        self._claims.company = self._intake.slots
        self._keeping = Keeping(
            broker,
            self._board,
            self.telemetry,
            plan=self._keeper_plan,
            facts=self._keeper_facts,
            culprit=self._intake.executed_by,
            heartbeat_seconds=self._liveness.heartbeat_seconds,
        )

    def _keeper_plan(self) -> dict[str, Any]:
        """What a keeper has to know of this worker."""
        names, heartbeat = self._broker.names, self._member.heartbeat
        config, liveness = self.config, self._liveness
        return {
            "node": self.node,
            "name": f"keeper of {self.node}",
            "record": msgspec.to_builtins(heartbeat.record),
            "revision": heartbeat.revision,
            "acknowledged": heartbeat.acknowledged,
            "steady": heartbeat.steady_since,
            "ahead": self._broker.server_now() - self._broker.clock.monotonic(),
            "heartbeat_seconds": liveness.heartbeat_seconds,
            "timeout_seconds": liveness.timeout_seconds,
            "extend_seconds": config.extend_seconds,
            "blocked_seconds": config.blocked_seconds if liveness.enabled else 0,
            "kill": self._whole_process,
            "request_seconds": self._broker.config.request_timeout_seconds,
            "login": login_of(self._broker.config),
            "inbox": self._broker.new_inbox(),
            "ping_subject": names.node(self.node, "ping"),
            "log_subject": names.log("node", self.node),
            **self._member.nodes.raw(self.node, heartbeat.lasting_seconds, ENDED_TTL_SECONDS),
            "progress": IN_PROGRESS.decode(),
            "nak": NAK.decode(),
            "jobs": [_job_of(job) for job in self.jobs.values()],
        }

    def _keeper_facts(self) -> dict[str, Any]:
        """What is new about this worker, for its record."""
        server, client = self._broker.connection_id
        return {
            "running": self._intake.slots.busy,
            "metrics": self._figures(),
            "server": server,
            "client": client,
        }

    async def _work(self) -> None:
        health = HealthServer(
            self.config.health_host, self.config.health_port, self._health, path=self._health_path
        )
        async with health:
            background = [
                self._spawn(self._beat(), "heartbeat"),
                self._spawn(self._intake.extend(self._is_trusted), "extend"),
                self._spawn(self._intake.measure(), "measure"),
                self._spawn(self._tell(), "gauges"),
                self._spawn(self._canary.run(), "canary"),
                self._spawn(self._upkeep.run(), "upkeep"),
                self._spawn(self._moved.run(), "moved"),
            ]
            pulling = [self._spawn(pull.run(), pull.consumer) for pull in self._intake.pulls]
            self._log_start()
            try:
                await self._until_stopped([*background, *pulling])
                await self._drain(pulling)
                await self._until_back()
            finally:
                for task in (*pulling, *background):
                    task.cancel()
                await asyncio.gather(*pulling, *background, return_exceptions=True)
                await self._intake.slots.close()

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
        cut = asyncio.create_task(self._cut.wait())
        closed = asyncio.create_task(self._broker.closed.wait())
        try:
            watched: list[asyncio.Future[Any]] = [
                stopping,
                cut,
                closed,
                self._intake.slots.failure,
                *tasks,
            ]
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping, cut, closed}:
                task.result()
            if closed in done and not self._stop.is_set():
                raise errors.NotConnected("the connection to NATS is closed for good")
        finally:
            for waiting in (stopping, cut, closed):
                waiting.cancel()

    async def _drain(self, pulling: list[asyncio.Task[None]]) -> None:
        self._intake.draining = True
        with contextlib.suppress(errors.HoldfastError):
            await self._member.heartbeat.move("TERMINATING")
        for task in pulling:
            task.cancel()
        await asyncio.gather(*pulling, return_exceptions=True)
        await self._intake.return_waiting()
        if self._intake.slots.busy:
            log.info(
                "stopping: %d running, up to %g s for them",
                self._intake.slots.busy,
                self._liveness.grace_seconds,
            )
        if not await self._intake.wait_idle(self._liveness.grace_seconds):
            self._forced = True
            log.warning("grace period over: giving %d runs back", self._intake.slots.busy)
            self._intake.interrupt_all()
            await self._intake.wait_idle(SETTLE_SECONDS)
        log.info("%s stopped after %d runs", self.node, self._intake.executed)

    async def _until_back(self) -> None:
        """A worker that was cut off waits for NATS, to give back what it holds."""
        while self._cut.is_set() and not self._broker.connected and not self._stop.is_set():
            await self._broker.clock.sleep(BACK_SECONDS)
        await self._intake.wait_idle(SETTLE_SECONDS)

    # ---- keeping what is held

    async def _verify_claims(self) -> None:
        """The heartbeat had lapsed: what was taken over meanwhile is stopped, in silence."""
        for held in self._intake.held():
            if held.claim and not held.lost and not await self._claims.owns(held.claim):
                self.telemetry.fenced.labels("heartbeat").inc()
                held.interrupt(Interrupt.CLAIM_LOST)

    def _made_again(self, stream: str) -> None:
        """A stream was deleted: if it was that of the records, write ours again."""
        if stream == self._runs.stream:
            self._restoring = self._spawn(self._restore_claims(), "restore")

    async def _restore_claims(self) -> None:
        """Write our claims again: our messages are extended, so nobody else received them."""
        for held in self._intake.held():
            if held.claim and not held.lost and self._is_trusted():
                await self._claims.restore(held.claim)

    async def _beat(self) -> None:
        """Heartbeat; a node that was declared lost stops like one that was asked to."""
        await self._member.heartbeat.run()
        self.stop()
        await asyncio.Event().wait()

    def _figures(self) -> dict[str, float]:
        return {"executed": self._intake.executed, "speed": round(self._intake.speed, 1)}

    async def _on_cancel(self, message: Received) -> None:
        run = self._broker.names.parse_cancel(message.subject)
        if not any(held.run == run for held in self._intake.held()):
            return
        try:
            self._broker.sender(message, self._broker.names.cancel(run))
        except RequestRefused as refused:
            self._refusals.warn(refused.reason, "run %s is not cancelled: %s", run, refused)
            return
        for held in self._intake.held():
            if held.run == run and held.claim is not None:
                await self._broker.publish(message.reply, b"cancelling")
                held.interrupt(Interrupt.CANCEL)
                return

    # ---- telling

    async def _tell(self) -> None:
        while True:
            await self._broker.clock.sleep(GAUGE_SECONDS)
            self.telemetry.running.set(self._intake.slots.busy)
            self.telemetry.held.set(self._intake.slots.waiting)
            self.telemetry.canary.set(self._canary.age)

    def _is_trusted(self) -> bool:
        return self._member.heartbeat.trusted

    def _health(self) -> Health:
        problems = [f"consumer {p.consumer} is silent" for p in self._intake.pulls if not p.healthy]
        if not self._broker.connected:
            problems = ["not connected to NATS"]
        if not self._canary.fresh:
            problems.append(f"no message has travelled for {self._canary.age:.0f} s")
        problems += self._intake.blocked
        problems += self._upkeep.problems
        if self._cut.is_set():
            problems.append("DISCONNECTED: NATS could not be reached for its timeout; it stops")
        if self._intake.draining:
            problems.append("stopping")
        return Health(
            ready=not problems,
            problems=problems,
            facts={
                "node": self.node,
                "state": self._member.heartbeat.record.state,
                "group": self.config.group,
                "running": self._intake.slots.busy,
                "stuck": self._intake.slots.stuck,
                "executed": self._intake.executed,
            },
            metrics=self.telemetry.render,
        )


def _job_of(job: Job[Any, Any]) -> dict[str, Any]:
    """How a keeper finds a job in a stack, and its runs among what is held."""
    spec, code = job.spec, getattr(inspect.unwrap(job.func), "__code__", None)
    return {
        "name": spec.name,
        "file": code.co_filename if code else "",
        "function": code.co_name if code else "",
        "consumers": [consumer(spec.group, spec.name, event) for event in ("", *spec.on)],
    }


def _settings_of(config: WorkerConfig) -> Callable[[], Settings] | None:
    if not config.settings_file:
        return None
    from holdfast.settings.resolving import SettingsFile

    return SettingsFile(Path(config.settings_file))


async def _call_hooks(hooks: list[Hook]) -> None:
    for hook in hooks:
        result = hook()
        if inspect.isawaitable(result):
            await result
