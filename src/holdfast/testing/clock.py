"""A clock that stands still until a test moves it.

    clock = FakeClock()
    task = asyncio.create_task(something(clock))     # sleeps an hour on it
    await clock.sleepers(1)                          # wait until it sleeps
    clock.advance("1h")                              # wake it

`advance` wakes every sleeper that is due, the earliest first; they run as soon as the test waits
for something. One that sleeps again counts from the new time.

Not covered: `asyncio.sleep`, `time.time` and timeouts of the event loop pass in real time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from datetime import UTC, datetime

from holdfast.durations import Duration, seconds

START = datetime(2026, 1, 1, tzinfo=UTC)
"""Any fixed instant will do; this one makes dates in failures easy to read."""
_NEVER_ZERO = 1_000.0  # a monotonic clock that starts at 0 hides bugs
_DIGITS = 9  # three steps of 0.1 s are 0.3 s


class FakeClock:
    """A `Clock` for tests; it starts at `start` and moves only by `advance`."""

    def __init__(self, start: datetime | float = START) -> None:
        self._start = start.timestamp() if isinstance(start, datetime) else float(start)
        self._passed = 0.0
        self._order = itertools.count()
        self._sleeping: list[tuple[float, int, asyncio.Future[None]]] = []
        self._watching: list[tuple[int, asyncio.Future[None]]] = []

    def __repr__(self) -> str:
        return f"<FakeClock {datetime.fromtimestamp(self.utc(), UTC).isoformat()}>"

    def monotonic(self) -> float:
        """Seconds since the clock was made."""
        return _NEVER_ZERO + self._passed

    def utc(self) -> float:
        """Seconds since 1970, by this clock."""
        return self._start + self._passed

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` has moved the clock that far."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        due = round(self._passed + seconds, _DIGITS)
        heapq.heappush(self._sleeping, (due, next(self._order), future))
        self._tell_watchers()
        await future

    def advance(self, duration: Duration) -> None:
        """Move the clock and wake what is due, in order."""
        self._passed = round(self._passed + seconds(duration, "advance"), _DIGITS)
        while self._sleeping and self._sleeping[0][0] <= self._passed:
            _, _, future = heapq.heappop(self._sleeping)
            if not future.done():
                future.set_result(None)

    async def sleepers(self, count: int) -> None:
        """Wait until at least `count` tasks sleep on this clock."""
        if self._asleep() >= count:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching.append((count, future))
        await future

    def _asleep(self) -> int:
        return sum(1 for _, _, future in self._sleeping if not future.done())

    def _tell_watchers(self) -> None:
        asleep = self._asleep()
        for count, future in self._watching:
            if asleep >= count and not future.done():
                future.set_result(None)
        self._watching = [(c, f) for c, f in self._watching if not f.done()]
