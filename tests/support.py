"""What tests of every kind share."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

PACE_SECONDS = 0.02


async def until(condition: Callable[[], Any], limit: float = 60.0, what: str = "") -> Any:
    """Wait until a condition (a function or a coroutine function) holds; returns what it gave.

    Fails with its name when it does not hold in time.
    """
    deadline = time.monotonic() + limit
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what or condition}"
        await asyncio.sleep(PACE_SECONDS)
