"""taskiq's receiver on a broker of the test, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from taskiq import AcknowledgeType, AsyncBroker
from taskiq.receiver import Receiver

from holdfast.broker import Broker
from holdfast.config import ConnectionConfig
from holdfast.integrations.taskiq import DeadLetter, DeadLetters, ResilientPullBroker
from holdfast.model.backoff import Backoff

QUICK = Backoff.list([0.05, 0.05])
"""Three attempts in quick succession."""


def make_broker(url: str, namespace: str, **given: Any) -> ResilientPullBroker:
    """A broker with a separate stream."""
    made: dict[str, Any] = {
        "subject": f"{namespace}_tasks",
        "stream_name": f"{namespace}_stream",
        "durable": "workers",
        "namespace": namespace,
        "retry": QUICK,
    }
    return ResilientPullBroker([url], **(made | given))


@asynccontextmanager
async def receiving(
    broker: AsyncBroker, ack_type: AcknowledgeType | None = None, **given: Any
) -> AsyncIterator[AsyncBroker]:
    """A started broker with a receiver that executes what arrives."""
    await broker.startup()
    options = {"max_async_tasks": 20, "run_startup": False, "wait_tasks_timeout": 5, **given}
    receiver = Receiver(broker, ack_type=ack_type, **options)
    finish = asyncio.Event()
    listening = asyncio.create_task(receiver.listen(finish))
    try:
        yield broker
    finally:
        finish.set()
        await asyncio.gather(listening, return_exceptions=True)
        await broker.shutdown()


@asynccontextmanager
async def outside(url: str, namespace: str) -> AsyncIterator[Broker]:
    """Another connection, to inspect the server."""
    async with Broker(ConnectionConfig(nats_url=url, namespace=namespace)) as broker:
        yield broker


async def consumer_info(broker: Broker, queue: ResilientPullBroker) -> dict[str, Any]:
    """The server's info about a queue's consumer."""
    return await broker.api(f"CONSUMER.INFO.{queue.stream_name}.{queue.durable}")


async def waiting(broker: Broker, queue: ResilientPullBroker) -> int:
    """How many messages are not acknowledged."""
    info = await consumer_info(broker, queue)
    return int(info["num_pending"]) + int(info["num_ack_pending"])


async def dead_letters(url: str, namespace: str) -> list[DeadLetter]:
    """Everything that was given up."""
    async with DeadLetters(url, namespace=namespace) as dead:
        return [letter async for letter in dead.list()]
