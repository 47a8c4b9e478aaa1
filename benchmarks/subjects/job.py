"""The one job, for every subject that calls a function of the user's."""

from __future__ import annotations

import asyncio
import os
import time

from benchmarks import tally

URL = os.environ.get("BENCH_URL", "")
TUNED = os.environ.get("BENCH_VARIANT") == "tuned"
AT_ONCE = 100
"""Enqueues under way together, where a client has no way to send many."""


async def work(sent: int, nap: float, text: str) -> None:
    """Count, and wait if told to."""
    tally.started(sent)
    if nap:
        await asyncio.sleep(nap)
    tally.ended()


def work_in_thread(sent: int, nap: float, text: str) -> None:
    """The same for systems that call plain functions."""
    tally.started(sent)
    if nap:
        time.sleep(nap)
    tally.ended()
