"""Wakes the flows that wait for an event, whoever published it.

Events with a key are stored in the flows' stream, and one durable consumer delivers each of them to
one of the workers that have flows. It looks up who waits for the event and wakes them, then
acknowledges; a crash in between repeats both, and a wake too many is harmless. So a plain publish
of any NATS client reaches a flow.

Our client lets events expire after `record.event_days`. Events of other clients are removed by each
watch, once in a while.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from holdfast.broker import Delivery, Pull
from holdfast.client import Client
from holdfast.durations import DAY
from holdfast.errors import BrokerError

log = logging.getLogger("holdfast.flows")

CONSUMER: Final = "signals"
AT_ONCE: Final = 100
"""Events that one worker handles at a time: hides the round trips."""
AGAIN_SECONDS: Final = 1.0
"""Redelivery delay of an event whose flows could not be woken, usually because a stream has no
leader for seconds."""
FORGET_SECONDS: Final = 3_600.0
"""How often old events are removed: they are kept for days, so an hour more does not matter."""


class SignalWatch:
    """The watch of one worker."""

    def __init__(self, client: Client, ack_wait: float) -> None:
        self._client = client
        self._names = client.broker.names
        self._ack_wait = ack_wait
        self._tasks: set[asyncio.Task[None]] = set()
        self._pull = Pull(
            client.broker,
            self._names.flows,
            CONSUMER,
            ensure=self._ensure,
            deliver=self._deliver,
            want=lambda: AT_ONCE - len(self._tasks),
        )

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pull.run(), name="holdfast-signals")
                group.create_task(self._forget(), name="holdfast-old-events")
        finally:
            for task in self._tasks:
                task.cancel()

    async def _forget(self) -> None:
        """Remove events without a TTL at the age at which others expire, and the ends of children
        that no flow waits for."""
        broker = self._client.broker
        while True:
            before = broker.server_now() - self._client.records.event_days * DAY
            try:
                await self._client.journals.forget_events(before)
                await self._client.journals.forget_ends()
            except BrokerError as error:
                log.debug("old events and ends of children are kept for now: %s", error)
            await broker.clock.sleep(FORGET_SECONDS)

    async def _ensure(self) -> None:
        subject = self._names.signal_any
        await self._client.topology.ensure_consumer(
            self._names.flows, CONSUMER, subject, self._ack_wait
        )

    def _deliver(self, delivery: Delivery) -> None:
        task = asyncio.create_task(self._signalled(delivery), name="holdfast-signal")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pull.wake_if_low()

    async def _signalled(self, delivery: Delivery) -> None:
        try:
            await self._client.journals.signalled(delivery.subject, delivery.sequence)
        except BrokerError as error:
            log.info("event %s is handled again: %s", delivery.subject, error)
            await delivery.nak(AGAIN_SECONDS)
        else:
            await delivery.ack()
