"""Temporal's dev server: workflows of three activities.

Usage: `python -m benchmarks.subjects.temporal_flows PORT COUNT quickstart|tuned`; prints workflows
per second. `quickstart` has a worker as in Temporal's tutorial. `tuned` runs local activities,
which go through the server once for each workflow, with more pollers and no limit below 1,000.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from datetime import timedelta
from typing import Any

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import Worker

TIMEOUT = timedelta(seconds=60)
QUEUE = "bench"
TUNED: dict[str, Any] = {
    "max_concurrent_workflow_tasks": 1_000,
    "max_concurrent_local_activities": 1_000,
    "max_concurrent_workflow_task_polls": 20,
    "max_cached_workflows": 5_000,
}


@activity.defn
async def nothing(n: int) -> int:
    return n + 1


@workflow.defn(name="three")
class Three:
    @workflow.run
    async def run(self, n: int) -> int:
        for _ in range(3):
            n = await workflow.execute_activity(nothing, n, start_to_close_timeout=TIMEOUT)
        return n


@workflow.defn(name="three-local")
class ThreeLocal:
    @workflow.run
    async def run(self, n: int) -> int:
        for _ in range(3):
            n = await workflow.execute_local_activity(nothing, n, start_to_close_timeout=TIMEOUT)
        return n


async def main() -> None:
    port, count, how = sys.argv[1:]
    client = await Client.connect(f"127.0.0.1:{port}")
    flow, options = ("three", {}) if how == "quickstart" else ("three-local", TUNED)
    worker = Worker(
        client, task_queue=QUEUE, workflows=[Three, ThreeLocal], activities=[nothing], **options
    )
    async with worker:
        await client.execute_workflow(flow, 0, id="first", task_queue=QUEUE)
        began = time.monotonic()
        await asyncio.gather(
            *(
                client.execute_workflow(flow, n, id=f"three-{n}", task_queue=QUEUE)
                for n in range(int(count))
            )
        )
        print(int(count) / (time.monotonic() - began), flush=True)
        os._exit(0)  # its library may abort an interpreter that ends


if __name__ == "__main__":
    asyncio.run(main())
