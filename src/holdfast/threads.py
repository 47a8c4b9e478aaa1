"""Calls plain functions in threads for an event loop, and carries their outcome back.

Futures reject `StopIteration`, which would leave the awaiting coroutine waiting forever. So the
thread returns its exception as a value, and the coroutine raises it.

Waking a thread and waking the loop cost more than a short call. So calls may queue for a thread,
which takes one after the other without the loop, and the loop is woken once for all calls that have
ended meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

Outcome = tuple[Any, BaseException | None]


class Work:
    """A call that waits for a thread, runs in one, or has ended."""

    __slots__ = ("_calls", "_owner", "began", "future", "withdrawn")

    def __init__(self, owner: Threads, call: Callable[[], Any]) -> None:
        self._owner = owner
        self._calls = [call]  # whoever pops the call owns it: a thread, or `withdraw`
        self.began = 0.0
        """When a thread took it, on the monotonic clock; 0 until then."""
        self.withdrawn = False
        self.future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def withdraw(self) -> bool:
        """Do not call it; False if a thread has taken it."""
        if not self.withdrawn and self._take() is not None:
            self.withdrawn = True
            self._owner.busy -= 1
        return self.withdrawn

    def outlived(self) -> asyncio.Future[Outcome]:
        """A new future, because whoever awaited the first one was cancelled."""
        self.future = asyncio.get_running_loop().create_future()
        return self.future

    def _take(self) -> Callable[[], Any] | None:
        try:
            return self._calls.pop()
        except IndexError:
            return None

    def run(self) -> Outcome | None:
        """Call it in this thread; None if it was withdrawn."""
        call = self._take()
        if call is None:
            return None
        self.began = time.monotonic()
        return caught(call)


class Threads:
    """A pool of at most `most` threads; one is started when a call would have to wait."""

    def __init__(self, most: int, name: str) -> None:
        self.busy = 0
        """Calls that have neither ended nor been withdrawn."""
        self._most = most
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._made = 0
        self._ended: deque[tuple[Work, Outcome]] = deque()
        self._told = False

    def submit(self, call: Callable[[], Any]) -> Work:
        """Call it when a thread is free, in the order of submission."""
        work = Work(self, call)
        if self.busy >= self._made < self._most:
            self._made += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        self.busy += 1
        self._queue.put(work)
        return work

    def close(self) -> None:
        """End the threads; what waits is not called, busy threads end with the process."""
        with contextlib.suppress(Empty):
            while (work := self._queue.get_nowait()) is not None:
                work.withdraw()
        for _ in range(self._made):
            self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            outcome = work.run()
            if outcome is None:
                continue
            self._ended.append((work, outcome))
            del work, outcome  # a waiting thread keeps nothing alive
            if not self._told:
                self._told = True
                try:
                    self._loop.call_soon_threadsafe(self._tell)
                except RuntimeError:  # the loop is closed: nobody is waiting
                    return

    def _tell(self) -> None:
        """Pass on the results of calls that have ended; runs on the event loop."""
        self._told = False  # reset first: calls that end from now on notify again
        while self._ended:
            work, outcome = self._ended.popleft()
            self.busy -= 1
            if not work.future.done():
                work.future.set_result(outcome)


class SameContext(ThreadPoolExecutor):
    """Threads whose calls see the context variables of their caller, as in `asyncio.to_thread`.

    As the default executor of a loop: what `loop.run_in_executor(None, ...)` logs or prints belongs
    to the run of the handler that called it.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return super().submit(contextvars.copy_context().run, fn, *args, **kwargs)


def caught(call: Callable[[], Any]) -> Outcome:
    """Call it; return the exception if it raises."""
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 - raised again by `given`
        return None, error


def given(outcome: Outcome) -> Any:
    """The value the call returned; raises what it raised.

    `StopIteration` becomes `RuntimeError`, as in any coroutine. So does `KeyboardInterrupt`: Ctrl-C
    is for the main thread, and a function in a thread that raises it has merely failed.
    """
    value, error = outcome
    if isinstance(error, StopIteration | KeyboardInterrupt):
        raise RuntimeError(f"a plain function raised {type(error).__name__}") from error
    if error is not None:
        raise error
    return value
