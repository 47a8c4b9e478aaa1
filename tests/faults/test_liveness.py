"""A process that died is noticed, and its work goes on elsewhere."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, Run
from holdfast.server import Server
from tests.faults.effects import Effects
from tests.faults.processes import Process, WorkerProcess, until
from tests.faults.test_frozen_worker import sender

KILLS = int(os.environ.get("HOLDFAST_TEST_KILLS", "5"))
IN_FLIGHT = 10


@contextmanager
def coordinators(count: int, url: str, namespace: str, root: Path) -> Iterator[list[Process]]:
    """Several coordinators, gone afterwards."""
    found = [
        Process(["coordinator"], url, namespace, root / f"coordinator-{n}.log")
        for n in range(count)
    ]
    try:
        yield found
    finally:
        for process in found:
            process.close()


async def _watching(processes: list[Process]) -> None:
    for process in processes:
        await until(lambda p=process: "watching" in p.text(), what="a coordinator")


@pytest.mark.timeout(300)
async def test_killed_worker_is_recovered_within_seconds(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """kill -9 with 10 runs in flight, again and again: all restarted, higher epoch, effect once."""
    effects = Effects(tmp_path / "effects")
    app = sender(nats.url, namespace)
    gaps: list[float] = []
    with coordinators(2, nats.url, namespace, tmp_path) as judges:
        await _watching(judges)
        victim = _worker(nats.url, namespace, tmp_path)
        try:
            for kill in range(KILLS):
                await victim.ready()
                runs = await _ten_in_flight(app, effects, kill)
                victim, dead = _worker(nats.url, namespace, tmp_path), victim
                await victim.ready()
                killed = time.time()
                dead.kill()
                for run in runs:
                    await run.result(timeout=40)
                again = [s for s in effects.starts() if s["at"] > killed]
                gaps += [start["at"] - killed for start in again]
        finally:
            victim.close()
    await app.close()
    starts = effects.starts_per_run()
    print(
        f"\n{KILLS} kills, {len(gaps)} runs restarted: median {statistics.median(gaps):.2f} s, "
        f"max {max(gaps):.2f} s after the kill"
    )
    assert len(gaps) == KILLS * IN_FLIGHT
    assert len(effects.done()) == KILLS * IN_FLIGHT
    assert all(count <= 2 for count in starts.values())
    _epochs_grow(effects)


def _worker(url: str, namespace: str, root: Path) -> WorkerProcess:
    log = root / f"worker-{time.monotonic_ns()}.log"
    return WorkerProcess(url, namespace, root / "effects", log)


async def _ten_in_flight(app: Holdfast, effects: Effects, kill: int) -> list[Run[Any]]:
    before = len(effects.starts())
    slow = app.jobs["slow"]
    runs = await slow.enqueue_many(
        [slow.request(key=f"{kill}-{n}", seconds=4.0) for n in range(IN_FLIGHT)]
    )
    await until(lambda: len(effects.starts()) == before + IN_FLIGHT, 20, "all in flight")
    return runs


def _epochs_grow(effects: Effects) -> None:
    last: dict[str, int] = {}
    for start in effects.starts():
        assert start["epoch"] > last.get(start["run"], 0)
        last[start["run"]] = start["epoch"]
