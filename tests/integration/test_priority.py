"""Priorities: who starts first when places are scarce, and nobody starves."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from holdfast import Backoff, Holdfast
from holdfast.errors import DefinitionError, InvalidInput
from holdfast.status.jobs import Jobs, Purger
from holdfast.status.listing import RunFilter
from holdfast.status.runs import Runs
from tests.integration.support import broker_of, client_of, until, working


async def test_high_run_overtakes_what_waits(app: Holdfast) -> None:
    """With one place and a long queue, a high run is among the next."""
    began: list[str] = []

    @app.job
    async def work(name: str) -> None:
        began.append(name)
        await asyncio.sleep(0.01)

    async with app:
        await work.options(priority="high").enqueue("first")
        await work.enqueue_many([work.request(f"n{n}") for n in range(100)])
        async with working(app, concurrency=1):
            await until(lambda: "first" in began and len(began) > 3)
            before = len(began)
            await work.options(priority="high").enqueue("high")
            await until(lambda: len(began) == 102)
    assert before <= began.index("high") < before + 30


async def test_every_priority_gets_its_share(app: Holdfast) -> None:
    """While all wait: low gets its share, and of the rest four in five are high."""
    began: list[str] = []

    @app.job
    async def work(name: str) -> None:
        began.append(name)
        await asyncio.sleep(0.005)

    async with app:
        for priority in ("high", "normal", "low"):
            sent = [work.options(priority=priority).request(priority) for _ in range(300)]
            await app.enqueue_many(sent)
        async with working(app, concurrency=2, low_share=0.2):
            await until(lambda: len(began) >= 260)
    shares = Counter(began[60:260])
    assert 15 <= shares["low"] <= 80, shares
    assert shares["high"] > shares["normal"] > 0, shares


async def test_retry_keeps_its_priority(app: Holdfast) -> None:
    """Its next attempt waits in the queue of the same priority, after short waits and long ones."""
    seen: list[str] = []

    @app.job(retry=Backoff.linear("300ms", "300ms", 2))
    async def work() -> None:
        seen.append("once")
        raise ValueError("always")

    async with app, working(app, short_wait_seconds=0.0):
        broker = await broker_of(app)
        subjects: list[str] = []

        async def heard(message: object) -> None:
            subjects.append(message.subject)  # type: ignore[attr-defined]

        await broker.subscribe(broker.names.job("*", "*", "*"), heard)
        await work.options(priority="low").enqueue()
        await until(lambda: len(seen) == 2)
    assert seen == ["once", "once"]
    assert set(subjects) == {broker.names.job("default", "work", "low")}


async def test_job_has_a_priority_itself(app: Holdfast) -> None:
    """Whoever sends to its own queue, also an old sender, gets the job's priority."""
    began: list[str] = []

    @app.job(priority="high")
    async def urgent(name: str) -> None:
        began.append(f"urgent-{name}")

    @app.job(priority="low")
    async def cleanup(name: str) -> None:
        began.append(f"cleanup-{name}")
        await asyncio.sleep(0.01)

    async with app:
        await cleanup.enqueue_many([cleanup.request(str(n)) for n in range(40)])
        async with working(app, concurrency=1):
            await until(lambda: len(began) > 2)
            await urgent.enqueue("1")
            await until(lambda: len(began) == 41)
        names = (await broker_of(app)).names
        counts = await (await broker_of(app)).api(
            f"STREAM.INFO.{names.jobs}", {"subjects_filter": names.job("*", "*", "*")}
        )
    assert began.index("urgent-1") < 35
    assert not counts["state"].get("subjects")


async def test_prioritized_runs_are_shown_counted_and_purged(app: Holdfast) -> None:
    """They are listed, found by their id, are lag, and a purge removes them."""

    @app.job
    async def work(number: int) -> None: ...

    async with app:
        async with working(app):
            pass  # its own queue has a consumer, the others have none yet
        high = await work.options(priority="high").enqueue(1)
        await work.options(priority="low").enqueue(2)
        await work.enqueue(3)
        client = await client_of(app)
        runs = Runs(client)
        assert len(await runs.list(RunFilter(job="work", state="queued"), 10)) == 3
        assert len(await runs.list(RunFilter(state="queued"), 10)) == 3
        assert (await high.status()).state == "queued"
        assert (await runs.find(high.id)).carrier is not None
        jobs = Jobs(client)
        assert [one.waiting for one in await jobs.list("work")] == [3]
        assert await Purger(client).waiting("default", "work") == 3
        assert [one.waiting for one in await jobs.list("work")] == [0]


def test_unknown_priority_is_refused(app: Holdfast) -> None:
    """Before anything is sent, with the words that there are."""

    @app.job
    async def work() -> None: ...

    with pytest.raises(InvalidInput, match="high, normal, low"):
        work.options(priority="urgent").request()  # type: ignore[arg-type]
    with pytest.raises(DefinitionError, match="high, normal, low"):

        @app.job(priority="urgent")  # type: ignore[call-overload]
        async def wrong() -> None: ...
