"""Holdfast's flows for `benchmarks.flows`, and a plain run beside them."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from benchmarks import tally
from holdfast import Flow, Holdfast

app = Holdfast("bench-flows")


async def nothing(n: int) -> int:
    """A step without work."""
    return n + 1


@app.job(keep_payload=False)
async def plain(n: int) -> int:
    """A run without work."""
    tally.started(0)
    tally.ended()
    return n


@app.flow
async def three(ctx: Flow, n: int) -> int:
    """Three steps."""
    tally.started(0)
    for _ in range(3):
        n = await ctx.step(nothing, n)
    tally.ended()
    return n


@app.flow
async def wide(ctx: Flow, n: int) -> int:
    """A fan-out."""
    tally.started(0)
    found = len(await ctx.gather(plain.request(i) for i in range(n)))
    tally.ended()
    return found


@app.job
async def stamp() -> int:
    """A child that says when it ended, in nanoseconds."""
    return time.monotonic_ns()


@app.flow
async def woken(ctx: Flow) -> None:
    """A parent that notes how long ago its last child ended."""
    tally.started(max(await ctx.gather(stamp.request() for _ in range(3))))
    tally.ended()


@app.flow
async def sleeper(ctx: Flow, until: float) -> None:
    """A sleep."""
    tally.started(0)
    await ctx.sleep_until(datetime.fromtimestamp(until, UTC))
    tally.ended()
