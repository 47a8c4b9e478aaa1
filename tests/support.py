"""What tests of every kind share."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

PACE_SECONDS = 0.02
LEAST_SECONDS = 60.0
"""No wait gives up sooner. A condition that comes costs no more than it needs, on a machine that is
busy with other tests as well; only a hang reaches the limit."""


async def until(condition: Callable[[], Any], limit: float = LEAST_SECONDS, what: str = "") -> Any:
    """Wait until a condition (a function or a coroutine function) holds; returns what it gave.

    Fails with its name when it does not hold in time; a `limit` is only needed above the least.
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
