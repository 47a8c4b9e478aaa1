"""Dramatiq on Redis. Tuned: prefetches 1,000."""

from __future__ import annotations

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks import sending
from benchmarks.subjects.job import URL, work_in_thread

broker = RedisBroker(url=URL)
dramatiq.set_broker(broker)
actor = dramatiq.actor(actor_name="work")(work_in_thread)


class DramatiqSender:
    """`send`, one after the other: there is no bulk call."""

    async def open(self) -> None:
        broker.declare_queue("default")

    async def one(self, payload: sending.Payload) -> None:
        actor.send(**payload)

    async def many(self, payloads: list[sending.Payload]) -> None:
        for payload in payloads:
            actor.send(**payload)

    async def close(self) -> None:
        broker.close()


if __name__ == "__main__":
    sending.main(DramatiqSender(), uvloop=False)
