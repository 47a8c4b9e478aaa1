"""Jobs that a test holds at a gate: they report that they started, and end when it opens."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from holdfast import Holdfast

app = Holdfast("gates")
empty = Holdfast("empty")


def gates() -> Path:
    return Path(os.environ["GATES"])


@app.job
async def gate(name: str) -> int:
    """Ends with the id of its process when the file `<name>.open` exists."""
    (gates() / f"{name}.{os.getpid()}.started").touch()
    while not (gates() / f"{name}.open").exists():
        await asyncio.sleep(0.02)
    return os.getpid()


@app.job
async def quick(n: int) -> int:
    return n


@app.job(group="other")
async def elsewhere() -> None:
    return None
