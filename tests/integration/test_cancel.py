"""`run.cancel()`: wherever the run is, it either holds or says that it came too late."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from holdfast import Backoff, Context, Holdfast
from holdfast.errors import NoRecord, RunCancelled
from holdfast.model import run as runs
from holdfast.model.run import RunRecord
from tests.integration.support import (
    Seen,
    client_of,
    dead_letters,
    metric,
    parked,
    queue_empty,
    record_of,
    until,
    working,
)


async def ended_cancelled(app: Holdfast, run: Any) -> None:
    """The record, the handle and the queue agree that it was cancelled."""
    with pytest.raises(RunCancelled, match="cancelled"):
        await run.result(60)
    assert (await run.status()).state == "cancelled"
    assert not await dead_letters(app)


async def test_queued_run_is_cancelled_and_never_starts(app: Holdfast, seen: Seen) -> None:
    """A run that waits in the queue is dropped when its turn comes."""

    @app.job
    async def work(n: int) -> None:
        seen.append(n)

    async with app:
        first, second = await work.enqueue_many([1, 2])
        assert await first.cancel() is True
        await ended_cancelled(app, first)
        async with working(app):
            await second.result(60)
            await until(lambda: queue_empty(app), 5, "an empty queue")
        assert seen == [2]


async def test_delayed_run_is_cancelled_with_its_message(app: Holdfast) -> None:
    """A run that waits for its time leaves nothing behind."""

    @app.job
    async def work() -> None:
        raise AssertionError("must not run")

    async with app:
        run = await work.options(delay="1h").enqueue()
        assert (await run.status()).state == "delayed"
        assert await run.cancel() is True
        assert not await parked(app)
        await ended_cancelled(app, run)


@pytest.mark.parametrize("wait", ["300ms", "1h"], ids=["held back", "parked"])
async def test_run_waiting_for_a_retry_is_cancelled(app: Holdfast, seen: Seen, wait: str) -> None:
    """Between two attempts a cancel holds: there is no next attempt."""

    @app.job(retry=Backoff.list([wait]))
    async def flaky() -> None:
        seen.append(1)
        raise ValueError("no")

    async with working(app):
        run = await flaky.enqueue()
        await until(lambda: _is(app, run.id, "failed"), 5, "the first failure")
        assert await run.cancel() is True
        await ended_cancelled(app, run)
        assert not await parked(app)
        await until(lambda: queue_empty(app), 5, "an empty queue")
        assert seen == [1]


async def test_running_run_is_cancelled_inside_its_handler(app: Holdfast, seen: Seen) -> None:
    """A running handler gets a CancelledError, may clean up, and is not tried again."""
    started = asyncio.Event()

    @app.job
    async def slow() -> None:
        started.set()
        try:
            await asyncio.sleep(30)
        finally:
            seen.append("cleaned up")

    async with working(app) as worker:
        run = await slow.enqueue()
        await asyncio.wait_for(started.wait(), 5)
        assert await run.cancel() is True
        assert seen == ["cleaned up"]
        await ended_cancelled(app, run)
        await until(lambda: queue_empty(app), 5, "an empty queue")
        labels = {"group": "default", "job": "slow", "outcome": "cancelled"}
        assert metric(worker, "holdfast_attempts_ended_total", **labels) == 1


async def test_running_run_that_answers_with_an_error_is_cancelled(app: Holdfast) -> None:
    """A handler that turns its cancellation into another error is cancelled all the same."""
    started = asyncio.Event()

    @app.job
    async def rude() -> None:
        started.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise RuntimeError("interrupted") from None

    async with working(app):
        run = await rude.enqueue()
        await asyncio.wait_for(started.wait(), 5)
        assert await run.cancel() is True
        await ended_cancelled(app, run)


async def test_running_run_that_finishes_anyway_is_done(app: Holdfast) -> None:
    """A handler that swallows the cancellation and returns has done its work: cancel says False."""
    started = asyncio.Event()

    @app.job
    async def stubborn() -> str:
        started.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return "finished"
        return "never"

    async with working(app):
        run = await stubborn.enqueue()
        await asyncio.wait_for(started.wait(), 5)
        assert await run.cancel() is False
        assert await run.result(60) == "finished"


async def test_running_run_in_a_thread_is_cancelled_while_the_thread_goes_on(
    app: Holdfast,
) -> None:
    """A thread cannot be stopped, but its run is cancelled at once and its result is dropped."""
    started, go = threading.Event(), threading.Event()

    @app.job
    def blocking() -> str:
        started.set()
        go.wait(10)
        return "too late"

    async with working(app):
        run = await blocking.enqueue()
        assert await asyncio.to_thread(started.wait, 5)
        assert await run.cancel() is True
        go.set()
        await ended_cancelled(app, run)


async def test_running_run_is_found_among_several_workers(app: Holdfast) -> None:
    """Only the holder answers; a worker that does not hold the run stays out of it."""
    started = asyncio.Event()

    @app.job
    async def slow() -> None:
        started.set()
        await asyncio.sleep(30)

    async with working(app), working(app), working(app):
        run = await slow.options(key="the one").enqueue()
        await asyncio.wait_for(started.wait(), 5)
        assert await run.cancel() is True
        await ended_cancelled(app, run)


async def test_run_that_has_ended_is_not_cancelled(app: Holdfast) -> None:
    """Too late is False, and changes nothing; a second cancel of a cancelled run is True."""

    @app.job
    async def work() -> str:
        return "done"

    async with working(app):
        run = await work.enqueue()
        await run.result(60)
        before = await record_of(app, run.id)
        assert await run.cancel() is False
        assert await record_of(app, run.id) == before
        later = await work.options(delay="1h").enqueue()
        assert await later.cancel() is True
        assert await later.cancel() is True


async def test_run_whose_holder_is_gone_is_cancelled(app: Holdfast) -> None:
    """With nobody left to ask, the record itself is cancelled."""

    @app.job
    async def work() -> None: ...

    async with app:
        run = await work.enqueue()
        backend = await client_of(app)
        held = RunRecord("running", "default", "work", node="worker-gone", token="t")
        await backend.runs.put(run.id, runs.encode(held), expected=0)
        assert await run.cancel() is True
        await ended_cancelled(app, run)


async def test_run_of_another_group_is_cancelled_there(app: Holdfast) -> None:
    """A run sent with `group=` is looked for in that group."""

    @app.job
    async def work() -> None: ...

    async with app:
        run = await work.options(group="far", delay="1h", key="k").enqueue()
        assert await run.cancel() is True
        assert not await parked(app)


async def test_run_without_a_record_cannot_be_cancelled(app: Holdfast) -> None:
    """`at_least_once` keeps no record: cancel says so, and what to choose instead."""

    @app.job(delivery="at_least_once")
    async def loose() -> None: ...

    async with app:
        run = await loose.enqueue()
        with pytest.raises(NoRecord, match="effectively_once"):
            await run.cancel()


async def test_cancel_of_many_at_once_holds_for_each(app: Holdfast, seen: Seen) -> None:
    """Cancels race with workers that start the same runs: each run is either done or cancelled."""

    @app.job
    async def quick(ctx: Context, n: int) -> int:
        seen.append(n)
        await asyncio.sleep(0.02)
        return n

    async with working(app, concurrency=5):
        batch = await quick.enqueue_many(range(40))
        cancelled = await asyncio.gather(*(r.cancel() for r in batch))
        for number, (run, held) in enumerate(zip(batch, cancelled, strict=True)):
            if held:
                with pytest.raises(RunCancelled):
                    await run.result(60)
            else:
                assert await run.result(60) == number
        await until(lambda: queue_empty(app), 10, "an empty queue")
        assert any(cancelled)
        assert len(seen) == len(set(seen))


async def _is(app: Holdfast, run: str, state: str) -> bool:
    record = await record_of(app, run)
    return bool(record and record.state == state)
