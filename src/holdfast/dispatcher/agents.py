"""The agents that a dispatcher knows: their facts, and whether they are online.

Both are kept in memory and follow their buckets (`broker.mirror`). Facts decide who receives a
command, so they are always read and never taken from a notification, which could be forged. The
online state is only displayed; it never decides whether a command is sent.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from holdfast.broker import Broker, Bucket, Entry
from holdfast.broker.mirror import Mirror
from holdfast.model import node as nodes
from holdfast.model.fleet import FACTS
from holdfast.model.node import NodeRecord
from holdfast.model.target import Target

IN_A_THREAD: Final = 5_000
"""Matching more agents than this would block the event loop."""


class AgentIndex:
    """Every agent of the namespace."""

    def __init__(self, broker: Broker) -> None:
        self.facts: dict[str, dict[str, Any]] = {}
        self._broker = broker
        self._heard: dict[str, tuple[float, NodeRecord]] = {}
        """When an agent's last heartbeat arrived, and its record."""
        self._facts = Bucket(broker, broker.names.facts)
        self._agents = Bucket(broker, broker.names.agents)
        self.mirrors = {
            "facts": Mirror(self._facts, self._learn_facts, self._forget, trusting=False),
            "agents": Mirror(self._agents, self._learn_agent),
        }

    async def open(self) -> None:
        """Load every agent; run the mirrors afterwards."""
        for mirror in self.mirrors.values():
            await mirror.open()

    def _learn_facts(self, entry: Entry) -> None:
        facts = self._facts.read(FACTS.decode, entry)
        if facts is not None:  # otherwise keep the known facts
            self.facts[entry.key] = facts

    def _forget(self, agent: str) -> None:
        self.facts.pop(agent, None)
        self._heard.pop(agent, None)

    def _learn_agent(self, entry: Entry) -> None:
        """Take the id from the key, which permissions protect; the record could claim any id."""
        record = self._agents.read(nodes.decode, entry)
        if record is not None:
            age = max(0.0, self._broker.server_now() - entry.stored)
            self._heard[entry.key] = (self._broker.clock.monotonic() - age, record)

    # ---- queries

    def online(self, agent: str) -> bool:
        """Whether its last heartbeat is recent enough."""
        if agent not in self._heard:
            return False
        heard, record = self._heard[agent]
        return record.online(self._broker.clock.monotonic() - heard)

    def counts(self) -> tuple[int, int]:
        """The number of known agents, and of those online."""
        return len(self.facts), sum(self.online(agent) for agent in self.facts)

    async def select(self, target: Target) -> list[str]:
        """The agents that a target matches, sorted by id; a list of ids is returned as is."""
        if target.named is not None:
            return list(target.named)
        if len(self.facts) > IN_A_THREAD:
            found = await asyncio.to_thread(target.select, list(self.facts.items()))
        else:
            found = target.select(self.facts)
        return sorted(found)
