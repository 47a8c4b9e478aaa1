"""`/jobs`: every job and its queue; pause, resume and purge."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from holdfast.web.pages import charts
from holdfast.web.pages.request import ViewerPage

router = APIRouter(include_in_schema=False)

SHOWN: Final = 200
TREND_SECONDS: Final = 900
TREND_PARTS: Final = 30


@router.get("/jobs")
async def list_jobs(page: ViewerPage, q: str = "") -> Response:
    """The jobs whose name or group contains `q`."""
    every = await page.all_jobs()
    found = [j for j in every if q.lower() in f"{j.group}/{j.job}".lower()]
    trends = page.feed.rates.by_job(page.now, TREND_SECONDS, TREND_PARTS)
    alive = {n.group for n in await page.all_nodes() if n.role == "worker" and n.state == "RUNNING"}
    return await page.show(
        "jobs.html",
        "jobs",
        jobs=found[:SHOWN],
        count=len(found),
        every=len(every),
        q=q,
        alive=alive,
        uncounted=page.uncounted,
        trends={
            home: (charts.spark(values), sum(values))
            for home, values in trends.items()
            if any(values)
        },
    )
