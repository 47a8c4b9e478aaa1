"""taskiq-redis with a lock: a run polls for one of three locks of its customer, in its place.

Usage: `python -m benchmarks.subjects.taskiq_lock_jobs RUNS CUSTOMERS SECONDS` sends and prints the
seconds from the first start to the last end; `taskiq worker` of this module executes.
"""

from __future__ import annotations

import asyncio
import sys
import time

from redis.asyncio import Redis
from taskiq_redis import RedisStreamBroker

from benchmarks.subjects.job import URL

POLL_SECONDS = 0.1
"""redis-py's own for a lock."""

broker = RedisStreamBroker(URL)
redis: Redis = Redis.from_url(URL, max_connections=2_000)


@broker.task(task_name="work")
async def work(customer: str, seconds: float) -> None:
    while True:
        for place in range(3):
            lock = redis.lock(f"{customer}:{place}", timeout=60)
            if await lock.acquire(blocking=False):
                await redis.zadd("times", {f"{customer}:{time.time_ns()}:a": time.monotonic()})
                await asyncio.sleep(seconds)
                await redis.zadd("times", {f"{customer}:{time.time_ns()}:b": time.monotonic()})
                await redis.incr("ended")
                await lock.release()
                return
        await asyncio.sleep(POLL_SECONDS)


async def main() -> None:
    runs, customers, seconds = sys.argv[1:]
    await broker.startup()
    for number in range(int(runs)):
        await work.kiq(f"c{number % int(customers)}", float(seconds))
    while int(await redis.get("ended") or 0) < int(runs):  # noqa: ASYNC110 - by a worker
        await asyncio.sleep(0.05)
    found = [score for _, score in await redis.zrange("times", 0, -1, withscores=True)]
    print(max(found) - min(found))


if __name__ == "__main__":
    asyncio.run(main())
