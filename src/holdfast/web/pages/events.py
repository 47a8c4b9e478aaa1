"""`/live`: server-sent events for every open page (see `holdfast.web.live`)."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from holdfast.web.live import STREAMS_EACH, STREAMS_MOST
from holdfast.web.pages.visit import ViewerVisit
from holdfast.web.problems import Problem

router = APIRouter(include_in_schema=False)


@router.get("/live")
async def live(visit: ViewerVisit, after: str = "") -> Response:
    """What changes, until the page is closed or this process ends."""
    feed, who = visit.feed, visit.desk.user.name
    await feed.start()
    if feed.streams >= STREAMS_MOST or feed.viewers[who] >= STREAMS_EACH:
        raise Problem(503, "Too many pages are open: close some", {"Retry-After": "30"})
    last = visit.request.headers.get("last-event-id", "") or after
    events = feed.stream(last, who)
    first = await anext(events)  # it counts from here on: many requests at once are counted too

    async def rest() -> AsyncIterator[bytes]:
        yield first
        async for event in events:
            yield event

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(rest(), media_type="text/event-stream", headers=headers)
