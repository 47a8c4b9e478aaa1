"""`/live`: server-sent events for every open page (see `holdfast.web.live`)."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from holdfast.web.live import STREAMS_MOST
from holdfast.web.pages.visit import ViewerVisit
from holdfast.web.problems import Problem

router = APIRouter(include_in_schema=False)


@router.get("/live")
async def live(visit: ViewerVisit, after: str = "") -> Response:
    """What changes, until the page is closed or this process ends."""
    feed = visit.feed
    if feed.streams >= STREAMS_MOST:
        raise Problem(503, "Too many pages are open: close some", {"Retry-After": "30"})
    await feed.start()
    last = visit.request.headers.get("last-event-id", "") or after
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(feed.stream(last), media_type="text/event-stream", headers=headers)
