"""`/limits`: every limit; and one limit with the runs that hold a place or wait, and how fast its
line shrinks.

That rate is the number of runs of its jobs that ended in the last minutes, by the server's count: a
run of a job with two limits counts for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from fastapi import APIRouter
from starlette.responses import Response

from holdfast.durations import MINUTE
from holdfast.names import check_name
from holdfast.status.limits import LimitInfo
from holdfast.web.pages.request import PageRequest, ViewerPage

router = APIRouter(include_in_schema=False)

SHOWN: Final = 200
"""Rows of one page; to find others, the filter is faster."""
DRAIN_SECONDS: Final = 300
"""Minutes of that rate: enough for a steady number, few enough to notice when nothing moves."""


class Drain(NamedTuple):
    """How fast the line of a limit becomes shorter."""

    per_minute: float
    left: float | None
    """Seconds until the line is empty at that rate; None if unknown."""


@router.get("/limits")
async def list_limits(page: ViewerPage, q: str = "") -> Response:
    """The limits whose name or jobs contain `q`."""
    every: Sequence[LimitInfo] = await page.all_limits()
    found = [one for one in every if q.lower() in f"{one.name} {' '.join(one.jobs)}".lower()]
    return await page.show(
        "limits.html",
        "limits",
        limits=found[:SHOWN],
        drains={one.name: await drain(page, one) for one in found[:SHOWN]},
        count=len(found),
        every=len(every),
        q=q,
    )


@router.get("/limits/{name}")
async def show(page: ViewerPage, name: str) -> Response:
    """One limit."""
    detail = await page.limits.show(check_name(name, "limit"))
    return await page.show(
        "limit.html",
        "limits",
        detail=detail,
        info=detail.info,
        drain=await drain(page, detail.info),
    )


async def drain(page: PageRequest, info: LimitInfo) -> Drain:
    """How fast the runs of a limit's jobs have ended lately."""
    minutes = int(DRAIN_SECONDS // MINUTE)
    recent = (await page.trends()).items()
    ended = sum(sum(parts[-minutes:]) for (_, job), parts in recent if job in info.jobs)
    a_second = ended / DRAIN_SECONDS
    left = info.waiting / a_second if a_second and info.waiting and not info.paused else None
    return Drain(60 * a_second, left)
