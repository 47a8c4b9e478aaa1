"""Errors as problem+json (RFC 9457): what was wrong, and what to do about it.

Every error of the API has this form: from a route, from a check in front of the routes, from the
framework, or from Holdfast itself, whose errors are sentences already. Bugs are answered without
details, and logged with them.
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

from holdfast import errors
from holdfast.client.schedules import UnknownSchedule
from holdfast.status.limits import UnknownLimit
from holdfast.web.masking import masked_text
from holdfast.web.network import path_of

log = logging.getLogger("holdfast.web")

API: Final = "/api/"
MEDIA_TYPE: Final = "application/problem+json"
SHOWN_ERRORS: Final = 20
"""Most sentences in an answer: a request may have thousands of wrong fields."""

STATUS: Final[tuple[tuple[type[Exception], int], ...]] = (
    (UnknownSchedule, 404),
    (UnknownLimit, 404),
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
"""The first matching entry applies; any other error is a bug or a broken server: 500."""


class Details(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a problem response."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    errors: tuple[str, ...] = ()
    """One sentence for each invalid part of the request."""


class Problem(HTTPException):
    """Raised to answer with a status and a sentence."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, detail, headers)


def problem(
    status: int,
    detail: str,
    *,
    headers: dict[str, str] | None = None,
    wrong: tuple[str, ...] = (),
) -> Response:
    """A problem+json response."""
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
    """Answer every error of an app as a problem."""
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(errors.HoldfastError, _on_own)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    app.add_exception_handler(Exception, _on_bug)


def answer(
    request: Request, status: int, detail: str, headers: dict[str, str] | None = None
) -> Response:
    """A problem: as a page for a browser, as problem+json for a program."""
    user = getattr(request.state, "user", None)
    if user is not None and not user.sees_secrets:
        detail = masked_text(detail)
    if wants_page(request):
        from holdfast.web.pages import render_problem

        page = render_problem(request, status, detail)
        page.headers.update(headers or {})
        return page
    return problem(status, detail, headers=headers)


def wants_page(request: Request) -> bool:
    """Whether a browser is asking, rather than a program."""
    if not request.app.state.with_pages or path_of(request.scope).startswith(API):
        return False
    return "text/html" in request.headers.get("accept", "")


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail, headers = str(error.detail), dict(error.headers or {})
    if detail == HTTPStatus(error.status_code).phrase:  # raised by the framework
        details = _PAGE_DETAILS if wants_page(request) else _DETAILS
        detail = details.get(error.status_code, detail)
    return answer(request, error.status_code, detail, headers)


_DETAILS: Final = {
    404: "No such address: see /api/v1/openapi.json",
    405: "Method not allowed here: see /api/v1/openapi.json",
}
_PAGE_DETAILS: Final = {
    404: "This page does not exist. Choose another from the menu.",
    405: "This page cannot be requested this way. Go back and try again.",
}
"""Wording for people, who do not read the API's description."""


async def _on_validation(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    wrong = tuple(_sentence(found) for found in error.errors()[:SHOWN_ERRORS])
    return problem(422, "; ".join(wrong) or "The request is not valid", wrong=wrong)


def _sentence(found: dict[str, Any]) -> str:
    where, *path = [str(part) for part in found.get("loc", ())] or ["request"]
    name = ".".join(path)
    return f"{where} {name}: {found.get('msg', 'not valid')}" if name else str(found.get("msg"))


async def _on_gone(_: Request, __: Exception) -> Response:
    """A client that disconnected during a request: not a bug."""
    return Response(status_code=400)


async def _on_own(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.HoldfastError)
    return of_error(request, error)


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return answer(
        request, 500, "Internal error: a bug in Holdfast. The log of 'holdfast web' has the details"
    )
