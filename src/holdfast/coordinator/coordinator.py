"""A coordinator: detects dead nodes, declares them lost, and gives back what they held.

Any number may run; there is no leader. Each sees every node, pings it on its own subject, and
judges it by the node's own settings. A verdict is one compare-and-swap on the node's last
heartbeat: exactly one coordinator wins, and a live node has renewed its record and wins instead.

There are three detectors. A node's keeper may itself report that the process is gone. A killed
process has lost its connection, which its server knows at once (`detection`). Silence of both pings
and heartbeats for the whole timeout means a process that is frozen or cut off. A single ping
without an answer proves nothing.

A coordinator judges only while it is RUNNING and trusted itself, pauses after its own connection
broke, and never judges itself. A read error changes nothing.

    alive ──► DISCONNECTED ──(grace)──► NOT_RUNNING ──► INACTIVE
    TERMINATING, then silent ─────────► NOT_RUNNING
    TERMINATED_* ─────────────────────► NOT_RUNNING
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from holdfast.broker import Broker
from holdfast.broker.objects import Objects
from holdfast.broker.streams import LIMITS_BUCKETS
from holdfast.broker.upkeep import Upkeep
from holdfast.client import Client
from holdfast.config import ConnectionConfig, CoordinatorConfig, RecordConfig
from holdfast.coordinator.alerting import Alerter
from holdfast.coordinator.detection import Detection
from holdfast.coordinator.indexer import STEP_SECONDS, Indexer
from holdfast.coordinator.recovery import DeadInboxes, Recovery
from holdfast.coordinator.unfiled import LOOK_SECONDS
from holdfast.coordinator.view import NodeView, Seen
from holdfast.durations import text
from holdfast.errors import BrokerError, Conflict, HoldfastError
from holdfast.model import node as nodes
from holdfast.model.lifecycle import NodeState
from holdfast.model.liveness import Liveness
from holdfast.model.node import NodeRecord
from holdfast.ownership.heartbeat import ENDED_TTL_SECONDS
from holdfast.ownership.membership import Membership
from holdfast.retrying import repeating, starting
from holdfast.role import Role
from holdfast.status.alerts import Alerting
from holdfast.status.figures import lags
from holdfast.status.flows import Flows
from holdfast.status.limits import Limits
from holdfast.status.stranded import Stranded, repair_all
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.coordinator")

TICK_SECONDS = 0.05
"""How late a verdict may be: half of the shortest `confirm_seconds` that can be configured."""
AROUND_SECONDS = 10.0
"""How often to look for orphans while there may be some; only an unobserved death leaves any. Some
jitter is added, so that coordinators take turns."""
FRESH_SECONDS = 3.0
"""Unclaimed messages are given back only if their node was heard of this recently: far below any
`ack_wait`, after which the reply subject belongs to another worker's delivery."""
SETTLE_SECONDS = 1.5
"""How long a coordinator judges nobody after its own connection broke: nodes reconnect within a
second, and have been pinged once by then."""
INACTIVE_TTL_SECONDS = 3_600.0
"""How long an ended node is still listed; its history is in the ledger for longer."""
STRANDED_SECONDS = 30.0
"""How often to look for runs whose message is gone: only a manual deletion causes them."""
SHARE = 20
"""After a search, pause for this many times its duration: searches take at most 5 % of the time."""


class Coordinator(Role):
    """Judges nodes until stopped."""

    role = "coordinator"
    member: Membership

    def __init__(
        self,
        connection: ConnectionConfig,
        config: CoordinatorConfig | None = None,
        *,
        records: RecordConfig | None = None,
        liveness: Liveness | None = None,
        telemetry: Telemetry | None = None,
        alerting: Alerting | None = None,
    ) -> None:
        broker = Broker(connection, name="holdfast coordinator")
        super().__init__(broker, telemetry or Telemetry(), config or CoordinatorConfig())
        self.member = Membership(broker, self.role, liveness=liveness, stop=self.stop)
        self.node = self.member.node
        self._client = Client(broker, records or RecordConfig(), self.telemetry)
        self.upkeep = Upkeep(
            self._client.topology, buckets=LIMITS_BUCKETS, on_made=self._made_again
        )
        self._view = NodeView(broker, self._joined)
        self._detection = Detection(broker, self._view)
        self._recovery = Recovery(broker, self.telemetry, records)
        self._inboxes = DeadInboxes(broker)
        self._indexer = Indexer(broker, self.node, lambda: lags(self._client))
        self._alerting = alerting
        self._stranded = Stranded(self._client, self.member.alive)
        self._next_look = 0.0
        self._limits = Limits(self._client)
        self._flows = Flows(self._client)
        self._next_flows = 0.0
        self._settled = 0.0
        self._look_for_orphans = True
        """A node may have died while no coordinator could see it or recover what it held."""
        self._work: set[asyncio.Task[None]] = set()

    # ---- life

    async def prepare(self, ending: contextlib.AsyncExitStack) -> None:
        """See every node before judging any."""
        what = "preparing the store of large values"
        await starting(self._ensure_objects, clock=self.broker.clock, what=what)
        self.broker.on_reconnect(self._start_over)
        ending.push_async_callback(self._inboxes.close)
        ending.push_async_callback(self._limits.gates.close)
        ending.push_async_callback(self._end_work)
        await self._view.open()
        await self._detection.open()
        log.info("%s: watching %d nodes", self.node, len(self._view.nodes) - 1)

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Judge nodes and alerts, follow records, look for orphans, and index the history."""
        around = repeating(
            self._look_around,
            clock=self.broker.clock,
            every=lambda: AROUND_SECONDS + random.uniform(0, 0.1 * AROUND_SECONDS),
            what="looking for orphans",
        )
        index = repeating(
            self._indexer.step,
            clock=self.broker.clock,
            every=STEP_SECONDS,
            what="indexing the history",
        )
        watch, nodes = self._watch(), self._view.run()
        unfiled = repeating(
            self._recovery.unfiled.file,
            clock=self.broker.clock,
            every=LOOK_SECONDS,
            what="completing the history",
        )
        found = {
            "watch": watch,
            "nodes": nodes,
            "around": around,
            "index": index,
            "unfiled": unfiled,
        }
        if self._alerting and self._alerting.rules:
            found["alerts"] = repeating(
                Alerter(self._client, self.node, self._alerting).step,
                clock=self.broker.clock,
                every=self._alerting.config.every_seconds,
                what="judging alerts",
            )
        return found

    async def _end_work(self) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    def _made_again(self, _: str) -> None:
        """A stream was deleted: runs may wait for its messages."""
        self._look_for_orphans = True
        self._next_look = 0.0

    def _start_over(self) -> None:
        self._settled = self.broker.clock.monotonic() + SETTLE_SECONDS
        self._look_for_orphans = True
        self._view.start_over()
        self._detection.start_over()

    async def _look_around(self) -> None:
        """Create missing objects, and find runs that nobody else would ever end."""
        with contextlib.suppress(BrokerError):
            await self._ensure_objects()
        if not (self.may_judge and self.member.heartbeat.may_judge):
            return
        due = self._look_for_orphans or self._recovery.unfinished
        repairs: list[Callable[[], Awaitable[object]]] = []
        if due:
            repairs.append(self._adopt)
        if due or self.broker.clock.monotonic() >= self._next_look:
            repairs.append(self._look_for_stranded)
        if due or self._is_first:
            repairs += [lambda: self._limits.repair(lines=due), self._wake_flows]
        failed: list[HoldfastError] = []
        for repair in repairs:  # what one of them cannot reach keeps nobody else waiting
            try:
                await repair()
            except HoldfastError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    async def _wake_flows(self) -> None:
        """Wake flows that nobody has woken; every record is read, so not too often."""
        clock = self.broker.clock
        if clock.monotonic() >= self._next_flows:
            began = clock.monotonic()
            try:
                await self._flows.repair()
            finally:
                took = clock.monotonic() - began
                self._next_flows = clock.monotonic() + max(STRANDED_SECONDS, SHARE * took)

    async def _ensure_objects(self) -> None:
        """Create the store of large values: workers with a login may not create streams, because
        whoever creates a stream decides where the server republishes its messages."""
        if self.broker.config.credentials_file:
            await Objects(self.broker).ensure()

    async def _adopt(self) -> None:
        """End runs whose node died while no coordinator watched; on failure, try again in the next
        round."""
        self._look_for_orphans = False
        try:
            if count := await self._recovery.orphans(self.member.alive):
                log.info("%d runs were lost with nodes that died unobserved", count)
        except BrokerError:
            self._look_for_orphans = True
            raise

    async def _look_for_stranded(self) -> None:
        """Repair runs whose message is gone."""
        clock = self.broker.clock
        began = clock.monotonic()
        pause = STRANDED_SECONDS * (1 if self._is_first else 3)
        try:
            if done := await repair_all(self._stranded, await self._stranded.look()):
                log.warning("%d runs waited for a message that was gone: repaired", len(done))
        finally:
            took = clock.monotonic() - began
            self._next_look = clock.monotonic() + max(pause, SHARE * took)

    @property
    def _is_first(self) -> bool:
        """Whether this coordinator does the work that one is enough for; the others do it less
        often."""
        alive = [s.record for s in self._view.nodes.values() if s.record.alive]
        return all(r.id >= self.node for r in alive if r.role == "coordinator")

    @property
    def may_judge(self) -> bool:
        """Whether this coordinator is healthy enough to judge others."""
        return (
            self.broker.connected
            and self.member.heartbeat.record.state == "RUNNING"
            and self.member.heartbeat.trusted
            and self.broker.clock.monotonic() >= self._settled
        )

    def trouble(self) -> list[str]:
        """Whether it may judge."""
        if self.broker.connected and not self.may_judge:
            return ["its own heartbeat is not confirmed: it judges nobody"]
        return []

    def describe(self) -> dict[str, Any]:
        """Adds the number of nodes it sees."""
        return {**super().describe(), "nodes": len(self._view.nodes)}

    # ---- watching

    def _joined(self, seen: Seen) -> None:
        seen.next_ping += random.uniform(0, seen.record.liveness.ping_seconds)

    async def _watch(self) -> None:
        while True:
            await self.broker.clock.sleep(TICK_SECONDS)
            if not self.broker.connected:
                continue
            now = self.broker.clock.monotonic()
            self._detection.tick(now, TICK_SECONDS)
            for seen in list(self._view.nodes.values()):
                if seen.record.id != self.node:
                    await self._look_at(seen, now)

    async def _look_at(self, seen: Seen, now: float) -> None:
        record = seen.record
        if not record.alive:
            self._finish(seen)
            return
        if not record.liveness.enabled:
            return
        await self._detection.look_at(seen, now)
        if not seen.record.alive:
            return
        verdict = self._verdict(seen, now)
        if verdict and self.may_judge:
            self._spawn(seen, lambda: self._declare(seen, verdict))

    def _verdict(self, seen: Seen, now: float) -> str:
        """Why a node counts as lost; empty if it does not."""
        liveness = seen.record.liveness
        age = self.broker.server_now() - seen.record.started
        if age < liveness.initial_delay_seconds:
            return ""
        if reason := self._detection.gone(seen, now):
            return reason
        if now - seen.heard > liveness.timeout_seconds:
            return (
                f"no heartbeat and no answer for {text(now - seen.heard)}: frozen, or cut off from "
                "NATS"
            )
        return ""

    def _spawn(self, seen: Seen, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one task per node at a time, without blocking the watch loop."""
        if seen.busy:
            return
        seen.busy = True
        task = asyncio.create_task(work(), name=f"holdfast-judge-{seen.record.id}")
        self._work.add(task)

        def done(ended: asyncio.Task[None]) -> None:
            seen.busy = False
            self._work.discard(ended)
            if not ended.cancelled() and (error := ended.exception()):
                self._look_for_orphans = True
                log.warning("node %s: %s; trying again", seen.record.id, error)

        task.add_done_callback(done)

    # ---- judging

    async def _declare(self, seen: Seen, reason: str) -> None:
        """Declare a node lost; the coordinator that wins the write also gives back what it held."""
        if not seen.record.alive:
            return  # another coordinator was faster
        after: NodeState = "DISCONNECTED" if seen.record.state in JUDGED else "NOT_RUNNING"
        heard = seen.heard
        won = await self._move(seen, after, reason)
        if won is None:
            return
        log.warning("node %s is lost: %s", won.id, reason)
        await self._recover(seen, won, heard)

    async def _recover(self, seen: Seen, won: NodeRecord, heard: float) -> None:
        """Give back what a lost node held; only the winner of the verdict does so."""
        self._detection.judged(seen)
        self.telemetry.lost_nodes.labels(won.role).inc()
        if won.role != "worker":
            self._look_for_orphans = True  # it may have been recovering another node's runs
            return
        grace = won.liveness.grace_seconds if won.state == "DISCONNECTED" else 0.0
        index = list(seen.held.values())
        await self._inboxes.drain(won.inbox)
        count = await self._recovery.recover(won, index, grace)
        took = self.broker.clock.monotonic() - heard
        if took < FRESH_SECONDS:
            count += await self._recovery.give_back_unclaimed(index)
        self.telemetry.recovery_seconds.observe(took)
        count += await self._recovery.sweep(won, {h.run for h in index}, grace)
        log.info("%d runs of %s given back %.2f s after it was last heard of", count, won.id, took)
        await self._limits.repair()

    def _finish(self, seen: Seen) -> None:
        """Move an ended node on to its final states."""
        record = seen.record
        if not self.may_judge or record.state == "INACTIVE":
            return
        if record.by == record.id and record.state in REPORTED:
            self._spawn(seen, lambda: self._take_up(seen))
            return
        if record.state == "DISCONNECTED":
            over = record.since + record.liveness.grace_seconds
            if self.broker.server_now() >= over:
                self._end(seen, "NOT_RUNNING", "its grace period is over")
        elif record.state == "NOT_RUNNING":
            self._end(seen, "INACTIVE")
        else:
            self._end(seen, "NOT_RUNNING")

    async def _take_up(self, seen: Seen) -> None:
        """The node or its keeper reported that its process is gone: recover what it held."""
        heard, reason = seen.heard, seen.record.reason
        taken = msgspec.structs.replace(seen.record, by=self.node, held=())
        try:
            revision = await self._put(taken, seen.revision, ENDED_TTL_SECONDS)
        except (Conflict, BrokerError) as error:
            log.debug("node %s not recovered here: %s", taken.id, error)
            return
        seen.wrote(taken, revision, self.broker.clock.monotonic())
        self.telemetry.transitions.labels(taken.role, taken.state).inc()
        log.warning("node %s is lost: %s", taken.id, reason)
        await self._recover(seen, taken, heard)

    def _end(self, seen: Seen, state: NodeState, reason: str = "") -> None:
        async def move() -> None:
            won = await self._move(seen, state, reason)
            if won is not None and won.role == "worker" and state == "NOT_RUNNING":
                await self._recovery.sweep(
                    won, set(), 0.0
                )  # in case its first recovery was interrupted

        self._spawn(seen, move)

    async def _move(self, seen: Seen, state: NodeState, reason: str) -> NodeRecord | None:
        """One transition by compare-and-swap on what was judged; None if somebody was faster."""
        before, revision = seen.record, seen.revision
        if before.state == state:
            return None
        now = self.broker.server_now()
        after = nodes.move(before, state, by=self.node, at=now, reason=reason)
        after = msgspec.structs.replace(after, held=())
        ttl = INACTIVE_TTL_SECONDS if state == "INACTIVE" else ENDED_TTL_SECONDS
        seen.revision, seen.record = revision, before
        try:
            won = await self._put(after, revision, ttl)
        except (Conflict, BrokerError) as error:
            log.debug("node %s not moved to %s: %s", before.id, state, error)
            return None
        seen.wrote(after, won, self.broker.clock.monotonic())
        self.telemetry.transitions.labels(after.role, state).inc()
        await self.member.write_ledger(nodes.transition(before, after))
        return after

    async def _put(self, record: NodeRecord, revision: int, ttl: float) -> int:
        """Overwrite the judged record, or create it if it has expired since."""
        body = nodes.encode(record)
        try:
            return await self.member.nodes.put(record.id, body, expected=revision, ttl=ttl)
        except Conflict:
            if await self.member.nodes.get(record.id) is not None:
                raise
            return await self.member.nodes.put(record.id, body, expected=0, ttl=ttl)


REPORTED = frozenset({"DISCONNECTED", "NOT_RUNNING"})
"""States that mean, if the node itself reports them, that it ended without giving anything back."""
JUDGED = frozenset({"CREATED", "RUNNING"})
"""States from which a silent node is DISCONNECTED; one that was ending is NOT_RUNNING at once."""
