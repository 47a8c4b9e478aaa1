"""`/flows`: flows and what they wait for; and one flow as a timeline of its operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from fastapi import APIRouter
from starlette.responses import Response

from holdfast.status.flows import FlowDetail, FlowInfo, FlowLine
from holdfast.web.pages.request import ViewerPage

router = APIRouter(include_in_schema=False)

SHOWN: Final = 200
"""Rows of one page; to find others, the filter is faster."""
SHARED_SECONDS: Final = 1.0
"""Listing reads every run's record."""
LEAST_WIDTH: Final = 0.6
"""The shortest bar, in percent of the timeline: a shorter one would be invisible."""


class Bar(NamedTuple):
    """One operation on the timeline, in percent of the flow's time so far."""

    line: FlowLine
    left: float
    width: float


@router.get("/flows")
async def list_flows(page: ViewerPage, q: str = "", state: str = "") -> Response:
    """The flows whose name, run or wait contains `q`."""

    async def read() -> Sequence[FlowInfo]:
        return await page.flows.list(limit=10 * SHOWN)

    every: Sequence[FlowInfo] = await page.shared("flows", SHARED_SECONDS, read)
    found = [
        one
        for one in every
        if q.lower() in f"{one.job} {one.run} {one.waits}".lower()
        and (not state or one.state == state)
    ]
    return await page.show(
        "flows.html",
        "flows",
        flows=found[:SHOWN],
        count=len(found),
        every=len(every),
        q=q,
        state=state,
        states=sorted({one.state for one in every}),
    )


@router.get("/flows/{run:path}")
async def show(page: ViewerPage, run: str) -> Response:
    """One flow."""
    detail = await page.flows.show(run)
    bars = timeline(detail, page.now)
    waits = next((one for one in detail.lines if one.open and one.kind == "event"), None)
    event, _, key = waits.name.partition(" ") if waits else ("", "", "")
    return await page.show(
        "flow.html", "flows", detail=detail, info=detail.info, bars=bars, event=event, key=key
    )


def timeline(detail: FlowDetail, now: float) -> list[Bar]:
    """The place of each operation on the timeline of its flow, which extends to its end or to
    now."""
    first, last = detail.created, detail.ended or now
    whole = max(last - first, 0.001)

    def percent(at: float) -> float:
        return round(100 * min(max(at - first, 0.0), whole) / whole, 2)

    bars = []
    for line in detail.lines:
        left = percent(line.since)
        until = last if line.open else min(line.until or line.since, last)
        width = max(percent(until) - left, LEAST_WIDTH)
        bars.append(Bar(line, min(left, 100 - LEAST_WIDTH), min(width, 100 - left)))
    return bars
