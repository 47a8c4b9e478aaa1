"""Eager mode: enqueued is executed."""

from __future__ import annotations

import pytest

from holdfast import Backoff, Context, Discard, Holdfast, Snooze
from holdfast.errors import HoldfastError, InvalidPayload, RunCancelled, RunFailed
from holdfast.testing import FakeClock, eager, eager_mode, memory


@pytest.fixture
def app() -> Holdfast:
    return Holdfast("shop")


async def test_enqueue_executes_in_place(app: Holdfast) -> None:
    """The run has ended when enqueue returns, with a delay too, and so has all that it causes."""
    seen = []

    @app.job(on="ordered")
    def mail(data: dict[str, int]) -> None:
        seen.append(data["id"])

    @app.job
    async def order(ctx: Context, id: int) -> str:
        await ctx.publish("ordered", {"id": id})
        return f"order {id}"

    with eager(app):
        run = await order.options(delay="10m").enqueue(1)
        assert seen == [1]
        assert (await run.status()).state == "done"
        assert await run.result() == "order 1"
        runs = await order.enqueue_many([2, 3])
        assert [await r.result() for r in runs] == ["order 2", "order 3"]
        await app.publish("ordered", {"id": 4})
    assert seen == [1, 2, 3, 4]


async def test_enqueue_inside_a_handler_executes_in_place(app: Holdfast) -> None:
    """A handler that enqueues and waits for the result does not wait for ever."""

    @app.job
    async def inner(n: int) -> int:
        return n + 1

    @app.job
    async def outer() -> int:
        return await (await inner.enqueue(1)).result() + 1

    with eager(app):
        assert await (await outer.enqueue()).result() == 3


async def test_retries_happen_at_once(app: Holdfast) -> None:
    """Every wait of the policy is skipped: a clock of its own moves instead."""
    clock = FakeClock()
    start, starts = clock.utc(), []

    @app.job(retry=Backoff.list(["1s", "1h"]))
    async def flaky(ctx: Context) -> int:
        starts.append(round(clock.utc() - start))
        if len(starts) == 1:
            raise Snooze("1d")
        if len(starts) < 4:
            raise ValueError("no")
        return ctx.attempt

    with eager(app, clock=clock):
        assert await (await flaky.enqueue()).result() == 3
    assert starts == [0, 86_400, 86_401, 90_001]


async def test_a_run_that_never_ends_is_an_error(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that snoozes for ever does not hang the test."""
    monkeypatch.setattr(eager_mode, "MOST_ATTEMPTS", 100)

    @app.job
    async def lazy() -> None:
        raise Snooze("1m")

    with eager(app), pytest.raises(HoldfastError, match="snooze itself"):
        await lazy.enqueue()


async def test_a_handler_that_fails_is_recorded(app: Holdfast) -> None:
    """As on a worker: enqueue does not raise, the result does, and the dead letter is there."""

    @app.job(retry=Backoff.list([1, 1]))
    async def bad() -> None:
        raise KeyError("x")

    @app.job
    async def unwanted() -> None:
        raise Discard("not today")

    with eager(app) as mem:
        run = await bad.enqueue()
        assert (await run.status()).failures == 3
        with pytest.raises(RunFailed, match="KeyError: 'x'"):
            await run.result()
        assert [letter.reason for letter in mem.dead] == ["failed"]
        with pytest.raises(RunCancelled, match="not today"):
            await (await unwanted.enqueue()).result()


async def test_raise_errors_raises_what_the_handler_raised(app: Holdfast) -> None:
    """The first failed attempt is the test's own exception, from inside a handler too."""
    attempts = []

    @app.job
    async def bad() -> None:
        attempts.append(1)
        raise KeyError("x")

    @app.job
    async def outer() -> None:
        await bad.enqueue()

    @app.job
    async def unwanted() -> None:
        raise Discard("not today")

    with eager(app, raise_errors=True):
        await unwanted.enqueue()
        with pytest.raises(KeyError):
            await bad.enqueue()
        assert attempts == [1]
        with pytest.raises(KeyError):
            await outer.enqueue()


async def test_payloads_are_validated_at_the_call(app: Holdfast) -> None:
    """What a worker would refuse is refused where it was written."""

    @app.job
    async def add(a: int, b: int) -> int:
        return a + b

    with eager(app), pytest.raises(InvalidPayload):
        await app.enqueue("add", 1, "2")


async def test_leaving_gives_the_app_back(app: Holdfast) -> None:
    """Modes nest, and the app goes on as before, also after an exception."""

    @app.job
    async def add() -> int:
        return 1

    async with memory(app) as mem:
        with pytest.raises(RuntimeError), eager(app):
            raise RuntimeError
        run = await add.enqueue()
        assert (await run.status()).state == "queued"
        await mem.drain()
    assert app.replace_backend(None) is None
