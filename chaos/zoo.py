"""A zoo of misbehaving handlers, and how their runs must end.

Each is a plain function that calls `note` when it has started, and again for what it did; the job
that wraps it decides where that is written. `ZOO` has them by name, with the required outcome of an
attempt. None of them may harm another run, or leave its own run without an end.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Note = Callable[[str], None]
Fate = Literal["done", "failed", "timeout", "crashed"]


class Panic(BaseException):
    """Like a Rust panic through pyo3: no `Exception`."""


@dataclass(frozen=True, slots=True)
class Animal:
    """One misbehaviour, and the required outcome of an attempt."""

    handler: Callable[..., Any]
    fate: Fate
    needs_timeout: bool = False
    """It never ends: its job needs a `timeout`."""

    @property
    def is_async(self) -> bool:
        return asyncio.iscoroutinefunction(self.handler)


def _hold(seconds: float) -> None:
    """Block the thread; not by `time.sleep`, which fails where libfaketime sets the clock."""
    select.select([], [], [], seconds)


# ---- async handlers


async def cancels_itself(note: Note) -> None:
    """Cancels the task that it runs in, and waits."""
    note("started")
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(60)


async def cancels_itself_and_returns(note: Note) -> None:
    """Cancels its task and returns without awaiting."""
    note("started")
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def cancels_later(note: Note) -> None:
    """Succeeds; a task it left behind cancels its task a moment later."""
    note("started")
    task = asyncio.current_task()
    assert task is not None
    for moment in (0.0, 0.01, 0.1, 0.5):
        asyncio.get_running_loop().call_later(moment, task.cancel)


async def stops_iteration(note: Note) -> int:
    """Calls `next()` on an empty iterator."""
    note("started")
    return next(n for n in (1, 2, 3) if n > 3)


async def stops_async_iteration(note: Note) -> None:
    """The same with an async iterator."""
    note("started")
    raise StopAsyncIteration


async def raises_generator_exit(note: Note) -> None:
    """Raises what Python itself uses to close generators."""
    note("started")
    raise GeneratorExit


async def panics(note: Note) -> None:
    """Raises a `BaseException` that is no `Exception`."""
    note("started")
    raise Panic("index out of bounds")


async def exits(note: Note) -> None:
    """Calls `sys.exit`."""
    note("started")
    raise SystemExit(3)


async def swallows_cancellation(note: Note, seconds: float = 60.0) -> None:
    """Continues after each cancellation, for `seconds`."""
    note("started")
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            await asyncio.sleep(left)
        except asyncio.CancelledError:
            note("swallowed")


async def blocks_the_loop(note: Note, seconds: float = 14.0) -> None:
    """Sleeps without awaiting."""
    note("started")
    _hold(seconds)


async def dies(note: Note) -> None:
    """Kills its process."""
    note("started")
    os.kill(os.getpid(), signal.SIGKILL)


# ---- synchronous handlers


def stops_iteration_in_a_thread(note: Note) -> int:
    """Calls `next()` on an empty iterator."""
    note("started")
    return next(n for n in (1, 2, 3) if n > 3)


def stops_async_iteration_in_a_thread(note: Note) -> None:
    """The same with an async iterator."""
    note("started")
    raise StopAsyncIteration


def panics_in_a_thread(note: Note) -> None:
    """Raises a `BaseException` that is no `Exception`."""
    note("started")
    raise Panic("index out of bounds")


def exits_in_a_thread(note: Note) -> None:
    """Calls `sys.exit`."""
    note("started")
    raise SystemExit(3)


def interrupts_in_a_thread(note: Note) -> None:
    """Raises what Ctrl-C raises."""
    note("started")
    raise KeyboardInterrupt


def cancels_in_a_thread(note: Note) -> None:
    """Raises what a cancelled task raises, as `asyncio.run` in a thread may."""
    note("started")
    raise asyncio.CancelledError


def stays_in_its_thread(note: Note, seconds: float = 60.0) -> None:
    """Blocks its thread for much longer than its timeout."""
    note("started")
    _hold(seconds)
    note("ended")


def forks(note: Note, seconds: float = 30.0) -> None:
    """Leaves a forked child behind, which keeps everything it inherited open."""
    note("started")
    if os.fork() == 0:
        _hold(seconds)
        os._exit(0)


def computes(note: Note, seconds: float = 0.4) -> int:
    """Uses CPU while holding the interpreter lock."""
    note("started")
    end, count = time.thread_time() + seconds, 0
    while time.thread_time() < end:
        count += 1
    return count


def holds_the_interpreter(note: Note, numbers: int = 300_000_000) -> int:
    """One C call that holds the interpreter lock until it returns."""
    note("started")
    return sum(range(numbers))


ZOO: dict[str, Animal] = {
    animal.handler.__name__: animal
    for animal in (
        Animal(cancels_itself, "failed"),
        Animal(cancels_itself_and_returns, "failed"),
        Animal(cancels_later, "done"),
        Animal(stops_iteration, "failed"),
        Animal(stops_async_iteration, "failed"),
        Animal(raises_generator_exit, "failed"),
        Animal(panics, "failed"),
        Animal(exits, "failed"),
        Animal(swallows_cancellation, "timeout", needs_timeout=True),
        Animal(blocks_the_loop, "done"),
        Animal(dies, "crashed"),
        Animal(stops_iteration_in_a_thread, "failed"),
        Animal(stops_async_iteration_in_a_thread, "failed"),
        Animal(panics_in_a_thread, "failed"),
        Animal(exits_in_a_thread, "failed"),
        Animal(interrupts_in_a_thread, "failed"),
        Animal(cancels_in_a_thread, "failed"),
        Animal(stays_in_its_thread, "timeout", needs_timeout=True),
        Animal(forks, "done"),
        Animal(computes, "done"),
        Animal(holds_the_interpreter, "done"),
    )
}
