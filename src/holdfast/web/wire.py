"""JSON in and out of the API: records as they are in Holdfast, and their shapes for OpenAPI.

A route says what it takes and returns by the record's type; the same type reads, checks, writes and
describes. Payloads pass through byte by byte. Answers carry an ETag: who asks again with
`If-None-Match` and finds nothing changed gets an empty 304.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from fastapi import FastAPI, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from holdfast.clock import rfc3339
from holdfast.errors import InvalidInput
from holdfast.web.masking import hides, masked
from holdfast.web.problems import MEDIA_TYPE, Details, Problem

T = TypeVar("T")

JSON: Final = "application/json"
MOST: Final = 500
REF: Final = "#/components/schemas/{name}"
PROBLEMS: Final = {
    400: "The request cannot be read.",
    401: "Nobody is logged in.",
    403: "Not with this role, or from another site.",
    404: "It is not there.",
    409: "Things are not as the request needs them.",
    413: "Too large.",
    415: "Not JSON.",
    421: "Not one of this server's names.",
    422: "A value is wrong.",
    429: "Too many requests.",
    503: "NATS does not answer right now.",
}

Limit = Annotated[int, Query(ge=1, le=MOST, description="At most so many.")]
Cursor = Annotated[
    str, Query(max_length=200, description="`next` of the page before; empty: the first page.")
]

_shapes: list[Any] = [Details]


class Page(msgspec.Struct, Generic[T], frozen=True):
    """A part of a list."""

    items: Sequence[T]
    next: str = ""
    """The cursor of the next page; empty: this was the last."""


def page_of(items: Sequence[T], key: Callable[[T], str], limit: int, cursor: str) -> Page[T]:
    """A part of a list that is at hand, sorted by `key`; the cursor is the last key shown."""
    rest = [item for item in items if key(item) > cursor] if cursor else list(items)
    shown = rest[:limit]
    return Page(shown, key(shown[-1]) if len(rest) > limit else "")


# ---- out


def answer(request: Request, value: Any, status: int = 200) -> Response:
    """A value as JSON, masked for a viewer; not sent again to a client that has it."""
    user = getattr(request.state, "user", None)
    try:
        body = msgspec.json.encode(value)
        if user is not None and hides(user):
            body = msgspec.json.encode(masked(msgspec.json.decode(body)))
    except RecursionError:
        raise Problem(422, "a value is nested too deeply to be sent as JSON") from None
    except UnicodeEncodeError:
        raise Problem(422, "a text has half of a character pair, which JSON cannot carry") from None
    if request.method != "GET" or status != 200:
        return Response(body, status, media_type=JSON)
    tag = f'W/"{hashlib.blake2s(body, digest_size=12).hexdigest()}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Authorization, Cookie"}
    given = {part.strip() for part in request.headers.get("if-none-match", "").split(",")}
    if tag in given:
        return Response(status_code=304, headers=headers)
    return Response(body, 200, headers, JSON)


# ---- in


def reads(kind: type[T]) -> Callable[[Request], Awaitable[T]]:
    """A dependency: the body of a request as a record; an empty one is an empty object."""

    async def read(request: Request) -> T:
        sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if sent != JSON:
            raise Problem(415, f"Send the body as {JSON}, not {sent[:80] or 'without a type'}")
        body = await request.body() or b"{}"
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            raise Problem(422, f"The body does not fit: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Problem(400, f"The body is not JSON: {error}") from None

    return read


def known_query(request: Request) -> None:
    """A dependency of every route: what it does not know is refused, not silently left out.

    A misspelt filter would otherwise list everything.
    """
    known = sorted(set(_taken(request.scope["route"].dependant)))
    for name in request.query_params:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.5)
            meant = f": did you mean {near[0]}?" if near else ","
            takes = f"this address takes {', '.join(known)}" if known else "this address takes none"
            raise Problem(422, f"query {name[:80]!r} is not known here{meant} {takes}")


def _taken(dependant: Dependant) -> Iterator[str]:
    yield from (param.alias for param in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _taken(inner)


def as_value(data: bytes) -> Any:
    """Foreign JSON as a value; as a text when it is none, or nested too deeply."""
    try:
        return msgspec.json.decode(data) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data.decode("utf-8", "replace")


def raw(payload: msgspec.Raw | msgspec.UnsetType) -> bytes:
    """A payload's own bytes; none when it was left out."""
    return b"" if isinstance(payload, msgspec.UnsetType) else bytes(payload)


def when(text: str, now: float, what: str) -> float:
    """`10m` ago, seconds since 1970, or a time such as 2026-11-16T01:45:00Z; 0 for nothing."""
    from holdfast import durations
    from holdfast.durations import instant

    if not text:
        return 0.0
    try:
        return max(0.0, now - durations.seconds(text, what))
    except InvalidInput:
        return instant(text, what)


def stamp(at: float) -> str:
    """An instant as text; nothing for none."""
    return rfc3339(at) if at else ""


# ---- described


def returns(kind: Any, status: int = 200, *, also: dict[int, str] | None = None) -> dict[str, Any]:
    """What a route answers, for its decorator."""
    said: dict[int | str, Any] = {
        number: {"description": text, "content": {MEDIA_TYPE: {"schema": _ref(Details)}}}
        for number, text in PROBLEMS.items()
    }
    good = {"description": "Done.", "content": {JSON: {"schema": _ref(kind)}}}
    for number in (status, *(also or {})):
        said[number] = {**good, "description": (also or {}).get(number, "Done.")}
    return {"status_code": status, "response_class": Response, "responses": said}


def takes(kind: Any) -> dict[str, Any]:
    """What a route takes, for its decorator."""
    content = {JSON: {"schema": _ref(kind)}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def _ref(kind: Any) -> dict[str, Any]:
    _shapes.append(kind)
    (found,), _ = msgspec.json.schema_components([kind], ref_template=REF)
    return dict(found)


def describe(app: FastAPI) -> None:
    """Let an app's OpenAPI document have the shapes of our records."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
            )
            _, shapes = msgspec.json.schema_components(_shapes, ref_template=REF)
            components = document.setdefault("components", {})
            components.setdefault("schemas", {}).update(shapes)
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"token": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it
