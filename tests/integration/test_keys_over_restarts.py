"""What becomes of keys when NATS restarts: the server knows the ids of what it still stores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast import Context, Holdfast
from holdfast.server import Server
from tests.integration.support import Seen, broker_of, until, working


@pytest.fixture
def own() -> Iterator[Server]:
    """A server that may be killed."""
    with Server(fast=True) as server:
        yield server


async def test_key_that_waits_outlives_a_restart_and_an_unrecorded_end_does_not(
    own: Server, namespace: str, seen: Seen
) -> None:
    """A restarted server forgets the message ids of what was acknowledged; records remember."""
    app = Holdfast("shop", nats_url=own.url, namespace=namespace)

    @app.job(delivery="at_least_once")
    async def loose(ctx: Context, n: int) -> None:
        seen.append(("loose", n))

    @app.job(group="elsewhere", delivery="at_least_once")
    async def waiting(n: int) -> None:
        """No worker of its group runs."""

    @app.job
    async def kept(n: int) -> None:
        seen.append(("kept", n))

    async def send(n: int) -> dict[str, bool]:
        jobs: dict[str, Any] = {"loose": loose, "waiting": waiting, "kept": kept}
        return {name: (await job.enqueue(n, key="a")).duplicate for name, job in jobs.items()}

    async with app, working(app):
        assert await send(1) == {"loose": False, "waiting": False, "kept": False}
        await seen.wait(2)
        await until(lambda: _only_waiting(app), 10, "the acknowledgements")
        assert await send(2) == {"loose": True, "waiting": True, "kept": True}
        own.kill()
        own.restart()
        broker = await broker_of(app)
        await until(lambda: broker.connected, 20, "the connection")
        again = await send(3)
        assert again["waiting"], "what is stored is known"
        await seen.wait(3)
        await until(lambda: _only_waiting(app), 10, "the acknowledgements")
    assert [s for s in seen if s[0] == "kept"] == [("kept", 1)], "the record knows the key"
    assert ("loose", 2) not in seen


async def _only_waiting(app: Holdfast) -> bool:
    broker = await broker_of(app)
    info = await broker.api(f"STREAM.INFO.{broker.names.jobs}")
    return bool(info["state"]["messages"] == 1)
