"""Holdfast: an app with as many jobs as `BENCH_JOBS` says, for the growth of idle workers."""

from __future__ import annotations

import os

from holdfast import Holdfast

app = Holdfast("many")


async def work(n: int = 0, text: str = "") -> None:
    """Nothing."""


for _number in range(int(os.environ.get("BENCH_JOBS", "1"))):
    app.job(name=f"job{_number}")(work)
