"""FastStream on NATS JetStream, with a durable pull consumer, which it recommends by itself.

As installed it pulls one message after the other. Tuned: pulls of 100, uvloop, no log line per
message. One message at a time is also the fastest way through runs that do nothing: with 100
workers they take four times as long. Where runs wait, as many as elsewhere run at a time.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from faststream import AckPolicy, FastStream
from faststream.nats import JStream, NatsBroker, PullSub

from benchmarks import sending
from benchmarks.subjects import job
from benchmarks.subjects.job import AT_ONCE, TUNED, URL

SUBJECT = "bench.job"
AT_A_TIME = int(os.environ.get("BENCH_CONCURRENCY", "0"))
tuning: dict[str, Any] = {"pull_sub": PullSub(batch_size=100) if TUNED else PullSub()}
if AT_A_TIME:
    tuning["max_workers"] = AT_A_TIME

stream = JStream("bench")
broker = NatsBroker(URL, **({"logger": None} if TUNED else {}))
app = FastStream(broker)


@broker.subscriber(
    SUBJECT, stream=stream, durable="bench", ack_policy=AckPolicy.REJECT_ON_ERROR, **tuning
)
async def work(sent: int, nap: float, text: str) -> None:
    """The job."""
    await job.work(sent, nap, text)


class FastStreamSender:
    """`publish` to the stream; many at once for want of a bulk call."""

    async def open(self) -> None:
        await broker.connect()
        jetstream = broker.config.connection_state.stream
        await jetstream.add_stream(config=stream.config, subjects=[SUBJECT])

    async def one(self, payload: sending.Payload) -> None:
        await broker.publish(payload, SUBJECT, stream=stream.name)

    async def many(self, payloads: list[sending.Payload]) -> None:
        for start in range(0, len(payloads), AT_ONCE):
            part = payloads[start : start + AT_ONCE]
            await asyncio.gather(*(self.one(payload) for payload in part))

    async def close(self) -> None:
        await broker.stop()


if __name__ == "__main__":
    sending.main(FastStreamSender(), uvloop=TUNED)
