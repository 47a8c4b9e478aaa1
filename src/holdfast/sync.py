"""`SyncApp`: sending runs from code without an event loop, such as Django and Flask.

    shop = SyncApp(app)                                  # at module level: does nothing yet

    def view(request):
        run = shop.enqueue(resize.options(key="image-42"), Image(id=42))
        return run.result(timeout=5)

One background thread with an event loop and a connection, made at the first call and shared by all
threads of the process; each call waits for its answer. A forked child (gunicorn, uWSGI, Celery's
prefork) makes its own. It is closed by `close`, by leaving `with SyncApp(app)`, and when the
process ends; a later call opens it again.

Not for code that runs on an event loop: a call would block the loop, and deadlock if the answer
depends on it. Every call there raises, and says what to write instead.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar, overload

from holdfast.app import Holdfast
from holdfast.client import Backend, Enqueued, JobRequest, Request, Run, RunStatus
from holdfast.client.once import Once
from holdfast.durations import Duration
from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.job import Sendable
from holdfast.model.runlog import LogLine

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

CLOSE_SECONDS = 5.0
"""Timeout of closing the connection, and again of ending the thread: a process must be able to end
without its server."""

_NOWHERE: Any = None
"""Handles that are made here only provide facts."""
_everyone: weakref.WeakSet[SyncApp] = weakref.WeakSet()
_left_behind: list[object] = []
"""Loops that a forked child inherited without their threads. They must neither be used nor closed:
their file descriptors are shared with the parent, which would stop receiving on its sockets."""


class SyncRun(Generic[R]):
    """One accepted run, as `Run`, with methods that block."""

    def __init__(self, owner: SyncApp, run: Run[R], handle: Callable[[Backend], Run[R]]) -> None:
        self.id = run.id
        self.job = run.job
        self.group = run.group
        self.duplicate = run.duplicate
        """The key was known already: this handle is the earlier run's."""
        self.state = run.state
        """As `Run.state`."""
        self._owner = owner
        self._handle = handle

    def __repr__(self) -> str:
        return f"<SyncRun {self.id} of {self.job}>"

    def result(self, timeout: float | None = None) -> R:
        """Wait for the run to end and return what its handler returned; raises as `Run.result`."""
        return self._ask(lambda run: run.result(timeout))

    def status(self) -> RunStatus:
        """Where the run is now."""
        return self._ask(lambda run: run.status())

    def logs(self) -> list[LogLine]:
        """What its handler has logged and printed so far, in all attempts. Only the newest lines
        are kept."""
        return self._ask(lambda run: run.logs())

    def follow(self) -> Iterator[LogLine]:
        """What its handler logs and prints, from the first line kept until the run has ended."""
        lines: AsyncIterator[LogLine] | None = None

        async def following() -> LogLine | None:
            nonlocal lines
            if lines is None:
                lines = self._handle(await self._owner.app.backend()).follow()
            return await anext(lines, None)

        while line := self._owner._wait(following):
            yield line

    def cancel(self) -> bool:
        """Cancel it: queued, delayed, waiting for a retry or running. False: it had ended."""
        return self._ask(lambda run: run.cancel())

    def retry(self) -> str:
        """Send it again after it was given up, or start its next attempt now."""
        return self._ask(lambda run: run.retry())

    def _ask(self, what: Callable[[Run[R]], Coroutine[Any, Any, T]]) -> T:
        """Use the current connection: the old one may be closed, or belong to the parent
        process."""

        async def ask() -> T:
            return await what(self._handle(await self._owner.app.backend()))

        return self._owner._wait(ask)


class SyncOnce:
    """One use of the guard, like `Once`: true for the caller that has to do the work."""

    def __init__(self, owner: SyncApp, entry: Once) -> None:
        self.key = entry.key
        self._owner = owner
        self._entry = entry

    def __repr__(self) -> str:
        return repr(self._entry)

    def __bool__(self) -> bool:
        return bool(self._entry)

    @property
    def epoch(self) -> int:
        """As `Once.epoch`."""
        return self._entry.epoch

    def __enter__(self) -> SyncOnce:
        self._owner._wait(self._entry.__aenter__)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._owner._wait(lambda: self._entry.__aexit__(kind, error, at))

    def complete(self) -> None:
        """The work is done: nobody does it again within `ttl`; raises as `Once.complete`."""
        self._owner._wait(self._entry.complete)

    def fail(self) -> None:
        """The work is not done: the next caller may do it at once."""
        self._owner._wait(self._entry.fail)


class SyncApp:
    """An app for code without an event loop."""

    def __init__(self, app: Holdfast) -> None:
        self.app = app
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._finalizer: weakref.finalize[Any, SyncApp] | None = None
        _everyone.add(self)

    def __repr__(self) -> str:
        return f"<SyncApp of {self.app!r}>"

    # ---- sending

    @overload
    def enqueue(self, job: Sendable[P, R], *args: P.args, **kwargs: P.kwargs) -> SyncRun[R]: ...
    @overload
    def enqueue(self, job: str, *args: Any, **kwargs: Any) -> SyncRun[Any]: ...
    def enqueue(self, job: Sendable[..., Any] | str, *args: Any, **kwargs: Any) -> SyncRun[Any]:
        """Send a run of a job, of `job.options(...)`, or of a job by name.

        Takes what `Job.enqueue` takes. Invalid arguments raise before anything is sent.
        """
        found = self.app.job_named(job) if isinstance(job, str) else job
        request = found.request(*args, **kwargs)
        return self._sent(request, self._wait(lambda: self._enqueue(request)))

    def _sent(self, request: Request, enqueued: Enqueued) -> SyncRun[Any]:
        def handle(backend: Backend) -> Run[Any]:
            return self.app.handle(request, enqueued, backend)

        return SyncRun(self, handle(_NOWHERE), handle)

    async def _enqueue(self, request: Request) -> Enqueued:
        return await (await self.app.backend()).enqueue(request)

    def enqueue_many(self, requests: Iterable[JobRequest[R]]) -> list[SyncRun[R]]:
        """Send requests of any jobs, made by `job.request(...)`, pipelined and in order."""
        wanted: list[Request] = list(requests)
        answers = self._wait(lambda: self._enqueue_many(wanted))
        return [self._sent(r, e) for r, e in zip(wanted, answers, strict=True)]

    async def _enqueue_many(self, requests: list[Request]) -> list[Enqueued]:
        return await (await self.app.backend()).enqueue_many(requests)

    # ---- runs by their id

    @overload
    def run(self, id: str) -> SyncRun[Any]: ...
    @overload
    def run(self, id: str, job: Sendable[..., R]) -> SyncRun[R]: ...
    def run(self, id: str, job: Sendable[..., Any] | None = None) -> SyncRun[Any]:
        """A handle on a run by its id; see `Holdfast.run`. The job only tells type checkers the
        type of its result."""
        return self._by_id(self.app.run(id))

    def runs(
        self, *, job: str = "", state: str = "", key: str = "", limit: int = 100
    ) -> list[SyncRun[Any]]:
        """Handles on the runs that match, newest change first; see `Holdfast.runs`."""
        found = self._wait(lambda: self.app.runs(job=job, state=state, key=key, limit=limit))
        return [self._by_id(run) for run in found]

    def _by_id(self, run: Run[Any]) -> SyncRun[Any]:
        return SyncRun(self, run, lambda _: self.app.run(run.id))

    # ---- events

    def publish(
        self,
        event: str,
        data: Any = None,
        *,
        id: str | None = None,
        key: str | None = None,
        by: str = "",
    ) -> None:
        """Send an event from outside a run; see `Holdfast.publish`."""
        self._wait(lambda: self.app.publish(event, data, id=id, key=key, by=by))

    # ---- work that is no job

    def once(self, key: str, *, ttl: Duration = "24h", timeout: float | None = None) -> SyncOnce:
        """A guard around work that is no job, so that it is done once; see `Holdfast.once`.

        with shop.once("document-42", ttl="24h") as first:
            if first:
                ...
        """
        return SyncOnce(self, self.app.once(key, ttl=ttl, timeout=timeout))

    # ---- the thread behind it

    def _wait(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the background thread and wait for its result."""
        _refuse_on_a_loop()
        return self._running().wait(make())

    def _running(self) -> LoopThread:
        with self._lock:
            if self._thread is not None and self._thread.pid != os.getpid():
                self._leave_behind()  # forked without the after-fork hook, e.g. by C code
            if self._thread is None:
                self._thread = LoopThread(self.app)
                self._finalizer = weakref.finalize(self, self._thread.close)
            return self._thread

    def close(self) -> None:
        """Close connection and thread, if there are any; waiting calls raise `OutcomeUnknown`."""
        with self._lock:
            thread, self._thread = self._thread, None
            finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None and thread is not None:
            finalizer.detach()
            if thread.pid == os.getpid():
                thread.close()

    def __enter__(self) -> SyncApp:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _leave_behind(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        _left_behind.append(self._thread)
        self._thread = self._finalizer = None

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # a thread that does not exist here may hold the old one
        if self._thread is not None:
            self._leave_behind()


class LoopThread:
    """A thread that runs an event loop, with an app's connection on it, until it is closed."""

    def __init__(self, app: Holdfast) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._app = app
        self._thread = threading.Thread(target=self._main, name="holdfast-sync", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for its result."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise OutcomeUnknown("the connection was closed before an answer came") from None
        except BaseException:
            future.cancel()  # Ctrl-C: nobody waits for the result
            raise

    def close(self) -> None:
        """Disconnect, end the thread and wait for it (unless it is the caller)."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            return
        leaving = asyncio.run_coroutine_threadsafe(self._leave(), self.loop)
        try:
            leaving.result(CLOSE_SECONDS)
        except (concurrent.futures.TimeoutError, HoldfastError):
            pass  # the server does not answer: close without a goodbye
        finally:  # a resource of the program may fail to close, with any error
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(CLOSE_SECONDS)

    async def _leave(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        try:
            await self._app.close()
        finally:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)


def _refuse_on_a_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise HoldfastError(
        "SyncApp was called on an event loop, which it would block until the answer came: "
        "write `await job.enqueue(...)` there, or call it in a thread (asyncio.to_thread)"
    )


def _after_fork_in_child() -> None:
    for one in list(_everyone):
        one._after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_after_fork_in_child)
