"""Flows: how many a second, what a fan-out costs, what sleepers cost.

    python -m benchmarks.flows              all of it
    python -m benchmarks.flows steps gather sleepers

One worker in this process, one file-backed nats-server with default sync. Ratios inside one run
mean more than the figures: the machine is rarely quiet.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from holdfast import Flow, Holdfast, Worker
from holdfast.config import WorkerConfig
from holdfast.server import Server

FLOWS: Final = 3_000
"""Enough for a second or two."""
CHILDREN: Final = 10_000
"""The most that one gather takes."""
SLEEPERS: Final = 10_000
"""A tenth of what is promised: the rest is proportional."""

app = Holdfast("bench")


async def nothing(n: int) -> int:
    """A step without work."""
    return n


@app.job
async def plain(n: int) -> int:
    """A run without work."""
    return n


@app.flow
async def three(ctx: Flow, n: int) -> int:
    """Three steps."""
    for _ in range(3):
        n = await ctx.step(nothing, n)
    return n


@app.flow
async def wide(ctx: Flow, n: int) -> int:
    """A fan-out."""
    return len(await ctx.gather(plain.request(i) for i in range(n)))


@app.flow
async def sleeper(ctx: Flow, n: int) -> int:
    """A long sleep."""
    await ctx.sleep("1d")
    return n


async def _timed(what: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await what()
    return time.perf_counter() - began


async def _ended(runs: list[Any]) -> None:
    for run in runs:
        await run.result(timeout=300)


async def _parked(count: int) -> None:
    backend: Any = await app.backend()
    names = backend.broker.names
    while True:
        request = {"subjects_filter": names.later("default", "sleeper", "*", "*")}
        info = await backend.broker.api(f"STREAM.INFO.{names.jobs}", request)
        if int(info.get("total", 0)) >= count or len(info["state"].get("subjects") or {}) >= count:
            return
        await asyncio.sleep(0.05)


async def steps() -> None:
    """Flows of three steps beside plain runs."""
    for job in (plain, three):
        runs = await job.enqueue_many(range(FLOWS))
        seconds = await _timed(lambda runs=runs: _ended(runs))
        print(f"{job.name}: {FLOWS / seconds:,.0f} a second", flush=True)


async def gather() -> None:
    """A gather of children beside as many plain runs."""
    runs = await plain.enqueue_many(range(CHILDREN))
    drained = await _timed(lambda: _ended(runs))
    run = await wide.enqueue(CHILDREN)
    gathered = await _timed(lambda: _ended([run]))
    print(
        f"{CHILDREN:,} plain runs: {drained:.2f} s, gathered: {gathered:.2f} s, "
        f"{gathered / drained:.2f} times",
        flush=True,
    )


async def sleepers() -> None:
    """Flows that sleep."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await sleeper.enqueue_many(range(SLEEPERS))
    seconds = await _timed(lambda: _parked(SLEEPERS))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{SLEEPERS:,} asleep after {seconds:.1f} s, worker +{grown:.0f} MB", flush=True)


async def main(names: list[str]) -> None:
    """Measure what was asked for."""
    chosen = {"steps": steps, "gather": gather, "sleepers": sleepers}
    with Server() as server:
        app.connect_with(nats_url=server.url, namespace="bench")
        worker = Worker(app, WorkerConfig(concurrency=200))
        task = asyncio.create_task(worker.run())
        while not worker.pulling:  # noqa: ASYNC110 - it is a property
            await asyncio.sleep(0.05)
        for name in names or list(chosen):
            await chosen[name]()
        worker.stop()
        await task


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
