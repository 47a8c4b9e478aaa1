"""Calling a handler: what it may see of others, and what reaches it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest

from chaos.zoo import ZOO
from holdfast import Context, Holdfast, SyncContext, threads
from holdfast.context import current_run
from holdfast.telemetry import Telemetry
from holdfast.testing import make_context
from holdfast.worker.attempt import Caller

who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


@pytest.fixture
def app() -> Holdfast:
    return Holdfast("shop")


async def call(app: Holdfast, name: str, *args: Any, telemetry: Telemetry | None = None) -> Any:
    job = app.jobs[name]
    caller = Caller(app.middlewares, 2, telemetry or Telemetry())
    try:
        bound = job.signature.decode(job.signature.encode(args, {}))
        started = caller.start(job, "run-1", bound, lambda: make_context(run="run-1"))
        return threads.given(await started.task)
    finally:
        caller.close()


# ---- a task and a context for each call


async def test_calls_keep_their_variables_apart(app: Holdfast) -> None:
    """What a handler sets is seen by itself, by its tasks and over every await; by nobody else."""

    async def look() -> str:
        return who.get()

    @app.job
    async def handler(name: str) -> list[str]:
        assert who.get() == "slot"
        who.set(name)
        await asyncio.sleep(0)
        before = who.get()
        return [before, await asyncio.create_task(look()), who.get()]

    async def slot(names: list[str]) -> list[list[str]]:
        return [await call(app, "handler", name) for name in names]

    who.set("slot")
    one, other = await asyncio.gather(slot(["a", "b"]), slot(["c", "d"]))
    assert [*one, *other] == [[name] * 3 for name in "abcd"]
    assert who.get() == "slot"


async def test_call_has_a_task_to_itself(app: Holdfast) -> None:
    """A handler that keeps its task and cancels it later reaches nothing but its own past."""
    tasks = []

    @app.job
    async def handler() -> None:
        tasks.append(asyncio.current_task())

    await call(app, "handler")
    tasks[0].cancel()
    await call(app, "handler")
    assert len(set(tasks)) == 2
    assert asyncio.current_task() not in tasks


async def test_call_raises_with_the_handlers_own_frames(app: Holdfast) -> None:
    """Exceptions come out as they went in."""

    @app.job
    async def bad() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        await call(app, "bad")
    assert caught.traceback[-1].name == "bad"


async def test_call_is_cancelled_where_it_waits(app: Holdfast) -> None:
    """A cancelled handler cleans up in its own context."""
    started, cleaned = asyncio.Event(), []

    @app.job
    async def handler() -> None:
        who.set("handler")
        try:
            started.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.append(who.get())

    task = asyncio.create_task(call(app, "handler"))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == ["handler"]


async def test_timeouts_inside_a_handler_work(app: Holdfast) -> None:
    """`asyncio.timeout` and task groups find the task that they belong to."""

    @app.job
    async def handler() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            pass
        async with asyncio.TaskGroup() as group:
            task = group.create_task(asyncio.sleep(0, "grouped"))
        return task.result()

    assert await call(app, "handler") == "grouped"


@pytest.mark.parametrize("name", [n for n, a in ZOO.items() if a.fate == "failed"])
async def test_whatever_a_handler_raises_ends_its_call(app: Holdfast, name: str) -> None:
    """No exception is lost on its way: not one that a future refuses, nor one of the loop's own."""
    animal = ZOO[name]
    noted: list[str] = []
    if animal.is_async:

        @app.job(name="wild")
        async def wild() -> Any:
            return await animal.handler(noted.append)
    else:

        @app.job(name="wild")
        def wild_in_a_thread() -> Any:
            return animal.handler(noted.append)

    async with asyncio.timeout(60):
        with pytest.raises(BaseException) as caught:
            await call(app, "wild")
    assert not isinstance(caught.value, TimeoutError)
    assert noted == ["started"]


# ---- threads and middlewares


async def test_plain_handler_runs_in_a_thread_with_its_variables(app: Holdfast) -> None:
    """Context variables travel into the thread, and do not come back out of it."""
    who.set("slot")

    @app.job
    def plain(ctx: SyncContext) -> tuple[str, str, bool]:
        before = who.get()
        who.set("thread")
        main = threading.current_thread() is threading.main_thread()
        return before, current_run.get(), main

    assert await call(app, "plain") == ("slot", "run-1", False)
    assert who.get() == "slot"
    assert current_run.get() == ""


async def test_plain_function_that_returns_a_coroutine_is_awaited(app: Holdfast) -> None:
    """A decorated async handler that looks plain is one all the same."""

    async def real(n: int) -> int:
        return n + 1

    @app.job
    def wrapped(n: int) -> Any:
        return real(n)

    assert await call(app, "wrapped", 1) == 2


async def test_thread_that_outlives_its_cancellation_is_counted(app: Holdfast) -> None:
    """A thread cannot be stopped: the slot goes on, and the metric says how many are left."""
    started, go_on = threading.Event(), threading.Event()
    telemetry = Telemetry()

    def stuck() -> float | None:
        return telemetry.registry.get_sample_value("holdfast_stuck_threads")

    @app.job
    def slow() -> None:
        started.set()
        go_on.wait(10)
        raise ValueError("nobody hears this")

    task = asyncio.create_task(call(app, "slow", telemetry=telemetry))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stuck() == 1
    go_on.set()
    while stuck():
        await asyncio.sleep(0)


async def test_middlewares_wrap_from_the_outside_in(app: Holdfast) -> None:
    """The first that was added is the outermost; each sees the context and the result."""
    order = []

    def add(name: str) -> None:
        @app.middleware
        async def middleware(ctx: Context, call_next: Any) -> Any:
            order.append(f"{name} {ctx.run}")
            return [name, *await call_next()]

    add("outer")
    add("inner")

    @app.job
    async def job() -> list[str]:
        return ["handler"]

    assert await call(app, "job") == ["outer", "inner", "handler"]
    assert order == ["outer run-1", "inner run-1"]


async def test_middleware_may_answer_instead_of_the_handler(app: Holdfast) -> None:
    """A middleware that does not call on decides alone, and no coroutine is left over."""

    @app.middleware
    async def closed(ctx: Context, call_next: Any) -> str:
        return "closed today"

    @app.job
    async def job() -> str:
        raise AssertionError("not called")

    assert await call(app, "job") == "closed today"
