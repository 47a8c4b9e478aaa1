"""The feed behind live pages: what it tells, how it resumes, and that it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from holdfast import Backoff, Holdfast
from holdfast.web import live
from holdfast.web.live import Feed
from tests.integration.support import Seen, client_of, until, working


@asynccontextmanager
async def feed_of(app: Holdfast) -> AsyncIterator[Feed]:
    """A feed that listens."""
    backend = await client_of(app)
    await backend.topology.ensure()
    feed = Feed(backend)
    await feed.start()
    try:
        yield feed
    finally:
        await feed.aclose()
        await app.close()


async def notice(stream: AsyncIterator[bytes], topic: str) -> str:
    """The id of the first notice with a topic."""
    async with asyncio.timeout(60):
        async for part in stream:
            text = part.decode()
            if text.startswith("event: changed") and topic in text.split("data: ")[1].split():
                return text.split("id: ")[1].split("\n")[0]
    raise AssertionError("the stream has ended")


async def test_feed_tells_what_kind_of_thing_changed(app: Holdfast, seen: Seen) -> None:
    """A run, a dead letter, a node: each is told under its name."""

    @app.job(retry=Backoff.never())
    async def step(n: int) -> None:
        seen.append(n)
        if n < 0:
            raise ValueError("no")

    async with feed_of(app) as feed, aclosing(feed.stream()) as stream, working(app):
        await notice(stream, "nodes")
        await step.enqueue(1)
        await notice(stream, "runs")
        await step.enqueue(-1)
        await notice(stream, "dead")


async def test_feed_is_resumed_where_it_was_left(app: Holdfast) -> None:
    """What was missed comes as one notice; an id that is not known is answered with everything."""
    async with feed_of(app) as feed:
        async with aclosing(feed.stream()) as stream:
            first = await notice(stream, "tick")
        feed.changed("dead")
        number = int(first.partition(".")[2])
        await until(lambda: feed._number > number, 10, "another notice")
        async with aclosing(feed.stream(first)) as stream:
            await notice(stream, "dead")
        for strange in ("other.5", f"{first}0000", "x", f"{first.split('.')[0]}.-1"):
            async with aclosing(feed.stream(strange)) as stream:
                assert await notice(stream, "all")
        assert feed.streams == 0


async def test_feed_gathers_changes_instead_of_telling_each(app: Holdfast, seen: Seen) -> None:
    """Five hundred runs are a few notices, not five hundred."""

    @app.job
    async def quick(n: int) -> None:
        seen.append(n)

    async with feed_of(app) as feed, working(app, concurrency=20):
        await quick.enqueue_many(range(500))
        await seen.wait(500)
        assert feed._number < 100


async def test_feed_that_is_closed_ends_its_streams(app: Holdfast) -> None:
    """A server that waits for its connections does not wait for ever."""
    async with feed_of(app) as feed:
        stream = feed.stream()
        assert (await anext(stream)).startswith(b"retry")
        waiting = asyncio.create_task(_drain(stream))
        await until(lambda: feed.streams == 1, 5, "an open stream")
        feed.close()
        async with asyncio.timeout(60):
            await waiting
        assert feed.streams == 0
        await feed.start()
        assert not [t for t in feed._tasks if not t.done()]


async def _drain(stream: AsyncIterator[bytes]) -> None:
    async for _ in stream:
        pass


async def test_feed_shows_signs_of_life(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing changes a comment is sent, so that proxies keep the connection."""
    monkeypatch.setattr(live, "ALIVE_SECONDS", 0.01)
    async with feed_of(app) as feed, aclosing(feed.stream()) as stream:
        async with asyncio.timeout(60):
            while await anext(stream) != b": alive\n\n":
                pass
