"""A node's heartbeat, and the window in which it may trust itself.

The protocol. A node writes its record under its own id with a TTL and renews it by
compare-and-swap; the key vanishes when the node falls silent. `trusted` is true only for less than
that TTL, counted on a monotonic clock from *before* the last acknowledged renewal was sent, so a
slow answer or a frozen process cannot stretch it.

When the key has vanished although the node lives (a long outage, a freeze), the node registers
again and calls `on_gap`, whose business it is to find out which claims were taken meanwhile.

Not guaranteed: that a silent node is dead. That is why claims are fenced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable

import msgspec

from holdfast.clock import Clock
from holdfast.errors import BrokerError, Conflict
from holdfast.model import node as nodes
from holdfast.model.node import NodeRecord
from holdfast.ownership.store import Store
from holdfast.version import __version__

log = logging.getLogger("holdfast.heartbeat")

STEADY = 0.75
"""The part of a TTL without a renewal after which a series of heartbeats counts as broken."""


def new_node_id(role: str) -> str:
    """An id that is never used again."""
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname().split(".")[0])[:20]
    return f"{role}-{host.strip('-') or 'host'}-{os.getpid()}-{secrets.token_hex(3)}"


class Heartbeat:
    """Keeps one node's record alive while `run` runs."""

    def __init__(
        self,
        store: Store,
        record: NodeRecord,
        clock: Clock,
        *,
        on_gap: Callable[[], Awaitable[None]] | None = None,
        running: Callable[[], int] = lambda: 0,
    ) -> None:
        self.record = msgspec.structs.replace(
            record,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            started=record.started or clock.utc(),
        )
        self._store = store
        self._clock = clock
        self._on_gap = on_gap
        self._running = running
        self._revision = 0
        self._acknowledged = -1e9
        self._steady_since = 0.0

    @property
    def trusted(self) -> bool:
        """Nobody can have seen this node as gone yet."""
        return self._clock.monotonic() - self._acknowledged < self.record.ttl_seconds

    @property
    def may_judge(self) -> bool:
        """Whether the absence of another node's key means anything.

        After an outage every key has lapsed, whoever lives. A node that could not renew its own
        waits a whole TTL after it can again, so that the others have had their turn.
        """
        steady = self._acknowledged - self._steady_since
        return self.trusted and steady >= self.record.ttl_seconds

    async def beat(self) -> None:
        """Renew once; registers (again) when the key is not there."""
        record = msgspec.structs.replace(
            self.record, beat=self.record.beat + 1, running=self._running()
        )
        sent = self._clock.monotonic()
        try:
            self._revision = await self._put(record, self._revision)
        except Conflict:
            await self._register_again(record)
        self.record = record
        if sent - self._acknowledged > record.ttl_seconds * STEADY:
            self._steady_since = sent
        self._acknowledged = sent

    async def _register_again(self, record: NodeRecord) -> None:
        entry = await self._store.get(record.id)
        self._revision = await self._put(record, entry.revision if entry else 0)
        if entry is None and record.beat > 1:
            log.warning("this node's heartbeat had lapsed: registered again")
            if self._on_gap:
                await self._on_gap()

    async def _put(self, record: NodeRecord, expected: int) -> int:
        body = nodes.encode(record)
        return await self._store.put(record.id, body, expected=expected, ttl=record.ttl_seconds)

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            try:
                await self.beat()
                delay = self.record.interval_seconds
            except BrokerError as error:
                log.debug("heartbeat not written: %s", error)
                delay = min(0.5, self.record.interval_seconds)
            await self._clock.sleep(delay)

    async def stop(self) -> None:
        """Leave: remove the key, so that nobody waits for it to lapse."""
        try:
            async with asyncio.timeout(2):
                await self._store.delete(self.record.id)
        except (BrokerError, TimeoutError):
            log.debug("heartbeat key not removed: it lapses by itself")
