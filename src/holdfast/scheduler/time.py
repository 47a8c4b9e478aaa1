"""Whether this machine's clock agrees with the server's.

Slots fire by the server's time (`broker.time`). The wall clock is compared all the same, because it
is what people and jobs on this machine see: when it differs by more than the tolerance, one of the
two is wrong, and nothing is fired on a guess.
"""

from __future__ import annotations

from holdfast.broker import Broker
from holdfast.broker.streams import Topology
from holdfast.config import RecordConfig
from holdfast.retrying import repeating

EVERY_SECONDS = 5.0
"""Twelve measurements in the window of `broker.time`: one of them has a fast answer."""


class ServerTime:
    """What time it is on the server."""

    def __init__(self, broker: Broker, tolerance: float) -> None:
        self.tolerance = tolerance
        self._broker = broker
        self.measure = Topology(broker, RecordConfig()).measure_clock
        self.now = broker.server_now

    @property
    def offset(self) -> float:
        return self._broker.time.offset

    @property
    def right(self) -> bool:
        """Whether the two clocks agree."""
        return self._broker.time.known and abs(self.offset) <= self.tolerance

    async def run(self) -> None:
        """Keep measuring."""
        await repeating(
            self.measure,
            clock=self._broker.clock,
            every=EVERY_SECONDS,
            what="reading the server's clock",
        )
