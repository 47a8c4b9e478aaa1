"""A real worker inside a user's test, and the pytest plugin that makes it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from holdfast import Context, Holdfast
from holdfast.errors import ConfigError, NotConnected
from holdfast.server import Server
from holdfast.testing import RunningWorker


@pytest.fixture
def plain_app(monkeypatch: pytest.MonkeyPatch) -> Holdfast:
    """A user's app, which knows nothing of the test's server."""
    monkeypatch.setenv("HOLDFAST_CONNECT_TIMEOUT_SECONDS", "0.3")
    return Holdfast("shop", nats_url="nats://127.0.0.1:1")


async def test_worker_is_ready_when_the_block_begins(
    plain_app: Holdfast, nats: Server, namespace: str
) -> None:
    """An event published in the first line reaches its subscribers, in every group."""
    seen: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    @plain_app.job(on="ordered")
    async def mail(data: dict[str, int]) -> None:
        await seen.put(("mail", data["id"]))

    @plain_app.job(on="ordered", group="warehouse")
    async def pack(data: dict[str, int]) -> None:
        await seen.put(("pack", data["id"]))

    async with RunningWorker(plain_app, nats.url, namespace):
        await plain_app.publish("ordered", {"id": 1})
        async with asyncio.timeout(60):
            found = [await seen.get(), await seen.get()]
    assert sorted(found) == [("mail", 1), ("pack", 1)]


async def test_app_is_given_back_as_it_was(
    plain_app: Holdfast, nats: Server, namespace: str
) -> None:
    """After the block the app has its own address again, and no connection is left open."""

    @plain_app.job
    async def job(ctx: Context) -> str:
        return ctx.node

    async with RunningWorker(plain_app, nats.url, namespace, concurrency=1) as app:
        assert app is plain_app
        assert (await (await job.enqueue()).result(timeout=60)).startswith("worker-")
    assert plain_app.connection_config().nats_url.endswith(":1")
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_worker_that_cannot_start_fails_the_test(plain_app: Holdfast, namespace: str) -> None:
    """No server: the reason comes up at once, not a timeout at some later line."""

    @plain_app.job
    async def job() -> None: ...

    with pytest.raises(NotConnected, match="cannot reach NATS"):
        async with RunningWorker(plain_app, "nats://127.0.0.1:2", namespace):
            pytest.fail("not reached")


async def test_worker_that_fails_in_a_hook_fails_the_test(
    plain_app: Holdfast, nats: Server, namespace: str
) -> None:
    """An error of a start-up hook is the test's error."""

    @plain_app.job
    async def job() -> None: ...

    @plain_app.on_startup
    def start() -> None:
        raise ConfigError("no database")

    with pytest.raises(ConfigError, match="no database"):
        async with RunningWorker(plain_app, nats.url, namespace):
            pytest.fail("not reached")


def test_plain_test_gets_a_client_without_a_loop(
    plain_app: Holdfast, nats: Server, namespace: str
) -> None:
    """Without an async test runner: the worker lives in a thread, and errors still come up."""

    @plain_app.job
    async def add(a: int, b: int) -> int:
        return a + b

    with RunningWorker(plain_app, nats.url, namespace) as shop:
        assert shop.enqueue(add, 1, 2).result(timeout=60) == 3
    with (
        pytest.raises(NotConnected),
        RunningWorker(plain_app, "nats://127.0.0.1:2", namespace),
    ):
        pytest.fail("not reached")


def test_plugin_loads_nothing_heavy() -> None:
    """pytest imports the plugin at every start, also for projects that do not use it."""
    code = (
        "import sys, holdfast.testing.plugin\n"
        "heavy = {'nats', 'pydantic', 'holdfast.app', 'holdfast.worker', 'holdfast.server'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
