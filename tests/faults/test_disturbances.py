"""No live node is taken for dead, whatever drops connections; and each dead one is noticed.

Three servers, TLS, two coordinators, light nodes with a connection each. Quiet first, then with
somebody who listens to everything and processes that burn all cores. `HOLDFAST_SOAK=1` makes it
200 nodes and more of everything; what is asserted are counts, what is reported are times.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from holdfast.broker import Broker
from holdfast.broker.streams import Topology
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.model import node as nodes
from holdfast.server import Cluster
from tests.faults.processes import ROOT, Process
from tests.faults.scheduling import rounds
from tests.faults.test_liveness import _watching
from tests.integration.test_tls import authority, block
from tests.support import until

NODES = int(os.environ.get("HOLDFAST_TEST_NODES", "0")) or rounds(24, 200)
HOSTS = rounds(1, 4)
"""Processes that have the nodes: one with 200 is busy with itself."""
SETTLE_SECONDS = 3.0
"""For verdicts that are late: longer than any quick way takes."""


class Nodes:
    """Processes full of light nodes."""

    def __init__(self, count: int, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.faults.many_nodes"]
        self._hosts = [
            subprocess.Popen(
                [*command, str(count // HOSTS)],
                env=os.environ | env,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(HOSTS)
        ]
        self._lock = asyncio.Lock()

    async def _line(self, host: subprocess.Popen[str]) -> list[str]:
        assert host.stdout is not None
        return (await asyncio.to_thread(host.stdout.readline)).split()

    async def ready(self) -> None:
        for host in self._hosts:
            assert await self._line(host) == ["ready"]

    async def _ask(self, host: subprocess.Popen[str], line: str) -> list[str]:
        async with self._lock:
            assert host.stdin is not None
            host.stdin.write(line + "\n")
            host.stdin.flush()
            return await self._line(host)

    async def drop(self, count: int = 1) -> None:
        await self._ask(random.choice(self._hosts), f"drop {count}")

    async def drop_all(self) -> None:
        for host in self._hosts:
            await self._ask(host, f"drop {NODES}")

    async def kill(self) -> tuple[str, float]:
        """Kill one; its id, and when that was."""
        _, node, at = await self._ask(random.choice(self._hosts), "kill")
        return node, float(at)

    async def all_connected(self) -> bool:
        for host in self._hosts:
            _, up, _, of = await self._ask(host, "connected")
            if up != of:
                return False
        return True

    def close(self) -> None:
        for host in self._hosts:
            host.kill()
            host.communicate()


class Verdicts:
    """What coordinators have declared, and when it was heard."""

    def __init__(self) -> None:
        self.lost: dict[str, float] = {}
        self.reasons: dict[str, str] = {}

    async def watch(self, broker: Broker) -> None:
        await broker.listen(broker.names.changed(broker.names.nodes, ">"), self._heard)

    def _heard(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        record = nodes.decode(body)
        if record.state == "DISCONNECTED" and record.id not in self.lost:
            self.lost[record.id] = time.monotonic()
            self.reasons[record.id] = record.reason


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Processes that want all the processor they can get."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@asynccontextmanager
async def stage(root: Path, namespace: str) -> AsyncIterator[tuple[Cluster, Broker, Nodes]]:
    """The servers, a connection to look with, and the nodes; coordinators are watching."""
    ca = authority(root / "ca")
    cert, key = ca.issue("server")
    with Cluster(3, root / "store", fast=True, extra_config=block(ca, cert, key)) as cluster:
        url = cluster.url.replace("nats://", "tls://")
        config = ConnectionConfig(nats_url=url, namespace=namespace, tls_ca=ca.file)
        env = {
            "HOLDFAST_NATS_URL": url,
            "HOLDFAST_NAMESPACE": namespace,
            "HOLDFAST_TLS_CA": ca.file,
        }
        async with Broker(config) as broker:
            await Topology(broker, RecordConfig()).ensure()
            judges = [
                Process(["coordinator"], url, namespace, root / f"judge-{n}.log", **env)
                for n in range(2)
            ]
            fleet = Nodes(NODES, env)
            try:
                await fleet.ready()
                await _watching(judges)
                await asyncio.sleep(SETTLE_SECONDS)  # nobody is judged in the first two seconds
                yield cluster, broker, fleet
            finally:
                fleet.close()
                for judge in judges:
                    judge.close()


async def _restart(cluster: Cluster, fleet: Nodes, end: Callable[[int], None]) -> None:
    number = random.randrange(3)
    await asyncio.to_thread(end, number)
    await until(fleet.all_connected, what="everybody on another server")
    await asyncio.to_thread(cluster.restart, number)
    await asyncio.to_thread(cluster.wait_ready, 60)


async def disturb(cluster: Cluster, fleet: Nodes, times: int) -> int:
    """Every disturbance in turn; returns how many there were."""

    def terminate(number: int) -> None:
        cluster.nodes[number].terminate()
        cluster.nodes[number].stop()

    kinds: list[Callable[[], Awaitable[None]]] = [
        fleet.drop,
        lambda: fleet.drop(2),
        fleet.drop_all,
        lambda: _restart(cluster, fleet, terminate),
        lambda: _restart(cluster, fleet, cluster.kill),
    ]
    for kind in kinds * times:
        await kind()
        await until(fleet.all_connected, 90, "every node to be connected again")
    return len(kinds) * times


async def kill_some(fleet: Nodes, verdicts: Verdicts, count: int) -> list[float]:
    """Kill nodes one by one; how long each verdict took."""
    took = []
    for _ in range(count):
        node, at = await fleet.kill()
        await until(lambda n=node: n in verdicts.lost, 60, f"a verdict on {node}")
        took.append(verdicts.lost[node] - at)
        await asyncio.sleep(random.uniform(0.1, 0.5))
    return took


def _shown(times: list[float]) -> str:
    return f"median {statistics.median(times):.2f} s, max {max(times):.2f} s"


@pytest.mark.timeout(3600)
async def test_disturbances_cost_no_live_node(
    tmp_path: Path, namespace: str, report: Callable[[str], None]
) -> None:
    """Dropped connections, restarted and killed servers, a tap, no processor left: 0 live nodes
    are lost, and every dead one is."""
    verdicts, killed = Verdicts(), 0
    async with stage(tmp_path, namespace) as (cluster, broker, fleet):
        await verdicts.watch(broker)
        took = await kill_some(fleet, verdicts, rounds(3, 40))
        killed += len(took)
        done = await disturb(cluster, fleet, rounds(1, 4))
        report(f"{NODES} nodes, quiet: {len(took)} kills, {_shown(took)}; {done} disturbances")
        await broker.listen(">", lambda *_: None)
        with burning(rounds(2, 4)):
            took = await kill_some(fleet, verdicts, rounds(3, 12))
            killed += len(took)
            done = await disturb(cluster, fleet, rounds(0, 3))
            await asyncio.sleep(SETTLE_SECONDS)
        report(f"tap and burners: {len(took)} kills, {_shown(took)}; {done} disturbances")
    report(f"{len(verdicts.lost) - killed} live nodes were lost")
    assert len(verdicts.lost) == killed, verdicts.reasons
