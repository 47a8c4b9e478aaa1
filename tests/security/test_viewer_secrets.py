"""A viewer who looks at everything learns no secret, whatever form and place it has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx

from holdfast import Holdfast
from holdfast.server import Server
from tests.integration import test_web_access
from tests.integration.web_support import HOST, Site, site
from tests.security.canaries import CANARY, Secrets, plant

RUNS = ["r1", "r2", "r3", "r4", "r5", "r6", "r7", *(f"q{n}" for n in range(10)), "f1", "f2", "d0"]
VALUES = {
    "run": RUNS,
    "id": [str(n) for n in range(1, 11)],
    "name": ["s1", "s2", "s3"],
    "job": ["add", "broken"],
}


def places(web: Any) -> Iterator[str]:
    """Every address that can be read, with every value that was planted."""
    for method, path, route in test_web_access.every_route(web):
        if method != "GET" or path in ("/live", "/logout"):
            continue
        named = re.findall(r"\{(\w+)(?::path)?\}", route.path)
        fitting = [name for name in named if name in VALUES]
        if not fitting:
            yield path
            continue
        usual, name = test_web_access.PARTS, fitting[0]
        for value in VALUES[name]:
            yield path.replace(f"/{usual[name]}", f"/{value}", 1)
    yield from ("/runs?state=running", "/dead?error=a", "/fleet?target=G@os:linux")


async def hits(there: Site, role: str) -> tuple[set[str], list[str], int]:
    """The secrets that a role finds, what was answered with an error of ours, how many asked."""
    found: set[str] = set()
    broken: list[str] = []
    asked = 0
    token = getattr(there, role).headers["authorization"]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(there.web, raise_app_exceptions=False),
        base_url=HOST,
        headers={"authorization": token},
    ) as client:
        for path in places(there.web):
            answer = await client.get(path, headers={"accept": "text/html"})
            asked += 1
            if answer.status_code >= 500:
                broken.append(f"{path}: {answer.status_code}")
            found.update(re.findall(rf"{CANARY}\d+q", answer.text))
    return found, broken, asked


def known() -> Holdfast:
    """The app whose job has one parameter, and says what it is."""
    app = Holdfast("shop")

    @app.job
    async def broken(password: str) -> None: ...

    return app


async def test_viewer_finds_no_secret_anywhere(nats: Server, namespace: str, report: Any) -> None:
    """Each page and each answer of the API, with and without the app: 0 secrets, no error."""
    secrets = Secrets()
    async with site(nats, namespace, with_pages=True) as there:
        await plant(there.client, secrets)
        seen, broken, asked = await hits(there, "viewer")
        assert seen == set()
        assert broken == []
        shown, _, _ = await hits(there, "operator")
        assert len(shown) > 0.9 * len(secrets.made), "the canaries are where people look"
        report(
            f"{asked} answers, {len(secrets.made)} secrets planted, an operator saw {len(shown)}"
        )
    async with site(nats, namespace, known(), with_pages=True) as there:
        seen, broken, _ = await hits(there, "viewer")
        assert seen == set()
        assert broken == []


async def test_viewer_cannot_search_for_a_secret(nats: Server, namespace: str) -> None:
    """Filters are no oracle: what is masked is compared masked."""
    async with site(nats, namespace, with_pages=True) as there:
        secrets = Secrets()
        await plant(there.client, secrets)
        token = there.viewer.headers["authorization"]
        async with there.browser() as browser:
            browser.headers["authorization"] = token
            for guess in (CANARY, CANARY[:5]):
                for path in (
                    f"/api/v1/dead?error={guess}",
                    f"/api/v1/agents?target=G@password:{guess}*",
                    f"/api/v1/agents?target=G@nested:*{guess}*",
                    f"/api/v1/agents?target=G@note:*{guess}*",
                    f"/api/v1/agents?target=G@text:*{guess}*",
                ):
                    assert (await browser.get(path)).json()["items"] == [], path
