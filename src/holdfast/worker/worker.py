"""A worker: one process that pulls the runs of its group and executes them.

    Pull ──► Intake ──► Places ──► Executor ──► Claims ──► handler ──► Settler ──► ack

Everything it holds is extended while its heartbeat is trusted, so a long run is not redelivered
because it is long; when the trust lapses it sends nothing until it has asked the leader which
claims are still its own.

A worker is a sequence of nodes (`WorkerNode`). A node that declared itself DISCONNECTED never works
again, because its runs may run elsewhere; the worker does, as a new node, once NATS is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast import errors
from holdfast.app import Holdfast, Hook
from holdfast.broker import Broker, Received
from holdfast.broker.grouped import GroupedBucket
from holdfast.broker.pull import IN_PROGRESS, NAK
from holdfast.broker.upkeep import Upkeep
from holdfast.client import Client
from holdfast.config import ConnectionConfig, LivenessConfig, RecordConfig, WorkerConfig, load
from holdfast.identity.requests import RequestRefused
from holdfast.job import Job
from holdfast.keeper.board import Board
from holdfast.model.liveness import Liveness, from_config
from holdfast.model.node import HeldRun
from holdfast.model.settings import Settings
from holdfast.names import QUEUES, consumer
from holdfast.ownership.claims import Claims
from holdfast.ownership.gates import Gates
from holdfast.ownership.heartbeat import ENDED_TTL_SECONDS, new_node_id
from holdfast.ownership.line import NatsLine
from holdfast.ownership.membership import Membership
from holdfast.ownership.rules import Rules
from holdfast.process import cores
from holdfast.rates import Sparse
from holdfast.resources import Resource
from holdfast.retrying import repeating, starting
from holdfast.role import Role
from holdfast.telemetry import Telemetry
from holdfast.worker.attempt import Caller, Interrupt
from holdfast.worker.counting import Counting
from holdfast.worker.execution import Executor
from holdfast.worker.flows import FlowRunner
from holdfast.worker.intake import Canary, Intake, Moved
from holdfast.worker.keeping import SPARE_PLACES, Keeping, login_of
from holdfast.worker.limiting import Limiter
from holdfast.worker.logs import FLUSH_SECONDS, RunLogs
from holdfast.worker.places import Places
from holdfast.worker.queues import Queues
from holdfast.worker.settling import NatsOutbox
from holdfast.worker.signals import SignalWatch

log = logging.getLogger("holdfast.worker")

SETTLE_SECONDS: Final = 5.0
"""How long settling interrupted runs may take, which is a few writes."""
GAUGE_SECONDS: Final = 0.5
"""How often gauges are set; they are scraped every few seconds."""
RESOURCE_SECONDS: Final = 5.0
"""How often the health of resources is checked: a probe asks about as often."""
BACK_SECONDS: Final = 0.2
"""How often a worker that was cut off checks whether NATS is back: looks at a flag of the
connection."""


class Worker:
    """Executes the jobs of one group of an app until stopped."""

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
        """Health is served on the configured port, or on a Unix socket at `health_path`.

        `whole_process`: the process contains only this worker, and may be killed when it is blocked
        for too long.
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
        self.records = records or load(RecordConfig)
        self.liveness = liveness or self._load_liveness()
        self.connection = connection or app.connection_config()
        self.health_path = health_path
        self.whole_process = whole_process
        self.node = new_node_id("worker")
        self.stopping = asyncio.Event()
        self.current: WorkerNode | None = None
        """The current node, while running."""

    def _load_liveness(self) -> Liveness:
        """As configured; by default the group's profile."""
        config = load(LivenessConfig)
        group = self.app.groups.get(self.config.group)
        if group and group.profile and config.profile == LivenessConfig().profile:
            config = dataclasses.replace(config, profile=group.profile)
        return from_config(config, self.config.grace_seconds)

    @property
    def pulling(self) -> bool:
        """Whether all its consumers answer."""
        return self.current is not None and self.current.pulling

    def stop(self) -> None:
        """Drain and end `run`: stop pulling, finish within the grace period, give the rest back."""
        self.stopping.set()
        if self.current:
            self.current.stop()

    async def run(self) -> None:
        """Work until `stop` is called or the limit of runs is reached."""
        while True:
            node = self.current = WorkerNode(self, self.node)
            if self.stopping.is_set():
                node.stop()
            await node.run()
            if self.stopping.is_set() or not node.cut_off.is_set():
                return
            log.warning("NATS is back: this worker continues as a new node")
            self.node = new_node_id("worker")


class WorkerNode(Role):
    """A worker under one node id."""

    role = "worker"
    member: Membership
    upkeep: Upkeep

    def __init__(self, worker: Worker, node: str) -> None:
        self.app, self.config, self.jobs = worker.app, worker.config, worker.jobs
        self.node = node
        self._broken: list[str] = []
        """The last results of the health checks of its resources."""
        self.cut_off = asyncio.Event()
        """It could not reach NATS for its timeout, and is configured to stop then."""
        self._worker = worker
        self._liveness = worker.liveness
        config, records = worker.config, worker.records
        broker = Broker(worker.connection, name=node)
        super().__init__(broker, worker.telemetry, config, health_path=worker.health_path)
        self._refusals = Sparse(log, broker.clock)
        self._client = Client(broker, records, self.telemetry)
        limited = {one.name: one for job in self.jobs.values() for one in job.spec.limits}
        buckets = ("limits",) if limited else ()
        self.upkeep = Upkeep(self._client.topology, buckets=buckets, on_made=self._made_again)
        self._caller = Caller(
            self.app.middlewares,
            config.threads or cores(),
            self.telemetry,
            config.pool_processes or cores(),
        )
        lanes = self._caller.lanes(self.jobs.values())
        self._places = Places(config.concurrency, lanes, config.low_share)
        self.member = Membership(
            broker,
            self.role,
            group=config.group,
            liveness=self._liveness,
            node=node,
            jobs=tuple(sorted(self.jobs)),
            stop=worker.stop,
            on_gap=self._verify_claims,
            running=self._running,
            held=self._index,
            metrics=self._figures,
            inbox=broker.pull_inbox,
            on_cut_off=self.cut_off.set,
        )
        self._runs = GroupedBucket(broker, broker.names.runs)
        self._claims = Claims(
            self._runs,
            node,
            broker.clock,
            self.telemetry,
            now=broker.server_now,
            node_alive=self.member.alive,
            in_grace=self.member.in_grace,
            to_blame=self.member.to_blame,
            on_lost=self._places.claim_lost,
            trusted=self._is_trusted,
            crash_limit=config.crash_limit,
            keyed_ttl=records.keyed_ttl_seconds,
            keyless_ttl=records.keyless_ttl_seconds,
        )
        self._claims.company = self._places
        self._logs = self._run_logs(config.run_log)
        self._rules = Rules(broker, limited) if limited else None
        self._limiter = self._make_limiter() if limited else None
        outbox = NatsOutbox(self._client)
        self._flows = self._make_flows(outbox) if self._has_flows else None
        executor = Executor(
            self._claims,
            outbox,
            self._caller,
            broker.clock,
            self.telemetry,
            node=node,
            now=broker.server_now,
            short_wait=config.short_wait_seconds,
            unknown_seconds=config.unknown_payload_seconds,
            ack_wait=config.ack_wait_seconds,
            cleanup=config.cleanup_seconds,
            settings=_settings_of(config),
            logs=self._logs,
            limiter=self._limiter,
            flows=self._flows,
        )
        specs = [job.spec for job in self.jobs.values()]
        self._counting = Counting(broker, self.telemetry, node, specs)
        board = Board.create(config.concurrency + SPARE_PLACES)
        self.canary = Canary(self._client, config, node)
        self._intake = Intake(
            self._client,
            config,
            self.jobs.values(),
            self._places,
            executor,
            self.canary,
            board,
            app=self.app.name,
            enough=worker.stop,
        )
        self._queues = Queues(broker, self._intake, config.group, self.jobs)
        self._moved = Moved(self._client, self._intake, self.app.name, self.jobs.values())
        self._keeping = Keeping(
            broker,
            board,
            self.telemetry,
            plan=self._keeper_plan,
            facts=self._keeper_facts,
            culprit=self._places.executed_by,
            heartbeat_seconds=self._liveness.heartbeat_seconds,
        )

    # ---- life

    async def prepare(self, ending: contextlib.AsyncExitStack) -> None:
        """Start the keeper, subscribe to cancellations, call the app's hooks."""
        self.member.heartbeat.deputy = self._keeping
        ending.push_async_callback(self._keeping.stop)
        self._keeping.start()
        if self._rules is not None:
            register = functools.partial(self._register_limits, self._rules)
            await starting(register, clock=self.broker.clock, what="registering limits")
        ending.enter_context(self.app.bound(self._client))
        await self.broker.subscribe(self.broker.names.cancel("*"), self._on_cancel)
        await _call_hooks(self.app.startup_hooks)
        ending.push_async_callback(_call_hooks, self.app.shutdown_hooks)
        if self._logs is not None:
            ending.callback(self._logs.detach)
            ending.push_async_callback(self._logs.flush_all)

        ending.push_async_callback(self._counting.store)
        ending.push_async_callback(self.app.close_resources)
        for resource in self._resources():
            await resource()
        ending.callback(self._caller.close)
        if self._limiter is not None:
            ending.push_async_callback(self._limiter.gates.close)
        ending.push_async_callback(self._places.close)

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Pull messages, and extend those that are held."""
        every = self.config.extend_seconds
        log.info(
            "%s: group %s, jobs %s, up to %d at a time",
            self.node,
            self.config.group,
            ", ".join(sorted(self.jobs)),
            self.config.concurrency,
        )
        return {
            "extend": self._places.extend(self.broker, every, self._is_trusted),
            "adjust": self._intake.adjust(),
            "gauges": self._set_gauges(),
            "canary": self.canary.run(),
            **({"run-logs": self._send_logs(self._logs)} if self._logs else {}),
            **({"counts": self._counting.run()} if self._counting.needed else {}),
            "moved": self._moved.run(),
            "queues": self._queues.run(),
            "resources": self._check_resources(),
            "places": self._until_failed(),
            "cut-off": self._until_cut_off(),
            **({"limits": self._rules.run()} if self._rules else {}),
            **({"signals": self._signals()} if self._has_flows else {}),
            **{pull.consumer: pull.run() for pull in self._intake.pulls},
        }

    def _run_logs(self, level: str) -> RunLogs | None:
        if level == "off":
            return None
        counter = self.telemetry.log_lines
        return RunLogs(level, self.node, self._publish_logs, lambda o, n: counter.labels(o).inc(n))

    async def _publish_logs(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Fire and forget; nothing is kept for a connection that is away."""
        if not self.broker.connected:
            raise errors.NotConnected("log lines are not kept while NATS is away")
        names = self.broker.names
        await self.broker.publish_all([(names.run_log(run), body, {}) for run, body in messages])

    async def _send_logs(self, logs: RunLogs) -> None:
        while True:
            logs.attach()
            await self.broker.clock.sleep(FLUSH_SECONDS)
            await logs.flush_all()

    def _resources(self) -> list[Resource[Any]]:
        """The resources of this worker's handlers, in the order of their definition."""
        used = {id(r) for job in self.jobs.values() for r in job.signature.resources.values()}
        return [r for r in self.app.resources.values() if id(r) in used]

    async def _check_resources(self) -> None:
        async def look() -> None:
            problems = [await resource.problem() for resource in self._resources()]
            self._broken = [problem for problem in problems if problem]

        await repeating(
            look, clock=self.broker.clock, every=RESOURCE_SECONDS, what="checking resources"
        )

    async def _until_failed(self) -> None:
        await self._places.failure

    async def _until_cut_off(self) -> None:
        await self.cut_off.wait()

    async def drain(self) -> None:
        """Stop pulling, finish within the grace period, give the rest back."""
        self._intake.draining = True
        with contextlib.suppress(errors.HoldfastError):
            await self.member.heartbeat.move("TERMINATING")
        await self.cancel("queues", *self.running.keys() & {p.consumer for p in self._intake.pulls})
        await self._intake.return_waiting()
        places, grace = self._places, self._liveness.grace_seconds
        if places.busy:
            log.info("stopping: %d running, up to %g s for them", places.busy, grace)
        if not await places.wait_idle(grace):
            self.forced = True
            log.warning("grace period over: giving %d runs back", places.busy)
            places.interrupt_all()
            await places.wait_idle(SETTLE_SECONDS)
        log.info("%s executed %d runs", self.node, places.executed)
        await self._until_back()

    async def _until_back(self) -> None:
        """After being cut off, wait until NATS is back, so that held runs can be settled."""
        stopping = self._worker.stopping
        while self.cut_off.is_set() and not self.broker.connected and not stopping.is_set():
            await self.broker.clock.sleep(BACK_SECONDS)
        await self._places.wait_idle(SETTLE_SECONDS)

    # ---- claims

    async def _verify_claims(self) -> None:
        """The heartbeat had lapsed: stop what was taken over, without sending anything."""
        for held in list(self._places.held.values()):
            if held.claim and not held.lost and not await self._claims.owns(held.claim):
                self.telemetry.fenced.labels("heartbeat").inc()
                held.interrupt(Interrupt.CLAIM_LOST)

    def _made_again(self, stream: str) -> None:
        """A stream was deleted: if it had our claims or places, write them again."""
        limits = self._rules is not None and stream == self._rules.bucket.stream
        if stream == self._runs.stream or limits:
            self._restoring = asyncio.create_task(
                self._restore_places() if limits else self._restore_claims(),
                name="holdfast-restore",
            )

    async def _restore_claims(self) -> None:
        """Write our claims again: our messages are extended, so nobody else received them."""
        for held in list(self._places.held.values()):
            if held.claim and not held.lost and self._is_trusted():
                await self._claims.restore(held.claim)

    # ---- flows

    @property
    def _has_flows(self) -> bool:
        return any(job.spec.flow for job in self.jobs.values())

    def _signals(self) -> Coroutine[Any, Any, None]:
        """Wake the flows that wait for an event; the workers with flows take turns."""
        return SignalWatch(self._client, self.config.ack_wait_seconds).run()

    def _make_flows(self, outbox: NatsOutbox) -> FlowRunner:
        return FlowRunner(
            self._client.journals,
            self._claims,
            outbox,
            self.broker.clock,
            lambda: self._client,
            node=self.node,
            now=self.broker.server_now,
            kept_seconds=self._worker.records.keyed_ttl_seconds,
        )

    # ---- limits

    def _make_limiter(self) -> Limiter:
        broker = self.broker
        assert self._rules is not None
        gates = Gates(
            self._rules.bucket,
            NatsLine(broker),
            broker.clock,
            now=broker.server_now,
            rules=self._rules,
        )
        return Limiter(gates, self._claims, broker.names, self.telemetry)

    async def _register_limits(self, rules: Rules) -> None:
        """Register the limits of our code."""
        by_limit: dict[str, list[str]] = {}
        for job in self.app.jobs.values():
            for limit in job.spec.limits:
                by_limit.setdefault(limit.name, []).append(job.name)
        for name, jobs in by_limit.items():
            limit = self.app.limits[name]
            await rules.register(limit, self.app.name, self.config.release, tuple(sorted(jobs)))

    async def _restore_places(self) -> None:
        """The gates were deleted: register our limits again, and record the runs that we
        execute."""
        assert self._rules is not None
        assert self._limiter is not None
        self._limiter.gates.forget()
        await self._register_limits(self._rules)
        for held in list(self._places.held.values()):
            if held.claim and not held.lost and self._is_trusted():
                await self._limiter.restore(held)

    async def _on_cancel(self, message: Received) -> None:
        run = self.broker.names.parse_cancel(message.subject)
        found = [held for held in self._places.held.values() if held.run == run]
        if not found:
            return
        try:
            self.broker.sender(message, self.broker.names.cancel(run))
        except RequestRefused as refused:
            self._refusals.warn(refused.reason, "run %s is not cancelled: %s", run, refused)
            return
        for held in found:
            if held.claim is not None:
                await self.broker.publish(message.reply, b"cancelling")
                held.interrupt(Interrupt.CANCEL)
                return

    # ---- for its record and its keeper

    def _is_trusted(self) -> bool:
        return self.member.heartbeat.trusted

    def _running(self) -> int:
        return self._places.busy

    def _index(self) -> tuple[HeldRun, ...]:
        return self._places.index(self.broker.clock.monotonic())

    def _figures(self) -> dict[str, float]:
        return {"executed": self._places.executed, "speed": round(self._places.speed, 1)}

    def _keeper_plan(self) -> dict[str, Any]:
        """The configuration of this worker's keeper."""
        names, heartbeat = self.broker.names, self.member.heartbeat
        config, liveness = self.config, self._liveness
        return {
            "node": self.node,
            "name": f"keeper of {self.node}",
            "record": msgspec.to_builtins(heartbeat.record),
            "revision": heartbeat.revision,
            "acknowledged": heartbeat.acknowledged,
            "steady": heartbeat.steady_since,
            "ahead": self.broker.server_now() - self.broker.clock.monotonic(),
            "heartbeat_seconds": liveness.heartbeat_seconds,
            "timeout_seconds": liveness.timeout_seconds,
            "extend_seconds": config.extend_seconds,
            "blocked_seconds": config.blocked_seconds if liveness.enabled else 0,
            "kill": self._worker.whole_process,
            "request_seconds": self.broker.config.request_timeout_seconds,
            "login": login_of(self.broker.config),
            "inbox": self.broker.new_inbox(),
            "ping_subject": names.node(self.node, "ping"),
            "log_subject": names.log("node", self.node),
            **self.member.nodes.raw(self.node, heartbeat.lasting_seconds, ENDED_TTL_SECONDS),
            "progress": IN_PROGRESS.decode(),
            "nak": NAK.decode(),
            "jobs": [_job_of(job) for job in self.jobs.values()],
        }

    def _keeper_facts(self) -> dict[str, Any]:
        """Current facts about this worker, for its record."""
        server, client = self.broker.connection_id
        return {
            "running": self._places.busy,
            "metrics": self._figures(),
            "server": server,
            "client": client,
        }

    # ---- health

    async def _set_gauges(self) -> None:
        while True:
            await self.broker.clock.sleep(GAUGE_SECONDS)
            self.telemetry.running.set(self._places.busy)
            self.telemetry.held.set(self._places.waiting)
            self.telemetry.canary.set(self.canary.age)

    @property
    def pulling(self) -> bool:
        """Whether all consumers answer."""
        return all(pull.healthy for pull in self._intake.pulls)

    def trouble(self) -> list[str]:
        """What keeps messages from arriving or being executed."""
        found = []
        if self.broker.connected:
            pulls = self._intake.pulls
            found = [f"consumer {p.consumer} is silent" for p in pulls if not p.healthy]
        if not self.canary.fresh:
            found.append(f"no message has travelled for {self.canary.age:.0f} s")
        found += self._intake.blocked
        found += self._broken
        if self.cut_off.is_set():
            found.append("DISCONNECTED: NATS could not be reached for its timeout; it stops")
        return found

    def describe(self) -> dict[str, Any]:
        """Its identity, state and load."""
        return {
            "node": self.node,
            "state": self.member.heartbeat.record.state,
            "group": self.config.group,
            "running": self._places.busy,
            "stuck": self._places.stuck,
            "executed": self._places.executed,
        }


def _job_of(job: Job[Any]) -> dict[str, Any]:
    """How a keeper finds a job in a stack, and its runs among the held messages."""
    spec, code = job.spec, getattr(inspect.unwrap(job.func), "__code__", None)
    return {
        "name": spec.name,
        "file": code.co_filename if code else "",
        "function": code.co_name if code else "",
        "consumers": [
            *(consumer(spec.group, spec.name, event) for event in ("", *spec.on)),
            *(consumer(spec.group, spec.name, queue=queue) for queue in QUEUES),
        ],
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
