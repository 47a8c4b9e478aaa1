"""The index of runs: the same answers as the server's, at once, whatever changes meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.model import run as runs
from holdfast.model.run import RunRecord, State
from holdfast.server import Server
from holdfast.status.listing import RunFilter, RunPages
from holdfast.status.run_index import RunIndex
from tests.integration.web_support import run_records, store_all, waiting_runs
from tests.support import until

COUNT = 2_500
ALL = RunFilter()


@contextlib.asynccontextmanager
async def connected(nats: Server, namespace: str) -> AsyncIterator[Client]:
    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with Broker(config, name="index") as broker:
        client = Client(broker, RecordConfig())
        await client.topology.ensure()
        yield client


@contextlib.asynccontextmanager
async def indexed(client: Client, most: int = 100_000) -> AsyncIterator[RunIndex]:
    index = RunIndex(client, most)
    index.start()
    try:
        await until(lambda: index.complete, 30)
        yield index
    finally:
        await index.close()


async def put(client: Client, run: str, state: State, ttl: float | None = None) -> None:
    """Write a record, whatever was there."""
    revision, _ = await client.runs.last(run)
    body = runs.encode(RunRecord(state, "default", "add"))
    await client.runs.put(run, body, expected=revision, ttl=ttl)


async def listed(client: Client, wanted: RunFilter, index: RunIndex | None) -> list[str]:
    """All runs that match, page by page."""
    found: list[str] = []
    cursor = ""
    while True:
        page = await RunPages(client, index=index).page(wanted, 400, cursor)
        found += [f"{info.run} {info.state}" for info in page.runs]
        cursor = page.older
        if not cursor:
            return found


async def test_index_gives_what_the_server_gives(nats: Server, namespace: str) -> None:
    """Every filter, page by page; a rare one with one page instead of many."""
    async with connected(nats, namespace) as client:
        await store_all(client, run_records(client, COUNT))
        await store_all(client, waiting_runs(client, 300))
        await put(client, "waiting-7", "running")  # its message is still in the queue
        async with indexed(client) as index:
            assert len(index) == COUNT + 1
            for wanted in (ALL, RunFilter(job="job7"), RunFilter(state="dead")):
                assert await listed(client, wanted, index) == await listed(client, wanted, None)
            page = await RunPages(client, index=index).page(RunFilter(state="lost"), 50)
            assert [info.run for info in page.runs] == ["r00000000"]
            assert page.older == ""


async def test_index_follows_every_change(nats: Server, namespace: str) -> None:
    """New, changed, removed and expired records: the list is what the server has."""
    async with connected(nats, namespace) as client:
        for n in range(5):
            await put(client, f"old{n}", "running")
        async with indexed(client) as index:
            await put(client, "old1", "done")
            await put(client, "new", "running")
            await put(client, "brief", "done", ttl=1.0)
            revision, _ = await client.runs.last("old2")
            await client.runs.remove("old2", expected=revision)
            await until(lambda: len(index) == 6, 10)
            first = await listed(client, ALL, index)
            assert first[:3] == ["brief done", "new running", "old1 done"]
            while "brief done" in await listed(client, ALL, index):
                await asyncio.sleep(0.05)
            assert "old2 running" not in await listed(client, ALL, index)
            assert await listed(client, ALL, index) == await listed(client, ALL, None)


async def test_changes_during_the_load_are_not_lost(nats: Server, namespace: str) -> None:
    """What is written while the index is being filled is in it, with its newest state."""
    async with connected(nats, namespace) as client:
        await store_all(client, run_records(client, COUNT))
        index = RunIndex(client)
        index.start()
        for n in range(0, COUNT, 50):
            await put(client, f"r{n:08d}", "running")
        await until(lambda: index.complete, 30)
        try:
            wanted = RunFilter(state="running")
            assert len(await listed(client, wanted, index)) == COUNT // 50
            assert await listed(client, ALL, index) == await listed(client, ALL, None)
        finally:
            await index.close()


async def test_index_that_is_full_leaves_the_oldest_to_the_server(
    nats: Server, namespace: str
) -> None:
    """It stays as small as it was told to; lists go on behind it and miss nothing."""
    async with connected(nats, namespace) as client:
        await store_all(client, run_records(client, COUNT))
        async with indexed(client, most=300) as index:
            assert len(index) == 300
            assert await listed(client, ALL, index) == await listed(client, ALL, None)
            rare = RunFilter(state="lost")
            assert await listed(client, rare, index) == ["r00000000 lost"]


async def test_index_is_filled_again_after_a_break(namespace: str) -> None:
    """What changed while the connection was gone is known afterwards."""
    with Server(fast=True) as own:
        async with connected(own, namespace) as client, connected(own, namespace) as other:
            await put(client, "a", "running")
            async with indexed(client) as index:
                back = asyncio.Event()
                client.broker.on_reconnect(back.set)
                await client.broker.leave()
                await put(other, "a", "done")
                await put(other, "b", "running")
                async with asyncio.timeout(60):
                    await back.wait()
                await until(lambda: index.complete and len(index) == 2, 30)
                assert await listed(client, ALL, index) == ["b running", "a done"]


async def test_ended_keyed_records_do_not_make_the_index_forget(
    nats: Server, namespace: str
) -> None:
    """Records of ended runs stay for a day, but are in the history: however many there are, the
    states of what has not ended are known."""
    async with connected(nats, namespace) as client:
        await put(client, "live", "running")
        for n in range(30):
            await put(client, f"add/key-{n}", "done", ttl=0.2 * 86_400)
        await put(client, "late", "failed")
        client.broker.server_now = lambda: time.time() + 60  # type: ignore[method-assign]
        async with indexed(client, most=10) as index:
            assert index.floor == 0
            states = index.states()
            assert states is not None
            assert {key[2]: n for key, n in states.items()} == {"running": 1, "failed": 1}
            page = await RunPages(client, index=index).page(RunFilter(state="running"), 50)
            assert [info.run for info in page.runs] == ["live"]
