"""DBOS: workflows of three steps, in Postgres.

Usage: `python -m benchmarks.subjects.dbos_flows URL COUNT quickstart|tuned`; prints workflows per
second. `quickstart` starts plain functions, each in a thread of DBOS's pool, and waits for them.
`tuned` has 50 connections and no sync for each commit (as NATS with its default), and takes the
better of plain functions and coroutines, of which 100 run at a time.
"""

from __future__ import annotations

import asyncio
import sys
import time

from dbos import DBOS, DBOSConfig

AT_ONCE = 100


@DBOS.step()
def nothing(n: int) -> int:
    return n + 1


@DBOS.workflow()
def three(n: int) -> int:
    for _ in range(3):
        n = nothing(n)
    return n


@DBOS.step()
async def nothing_async(n: int) -> int:
    return n + 1


@DBOS.workflow()
async def three_async(n: int) -> int:
    for _ in range(3):
        n = await nothing_async(n)
    return n


def threads(count: int) -> None:
    for handle in [DBOS.start_workflow(three, n) for n in range(count)]:
        handle.get_result()


async def coroutines(count: int) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(n: int) -> None:
        async with gate:
            await three_async(n)

    await asyncio.gather(*map(one, range(count)))


def main() -> None:
    url, count, how = sys.argv[1:]
    config: DBOSConfig = {"name": "bench", "system_database_url": url, "log_level": "ERROR"}
    if how == "tuned":
        config["system_database_url"] = f"{url}?options=-csynchronous_commit%3Doff"
        config["sys_db_pool_size"] = 50
    DBOS(config=config)
    DBOS.launch()
    three(0)
    began = time.monotonic()
    threads(int(count))
    rates = [int(count) / (time.monotonic() - began)]
    if how == "tuned":
        began = time.monotonic()
        asyncio.run(coroutines(int(count)))
        rates.append(int(count) / (time.monotonic() - began))
    print(max(rates), flush=True)
    DBOS.destroy()


if __name__ == "__main__":
    main()
