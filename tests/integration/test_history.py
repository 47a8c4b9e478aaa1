"""State and history apart: what is known of a run after its record has expired."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.broker import Broker, Received
from holdfast.broker.kv import certain_get
from holdfast.client import Client
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.coordinator.recovery import Recovery
from holdfast.coordinator.unfiled import PAUSE_SECONDS
from holdfast.errors import BrokerError, RunError
from holdfast.model import run as runs
from holdfast.model.node import NodeRecord
from holdfast.model.run import RunRecord
from holdfast.ownership.history import FLIGHTS, MOST_FLIGHTS, History
from holdfast.server import Server
from holdfast.status.finding import Finder, payload_of
from holdfast.status.listing import RunFilter, RunPages
from holdfast.status.runs import Runs
from holdfast.telemetry import Telemetry
from tests.integration.support import (
    HURRIED,
    Seen,
    all_records,
    client_of,
    operating,
    queue_empty,
    raw,
    working,
)
from tests.support import until

SHORT = RecordConfig(keyless_ttl_seconds=1, keyed_ttl_seconds=1, dedup_window_seconds=0.5)
"""Records that expire while a test waits."""


async def lines(client: Client) -> list[Any]:
    return [line async for line in client.history.all(1.0)]


async def forgotten(app: Holdfast) -> None:
    """Wait until no record is left."""

    async def none() -> bool:
        return not await all_records(app)

    await until(none, what="records that expire")


# ---- looking a run up


async def test_run_is_known_after_its_record(app: Holdfast) -> None:
    """Result, status, payload, headers and lists outlive the record."""

    @app.job
    async def double(n: int) -> int:
        return 2 * n

    async with app, working(app, records=SHORT):
        run = await double.options(headers={"Tenant": "a"}).enqueue(21)
        assert await run.result(timeout=60) == 42
        await forgotten(app)
        assert (await run.status()).state == "done"
        assert await run.result(timeout=60) == 42
        client = await client_of(app)
        found = await Finder(client).find(run.id)
        assert await payload_of(client, found) == (b"21", {"Tenant": "a"})
        detail = await Runs(client).describe(found)
        assert (detail.info.state, detail.where[:5]) == ("done", "ended")
        for wanted in (
            RunFilter(),
            RunFilter(job="double", state="done"),
            RunFilter(prefix=run.id[:8]),
        ):
            assert [r.run for r in await Runs(client).list(wanted)] == [run.id]
        for wanted in (RunFilter(state="dead"), RunFilter(job="other"), RunFilter(since=9e9)):
            assert not await Runs(client).list(wanted)


async def test_pages_of_history_show_each_run_once(app: Holdfast) -> None:
    """Runs that ended together share messages; pages end in the middle of one."""

    @app.job
    async def work(n: int) -> None: ...

    async with app, working(app, records=SHORT, concurrency=100):
        sent = await work.enqueue_many([work.request(n) for n in range(300)])
        for run in sent:
            await run.result(timeout=60)
        await forgotten(app)
        client = await client_of(app)
        seen: list[str] = []
        cursor = ""
        while True:
            page = await RunPages(client).page(RunFilter(state="done"), 7, cursor)
            seen += [info.run for info in page.runs]
            cursor = page.older
            if not cursor:
                break
        assert len(seen) == 300
        assert set(seen) == {run.id for run in sent}


async def test_ended_run_is_run_again_with_its_payload(app: Holdfast, seen: Seen) -> None:
    """A run that has ended is sent once more as a new one; a job may keep no payloads."""

    @app.job
    async def work(n: int) -> None:
        seen.append(n)

    @app.job(keep_payload=False)
    async def secret(n: int) -> None:
        seen.append(n)

    async with app, working(app, records=SHORT):
        one, two = await work.options(key="a").enqueue(1), await secret.enqueue(2)
        for run in (one, two):
            await run.result(timeout=60)
        client = await client_of(app)
        for _ in range(2):  # while the record is there, and from the history alone
            assert "as run r" in await Runs(client).retry(one.id)
            with pytest.raises(RunError, match="payload is not kept"):
                await Runs(client).retry(two.id)
            await forgotten(app)
        await seen.wait(4)
    assert sorted(seen) == [1, 1, 1, 2]


# ---- crashes


async def delivered_once(app: Holdfast, server: Server, job: str) -> None:
    """Deliver a message to somebody who neither executes nor acknowledges it."""
    client = await client_of(app)
    async with raw(server) as (_, js):
        stream, name = client.broker.names.jobs, f"default={job}"
        sub = await js.pull_subscribe_bind(name, stream)
        assert len(await sub.fetch(1, timeout=20)) == 1


async def ended(client: Client, run: str, job: str) -> RunRecord:
    """The record of a run that has just ended."""
    now = client.broker.server_now()
    return RunRecord("done", "default", job, created=now, started=now, ended=now)


async def guard_over(client: Client) -> None:
    """Wait until a record that was written before now has expired."""
    over = client.broker.server_now() + SHORT.keyless_ttl_seconds
    await until(lambda: client.broker.server_now() > over, what="the end of the guard")


async def test_redelivery_after_the_guard_asks_history(
    app: Holdfast, nats: Server, seen: Seen
) -> None:
    """NATS was away for longer than a record lives, and the ack was lost: it is not run again."""

    @app.job
    async def work() -> None:
        seen.append("again")

    async with app:
        async with working(app, records=SHORT, **HURRIED):
            pass
        client = await client_of(app)
        run = await work.enqueue()
        await delivered_once(app, nats, "work")
        await client.history.append(run.id, await ended(client, run.id, "work"))
        await guard_over(client)
        async with working(app, records=SHORT):
            await until(lambda: queue_empty(app), what="the message dropped")
        assert (await client.read(run.id) or await client.recall(run.id)) is not None
        assert len(await lines(client)) == 1
    assert not seen


async def test_message_waits_while_history_cannot_answer(
    app: Holdfast, nats: Server, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it has ended is unknown: it is given back until the history can be read."""
    asked = Seen()
    real = History.find

    async def find(self: History, *args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        if len(asked) < 3:
            await self._broker.api("STREAM.INFO.NOTHING")
        return await real(self, *args, **kwargs)

    @app.job
    async def work() -> None:
        seen.append("run")

    async with app:
        async with working(app, records=SHORT, **HURRIED):
            pass
        run = await work.enqueue()
        await delivered_once(app, nats, "work")
        await guard_over(await client_of(app))
        monkeypatch.setattr(History, "find", find)
        async with working(app, records=SHORT):
            await run.result(timeout=60)
    assert (len(asked) >= 3, list(seen)) == (True, ["run"])


async def test_late_claim_asks_history(app: Holdfast, seen: Seen) -> None:
    """A worker frozen before its claim wakes after the guard: it does not run the run again."""

    @app.job
    async def work() -> None:
        seen.append("again")

    async with app, working(app, records=SHORT, ack_wait_seconds=1, extend_seconds=0.4) as worker:
        assert worker.current
        executor = worker.current._intake._executor
        frozen, awake = asyncio.Event(), asyncio.Event()
        real: Callable[..., Awaitable[Any]] = executor.claims.claim

        async def claim(*args: Any, **kwargs: Any) -> Any:
            frozen.set()
            await awake.wait()
            return await real(*args, **kwargs)

        executor.claims.claim = claim  # type: ignore[method-assign]
        run = await work.enqueue()
        await frozen.wait()
        client = await client_of(app)
        await client.history.append(run.id, await ended(client, run.id, "work"))
        await guard_over(client)
        awake.set()
        await until(lambda: queue_empty(app), what="the message dropped")
        status = await run.status()
        assert (status.state, len(await lines(client))) == ("done", 1)
    assert not seen


async def test_redelivery_writes_the_missing_line_once(
    app: Holdfast, nats: Server, seen: Seen
) -> None:
    """Its worker died after the settle: the next one appends the end, and not a second time."""

    @app.job
    async def work(n: int) -> None:
        seen.append(n)

    async with app:
        async with working(app, **HURRIED):
            pass
        client = await client_of(app)
        for n, filed in ((1, False), (2, True)):
            run = await work.enqueue(n)
            await delivered_once(app, nats, "work")
            record = await ended(client, run.id, "work")
            await client.runs.put(run.id, runs.encode(record), expected=0, ttl=100)
            if filed:
                await client.history.append(run.id, record)
            async with working(app):
                await until(lambda: queue_empty(app), what="the message dropped")
            found = [line for line in await lines(client) if line.run == run.id]
            assert [line.identity for line in found] == [(run.id, record.ended)]
            assert filed or found[0].payload == str(n).encode()
    assert not seen


@pytest.mark.parametrize("once", [True, False])
async def test_lines_that_a_lost_worker_left_out_are_written_by_a_coordinator(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    """Those that a redelivery may still complete come later; nobody else's are touched."""
    async with operating(app) as client:
        now = client.broker.server_now()
        for n, node in enumerate(["gone", "gone", "gone", "alive"]):
            record = RunRecord("done", "default", "work", node=node, once=once, ended=now + n)
            await client.runs.put(f"r{n}", runs.encode(record), expected=0, ttl=100)
            if n == 1:
                await client.history.append(f"r{n}", record)
        recovery = Recovery(client.broker, Telemetry())
        for _ in range(2):
            await recovery.sweep(NodeRecord("gone", "worker"), set(), 0.0)
        expected = ["r0", "r1", "r2"]
        assert sorted(line.run for line in await lines(client)) == (expected if once else ["r1"])
        real = client.broker.clock.monotonic
        monkeypatch.setattr(client.broker.clock, "monotonic", lambda: real() + PAUSE_SECONDS)
        await recovery.unfiled.file()
        monkeypatch.undo()
        assert sorted(line.run for line in await lines(client)) == expected


# ---- writing and reading


async def test_lines_of_many_jobs_do_not_wait_for_each_other(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many jobs and slow answers more than two messages are under way, of one job never."""
    async with operating(app) as client:
        under_way = Counter[str]()

        def put(subject: str, *_: Any) -> asyncio.Future[int]:
            under_way[subject] += 1
            return asyncio.get_running_loop().create_future()

        monkeypatch.setattr(client.broker, "put", put)
        now = client.broker.server_now()
        jobs = [f"job{n % 10}" for n in range(100)]
        records = [RunRecord("done", "default", job, ended=now) for job in jobs]
        tasks = [
            asyncio.create_task(client.history.append(f"r{n}", r)) for n, r in enumerate(records)
        ]
        await until(lambda: under_way.total() >= MOST_FLIGHTS, what="messages under way")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (under_way.total(), max(under_way.values())) == (MOST_FLIGHTS, FLIGHTS)


async def test_history_is_written_again_after_a_login_was_renewed(
    namespace: str, tmp_path: Path
) -> None:
    """A login that may not write it loses lines only until it reconnects with the right to."""
    users = tmp_path / "users.conf"
    user = (
        "authorization {{ users = [{{user: a, password: b, permissions: {{publish: {{{}}}}}}}] }}"
    )
    users.write_text(user.format('deny: ["*.ended.>"]'))
    with Server(fast=True, includes=[users]) as server:
        url = server.url.replace("://", "://a:b@")
        config = ConnectionConfig(nats_url=url, namespace=namespace, request_timeout_seconds=2)
        async with Broker(config) as broker:
            client = Client(broker, RecordConfig())
            await client.topology.ensure()
            record = RunRecord("done", "default", "work", ended=broker.server_now())
            await client.history.append("r1", record)
            reconnected = asyncio.Event()
            broker.on_reconnect(reconnected.set)
            users.write_text(user.format('allow: [">"]'))
            server.kill()
            server.start()
            await until(reconnected.is_set, what="the connection to return")
            await client.history.append("r2", record)
            assert [line.run for line in await lines(client)] == ["r2"]
        server.kill()


async def test_history_asks_the_leader_where_a_replica_has_nothing(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that lags does not make a run that has ended look like one that has not."""
    async with operating(app) as client:
        now = client.broker.server_now()
        record = RunRecord("done", "default", "work", ended=now)
        await client.history.append("r1", record, b"[1]", {"Tenant": "a"})
        status = "404"

        real = client.broker.request

        async def lagging(subject: str, *args: Any, **kwargs: Any) -> Received:
            if "DIRECT" in subject:
                return Received("", b"", {}, "", status)
            return await real(subject, *args, **kwargs)

        monkeypatch.setattr(client.broker, "request", lagging)
        stream = client.broker.names.history
        last = (await client.broker.api(f"STREAM.INFO.{stream}"))["state"]["last_seq"]
        found = await certain_get(client.broker, stream, {"seq": last})
        assert found is not None
        assert [line.payload for line in client.history.lines(found, "r1")] == [b"[1]"]
        assert await certain_get(client.broker, stream, {"seq": last + 1}) is None
        status = "408"
        with pytest.raises(BrokerError, match="cannot be read"):
            await certain_get(client.broker, stream, {"seq": last})
