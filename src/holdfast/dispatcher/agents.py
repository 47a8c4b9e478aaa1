"""The agents that a dispatcher knows: their facts, and whether they are there.

Both are kept in memory and follow the buckets: listened to first, listed then, so that nothing is
missed in between; listed again after each reconnect. Who is online is only told; it never decides
whether a command is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from holdfast.broker import Broker, Bucket
from holdfast.broker.wire import parse_headers
from holdfast.errors import BrokerError
from holdfast.model import node as nodes
from holdfast.model.fleet import FACTS
from holdfast.model.node import NodeRecord
from holdfast.model.target import Target
from holdfast.names import kv_key

log = logging.getLogger("holdfast.dispatcher")

IN_A_THREAD: Final = 5_000
"""From so many agents on, matching them must not hold the event loop up."""


READERS: Final = 16
"""Facts that are read at the same time: a fleet that starts publishes all of them at once."""


class AgentIndex:
    """Every agent of the namespace."""

    def __init__(self, broker: Broker, on_node: Callable[[NodeRecord], None]) -> None:
        self.facts: dict[str, dict[str, Any]] = {}
        self._broker = broker
        self._on_node = on_node
        self._heard: dict[str, tuple[float, NodeRecord]] = {}
        """When an agent's heartbeat came, and what it said."""
        self._changed: dict[str, None] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._facts = Bucket(broker, broker.names.facts)
        self._agents = Bucket(broker, broker.names.agents)

    async def open(self) -> None:
        """Listen, then list."""
        names = self._broker.names
        await self._broker.listen(names.changed(names.facts, ">"), self._on_facts)
        await self._broker.listen(names.changed(names.agents, ">"), self._on_agent)
        await self._broker.listen(names.changed(names.nodes, ">"), self._on_record)
        await self.refresh()

    async def refresh(self) -> None:
        """List both buckets; what cannot be listed stays as it was."""
        try:
            async for entry in self._facts.entries():
                self._learn_facts(entry.key, entry.value)
            async for entry in self._agents.entries():
                age = max(0.0, self._broker.server_now() - entry.stored)
                self._learn_agent(entry.key, entry.value, age)
        except BrokerError as error:
            log.warning("agents not listed: %s", error)

    # ---- learning

    def _on_facts(self, _: bytes, __: bytes, body: bytes, headers: bytes | None) -> None:
        """A hint only: facts decide who is sent a command, and a notice can be forged."""
        agent = kv_key(self._facts.name, parse_headers(headers).get("Nats-Subject", ""))
        if agent:
            self._changed[agent] = None
            if len(self._readers) < READERS:
                reader = asyncio.create_task(self._read_changed(), name="holdfast-facts")
                self._readers.add(reader)
                reader.add_done_callback(self._readers.discard)

    async def _read_changed(self) -> None:
        while self._changed:
            agent = next(iter(self._changed))
            del self._changed[agent]
            try:
                entry = await self._facts.get(agent)
            except BrokerError as error:
                log.debug("could not read the facts of %s: %s", agent, error)
                continue  # all are listed after a reconnect
            if entry is None:
                self.facts.pop(agent, None)
                self._heard.pop(agent, None)
            else:
                self._learn_facts(agent, entry.value)

    def _learn_facts(self, agent: str, body: bytes) -> None:
        """Update an agent's facts; when they cannot be read, keep the known ones."""
        notes = self._broker.unreadable
        facts = notes.read(FACTS.decode, self._facts.name, agent, body)
        if facts is not None:
            self.facts[agent] = facts

    def _on_agent(self, _: bytes, __: bytes, body: bytes, headers: bytes | None) -> None:
        agent = kv_key(self._agents.name, parse_headers(headers).get("Nats-Subject", ""))
        if agent and body:
            self._learn_agent(agent, body, 0.0)

    def _learn_agent(self, agent: str, body: bytes, age: float) -> None:
        """Who it is says the key, which permissions guard; the record may say anything."""
        record = self._record(self._agents.name, agent, body)
        if record is not None:
            self._heard[agent] = (self._broker.clock.monotonic() - age, record)

    def _on_record(self, _: bytes, __: bytes, body: bytes, headers: bytes | None) -> None:
        node = kv_key(self._broker.names.nodes, parse_headers(headers).get("Nats-Subject", ""))
        record = self._record(self._broker.names.nodes, node, body) if body else None
        if record is not None:
            self._on_node(record)

    def _record(self, bucket: str, key: str, body: bytes) -> NodeRecord | None:
        return self._broker.unreadable.read(nodes.decode, bucket, key, body)

    # ---- asking

    def online(self, agent: str) -> bool:
        """Whether a heartbeat of it is good now."""
        if agent not in self._heard:
            return False
        heard, record = self._heard[agent]
        return record.online(self._broker.clock.monotonic() - heard)

    def counts(self) -> tuple[int, int]:
        """How many agents there are, and how many of them online."""
        return len(self.facts), sum(self.online(agent) for agent in self.facts)

    async def select(self, target: Target) -> list[str]:
        """The agents that a target means, in order of their ids; a list of ids as it stands."""
        if target.named is not None:
            return list(target.named)
        if len(self.facts) > IN_A_THREAD:
            found = await asyncio.to_thread(target.select, list(self.facts.items()))
        else:
            found = target.select(self.facts)
        return sorted(found)
