"""Waiting for many results at once: `python -m benchmarks.waits [COUNT]`.

One process sends COUNT runs, then waits for all of their results in one `asyncio.gather`, while
another process executes them. Reports time, memory and reconnects of the waiting process; a wrong
or missing result and a reconnect are errors: exit code 1.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time

from holdfast import Holdfast
from holdfast.client import Client
from holdfast.server import Server

app = Holdfast("waits")


@app.job
async def double(number: int) -> int:
    return 2 * number


async def measure(count: int) -> bool:
    """Wait for them all; whether all is well."""
    with Server() as server:
        waiting = Holdfast("waits", nats_url=server.url)
        job = waiting.job(double.func)
        async with waiting:
            runs = await job.enqueue_many(range(count))
            backend = await waiting.backend()
            assert isinstance(backend, Client)
            reconnects: list[None] = []
            backend.broker.on_reconnect(lambda: reconnects.append(None))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            started = time.monotonic()
            results = asyncio.gather(*(run.result() for run in runs))
            await asyncio.sleep(1)  # all of them wait before the first result comes
            command = [sys.executable, "-m", "holdfast", "worker", "benchmarks.waits:app"]
            worker = await asyncio.create_subprocess_exec(*command, "--nats-url", server.url)
            try:
                right = await results == [2 * n for n in range(count)]
            finally:
                worker.terminate()
                await worker.wait()
            took = time.monotonic() - started
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            print(
                f"{count:,} waits: {took:.1f} s, {memory / 1024:.0f} MB more, "
                f"{len(reconnects)} reconnects{'' if right else ', wrong results'}"
            )
            return right and not reconnects


if __name__ == "__main__":
    sys.exit(not asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)))
