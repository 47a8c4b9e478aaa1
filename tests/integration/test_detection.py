"""What a coordinator takes for proof, and what not."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.broker import Broker, Bucket, Received
from holdfast.broker.streams import Topology
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.coordinator import Coordinator
from holdfast.errors import Unavailable
from holdfast.model import node as nodes
from holdfast.model.liveness import Liveness
from holdfast.model.node import NodeRecord
from holdfast.server import Server
from tests.support import running, until

PINGS = 12


async def test_connection_that_its_server_never_had_proves_nothing(
    nats: Server, namespace: str
) -> None:
    """A node of another account, slow to answer: its server has no such connection, and never had.
    It is not judged by that."""
    pinged: list[Received] = []

    async def ignore(message: Received) -> None:
        pinged.append(message)

    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with Broker(config) as broker:
        await Topology(broker, RecordConfig()).ensure()
        node = NodeRecord(
            "scheduler-far-1",
            "scheduler",
            state="RUNNING",
            by="scheduler-far-1",
            server=broker.connection_id[0],
            client=1_000_000,
            liveness=Liveness(timeout_seconds=300.0, ping_seconds=0.1),
        )
        bucket = Bucket(broker, broker.names.nodes)
        await broker.subscribe(broker.names.node(node.id, "ping"), ignore)
        await bucket.put(node.id, nodes.encode(node), expected=0)
        coordinator = Coordinator(config)
        async with running(coordinator):
            await until(lambda: len(pinged) >= PINGS, 30, "pings that nobody answers")
            entry = await bucket.get(node.id)
    assert entry is not None
    assert nodes.decode(entry.value).state == "RUNNING"


async def test_repair_that_fails_keeps_no_other_waiting(
    nats: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flows are woken although the runs whose message is gone cannot be looked for."""
    coordinator = Coordinator(ConnectionConfig(nats_url=nats.url, namespace=namespace))
    woken = asyncio.Event()

    async def fail() -> None:
        raise Unavailable("no stream takes this subject right now")

    async def wake() -> None:
        woken.set()

    monkeypatch.setattr(coordinator, "_look_for_stranded", fail)
    monkeypatch.setattr(coordinator, "_wake_flows", wake)

    def judges() -> bool:
        return coordinator.may_judge and coordinator.member.heartbeat.may_judge

    async with running(coordinator, judges):
        coordinator._look_for_orphans = True
        with pytest.raises(Unavailable):
            await coordinator._look_around()
        assert woken.is_set()
