"""Runs whose worker died while nobody was there to notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import RunLost
from holdfast.server import Server
from tests.faults.conftest import QUICK
from tests.faults.effects import Effects
from tests.faults.processes import Process, until, worker_fleet
from tests.faults.test_frozen_worker import sender
from tests.faults.test_liveness import _client


@pytest.mark.timeout(120)
async def test_at_most_once_run_is_told_lost_by_a_later_coordinator(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Its worker died unseen and its record has expired: it is lost, not forgotten."""
    effects = Effects(tmp_path / "effects")
    app = sender(nats.url, namespace)
    with worker_fleet(1, nats.url, namespace, tmp_path, **QUICK) as [worker]:
        await worker.ready()
        run = await app.jobs["once"].enqueue(key="a", seconds=60.0)
        await until(lambda: effects.starts(), what="the start")
        worker.kill()
    async with _client(nats.url, namespace) as client:

        async def forgotten() -> bool:
            record = await client.read(run.id)
            assert record is not None
            return await client._alive(record.node) is False

        await until(forgotten, 30, "the worker's record to expire")
    coordinator = Process(["coordinator"], nats.url, namespace, tmp_path / "late.log", **QUICK)
    try:
        with pytest.raises(RunLost):
            await run.result(timeout=60)
    finally:
        coordinator.close()
        await app.close()
    assert len(effects.starts()) == 1
