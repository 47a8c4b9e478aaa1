"""Debounce: of a burst only the last run runs, once it is quiet; the others end as cancelled."""

from __future__ import annotations

import asyncio
import time

import pytest

from holdfast import Holdfast, Limit
from holdfast.client import Client
from holdfast.errors import DefinitionError, RunCancelled
from holdfast.server import Server
from holdfast.status.listing import RunFilter
from holdfast.status.runs import Runs
from tests.integration.support import queue_empty, raw, until, working


async def test_last_of_a_burst_runs_once_it_is_quiet(app: Holdfast) -> None:
    """Two workers: one run of each key, with the newest payload; every other one is cancelled."""
    saved: list[tuple[str, int]] = []

    @app.job(debounce="1s", per="doc", limits=[Limit(running=1)])
    async def save(doc: str, version: int) -> int:
        saved.append((doc, version))
        return version

    async with app, working(app), working(app):
        runs = [await save.enqueue(f"d{n % 3}", n) for n in range(30)]
        assert await asyncio.gather(*(run.result(20) for run in runs[27:])) == [27, 28, 29]
        for run in runs[:27]:
            with pytest.raises(RunCancelled, match="debounced"):
                await run.result(10)
        await until(lambda: queue_empty(app))
    assert sorted(saved) == [("d0", 27), ("d1", 28), ("d2", 29)]


async def test_burst_that_does_not_end_runs_at_the_latest_time(app: Holdfast) -> None:
    """Every 0.1 s another one: without `at_latest` none of them would run."""
    saved: list[float] = []

    @app.job(debounce="1s", at_latest="1500ms")
    async def save(number: int) -> None:
        saved.append(time.monotonic())

    async with app, working(app):
        began = time.monotonic()
        while not saved and time.monotonic() - began < 20:
            await save.enqueue(1)
            await asyncio.sleep(0.1)
        assert saved
        assert 1.3 < saved[0] - began < 10


async def test_debounced_run_is_shown_and_can_be_cancelled(app: Holdfast) -> None:
    """While it waits it is delayed, its result can be awaited, and a cancelled one never runs."""
    saved: list[int] = []

    @app.job(debounce="2s")
    async def save(number: int) -> None:
        saved.append(number)

    async with app, working(app):
        run = await save.enqueue(1)

        async def delayed() -> bool:
            return (await run.status()).state == "delayed"

        await until(delayed)
        client = await app.backend()
        assert isinstance(client, Client)
        listed = await Runs(client).list(RunFilter(job="save", state="delayed"), 10)
        assert [one.run for one in listed] == [run.id]
        assert await run.cancel()
        await until(lambda: queue_empty(app))
        with pytest.raises(RunCancelled):
            await run.result(5)
    assert saved == []


async def test_plain_publish_is_debounced(app: Holdfast, nats: Server, namespace: str) -> None:
    """Workers apply it, whoever sends."""
    saved: list[int] = []

    @app.job(debounce="700ms", per="doc")
    async def save(doc: str, version: int) -> None:
        saved.append(version)

    async with app, working(app), raw(nats) as (_, js):
        for version in range(5):
            body = b'{"doc": "a", "version": %d}' % version
            await js.publish(f"{namespace}.job.default.save", body)
        await until(lambda: bool(saved))
        await until(lambda: queue_empty(app))
    assert saved == [4]


def test_impossible_debounce_is_refused(app: Holdfast) -> None:
    """With a sentence that says what to write."""
    for wrong in (
        {"per": "doc"},
        {"at_latest": "1m"},
        {"debounce": "0s"},
        {"debounce": "1m", "at_latest": "1s"},
        {"debounce": "soon"},
        {"debounce": "5s", "delivery": "at_least_once"},
    ):
        with pytest.raises(DefinitionError):
            app.job(name="save", **wrong)(lambda doc: None)  # type: ignore[call-overload]

    with pytest.raises(DefinitionError, match="not a member"):

        @app.job(debounce="5s", per="dok")
        async def save(doc: str, version: int) -> None: ...
