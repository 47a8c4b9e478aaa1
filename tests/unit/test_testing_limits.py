"""Limits, order, debounce and priorities in `holdfast.testing.memory`: the same as on a server."""

from __future__ import annotations

import pytest

from holdfast import Backoff, Holdfast, Limit
from holdfast.errors import RunCancelled
from holdfast.testing import memory


async def test_starts_follow_the_clock_of_the_test() -> None:
    """Two at once, then one a second."""
    app, began = Holdfast("shop"), []

    @app.job(limits=[Limit(starts="1/s", burst=2)])
    async def call(number: int) -> None:
        began.append(number)

    async with memory(app) as mem:
        runs = [await call.enqueue(n) for n in range(5)]
        await mem.drain()
        assert began == [0, 1]
        assert (await runs[2].status()).state == "waiting"
        await mem.advance("1s")
        assert began == [0, 1, 2]
        await mem.advance("2s")
        assert began == [0, 1, 2, 3, 4]
        assert mem.next_due is None


async def test_full_limit_makes_a_run_wait_or_drops_it() -> None:
    """A handler that starts another run of its own key finds the limit full."""
    app = Holdfast("shop")

    @app.job(limits=[Limit(running=1, per="doc")])
    async def index(doc: str, again: bool) -> str:
        if again:
            inner = await index.enqueue(doc, False)
            await mem.step()
            return (await inner.status()).state
        return "inner"

    @app.job(limits=[Limit(running=1, per="doc", when_full="drop")])
    async def render(doc: str, again: bool) -> str:
        if again:
            inner = await render.enqueue(doc, False)
            await mem.step()
            return (await inner.status()).state
        return "inner"

    async with memory(app) as mem:
        outer = await index.enqueue("a", True)
        await mem.drain()
        assert await outer.result() == "waiting"
        dropped = await render.enqueue("a", True)
        await mem.drain()
        assert await dropped.result() == "cancelled"


async def test_ordered_run_is_not_overtaken_by_the_next() -> None:
    """The retry keeps its place; when it is cancelled, the next one starts."""
    app, began = Holdfast("shop"), []

    @app.job(
        retry=Backoff.linear("1m", "1m", 3),
        limits=[Limit(running=1, per="order", ordered=True)],
    )
    async def move(order: str, number: int) -> None:
        began.append(number)
        if number == 1:
            raise ValueError("not yet")

    async with memory(app) as mem:
        first = await move.enqueue("a", 1)
        await move.enqueue("a", 2)
        await mem.drain()
        assert began == [1]
        await mem.advance("1m")
        assert began == [1, 1]
        assert await first.cancel()
        await mem.drain()
        assert began == [1, 1, 2]


async def test_last_of_a_burst_runs_once_it_is_quiet() -> None:
    """The others end as cancelled; each key has its own burst, and a burst has a longest time."""
    app, saved = Holdfast("shop"), []

    @app.job(debounce="5s", per="doc", at_latest="12s")
    async def save(doc: str, version: int) -> int:
        saved.append((doc, version))
        return version

    async with memory(app) as mem:
        runs = []
        for version in range(1, 4):
            runs.append(await save.enqueue("a", version))
            await mem.advance("2s")
        other = await save.enqueue("b", 1)
        await mem.drain()
        assert saved == []
        assert (await runs[2].status()).state == "delayed"
        await mem.advance("5s")
        assert saved == [("a", 3), ("b", 1)]
        assert [(await run.status()).state for run in runs] == ["cancelled", "cancelled", "done"]
        assert await other.result() == 1
        with pytest.raises(RunCancelled, match="debounced"):
            await runs[0].result()
        began = mem.clock.utc()
        for version in range(10, 20):
            await save.enqueue("c", version)
            await mem.advance("3s")
        assert saved[2][0] == "c"
        assert mem.clock.utc() - began == 30


async def test_high_runs_first() -> None:
    """Of what is due, the highest priority runs first; retries keep theirs."""
    app, began = Holdfast("shop"), []

    @app.job(retry=Backoff.linear("1m", "1m", 2))
    async def work(name: str) -> None:
        began.append(name)
        if began.count(name) == 1 and name == "low":
            raise ValueError("again")

    async with memory(app) as mem:
        await work.options(priority="low").enqueue("low")
        await work.enqueue("normal")
        await work.options(priority="high").enqueue("high")
        await mem.drain()
        assert began == ["high", "normal", "low"]
        mem.clock.advance(60)
        await work.enqueue("later")
        await mem.drain()
        assert began[3:] == ["later", "low"]
