"""After any outage every slot since is made up for, or recorded as skipped by its policy."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.errors import BrokerError
from holdfast.server import Cluster, Server
from holdfast.status.schedules import SlotHistory
from tests.faults.processes import until
from tests.faults.scheduling import figures, leader_of, rounds, scheduler_fleet, ticking

AWAY_SECONDS = 10
MISSED: dict[str, Any] = {"HOLDFAST_SCHEDULER_MISSED_AFTER_SECONDS": "4"}
"""Of an outage's slots the older ones are missed, the others only late."""

Report = Callable[[str], None]


@pytest.mark.timeout(400)
async def test_slots_of_an_outage_are_caught_up(
    namespace: str, tmp_path: Path, report: Report
) -> None:
    """NATS killed with -9 for a while: every slot since is fired, once."""
    away = rounds(11, 30)  # every schedule misses a slot: the slowest has one in ten seconds
    with Server(store=tmp_path / "store") as nats:
        async with ticking(nats, namespace) as ticks:
            with scheduler_fleet(2, nats.url, namespace, tmp_path, **MISSED) as fleet:
                await leader_of(fleet)
                await ticks.settle(time.time() + 1)
                nats.kill()
                await asyncio.sleep(away)
                await asyncio.to_thread(nats.restart)
                back = time.time()
                await ticks.settle(back, 60)
                caught_up = time.time() - back
                end = time.time() + 2
                await ticks.settle(end, 30)
                count, late = ticks.check(end)
    report(
        figures(
            f"NATS away for {away} s, all made up {caught_up:.1f} s after it was back", count, late
        )
    )


@pytest.mark.timeout(400)
async def test_policy_decides_about_missed_slots(
    namespace: str, tmp_path: Path, report: Report
) -> None:
    """catch_up="last": one run for the missed slots, the others are recorded as skipped."""
    with Server(store=tmp_path / "store") as nats:
        async with ticking(nats, namespace, fast=5, slow=5, catch_up="last") as ticks:
            with scheduler_fleet(1, nats.url, namespace, tmp_path, **MISSED) as fleet:
                await leader_of(fleet)
                await ticks.settle(time.time() + 1)
            stopped = time.time()
            await asyncio.sleep(AWAY_SECONDS)
            with scheduler_fleet(1, nats.url, namespace, tmp_path / "later", **MISSED) as fleet:
                await leader_of(fleet)
                began = time.time()
                await ticks.settle(began + 2, since=began)
            fired = Counter((name, moment) for name, moment, _ in ticks.fired.slots)
            assert set(fired.values()) == {1}
            config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
            async with Broker(config) as broker:
                history = SlotHistory(Client(broker, RecordConfig()))
                verdicts: Counter[str] = Counter()
                for name, moment in sorted(ticks.expected(stopped + 1, began - 5)):
                    why = await history.why(name, moment)
                    verdicts[why.verdict] += 1
                    assert (why.verdict == "dispatched") == ((name, moment) in fired)
                    assert why.verdict in ("dispatched", "skipped")
    report(f"scheduler away for {AWAY_SECONDS} s, catch_up='last': {dict(verdicts)}")
    assert verdicts["skipped"]


async def _stream_leader(
    cluster: Cluster, namespace: str, gone: Server | None = None
) -> Server | None:
    """The node that leads the slots' stream; None while there is none but the one that is gone."""
    try:
        async with Broker(ConnectionConfig(nats_url=cluster.url, namespace=namespace)) as broker:
            info = await broker.api(f"STREAM.INFO.KV_{namespace}_slots")
    except BrokerError:
        return None
    name = info["cluster"].get("leader")
    found = next((node for node in cluster.nodes if node.name == name), None)
    return None if found is gone else found


@pytest.mark.timeout(400)
async def test_stream_leader_killed_costs_no_slot(
    namespace: str, tmp_path: Path, report: Report
) -> None:
    """Three nodes, the one that leads the slots' stream killed: every slot is fired, once."""
    with Cluster(store=tmp_path / "store") as cluster:
        async with ticking(cluster, namespace) as ticks:
            with scheduler_fleet(2, cluster.url, namespace, tmp_path) as fleet:
                await leader_of(fleet)
                await ticks.settle(time.time() + 1)
                for _ in range(rounds(1, 2)):
                    node = await until(
                        lambda: _stream_leader(cluster, namespace), 60, "a leader of the stream"
                    )
                    node.kill()
                    await until(
                        lambda n=node: _stream_leader(cluster, namespace, n), 60, "another to lead"
                    )
                    await ticks.settle(time.time() + 1)  # the two that are left do fire
                    await asyncio.to_thread(node.restart)
                    await ticks.settle(time.time() + 2)
                end = time.time() + 1
                await ticks.settle(end, 60)
                count, late = ticks.check(end)
    report(figures("R3, leader of the slots' stream killed", count, late))
