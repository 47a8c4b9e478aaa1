"""Around a run: middlewares, hooks, context variables, the logger, progress, ownership."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import Any

import msgspec
import pytest

from holdfast import Backoff, Context, Holdfast, SyncContext
from holdfast.errors import DefinitionError, RunFailed
from holdfast.model import run as runs
from tests.integration.support import Seen, client_of, metric, record_of, until, working

tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")


# ---- middlewares


async def test_middlewares_wrap_in_the_order_they_were_added(app: Holdfast, seen: Seen) -> None:
    """The first is the outermost; each sees the run, its result, and what the others left."""

    @app.middleware
    async def outer(ctx: Context, call_next: Any) -> Any:
        seen.append(f"outer {ctx.job} {ctx.attempt}")
        ctx.state["tenant"] = "acme"
        result = await call_next()
        seen.append(f"outer got {result}")
        return result + 1

    @app.middleware
    async def inner(ctx: Context, call_next: Any) -> Any:
        seen.append(f"inner {ctx.state['tenant']}")
        return await call_next() * 10

    @app.job
    async def work(ctx: Context, n: int) -> int:
        seen.append(f"work {ctx.state['tenant']}")
        return n

    async with working(app):
        assert await (await work.enqueue(4)).result(60) == 41
        assert seen == ["outer work 1", "inner acme", "work acme", "outer got 40"]


async def test_middleware_may_answer_instead_of_the_handler(app: Holdfast) -> None:
    """One that does not call on gives the result itself: the handler never starts."""

    @app.middleware
    async def cache(ctx: Context, call_next: Any) -> Any:
        return "cached"

    @app.job
    async def work() -> str:
        raise AssertionError("must not run")

    async with working(app):
        assert await (await work.enqueue()).result(60) == "cached"


async def test_middleware_sees_errors_and_may_change_them(app: Holdfast, seen: Seen) -> None:
    """What the handler raises passes through: to be watched, rescued, or changed."""

    @app.middleware
    async def rescue(ctx: Context, call_next: Any) -> Any:
        try:
            return await call_next()
        except KeyError as error:
            seen.append(repr(error))
            return "rescued"
        except ValueError:
            raise RuntimeError("another") from None

    @app.job(retry=Backoff.never())
    async def work(how: str) -> str:
        if how == "key":
            raise KeyError("x")
        raise ValueError("x")

    async with working(app):
        assert await (await work.enqueue("key")).result(60) == "rescued"
        with pytest.raises(RunFailed, match="RuntimeError: another"):
            await (await work.enqueue("value")).result(60)
        assert seen == ["KeyError('x')"]


async def test_middleware_may_use_the_context_of_a_sync_handler(app: Holdfast, seen: Seen) -> None:
    """A middleware is async whatever the handler is: its context can be awaited."""

    @app.middleware
    async def watch(ctx: Context, call_next: Any) -> Any:
        assert isinstance(ctx, Context)
        await ctx.progress(0.25, "before")
        ctx.state["n"] = 7
        assert await ctx.still_owner()
        return await call_next()

    @app.job
    def work(ctx: SyncContext) -> int:
        assert isinstance(ctx, SyncContext)
        return int(ctx.state["n"])

    async with working(app):
        run = await work.enqueue()
        assert await run.result(60) == 7
        record = await record_of(app, run.id)
        assert record is not None
        assert record.progress is not None
        assert record.progress.note == "before"


async def test_middleware_runs_for_every_attempt(app: Holdfast, seen: Seen) -> None:
    """A retry is a new attempt, wrapped again."""

    @app.middleware
    async def count(ctx: Context, call_next: Any) -> Any:
        seen.append(ctx.attempt)
        return await call_next()

    @app.job(retry=Backoff.list(["10ms"]))
    async def work(ctx: Context) -> None:
        if ctx.attempt == 1:
            raise ValueError("no")

    async with working(app):
        await (await work.enqueue()).result(60)
        assert seen == [1, 2]


def test_middleware_that_is_not_async_is_refused(app: Holdfast) -> None:
    """A plain function cannot wait for the handler: refused where it is defined."""
    with pytest.raises(DefinitionError, match="async"):

        @app.middleware
        def wrong(ctx: Context, call_next: Any) -> Any:
            return call_next()


# ---- hooks


async def test_hooks_run_once_around_the_work(app: Holdfast, seen: Seen) -> None:
    """Start-up hooks come before the first run and shut-down hooks after the last, in order."""

    @app.on_startup
    async def connect() -> None:
        await asyncio.sleep(0)
        seen.append("connect")

    @app.on_startup
    def warm_up() -> None:
        seen.append("warm up")

    @app.on_shutdown
    def tell() -> None:
        seen.append("tell")

    @app.on_shutdown
    async def disconnect() -> None:
        seen.append("disconnect")

    @app.job
    async def work() -> None:
        seen.append("work")

    async with app:
        run = await work.enqueue()
        async with working(app):
            await run.result(60)
    assert seen == ["connect", "warm up", "work", "tell", "disconnect"]


async def test_hook_may_enqueue(app: Holdfast, seen: Seen) -> None:
    """A start-up hook can send runs through the worker's own connection."""

    @app.job
    async def work(n: int) -> None:
        seen.append(n)

    @app.on_startup
    async def kick_off() -> None:
        await work.enqueue(1)

    async with working(app):
        assert await seen.wait() == [1]


async def test_failing_startup_hook_ends_the_worker_before_any_run(
    app: Holdfast, seen: Seen
) -> None:
    """A worker that cannot be set up takes nothing, and says why."""

    @app.on_startup
    async def connect() -> None:
        raise OSError("no database")

    @app.job
    async def work() -> None:
        seen.append(1)

    async with app:
        run = await work.enqueue()
        with pytest.raises(OSError, match="no database"):
            async with working(app):
                pass
        assert (await run.status()).state == "queued"
        assert seen == []


# ---- context variables


async def test_context_variables_do_not_leak_between_runs(app: Holdfast, seen: Seen) -> None:
    """What one run sets, the next one in the same slot or thread does not see."""

    @app.job
    async def coroutine(name: str) -> str:
        before = tenant.get()
        tenant.set(name)
        await asyncio.sleep(0)
        assert tenant.get() == name
        return before

    @app.job
    def thread(name: str) -> str:
        before = tenant.get()
        tenant.set(name)
        return before

    async with working(app, concurrency=1):
        for job in (coroutine, thread, coroutine, thread):
            assert await (await job.enqueue("acme")).result(60) == "nobody"
        assert tenant.get() == "nobody"


async def test_context_variables_of_a_middleware_reach_the_handler(app: Holdfast) -> None:
    """A middleware's context variables are seen by coroutines, tasks and threads below it."""

    @app.middleware
    async def who(ctx: Context, call_next: Any) -> Any:
        tenant.set(ctx.headers["Tenant"])
        return await call_next()

    async def below() -> str:
        return tenant.get()

    @app.job
    async def coroutine() -> str:
        return await asyncio.create_task(below())

    @app.job
    def thread() -> str:
        return tenant.get()

    async with working(app, concurrency=2):
        for job in (coroutine, thread):
            batch = [await job.options(headers={"Tenant": t}).enqueue() for t in ("a", "b", "c")]
            assert [await r.result(60) for r in batch] == ["a", "b", "c"]


# ---- telling


async def test_logger_carries_the_fields_of_the_run(
    app: Holdfast, caplog: pytest.LogCaptureFixture
) -> None:
    """Every line of `ctx.logger` has run, job, attempt, node and epoch, and the caller's own."""

    @app.job
    async def work(ctx: Context) -> int:
        ctx.logger.warning("hello %s", "you", extra={"order": 7})
        return ctx.epoch

    async with working(app) as worker:
        with caplog.at_level(logging.INFO):
            run = await work.enqueue()
            epoch = await run.result(60)
        [line] = [r for r in caplog.records if r.getMessage() == "hello you"]
        fields = {n: getattr(line, n) for n in ("run", "job", "attempt", "node", "epoch", "order")}
        assert fields == {
            "run": run.id,
            "job": "work",
            "attempt": 1,
            "node": worker.node,
            "epoch": epoch,
            "order": 7,
        }


async def test_progress_is_seen_from_outside(app: Holdfast) -> None:
    """`status()` shows what the running handler last said; the last word is always kept."""
    steps = [asyncio.Event(), asyncio.Event()]

    @app.job
    async def work(ctx: Context) -> None:
        await ctx.progress(0.1, "started")
        await ctx.progress(0.2, "too soon after the first")
        await steps[0].wait()
        await ctx.progress(1, "finished")
        await steps[1].wait()

    async with working(app):
        run = await work.enqueue()
        status = await until(lambda: _progress(run, 0.1), 5, "the first word")
        assert (status.state, status.progress.note) == ("running", "started")
        assert status.progress.at > 0
        steps[0].set()
        await until(lambda: _progress(run, 1), 5, "the last word")
        steps[1].set()
        await run.result(60)
        assert (await run.status()).progress.note == "finished"


async def test_progress_of_many_tasks_at_once_is_no_conflict(app: Holdfast) -> None:
    """A handler whose tasks all tell their progress still owns its run."""

    @app.job
    async def work(ctx: Context) -> bool:
        await asyncio.gather(*(ctx.progress(1, str(n)) for n in range(10)), ctx.still_owner())
        left = asyncio.create_task(ctx.progress(1, "on its way when the handler returns"))
        await asyncio.sleep(0)
        del left
        return await ctx.still_owner()

    async with working(app) as worker:
        assert await (await work.enqueue()).result(60) is True
        assert metric(worker, "holdfast_fenced_writes_total", what="settle") == 0


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), "half"])
async def test_progress_that_is_no_fraction_is_refused(app: Holdfast, fraction: Any) -> None:
    """Progress is between 0 and 1; anything else is the handler's error."""

    @app.job(retry=Backoff.never())
    async def work(ctx: Context) -> None:
        await ctx.progress(fraction)

    async with working(app):
        with pytest.raises(RunFailed, match=r"progress|Error"):
            await (await work.enqueue()).result(60)


async def test_handler_that_was_replaced_is_refused(app: Holdfast, seen: Seen) -> None:
    """A holder that lost its claim is told so, and nothing it writes is accepted."""
    taken = asyncio.Event()

    @app.job
    async def work(ctx: Context) -> str:
        seen.append(await ctx.still_owner())
        await taken.wait()
        seen.append(await ctx.still_owner())
        for act in (lambda: ctx.progress(1), lambda: ctx.publish("late")):
            try:
                seen.append(await act())
            except Exception as error:  # noqa: BLE001 - reported to the test
                seen.append(type(error).__name__)
        return "stale"

    async with app, working(app) as worker:
        run = await work.enqueue()
        await seen.wait()
        record = await record_of(app, run.id)
        assert record is not None
        backend = await client_of(app)
        entry = await backend.runs.get(run.id)
        assert entry is not None
        other = msgspec.structs.replace(record, node="worker-other", token="other.1")
        await backend.runs.put(run.id, runs.encode(other), expected=entry.revision)
        taken.set()
        await seen.wait(4)
        assert seen == [True, False, "ClaimLost", "ClaimLost"]
        fenced = lambda: metric(worker, "holdfast_fenced_writes_total", what="settle")  # noqa: E731
        await until(fenced, 5, "the refused settle")
        assert await record_of(app, run.id) == other


async def _progress(run: Any, fraction: float) -> Any:
    status = await run.status()
    return status if status.progress and status.progress.fraction == fraction else None
