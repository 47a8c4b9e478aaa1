"""A dead worker is noticed whoever listens, and a live one is never taken for dead."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast.broker import Broker
from holdfast.config import ConnectionConfig
from holdfast.server import Server
from tests.faults.effects import Effects
from tests.faults.processes import WorkerProcess
from tests.faults.test_frozen_worker import sender
from tests.faults.test_liveness import IN_FLIGHT, _ten_in_flight, _watching, coordinators

KILLS = int(os.environ.get("HOLDFAST_TEST_KILLS", "2"))
PATIENT = {
    "HOLDFAST_LIVENESS_TIMEOUT_SECONDS": "300",
    "HOLDFAST_WORKER_ACK_WAIT_SECONDS": "600",
}
"""Neither the timeout nor the server gives anything back while the test waits."""


@asynccontextmanager
async def tapped(url: str) -> AsyncIterator[None]:
    """Somebody listens to every subject."""
    async with Broker(ConnectionConfig(nats_url=url), name="tap") as broker:
        await broker.listen(">", lambda *_: None)
        await broker.flush()
        yield


def _worker(url: str, namespace: str, root: Path) -> WorkerProcess:
    log = root / f"worker-{time.monotonic_ns()}.log"
    return WorkerProcess(url, namespace, root / "effects", log, **PATIENT)


@pytest.mark.timeout(600)
async def test_tap_on_everything_blinds_nobody(
    nats: Server, namespace: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Somebody listens to `>`: a killed worker is noticed, and its pull requests swallow nothing.

    Neither timeout nor `ack_wait` can help here: the server's word on the dead connection, and the
    coordinator that listens to the dead worker's inbox, bring back every run.
    """
    effects = Effects(tmp_path / "effects")
    app = sender(nats.url, namespace)
    gaps: list[float] = []
    async with tapped(nats.url):
        with coordinators(2, nats.url, namespace, tmp_path) as judges:
            await _watching(judges)
            victim = _worker(nats.url, namespace, tmp_path)
            try:
                for kill in range(KILLS):
                    await victim.ready()
                    runs = await _ten_in_flight(app, effects, kill)
                    victim, dead = _worker(nats.url, namespace, tmp_path), victim
                    await victim.ready()
                    await asyncio.sleep(0.5)  # the index has what was taken 0.2 s ago
                    killed = time.time()
                    dead.kill()
                    effects.open(f"gate-{kill}")
                    for run in runs:
                        await run.result(timeout=60)
                    again = [s for s in effects.starts() if s["at"] > killed]
                    assert {start["run"] for start in again} == {run.id for run in runs}
                    gaps += [start["at"] - killed for start in again]
            finally:
                victim.close()
            texts = "".join(judge.text() for judge in judges)
    await app.close()
    report(
        f"{KILLS} kills under a tap, {len(gaps)} runs restarted: "
        f"median {statistics.median(gaps):.2f} s, max {max(gaps):.2f} s after the kill"
    )
    assert texts.count("its server has no connection") == KILLS
    assert len(gaps) == KILLS * IN_FLIGHT
    assert set(effects.starts_per_run().values()) == {2}
