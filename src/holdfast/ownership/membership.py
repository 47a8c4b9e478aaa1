"""A process as a node: registers, sends heartbeats, answers pings, drains, and judges other nodes.

Every role uses it: worker, scheduler, dispatcher, coordinator, agent, web. A node answers pings on
its own subject, so a crash shows at once as "no responders"; the answer includes the index of what
it holds, unless the sender of the ping has it already. Each transition is also written to the
ledger, where the history outlives the node.

Whether another node is alive is read from its record; only the server's expiry and the verdicts of
coordinators decide, no local clock. Without a coordinator, a node that needs to know declares a
lapsed node lost itself, by compare-and-swap, so the rules stay the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from holdfast.broker import Broker, Bucket, Received
from holdfast.errors import BrokerError, Conflict, NodeLost
from holdfast.identity.requests import RequestRefused
from holdfast.model import node as nodes
from holdfast.model.codec import Codec, Count
from holdfast.model.liveness import Liveness
from holdfast.model.node import HeldRun, NodeRecord, Transition
from holdfast.ownership.heartbeat import ENDED_TTL_SECONDS, Heartbeat, new_node_id
from holdfast.rates import Sparse

log = logging.getLogger("holdfast.node")

UNREADABLE_SECONDS: Final = 60.0
"""How long a node with an unreadable record counts as alive: longer than any profile's timeout, so
that a live node has rewritten it by then."""
LONGEST_VERSION: Final = 18
"""Most digits of an index version accepted in a ping."""


class Pong(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node's answer to a ping."""

    beat: Count
    state: str
    version: Count = 0
    """A checksum of the index; equal versions mean equal indexes."""
    held: tuple[HeldRun, ...] | None = None
    server: str = ""
    client: Count = 0
    """The node's connection, as in its record; a ping reports a new one before the next heartbeat
    does."""


PONG: Final = Codec[Pong](Pong, "the answer to a ping")


class Membership:
    """This process as one of the nodes of its namespace."""

    def __init__(
        self,
        broker: Broker,
        role: str,
        *,
        group: str = "",
        liveness: Liveness | None = None,
        node: str = "",
        jobs: tuple[str, ...] = (),
        stop: Callable[[], None] = lambda: None,
        on_gap: Callable[[], Awaitable[None]] | None = None,
        running: Callable[[], int] = lambda: 0,
        runs: Callable[[], tuple[str, ...]] = lambda: (),
        held: Callable[[], tuple[HeldRun, ...]] = lambda: (),
        metrics: Callable[[], dict[str, float]] = dict,
        inbox: str = "",
        on_cut_off: Callable[[], None] | None = None,
    ) -> None:
        self.node = node or new_node_id(role)
        self.nodes = Bucket(broker, broker.names.nodes)
        self._broker = broker
        self._stop = stop
        self._refusals = Sparse(log, broker.clock)
        self._held = held
        self._culprits: dict[str, tuple[str, ...]] = {}
        self.heartbeat = Heartbeat(
            self.nodes,
            NodeRecord(
                self.node,
                role,
                group,
                liveness=(liveness or Liveness()).check(),
                jobs=jobs,
                inbox=inbox,
            ),
            broker.clock,
            now=broker.server_now,
            ledger=self.write_ledger,
            on_gap=on_gap,
            leave=broker.leave,
            running=running,
            runs=runs,
            held=held,
            metrics=metrics,
            connection=lambda: broker.connection_id,
            on_cut_off=on_cut_off,
        )
        self._announcing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answer pings before registering, so that no ping finds "no responders"."""
        if not self.heartbeat.record.liveness.enabled:
            log.warning(
                "liveness.enabled = no: no coordinator notices when this node dies or hangs, and "
                "its runs then wait. For debugging only"
            )
        names, _ = (
            self._broker.names,
            self._broker.guard,
        )  # warns at once if it cannot verify requests
        await self._broker.subscribe(names.node(self.node, "ping"), self._on_ping)
        await self._broker.subscribe(names.node(self.node, "drain"), self._on_drain)
        await self.heartbeat.start()
        self._broker.on_reconnect(self._on_reconnect)

    def _on_reconnect(self) -> None:
        self._announcing = asyncio.create_task(self._announce(), name="holdfast-announce")

    async def _announce(self) -> None:
        """Report the new connection at once: the old one is gone."""
        with contextlib.suppress(BrokerError, NodeLost):  # the next heartbeat retries
            if self.heartbeat.record.alive:
                await self.heartbeat.beat()

    async def write_ledger(self, step: Transition) -> None:
        """Record a transition; a lost entry of the history is not a reason to fail."""
        subject = self._broker.names.log("node", step.node)
        try:
            await self._broker.store(subject, nodes.encode(step))
        except BrokerError as error:
            log.warning("transition of %s to %s not kept: %s", step.node, step.after, error)

    # ---- answering

    async def _on_ping(self, message: Received) -> None:
        if self.heartbeat.deputy is not None and self.heartbeat.deputy.active:
            return  # the deputy answers
        index = self._held()
        version = zlib.crc32(msgspec.json.encode(index))
        told = message.body if len(message.body) <= LONGEST_VERSION else b""
        known = int(told) if told.isdigit() else -1
        record = self.heartbeat.record
        pong = Pong(
            record.beat,
            record.state,
            version,
            index if known != version else None,
            *self._broker.connection_id,
        )
        await self._broker.publish(message.reply, PONG.encode(pong))

    async def _on_drain(self, message: Received) -> None:
        try:
            sender = self._broker.sender(message, self._broker.names.node(self.node, "drain"))
        except RequestRefused as refused:
            self._refusals.warn(refused.reason, "not drained: %s", refused)
            return
        log.info("asked to drain by %s", sender.user or "an operator")
        if message.reply:
            await self._broker.publish(message.reply, b"draining")
        self._stop()

    # ---- other nodes

    async def alive(self, node: str) -> bool:
        """Whether another node still holds what it claimed."""
        if node == self.node:
            return True
        record = await self._read(node)
        if record is not None:
            if record.culprits and not record.alive:
                self._culprits[node] = record.culprits
            return record.alive
        if not self.heartbeat.may_judge or await self._read(self.node) is None:
            return True  # without our own record the bucket is new and lacks everybody's
        await self._declare_lapsed(node)
        return False

    def to_blame(self, node: str, run: str) -> bool:
        """Whether a run may have caused the death of a node that is known to be gone."""
        culprits = self._culprits.get(node)
        return culprits is None or run in culprits

    async def in_grace(self, node: str) -> bool:
        """Whether a lost node may still be finishing its runs."""
        record = await self._read(node)
        if record is None or record.gone:
            return record is None
        return self._broker.server_now() < record.since + record.liveness.grace_seconds

    async def _read(self, node: str) -> NodeRecord | None:
        entry = await self.nodes.get(node)
        if entry is None:
            return None
        record = self.nodes.read(nodes.decode, entry)
        return record if record is not None else self._assumed(node, entry.stored)

    def _assumed(self, node: str, stored: float) -> NodeRecord:
        """Stand-in for an unreadable record: a live node rewrites it soon."""
        recent = self._broker.server_now() - stored < UNREADABLE_SECONDS
        return NodeRecord(node, node.split("-")[0], state="RUNNING" if recent else "NOT_RUNNING")

    async def _declare_lapsed(self, node: str) -> None:
        """Declare a node lost whose key expired and which no coordinator has judged."""
        now = self._broker.server_now()
        record = NodeRecord(
            node,
            node.split("-")[0],
            state="DISCONNECTED",
            reason="its heartbeat had lapsed when its runs were checked",
            since=now,
            by=self.node,
            liveness=self.heartbeat.record.liveness,  # its own are gone; its peers use the same
        )
        try:
            await self.nodes.put(node, nodes.encode(record), expected=0, ttl=ENDED_TTL_SECONDS)
        except Conflict:
            return
        before = msgspec.structs.replace(record, state="RUNNING")
        await self.write_ledger(nodes.transition(before, record))

    # ---- leaving

    async def stop(self, *, forced: bool = False) -> None:
        """Record the node's end."""
        await self.heartbeat.stop(forced=forced)

    def describe(self) -> dict[str, Any]:
        """Facts for health pages."""
        record = self.heartbeat.record
        return {"node": record.id, "state": record.state, "role": record.role}
