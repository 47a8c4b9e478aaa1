"""A run that has ended is not executed again, even if no worker runs for longer than its guard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.client import Client
from holdfast.server import Server
from tests.faults.app import sender
from tests.faults.conftest import QUICK
from tests.faults.effects import Effects
from tests.faults.processes import Process, WorkerProcess, until
from tests.integration.support import all_records, client_of, queue_empty

GUARD_SECONDS = 8
"""Longer than a death takes to be noticed, and short enough to wait for."""
SHORT = {
    **QUICK,
    "HOLDFAST_RECORD_KEYLESS_TTL_SECONDS": str(GUARD_SECONDS),
    "HOLDFAST_RECORD_DEDUP_WINDOW_SECONDS": "1",
}


async def take_in(client: Client, subject: str) -> dict[str, Any]:
    """Let the history take only a subject; returns its configuration before."""
    stream = client.broker.names.history
    config: dict[str, Any] = (await client.broker.api(f"STREAM.INFO.{stream}"))["config"]
    await client.broker.api(f"STREAM.UPDATE.{stream}", {**config, "subjects": [subject]})
    return config


@pytest.mark.timeout(180)
@pytest.mark.parametrize("late", [False, True], ids=["watched", "coordinator comes later"])
async def test_run_that_ended_before_its_workers_death_is_not_started_again(
    nats: Server, namespace: str, tmp_path: Path, late: bool
) -> None:
    """Killed between settle and line of history; the next worker comes after the guard."""
    effects = Effects(tmp_path / "effects")

    def worker(log: str) -> WorkerProcess:
        return WorkerProcess(nats.url, namespace, effects.root, tmp_path / log, **SHORT)

    def coordinator() -> Process:
        return Process(["coordinator"], nats.url, namespace, tmp_path / "c.log", **SHORT)

    first, watching = worker("1.log"), None if late else coordinator()
    second = None
    try:
        async with sender(nats.url, namespace) as app:
            await first.ready()
            client = await client_of(app)
            subject = (await take_in(client, f"{namespace}.nothing"))["subjects"][0]
            run = await app.jobs["work"].enqueue(key="a", seconds=0.0)

            async def settled() -> bool:
                found = await client.read(run.id)
                return found is not None and found.state == "done"

            await until(settled, what="the settle")
            first.kill_all()
            await take_in(client, subject)
            watching = watching or coordinator()

            async def expired() -> bool:
                return not await all_records(app)

            await until(expired, what="the end of the guard")
            second = worker("2.log")
            await until(lambda: queue_empty(app), what="the message dropped")
            assert (await run.status()).state == "done"
            assert [line.run async for line in client.history.all()] == [run.id]
    finally:
        for process in (first, watching, second):
            if process is not None:
                process.close()
    assert len(effects.starts()) == 1
