"""`create_app`: routes, errors, and the checks around every request."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from holdfast import HoldfastError
from uptime.app import app as jobs
from uptime.app import reconcile
from uptime.cache import Cache
from uptime.config import Config, load
from uptime.service import Refusal, Service
from uptime.web import api, pages
from uptime.web.security import Denied, Gate, protect

STATIC = Path(__file__).parent / "static"

log = logging.getLogger("uptime.web")


def create_app(config: Config | None = None, *, host: str = "127.0.0.1") -> FastAPI:
    """The application; `host` is where it will listen, which decides whether a token is needed."""
    config = config or load()
    gate = Gate(config, host)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        async with jobs:
            await reconcile()
            yield

    app = FastAPI(
        title="Uptime",
        version="0.1.0",
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        openapi_url="/api/openapi.json",
    )
    app.state.gate = gate
    app.state.service = Service(config)
    app.state.cache = Cache(config.cache_seconds)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.include_router(api.router)
    app.include_router(pages.router)
    _add_errors(app)

    @app.middleware("http")
    async def guarded(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        try:
            gate.check(request)
            response = await call_next(request)
        except Denied as error:
            response = _problem(request, str(error), error.status)
        protect(response.headers)
        return response

    return app


def _add_errors(app: FastAPI) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, (Refusal, Denied)) else 500
        return _problem(request, str(error), status)

    async def away(request: Request, error: Exception) -> Response:
        log.warning("%s %a: %a", request.method, request.url.path, str(error))  # untrusted text
        return _problem(request, "The store does not answer right now: try again soon.", 503)

    async def http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return _problem(request, "There is no such page." if status == 404 else str(error), status)

    async def invalid(request: Request, error: Exception) -> Response:
        return _problem(request, "The request is not what this address takes.", 422)

    for kind in (Refusal, Denied):
        app.add_exception_handler(kind, refused)
    app.add_exception_handler(HoldfastError, away)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)


def _problem(request: Request, text: str, status: int) -> Response:
    """An error, for a program or for a person."""
    wants_page = "text/html" in request.headers.get("accept", "")
    if wants_page and not request.url.path.startswith("/api/"):
        return pages.error_page(request, text, status)
    body = {"type": "about:blank", "title": text, "status": status}
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(body, status, headers, media_type="application/problem+json")
