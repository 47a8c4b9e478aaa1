"""What watching costs: 200 nodes on one server."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from holdfast.broker import Broker
from holdfast.broker.streams import Topology
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.ownership.membership import Membership
from holdfast.server import Server
from tests.faults.processes import until
from tests.faults.test_liveness import coordinators

NODES = 200
CONNECTIONS = 10
WATCHED_SECONDS = 10.0


async def test_two_hundred_nodes_cost_little(
    nats: Server, namespace: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """200 nodes: fewer than 100 heartbeat writes a second, none lost; the CPU is reported."""
    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with AsyncExitStack() as stack:
        brokers = [await stack.enter_async_context(Broker(config)) for _ in range(CONNECTIONS)]
        await Topology(brokers[0], RecordConfig()).ensure()
        members = [Membership(brokers[n % CONNECTIONS], "worker") for n in range(NODES)]
        for member in members:
            await member.start()
        beats = [asyncio.create_task(m.heartbeat.run()) for m in members]
        with coordinators(1, nats.url, namespace, tmp_path) as [judge]:
            await until(lambda: "watching" in judge.text(), what="the coordinator")
            await asyncio.sleep(1.0)
            spent, writes = _cpu(judge.pid), sum(m.heartbeat.record.beat for m in members)
            began = time.monotonic()
            await asyncio.sleep(WATCHED_SECONDS)
            took = time.monotonic() - began
            cpu = (_cpu(judge.pid) - spent) / took
            rate = (sum(m.heartbeat.record.beat for m in members) - writes) / took
            lost = judge.text().count("is lost")
        for task in beats:
            task.cancel()
        await asyncio.gather(*beats, return_exceptions=True)
    report(f"{NODES} nodes: {rate:.0f} heartbeats/s, coordinator at {cpu:.1%} of a core")
    assert rate < 100
    assert lost == 0


def _cpu(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
