"""The app in memory: crashes that can be simulated, and cancelling."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Backoff, Context, Holdfast
from holdfast.config import WorkerConfig
from holdfast.errors import (
    NoRecord,
    RunCancelled,
    RunFailed,
    RunLost,
)
from holdfast.testing import memory


@pytest.fixture
def app() -> Holdfast:
    return Holdfast("shop")


@pytest.fixture
def seen() -> list[Any]:
    return []


# ---- crashes


async def test_crash_is_taken_over(app: Holdfast, seen: list[Any]) -> None:
    """A process that dies after the effect: the next attempt has a higher epoch, the same run."""

    @app.job
    async def pay(ctx: Context) -> int:
        seen.append((ctx.run, ctx.epoch, ctx.node))
        return ctx.attempt

    async with memory(app) as mem:
        mem.crash_next(pay)
        run = await pay.enqueue()
        assert await run.result() == 2
        status = await run.status()
        assert (status.crashes, status.failures) == (1, 0)
    (one, epoch, node), (two, higher, other) = seen
    assert one == two == run.id
    assert higher > epoch
    assert node != other


async def test_crash_at_the_start_never_calls_the_handler(app: Holdfast, seen: list[Any]) -> None:
    """The other half: the process dies between the claim and the first line."""

    @app.job
    async def pay() -> None:
        seen.append(1)

    async with memory(app) as mem:
        mem.crash_next("pay", at="start")
        await (await pay.enqueue()).result()
    assert seen == [1]


async def test_crash_limit_makes_a_dead_letter(app: Holdfast, seen: list[Any]) -> None:
    """A run that kills every process is given up after three, whatever its retries."""

    @app.job
    async def poison() -> None:
        seen.append(1)

    async with memory(app, worker=WorkerConfig(crash_limit=3)) as mem:
        mem.crash_next(poison, times=5)
        run = await poison.enqueue()
        with pytest.raises(RunFailed, match="3 workers died"):
            await run.result()
        assert [letter.reason for letter in mem.dead] == ["crashed"]
    assert len(seen) == 3


async def test_crash_of_a_job_that_must_not_restart_is_lost(app: Holdfast, seen: list[Any]) -> None:
    """restart='never': one attempt, and a dead letter for a person."""

    @app.job(restart="never")
    async def launch() -> None:
        seen.append(1)

    async with memory(app) as mem:
        mem.crash_next(launch)
        run = await launch.enqueue()
        with pytest.raises(RunLost):
            await run.result()
        assert [letter.reason for letter in mem.dead] == ["lost"]
    assert seen == [1]


async def test_crash_of_at_least_once_runs_it_again(app: Holdfast, seen: list[Any]) -> None:
    """Without a record there is no epoch and no result, but the run is not lost either."""

    @app.job(delivery="at_least_once")
    async def ping(ctx: Context) -> None:
        seen.append(ctx.run)

    async with memory(app) as mem:
        mem.crash_next(ping)
        run = await ping.enqueue()
        assert await mem.drain() == 2
        for ask in (run.result, run.status, run.cancel):
            with pytest.raises(NoRecord):
                await ask()
    assert seen == [run.id, run.id]


async def test_crash_of_at_most_once_is_not_repeated(app: Holdfast, seen: list[Any]) -> None:
    """The message was gone before the handler began: the run is lost, for a person to see."""

    @app.job(delivery="at_most_once")
    async def fire() -> None:
        seen.append(1)

    async with memory(app) as mem:
        mem.crash_next(fire)
        run = await fire.enqueue()
        assert await mem.drain() == 1
        with pytest.raises(RunLost):
            await run.result()
        assert [letter.reason for letter in mem.dead] == ["lost"]
        assert await mem.advance("1d") == 0
    assert seen == [1]


# ---- cancelling


async def test_cancel_wherever_the_run_is(app: Holdfast, seen: list[Any]) -> None:
    """Queued, delayed and waiting for a retry: none of them runs any more."""

    @app.job(retry=Backoff.list(["1m"]))
    async def job(n: int) -> None:
        seen.append(n)
        raise ValueError("no")

    async with memory(app) as mem:
        waiting = await job.enqueue(1)
        await mem.drain()
        queued, delayed = await job.enqueue(2), await job.options(delay="1h").enqueue(3)
        for run in (waiting, queued, delayed):
            assert await run.cancel() is True
            assert (await run.status()).state == "cancelled"
            assert await run.cancel() is True
            with pytest.raises(RunCancelled):
                await run.result()
        await mem.advance("10h")
    assert seen == [1]


async def test_cancel_stops_a_running_handler(app: Holdfast) -> None:
    """A handler that is at work is interrupted where it waits."""
    started, stopped = asyncio.Event(), asyncio.Event()

    @app.job
    async def slow() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    async with memory(app) as mem:
        run = await slow.enqueue()
        draining = asyncio.create_task(mem.drain())
        await started.wait()
        assert (await run.status()).state == "running"
        assert await run.cancel() is True
        assert stopped.is_set()
        await draining


async def test_cancel_of_an_ended_run_is_false(app: Holdfast) -> None:
    """There is nothing left to cancel, and the result stays."""

    @app.job
    async def job() -> int:
        return 1

    async with memory(app):
        run = await job.enqueue()
        assert await run.result() == 1
        assert await run.cancel() is False
        assert await run.result() == 1
