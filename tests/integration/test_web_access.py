"""Who may do what: every route there is, asked by nobody and by each role."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi.routing import iter_route_contexts
from starlette.routing import Mount

from holdfast.config import ConnectionConfig, WebConfig
from holdfast.server import Server
from holdfast.web import create_app
from holdfast.web.auth import ROLES
from holdfast.web.security import SAFE, checked_form
from tests.integration.web_support import TOKENS, site

OPEN = {("GET", "/login"), ("POST", "/login"), ("GET", "/health/live"), ("GET", "/health/ready")}
"""What nobody needs to be known for: logging in, and the probes."""

PARTS = {
    "run": "r1",
    "group": "default",
    "job": "add",
    "id": "1",
    "name": "s1",
    "node": "n1",
    "agent": "a1",
}


def every_route(web: Any) -> Iterator[tuple[str, str, Any]]:
    """Method and path of each route, with something in the place of each parameter."""
    for route in iter_route_contexts(web.routes):
        if isinstance(route.original_route, Mount):
            continue  # files: style, scripts, pictures
        path = route.path.replace(":path", "")
        for name, value in PARTS.items():
            path = path.replace(f"{{{name}}}", value)
        assert "{" not in path, f"{route.path}: give its parameter a value in PARTS"
        for method in sorted((route.methods or set()) - {"HEAD"}):
            yield method, path, route


def calls(dependant: Any) -> Iterator[Any]:
    """Every dependency of a route, also those of dependencies."""
    for inner in dependant.dependencies:
        yield inner.call
        yield from calls(inner)


def role_of(route: Any) -> str:
    """The highest role that a route asks for; nothing for none."""
    asked = [c.role for c in calls(route.dependant) if hasattr(c, "role")]
    return max(asked, key=ROLES.index, default="")


def plain_app(**given: Any) -> Any:
    """An app that is never connected: only to look at its routes."""
    config = WebConfig(tokens=TOKENS["admin"][1])
    return create_app(config=config, connection=ConnectionConfig(), **given)


async def test_every_route_without_credentials_is_refused(nats: Server, namespace: str) -> None:
    """Whatever is asked by whoever is not known: 401, for programs and for browsers."""
    async with (
        site(nats, namespace, with_pages=True) as there,
        there.browser() as nobody,
    ):
        asked = 0
        for method, path, _ in every_route(there.web):
            if (method, path) in OPEN:
                continue
            for accept in ("application/json", "text/html"):
                answer = await nobody.request(method, path, headers={"accept": accept})
                assert answer.status_code in (401, 403), f"{method} {path}: {answer.status_code}"
                asked += 1
        assert asked > 60


async def test_wrong_token_is_refused(nats: Server, namespace: str) -> None:
    """A token that is not configured is nobody's, in whatever form it comes."""
    async with site(nats, namespace) as there, there.browser() as nobody:
        for token in ("", "hft_wrong", "x" * 5000, "é", "Bearer"):
            headers = [(b"authorization", f"Bearer {token}".encode())]
            answer = await nobody.get("/api/v1/runs", headers=headers)
            assert answer.status_code == 401, token
            assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_each_role_reaches_what_it_may_and_nothing_more(nats: Server, namespace: str) -> None:
    """Every route of the API, asked with every role: 403 exactly where the role is too low."""
    async with site(nats, namespace) as there:
        asked = 0
        for method, path, route in every_route(there.web):
            if not path.startswith("/api/v1/") or not hasattr(route, "dependant"):
                continue
            needed = role_of(route)
            for role in ROLES:
                client = getattr(there, role)
                answer = await client.request(method, path.removeprefix("/api/v1"))
                refused = answer.status_code == 403
                assert refused == (ROLES.index(role) < ROLES.index(needed)), f"{role} {path}"
                asked += 1
        assert asked > 90


def test_routes_that_change_something_need_an_operator() -> None:
    """Nothing but a GET is open to viewers, and no route has forgotten to ask for a role."""
    web = plain_app()
    seen = 0
    for method, path, route in every_route(web):
        if (method, path) in OPEN or not hasattr(route, "dependant") or path == "/logout":
            continue
        role = role_of(route)
        assert role, f"{method} {path} asks for no role"
        assert method in SAFE or role != "viewer", f"{method} {path} is open to viewers"
        seen += 1
    assert seen > 40


def test_forms_of_pages_check_the_csrf_token() -> None:
    """Every route outside the API that is not a GET takes a checked form."""
    for method, path, route in every_route(plain_app()):
        if method not in SAFE and not path.startswith("/api/"):
            assert checked_form in calls(route.dependant), f"{method} {path} checks no CSRF token"


async def test_every_route_is_in_the_openapi_document(nats: Server, namespace: str) -> None:
    """The document has each route of the API with what it takes and answers."""
    async with site(nats, namespace) as there:
        document = (await there.viewer.get("/openapi.json")).json()
        for method, path, route in every_route(there.web):
            if hasattr(route, "dependant") and path.startswith("/api/v1/"):
                told = document["paths"][route.path][method.lower()]
                good = told["responses"][str(route.status_code)]
                assert good["content"]["application/json"]["schema"], route.path
                assert told["summary"], route.path


def test_every_route_is_in_the_docs_with_its_role() -> None:
    """The page has a line for each route of the API, and says what it needs."""
    page = (Path(__file__).parents[2] / "docs" / "web.md").read_text(encoding="utf-8")
    for method, path, route in every_route(plain_app(with_pages=False)):
        if hasattr(route, "dependant") and path.startswith("/api/"):
            told = f"| `{method} {route.path.removeprefix('/api/v1')}` | {role_of(route)} |"
            assert told in page, f"docs/web.md lacks {told}"
