"""arq on Redis. Tuned: 100 at a time, polls every 10 ms, keeps no results, uvloop."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings

from benchmarks import sending
from benchmarks.subjects import job
from benchmarks.subjects.job import AT_ONCE, TUNED, URL

settings = RedisSettings.from_dsn(URL)
if TUNED:
    import uvloop

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


async def work(ctx: dict[str, Any], sent: int, nap: float, text: str) -> None:
    """The job."""
    await job.work(sent, nap, text)


class WorkerSettings:
    """What `arq benchmarks.subjects.arq_jobs.WorkerSettings` reads."""

    functions = (work,)
    redis_settings = settings
    max_jobs = int(os.environ.get("BENCH_CONCURRENCY", "10"))
    if TUNED:
        poll_delay = 0.01
        keep_result = 0


class ArqSender:
    """`enqueue_job`; many at once for want of a bulk call."""

    async def open(self) -> None:
        self.pool = await create_pool(settings)

    async def one(self, payload: sending.Payload) -> None:
        await self.pool.enqueue_job("work", **payload)

    async def many(self, payloads: list[sending.Payload]) -> None:
        for start in range(0, len(payloads), AT_ONCE):
            part = payloads[start : start + AT_ONCE]
            await asyncio.gather(*(self.one(payload) for payload in part))

    async def close(self) -> None:
        await self.pool.aclose()


if __name__ == "__main__":
    sending.main(ArqSender(), uvloop=TUNED)
