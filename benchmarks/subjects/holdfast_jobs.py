"""Holdfast: the job in one of its delivery modes, and its sender.

The worker is the product's own command: `holdfast worker benchmarks.subjects.holdfast_jobs:app`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, cast

from benchmarks import sending, tally
from holdfast import Holdfast

app = Holdfast("bench")
_delivery: Any = os.environ.get("BENCH_VARIANT", "effectively_once")


@app.job(delivery=_delivery)
async def work(sent: int, nap: float, text: str) -> None:
    """The job."""
    tally.started(sent)
    if nap:
        await asyncio.sleep(nap)
    tally.ended()


class HoldfastSender:
    """`enqueue`, and `enqueue_many`."""

    async def open(self) -> None:
        client = cast(Any, await app.backend())
        await client.topology.ensure()

    async def one(self, payload: sending.Payload) -> None:
        await work.enqueue(**payload)

    async def many(self, payloads: list[sending.Payload]) -> None:
        await work.enqueue_many([work.request(**p) for p in payloads])

    async def close(self) -> None:
        await app.close()


if __name__ == "__main__":
    sending.main(HoldfastSender())
