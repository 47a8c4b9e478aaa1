"""The guard: hosts, origins, sessions, CSRF, headers, limits, and what a viewer must not see."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.config import ConnectionConfig, WebConfig
from holdfast.errors import ConfigError
from holdfast.names import kv_subject
from holdfast.server import Server
from holdfast.status.audit import Audit
from holdfast.testing import RunningWorker
from holdfast.web import User, create_app
from holdfast.web.auth import make_token
from holdfast.web.live import STREAMS_EACH
from holdfast.web.network import Hosts
from holdfast.web.serve import check_reachable
from tests.integration.web_support import HOST, TOKENS, WebApp, shop, site

SESSION = "holdfast_session_"


async def form_token(browser: httpx.AsyncClient, path: str = "/login") -> str:
    """The CSRF token of a page's form."""
    page = await browser.get(path, headers={"accept": "text/html"})
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', page.text)
    assert found, page.text[:500]
    return found[1]


async def log_in(browser: httpx.AsyncClient, token: str, **more: str) -> httpx.Response:
    """Fill in the login form and send it."""
    fields = {"csrf": await form_token(browser), "token": token, **more}
    return await browser.post("/login", data=fields)


def session_of(browser: httpx.AsyncClient) -> str:
    """The session's cookie, if there is one."""
    return next((v for n, v in browser.cookies.items() if n.startswith(SESSION)), "")


# ---- where from


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("127.0.0.1:8080", True),
        ("localhost", True),
        ("[::1]:8080", True),
        ("10.1.2.3", True),
        ("jobs.example.com", True),
        ("a.team.example.org:99", True),
        ("evil.com", False),
        ("127.0.0.1.evil.com", False),
        ("localhost.evil.com", False),
        ("team.example.org", False),
        ("evilteam.example.org", False),
        ("jobs.example.com@evil.com", False),
        ("evil.com#localhost", False),
        ("localhost:8080/../evil.com", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_host_is_known_by_its_name_only(host: str, known: bool) -> None:
    """A name that is not configured is refused: no other site's name may lead here."""
    hosts = Hosts("jobs.example.com, *.team.example.org", "127.0.0.1")
    assert hosts.known(host) is known


async def test_foreign_host_is_refused_before_anything_else(nats: Server, namespace: str) -> None:
    """DNS rebinding: a page that made its name point here reaches nothing, probes included."""
    async with site(nats, namespace) as there:
        for path in ("/runs", "/openapi.json"):
            answer = await there.admin.get(path, headers={"host": "evil.com"})
            assert answer.status_code == 421
            assert "web.hosts" in answer.json()["detail"]


FOREIGN = (
    {"origin": "http://evil.com"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:9999"},
    {"origin": "http://127.0.0.1:8080.evil.com"},
    {"origin": "file://127.0.0.1:8080"},
    {"origin": "http://127.0.0.1:notaport"},
    {"origin": "http://[::1"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
)


async def test_another_site_changes_nothing(nats: Server, namespace: str) -> None:
    """What a browser sends on behalf of another site is refused, whoever is logged in."""
    async with site(nats, namespace) as there:
        for headers in FOREIGN:
            answer = await there.admin.post("/runs", json={"job": "add"}, headers=headers)
            assert answer.status_code == 403, headers
        assert (await there.admin.get("/runs")).json()["items"] == []


async def test_own_origin_is_welcome(nats: Server, namespace: str) -> None:
    """Our own pages may; also behind a proxy that ends TLS."""
    async with site(nats, namespace) as there:
        for origin in (HOST, "https://127.0.0.1:8080"):
            headers = {"origin": origin, "sec-fetch-site": "same-origin"}
            answer = await there.admin.post("/runs", json={"job": "add"}, headers=headers)
            assert answer.status_code == 201


# ---- logging in


async def test_login_makes_a_session_that_scripts_cannot_read(nats: Server, namespace: str) -> None:
    """The cookie is HttpOnly and SameSite=Strict, and Secure over https; the way goes on inside."""
    async with site(nats, namespace, with_pages=True, hosts="jobs.example.com") as there:
        for host, secure in ((HOST, False), ("https://jobs.example.com", True)):
            async with there.browser(host) as browser:
                asked = await browser.get("/runs?job=a", headers={"accept": "text/html"})
                assert asked.status_code == 401
                assert 'name="next" value="/runs?job=a"' in asked.text
                answer = await log_in(browser, TOKENS["viewer"][0], next="/runs?job=a")
                assert answer.status_code == 303
                assert answer.headers["location"] == "/runs?job=a"
                cookie = answer.headers["set-cookie"]
                assert "HttpOnly" in cookie
                assert "SameSite=strict" in cookie
                assert ("Secure" in cookie) is secure
                assert ("strict-transport-security" in answer.headers) is secure
                assert (await browser.get("/api/v1/runs")).status_code == 200


ELSEWHERE = (
    "//evil.com",
    "https://evil.com",
    "/\\evil.com",
    "evil.com",
    "javascript:a()",
    "/a\r\nb",
)


async def test_login_leads_to_no_other_site(nats: Server, namespace: str) -> None:
    """An address of another site to go on to is dropped."""
    async with site(nats, namespace, with_pages=True) as there:
        for wanted in ELSEWHERE:
            async with there.browser() as browser:
                answer = await log_in(browser, TOKENS["viewer"][0], next=wanted)
                assert answer.headers["location"] == "/", wanted


async def test_wrong_login_is_refused_and_limited(nats: Server, namespace: str) -> None:
    """After ten tries an address has to wait, whatever it sends."""
    async with site(nats, namespace, with_pages=True) as there, there.browser() as browser:
        codes = [(await log_in(browser, f"hft_{n}")).status_code for n in range(12)]
        assert codes[:10] == [401] * 10
        assert codes[10:] == [429, 429]
        assert not session_of(browser)
        answer = await browser.post("/login", data={}, headers={"accept": "application/json"})
        assert int(answer.headers["retry-after"]) >= 1


async def test_login_form_of_another_browser_is_refused(nats: Server, namespace: str) -> None:
    """A CSRF token belongs to the browser it was given to."""
    async with (
        site(nats, namespace, with_pages=True) as there,
        there.browser() as mine,
        there.browser() as other,
    ):
        token = await form_token(other)
        for fields in ({"csrf": token}, {"csrf": ""}, {}, {"csrf": "é"}):
            answer = await mine.post("/login", data={**fields, "token": TOKENS["admin"][0]})
            assert answer.status_code == 403
        assert not session_of(mine)


async def test_session_needs_the_csrf_token_for_the_api(nats: Server, namespace: str) -> None:
    """What a logged-in browser sends by itself changes nothing; its pages know the token."""
    async with site(nats, namespace, with_pages=True) as there, there.browser() as browser:
        await log_in(browser, TOKENS["operator"][0])
        sent = await browser.post("/api/v1/runs", json={"job": "add"})
        assert sent.status_code == 403
        assert "X-CSRF-Token" in sent.json()["detail"]
        page = await browser.get("/", headers={"accept": "text/html"})
        found = re.search(r'name="csrf" (?:value|content)="([0-9a-f]{64})"', page.text)
        assert found
        headers = {"X-CSRF-Token": found[1]}
        sent = await browser.post("/api/v1/runs", json={"job": "add"}, headers=headers)
        assert sent.status_code == 201


async def test_logout_ends_the_session_on_every_process(nats: Server, namespace: str) -> None:
    """A session made on one web process counts on another, and ends on both at once."""
    async with (
        site(nats, namespace, with_pages=True) as first,
        site(nats, namespace, with_pages=True) as second,
        first.browser() as browser,
        second.browser() as elsewhere,
    ):
        await log_in(browser, TOKENS["viewer"][0])
        elsewhere.cookies = browser.cookies
        assert (await elsewhere.get("/api/v1/runs")).status_code == 200
        page = await browser.get("/", headers={"accept": "text/html"})
        token = re.search(r'name="csrf" (?:value|content)="([0-9a-f]{64})"', page.text)
        assert token
        kept = session_of(browser)
        answer = await browser.post("/logout", data={"csrf": token[1]})
        assert answer.status_code == 303
        elsewhere.cookies.set(f"{SESSION}{namespace}", kept)
        assert (await elsewhere.get("/api/v1/runs")).status_code == 401
        verbs = [a.verb for a in await Audit(first.client).actions()]
        assert verbs == ["logout", "login"]


async def test_token_taken_back_ends_its_sessions(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """The file is read again when it changes: a token, and what was made of it, is gone."""
    text, line = make_token("ann", "viewer")
    file = tmp_path / "tokens"
    file.write_text(f"# who may\n{line}\n")
    async with (
        site(nats, namespace, with_pages=True, tokens_file=str(file)) as there,
        there.browser() as browser,
    ):
        await log_in(browser, text)
        assert (await browser.get("/api/v1/runs")).status_code == 200
        bearer = {"authorization": f"Bearer {text}"}
        file.write_text("# nobody\n")
        assert (await browser.get("/api/v1/runs")).status_code == 401
        assert (await browser.get("/api/v1/runs", headers=bearer)).status_code == 401
        file.write_text(line.replace("viewer", "admin") + "\n")
        assert (await browser.get("/api/v1/runs", headers=bearer)).status_code == 200


# ---- headers, limits, errors


async def test_every_answer_carries_the_security_headers(nats: Server, namespace: str) -> None:
    """Also refusals and errors; scripts and styles come from here only, and none are inline."""
    async with site(nats, namespace, with_pages=True) as there, there.browser() as browser:
        for path in ("/login", "/api/v1/runs", "/health/live", "/nothing", "/static/nothing"):
            headers = (await browser.get(path, headers={"accept": "text/html"})).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
            assert headers["referrer-policy"] == "same-origin"
            assert "server" not in headers
            assert "access-control-allow-origin" not in headers


async def test_requests_are_limited_for_each_user(nats: Server, namespace: str) -> None:
    """Four seconds' worth in one go, then 429 with the time to wait; others are not affected."""
    async with site(nats, namespace, rate_per_second=2) as there:
        codes = [(await there.viewer.get("/jobs")).status_code for _ in range(9)]
        assert codes[:8] == [200] * 8
        last = await there.viewer.get("/jobs")
        assert last.status_code == 429
        assert int(last.headers["retry-after"]) >= 1
        assert last.headers["content-type"] == "application/problem+json"
        assert (await there.operator.get("/jobs")).status_code == 200


async def test_pages_are_limited_like_the_api(nats: Server, namespace: str) -> None:
    """Requests for pages count too: one limit for each user, whatever is asked for."""
    async with site(nats, namespace, with_pages=True, rate_per_second=0.01) as there:
        codes = [(await there.viewer.get(f"{HOST}/jobs")).status_code for _ in range(2)]
        assert codes == [200, 429]


async def test_one_user_cannot_take_every_live_stream(nats: Server, namespace: str) -> None:
    """Each user has a share of the streams, also when all requests come at once."""
    async with site(nats, namespace, with_pages=True) as there:
        feed = there.web.state.feed
        await feed.start()
        mine = [feed.stream("", "a-viewer") for _ in range(STREAMS_EACH)]
        for stream in mine:
            await anext(stream)
        assert (await there.viewer.get(f"{HOST}/live")).status_code == 503
        assert feed.viewers["a-operator"] == 0
        for stream in mine:
            await stream.aclose()
        assert feed.streams == 0


async def test_oversized_body_is_refused(nats: Server, namespace: str) -> None:
    """By its length when it is told, else as it comes."""

    async def stream() -> Any:
        for _ in range(100):
            yield b" " * 100_000

    async with site(nats, namespace) as there:
        told = await there.operator.post("/runs", content=b" " * 5_000_000)
        headers = {"content-type": "application/json"}
        untold = await there.operator.post("/runs", content=stream(), headers=headers)
        assert untold.status_code == 413
        assert told.status_code in (413, 415)


async def test_errors_are_problems_that_say_what_to_do(nats: Server, namespace: str) -> None:
    """Every kind of error has the same form, whoever raised it."""
    async with site(nats, namespace) as there:
        asked: list[tuple[int, Any]] = [
            (404, there.viewer.get("/nothing")),
            (405, there.viewer.put("/runs")),
            (404, there.viewer.get("/runs/nope")),
            (422, there.viewer.get("/runs?limit=0")),
            (422, there.viewer.get("/runs?state=odd")),
            (422, there.viewer.get("/runs?cursor=odd")),
            (422, there.viewer.get("/runs/a.b")),
            (404, there.viewer.get("/schedules/none")),
            (404, there.viewer.get("/jobs/default/none")),
            (404, there.viewer.get("/dead/12345")),
            (404, there.viewer.get("/nodes/none")),
            (400, there.operator.post("/runs", content=b"{", headers=_json())),
            (415, there.operator.post("/runs", content=b"{}")),
            (422, there.operator.post("/runs", json={"job": "a b"})),
            (422, there.operator.post("/runs", json={"job": "a", "extra": 1})),
            (422, there.operator.post("/runs", json={"job": "a", "delay": "1h", "at": 5})),
            (413, there.operator.post("/runs", json={"job": "a", "payload": "x" * 1_200_000})),
            (403, there.viewer.post("/runs", json={"job": "a"})),
            (404, there.operator.post("/jobs/default/none/pause")),
            (404, there.admin.post("/nodes/none/drain")),
            (422, there.admin.post("/schedules", json={"name": "s", "job": "a"})),
        ]
        for status, question in asked:
            answer = await question
            told = answer.json()
            assert answer.status_code == told["status"] == status, (answer.url, answer.text)
            assert answer.headers["content-type"] == "application/problem+json"
            assert len(told["detail"]) > 20, told


def _json() -> dict[str, str]:
    return {"content-type": "application/json"}


async def test_broken_connection_is_503(namespace: str) -> None:
    """Without NATS the answer says so and when to try again, and the process lives on."""
    with Server(fast=True) as own:
        async with site(own, namespace) as there:
            assert (await there.viewer.get("/runs")).status_code == 200
            own.kill()
            answer = await there.viewer.get("/runs")
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert (await there.viewer.get(f"{HOST}/health/live")).status_code == 200


# ---- what is seen


async def test_viewers_do_not_see_secrets(nats: Server, namespace: str) -> None:
    """Members, headers and texts that look like a secret are masked, and only for viewers."""
    app = shop()
    async with (
        site(nats, namespace, app) as there,
        RunningWorker(app, nats_url=nats.url, namespace=namespace),
    ):
        secret = "hunter2-secret"
        headers = {"X-Api-Key": secret, "X-Trace": "abc"}
        body = {"user": "ann", "password": secret}
        sent = {"job": "login", "payload": body, "headers": headers}
        run = (await there.operator.post("/runs", json=sent)).json()["run"]
        await there.operator.get(f"/runs/{run}/result?wait=10")
        sent = {"job": "boom", "payload": {"why": f"password={secret}"}, "headers": headers}
        dead = (await there.operator.post("/runs", json=sent)).json()["run"]
        await there.operator.get(f"/runs/{dead}/result?wait=10")
        letter = (await there.operator.get("/dead")).json()["items"][0]["id"]
        new = {"name": "s", "job": "login", "every": "1h", "payload": body, "headers": headers}
        await there.admin.post("/schedules", json=new)
        for path in (
            f"/runs/{run}/result",
            f"/runs/{dead}",
            f"/runs/{dead}/result",
            f"/runs/{dead}/trace",
            "/runs",
            "/dead",
            f"/dead/{letter}",
            "/schedules",
            "/schedules/s",
        ):
            assert secret not in (await there.viewer.get(path)).text, path
            assert secret in (await there.operator.get(path)).text, path
        shown = (await there.viewer.get(f"/runs/{run}/result")).json()["result"]
        assert shown == "•••"  # the job takes a secret, so its result may contain it


async def test_viewers_cannot_search_for_what_they_do_not_see(nats: Server, namespace: str) -> None:
    """A filter compares with what its user is shown: letters by error and kind, agents by facts."""
    app = shop()
    async with (
        site(nats, namespace, app, with_pages=True) as there,
        RunningWorker(app, nats_url=nats.url, namespace=namespace),
    ):
        sent = {"job": "boom", "payload": {"why": "no login: password=hunter"}, "key": "1"}
        await there.operator.post("/runs", json=sent)
        await there.operator.get("/runs/boom~1/result?wait=10")
        await there.client.topology.ensure_buckets("facts")
        facts = kv_subject(there.client.broker.names.facts, "a1")
        await there.client.broker.store(facts, b'{"os": "linux", "api_token": "hunter"}')
        for role, hidden in (("operator", 1), ("viewer", 0)):
            client = getattr(there, role)
            for path, count in (
                ("/dead?error=No%20Login", 1),
                ("/dead?error=hunt", hidden),
                ("/agents?target=G@os:linux", 1),
                ("/agents?target=G@api_token:hun*", hidden),
            ):
                found = (await client.get(path)).json()["items"]
                assert len(found) == count, f"{role} {path}"
            headers = {"authorization": client.headers["authorization"], "accept": "text/html"}
            async with there.browser() as browser:
                for path, count in (
                    ("/dead?error=no%20login", 1),
                    ("/dead?error=hunt", hidden),
                    ("/dead?kind=RuntimeError: no login: password=hunter", hidden),
                    ("/dead?kind=RuntimeError: no login: password=•••", 1 - hidden),
                    ("/fleet?target=G@api_token:hun*", hidden),
                ):
                    page = (await browser.get(path, headers=headers)).text
                    shown = "boom/1" in page or ">a1</a>" in page
                    assert shown == bool(count), f"{role} {path}"


async def test_actions_are_written_down_with_who_did_them(nats: Server, namespace: str) -> None:
    """The ledger names the token's owner, whatever was done."""
    async with site(nats, namespace) as there:
        run = (await there.operator.post("/runs", json={"job": "add"})).json()["run"]
        await there.operator.post(f"/runs/{run}/cancel")
        await there.admin.post("/schedules", json={"name": "s", "job": "add", "every": "1h"})
        await there.operator.post("/schedules/s/pause")
        await there.admin.delete("/schedules/s")
        told = (await there.viewer.get("/audit")).json()["items"]
        assert [(a["verb"], a["who"]) for a in told] == [
            ("remove", "a-admin"),
            ("pause", "a-operator"),
            ("add", "a-admin"),
            ("cancel", "a-operator"),
            ("enqueue", "a-operator"),
        ]
        first = (await there.viewer.get("/audit?limit=2")).json()
        second = (await there.viewer.get(f"/audit?limit=2&cursor={first['next']}")).json()
        assert [a["verb"] for a in second["items"]] == ["add", "cancel"]


async def test_reading_changes_nothing(nats: Server, namespace: str) -> None:
    """Every GET, of the API and of the pages, leaves the streams as they were."""
    from tests.integration.test_web_access import every_route

    async with site(nats, namespace, with_pages=True) as there:
        before = await _sequences(there)
        asked = 0
        for method, path, _ in every_route(there.web):
            if method == "GET" and path != "/live":
                answer = await there.admin.get(f"{HOST}{path}")
                assert answer.status_code < 500, f"{path}: {answer.text}"
                asked += 1
        assert asked > 40
        assert await _sequences(there) == before


async def _sequences(there: WebApp) -> dict[str, int]:
    """The last sequence of each stream, without heartbeats and logins."""
    names = there.client.broker.names
    streams = [
        names.jobs,
        names.events,
        names.dead,
        names.ledger,
        names.history,
        names.history_index,
        names.flows,
    ]
    streams += [f"KV_{bucket}" for bucket in (names.runs, names.schedules, names.slots)]
    found = {}
    for stream in streams:
        info = await there.client.broker.api(f"STREAM.INFO.{stream}")
        found[stream] = int(info["state"]["last_seq"])
    return found


# ---- starting


LOCAL = ("127.0.0.1", "127.8.8.8", "::1", "localhost")


@pytest.mark.parametrize("host", [*LOCAL, "0.0.0.0", "::", "10.0.0.1", "example.com", ""])
def test_address_for_others_needs_tokens(host: str) -> None:
    """Off this machine it does not start without knowing who is asking; on it, everybody is an
    admin."""

    def refusal(tokens: str = "") -> str:
        try:
            check_reachable(WebConfig(host=host, tokens=tokens))
        except ConfigError as error:
            return str(error)
        return ""

    assert refusal(TOKENS["viewer"][1]) == ""
    assert ("holdfast web token" in refusal()) == (host not in LOCAL)


def test_app_without_any_way_to_know_users_is_refused() -> None:
    """An app that is mounted somewhere does not know who can reach it."""
    with pytest.raises(ConfigError, match="authenticate="):
        create_app(config=WebConfig(), connection=ConnectionConfig())


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("ann", "NAME:ROLE:HASH"),
        ("ann:king:" + "0" * 64, "viewer, operator, admin"),
        ("ann:admin:hft_thetokenitself", "64 hexadecimal"),
        (f"a:admin:{'0' * 64},a:viewer:{'1' * 64}", "two tokens"),
    ],
)
def test_wrong_token_lines_are_explained(line: str, why: str) -> None:
    """A mistake in the configuration is a sentence, and does not repeat the secret."""
    with pytest.raises(ConfigError, match=why) as told:
        create_app(config=WebConfig(tokens=line), connection=ConnectionConfig())
    assert "thetokenitself" not in str(told.value)


def test_local_user_may_everything() -> None:
    """Roles include each other."""
    assert User("x", "admin").may("viewer")
    assert not User("x", "viewer").may("operator")
