"""The server's time: the only clock that processes on different machines compare.

A measurement is an instant that the server has stamped, and our monotonic clock when the stamp
arrived. By then the server's clock shows that instant or a little more, so each measurement is a
lower bound, and the highest of the last minute is the closest. The result is late by a fraction of
a round trip and never early: nothing fires before its time.

Between measurements our monotonic clock counts, so setting a wall clock changes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from holdfast.clock import Clock

WINDOW_SECONDS: Final = 60.0
"""How long a measurement counts: two clocks drift apart by some milliseconds in a minute."""
STEP_SECONDS: Final = 0.5
"""More than answers and drift can explain: a larger step means that a clock was set, or the machine
slept."""
RECENT: Final = 3
"""This many low measurements in a row mean that the server's clock was set back; fewer may be slow
answers."""
MEASURE_SECONDS: Final = 600.0
"""How long a measured difference is used without a new one: clocks drift."""

Measure = Callable[[], Awaitable[object]]


class ServerTime:
    """The server's time, as one process knows it."""

    def __init__(self, clock: Clock) -> None:
        self.measure: Measure | None = None
        """How to measure again."""
        self._clock = clock
        self._samples: list[tuple[float, float]] = []
        """When each was taken, and how far the server's clock is ahead of our monotonic one."""
        self._ahead = 0.0
        self._apart = 0.0
        """The difference between our own two clocks at the last measurement."""

    @property
    def known(self) -> bool:
        """Whether it was ever measured."""
        return bool(self._samples)

    def now(self) -> float:
        """The server's time; before the first measurement this machine's."""
        if not self._samples:
            return self._clock.utc()
        return self._clock.monotonic() + self._ahead

    @property
    def offset(self) -> float:
        """How far this machine's clock is ahead of the server's."""
        return self._clock.utc() - self.now()

    def learn(self, instant: float, at: float, measure: Measure) -> None:
        """The server's clock showed `instant` or more when our monotonic clock showed `at`."""
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
        """Whether to measure again: the last one is old, or our clocks have moved apart since."""
        if not self._samples:
            return False
        now = self._clock.monotonic()
        leapt = abs(self._clock.utc() - now - self._apart) > STEP_SECONDS
        return leapt or now - self._samples[-1][0] > MEASURE_SECONDS
