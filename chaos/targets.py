"""Targets besides processes and servers: the sender's answers, the buckets, a tap on all subjects.

`Sender` drops the answers to the workload's sends: they are stored but the outcome is unknown, so
it sends again. `Records` deletes a bucket and waits until the roles have recreated it; one that
does not come back is a fault that could not be healed. `Tap` subscribes to every subject, which
keeps the pull requests of a killed worker alive on the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from chaos.links import Network
from chaos.plan import Fault
from holdfast.broker import Broker, Received
from holdfast.errors import BrokerError, NotConnected

BACK_SECONDS: Final = 60.0
"""How long a deleted bucket may be missing: roles look often, an election takes nine seconds."""


class Sender:
    """The connections of the workload."""

    name = "sender"
    role = "sender"
    kinds = ("mute",)

    def __init__(self, network: Network) -> None:
        self._network = network

    async def strike(self, _: Fault) -> None:
        """Drop the answers."""
        self._network.become("mute")

    async def heal(self, _: Fault) -> None:
        """Reset the connections; the next ones work."""
        self._network.become("open")


class Records:
    """The buckets that every role shares."""

    name = "records"
    role = "records"
    kinds = ("drop",)

    def __init__(self, connect: Callable[[], Broker]) -> None:
        self._connect = connect

    async def strike(self, fault: Fault) -> None:
        """Delete a bucket."""
        async with self._connect() as broker:
            await broker.api(f"STREAM.DELETE.{_stream(broker, fault)}", {})

    async def heal(self, fault: Fault) -> None:
        """Wait until a role has recreated it."""
        async with asyncio.timeout(BACK_SECONDS), self._connect() as broker:
            while True:
                try:
                    await broker.api(f"STREAM.INFO.{_stream(broker, fault)}", {})
                    return
                except BrokerError:
                    await asyncio.sleep(0.2)


def _stream(broker: Broker, fault: Fault) -> str:
    return f"KV_{getattr(broker.names, fault.what)}"


class Tap:
    """A subscriber to every subject."""

    name = "tap"
    role = "tap"
    kinds = ("tap",)

    def __init__(self, connect: Callable[[], Broker]) -> None:
        self._connect = connect
        self._broker: Broker | None = None

    async def strike(self, fault: Fault) -> None:
        """Subscribe; while all servers are down, do nothing."""
        broker = self._connect()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(fault.seconds):
                while self._broker is None:
                    try:
                        self._broker = await broker.__aenter__()
                    except NotConnected:
                        await asyncio.sleep(0.2)
                await self._broker.subscribe(">", self._heard)

    async def heal(self, _: Fault) -> None:
        """Stop."""
        broker, self._broker = self._broker, None
        if broker:
            await broker.__aexit__(None, None, None)

    async def _heard(self, _: Received) -> None:
        """Ignore the message: the subscription itself is the fault."""
