"""A viewer who looks at everything learns no secret, whatever form and place it has."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx

from holdfast import Backoff, Holdfast
from holdfast.errors import RunFailed
from holdfast.server import Server
from tests.integration import test_web_access
from tests.integration.support import working
from tests.integration.web_support import HOST, WebApp, site
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


async def hits(there: WebApp, role: str) -> tuple[set[str], list[str], int]:
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


async def test_viewer_learns_no_secret_from_a_job_with_one_parameter(
    nats: Server, namespace: str
) -> None:
    """Payload, log lines, exception, traceback and result of `broken(password: str)`, run by a real
    worker and read without the app: 0 hits."""
    app = Holdfast("shop", nats_url=nats.url, namespace=namespace)
    log = logging.getLogger("shop")

    @app.job(retry=Backoff.never())
    async def broken(password: str) -> None:
        log.info("logging in with %s", password, extra={"given": [password]})
        raise ValueError(f"{password} was refused")

    @app.job
    async def echo(api_key: str) -> dict[str, str]:
        return {"answer": f"it was {api_key}"}

    secrets = Secrets()
    async with app, working(app), site(nats, namespace, with_pages=True) as there:
        failed = await broken.enqueue(secrets.new())
        with contextlib.suppress(RunFailed):
            await failed.result(60)
        lines = [line async for line in failed.follow()]
        assert len(lines) >= 2
        done = await echo.enqueue(secrets.new())
        assert secrets.made[1] in str(await done.result(60)), "the caller gets it"
        waiting = (await echo.options(delay="1h").enqueue(secrets.new())).id
        paths = ["/runs", "/dead", "/dead/1", "/api/v1/dead/1", "/api/v1/runs"]
        for run in (failed.id, done.id, waiting):
            paths += [f"/runs/{run}", f"/api/v1/runs/{run}"]
            paths += [f"/api/v1/runs/{run}/{part}" for part in ("logs", "result", "trace")]
        token = there.viewer.headers["authorization"]
        for path in paths:
            headers = {"authorization": token, "accept": "text/html"}
            answer = await there.browser().get(path, headers=headers)
            assert answer.status_code in (200, 202), path
            assert CANARY not in answer.text, path
