"""The server's time, and whether this machine's clock can be believed.

Slots fire by the server's time, carried on by the monotonic clock between measurements: a wall
clock that jumps changes nothing here. Each measurement gives a time that is not ahead of the
server's (what the server wrote, read when it arrived); the newest of them in a window is the
closest. So a scheduler is late by a fraction of a round trip, and never early.

The wall clock is compared all the same, since it is what people and jobs on this machine see: when
it differs by more than the tolerance, one of the two is wrong, and nobody fires on a guess.
"""

from __future__ import annotations

import logging
from collections import deque

from holdfast.broker import Broker
from holdfast.broker.kv import parse_time
from holdfast.names import kv_stream
from holdfast.retrying import repeating

log = logging.getLogger("holdfast.scheduler")

EVERY_SECONDS = 5.0
WINDOW = 12
STEP_SECONDS = 0.5
"""A measurement this far from the others means that the server's clock was set."""
ANSWER_SECONDS = 2.0


class ServerTime:
    """What time it is on the server."""

    def __init__(self, broker: Broker, tolerance: float) -> None:
        self.tolerance = tolerance
        self._broker = broker
        self._clock = broker.clock
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self._difference = 0.0

    @property
    def measured(self) -> bool:
        return bool(self._samples)

    def now(self) -> float:
        """The server's time; the machine's own until it was measured."""
        if not self._samples:
            return self._clock.utc()
        return self._clock.monotonic() + self._difference

    @property
    def offset(self) -> float:
        """How far this machine's clock is ahead of the server's."""
        return self._clock.utc() - self.now()

    @property
    def right(self) -> bool:
        """Whether the two clocks agree."""
        return self.measured and abs(self.offset) <= self.tolerance

    async def measure(self) -> None:
        """Ask the server for its time."""
        stream = kv_stream(self._broker.names.slots)
        info = await self._broker.api(f"STREAM.INFO.{stream}", timeout=ANSWER_SECONDS)
        sample = parse_time(info["ts"]) - self._clock.monotonic()
        if self._samples and sample > max(self._samples) + STEP_SECONDS:
            self._samples.clear()
        self._samples.append(sample)
        recent = list(self._samples)[-3:]
        if max(self._samples) - max(recent) > STEP_SECONDS:  # set back, not merely a slow answer
            self._samples = deque(recent, maxlen=WINDOW)
        self._difference = max(self._samples)
        self._broker.learn_time(self._difference, 0.0, self.measure)

    async def run(self) -> None:
        """Keep measuring."""
        await repeating(
            self.measure, clock=self._clock, every=EVERY_SECONDS, what="reading the server's clock"
        )
