"""Calling a handler: its own context variables, its thread if it is not async, its middlewares.

No task is made per call. An async handler is driven inside the slot that holds it, in a copy of the
context, so that context variables of one run never leak into the next.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast import tracing
from holdfast.app import Job, Middleware
from holdfast.context import Context, SyncContext, current_run
from holdfast.payload import Bound
from holdfast.telemetry import Telemetry


class InContext:
    """Awaits a coroutine step by step inside a context of its own."""

    __slots__ = ("_context", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context) -> None:
        self._coroutine = coroutine
        self._context = context

    def __await__(self) -> Generator[Any, Any, Any]:
        run, send, throw = self._context.run, self._coroutine.send, self._coroutine.throw
        value: Any = None
        step: Any = send
        while True:
            try:
                waiting = run(step, value)
            except StopIteration as end:
                return end.value
            try:
                value, step = (yield waiting), send
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as error:  # noqa: BLE001 - handed on, as `await` would
                value, step = error, throw


class Caller:
    """Calls handlers with their middlewares."""

    def __init__(self, middlewares: list[Middleware], threads: int, telemetry: Telemetry) -> None:
        self._middlewares = middlewares
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._telemetry = telemetry

    async def call(
        self, job: Job[Any, Any], run: str, bound: Bound, make_context: Callable[[], Context]
    ) -> Any:
        """Run one attempt; its context is made only where somebody sees it."""
        context = contextvars.copy_context()
        context.run(current_run.set, run)
        traced = tracing.on()
        if not (job.signature.contexts or self._middlewares or traced):
            return await InContext(self._handler(job, bound), context)
        ctx = make_context()
        if not traced:
            return await InContext(self._chain(job, ctx, bound), context)
        facts = {"run": ctx.run, "group": ctx.group, "attempt": ctx.attempt, "node": ctx.node}
        with tracing.attempting(f"run {ctx.job}", ctx.headers, context, **facts):
            return await InContext(self._chain(job, ctx, bound), context)

    def _chain(self, job: Job[Any, Any], ctx: Context, bound: Bound) -> Coroutine[Any, Any, Any]:
        if job.signature.contexts:
            own = ctx if job.is_async else SyncContext.beside(ctx, asyncio.get_running_loop())
            given = {**bound.kwargs, **dict.fromkeys(job.signature.contexts, own)}
            bound = bound._replace(kwargs=given)
        handler: Any = functools.partial(self._handler, job, bound)
        wrapped: Any
        for wrapped in reversed(self._middlewares):
            handler = functools.partial(wrapped, ctx, handler)
        chained: Coroutine[Any, Any, Any] = handler()
        return chained

    def _handler(self, job: Job[Any, Any], bound: Bound) -> Coroutine[Any, Any, Any]:
        if job.is_async:
            coroutine: Coroutine[Any, Any, Any] = job.func(*bound.args, **bound.kwargs)
            return coroutine
        return self._in_thread(functools.partial(job.func, *bound.args, **bound.kwargs))

    async def _in_thread(self, call: functools.partial[Any]) -> Any:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "holdfast-job")
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        future = loop.run_in_executor(self._pool, functools.partial(context.run, call))
        try:
            result = await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():
                self._mark_stuck(future)
            raise
        return await result if asyncio.iscoroutine(result) else result

    def _mark_stuck(self, future: asyncio.Future[Any]) -> None:
        self._telemetry.stuck_threads.inc()

        def freed(done: asyncio.Future[Any]) -> None:
            self._telemetry.stuck_threads.dec()
            if not done.cancelled():
                done.exception()

        future.add_done_callback(freed)

    def close(self) -> None:
        """Let go of the threads; those still busy end with the process."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
