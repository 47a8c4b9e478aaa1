"""Resources: opened once in a process, handed in by a parameter, closed at the end."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI

from holdfast import Context, Holdfast, SyncApp, Worker
from holdfast.client import Backend, Client
from holdfast.errors import DefinitionError, HoldfastError
from holdfast.testing import eager, memory
from holdfast.worker import worker as worker_module
from tests.integration.support import until, working


class Pool:
    def __init__(self) -> None:
        self.healthy = True
        self.calls: list[int] = []

    async def execute(self, number: int) -> int:
        self.calls.append(number)
        return len(self.calls)


async def test_resources_live_as_long_as_the_worker(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened before the first run and only if a handler needs them; closed in reverse order. A bad
    health check makes the worker not ready."""
    monkeypatch.setattr(worker_module, "RESOURCE_SECONDS", 0.1)
    story: list[str] = []

    @app.resource
    async def pool() -> AsyncIterator[Pool]:
        story.append("open pool")
        yield Pool()
        story.append("close pool")

    @pool.health
    async def answers(opened: Pool) -> bool:
        return opened.healthy

    def directory() -> Iterator[str]:
        story.append("open directory")
        yield "/data"
        story.append("close directory")

    opened = app.resource(directory)
    assert app.resource(directory) is opened

    @app.resource
    async def unused() -> str:
        raise AssertionError("nobody needs it")

    @app.job
    async def charge(
        ctx: Context, cents: int, where: Annotated[str, opened], db: Pool = pool.injected
    ) -> str:
        return f"{where} {await db.execute(cents)} {ctx.attempt}"

    @app.job
    def plain(cents: int, db: Pool = pool.injected) -> int:
        return len(db.calls)

    send: Any = charge
    async with working(app) as worker:
        assert story == ["open pool", "open directory"]
        assert await (await send.enqueue(5)).result(60) == "/data 1 1"
        assert await (await send.enqueue(cents=6)).result(60) == "/data 2 1"
        assert await (await plain.enqueue(1)).result(60) == 2
        (await pool()).healthy = False
        await until(lambda: _problems(worker) == ["resource pool is not healthy"], 30, "bad")
        (await pool()).healthy = True
        await until(lambda: not _problems(worker), 30, "good again")
    assert story[2:] == ["close directory", "close pool"]
    assert charge.signature.parameters == ("cents",)


def _problems(worker: Worker) -> list[str]:
    return [p for p in worker.current.problems() if p.startswith("resource")]


async def test_resource_serves_fastapi_and_is_closed_with_the_app(app: Holdfast) -> None:
    """The same object is a dependency; one value for the whole process."""
    story: list[str] = []

    @app.resource
    async def pool() -> AsyncIterator[Pool]:
        story.append("open")
        yield Pool()
        story.append("close")

    api = FastAPI()

    @api.get("/calls")
    async def calls(db: Annotated[Pool, Depends(pool)]) -> int:
        return await db.execute(1)

    async with app:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answers = await asyncio.gather(*(client.get("/calls") for _ in range(5)))
    assert sorted(answer.json() for answer in answers) == [1, 2, 3, 4, 5]
    assert story == ["open", "close"]


async def test_resource_that_fails_to_close_leaves_no_other_open(app: Holdfast) -> None:
    """Nor the connection, nor the thread of `SyncApp`; one that uses another is closed first."""
    story: list[str] = []

    @app.resource
    async def session() -> AsyncIterator[str]:
        yield f"session of {await pool()}"
        story.append("close session")

    @app.resource
    async def pool() -> AsyncIterator[str]:
        yield "pool"
        story.append("close pool")

    @app.resource
    def broken() -> Iterator[None]:
        yield
        raise RuntimeError("disk full")

    async def use() -> Backend:
        assert await session() == "session of pool"
        await broken()
        return await app.backend()

    client = await use()
    with pytest.raises(RuntimeError, match="disk full"):
        await app.close()
    assert story == ["close session", "close pool"]
    assert isinstance(client, Client)
    assert not client.broker.connected

    def plain() -> bool:
        shop = SyncApp(app)
        shop._wait(use)
        thread = shop._thread
        with pytest.raises(RuntimeError, match="disk full"):
            shop.close()
        return thread is not None and thread._thread.is_alive()

    assert not await asyncio.to_thread(plain)


async def test_tests_override_a_resource(app: Holdfast) -> None:
    """In memory, at once, and as a plain function call."""

    @app.resource
    async def pool() -> Pool:
        raise AssertionError("must not be opened")

    @app.job
    async def charge(cents: int, db: Pool = pool.injected) -> int:
        return await db.execute(cents)

    fake = Pool()
    with pool.override(fake):
        async with memory(app) as mem:
            run = await charge.enqueue(5)
            await mem.drain()
            assert await run.result() == 1
        with eager(app):
            assert await (await charge.enqueue(6)).result() == 2
    assert await charge(7, db=fake) == 3
    assert fake.calls == [5, 6, 7]
    with pytest.raises(HoldfastError, match="resource 'pool' is handed in by a worker"):
        await charge(8)


def test_resource_that_cannot_work_is_refused() -> None:
    """When it is defined."""
    app = Holdfast("shop")

    def of(name: str) -> str:
        return name

    with pytest.raises(DefinitionError, match="without parameters"):
        app.resource(of)  # type: ignore[arg-type]
