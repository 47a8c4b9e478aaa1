"""Messages that have arrived and wait for taskiq's receiver.

The receiver asks only when it has free capacity, so messages here were pulled early: at most the
batch, or a tenth of a second of recent throughput if that is more, so that short functions never
wait for the server. When functions become long, messages beyond the batch that have waited for a
second are given back, so that other workers get them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from holdfast.broker import Delivery
from holdfast.clock import Clock
from holdfast.integrations.taskiq.deliveries import Deliveries

WINDOW_SECONDS: Final = 0.1
"""Longer than a round trip to a distant server: the next batch arrives before this one is used
up."""
MOST: Final = 500
"""Bounds what a dying worker holds of others' work until redelivery after `ack_wait`."""
STALE_SECONDS: Final = 1.0
"""How long messages may wait behind a function that became slow, before other workers get them."""


class Buffer:
    """What one listener has pulled and not yet handed on."""

    def __init__(self, deliveries: Deliveries, batch: int, clock: Clock) -> None:
        self.arrived: deque[Delivery] = deque()
        self._deliveries = deliveries
        self._batch = batch
        self._clock = clock
        self._wake = asyncio.Event()
        self._taken = 0
        self._room = batch
        self._since = clock.monotonic()
        self._last_taken = self._since

    def put(self, delivery: Delivery) -> None:
        """Add a message that has arrived."""
        self._deliveries.hold(delivery)
        self.arrived.append(delivery)
        self._wake.set()

    def get(self) -> Delivery:
        """Take the oldest; there must be one."""
        self._taken += 1
        return self.arrived.popleft()

    def want(self) -> int:
        """How many more to pull; 0 until half of the buffer is free."""
        now = self._clock.monotonic()
        if now - self._since >= WINDOW_SECONDS:
            pace = int(self._taken * WINDOW_SECONDS / (now - self._since))
            self._room = max(self._batch, min(MOST, pace))
            if self._taken:
                self._last_taken = now
            self._since, self._taken = now, 0
        return self._room - len(self.arrived) if self.low else 0

    @property
    def low(self) -> bool:
        """Whether half of the buffer is free."""
        return len(self.arrived) <= self._room // 2

    async def wait(self) -> None:
        """Wait until something has arrived, or `wake` is called."""
        self._wake.clear()
        if not self.arrived:
            await self._wake.wait()

    def wake(self) -> None:
        """End `wait`."""
        self._wake.set()

    async def keep_small(self) -> None:
        """Give back messages that have waited too long."""
        while True:
            await self._clock.sleep(STALE_SECONDS)
            self.want()
            stale = self._clock.monotonic() - self._last_taken > STALE_SECONDS
            while stale and len(self.arrived) > self._batch:
                await self._deliveries.give_back(self.arrived.pop())
