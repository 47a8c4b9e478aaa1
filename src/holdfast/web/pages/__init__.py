"""The pages, rendered on the server.

Whoever renders a page uses what is here: `include` adds the routes and the files, `render` fills a
template with what all of them need, `render_login` and `render_problem` are called by the guard in
front of the routes. In a template: `{{ csrf }}` is the value of the hidden field `csrf` that every
form must have, `{{ root }}` goes in front of every address (the app may be mounted), `{{ user }}`
is who is asking, and `user.may('operator')` whether they may.
"""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.templating import Jinja2Templates

from holdfast.web.sessions import csrf_token

HERE = Path(__file__).parents[1]
templates = Jinja2Templates(HERE / "templates")
router = APIRouter(include_in_schema=False)


def include(app: FastAPI) -> None:
    """Add the pages and their files."""
    app.mount("/static", StaticFiles(directory=HERE / "static", check_dir=False), "static")
    app.include_router(router)


def render(request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
    """A page."""
    shared = {
        "user": request.state.user,
        "csrf": csrf_token(request),
        "root": request.scope.get("root_path", ""),
    }
    return templates.TemplateResponse(request, template, {**shared, **values}, status)


def render_login(
    request: Request, *, status: int = 200, message: str = "", next: str = ""
) -> Response:
    """The page that asks for a token."""
    return render(request, "login.html", status=status, message=message, next=next)


def render_problem(request: Request, status: int, detail: str) -> Response:
    """The page that says what went wrong."""
    title = HTTPStatus(status).phrase
    return render(request, "problem.html", status=status, title=title, detail=detail, code=status)
