"""Holdfast's job with one of several limits, for `benchmarks.limits`."""

from __future__ import annotations

import asyncio
import os

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
}

app = Holdfast("bench-limits")


@app.job(limits=LIMITS[os.environ.get("BENCH_LIMIT", "none")], keep_payload=False)
async def work(key: str, sent: int = 0, nap: float = 0.0) -> None:
    """Count, and wait a moment."""
    tally.started(sent)
    if nap:
        await asyncio.sleep(nap)
    tally.ended()
