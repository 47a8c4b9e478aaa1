"""The feed behind live pages: what it tells, how it resumes, what it counts, and that it ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from holdfast import Backoff, Holdfast
from holdfast.client import Client
from holdfast.web import live
from holdfast.web.live import EndedAttempt, EndedRun, Feed, Rates
from tests.integration.support import Seen, until, working


@asynccontextmanager
async def feed_of(app: Holdfast) -> AsyncIterator[Feed]:
    """A feed that listens."""
    backend = await app.backend()
    assert isinstance(backend, Client)
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
        await until(lambda: feed.rates.totals(_now(feed), 600)["done"] == 500, 20, "all counted")
        assert feed._number < 100


def _now(feed: Feed) -> float:
    return feed._broker.server_now()


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


async def test_feed_counts_what_ended_before_it_listened_once(app: Holdfast, seen: Seen) -> None:
    """The past is read back and the present heard: together each run is counted once."""

    @app.job(retry=Backoff.list(["10ms"]))
    async def step(n: int) -> None:
        seen.append(n)
        if n < 0:
            raise ValueError("no")

    async with working(app):
        for n in (1, 2, 3, -1):
            await step.enqueue(n)
        await seen.wait(5)
        await until(lambda: _dead(app), 10, "a dead letter")
        async with feed_of(app) as feed:
            for n in (4, 5, -2):
                await step.enqueue(n)
            wanted = Counter(done=5, failed=2, dead=2)
            await until(lambda: feed.rates.totals(_now(feed), 600) == wanted, 20, f"{wanted}")
            await asyncio.sleep(2 * live.GATHER_SECONDS)
            assert feed.rates.totals(_now(feed), 600) == wanted
            assert feed.rates.since <= _now(feed) - 3000


async def _dead(app: Holdfast) -> bool:
    from tests.integration.support import dead_letters

    return bool(await dead_letters(app))


def test_rates_forget_what_is_older_than_an_hour() -> None:
    """Memory is bounded by time and jobs, not by runs."""
    rates = Rates()
    for second in range(0, 10_000, 5):
        rates.count(("g", "j"), "done", 1_000_000.0 + second)
    assert len(rates._steps) <= 721
    bars = rates.bars(1_010_000.0, 3600, 60)
    assert [bar.total for bar in bars[1:-1]] == [12] * 58
    assert rates.by_job(1_010_000.0, 900, 30)[("g", "j")][1:-1] == [6] * 28
    assert ("g", "other") not in rates.by_job(1_010_000.0, 900, 30)


def test_rates_count_a_record_like_its_writes() -> None:
    """Two failed attempts and a death: two failures and a death, wherever they are read from."""
    rates = Rates()
    attempts = (
        EndedAttempt(1000.0, "failed"),
        EndedAttempt(1010.0, "timeout"),
        EndedAttempt(1020.0, "failed"),
    )
    rates.read_back(EndedRun("dead", "g", "j", 1020.0, attempts))
    assert rates.totals(1021.0, 100) == Counter(failed=2, dead=1)
