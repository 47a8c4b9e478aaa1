"""Calling a handler, with its middlewares: in its own task, and a thread or process where it must.

Guaranteed: a call ends in a value or in an error, whatever the handler does. A handler has its task
and its context variables to itself: one that cancels its task, at once or much later, reaches no
other run. Every exception is the handler's own affair, `SystemExit` and what is no `Exception`
included; only `KeyboardInterrupt` on the event loop's thread, which is Ctrl-C, ends the process.

Not guaranteed: that a handler stops when it is cancelled. One in a thread cannot be stopped, and an
async one may refuse. `Call.leftovers` is what still runs, and occupies a place until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from holdfast import threads, tracing
from holdfast.app import Job, Middleware
from holdfast.context import Context, SyncContext, current_run
from holdfast.payload import Bound
from holdfast.telemetry import Telemetry
from holdfast.threads import Outcome
from holdfast.worker.pool import ProcessDied, ProcessPool

TASK = "holdfast-job"
"""How the tasks and threads of handlers are called (`holdfast.process`)."""


class Call:
    """One call of a handler: its task, and the threads that it has left behind."""

    __slots__ = ("behind", "started", "task")

    task: asyncio.Task[Outcome]

    def __init__(self) -> None:
        self.started = True
        """False: it was stopped before there was a thread for the handler."""
        self.behind: tuple[asyncio.Future[Any], ...] = ()

    @property
    def leftovers(self) -> list[asyncio.Future[Any]]:
        """What still runs."""
        return [future for future in (self.task, *self.behind) if not future.done()]


class Caller:
    """Calls handlers with their middlewares."""

    fatal: ClassVar[tuple[type[BaseException], ...]] = (KeyboardInterrupt,)
    """An exception that ends the process, and not only the attempt."""

    def __init__(
        self,
        middlewares: list[Middleware],
        threads: int,
        telemetry: Telemetry,
        processes: int = 1,
    ) -> None:
        self.threads = threads
        self.processes = processes
        self.busy_threads = 0
        self._processes: ProcessPool | None = None
        self._middlewares = middlewares
        self._pool: ThreadPoolExecutor | None = None
        self._telemetry = telemetry

    def places(self, jobs: Iterable[Job[Any, Any]]) -> dict[str, int]:
        """How many handlers of these jobs can run at once, by lane; the loop has no limit here."""
        most = {"thread": self.threads, "process": self.processes}
        return {job.lane: most[job.lane] for job in jobs if job.lane in most}

    async def prepare(self, job: Job[Any, Any]) -> None:
        """Start a process for a job that needs one, so that this takes no time of the attempt."""
        with contextlib.suppress(ProcessDied, OSError):  # the call tries again, and fails with it
            await self._pool_of_processes().prepare(job)

    def _pool_of_processes(self) -> ProcessPool:
        if self._processes is None:
            self._processes = ProcessPool(self.processes)
        return self._processes

    def has_place(self, job: Job[Any, Any]) -> bool:
        """Whether a handler of this job could start at once."""
        return job.lane != "thread" or self.busy_threads < self.threads

    def start(
        self, job: Job[Any, Any], run: str, bound: Bound, make_context: Callable[[], Context]
    ) -> Call:
        """Begin one attempt; its context is made only where somebody sees it."""
        call = Call()
        body = self._outcome(job, run, bound, make_context, call)
        call.task = asyncio.get_running_loop().create_task(body, name=TASK)
        return call

    async def _outcome(
        self,
        job: Job[Any, Any],
        run: str,
        bound: Bound,
        make_context: Callable[[], Context],
        call: Call,
    ) -> Outcome:
        try:
            return await self.call(job, run, bound, make_context, call), None
        except asyncio.CancelledError:
            raise
        except self.fatal:
            raise
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything
            return None, error

    def call(
        self,
        job: Job[Any, Any],
        run: str,
        bound: Bound,
        make_context: Callable[[], Context],
        call: Call,
    ) -> Coroutine[Any, Any, Any]:
        """The attempt itself, inside its task."""
        current_run.set(run)
        traced = tracing.on()
        if not (job.signature.contexts or self._middlewares or traced):
            return self._handler(job, bound, call, run)
        ctx = make_context()
        chain = self._chain(job, ctx, bound, call)
        return _traced(ctx, chain) if traced else chain

    def _chain(
        self, job: Job[Any, Any], ctx: Context, bound: Bound, call: Call
    ) -> Coroutine[Any, Any, Any]:
        if job.signature.contexts and job.lane != "process":
            own = ctx if job.is_async else SyncContext.beside(ctx, asyncio.get_running_loop())
            given = {**bound.kwargs, **dict.fromkeys(job.signature.contexts, own)}
            bound = bound._replace(kwargs=given)
        handler: Any = functools.partial(self._handler, job, bound, call, ctx.run, ctx)
        wrapped: Any
        for wrapped in reversed(self._middlewares):
            handler = functools.partial(wrapped, ctx, handler)
        chained: Coroutine[Any, Any, Any] = handler()
        return chained

    def _handler(
        self, job: Job[Any, Any], bound: Bound, call: Call, run: str, ctx: Context | None = None
    ) -> Coroutine[Any, Any, Any]:
        if job.is_async:
            coroutine: Coroutine[Any, Any, Any] = job.func(*bound.args, **bound.kwargs)
            return coroutine
        if job.lane == "process":
            return self._pool_of_processes().run(job, bound, run, ctx)
        return self._in_thread(functools.partial(job.func, *bound.args, **bound.kwargs), call)

    async def _in_thread(self, function: functools.partial[Any], call: Call) -> Any:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, TASK)
        inside = functools.partial(contextvars.copy_context().run, function)
        working = self._pool.submit(threads.caught, inside)
        future = asyncio.wrap_future(working)
        self.busy_threads += 1
        future.add_done_callback(self._thread_freed)
        try:
            outcome = await asyncio.shield(future)
        except asyncio.CancelledError:
            if working.cancel():
                call.started = False
            elif not future.done():
                self._leave_behind(call, future)
            raise
        result = threads.given(outcome)
        return await result if asyncio.iscoroutine(result) else result

    def _thread_freed(self, _: object) -> None:
        self.busy_threads -= 1

    def _leave_behind(self, call: Call, future: asyncio.Future[Any]) -> None:
        call.behind += (future,)
        self._telemetry.stuck_threads.inc()
        future.add_done_callback(lambda _: self._telemetry.stuck_threads.dec())

    def close(self) -> None:
        """Let go of threads and processes; threads that are busy end with the process."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()


async def _traced(ctx: Context, chain: Coroutine[Any, Any, Any]) -> Any:
    facts = {"run": ctx.run, "group": ctx.group, "attempt": ctx.attempt, "node": ctx.node}
    with tracing.attempting(f"run {ctx.job}", ctx.headers, **facts):
        return await chain
