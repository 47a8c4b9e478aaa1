"""Celery on Redis, with its process pool.

Tuned: a pool of threads, acknowledges late, prefetches more; no gossip, mingle, heartbeat, remote
control or rate limits.
"""

from __future__ import annotations

from celery import Celery

from benchmarks import sending
from benchmarks.subjects.job import TUNED, URL, work_in_thread

app = Celery("bench", broker=URL)
if TUNED:
    app.conf.update(
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=100,
        worker_disable_rate_limits=True,
        worker_enable_remote_control=False,
    )
task = app.task(name="work")(work_in_thread)


class CelerySender:
    """`apply_async` with one producer kept for all."""

    async def open(self) -> None:
        self.producer = app.amqp.Producer(app.connection_for_write())

    async def one(self, payload: sending.Payload) -> None:
        task.apply_async(kwargs=payload, producer=self.producer)

    async def many(self, payloads: list[sending.Payload]) -> None:
        for payload in payloads:
            task.apply_async(kwargs=payload, producer=self.producer)

    async def close(self) -> None:
        self.producer.close()


if __name__ == "__main__":
    sending.main(CelerySender(), uvloop=False)
