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

    monotonic = staticmethod(time.monotonic)
    utc = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


_FIRST, _LAST = -62_135_510_400.0, 253_402_214_400.0  # what a datetime can hold, less a day


def moment_of(instant: float) -> datetime:
    """An instant as a datetime in UTC; a number outside the range of datetimes becomes the nearest
    one inside."""
    return datetime.fromtimestamp(min(max(_FIRST, instant), _LAST), UTC)


def rfc3339(instant: float) -> str:
    """An instant as NATS and people read it: `2026-11-16T01:45:00.250Z`."""
    return moment_of(instant).isoformat(timespec="milliseconds").replace("+00:00", "Z")
