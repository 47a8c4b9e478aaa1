"""Time, as a field that can be replaced.

Two clocks, never mixed: `monotonic()` for trust windows and waits inside one process, `utc()` for
instants that are written down. Times of two machines are never compared; what must be compared
is taken from the server's clock (`Broker.server_now`).
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What code that waits or writes down a time depends on."""

    def monotonic(self) -> float:
        """Seconds that only grow, for windows of trust inside this process."""
        ...

    def utc(self) -> float:
        """Seconds since the epoch, for instants that are written down."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The real clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def utc(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def rfc3339(instant: float) -> str:
    """An instant as NATS and people read it: `2026-11-16T01:45:00.250Z`."""
    moment = datetime.fromtimestamp(instant, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
