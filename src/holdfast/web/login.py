"""Logging in and out: a token becomes a session, and a session ends."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.responses import RedirectResponse, Response

from holdfast.web.auth import User, current_user
from holdfast.web.security import LOGIN, checked_form
from holdfast.web.services import services_of
from holdfast.web.sessions import forget_cookie, session_cookie, set_cookie

router = APIRouter(include_in_schema=False)
Fields = Annotated[dict[str, str], Depends(checked_form)]


def include(app: FastAPI) -> None:
    """Add `/login` and `/logout`."""
    app.include_router(router)


@router.get(LOGIN)
async def login_page(request: Request, next: str = "") -> Response:
    """The page that asks for a token."""
    from holdfast.web.pages import render_login

    if request.state.user is not None:
        return RedirectResponse(_inside(request, next), 303)
    return render_login(request, next=next)


@router.post(LOGIN)
async def log_in(request: Request, fields: Fields) -> Response:
    """Make a session of a token."""
    from holdfast.web.pages import render_login

    services = services_of(request)
    token = services.tokens.find(fields.get("token", "").strip())
    if token is None:
        message = "This token is not known: ask whoever runs this for one"
        return render_login(request, status=401, message=message, next=fields.get("next", ""))
    secret = await services.sessions.start(token)
    await services.desk(User(token.name, token.role, "session")).audit.write("login")
    response = RedirectResponse(_inside(request, fields.get("next", "")), 303)
    cookie = session_cookie(services.names)
    set_cookie(request, response, cookie, secret, services.config.session_seconds)
    return response


@router.post("/logout")
async def log_out(request: Request, fields: Fields) -> Response:
    """End the session."""
    services = services_of(request)
    cookie = session_cookie(services.names)
    secret = request.cookies.get(cookie)
    if secret:
        await services.sessions.end(secret)
        await services.desk(current_user(request)).audit.write("logout")
    response = RedirectResponse(f"{request.scope.get('root_path', '')}{LOGIN}", 303)
    forget_cookie(request, response, cookie)
    return response


def _inside(request: Request, wanted: str) -> str:
    """A path of this app to go on to; never another site."""
    root = str(request.scope.get("root_path", ""))
    parts = urlsplit(wanted)
    plain = wanted.startswith("/") and not wanted.startswith(("//", "/\\"))
    safe = plain and not parts.scheme and not parts.netloc and wanted.isprintable()
    return root + wanted if safe and "\\" not in wanted else f"{root}/"
