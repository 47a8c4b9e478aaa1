"""The canary: proof that a message can still travel stream → consumer → process → ack.

Connected is not the same as consuming. Each worker has a subject of its own in the jobs stream and
a short-lived consumer on it; unless real runs have just travelled, it sends itself a message every
few seconds, through the same connection and the same kind of pull loop as its jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from holdfast.broker import Broker, Delivery, Pull
from holdfast.broker.streams import NANO, Topology
from holdfast.config import WorkerConfig
from holdfast.errors import BrokerError
from holdfast.names import H_TTL

log = logging.getLogger("holdfast.canary")

MISSED = 3
KEEP_SECONDS = 60


class Canary:
    """Sends and awaits one node's canaries while `run` runs."""

    def __init__(self, broker: Broker, topology: Topology, config: WorkerConfig, node: str) -> None:
        self._broker = broker
        self._topology = topology
        self._every = config.canary_seconds
        self._subject = broker.names.canary(config.group, node)
        self._name = f"canary-{node}"
        self._arrived = broker.clock.monotonic()
        self._pull = Pull(
            broker,
            broker.names.jobs,
            self._name,
            ensure=self._ensure,
            deliver=self._deliver,
            want=lambda: 1,
        )

    @property
    def age(self) -> float:
        """Seconds since a message last travelled."""
        return self._broker.clock.monotonic() - self._arrived

    @property
    def fresh(self) -> bool:
        return self.age < MISSED * self._every

    def travelled(self) -> None:
        """A real message did."""
        self._arrived = self._broker.clock.monotonic()

    async def run(self) -> None:
        """Send canaries until cancelled."""
        sending = asyncio.create_task(self._send(), name="holdfast-canary-send")
        try:
            await self._pull.run()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(self) -> None:
        while True:
            if self.age >= self._every * 0.9:
                try:
                    await self._broker.store(self._subject, b"", {H_TTL: f"{KEEP_SECONDS}s"})
                except BrokerError as error:
                    log.debug("canary not sent: %s", error)
            await self._broker.clock.sleep(self._every)

    def _deliver(self, delivery: Delivery) -> None:
        self.travelled()
        task = asyncio.get_running_loop().create_task(self._ack(delivery))
        task.add_done_callback(lambda _: None)

    async def _ack(self, delivery: Delivery) -> None:
        with contextlib.suppress(BrokerError):
            await delivery.ack()

    async def _ensure(self) -> None:
        await self._topology.create_consumer(
            self._broker.names.jobs,
            {
                "name": self._name,
                "ack_policy": "explicit",
                "ack_wait": 5 * NANO,
                "filter_subject": self._subject,
                "deliver_policy": "all",
                "replay_policy": "instant",
                "inactive_threshold": KEEP_SECONDS * NANO,
                "mem_storage": True,
            },
        )
