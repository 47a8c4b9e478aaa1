"""JSON in and out of the API: the same record types parse, validate, encode and document it.

Payloads pass through byte for byte. Answers carry an ETag: a client that sends `If-None-Match` gets
an empty 304 when nothing has changed.

In a URL, the `/` of a run id is written `~`, which no run id contains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from fastapi import FastAPI, Path, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from holdfast.clock import rfc3339
from holdfast.durations import instant, seconds
from holdfast.errors import InvalidInput
from holdfast.names import check_run
from holdfast.status.operators import Action
from holdfast.web.masking import masked
from holdfast.web.problems import MEDIA_TYPE, Details, Problem

T = TypeVar("T")

JSON: Final = "application/json"
MOST: Final = 500
"""Items per page of a list: larger pages would hold up other requests."""
REF: Final = "#/components/schemas/{name}"
PROBLEMS: Final = {
    400: "The request is malformed.",
    401: "Not logged in.",
    403: "The role is not sufficient, or the request came from another site.",
    404: "Not found.",
    409: "The current state does not allow it.",
    413: "Too large.",
    415: "Not JSON.",
    421: "Unknown host name.",
    422: "A value is not valid.",
    429: "Too many requests.",
    503: "NATS does not answer.",
}

Limit = Annotated[int, Query(ge=1, le=MOST, description="Return at most N.")]
Cursor = Annotated[
    str, Query(max_length=200, description="`next` of the previous page; empty for the first.")
]

RunPart = Annotated[
    str,
    Path(
        alias="run",
        min_length=1,
        max_length=400,
        pattern=r"^[a-zA-Z0-9_=~-]+$",
        description="The run's id, with `~` for each `/`.",
    ),
]

_shapes: list[Any] = [Details]


def run_of(part: str) -> str:
    """Parse a run id from a URL segment; `InvalidName` if it is none."""
    return check_run(part.replace("~", "/"))


class Page(msgspec.Struct, Generic[T], frozen=True):
    """One page of a list."""

    items: Sequence[T]
    next: str = ""
    """The cursor of the next page; empty on the last."""


def page_of(items: Sequence[T], key: Callable[[T], str], limit: int, cursor: str) -> Page[T]:
    """One page of a complete list sorted by `key`; the cursor is the last key shown."""
    rest = [item for item in items if key(item) > cursor] if cursor else list(items)
    shown = rest[:limit]
    return Page(shown, key(shown[-1]) if len(rest) > limit else "")


# ---- out


def answer(request: Request, value: Any, status: int = 200) -> Response:
    """A value as JSON, masked for viewers; 304 to a client that has it already."""
    user = getattr(request.state, "user", None)
    try:
        body = msgspec.json.encode(value)
        if user is not None and not user.sees_secrets:
            body = msgspec.json.encode(masked(msgspec.json.decode(body)))
    except RecursionError:
        raise Problem(422, "A value is nested too deeply to be sent as JSON") from None
    except UnicodeEncodeError:
        raise Problem(422, "A text has an unpaired surrogate, which JSON cannot carry") from None
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
    """A dependency: the body of a request as a record; an empty body is an empty object."""

    async def read(request: Request) -> T:
        sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if sent != JSON:
            raise Problem(415, f"Send the body as {JSON}, not {sent[:80] or 'no type'}")
        body = await request.body() or b"{}"
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            raise Problem(422, f"The body is not valid: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Problem(400, f"The body is not JSON: {error}") from None

    return read


def known_query(request: Request) -> None:
    """A dependency of every route: refuse unknown query parameters.

    Otherwise a misspelt filter would list everything.
    """
    known = sorted(set(_taken(request.scope["route"].dependant)))
    for name in request.query_params:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.5)
            meant = f": did you mean {near[0]}?" if near else "."
            takes = f"Known here: {', '.join(known)}" if known else "None are known here"
            raise Problem(422, f"Unknown query parameter {name[:80]!r}{meant} {takes}")


def _taken(dependant: Dependant) -> Iterator[str]:
    yield from (param.alias for param in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _taken(inner)


def as_value(data: bytes) -> Any:
    """JSON as a value; as text if it is not JSON or nested too deeply."""
    try:
        return msgspec.json.decode(data) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data.decode("utf-8", "replace")


def raw(payload: msgspec.Raw | msgspec.UnsetType) -> bytes:
    """The bytes of a payload; empty if it was left out."""
    return b"" if isinstance(payload, msgspec.UnsetType) else bytes(payload)


def when(text: str, now: float, what: str) -> float:
    """`10m` ago, seconds since 1970, or a time like 2026-11-16T01:45:00Z; 0 if empty."""
    if not text:
        return 0.0
    try:
        return max(0.0, now - seconds(text, what))
    except InvalidInput:
        return instant(text, what)


def stamp(at: float) -> str:
    """An instant as text; empty for none."""
    return rfc3339(at) if at else ""


# ---- description


def returns(kind: Any, status: int = 200, *, also: dict[int, str] | None = None) -> dict[str, Any]:
    """Describe what a route answers, for its decorator."""
    said: dict[int | str, Any] = {
        number: {"description": text, "content": {MEDIA_TYPE: {"schema": _ref(Details)}}}
        for number, text in PROBLEMS.items()
    }
    good = {"description": "Done.", "content": {JSON: {"schema": _ref(kind)}}}
    for number in (status, *(also or {})):
        said[number] = {**good, "description": (also or {}).get(number, "Done.")}
    return {"status_code": status, "response_class": Response, "responses": said}


def does(action: Action[..., Any], kind: Any, status: int = 200) -> dict[str, Any]:
    """Describe the route of an operator's action, for its decorator."""
    return {"description": action.doc, **returns(kind, status)}


def takes(kind: Any) -> dict[str, Any]:
    """Describe the body that a route takes, for its decorator."""
    content = {JSON: {"schema": _ref(kind)}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def _ref(kind: Any) -> dict[str, Any]:
    _shapes.append(kind)
    (found,), _ = msgspec.json.schema_components([kind], ref_template=REF)
    return dict(found)


def describe(app: FastAPI) -> None:
    """Add the shapes of our records to an app's OpenAPI document."""

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

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI documents this way of extending it
