"""Presence: publishes the agent's record and its facts, and keeps them current.

The record shows that the agent is online, and expires when the agent falls silent. Unlike a worker,
an agent is judged by nobody: after an hour's absence it returns and continues, because nobody else
does its work meanwhile. Only this agent writes these two keys.
"""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from holdfast.agent.facts import LARGEST, HostFacts
from holdfast.broker import Broker, Bucket
from holdfast.broker.kv import ttl_text
from holdfast.config import AgentConfig
from holdfast.errors import BrokerError
from holdfast.model import node as nodes
from holdfast.model.lifecycle import NodeState
from holdfast.model.liveness import Liveness
from holdfast.model.node import NodeRecord
from holdfast.names import H_TTL, kv_subject
from holdfast.retrying import retrying
from holdfast.version import __version__

log = logging.getLogger("holdfast.agent")

ENDED_SECONDS: Final = 3_600.0
"""How long an ended agent is still listed as such, so that operators see that it has not
crashed."""


class Presence:
    """Publishes one agent's record and the facts of its host."""

    def __init__(
        self,
        broker: Broker,
        agent: str,
        config: AgentConfig,
        facts: HostFacts,
        described: Callable[[], dict[str, Any]],
        changed: Callable[[], None],
    ) -> None:
        """`described` gives what else the record says; `changed` is called when other facts were
        published."""
        self._broker = broker
        self._agent = agent
        self._config = config
        self._facts = facts
        self._described = described
        self._changed = changed
        self._started = 0.0
        self._published: dict[str, Any] | None = None
        self.confirmed = -1e9
        """When the last confirmed heartbeat was sent, on the monotonic clock."""

    async def start(self) -> None:
        """Publish both; waits until a dispatcher has created the buckets."""
        self._started = self._broker.server_now()
        await retrying(
            self._publish,
            clock=self._broker.clock,
            what="waiting for a dispatcher to prepare the namespace",
            on=BrokerError,
        )

    async def _publish(self) -> None:
        await self.publish_facts()
        await self.measure_clock()

    async def beat(self, state: NodeState = "RUNNING") -> int:
        """Renew the record; returns its revision."""
        sent = self._broker.clock.monotonic()
        now = self._broker.server_now()
        record = NodeRecord(
            self._agent,
            "agent",
            state=state,
            since=self._started if state == "RUNNING" else now,
            by=self._agent,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            started=self._started,
            liveness=Liveness(
                enabled=False,
                heartbeat_seconds=self._config.heartbeat_seconds,
                timeout_seconds=self._config.timeout_seconds,
            ),
            **self._described(),
        )
        ttl = self._config.timeout_seconds if state == "RUNNING" else ENDED_SECONDS
        subject = kv_subject(self._broker.names.agents, self._agent)
        stored = await self._broker.store(subject, nodes.encode(record), {H_TTL: ttl_text(ttl)})
        self.confirmed = sent
        return stored.seq

    async def measure_clock(self) -> None:
        """Learn the server's time from the timestamp of our own record.

        It decides whether a command has expired. An agent may read no other timestamp; one of an
        older heartbeat, from a lagging replica, is ignored.
        """
        written = await self.beat()
        at = self._broker.clock.monotonic()
        entry = await Bucket(self._broker, self._broker.names.agents).peek(self._agent)
        if entry is not None and entry.revision == written:
            self._broker.time.learn(entry.stored, at, self.measure_clock)

    async def publish_facts(self) -> None:
        """Publish the facts if they have changed."""
        facts = self._facts.items()
        if facts == self._published:
            return
        body = msgspec.json.encode(facts)
        if len(body) > LARGEST:
            log.error("%d bytes of facts are not published: at most %d", len(body), LARGEST)
            return
        await self._broker.store(kv_subject(self._broker.names.facts, self._agent), body)
        self._published = facts
        self._changed()

    async def run(self) -> None:
        """Keep both current until cancelled."""
        clock = self._broker.clock
        read, looked = clock.monotonic(), clock.monotonic()
        while True:
            await clock.sleep(self._pause())
            now = clock.monotonic()
            beat: Callable[[], Awaitable[object]] = self.beat
            if now - read >= self._config.facts_seconds:
                read = now
                self._facts.refresh()
                self._published = None  # publish again, in case their bucket was deleted
                beat = self.measure_clock
            if now - looked >= self._config.facts_file_seconds:
                looked = now
                self._facts.look_at_file()
            try:
                await beat()
                await self.publish_facts()
            except BrokerError as error:
                log.debug("heartbeat not written: %s", error)

    def _pause(self) -> float:
        step = min(self._config.heartbeat_seconds, self._config.facts_file_seconds)
        return step * random.uniform(0.8, 1.0)
