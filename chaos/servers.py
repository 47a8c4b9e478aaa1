"""A cluster of NATS servers whose nodes reach each other through links that can be cut.

So a server can be isolated from its peers while its clients still talk to it: they read stale data,
and their writes get no answer. Servers do not advertise their own addresses to clients, so that no
process bypasses its links.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from chaos.links import HOST, Link
from chaos.plan import Fault
from holdfast.server import Cluster, Server

NOWHERE: Final = f"{HOST}:1"
"""Advertised to the other servers, so that they use only the configured routes."""
OPTIONS: Final = f'no_advertise: true, advertise: "{NOWHERE}"'
READY_SECONDS: Final = 60.0


class RoutedCluster(Cluster):
    """A cluster whose routes are links; open them before it starts."""

    def __init__(self, nodes: int = 3, store: Path | None = None, *, fast: bool = False) -> None:
        super().__init__(nodes, store, fast=fast, name="chaos")
        self.routes = {(a, b): Link() for a in range(nodes) for b in range(nodes) if a != b}

    async def open(self) -> None:
        """Open the routes, start every node and wait until they are one cluster."""
        for link in self.routes.values():
            await link.open()
        await asyncio.to_thread(self.start)
        await asyncio.to_thread(self.wait_ready, READY_SECONDS)

    async def shut(self) -> None:
        """Stop every node and close the routes."""
        await asyncio.to_thread(self.close)
        for link in self.routes.values():
            await link.close()

    def wire(self, ports: Sequence[int]) -> None:
        for (_, b), link in self.routes.items():
            link.target = ports[b]
        for a, node in enumerate(self.nodes):
            ways = [f"{HOST}:{link.port}" for (x, _), link in self.routes.items() if x == a]
            node.join(self.name, f"{HOST}:{ports[a]}", ways, OPTIONS)

    def around(self, node: int) -> list[Link]:
        """Every route from and to a node."""
        return [link for pair, link in self.routes.items() if node in pair]


class NodeTarget:
    """One server of a cluster, as a target."""

    role = "nats"
    kinds = ("kill", "stop", "freeze", "isolate")

    def __init__(self, cluster: RoutedCluster, number: int) -> None:
        self.name = f"nats-{number + 1}"
        self._cluster = cluster
        self._number = number

    @property
    def _node(self) -> Server:
        return self._cluster.nodes[self._number]

    async def strike(self, fault: Fault) -> None:
        """Begin a fault."""
        if fault.kind == "kill":
            await asyncio.to_thread(self._node.kill)
        elif fault.kind == "stop":
            await asyncio.to_thread(self._node.stop)
        elif fault.kind == "freeze":
            os.kill(self._node.pid, signal.SIGSTOP)
        else:
            for link in self._cluster.around(self._number):
                link.become("cut")

    async def heal(self, fault: Fault) -> None:
        """End it."""
        if fault.kind in ("kill", "stop"):
            self._node.start()
            await asyncio.to_thread(self._node.wait_ready, READY_SECONDS)
        elif fault.kind == "freeze":
            os.kill(self._node.pid, signal.SIGCONT)
        else:
            for link in self._cluster.around(self._number):
                link.become("open")


class ClusterTarget:
    """All servers at once."""

    role = "cluster"
    kinds = ("outage",)

    def __init__(self, cluster: RoutedCluster) -> None:
        self.name = "nats-all"
        self._cluster = cluster

    async def strike(self, fault: Fault) -> None:
        """Kill every server."""
        await asyncio.gather(*(asyncio.to_thread(n.kill) for n in self._cluster.nodes))

    async def heal(self, fault: Fault) -> None:
        """Start every server and wait for a majority."""
        await asyncio.to_thread(self._cluster.start)
        await asyncio.to_thread(self._cluster.wait_ready, READY_SECONDS)
