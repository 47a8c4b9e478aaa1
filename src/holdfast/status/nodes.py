"""Nodes for operators: which are alive, and what happened to the others.

A node's record holds its current state; its history comes from the ledger, which outlives the node.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import msgspec

from holdfast import errors
from holdfast.broker import Bucket, Received
from holdfast.broker.kv import direct_batch
from holdfast.client import Client
from holdfast.model import node as nodes
from holdfast.model.node import NodeRecord, Transition
from holdfast.names import check_name
from holdfast.status.messages import newest

DRAIN_SECONDS = 2.0
"""A live node answers in milliseconds."""
RECENT_MOST = 1_000
"""Most transitions that a page reads: bounds its response time."""


class NodeInfo(msgspec.Struct, frozen=True):
    """A node as shown to operators."""

    id: str
    role: str
    group: str
    state: str
    reason: str
    host: str
    pid: int
    version: str
    started: float
    uptime_seconds: float
    running: int
    settings: str
    jobs: tuple[str, ...]
    metrics: dict[str, float]
    trouble: str = ""
    """What is wrong with a live node, in words."""
    runs: tuple[str, ...] = ()
    """The fan-out runs that a dispatcher owns."""

    @classmethod
    def of(cls, record: NodeRecord, now: float) -> NodeInfo:
        end = now if record.alive else record.since
        return cls(
            record.id,
            record.role,
            record.group,
            record.state,
            (record.trouble if record.alive else "") or record.reason,
            record.host,
            record.pid,
            record.version,
            record.started,
            max(0.0, round(end - record.started, 1)) if record.started else 0.0,
            record.running if record.alive else 0,
            record.liveness.describe(),
            record.jobs,
            record.metrics,
            record.trouble if record.alive else "",
            record.runs if record.alive else (),
        )


class Nodes:
    """Reads and drains the nodes of a namespace."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._broker = client.broker
        self._bucket = Bucket(client.broker, client.broker.names.nodes)

    async def list(
        self, *, role: str = "", group: str = "", state: str = "", ended: bool = False
    ) -> list[NodeInfo]:
        """Nodes by role, group and id; ended ones only on request."""
        now = self._broker.server_now()
        found = [record async for _, record in self._bucket.records(nodes.decode)]
        chosen = [
            NodeInfo.of(record, now)
            for record in found
            if (not role or record.role == role)
            and (not group or record.group == group)
            and (not state or record.state == state.upper())
            and (ended or state or record.state not in ("NOT_RUNNING", "INACTIVE"))
        ]
        return sorted(chosen, key=lambda n: (n.role, n.group, n.id))

    async def show(self, node: str) -> tuple[NodeInfo | None, Sequence[Transition]]:
        """A node and its history, even when only the history is left."""
        check_name(node, "node")
        entry = await self._bucket.get(node)
        now = self._broker.server_now()
        record = self._bucket.read(nodes.decode, entry) if entry else None
        info = NodeInfo.of(record, now) if record else None
        history = await self.history(node)
        if info is None and not history:
            raise errors.NotFound(f"no node {node!r} is known: see 'holdfast nodes list --all'")
        return info, history

    async def history(self, node: str) -> Sequence[Transition]:
        """The transitions of one node, oldest first."""
        names = self._broker.names
        subject = names.log("node", node)
        return [
            step
            async for message in direct_batch(self._broker, names.ledger, subject)
            if (step := self._step(message.headers["Nats-Sequence"], message.body))
        ]

    def _step(self, place: object, body: bytes) -> Transition | None:
        """A transition; None if it cannot be read, which is logged."""
        notes, ledger = self._broker.unreadable, self._broker.names.ledger
        return notes.read(nodes.decode_transition, ledger, str(place), body)

    async def recent(self, most: int = RECENT_MOST) -> Sequence[Transition]:
        """The newest transitions of all nodes, newest first."""
        names = self._broker.names
        found: list[Transition] = []
        async for kept in newest(self._broker, names.ledger, names.log("node", "*")):
            step = self._step(kept.sequence, kept.body)
            found += [step] if step else []
            if len(found) >= most:
                break
        return found

    async def drain(self, node: str) -> None:
        """Ask a node to finish what it runs and end, as SIGTERM would."""
        check_name(node, "node")
        try:
            await self._broker.ask(self._broker.names.node(node, "drain"), timeout=DRAIN_SECONDS)
        except (errors.Unavailable, errors.OutcomeUnknown):
            raise errors.NotFound(
                f"node {node!r} does not answer: it has ended, is cut off, or does not obey this "
                "login (its log says why)"
            ) from None

    async def watch(self) -> AsyncIterator[Transition]:
        """Transitions as they happen, until cancelled."""
        queue: asyncio.Queue[bytes] = asyncio.Queue()

        async def receive(message: Received) -> None:
            queue.put_nowait(message.body)

        subscription = await self._broker.subscribe(self._broker.names.log("node", "*"), receive)
        try:
            while True:
                if step := self._step("live", await queue.get()):
                    yield step
        finally:
            await self._broker.unsubscribe(subscription)


def by_role(nodes: Sequence[NodeInfo]) -> list[tuple[str, Counter[str]]]:
    """How many nodes of each role are in each state, without those that have ended."""
    found: dict[str, Counter[str]] = {}
    for node in nodes:
        if node.state not in ("NOT_RUNNING", "INACTIVE"):
            found.setdefault(node.role, Counter())[node.state] += 1
    return sorted(found.items())
