"""How long short commands and new workers take: `python -m benchmarks.starts [ROUNDS]`.

The wall time of `holdfast runs list`, and from the start of a worker's process to the first line of
the handler of a run that waits for it. Python's bytecode is there, the server is warm.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time

from holdfast import Holdfast
from holdfast.server import Server

app = Holdfast("starts")


@app.job
async def when() -> float:
    return time.time()


async def measure(rounds: int) -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with Server() as server:
        os.environ["HOLDFAST_NATS_URL"] = server.url
        command = [sys.executable, "-m", "holdfast"]
        starts = [await _first_run(command) for _ in range(rounds + 1)]
        lists = [_wall([*command, "runs", "list"]) for _ in range(rounds + 1)]
    for what, found in (("worker's first run", starts), ("runs list", lists)):
        warm = found[1:]
        print(f"{what}: median {statistics.median(warm):.3f} s, {min(warm):.3f} to {max(warm):.3f}")


async def _first_run(command: list[str]) -> float:
    """Seconds from the start of a worker's process to the start of a handler."""
    async with app:
        run = await when.enqueue()
        began = time.time()
        words = [*command, "worker", "benchmarks.starts:app", "--health-port", "0"]
        worker = await asyncio.create_subprocess_exec(*words, stderr=subprocess.DEVNULL)
        try:
            return await run.result(60) - began
        finally:
            worker.terminate()
            await worker.wait()


def _wall(command: list[str]) -> float:
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    return time.monotonic() - began


if __name__ == "__main__":
    asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10))
