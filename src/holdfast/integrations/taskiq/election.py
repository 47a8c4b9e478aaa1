"""`LeaderElection`: one of several processes leads, and knows when it must stop.

Holdfast's election (`ownership.election`) with its own connection, for code that has none. That
module states the guarantees; in short: a leader stops itself before its lease can expire, a process
that is gone is replaced within about half a second, one that leaves hands over within milliseconds,
and no process may assume that it is the *only* one that believes it leads.

    async with LeaderElection("nats://localhost:4222", "reports") as election:
        await election.wait_until_leader()

Several users may share one election (each source of a scheduler does): the last one to shut down
ends it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import Any, Final

from holdfast.broker import Broker, Received
from holdfast.broker.streams import Topology
from holdfast.broker.upkeep import Upkeep
from holdfast.config import RecordConfig
from holdfast.errors import Unavailable
from holdfast.integrations.taskiq.connection import Connected, Servers
from holdfast.names import DEFAULT_NAMESPACE, encode
from holdfast.ownership.election import LeaderElection as Election
from holdfast.ownership.heartbeat import new_node_id
from holdfast.process import handle_signals
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.taskiq")

ROLE_SECONDS: Final = 30.0
"""How long to wait for a role at startup: the lease of a dead process expires sooner."""
LOOK_SECONDS: Final = 0.01
"""Polling interval at startup, where finding the role takes a few round trips."""


class LeaderElection(Connected):
    """A candidate for one role."""

    def __init__(
        self,
        servers: Servers,
        leader_key: str = "taskiq-scheduler",
        *,
        ttl_seconds: float = 5.0,
        renew_seconds: float = 2.0,
        namespace: str = DEFAULT_NAMESPACE,
        handle_sigterm: bool = False,
        **connect_options: Any,
    ) -> None:
        """`leader_key` names the role: candidates with the same key compete.

        `handle_sigterm`: SIGTERM and SIGINT cancel the asyncio task that calls `startup`, so that
        it shuts down cleanly; and a permanently closed connection ends the process.
        """
        self.leader_key = leader_key
        self.node = new_node_id("taskiq")
        self._servers = servers
        self._options = connect_options
        self._namespace = namespace
        self._lease = (ttl_seconds, renew_seconds)
        self._handle_sigterm = handle_sigterm
        self.telemetry = Telemetry()
        self._users = 0
        self._election: Election | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._listeners: list[Callable[[], None]] = []

    # ---- asking

    @property
    def is_leader(self) -> bool:
        """Whether to act now."""
        return self._election is not None and self._election.leader

    @property
    def holder(self) -> str:
        """The node that leads, as last heard; empty if unknown."""
        return self._election.holder if self._election else ""

    @property
    def epoch(self) -> int:
        """The number of the current term while leading; it only grows."""
        return self._election.epoch if self._election else 0

    @property
    def established(self) -> bool:
        """Whether this process is connected, and leads or knows who does."""
        election, broker = self._election, self._broker
        if election is None or broker is None or not broker.connected:
            return False
        return election.leader or (election.established and election.holder != self.node)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call back when the leader changes."""
        self._listeners.append(listener)

    async def wait_until_leader(self) -> None:
        """Return as soon as this process leads."""
        changed = asyncio.Event()
        self.on_change(changed.set)
        try:
            while not self.is_leader:
                changed.clear()
                await changed.wait()
        finally:
            self._listeners.remove(changed.set)

    # ---- life

    async def __aenter__(self) -> LeaderElection:
        await self.startup()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    async def startup(self) -> None:
        """Connect, become a candidate, and return once the role is known."""
        self._users += 1
        if self._users > 1:
            return
        if self._handle_sigterm:
            self._catch_signals()
        broker = await self._open(
            lambda broker: Topology(broker, RecordConfig()).ensure_buckets("leases"),
            self._servers,
            self._options,
            name=self.node,
            namespace=self._namespace,
            check=True,
        )
        try:
            await broker.subscribe(broker.names.node(self.node, "ping"), self._answer)
            self._begin(broker)
            async with asyncio.timeout(ROLE_SECONDS):
                while not self.established:
                    await broker.clock.sleep(LOOK_SECONDS)
        except BaseException:
            await self._end()
            raise

    def _begin(self, broker: Broker) -> None:
        ttl, renew = self._lease
        self._election = Election(
            broker,
            encode(self.leader_key),
            self.node,
            ttl_seconds=ttl,
            renew_seconds=renew,
            telemetry=self.telemetry,
            on_change=self._changed,
        )
        self._tasks = [
            asyncio.create_task(self._election.run(), name="holdfast-taskiq-election"),
            asyncio.create_task(self._watch(broker), name="holdfast-taskiq-connection"),
            asyncio.create_task(self._keep(broker), name="holdfast-taskiq-upkeep"),
        ]

    def _catch_signals(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in one

        def stop() -> None:
            task.cancel()

        handle_signals(stop)

    async def resign(self) -> None:
        """Hand over now and stop being a candidate; the connection stays."""
        if self._election:
            await self._election.resign()

    async def shutdown(self) -> None:
        """Hand over and disconnect, if this was the last user of the election."""
        self._users -= 1
        if self._users == 0:
            await self._end()

    async def _end(self) -> None:
        self._users = 0
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._broker is not None:
            await self._broker.close()

    # ---- callbacks

    def _changed(self) -> None:
        self.telemetry.leading.labels(self.leader_key).set(self.is_leader)
        for listener in list(self._listeners):
            listener()

    async def _answer(self, message: Received) -> None:
        """Answer a candidate's ping: it checks whether the leader's process still exists."""
        if message.reply:
            await self.connection.publish(message.reply, b"{}")

    async def _watch(self, broker: Broker) -> None:
        await broker.closed.wait()
        self.give_up("the connection to NATS is closed for good")

    async def _keep(self, broker: Broker) -> None:
        """Create the bucket again if it is deleted."""
        upkeep = Upkeep(Topology(broker, RecordConfig()), core=False, buckets=["leases"])
        try:
            await upkeep.run()
        except Unavailable as error:
            self.give_up(str(error))

    def give_up(self, why: str) -> None:
        """End this process, if it handles signals: its supervisor starts another."""
        self._changed()
        if self._handle_sigterm:
            log.critical("%s, ending this process", why)
            os.kill(os.getpid(), signal.SIGTERM)
