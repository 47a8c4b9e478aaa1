"""An outage of NATS is nobody's death."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.server import Server
from tests.faults.app import sender
from tests.faults.conftest import QUICK
from tests.faults.effects import Effects
from tests.faults.processes import until, worker_fleet

OUTAGE_SECONDS = 4.0
"""Longer than the timeout of a node and the `ack_wait` of `QUICK`."""


@pytest.mark.timeout(120)
async def test_outage_longer_than_every_ttl_reruns_nothing(tmp_path: Path, namespace: str) -> None:
    """Runs in flight over an outage longer than heartbeat and ack_wait are finished, not rerun."""
    effects = Effects(tmp_path / "effects")
    with Server(store=tmp_path / "store") as server:
        async with sender(server.url, namespace) as app:
            with worker_fleet(3, server.url, namespace, tmp_path, **QUICK) as fleet:
                for worker in fleet:
                    await worker.ready()
                slow = app.jobs["slow"]
                runs = await slow.enqueue_many(
                    [slow.request(key=str(n), seconds=OUTAGE_SECONDS + 4) for n in range(12)]
                )
                await until(lambda: len(effects.starts()) == 12, what="twelve starts")
                server.kill()
                await asyncio.sleep(OUTAGE_SECONDS)
                await asyncio.to_thread(server.restart)
                for run in runs:
                    await run.result(timeout=40)
                states = [await run.status() for run in runs]
    assert len(effects.starts()) == 12
    assert all(s.crashes == 0 and s.failures == 0 for s in states)
