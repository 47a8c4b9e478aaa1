"""A backup that is taken while runs are sent, fail and wait for their retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from holdfast import Backoff, Context, Holdfast
from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.model import run as runs
from holdfast.model.run import RunRecord
from holdfast.server import Server
from holdfast.status.messages import oldest
from tests.integration.command import Command
from tests.support import until

APP = """
from holdfast import Backoff, Context, Holdfast

app = Holdfast("loaded")


@app.job(retry=Backoff.list(["200ms", "500ms", "1s"]))
async def flaky(n: int, ctx: Context) -> None:
    if ctx.attempt <= n % 4:
        raise ValueError("again")


@app.job(retry=Backoff.list(["200ms"]))
async def doomed(n: int) -> None:
    raise ValueError("never")
"""
PARKED = {"HOLDFAST_WORKER_SHORT_WAIT_SECONDS": "0.01"}
"""Every retry is parked, so that messages and records change places all the time."""
BATCH, PACE_SECONDS, BEFORE = 20, 0.1, 400


def sender() -> Holdfast:
    app = Holdfast("loaded")

    @app.job(retry=Backoff.never())
    async def flaky(ctx: Context, n: int) -> None: ...

    @app.job(retry=Backoff.never())
    async def doomed(n: int) -> None: ...

    return app


async def send(client: Client, accepted: list[str], stop: asyncio.Event) -> None:
    jobs = sender().jobs
    while not stop.is_set():
        numbers = range(len(accepted), len(accepted) + BATCH)
        requests = [jobs["doomed" if n % 8 == 7 else "flaky"].options().request(n) for n in numbers]
        accepted += [one.run for one in await client.enqueue_many(requests)]
        await asyncio.sleep(PACE_SECONDS)


async def records(client: Client) -> dict[str, RunRecord]:
    return {entry.key: record async for entry, record in client.runs.records(runs.decode)}


@pytest.mark.timeout(240)
async def test_backup_under_load_loses_no_run(
    tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Every run that was accepted before the backup began ends after its restore on another server,
    and every dead one has its letter."""
    (tmp_path / "loaded.py").write_text(APP)
    accepted: list[str] = []
    async with AsyncExitStack() as stack:

        def start(server: Server, *words: str) -> Command:
            env = {"HOLDFAST_NATS_URL": server.url, **PARKED}
            command = Command(*words, folder=tmp_path, cwd=tmp_path, env=env)
            return stack.enter_context(command)

        with Server(fast=True) as old:
            roles = [start(old, "worker", "loaded:app"), start(old, "control")]
            async with Broker(ConnectionConfig(nats_url=old.url)) as broker:
                client, stop = Client(broker, RecordConfig()), asyncio.Event()
                await client.topology.ensure()
                sending = asyncio.create_task(send(client, accepted, stop))
                await until(lambda: len(accepted) >= BEFORE, what="some runs")
                before = list(accepted)
                saved = start(old, "backup", "saved")
                assert await saved.ended(60) == 0, saved.text
                stop.set()
                await sending
            for role in roles:
                role.process.kill()
                role.process.wait()
        with Server(fast=True) as new:
            restored = start(new, "restore", "saved")
            assert await restored.ended(60) == 0, restored.text
            start(new, "worker", "loaded:app")
            start(new, "control")
            async with Broker(ConnectionConfig(nats_url=new.url)) as broker:
                client = Client(broker, RecordConfig())

                async def ended() -> bool:
                    found = await records(client)
                    return all(run in found and found[run].terminal for run in before)

                await until(ended, 120, "the end of every run")
                found, letters = await records(client), set()
                names = broker.names
                async for kept in oldest(broker, names.dead, names.dead_letter("*", "*")):
                    letters.add(kept.run)
    dead = [run for run in before if found[run].state == "dead"]
    assert [run for run in dead if run not in letters] == []
    report(f"{len(before)} runs before the backup, {len(accepted) - len(before)} while it was "
           f"written; {len(dead)} dead, each with its letter")  # fmt: skip
