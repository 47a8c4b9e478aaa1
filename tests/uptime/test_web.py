"""The API and the pages: what they do, who may do it, what a browser cannot be talked into."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from uptime.app import checks, states
from uptime.config import Config, load
from uptime.probes import Outcome
from uptime.record import Rules, State, apply
from uptime.web import api, charts, create_app, pages
from uptime.web.forms import check_from
from uptime.web.security import Gate

from holdfast.server import Server

TOKEN = "correct horse battery staple"
XSS = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
WRONG = "uptime_session=9999999999.0123456789abcdef"
CHECK = {"id": "shop", "name": "Shop", "target": "http://127.0.0.1:9/", "interval": 60}


@asynccontextmanager
async def served(
    config: Config | None = None, host: str = "127.0.0.1", **headers: str
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(config or load(), host=host)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=transport, base_url="http://localhost:8090", headers=headers
        ) as client,
    ):
        yield client


def secured() -> Config:
    return load({"UPTIME_TOKEN": TOKEN, "UPTIME_ALLOW_PRIVATE": "127.0.0.1"})


# ---- the API


async def test_api_life_of_a_check(store: Server) -> None:
    """Added, shown, changed, paused, resumed, looked at and removed, by API."""
    async with served() as client:
        added = await client.post("/api/checks", json=CHECK)
        assert (added.status_code, added.json()["status"]) == (201, "200-299")
        assert (await client.post("/api/checks", json=CHECK)).status_code == 409
        assert [c["id"] for c in (await client.get("/api/checks")).json()] == ["shop"]
        changed = await client.put("/api/checks/shop", json={**CHECK, "name": "New"})
        assert changed.json()["name"] == "New"
        assert (await client.post("/api/checks/shop/pause")).json()["paused"] is True
        assert (await client.post("/api/checks/shop/run")).status_code == 409
        assert (await client.post("/api/checks/shop/resume")).json()["paused"] is False
        assert (await client.post("/api/checks/shop/run")).status_code == 202
        shown = (await client.get("/api/checks/shop")).json()
        assert shown["state"]["status"] == "unknown"
        assert (await client.get("/api/checks/shop/results")).json() == []
        assert (await client.get("/api/incidents?check=shop")).json() == []
        assert (await client.delete("/api/checks/shop")).status_code == 204
        assert (await client.get("/api/checks/shop")).status_code == 404


async def test_api_life_of_a_channel(store: Server) -> None:
    """Added, listed and removed."""
    channel = {"id": "hook", "kind": "webhook", "target": "https://example.org/hook"}
    async with served() as client:
        assert (await client.post("/api/channels", json=channel)).status_code == 201
        assert (await client.get("/api/channels")).json() == [channel]
        assert (await client.delete("/api/channels/hook")).status_code == 204
        assert (await client.delete("/api/channels/hook")).status_code == 404


NONSENSE = [
    ("POST", "/api/checks", b"{", 400),
    ("POST", "/api/checks", b"[]", 400),
    ("POST", "/api/checks", b"[" * 30_000, 400),
    ("POST", "/api/checks", b"{}", 422),
    ("POST", "/api/checks", b'{"id": 5}', 422),
    ("PUT", "/api/checks/none", b"{}", 404),
    ("GET", "/api/checks/a.b", b"", 404),
    ("GET", "/api/checks/%2e%2e%2f", b"", 404),
    ("GET", "/api/checks/*/results", b"", 404),
    ("GET", "/api/checks/shop/results?limit=0", b"", 422),
    ("GET", "/api/incidents?check=%3E", b"", 404),
    ("DELETE", "/api/checks/>", b"", 404),
    ("GET", "/s/none", b"", 404),
    ("GET", "/nowhere", b"", 404),
    ("PATCH", "/api/checks", b"", 405),
]


async def test_api_errors_are_problems(store: Server) -> None:
    """Nonsense is refused with problem+json and a sentence, never with a 5xx."""
    async with served() as client:
        for method, path, content, status in NONSENSE:
            headers = {"Content-Type": "application/json"}
            answer = await client.request(method, path, content=content, headers=headers)
            assert answer.status_code == status, (method, path, answer.text)
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["title"]


async def test_status_json_tells_no_secrets(store: Server) -> None:
    """The public sees names and states; no target, no header, no reason, no private check."""
    async with served(secured(), Authorization=f"Bearer {TOKEN}") as client:
        secret = {**CHECK, "headers": {"X": "s3cret"}, "target": "http://127.0.0.1:9/inner"}
        await client.post("/api/checks", json=secret)
        await client.post("/api/checks", json={**CHECK, "id": "own", "public": False})
        rules = Rules("shop", "Shop", 1, 1)
        for id in ("shop", "own"):
            bad = Outcome("failed", 5, "reason-in-detail")
            await states.put(id, apply(State(), 1_800_000_000, bad, rules))
        del client.headers["Authorization"]
        for path in ("/status.json", "/", "/s/shop"):
            text = (await client.get(path)).text
            assert "Shop" in text
            for hidden in ("s3cret", "inner", "reason-in-detail", '"own"', "check-own"):
                assert hidden not in text, path
        assert (await client.get("/s/own")).status_code == 404


async def test_status_is_cached_and_renewed_by_a_change(store: Server) -> None:
    """Answers come from the cache until something is changed; who has the page is told so."""
    async with served() as client:
        first = await client.get("/")
        assert "Nothing is checked yet" in first.text
        again = await client.get("/", headers={"If-None-Match": first.headers["ETag"]})
        assert (again.status_code, again.text) == (304, "")
        await client.post("/api/checks", json=CHECK)
        assert "Shop" in (await client.get("/")).text
        made = client._transport.app.state.cache.made  # type: ignore[attr-defined]
        for _ in range(5):
            await client.get("/")
        assert client._transport.app.state.cache.made == made  # type: ignore[attr-defined]


# ---- who may

PUBLIC = {"/", "/status.json", "/healthz", "/s/{id}", "/login", "/logout"}


async def test_every_other_route_needs_the_token(store: Server) -> None:
    """Without it: 401 for programs, the login page for people; with a wrong one, too."""
    routes = [r for r in (*api.router.routes, *pages.router.routes) if isinstance(r, APIRoute)]
    assert {route.path for route in routes} >= PUBLIC
    guarded = [(r.path, method) for r in routes if r.path not in PUBLIC for method in r.methods]
    assert len(guarded) > 25
    async with served(secured()) as client:
        for pattern, method in guarded:
            path = pattern.replace("{id}", "shop")
            for name, value in (("X", ""), ("Authorization", "Bearer x"), ("Cookie", WRONG)):
                answer = await client.request(method, path, headers={name: value})
                guessed = (429,) if name == "Authorization" else ()  # from the eleventh on
                assert answer.status_code in (401, *guessed), (path, method)
            page = await client.request(method, path, headers={"Accept": "text/html"})
            assert page.status_code == (401 if path.startswith("/api/") else 303), path
            assert path.startswith("/api/") or page.headers["location"].startswith("/login?then=/")


async def test_login_gives_a_session_that_cannot_be_forged(store: Server) -> None:
    """The right token gives a strict, http-only cookie; a changed one is worth nothing."""
    async with served(secured()) as client:
        assert (await client.post("/login", data={"token": "x"})).status_code == 401
        right = await client.post("/login", data={"token": TOKEN, "then": "/channels"})
        assert (right.status_code, right.headers["location"]) == (303, "/channels")
        cookie = right.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert TOKEN not in cookie
        assert (await client.get("/checks")).status_code == 200
        value = client.cookies["uptime_session"]
        client.cookies.clear()
        ends, _, signature = value.partition(".")
        for forged in (f"{int(ends) + 1}.{signature}", f"1.{signature}", "x", f"{ends}."):
            answer = await client.get("/checks", headers={"Cookie": f"uptime_session={forged}"})
            assert answer.status_code == 401


async def test_login_goes_on_to_no_other_server(store: Server) -> None:
    """A link to the login page cannot lead away from here."""
    async with served(secured()) as client:
        for then in ("//evil.example", "https://evil.example", "/\\evil", "x", "/a\nb"):
            answer = await client.post("/login", data={"token": TOKEN, "then": then})
            assert answer.headers["location"] == "/checks"


async def test_login_slows_guessing_down(store: Server) -> None:
    """After ten wrong tokens nobody may try for a while."""
    async with served(secured()) as client:
        codes = [
            (await client.post("/login", data={"token": str(n)})).status_code for n in range(12)
        ]
        assert codes == [401] * 10 + [429] * 2


async def test_bearer_guesses_are_limited_for_each_address(store: Server) -> None:
    """Ten wrong ones and an address waits, by either way; another one and a session do not."""
    app = create_app(secured(), host="127.0.0.1")

    def client(address: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app, client=(address, 1))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost:8090")

    async with (
        app.router.lifespan_context(app),
        client("192.0.2.1") as thief,
        client("2001:db8::1") as other,
        client("2001:db8::2") as same,
        client("192.0.2.2") as owner,
    ):
        assert (await thief.post("/login", data={"token": TOKEN})).status_code == 303
        wrong = {"Authorization": "Bearer x"}
        for guesser in (thief, other):
            guesser.headers["cookie"] = ""
            codes = [
                (await guesser.get("/api/checks", headers=wrong)).status_code for _ in range(12)
            ]
            assert codes == [401] * 10 + [429] * 2
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert (await same.get("/api/checks", headers=right)).status_code == 429
        page = {"accept": "text/html", **wrong}
        assert (await other.get("/checks", headers=page)).status_code == 429
        assert (await owner.get("/api/checks", headers=right)).status_code == 200
        assert (await owner.post("/login", data={"token": TOKEN})).status_code == 303


async def test_origin_that_is_no_address_is_refused(store: Server) -> None:
    """It is a 403 like every other foreign one."""
    async with served() as client:
        for origin in ("http://[", "http://[::1", "]", "http://a:b:c", "\x00"):
            headers = [(b"origin", origin.encode())]
            answer = await client.post("/api/checks", json=CHECK, headers=headers)
            assert answer.status_code == 403, origin


async def test_stored_header_stays_with_its_target(store: Server) -> None:
    """`********` keeps a value only where it was meant to go; elsewhere it is written again."""
    async with served() as client:
        given = {**CHECK, "headers": {"X-Key": "s3cret"}}
        assert (await client.post("/api/checks", json=given)).status_code == 201
        kept = {**given, "headers": {"X-Key": "********"}}
        for target in (
            "http://203.0.113.9.example/",
            "http://127.0.0.1:10/",
            "https://127.0.0.1:9/",
        ):
            answer = await client.put("/api/checks/shop", json={**kept, "target": target})
            assert answer.status_code == 422, target
            assert "X-Key" in answer.json()["title"]
        other = {**kept, "headers": {"X-Other": "********"}}
        assert (await client.put("/api/checks/shop", json=other)).status_code == 422
        moved = {**kept, "target": "http://127.0.0.1:9/other"}
        assert (await client.put("/api/checks/shop", json=moved)).status_code == 200
        entry = await checks.get("shop")
        assert entry is not None
        assert entry.value.headers == {"X-Key": "s3cret"}


@pytest.mark.parametrize(
    "target",
    [
        "http://169.254.169.254/latest",
        "http://[fe80::1]/",
        "http://0xa9fea9fe/",
        "http://[::ffff:169.254.169.254]/",
        "http://10.1.2.3/",
    ],
)
async def test_webhook_to_a_forbidden_address_is_not_saved(store: Server, target: str) -> None:
    """Addresses are judged when they are given, and again when they are used."""
    async with served() as client:
        hook = {"id": "hook", "kind": "webhook", "target": target}
        assert (await client.post("/api/channels", json=hook)).status_code == 422
        assert (await client.get("/api/channels")).json() == []


def test_off_loopback_a_token_is_needed() -> None:
    """Without one it does not even start; on loopback it does."""
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ValueError, match="UPTIME_TOKEN"):
            create_app(Config(), host=host)
        Gate(Config(token="x"), host)
    for host in ("127.0.0.1", "localhost", "::1"):
        Gate(Config(), host)


# ---- browsers


BROWSERS: list[tuple[dict[str, str], int]] = [
    ({}, 201),
    ({"Origin": "http://localhost:8090"}, 201),
    ({"Sec-Fetch-Site": "same-origin"}, 201),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "http://localhost:9999"}, 403),
    ({"Origin": "null"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Sec-Fetch-Site": "same-site"}, 403),
    ({"Host": "evil.example"}, 421),
    ({"Host": "localhost.evil.example:8090"}, 421),
    ({"Content-Type": "text/plain"}, 415),
]


async def test_changes_come_from_our_own_pages(store: Server) -> None:
    """A foreign page, a foreign name that leads here, a form in disguise: refused."""
    async with served() as client:
        for number, (headers, status) in enumerate(BROWSERS):
            sent = {"Content-Type": "application/json", **headers}
            body = json.dumps({**CHECK, "id": f"check-{number}"})
            answer = await client.post("/api/checks", content=body, headers=sent)
            assert answer.status_code == status, headers


async def test_reading_under_a_foreign_name_is_refused(store: Server) -> None:
    """On loopback; with UPTIME_HOSTS another name is ours, too."""
    async with served() as client:
        assert (await client.get("/", headers={"Host": "evil.example"})).status_code == 421
        assert (await client.get("/", headers={"Host": "[::1]:8090"})).status_code == 200
    async with served(load({"UPTIME_HOSTS": "status.example.org"})) as client:
        named = {"Host": "Status.example.org:443"}
        assert (await client.get("/", headers=named)).status_code == 200


async def test_large_bodies_are_refused(store: Server) -> None:
    """Before they are read."""
    async with served() as client:
        big = await client.post("/api/checks", json={"name": "x" * 70_000})
        assert big.status_code == 413

        async def endless() -> AsyncIterator[bytes]:
            yield b"{}"

        assert (await client.post("/api/checks", content=endless())).status_code == 411


async def test_every_answer_carries_the_policy(store: Server) -> None:
    """Pages, errors and static files: nothing from elsewhere, no framing, no sniffing."""
    async with served() as client:
        for path in ("/", "/nowhere", "/static/uptime.css", "/status.json", "/checks"):
            headers = (await client.get(path)).headers
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
        page = (await client.get("/checks/new")).text
        assert "<style" not in page
        assert " style=" not in page
        assert "onclick" not in page
        assert "://" not in page.replace("https://example.org", "")


async def test_pages_escape_what_people_wrote(store: Server) -> None:
    """Names, targets, details, expectations: shown as text, wherever they are shown."""
    async with served(load({"UPTIME_TITLE": XSS, "UPTIME_ALLOW_PRIVATE": "127.0.0.1"})) as client:
        evil = {
            **CHECK,
            "name": XSS[:80],
            "target": "http://127.0.0.1:9/?" + XSS.replace(" ", ""),
            "contains": XSS,
            "lacks": XSS,
            "server_name": XSS,
            "headers": {"X-A": XSS},
            "expect_headers": {"X-B": XSS},
            "failures": 1,
        }
        assert (await client.post("/api/checks", json=evil)).status_code == 201
        rules = Rules("shop", XSS, 1, 1)
        await states.put("shop", apply(State(), 1_800_000_000, Outcome("failed", 5, XSS), rules))
        hook = {"id": "a", "kind": "webhook", "target": f"https://example.org/?{XSS}"}
        await client.post("/api/channels", json=hook)
        await client.post("/channels", data={"id": XSS, "kind": "email", "target": XSS})
        paths = ["/", "/s/shop", "/checks", "/checks/shop", "/checks/shop/remove", "/channels"]
        for path in [*paths, "/incidents", f"/{XSS}", f"/login?then={XSS}"]:
            page = await client.get(path, headers={"Accept": "text/html"})
            assert "<script>alert" not in page.text, path
            assert "<img" not in page.text, path
        wrong = await client.post("/checks/new", data={"id": XSS, "name": XSS, "target": XSS})
        assert wrong.status_code == 422
        assert "<script>alert" not in wrong.text


# ---- forms and pictures


async def test_form_adds_and_changes_a_check(store: Server) -> None:
    """What a person types becomes what the API would take; a mistake comes back with the words."""
    form = {
        "id": "shop",
        "name": "Shop",
        "kind": "http",
        "target": "http://127.0.0.1:9/",
        "interval": "60",
        "timeout": "2.5",
        "failures": "3",
        "recoveries": "1",
        "public": "on",
        "headers": "Accept: text/html\r\nX-Token: abc:def",
        "expect_headers": "Server: nginx",
    }
    async with served() as client:
        added = await client.post("/checks/new", data=form)
        assert (added.status_code, added.headers["location"]) == (303, "/checks")
        shown = (await client.get("/api/checks/shop")).json()
        assert (shown["timeout"], shown["failures"]) == (2.5, 3)
        assert shown["headers"] == {"Accept": "********", "X-Token": "********"}
        assert shown["expect_headers"] == {"Server": "nginx"}
        page = (await client.get("/checks/shop")).text
        assert "abc:def" not in page
        wrong = await client.post("/checks/shop", data={**form, "interval": "soon"})
        assert wrong.status_code == 422
        assert "interval: must be a whole number" in wrong.text
        assert (await client.post("/checks/shop/pause")).status_code == 303
        assert "Resume" in (await client.get("/checks")).text
        await client.post("/checks/shop", data={**form, "name": "New name"})
        assert (await client.get("/api/checks/shop")).json()["paused"] is True
        assert "Remove Shop" not in (await client.get("/checks/shop/remove")).text
        assert (await client.post("/checks/shop/remove")).status_code == 303
        assert "Nothing is checked yet" in (await client.get("/checks")).text


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=50), max_size=8))
def test_forms_of_any_kind_are_read_or_refused(form: dict[str, str]) -> None:
    """Whatever is typed, nothing but a refusal comes of it."""
    from uptime.service import Refusal

    try:
        found: dict[str, Any] = check_from(form)
    except Refusal:
        return
    assert isinstance(found["public"], bool)


def test_bars_are_coloured_by_their_day() -> None:
    """No results, all good, a few failed, many failed."""
    days = [[20_000, 0, 0, 0], [20_001, 9, 0, 0], [20_002, 98, 0, 2], [20_003, 5, 0, 5]]
    found = charts.bars(days)
    assert [bar["level"] for bar in found] == ["none", "good", "minor", "major"]
    assert found[3]["words"] == "2024-10-07: 50 % good, 5 failed of 10 checks"


@pytest.mark.parametrize(("value", "top"), [(0, 10), (9, 10), (11, 20), (21, 50), (730, 1000)])
def test_chart_has_a_round_top(value: int, top: int) -> None:
    """The axis ends at 1, 2 or 5 with zeros."""
    assert charts.nice_ceiling(value) == top


def test_chart_needs_two_answers() -> None:
    """One point is no line; failures are not drawn."""
    detail = {"spans": [], "points": [[1, 20, "ok"], [2, 0, "failed"]]}
    assert charts.response_times(detail) is None
    detail["points"].append([3, 40, "degraded"])
    chart = charts.response_times(detail)
    assert chart
    assert len(chart["pieces"]) == 2, "the failure between two answers is a gap"
    assert "from 20 ms to 40 ms" in chart["words"]
    assert [row["words"] for row in chart["rows"]] == ["0 ms", "25 ms", "50 ms"]
    assert [time["words"] for time in chart["times"]] == ["00:00:01", "00:00:02", "00:00:03"]
    detail["points"].append([2000, 1400, "ok"])
    chart = charts.response_times(detail)
    assert chart
    assert [row["words"] for row in chart["rows"]] == ["0 ms", "1 s", "2 s"]
    assert chart["times"][2]["words"] == "00:33"


def test_response_time_is_not_drawn_through_outages() -> None:
    """Ten minutes without an answer, and a failed check, break the line."""
    spans = [[n * 600, 100, 120] for n in range(12) if n not in (4, 5)]
    chart = charts.response_times({"spans": spans, "points": []})
    assert chart
    assert [len(piece["line"].split()) for piece in chart["pieces"]] == [4, 6]
    points = [[n, 20, "failed" if n == 2 else "ok"] for n in range(5)]
    chart = charts.response_times({"spans": [], "points": points})
    assert chart
    assert [len(piece["line"].split()) for piece in chart["pieces"]] == [2, 2]
