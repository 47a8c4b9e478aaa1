"""Runs whose record waits for a message that does not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import Backoff, Context, Holdfast
from holdfast.broker import Broker
from holdfast.broker.snapshots import load, save, streams_of
from holdfast.client.schedules import Schedules
from holdfast.config import ConnectionConfig
from holdfast.coordinator import coordinator as coordinators
from holdfast.errors import RunError, RunFailed
from holdfast.model.schedule import define
from holdfast.server import Server
from holdfast.status import stranded
from holdfast.status.dead import DeadLetters
from holdfast.status.runs import Runs
from tests.integration.support import Seen, operating, record_of, working
from tests.support import running, until

SLOW = Backoff.list(["1h"])


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "AROUND_SECONDS", 0.3)
    monkeypatch.setattr(coordinators, "STRANDED_SECONDS", 0.3)
    monkeypatch.setattr(stranded, "QUIET_SECONDS", 1.0)


async def parked(app: Holdfast, run: str) -> bool:
    record = await record_of(app, run)
    return record is not None and record.state == "failed" and record.message == 2


async def test_key_whose_parked_message_is_gone_is_free_again(
    app: Holdfast, nats: Server, namespace: str, seen: Seen, hurried: None
) -> None:
    """The queue is deleted while a keyed run waits for its retry: the run ends as dead, with a
    letter that says why, and what is sent under its key afterwards is executed."""

    @app.job(retry=SLOW)
    async def work(n: int) -> int:
        seen.append(n)
        if n == 1:
            raise ValueError("not yet")
        return n

    async with app, working(app), operating(app) as client:
        first = await work.options(key="k").enqueue(1)
        await until(lambda: parked(app, first.id), what="its retry to be parked")
        await client.broker.api(f"STREAM.DELETE.{client.broker.names.jobs}")
        async with running(coordinators.Coordinator(app.connection_config())):
            with pytest.raises(RunFailed, match="its message is gone"):
                await first.result(timeout=40)
            letters = await DeadLetters(client).list()
            assert [(d.run, d.reason) for d in letters] == [(first.id, "gone")]
            again = await work.options(key="k").enqueue(2)
            assert not again.duplicate
            assert await again.result(timeout=40) == 2
        refused = await DeadLetters(client).replay([letters[0].id])
        assert refused[0].result == "refused"
    assert seen == [1, 2]


async def test_retry_of_a_run_whose_message_is_gone_ends_it(
    app: Holdfast, nats: Server, namespace: str
) -> None:
    """`runs retry` says that the payload is gone, and not that it is just being delivered."""

    @app.job(retry=SLOW)
    async def work(n: int) -> None:
        raise ValueError("not yet")

    async with app, working(app), operating(app) as client:
        run = await work.enqueue(1)
        await until(lambda: parked(app, run.id), what="its retry to be parked")
        await client.topology.purge(client.broker.names.jobs, f"{namespace}.later.>")
        with pytest.raises(RunError, match="its payload with it"):
            await Runs(client).retry(run.id)
        record = await record_of(app, run.id)
        assert record is not None
        assert record.state == "dead"


async def test_slot_whose_message_is_gone_is_sent_again(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """The payload of a slot is that of its schedule: the run goes on with its next attempt."""

    @app.job(retry=SLOW)
    async def work(ctx: Context, n: int) -> None:
        seen.append((n, ctx.attempt))
        if ctx.attempt == 1:
            raise ValueError("not yet")

    async with app, working(app), operating(app) as client:
        nightly = define("nightly", job="work", cron="0 3 * * *", body=b'{"n":7}')
        await Schedules(client).add(nightly)
        run = "nightly/=t20260101T030000Z"
        await client.store_surely(
            client.broker.names.job("default", "work"), b'{"n":7}', {"Nats-Msg-Id": run}
        )
        await until(lambda: parked(app, run), what="its retry to be parked")
        await client.topology.purge(client.broker.names.jobs, f"{namespace}.later.>")
        assert "schedule" in await Runs(client).retry(run)
        await seen.wait(2)
    assert seen == [(7, 1), (7, 2)]


async def test_older_message_carries_a_run_whose_newer_one_is_gone(
    app: Holdfast, nats: Server, namespace: str, tmp_path: Path, seen: Seen
) -> None:
    """A backup whose queue is older than its records: the run failed, and its retry was parked, in
    between. Restored elsewhere it is executed to its end, whatever was read first."""
    attempts: dict[str, Any] = {"retry": Backoff.list(["500ms"])}

    @app.job(**attempts)
    async def work(ctx: Context, n: int) -> int:
        seen.append(ctx.attempt)
        if len(seen) == 1:
            raise ValueError("not yet")
        return n

    async with app, operating(app) as client:
        run = await work.enqueue(5)
        names = client.broker.names
        await save(client.broker, names.jobs, tmp_path)
        worker: dict[str, Any] = {"short_wait_seconds": 0.01}
        async with working(app, **worker):
            await until(lambda: parked(app, run.id), what="its retry to be parked")
            for stream in await streams_of(client.broker):
                if stream != names.jobs:
                    await save(client.broker, stream, tmp_path)
            await run.result(timeout=20)
    seen[1:] = []
    with Server(fast=True) as other:
        app._overrides["nats_url"] = other.url
        async with Broker(ConnectionConfig(nats_url=other.url, namespace=namespace)) as broker:
            for path in tmp_path.iterdir():
                await load(broker, path.name, tmp_path, 1)
        async with app, working(app):
            await until(lambda: _done(app, run.id), 40, "the run's end")
    assert seen == [1, 2]


async def _done(app: Holdfast, run: str) -> bool:
    record = await record_of(app, run)
    return record is not None and record.state == "done"
