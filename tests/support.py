"""What tests of every kind share."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

T = TypeVar("T")

PACE_SECONDS = 0.02
LEAST_SECONDS = 60.0
"""No wait gives up sooner: a busy machine must not fail a test, and a condition that becomes true
ends the wait at once. Only a hang reaches the limit."""


async def until(condition: Callable[[], Any], limit: float = LEAST_SECONDS, what: str = "") -> Any:
    """Wait until a condition (a function or a coroutine function) holds; returns its value.

    Fails with `what` when it does not hold in time; pass a `limit` only above the least.
    """
    limit = max(limit, LEAST_SECONDS)
    deadline = time.monotonic() + limit
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what or condition}"
        await asyncio.sleep(PACE_SECONDS)


async def past(instant: float) -> None:
    """Wait until this machine's clock has passed an instant."""
    await until(lambda: time.time() > instant, what=f"instant {instant:.0f}")


@contextlib.asynccontextmanager
async def running(role: T, ready: Callable[[], Any] | None = None) -> AsyncIterator[T]:
    """A role on the test's loop: started, or `ready`, when the block begins, stopped after it."""
    made: Any = role
    task = asyncio.create_task(made.run())
    try:
        over = ready or made.started.is_set
        await until(lambda: task.done() or over(), what=f"{type(role).__name__} ready")
        if task.done():
            task.result()
        yield role
    finally:
        made.stop()
        await task
