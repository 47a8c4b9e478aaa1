"""The key of a delayed run is known for as long as it waits, however it is sent again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Context, Holdfast
from holdfast.config import RecordConfig
from holdfast.server import Cluster
from tests.integration.support import Seen, parked, queue_empty, record_of, until, working

SHORT = RecordConfig(dedup_window_seconds=0.1)
"""The server forgets message ids at once: what is known after that is known by other means."""


async def _forgotten(app: Holdfast) -> None:
    """Wait until the server has forgotten every message id that it has seen until now."""
    probe = app.jobs["probe"]
    await probe.enqueue(key="a")

    async def again() -> bool:
        return not (await probe.enqueue(key="a")).duplicate

    await until(again, 10, "a forgotten message id")


def _define(app: Holdfast, seen: Seen, delivery: Any = "effectively_once") -> Any:
    @app.job(delivery="at_least_once")
    async def probe() -> None:
        return None

    @app.job(delivery=delivery)
    async def work(ctx: Context, n: int) -> None:
        seen.append(n)

    return work


@pytest.mark.parametrize("delivery", ["effectively_once", "at_least_once", "at_most_once"])
@pytest.mark.parametrize("again", ["at once", "another delay", "among many"])
async def test_key_of_a_waiting_run_is_known(
    app: Holdfast, seen: Seen, delivery: Any, again: str
) -> None:
    """The delayed run stays, with its payload, and runs once; the second send is a duplicate."""
    work = _define(app, seen, delivery)
    async with working(app, records=SHORT):
        first = await work.options(key="a", delay="2s").enqueue(1)
        await _forgotten(app)
        if again == "at once":
            second = [await work.options(key="a").enqueue(2)]
        elif again == "another delay":
            second = [await work.options(key="a", delay="1h").enqueue(2)]
        else:
            requests = [work.options(key=k).request(3) for k in ("b", "c", "a", "d")]
            second = (await app.enqueue_many(requests))[2:3]
        assert [(run.id, run.duplicate) for run in second] == [(first.id, True)]
        await until(lambda: 1 in seen, 10, "the delayed run")
        await until(lambda: queue_empty(app), 10, "an empty queue")
        assert [n for n in seen if n < 3] == [1]
        assert sorted(seen) == ([1, 3, 3, 3] if again == "among many" else [1])
        assert not await parked(app)


async def test_key_of_a_run_that_has_ended_is_known_to_a_delayed_send(
    app: Holdfast, seen: Seen
) -> None:
    """Else it would run again once the wait has outlived the record."""
    work = _define(app, seen)
    async with working(app, records=SHORT):
        first = await work.options(key="a").enqueue(1)
        await first.result(timeout=60)
        await _forgotten(app)
        again = await work.options(key="a", delay="2d").enqueue(2)
        assert again.duplicate
        assert not await parked(app)
        record = await record_of(app, first.id)
        assert record is not None
        assert record.state == "done"


async def test_key_is_free_again_when_the_waiting_run_was_cancelled(
    app: Holdfast, seen: Seen
) -> None:
    """Of an at_least_once job; others remember the cancelled run for as long as its record."""
    work = _define(app, seen, "at_least_once")
    async with working(app, records=SHORT):
        await work.options(key="a", delay="1h").enqueue(1)
        await _forgotten(app)
        client: Any = await app.backend()
        names = client.broker.names
        await client.topology.purge(names.jobs, names.later("default", "work", "work/a", 1))
        assert not (await work.options(key="a").enqueue(2)).duplicate
        await seen.wait(1)
    assert seen == [2]


async def test_key_sent_by_many_at_once_is_one_run(
    cluster: Cluster, namespace: str, seen: Seen
) -> None:
    """On a cluster, writes in process refuse one another; nobody is told that nothing is there."""
    app = Holdfast("shop", nats_url=cluster.url, namespace=namespace)
    work = _define(app, seen)
    async with working(app):
        for key in "abc":
            sends = (work.options(key=key).enqueue(1) for _ in range(20))
            runs = await asyncio.gather(*sends)
            assert {run.id for run in runs} == {f"work/{key}"}
            for run in runs[:2]:
                await run.result(timeout=20)
        assert seen == [1, 1, 1]
