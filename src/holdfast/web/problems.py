"""Errors as problem+json (RFC 9457): what was wrong, and what to do about it.

Every error of the API has this form, whoever raised it: a route, a check in front of the routes,
the framework, or Holdfast itself, whose errors are sentences already. What is a bug is answered
without details, and logged with them.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from holdfast import errors
from holdfast.client.schedules import UnknownSchedule
from holdfast.web.masking import hides, masked_text

log = logging.getLogger("holdfast.web")

API: Final = "/api/"
MEDIA_TYPE: Final = "application/problem+json"
SHOWN_ERRORS: Final = 20

STATUS: Final[tuple[tuple[type[Exception], int], ...]] = (
    (UnknownSchedule, 404),
    (errors.UnknownJob, 404),
    (errors.RunNotFound, 404),
    (errors.NotFound, 404),
    (errors.PayloadTooLarge, 413),
    (errors.NoWorker, 409),
    (errors.InvalidInput, 422),
    (errors.Conflict, 409),
    (errors.NotConnected, 503),
    (errors.Unavailable, 503),
    (errors.OutcomeUnknown, 503),
    (errors.RunError, 409),
    (errors.Unreadable, 409),
)
"""By error, the first that fits; any other is a bug or a broken server: 500."""


class Details(msgspec.Struct, frozen=True, omit_defaults=True):
    """A problem as it is sent."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    errors: tuple[str, ...] = ()
    """One sentence for each part of the request that was wrong."""


class Problem(HTTPException):
    """Answer with a status and a sentence."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, detail, headers)


def problem(
    status: int,
    detail: str,
    *,
    headers: dict[str, str] | None = None,
    wrong: tuple[str, ...] = (),
) -> Response:
    """A response that tells a problem."""
    title = HTTPStatus(status).phrase
    body = msgspec.json.encode(Details(title, status, detail, errors=wrong))
    return Response(body, status, {"Cache-Control": "no-store", **(headers or {})}, MEDIA_TYPE)


def status_of(error: Exception) -> int:
    """The status for one of Holdfast's errors."""
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def of_error(request: Request, error: errors.HoldfastError) -> Response:
    """One of Holdfast's own errors as a problem."""
    status = status_of(error)
    if status == 500:
        log.error("a request failed: %s", error, exc_info=error)
    return answer(request, status, str(error), {"Retry-After": "1"} if status == 503 else None)


def handle_problems(app: FastAPI) -> None:
    """Let every error of an app be answered as a problem."""
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(errors.HoldfastError, _on_own)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    app.add_exception_handler(Exception, _on_bug)


def answer(
    request: Request, status: int, detail: str, headers: dict[str, str] | None = None
) -> Response:
    """A problem for whoever asked: a page for a person, problem+json for a program."""
    user = getattr(request.state, "user", None)
    if user is not None and hides(user):
        detail = masked_text(detail)
    if wants_page(request):
        from holdfast.web.pages import render_problem

        page = render_problem(request, status, detail)
        page.headers.update(headers or {})
        return page
    return problem(status, detail, headers=headers)


def path_of(scope: Scope) -> str:
    """The path inside this app, wherever it is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def wants_page(request: Request) -> bool:
    """Whether a person with a browser is asking, rather than a program."""
    if not request.app.state.with_pages or path_of(request.scope).startswith(API):
        return False
    return "text/html" in request.headers.get("accept", "")


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = _DETAILS.get(error.status_code) if _is_bare(error) else str(error.detail)
    headers = dict(error.headers or {})
    return answer(request, error.status_code, detail or str(error.detail), headers)


_DETAILS: Final = {
    404: "There is nothing here: /api/v1/openapi.json lists what there is",
    405: "This address does not take that method: /api/v1/openapi.json tells which it takes",
}


def _is_bare(error: HTTPException) -> bool:
    return str(error.detail) == HTTPStatus(error.status_code).phrase


async def _on_validation(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    wrong = tuple(_sentence(found) for found in error.errors()[:SHOWN_ERRORS])
    return problem(422, "; ".join(wrong) or "The request is not as it must be", wrong=wrong)


def _sentence(found: dict[str, Any]) -> str:
    where, *path = [str(part) for part in found.get("loc", ())] or ["request"]
    name = ".".join(path)
    return f"{where} {name}: {found.get('msg', 'is wrong')}" if name else str(found.get("msg"))


async def _on_gone(_: Request, __: Exception) -> Response:
    """A client that disconnected in the middle of a request gets no answer; it is no bug."""
    return Response(status_code=400)


async def _on_own(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.HoldfastError)
    return of_error(request, error)


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return answer(request, 500, "This is a bug in Holdfast: the log of 'holdfast web' shows where")
