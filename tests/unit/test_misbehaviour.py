"""The zoo of misbehaviour in memory: every run ends as it would on a worker."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from typing import Any

import pytest

from chaos.zoo import ZOO, Animal, swallows_cancellation
from holdfast import Backoff, Context, Holdfast
from holdfast.config import WorkerConfig
from holdfast.telemetry import Telemetry
from holdfast.testing import memory
from holdfast.testing.memory_app import Memory

OUTCOMES = {"failed": "dead", "done": "done"}


@pytest.fixture
def app() -> Holdfast:
    return Holdfast("zoo")


def keep(app: Holdfast, animal: Animal, noted: list[str], **contract: Any) -> Any:
    """A job of one animal."""
    contract = {"name": "animal", "retry": Backoff.never(), **contract}
    if animal.is_async:

        @app.job(**contract)
        async def in_a_task() -> Any:
            return await animal.handler(noted.append)

        return in_a_task

    @app.job(**contract)
    def in_a_thread() -> Any:
        return animal.handler(noted.append)

    return in_a_thread


@pytest.mark.parametrize("name", [n for n, a in ZOO.items() if a.fate == "failed"])
async def test_misbehaviour_is_a_failed_attempt(app: Holdfast, name: str) -> None:
    """Whatever a handler raises or cancels: its run fails, and the next one is not touched."""
    noted: list[str] = []
    job = keep(app, ZOO[name], noted)

    @app.job
    async def bystander() -> str:
        await asyncio.sleep(0.01)
        return "well"

    async with memory(app) as mem:
        run, other = await job.enqueue(), await bystander.enqueue()
        async with asyncio.timeout(60):
            await mem.drain()
        record = await mem.record(run.id)
        assert record is not None
        assert (record.state, record.failures, noted) == ("dead", 1, ["started"])
        assert await other.result() == "well"


async def test_task_cancelled_later_hits_no_other_run(app: Holdfast) -> None:
    """What a handler left behind to cancel its task finds only that task, however late."""
    noted: list[str] = []
    job = keep(app, ZOO["cancels_later"], noted)

    @app.job
    async def bystander() -> str:
        await asyncio.sleep(0.12)  # while the cancellations of the other one come
        return "well"

    async with memory(app) as mem:
        run = await job.enqueue()
        others = [await bystander.enqueue() for _ in range(3)]
        await mem.drain()
        assert await run.result() is None
        assert [await other.result() for other in others] == ["well"] * 3


async def test_handler_that_swallows_its_cancellation_is_timed_out(
    app: Holdfast, caplog: pytest.LogCaptureFixture
) -> None:
    """After `cleanup_seconds` its attempt is a timeout, told with job and run; its words are void.

    Its end is seen too, and frees its place.
    """
    caplog.set_level(logging.INFO, "holdfast")  # whatever other tests of this process chose
    noted: list[Any] = []
    over = asyncio.Event()

    @app.job(timeout=0.05, retry=Backoff.never())
    async def stubborn(ctx: Context) -> None:
        await swallows_cancellation(noted.append, 0.3)
        for act in (ctx.progress(0.5), ctx.publish("late"), ctx.still_owner()):
            try:
                noted.append(await act)
            except Exception as error:  # noqa: BLE001 - reported to the test
                noted.append(type(error).__name__)
        over.set()

    telemetry = Telemetry()
    mem = Memory(app, worker=WorkerConfig(cleanup_seconds=0.05), telemetry=telemetry)

    def stuck() -> float | None:
        labels = {"group": "default", "job": "stubborn"}
        return telemetry.registry.get_sample_value("holdfast_stuck_handlers", labels)

    async with mem:
        run = await stubborn.enqueue()
        await mem.drain()
        record = await mem.record(run.id)
        assert record is not None
        assert (record.state, record.attempts[-1].outcome) == ("dead", "timeout")
        assert mem.dead[0].reason == "timeout"
        assert stuck() == 1
        assert f"the handler of run {run.id} (job stubborn) still runs" in caplog.text
        await asyncio.wait_for(over.wait(), 10)
        assert noted == ["started", "swallowed", "ClaimLost", "ClaimLost", False]
        assert await mem.record(run.id) == record
        while stuck():
            await asyncio.sleep(0)


async def test_memory_takes_nothing_without_a_free_thread(app: Holdfast) -> None:
    """With every thread stuck a plain run waits, uncounted, and starts when one is free."""
    go, started = threading.Event(), []

    @app.job(timeout=0.05, retry=Backoff.never())
    def stuck() -> None:
        go.wait(10)

    @app.job(timeout=0.5)
    def quick() -> str:
        started.append("quick")
        return "well"

    async with memory(app) as mem:
        for _ in range(mem._calls.threads):
            await stuck.enqueue()
        await mem.drain()
        runs = [await quick.enqueue() for _ in range(3)]
        assert await mem.drain() == 0
        assert await runs[0].cancel()
        assert started == []
        go.set()
        while mem._calls.busy_threads:
            await asyncio.sleep(0.01)
        await mem.drain()
        assert [await run.result() for run in runs[1:]] == ["well"] * 2
        assert started == ["quick"] * 2
        record = await mem.record(runs[1].id)
        assert record is not None
        assert (record.failures, record.crashes) == (0, 0)


async def test_ended_runs_leave_no_reference_cycle(app: Holdfast) -> None:
    """What a run needed is freed at its end: collecting it later costs a fifth of the time."""

    @app.job
    async def nothing() -> None: ...

    async def garbage_of(runs: int) -> int:
        gc.collect()
        await nothing.enqueue_many([nothing.request() for _ in range(runs)])
        await mem.drain()
        return gc.collect()

    async with memory(app) as mem:
        gc.disable()
        try:
            once = await garbage_of(100)
            assert await garbage_of(300) < once + 200
        finally:
            gc.enable()
