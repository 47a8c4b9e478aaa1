"""What has arrived and waits for taskiq's receiver to ask for it.

The receiver asks only when it has a free place, so what waits here is what was asked for too early.
That is at most the batch, or a tenth of a second of recent speed if that is more: enough to never
wait for the server while functions are short. When they turn long, what is more than the batch and
has waited for a second is given back, so that other workers get it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from holdfast.broker import Delivery
from holdfast.clock import Clock
from holdfast.integrations.taskiq.deliveries import Deliveries

WINDOW_SECONDS: Final = 0.1
MOST: Final = 500
STALE_SECONDS: Final = 1.0


class Buffer:
    """The waiting room of one listener."""

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
        """It has arrived."""
        self._deliveries.hold(delivery)
        self.arrived.append(delivery)
        self._wake.set()

    def get(self) -> Delivery:
        """The oldest; there must be one."""
        self._taken += 1
        return self.arrived.popleft()

    def want(self) -> int:
        """How many more may come; none until half of the room is free."""
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
        """Whether half of the room is free."""
        return len(self.arrived) <= self._room // 2

    async def wait(self) -> None:
        """Until something has arrived, or `wake` is called."""
        self._wake.clear()
        if not self.arrived:
            await self._wake.wait()

    def wake(self) -> None:
        """End `wait`."""
        self._wake.set()

    async def keep_small(self) -> None:
        """Give back what nobody asks for."""
        while True:
            await self._clock.sleep(STALE_SECONDS)
            self.want()
            stale = self._clock.monotonic() - self._last_taken > STALE_SECONDS
            while stale and len(self.arrived) > self._batch:
                await self._deliveries.give_back(self.arrived.pop())
