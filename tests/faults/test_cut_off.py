"""A worker that cannot reach NATS for its timeout says so, and stops by its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.server import Server
from holdfast.status.nodes import Nodes
from tests.faults.app import sender
from tests.faults.conftest import QUICK
from tests.faults.effects import Effects
from tests.faults.processes import until, worker_fleet
from tests.faults.proxy import Proxy

SOON = {**QUICK, "HOLDFAST_LIVENESS_GRACE_SECONDS": "1"}


@pytest.mark.timeout(180)
async def test_worker_that_is_cut_off_stops_itself(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """It says DISCONNECTED, gives its handlers the grace period and no more, gives back what it
    held when NATS is there, without a crash counted, and its process continues as another node."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        async with Proxy(nats.port) as proxy:
            with worker_fleet(1, proxy.url, namespace, tmp_path, **SOON) as [worker]:
                await worker.ready()
                run = await app.jobs["held"].enqueue(key="a", gate="gate")
                await until(lambda: effects.starts(), what="the start")
                proxy.down()
                await until(
                    lambda: "this node is DISCONNECTED" in worker.text(), 60, "its own word"
                )
                await until(
                    lambda: "giving 1 runs back" in worker.text(), 60, "the end of its grace"
                )
                assert worker.running
                await proxy.up()
                await until(lambda: len(effects.starts()) == 2, 60, "the next start")
                effects.open("gate")
                await run.result(timeout=40)
                status = await run.status()
                text = worker.text()
        first, second = (start["node"] for start in effects.starts())
        async with Broker(ConnectionConfig(nats_url=nats.url, namespace=namespace)) as broker:
            history = await Nodes(Client(broker, RecordConfig())).history(first)
    assert first != second
    assert "continues as a new node" in text
    assert (status.crashes, status.failures) == (0, 0)
    assert [step.after for step in history] == [
        "CREATED",
        "RUNNING",
        "DISCONNECTED",
        "TERMINATING",
        "TERMINATED_FORCED",
    ]


@pytest.mark.timeout(180)
async def test_worker_that_is_to_wait_goes_on(nats: Server, namespace: str, tmp_path: Path) -> None:
    """`liveness.cut_off = wait`: its handler outlives the cut, and its result counts."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        patient = {**SOON, "HOLDFAST_LIVENESS_CUT_OFF": "wait"}
        async with Proxy(nats.port) as proxy:
            with worker_fleet(1, proxy.url, namespace, tmp_path, **patient) as [worker]:
                await worker.ready()
                run = await app.jobs["held"].enqueue(key="a", gate="gate")
                await until(lambda: effects.starts(), what="the start")
                proxy.down()
                await until(
                    lambda: "NATS could not be reached" in worker.text(), 60, "its complaint"
                )
                await proxy.up()
                await until(lambda: "connected to NATS again" in worker.text(), 60, "its return")
                effects.open("gate")
                await run.result(timeout=40)
                text = worker.text()
    assert len(effects.starts()) == 1
    assert "DISCONNECTED" not in text
