"""What a coordinator knows of every node: its record, when it was last heard of, what it holds.

The view follows the nodes' bucket (`broker.mirror`). A failed read changes nothing: it never means
that everybody is dead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from holdfast.broker import Broker, Bucket, Entry
from holdfast.broker.mirror import Mirror
from holdfast.model import node as nodes
from holdfast.model.node import HeldRun, NodeRecord
from holdfast.model.suspicion import Suspicion


class Seen:
    """One node as this coordinator sees it."""

    __slots__ = (
        "busy",
        "case",
        "client",
        "dropped",
        "first_seen",
        "heard",
        "held",
        "next_look",
        "next_ping",
        "proved",
        "record",
        "revision",
        "server",
        "version",
        "vouched",
        "vouching",
    )

    def __init__(self, record: NodeRecord, revision: int, now: float) -> None:
        self.record = record
        self.revision = revision
        self.first_seen = now
        self.heard = now
        """Its last sign of life, on this process's monotonic clock."""
        self.proved = float("-inf")
        """When the newest ping that it answered was sent."""
        self.dropped = float("-inf")
        """When it was last known to be without its connection, or came back with another."""
        self.busy = False
        self.case = Suspicion()
        """The evidence that it is gone."""
        self.server, self.client = record.server, record.client
        """Its connection, as last reported."""
        self.vouched = False
        """Its server has confirmed this connection, and so may also report it gone."""
        self.vouching = 0
        """How often the server was asked to confirm it."""
        self.next_ping = now
        self.next_look = now
        self.version = -1
        self.held: dict[str, HeldRun] = {h.reply: h for h in record.held}

    def wrote(self, record: NodeRecord, revision: int, now: float) -> None:
        """The node or another coordinator wrote its record."""
        if revision <= self.revision:
            return
        self.record = record
        self.revision = revision
        if record.by == record.id:
            self.connected(record.server, record.client, now)
            self.answered(now)
        if record.alive and self.version < 0:
            self.held = {h.reply: h for h in record.held}

    def unread(self, revision: int, now: float) -> None:
        """Its record was written but is unreadable; a verdict has to replace that revision."""
        if revision > self.revision:
            self.revision = revision
            self.heard = now

    def answered(self, now: float) -> None:
        """Note a sign of life."""
        self.heard = now
        self.case.alive()

    def connected(self, server: str, client: int, now: float) -> None:
        """Note the node's connection; older versions do not report it."""
        if server and client and (server, client) != (self.server, self.client):
            if self.client:
                self.dropped = now
            self.server, self.client = server, client
            self.vouched, self.vouching = False, 0


class NodeView(Mirror):
    """Every node of the namespace, kept current while `run` runs."""

    def __init__(self, broker: Broker, joined: Callable[[Seen], None]) -> None:
        bucket = Bucket(broker, broker.names.nodes)
        super().__init__(bucket, self._learn, self._forget, on_deleted=self._forget_ended)
        self.nodes: dict[str, Seen] = {}
        self._joined = joined

    def _learn(self, entry: Entry) -> None:
        record = self._bucket.read(functools.partial(nodes.decode_at, entry.key), entry)
        now = self._broker.clock.monotonic()
        known = self.nodes.get(entry.key)
        if record is None:
            if known is not None:
                known.unread(entry.revision, now)
        elif known is None:
            seen = self.nodes[entry.key] = Seen(record, entry.revision, now)
            self._joined(seen)
        else:
            known.wrote(record, entry.revision, now)

    def _forget(self, node: str) -> None:
        """Forget an ended node. A live node's record may have expired in an outage of NATS: its
        silence decides."""
        if node in self.nodes and not self.nodes[node].record.alive:
            del self.nodes[node]

    async def _forget_ended(self) -> None:
        for node in list(self.nodes):
            self._forget(node)

    def start_over(self) -> None:
        """Our own connection broke: count every node as heard of now."""
        now = self._broker.clock.monotonic()
        for seen in self.nodes.values():
            seen.answered(now)
            seen.vouching = 0
