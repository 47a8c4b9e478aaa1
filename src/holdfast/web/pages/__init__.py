"""The pages: what people see, rendered on the server, one module per noun.

`include` adds the routes, the static files and the event stream. Pages read through
`holdfast.status` and `holdfast.client`, as the API does, and each is bounded: it costs the same
however much there is. Every change is confirmed first, on a page that says what will happen
(`Question`), and is then a form with a CSRF token.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from holdfast.web.live import STREAMS_EACH, STREAMS_MOST
from holdfast.web.pages import (
    actions,
    alerts,
    audit,
    bulk,
    cluster,
    dead,
    fleet,
    flows,
    jobs,
    limits,
    new_schedule,
    overview,
    run_list,
    runs,
    schedules,
    search,
)
from holdfast.web.pages.rendering import render
from holdfast.web.pages.request import Shared, ViewerPage
from holdfast.web.problems import Problem
from holdfast.web.services import Services

HERE = Path(__file__).parents[1]
PAGES = (
    overview,
    jobs,
    run_list,
    bulk,
    runs,
    flows,
    limits,
    new_schedule,
    schedules,
    dead,
    cluster,
    fleet,
    alerts,
    audit,
    search,
    actions,
)

router = APIRouter(include_in_schema=False)


def include(app: FastAPI) -> None:
    """Add the pages, their static files, and the event stream."""
    services: Services = app.state.services
    app.state.shared = Shared(services.broker.clock)
    app.state.bulks = bulk.bulks()
    services.before_close.append(app.state.bulks.aclose)
    app.mount("/static", StaticFiles(directory=HERE / "static"), "static")
    for module in PAGES:
        app.include_router(module.router)
    app.include_router(router)


@router.get("/live")
async def live(page: ViewerPage, after: str = "") -> Response:
    """Server-sent events that tell an open page what changed (see `holdfast.web.live`)."""
    feed, who = page.feed, page.user.name
    await feed.start()
    if feed.streams >= STREAMS_MOST or feed.viewers[who] >= STREAMS_EACH:
        raise Problem(503, "Too many pages are open: close some", {"Retry-After": "30"})
    last = page.request.headers.get("last-event-id", "") or after
    events = feed.stream(last, who)
    first = await anext(events)  # counts the stream now, so concurrent requests see the limit

    async def rest() -> AsyncIterator[bytes]:
        yield first
        async for event in events:
            yield event

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(rest(), media_type="text/event-stream", headers=headers)


def render_login(
    request: Request, *, status: int = 200, message: str = "", next: str = ""
) -> Response:
    """The login page."""
    return render(request, "login.html", status=status, message=message, next=next)


def render_problem(request: Request, status: int, detail: str) -> Response:
    """The error page."""
    title = HTTPStatus(status).phrase
    return render(request, "problem.html", status=status, title=title, detail=detail, code=status)
