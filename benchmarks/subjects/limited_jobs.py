"""Holdfast's job with one of several limits, for `benchmarks.limits`."""

from __future__ import annotations

import asyncio
import os
import time

from benchmarks import tally
from holdfast import Holdfast, Limit

LIMITS = {
    "none": [],
    "keys": [Limit(running=3, per="key")],
    "shared": [Limit(running=10_000)],
    "contended": [Limit(running=1, per="key")],
    "customers": [Limit(running=3, per="key")],
    "line": [Limit(running=1, per="key")],
    "paced": [Limit(starts="50/s", burst=5)],
    "handover": [Limit(running=3, per="key")],
}

app = Holdfast("bench-limits")
freed: dict[str, list[int]] = {}
"""When handlers of each key returned, in nanoseconds, until another run takes the place."""


@app.job(limits=LIMITS[os.environ.get("BENCH_LIMIT", "none")], keep_payload=False)
async def work(key: str, sent: int = 0, nap: float = 0.0) -> None:
    """Count, and wait a moment. A place that was freed is taken by the next run of its key."""
    tally.started(freed[key].pop(0) if freed.get(key) else sent)
    if nap:
        await asyncio.sleep(nap)
    if os.environ["BENCH_LIMIT"] == "handover":
        freed.setdefault(key, []).append(time.monotonic_ns())
    tally.ended()
