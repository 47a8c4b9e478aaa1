"""Calling a handler: what it may see of others, and what reaches it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from holdfast import Context, Holdfast, SyncContext
from holdfast.context import current_run
from holdfast.telemetry import Telemetry
from holdfast.testing import make_context
from holdfast.worker.calling import Caller, InContext

who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


async def in_context(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return await InContext(coroutine, contextvars.copy_context())


# ---- a context of its own


async def test_in_context_keeps_variables_apart() -> None:
    """What a handler sets is seen by itself, by its tasks and over every await; by nobody else."""

    async def look() -> str:
        return who.get()

    async def handler(name: str) -> list[str]:
        who.set(name)
        await asyncio.sleep(0)
        before = who.get()
        return [before, await asyncio.create_task(look()), who.get()]

    async def slot(names: list[str]) -> list[list[str]]:
        return [await in_context(handler(name)) for name in names]

    who.set("slot")
    one, other = await asyncio.gather(slot(["a", "b"]), slot(["c", "d"]))
    assert [*one, *other] == [[name] * 3 for name in "abcd"]
    assert who.get() == "slot"


async def test_in_context_begins_with_what_was_set_outside() -> None:
    """A worker's own variables, such as those of its start-up hooks, are seen."""
    who.set("worker")

    async def handler() -> str:
        return who.get()

    assert await in_context(handler()) == "worker"


async def test_in_context_returns_and_raises_as_await_does() -> None:
    """Values and exceptions come out as they went in, with the handler's own frames."""

    async def good() -> str:
        await asyncio.sleep(0)
        return "value"

    async def bad() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    assert await in_context(good()) == "value"
    with pytest.raises(KeyError) as caught:
        await in_context(bad())
    assert caught.traceback[-1].name == "bad"


async def test_in_context_hands_exceptions_in() -> None:
    """What the awaited thing raises comes up at the handler's own await, to be caught there."""
    failing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def handler() -> str:
        try:
            await failing
        except ValueError as error:
            await asyncio.sleep(0)
            return f"caught {error} as {who.get()}"
        return "nothing"

    async def slot() -> Any:
        who.set("slot")
        return await in_context(handler())

    task = asyncio.create_task(slot())
    await asyncio.sleep(0)
    failing.set_exception(ValueError("x"))
    assert await task == "caught x as slot"


async def test_in_context_delivers_a_cancellation() -> None:
    """A handler is cancelled where it waits, and cleans up in its own context."""
    started, cleaned = asyncio.Event(), []

    async def handler() -> None:
        who.set("handler")
        try:
            started.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.append(who.get())

    task = asyncio.create_task(in_context(handler()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == ["handler"]


async def test_in_context_lets_a_handler_swallow_its_cancellation() -> None:
    """As in asyncio: who catches the cancellation goes on, and its value counts."""
    started = asyncio.Event()

    async def handler() -> str:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "went on"
        return "slept"

    task = asyncio.create_task(in_context(handler()))
    await started.wait()
    task.cancel()
    assert await task == "went on"


async def test_in_context_lets_timeouts_inside_a_handler_work() -> None:
    """`asyncio.timeout` and task groups find the task that they belong to."""

    async def handler() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            pass
        async with asyncio.TaskGroup() as group:
            task = group.create_task(asyncio.sleep(0, "grouped"))
        return task.result()

    assert await in_context(handler()) == "grouped"


def test_in_context_closes_the_handler_with_itself() -> None:
    """When the loop throws the slot away, the handler's own `finally` runs, once."""
    ended = []

    class Never:
        def __await__(self) -> Any:
            yield None

    async def handler() -> None:
        try:
            await Never()
        finally:
            ended.append("closed")

    outer = InContext(handler(), contextvars.copy_context()).__await__()
    next(outer)
    outer.close()
    assert ended == ["closed"]


# ---- threads and middlewares


@pytest.fixture
def app() -> Holdfast:
    return Holdfast("shop")


async def call(app: Holdfast, name: str, *args: Any, telemetry: Telemetry | None = None) -> Any:
    job = app.jobs[name]
    caller = Caller(app.middlewares, 2, telemetry or Telemetry())
    try:
        bound = job.signature.decode(job.signature.encode(args, {}))
        return await caller.call(job, "run-1", bound, lambda: make_context(run="run-1"))
    finally:
        caller.close()


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
