"""What time it is on the server: the only clock that processes on different machines compare.

A measurement is an instant that the server has stamped, and our monotonic clock when we knew that
the stamp was made. The server's clock shows that instant or a little more by then, so each
measurement is a lower bound, and the highest of the last minute is the closest. The result is late
by a fraction of a round trip and never early: nothing fires before its time.

Between measurements the monotonic clock carries it on, so a wall clock that is set changes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from holdfast.clock import Clock

WINDOW_SECONDS: Final = 60.0
"""How long a measurement counts: two clocks drift apart by some milliseconds in a minute."""
STEP_SECONDS: Final = 0.5
"""More than an answer takes and than clocks drift: a clock was set, or the machine slept."""
RECENT: Final = 3
"""Low measurements in a row that mean a server's clock set back, and not merely slow answers."""
MEASURE_SECONDS: Final = 600.0
"""How long a measured difference is used without a new one: clocks may be fast or slow as well."""

Measure = Callable[[], Awaitable[object]]


class ServerTime:
    """The server's time, as one process knows it."""

    def __init__(self, clock: Clock) -> None:
        self.measure: Measure | None = None
        """How to measure again."""
        self._clock = clock
        self._samples: list[tuple[float, float]] = []
        """When each was taken, and by how much the server's clock is ahead of our monotonic one."""
        self._ahead = 0.0
        self._apart = 0.0
        """How far our own two clocks were apart at the last measurement."""

    @property
    def known(self) -> bool:
        """Whether it was ever measured."""
        return bool(self._samples)

    def now(self) -> float:
        """The server's time; this machine's until it was measured."""
        if not self._samples:
            return self._clock.utc()
        return self._clock.monotonic() + self._ahead

    @property
    def offset(self) -> float:
        """How far this machine's clock is ahead of the server's."""
        return self._clock.utc() - self.now()

    def learn(self, instant: float, at: float, measure: Measure) -> None:
        """The server's clock showed `instant`, or more, when our monotonic clock showed `at`."""
        ahead, now = instant - at, self._clock.monotonic()
        samples = [sample for sample in self._samples if now - sample[0] < WINDOW_SECONDS]
        if samples and ahead > max(s for _, s in samples) + STEP_SECONDS:
            samples.clear()
        samples.append((now, ahead))
        recent = samples[-RECENT:]
        if max(s for _, s in samples) - max(s for _, s in recent) > STEP_SECONDS:
            samples = recent
        self._samples = samples
        self._ahead = max(s for _, s in samples)
        self._apart = self._clock.utc() - now
        self.measure = measure

    @property
    def doubtful(self) -> bool:
        """Whether to measure again: the last time is long ago, or our clocks moved apart since."""
        if not self._samples:
            return False
        now = self._clock.monotonic()
        leapt = abs(self._clock.utc() - now - self._apart) > STEP_SECONDS
        return leapt or now - self._samples[-1][0] > MEASURE_SECONDS
