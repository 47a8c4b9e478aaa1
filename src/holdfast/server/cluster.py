"""Several nats-servers that form one JetStream cluster on loopback.

Ready means: a majority runs, every running node is healthy and follows the same meta leader, and
that leader sees every running node as current. That takes about half a second at the first start,
and about five when the nodes come back to an old store, because they wait out an election.

A node that was killed is not waited for. Streams elect their own leaders: those that a killed node
led accept no writes for 4 to 8 seconds, which `wait_ready` does not wait out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.server.node import ATTEMPTS, MAX_PAYLOAD, READY_SECONDS, Server
from holdfast.server.process import HOST, PortInUse, ServerError, free_ports

_PACE_SECONDS = 0.05
"""Pause between two checks, each of which asks every node twice over HTTP."""


class Cluster:
    """A cluster of embedded nats-servers; three of them keep streams with three replicas."""

    def __init__(
        self,
        nodes: int = 3,
        store: Path | None = None,
        *,
        fast: bool = False,
        name: str = "holdfast",
        ports: Sequence[int] = (),
        monitor_ports: Sequence[int] = (),
        max_payload: int = MAX_PAYLOAD,
        extra_config: str = "",
        includes: Sequence[Path] = (),
    ) -> None:
        """`ports` are the clients' ports, one per node; without them free ones are chosen, and
        likewise for `monitor_ports`.

        A node keeps its data in `store/<its name>`; without a store all of it is temporary.
        """
        for given in (ports, monitor_ports):
            if given and len(given) != nodes:
                raise ServerError(f"{nodes} nodes need {nodes} ports, not {len(given)}")
        clients, monitors = ports or [0] * nodes, monitor_ports or [0] * nodes
        self.name = name
        self._settled = False  # was ready once: from now on the ports are fixed
        self.nodes = [
            Server(
                port,
                store / f"{name}-{number}" if store else None,
                fast=fast,
                name=f"{name}-{number}",
                monitor_port=monitor,
                max_payload=max_payload,
                extra_config=extra_config,
                includes=includes,
            )
            for number, (port, monitor) in enumerate(zip(clients, monitors, strict=True), start=1)
        ]

    @property
    def url(self) -> str:
        """Every node's address, separated by commas."""
        return ",".join(node.url for node in self.nodes)

    @property
    def running(self) -> list[Server]:
        """The nodes that run."""
        return [node for node in self.nodes if node.running]

    def start(self) -> None:
        """Spawn every node and return at once; `wait_ready` reports the result."""
        if not self._settled:
            self.wire(free_ports(len(self.nodes)))
        for node in self.nodes:
            node.start()

    def wire(self, ports: Sequence[int]) -> None:
        """Tell every node where it listens for the others and where it finds them."""
        routes = [f"{HOST}:{port}" for port in ports]
        for node, listen in zip(self.nodes, routes, strict=True):
            node.join(self.name, listen, routes)

    def wait_ready(self, timeout: float = READY_SECONDS) -> None:
        """Return once the running nodes, a majority at least, can serve every request."""
        deadline = time.monotonic() + timeout
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._wait_ready(deadline)
                break
            except PortInUse as lost:
                wanted = any(node.wants(lost.port) for node in self.nodes)
                if wanted or self._settled or attempt == ATTEMPTS:
                    raise
                self.stop()
                self.start()
        self._settled = True

    def stop(self) -> None:
        """Shut every node down in order, all at the same time."""
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            node.stop()

    def kill(self, i: int) -> None:
        """End node `i` as a crash would; returns when it is gone."""
        self.nodes[i].kill()

    def restart(self, i: int) -> None:
        """Bring node `i` back on its ports and store, accepting clients.

        `wait_ready` tells whether it has caught up with the others.
        """
        self.nodes[i].restart()

    def close(self) -> None:
        """Stop, and remove the stores if they are temporary ones of ours."""
        self.stop()
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------ how

    def _wait_ready(self, deadline: float) -> None:
        running = self._majority()
        for node in running:
            node.wait_ready(deadline - time.monotonic())
        while not self._agreed(running):
            if time.monotonic() >= deadline:
                names = ", ".join(node.name for node in running)
                raise ServerError(
                    f"the running nodes ({names}) of the cluster {self.name!r} did not agree on a "
                    "leader in time: see the log_path of each"
                )
            time.sleep(_PACE_SECONDS)

    def _majority(self) -> list[Server]:
        # If a node failed to start, its own wait_ready says why.
        running = [node for node in self.nodes if node.running or node.failed]
        if len(running) <= len(self.nodes) // 2:
            raise ServerError(
                f"only {len(running)} of {len(self.nodes)} nodes of the cluster {self.name!r} run: "
                "a minority cannot elect a leader, so restart the others first"
            )
        return running

    def _agreed(self, running: Sequence[Server]) -> bool:
        try:
            if any(node.monitor("/healthz").get("status") != "ok" for node in running):
                return False
            views = {node.name: node.monitor("/jsz").get("meta_cluster", {}) for node in running}
        except ServerError:
            return False
        leaders = {view.get("leader") for view in views.values()}
        leader = leaders.pop()
        if leaders or leader not in views:
            return False
        return _current(views[leader]) >= set(views) - {leader}


def _current(view: dict[str, Any]) -> set[str]:
    """The peers that the meta leader sees as connected and up to date."""
    peers = view.get("replicas") or []
    return {peer["name"] for peer in peers if peer.get("current") and not peer.get("offline")}
