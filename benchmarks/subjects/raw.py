"""The floor: nats-py and nothing else, as one would write it by hand.

    python -m benchmarks.subjects.raw fetch|callback CONCURRENCY     a worker
    python -m benchmarks.subjects.raw send KIND NUMBER               a sender

`fetch` is the loop of the documentation: `fetch(100)`, run, ack. `callback` is the fastest that we
know: one inbox subscription, pull requests that overlap, acks as plain publishes. Neither
de-duplicates, retries, extends, records, measures or drains. With more than one run at a time, each
gets a task.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import nats
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

from benchmarks import sending, tally

URL = os.environ.get("BENCH_URL", "")
STREAM, SUBJECT, CONSUMER = "RAW", "raw.job", "raw"
ACK_WAIT_SECONDS = 30.0
BATCH = int(os.environ.get("BENCH_BATCH", "100"))
OVERLAPPING = 500


async def connected() -> tuple[Client, JetStreamContext]:
    """A connection, with stream and consumer in place."""
    client = await nats.connect(URL)
    jetstream = client.jetstream()
    await jetstream.add_stream(
        StreamConfig(
            name=STREAM,
            subjects=[SUBJECT],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
        )
    )
    await jetstream.add_consumer(
        STREAM,
        ConsumerConfig(
            durable_name=CONSUMER,
            filter_subject=SUBJECT,
            ack_wait=ACK_WAIT_SECONDS,
            max_ack_pending=20_000,
        ),
    )
    return client, jetstream


async def run(body: bytes) -> None:
    """The job."""
    arguments = json.loads(body)
    tally.started(arguments["sent"])
    if arguments["nap"]:
        await asyncio.sleep(arguments["nap"])
    tally.ended()


async def fetch(concurrency: int) -> None:
    """The loop of the documentation."""
    _, jetstream = await connected()
    subscription = await jetstream.pull_subscribe_bind(CONSUMER, STREAM)
    free = asyncio.Semaphore(concurrency)
    tasks: set[asyncio.Task[None]] = set()

    async def handle(message: Msg) -> None:
        await run(message.data)
        await message.ack()
        free.release()

    while True:
        try:
            messages = await subscription.fetch(BATCH, timeout=5)
        except nats.errors.TimeoutError:
            continue
        for message in messages:
            if concurrency == 1:
                await run(message.data)
                await message.ack()
                continue
            await free.acquire()
            task = asyncio.create_task(handle(message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


async def callback(concurrency: int) -> None:
    """One inbox, overlapping requests."""
    client, _ = await connected()
    inbox = client.new_inbox()
    window = OVERLAPPING if concurrency == 1 else concurrency
    waiting = running = 0
    tasks: set[asyncio.Task[None]] = set()

    async def ask() -> None:
        nonlocal waiting
        batch = window - waiting - running
        if batch < window // 2:
            return
        waiting += batch
        request = {"batch": batch, "expires": 30_000_000_000}
        await client.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER}",
            json.dumps(request).encode(),
            reply=inbox,
        )

    async def handle(message: Msg) -> None:
        nonlocal running
        await run(message.data)
        await client.publish(message.reply, b"+ACK")
        running -= 1
        await ask()

    async def receive(message: Msg) -> None:
        nonlocal waiting, running
        if not message.reply:  # a request has ended
            waiting = 0
            await ask()
            return
        waiting -= 1
        running += 1
        if concurrency == 1:
            await handle(message)
            return
        task = asyncio.create_task(handle(message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    await client.subscribe(inbox, cb=receive)
    await ask()
    await asyncio.Event().wait()


class RawSender:
    """`js.publish`, and `js.publish_async` for many."""

    async def open(self) -> None:
        self.client, self.jetstream = await connected()

    async def one(self, payload: sending.Payload) -> None:
        await self.jetstream.publish(SUBJECT, json.dumps(payload).encode())

    async def many(self, payloads: list[sending.Payload]) -> None:
        futures: list[Any] = [
            await self.jetstream.publish_async(SUBJECT, json.dumps(payload).encode())
            for payload in payloads
        ]
        await self.jetstream.publish_async_completed()
        for future in futures:
            future.result()

    async def close(self) -> None:
        await self.client.close()


if __name__ == "__main__":
    if sys.argv[1] == "send":
        sending.main(RawSender())
    else:
        loop = {"fetch": fetch, "callback": callback}[sys.argv[1]]
        uvloop.run(loop(int(sys.argv[2])))
