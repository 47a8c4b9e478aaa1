"""What tests of every kind share."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

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
