"""`holdfast web` as a process: it starts, tells where it is, ends in order; any number may run."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from holdfast import Holdfast
from holdfast.errors import ConfigError
from holdfast.server import Server
from holdfast.web.auth import hash_of, make_token
from tests.integration.cli_support import holdfast
from tests.integration.command import QUICK, Command
from tests.integration.test_web_security import SESSION, log_in
from tests.integration.web_support import TOKENS, WebApp, site


def web(nats: Server, namespace: str, folder: Path, *more: str, **env: str) -> Command:
    """A web process on any free port."""
    given = ("--nats-url", nats.url, "--namespace", namespace)
    return Command("web", "--port", "0", *given, *more, folder=folder, env={**QUICK, **env})


def named(nats: Server, namespace: str) -> Holdfast:
    """An app of the namespace, for the command line."""
    return Holdfast("x", nats_url=nats.url, namespace=namespace)


async def until_async(over: Callable[[], Awaitable[bool]], limit: float = 40.0) -> None:
    """Wait until a question is answered with yes."""
    async with asyncio.timeout(limit):
        while not await over():
            await asyncio.sleep(0.1)


async def address(process: Command, count: int = 1) -> str:
    """Where a process says it is."""
    text = await process.says("holdfast web is on http", count)
    return re.findall(r"holdfast web is on (http://\S+)/", text)[-1]


async def test_processes_come_and_go_and_sessions_stay(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Two run side by side; one is killed, another takes its place, and nobody is logged out."""
    tokens = {"HOLDFAST_WEB_TOKENS": TOKENS["operator"][1]}
    with (
        web(nats, namespace, tmp_path, **tokens) as first,
        web(nats, namespace, tmp_path, **tokens) as second,
    ):
        a, b = await address(first), await address(second)
        async with httpx.AsyncClient(base_url=a) as browser:
            assert (await browser.get("/api/v1/runs")).status_code == 401
            assert (await log_in(browser, TOKENS["operator"][0])).status_code == 303
            nodes = (await browser.get("/api/v1/nodes?role=web")).json()["items"]
            assert [n["state"] for n in nodes] == ["RUNNING", "RUNNING"]
            first.signal(signal.SIGKILL)
            cookies = {SESSION + namespace: browser.cookies[SESSION + namespace]}
        with web(nats, namespace, tmp_path, **tokens) as third:
            for url in (b, await address(third)):
                async with httpx.AsyncClient(base_url=url, cookies=cookies) as browser:
                    assert (await browser.get("/api/v1/runs")).status_code == 200
            third.signal(signal.SIGINT)
            assert await third.ended() == 0
            assert re.search(r"\bweb-\S+ stopped$", third.text, re.MULTILINE), third.text
        second.signal(signal.SIGTERM)
        assert await second.ended() == 0
        assert re.search(r"\bweb-\S+ stopped$", second.text, re.MULTILINE), second.text
    done = await holdfast(named(nats, namespace), "nodes", "list", "--all", "--json")
    states = [n["state"] for n in done.json if n["role"] == "web"]
    assert states.count("TERMINATED_GRACEFULLY") == 2


async def test_process_is_drained_like_any_node(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """It ends when an operator drains it, also through itself; open streams do not hold it up."""
    with web(nats, namespace, tmp_path) as process:
        url = await address(process)
        async with (
            httpx.AsyncClient(base_url=url) as browser,
            browser.stream("GET", "/live") as stream,
        ):
            assert stream.status_code == 200
            node = (await browser.get("/api/v1/nodes?role=web")).json()["items"][0]["id"]
            answer = await browser.post(f"/api/v1/nodes/{node}/drain")
            assert answer.json() == {"node": node}
        assert await process.ended() == 0


async def test_process_declared_lost_joins_again(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """A web process that froze holds nothing: it goes on, as another node."""
    given = ("--nats-url", nats.url, "--namespace", namespace)
    async with site(nats, namespace) as there:
        own = there.web.state.services.member.node
        with (
            Command("coordinator", *given, folder=tmp_path, env=QUICK),
            web(nats, namespace, tmp_path) as process,
            httpx.Client(base_url=await address(process)) as browser,
        ):
            await _frozen(there, own, process, browser)


async def _frozen(there: WebApp, own: str, process: Command, browser: httpx.Client) -> None:
    found = browser.get("/api/v1/nodes?role=web").json()["items"]
    nodes = [n for n in found if n["id"] != own]
    process.signal(signal.SIGSTOP)

    async def declared() -> bool:
        found = (await there.viewer.get("/nodes?role=web&all=true")).json()["items"]
        states = {n["id"]: n["state"] for n in found}
        return states.get(nodes[0]["id"]) not in ("RUNNING", None)

    await until_async(declared)
    process.signal(signal.SIGCONT)

    async def back() -> bool:
        answer = await there.viewer.get("/nodes?role=web&state=RUNNING")
        others = {n["id"] for n in answer.json()["items"]} - {nodes[0]["id"], own}
        return len(others) == 1

    await until_async(back)
    assert browser.get("/api/v1/runs").status_code == 200


async def test_web_refuses_to_start_for_others_without_tokens(nats: Server, namespace: str) -> None:
    """One line that says what to do; nothing is listened on."""
    done = await holdfast(named(nats, namespace), "web", "--host", "0.0.0.0")
    assert done.code == 1
    assert "holdfast web token" in done.err


async def test_token_is_printed_once_and_only_its_hash_is_kept(
    nats: Server, namespace: str
) -> None:
    """What is configured does not let anybody in by itself."""
    app = named(nats, namespace)
    done = await holdfast(app, "web", "token", "ann", "--role", "operator")
    token, line = done.out.strip(), done.err.strip().splitlines()[-1]
    assert line == f"ann:operator:{hash_of(token)}"
    assert token not in line
    for name, role, why in (("ann", "king", "viewer, operator, admin"), ("a:b", "admin", "name")):
        with pytest.raises(ConfigError, match=why):
            make_token(name, role)
