"""The app in memory: the same rules as on a server, on a clock that stands still."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast import Backoff, Context, Discard, Holdfast, Snooze, SyncContext
from holdfast.config import RecordConfig
from holdfast.context import current_run
from holdfast.errors import (
    HoldfastError,
    PayloadTooLarge,
    ResultTimeout,
    RunCancelled,
    RunError,
    RunFailed,
)
from holdfast.testing import FakeClock, memory, memory_app


@pytest.fixture
def app() -> Holdfast:
    return Holdfast("shop")


@pytest.fixture
def seen() -> list[Any]:
    return []


# ---- running


async def test_drain_executes_what_is_due(app: Holdfast) -> None:
    """Nothing happens before drain; then every run that is due has ended, in order."""
    order = []

    @app.job
    async def first(n: int) -> int:
        order.append(n)
        return n

    @app.job(group="other")
    def second(n: int) -> int:
        order.append(n)
        return n

    async with memory(app) as mem:
        jobs: list[Any] = [first, second, first]
        runs = [await job.enqueue(n) for n, job in enumerate(jobs)]
        assert [(await run.status()).state for run in runs] == ["queued"] * 3
        assert await mem.drain() == 3
        assert [(await run.status()).state for run in runs] == ["done"] * 3
        assert await mem.drain() == 0
    assert order == [0, 1, 2]


async def test_result_drains_by_itself(app: Holdfast) -> None:
    """Waiting for a result executes what is due until it is there; also inside a handler."""

    @app.job
    async def inner(n: int) -> int:
        return n + 1

    @app.job
    async def outer() -> int:
        return await (await inner.enqueue(1)).result() + 1

    async with memory(app):
        assert await (await outer.enqueue()).result() == 3


async def test_result_of_what_is_not_due_says_so(app: Holdfast) -> None:
    """The clock stands still, so waiting cannot help: the test is told what to do."""

    @app.job
    async def job() -> None: ...

    async with memory(app):
        run = await job.options(delay="10m").enqueue()
        with pytest.raises(RunError, match=r"due at 2026-01-01T00:10:00.*advance"):
            await run.result()
        with pytest.raises(ResultTimeout):
            await run.result(timeout=1)


async def test_at_by_the_wall_clock_is_due_as_long_from_now(app: Holdfast) -> None:
    """Code under test knows only the wall clock: its instants are moved to the test's clock."""

    @app.job
    async def job(n: int) -> int:
        return n

    async with memory(app) as mem:
        now = await job.options(at=datetime.now(UTC)).enqueue(1)
        past = await job.options(at=datetime.now(UTC) - timedelta(hours=1)).enqueue(2)
        later = await job.options(at=datetime.now(UTC) + timedelta(minutes=5)).enqueue(3)
        await mem.drain()
        assert (await now.result(), await past.result()) == (1, 2)
        assert (await later.status()).state == "delayed"
        await mem.advance("4m")
        assert (await later.status()).state == "delayed"
        await mem.advance("1m")
        assert await later.result() == 3


async def test_delayed_run_starts_when_it_is_due(app: Holdfast, seen: list[Any]) -> None:
    """delay= and at= become due by advancing the clock, and not a second before."""
    clock = FakeClock()

    @app.job
    async def job(n: int) -> None:
        seen.append((n, clock.utc() - start))

    start = clock.utc()
    async with memory(app, clock) as mem:
        run = await job.options(delay="10m").enqueue(1)
        await job.options(at=start + 300).enqueue(2)
        assert (await run.status()).state == "delayed"
        assert await mem.advance("9m") == 1
        assert await mem.advance(59) == 0
        assert await mem.advance(1) == 1
        assert (await run.status()).state == "done"
    assert seen == [(2, 300.0), (1, 600.0)]


async def test_retries_start_when_they_are_due(app: Holdfast) -> None:
    """One long advance goes from attempt to attempt, each at its own time."""
    clock = FakeClock()
    start, starts = clock.utc(), []

    @app.job(retry=Backoff.list(["2s", "1m", "1h"]))
    async def flaky(ctx: Context) -> int:
        starts.append((ctx.attempt, round(clock.utc() - start, 3)))
        if ctx.attempt < 4:
            raise ValueError("no")
        return ctx.attempt

    async with memory(app, clock) as mem:
        run = await flaky.enqueue()
        await mem.drain()
        status = await run.status()
        assert (status.state, status.failures, status.error) == ("failed", 1, "ValueError: no")
        assert mem.next_due is not None
        await mem.advance("1d")
        record = await mem.record(run.id)
    assert starts == [(1, 0.0), (2, 2.0), (3, 62.0), (4, 3662.0)]
    assert record is None  # its hour is over: a keyless run is forgotten


async def test_snooze_does_not_count(app: Holdfast, seen: list[Any]) -> None:
    """A run may come back as often as it likes, whatever its retries."""

    @app.job(retry=Backoff.never())
    async def patient(ctx: Context) -> str:
        seen.append(ctx.attempt)
        if len(seen) < 4:
            raise Snooze("5s" if len(seen) % 2 else "1h")
        return "done"

    async with memory(app) as mem:
        run = await patient.options(key="a").enqueue()
        await mem.advance("3h")
        assert await run.result() == "done"
    assert seen == [1, 1, 1, 1]


async def test_dead_letters_can_be_looked_at(app: Holdfast) -> None:
    """What was given up is there with reason, error, traceback and payload."""

    @app.job(retry=Backoff.never())
    async def bad(n: int) -> None:
        raise KeyError("x")

    @app.job
    async def late(n: int) -> None: ...

    async with memory(app) as mem:
        run = await bad.options(headers={"Tenant": "a"}).enqueue(7)
        await mem.drain()
        with pytest.raises(RunFailed, match="KeyError"):
            await run.result()
        (letter,) = mem.dead
        assert (letter.run, letter.job, letter.group) == (run.id, "bad", "default")
        assert (letter.reason, letter.error, letter.payload) == ("failed", "KeyError: 'x'", 7)
        assert 'raise KeyError("x")' in letter.traceback
        assert letter.headers["Tenant"] == "a"
        assert [type(error) for error in mem.raised] == [KeyError]


async def test_discard_ends_a_run_without_a_dead_letter(app: Holdfast) -> None:
    """Given up on purpose: the result says so, and there is nothing to look after."""

    @app.job
    async def unwanted() -> None:
        raise Discard("sold out")

    async with memory(app) as mem:
        with pytest.raises(RunCancelled, match="sold out"):
            await (await unwanted.enqueue()).result()
        assert mem.dead == []


async def test_timeout_is_a_failed_attempt(app: Holdfast, seen: list[Any]) -> None:
    """Timeouts pass in real time, and the retry comes as with any failure."""

    @app.job(timeout="20ms", retry=Backoff.list(["1s"]))
    async def slow(ctx: Context) -> str:
        seen.append(ctx.attempt)
        if ctx.attempt == 1:
            await asyncio.sleep(60)
        return "done"

    async with memory(app) as mem:
        run = await slow.enqueue()
        await mem.drain()
        assert "longer than 20ms" in (await run.status()).error
        await mem.advance(1)
        assert await run.result() == "done"


# ---- repeats


async def test_known_key_is_a_duplicate(app: Holdfast, seen: list[Any]) -> None:
    """The same key runs once: queued, ended, and long after the server's window has passed."""

    @app.job
    async def job() -> None:
        seen.append(1)

    async with memory(app) as mem:
        first = await job.options(key="order 1").enqueue()
        assert (await job.options(key="order 1").enqueue()).duplicate
        await mem.drain()
        assert (await job.options(key="order 1").enqueue()).duplicate
        await mem.advance("1h")
        late = await job.options(key="order 1").enqueue()
        assert (late.duplicate, late.state) == (True, "done")  # the record still knows it
        await mem.drain()
        assert late.id == first.id
        await mem.advance("25h")
        await job.options(key="order 1").enqueue()
        await mem.drain()
    assert len(seen) == 2


async def test_delayed_key_is_known_while_it_waits(app: Holdfast, seen: list[Any]) -> None:
    """A delayed run's key is known as long as it waits, beyond the window too."""

    @app.job
    async def job() -> None:
        seen.append(1)

    async with memory(app) as mem:
        await job.options(key="a", delay="1d").enqueue()
        await mem.advance("23h")
        assert (await job.options(key="a", delay="1d").enqueue()).duplicate
        await mem.advance("1d")
    assert len(seen) == 1


async def test_ids_of_the_window_are_forgotten(app: Holdfast, seen: list[Any]) -> None:
    """An event with the same id is one event within the window, for every subscriber."""

    @app.job(on="paid")
    async def ship(data: dict[str, int]) -> None:
        seen.append(data["order"])

    records = RecordConfig(dedup_window_seconds=10, keyed_ttl_seconds=10, keyless_ttl_seconds=10)
    async with memory(app, records=records) as mem:
        for _ in range(3):
            await app.publish("paid", {"order": 1}, id="paid-1")
        await mem.drain()
        await mem.advance("9s")
        await app.publish("paid", {"order": 1}, id="paid-1")
        assert await mem.drain() == 0
        assert len(mem.events) == 1
        await mem.advance("10s")
        await app.publish("paid", {"order": 1}, id="paid-1")
        await mem.drain()
    assert seen == [1, 1]


# ---- events


async def test_events_reach_every_subscriber(app: Holdfast, seen: list[Any]) -> None:
    """Each subscribing job gets its own copy; a retry of the publisher repeats nothing."""

    @app.job(retry=Backoff.list([1]))
    async def order(ctx: Context) -> None:
        await ctx.publish("ordered", {"id": 1})
        if ctx.attempt == 1:
            raise ValueError("after the event")

    @app.job(on="ordered")
    async def mail(ctx: Context, data: dict[str, int]) -> None:
        seen.append(("mail", data["id"]))

    @app.job(on=["ordered", "reordered"], group="warehouse")
    def pack(ctx: SyncContext, data: dict[str, int]) -> None:
        seen.append(("pack", data["id"]))
        ctx.publish("packed", data)

    async with memory(app) as mem:
        run = await order.enqueue()
        await mem.advance(5)
        assert sorted(seen) == [("mail", 1), ("pack", 1)]
        assert [(e.event, e.data) for e in mem.events] == [
            ("ordered", {"id": 1}),
            ("packed", {"id": 1}),
        ]
        assert mem.events[0].cause == run.id


async def test_runs_know_their_cause(app: Holdfast) -> None:
    """What a handler enqueues names its run as the cause."""

    @app.job
    async def inner() -> str:
        return current_run.get()

    @app.job
    async def outer() -> str:
        return (await inner.enqueue()).id

    async with memory(app) as mem:
        run = await outer.enqueue()
        await mem.drain()
        child = await mem.record(await run.result())
        assert child is not None
        assert child.cause == run.id


# ---- the app around it


async def test_hooks_and_middlewares_work_as_in_a_worker(app: Holdfast, seen: list[Any]) -> None:
    """Start-up before the first run, shut-down after the last, middlewares around each."""

    @app.on_startup
    async def start() -> None:
        seen.append("start")

    @app.on_shutdown
    def stop() -> None:
        seen.append("stop")

    @app.middleware
    async def around(ctx: Context, call_next: Any) -> Any:
        seen.append(f"before {ctx.job}")
        result = await call_next()
        seen.append(f"after {ctx.job}")
        return result + 1

    @app.job
    def job() -> int:
        return 1

    async with memory(app):
        assert await (await job.enqueue()).result() == 2
    assert seen == ["start", "before job", "after job", "stop"]


async def test_group_that_nobody_serves_waits(app: Holdfast) -> None:
    """A run sent to another group stays there, as it would without a worker for it."""

    @app.job
    async def job() -> None: ...

    async with memory(app) as mem:
        run = await job.options(group="elsewhere").enqueue()
        assert await mem.drain() == 0
        assert (await run.status()).state == "queued"


async def test_result_outlives_the_record(app: Holdfast) -> None:
    """After its TTL a run is neither queued nor recorded; the history has its result."""

    @app.job
    async def job() -> int:
        return 1

    async with memory(app) as mem:
        run = await job.enqueue()
        await mem.drain()
        await mem.advance("2h")
        assert await mem.record(run.id) is None
        assert (await run.status()).state == "done"
        assert await run.result() == 1


async def test_large_values_behave_as_on_the_server(app: Holdfast) -> None:
    """A payload that no message carries is refused; a large result comes back whole."""

    @app.job
    async def echo(size: int) -> str:
        return "x" * size

    @app.job
    async def take(text: str) -> None: ...

    async with memory(app):
        with pytest.raises(PayloadTooLarge):
            await take.enqueue("x" * 1_100_000)
        assert len(await (await echo.enqueue(600_000)).result()) == 600_000


async def test_drain_gives_up_on_a_job_without_an_end(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that enqueues itself at once is an error, not a test that hangs."""
    monkeypatch.setattr(memory_app, "MOST_ATTEMPTS", 100)

    @app.job(delivery="at_least_once")
    async def again() -> None:
        await again.enqueue()

    async with memory(app) as mem:
        await again.enqueue()
        with pytest.raises(HoldfastError, match="100 attempts"):
            await mem.drain()


async def test_leaving_stops_what_is_still_running(app: Holdfast) -> None:
    """A test that fails in the middle leaves no task behind, and gives the app back."""

    @app.job
    async def slow() -> None:
        await asyncio.sleep(60)

    async with memory(app) as mem:
        await slow.enqueue()
        draining = asyncio.create_task(mem.drain())
        await asyncio.sleep(0)
    await asyncio.gather(draining, return_exceptions=True)
    assert app.replace_backend(None) is None
    assert asyncio.all_tasks() == {asyncio.current_task()}
