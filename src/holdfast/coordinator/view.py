"""What a coordinator knows of every node: its record, when it was last heard of, what it holds.

Records arrive with each heartbeat on the subject where the server repeats writes, and are listed
again every so often, so that a missed notice costs seconds and not more. A listing that fails
changes nothing: it never means that everybody is dead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.broker import Broker, Bucket, Received
from holdfast.errors import BrokerError
from holdfast.model import node as nodes
from holdfast.model.codec import whole_number
from holdfast.model.node import HeldRun, NodeRecord
from holdfast.model.suspicion import Suspicion
from holdfast.names import kv_key

log = logging.getLogger("holdfast.coordinator")


class Seen:
    """One node as this coordinator sees it."""

    __slots__ = (
        "busy",
        "case",
        "client",
        "first_seen",
        "heard",
        "held",
        "next_look",
        "next_ping",
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
        """When it last gave a sign of life, on this process's monotonic clock."""
        self.busy = False
        self.case = Suspicion()
        """The evidence that it is gone."""
        self.server, self.client = record.server, record.client
        """Its connection, as it last reported it."""
        self.vouched = False
        """Its server has confirmed this connection, so the server may also report it gone."""
        self.vouching = 0
        """How often it was asked for that."""
        self.next_ping = now
        self.next_look = now
        self.version = -1
        self.held: dict[str, HeldRun] = {h.reply: h for h in record.held}

    def wrote(self, record: NodeRecord, revision: int, now: float) -> None:
        """The node, or another coordinator, wrote its record."""
        if revision <= self.revision:
            return
        self.record = record
        self.revision = revision
        if record.by == record.id:
            self.connected(record.server, record.client)
            self.answered(now)
        if record.alive and self.version < 0:
            self.held = {h.reply: h for h in record.held}

    def unread(self, revision: int, now: float) -> None:
        """Its record was written and cannot be read: a verdict has to replace that revision."""
        self.revision = revision
        self.heard = now

    def answered(self, now: float) -> None:
        """A sign of life."""
        self.heard = now
        self.case.alive()

    def connected(self, server: str, client: int) -> None:
        """The node's connection; older versions do not report it."""
        if server and client and (server, client) != (self.server, self.client):
            self.server, self.client = server, client
            self.vouched, self.vouching = False, 0


class View:
    """Every node of the namespace."""

    def __init__(self, broker: Broker, joined: Callable[[Seen], None]) -> None:
        self.nodes: dict[str, Seen] = {}
        self._broker = broker
        self._bucket = Bucket(broker, broker.names.nodes)
        self._joined = joined

    async def open(self) -> None:
        """Listen first, then list: what happens in between is seen twice and not missed."""
        subject = self._broker.names.changed(self._bucket.name, ">")
        await self._broker.subscribe(subject, self._on_change)
        await self.refresh()

    async def refresh(self) -> bool:
        """List all records; False when that failed, and nothing was changed."""
        try:
            found = {e.key: e async for e in self._bucket.entries()}
        except BrokerError as error:
            log.debug("nodes not listed: %s", error)
            return False
        for entry in found.values():
            self._learn(entry.key, entry.value, entry.revision)
        for node in [n for n in self.nodes if n not in found]:
            if not self.nodes[node].record.alive:
                del self.nodes[node]
        return True

    async def _on_change(self, message: Received) -> None:
        key = kv_key(self._bucket.name, message.headers.get("Nats-Subject", ""))
        sequence = whole_number(message.headers.get("Nats-Sequence"))
        if key and sequence and message.body:
            self._learn(key, message.body, sequence)

    def _learn(self, node: str, body: bytes, revision: int) -> None:
        notes = self._broker.unreadable
        record = notes.read(nodes.decode, self._bucket.name, node, body)
        now = self._broker.clock.monotonic()
        known = self.nodes.get(node)
        if record is not None and record.id != node:  # whose it is says the key
            other = nodes.CODEC.unreadable("it says that it is another node")
            notes.note(self._bucket.name, node, other, body)
            record = None
        if record is None:
            if known is not None and revision > known.revision:
                known.unread(revision, now)
            return
        if known is None:
            seen = self.nodes[node] = Seen(record, revision, now)
            self._joined(seen)
        else:
            known.wrote(record, revision, now)

    def start_over(self) -> None:
        """After a break of our own: everybody gets the benefit of the doubt again."""
        now = self._broker.clock.monotonic()
        for seen in self.nodes.values():
            seen.answered(now)
            seen.vouching = 0
