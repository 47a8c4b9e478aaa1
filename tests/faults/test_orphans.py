"""Runs whose worker died while nobody was there to notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import RunLost
from holdfast.server import Server
from holdfast.status.nodes import Nodes
from tests.faults.app import sender
from tests.faults.conftest import QUICK
from tests.faults.effects import Effects
from tests.faults.processes import Process, until, worker_fleet
from tests.integration.support import client_of


@pytest.mark.timeout(180)
@pytest.mark.parametrize("with_keeper", [False, True], ids=["worker", "worker and keeper"])
async def test_at_most_once_run_is_told_lost_by_a_later_coordinator(
    nats: Server, namespace: str, tmp_path: Path, with_keeper: bool
) -> None:
    """Its worker died while no coordinator ran: it is lost, not forgotten."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        with worker_fleet(1, nats.url, namespace, tmp_path, **QUICK) as [worker]:
            await worker.ready()
            run = await app.jobs["once"].enqueue(key="a", seconds=60.0)
            await until(lambda: effects.starts(), what="the start")
            worker.kill_all() if with_keeper else worker.kill()
        nodes = Nodes(await client_of(app))

        async def gone() -> bool:
            states = {n.pid: n.state for n in await nodes.list(ended=True)}
            # A keeper that was already watching reports the death; without one the record expires.
            return states.get(worker.pid) in (None, "DISCONNECTED")

        await until(gone, what="the worker's record to expire or tell of the death")
        coordinator = Process(["coordinator"], nats.url, namespace, tmp_path / "late.log", **QUICK)
        try:
            with pytest.raises(RunLost):
                await run.result(timeout=60)
        finally:
            coordinator.close()
    assert len(effects.starts()) == 1
