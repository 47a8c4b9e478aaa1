"""The jobs that `benchmarks.history` executes, with or without history."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from holdfast import Holdfast
from holdfast.ownership.history import History

app = Holdfast("history")


@app.job
async def work(n: int) -> int:
    """Does nothing, and returns something."""
    return n


@app.job
async def hold() -> None:
    """Runs for as long as its worker."""
    await asyncio.sleep(1e9)


async def _nothing(*_: Any, **__: Any) -> None:
    return None


if os.environ.get("BENCH_WITHOUT_HISTORY"):
    History.append = _nothing  # type: ignore[method-assign]
