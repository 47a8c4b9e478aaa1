# ruff: noqa: T201 - printing is what is tested
"""Jobs that log and print, for a worker process."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from holdfast import Backoff, Holdfast

app = Holdfast("talking")
quiet = logging.getLogger("shop.quiet")
quiet.addHandler(logging.StreamHandler())
quiet.propagate = False


@app.job(retry=Backoff.never())
async def talk(gate: str) -> None:
    """Logs and prints, waits for a file, and fails."""
    logging.getLogger("shop").info("order %s", 42, extra={"customer": "ann", "items": 3})
    print("printed")
    print("two", "parts", sep="\n", end="")
    print("to stderr", file=sys.stderr)
    quiet.warning("of a logger that does not propagate")
    logging.getLogger("shop").debug("not kept")
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, logging.getLogger("shop").info, "in an executor")
    while not Path(gate).exists():
        await asyncio.sleep(0.01)
    raise ValueError("it failed")


@app.job(execution="process")
def compute(n: int) -> int:
    """Logs and prints in a process of the pool."""
    print("computing", n)
    logging.getLogger("shop").warning("slow", extra={"n": n})
    print("unfinished", end="")
    return n
