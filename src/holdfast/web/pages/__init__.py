"""The pages: what a person sees, rendered on the server, one module for each.

`include` adds the routes, the files and the feed; `render_login` and `render_problem` are called by
the guard in front of the routes. A page reads through `holdfast.status` and `holdfast.client`, as
the API does, and is bounded: it costs the same however much there is. What changes state is asked
about first, on a page of its own that says what will happen (`Question`), and is then a form with a
CSRF token.
"""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from holdfast.web.live import Feed
from holdfast.web.pages import (
    cluster,
    dead,
    events,
    fleet,
    fleet_run,
    jobs,
    new_schedule,
    overview,
    run_detail,
    runs,
    schedule_detail,
    schedules,
)
from holdfast.web.pages.rendering import page
from holdfast.web.pages.visit import Shared
from holdfast.web.services import Services

HERE = Path(__file__).parents[1]
MODULES = (
    overview,
    jobs,
    runs,
    run_detail,
    schedules,
    schedule_detail,
    new_schedule,
    dead,
    cluster,
    fleet,
    fleet_run,
    events,
)


def include(app: FastAPI) -> None:
    """Add the pages, their files, and the feed that keeps them up to date."""
    services: Services = app.state.services
    app.state.feed = Feed(services.client)
    app.state.shared = Shared(services.broker.clock)
    services.before_close.append(app.state.feed.aclose)
    app.mount("/static", StaticFiles(directory=HERE / "static"), "static")
    for module in MODULES:
        app.include_router(module.router)


def render_login(
    request: Request, *, status: int = 200, message: str = "", next: str = ""
) -> Response:
    """The page that asks for a token."""
    return page(request, "login.html", status=status, message=message, next=next)


def render_problem(request: Request, status: int, detail: str) -> Response:
    """The page that says what went wrong."""
    title = HTTPStatus(status).phrase
    return page(request, "problem.html", status=status, title=title, detail=detail, code=status)
