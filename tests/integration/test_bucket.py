"""`app.bucket`: a program's own records, on a real server and in memory alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from holdfast import Conflict, Context, Holdfast, Schedules
from holdfast.errors import InvalidInput, InvalidName, InvalidPayload, Unreadable
from holdfast.server import Server
from holdfast.testing import RunningWorker, make_context, memory
from tests.integration.support import client_of
from tests.support import until


@dataclass
class Cart:
    items: int = 0


@pytest.fixture(params=["server", "memory"])
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def app(nats: Server, namespace: str) -> Holdfast:
    return Holdfast("shop", nats_url=nats.url, namespace=namespace)


@asynccontextmanager
async def opened(app: Holdfast, place: str) -> AsyncIterator[None]:
    async with memory(app) if place == "memory" else app:
        yield


async def test_bucket_keeps_typed_values(app: Holdfast, place: str) -> None:
    """What was put comes back as its type, with the revision that wrote it."""
    async with opened(app, place):
        carts = app.bucket("carts", Cart)
        assert await carts.get("ann") is None
        revision = await carts.put("ann", Cart(3))
        entry = await carts.get("ann")
        assert entry
        assert (entry.key, entry.value, entry.revision) == ("ann", Cart(3), revision)
        assert entry.stored > 0
        await carts.delete("ann")
        await carts.delete("ann")
        assert await carts.get("ann") is None


async def test_bucket_value_lives_as_long_as_its_ttl(app: Holdfast) -> None:
    """The server counts whole seconds; a part of one is rounded up, so no lease ends early."""
    async with app:
        carts = app.bucket("carts", Cart)
        put = time.monotonic()
        await carts.put("ann", Cart(1), ttl=1.9)

        async def is_gone() -> bool:
            return await carts.get("ann") is None

        await until(is_gone, what="expired")
        assert time.monotonic() - put >= 1.9


async def test_bucket_put_is_decided_by_the_revision(app: Holdfast, place: str) -> None:
    """With `expected` a slower writer is refused; without it the last writer wins."""
    async with opened(app, place):
        carts = app.bucket("carts", Cart)
        first = await carts.put("ann", Cart(1), expected=0)
        with pytest.raises(Conflict):
            await carts.put("ann", Cart(2), expected=0)
        second = await carts.put("ann", Cart(2), expected=first)
        with pytest.raises(Conflict):
            await carts.put("ann", Cart(3), expected=first)
        assert await carts.put("ann", Cart(4)) > second
        entry = await carts.get("ann")
        assert entry
        assert entry.value == Cart(4)


async def test_bucket_change_loses_no_update(app: Holdfast, place: str) -> None:
    """Twenty writers at once each count one: twenty are counted."""
    async with opened(app, place):
        carts = app.bucket("carts", Cart)
        await asyncio.gather(
            *(carts.change("ann", lambda c: Cart((c or Cart()).items + 1)) for _ in range(20))
        )
        entry = await carts.get("ann")
        assert entry
        assert entry.value == Cart(20)
        await carts.change("ann", lambda c: c or Cart())
        same = await carts.get("ann")
        assert same
        assert same.revision == entry.revision, "a value that stays the same is not written"


async def test_bucket_lists_below_whole_words(app: Holdfast, place: str) -> None:
    """A prefix is a word, not a part of one; the order is that of the last write."""
    async with opened(app, place):
        results = app.bucket("results")
        for key in ("ann.1", "anna.1", "ann.2", "bob"):
            await results.put(key, {"key": key})
        await results.put("ann.1", {"key": "again"})
        assert [e.key async for e in results.entries("ann")] == ["ann.2", "ann.1"]
        assert [e.key async for e in results.entries()] == ["anna.1", "ann.2", "bob", "ann.1"]


async def test_bucket_buckets_are_apart(app: Holdfast, place: str) -> None:
    """The same key in two buckets is two records."""
    async with opened(app, place):
        one, two = app.bucket("one"), app.bucket("two")
        await one.put("key", 1)
        assert await two.get("key") is None


async def test_bucket_refuses_what_cannot_work(app: Holdfast, place: str) -> None:
    """Keys with wildcards, names with dots, values that are no JSON: nothing is sent."""
    async with opened(app, place):
        bucket = app.bucket("carts")
        for key in ("", "a..b", "*", "a.>", "a b", ".a", "k" * 401, "a\n"):
            with pytest.raises(InvalidName):
                await bucket.put(key, 1)
        with pytest.raises(InvalidName):
            app.bucket("a.b")
        with pytest.raises(InvalidPayload):
            await bucket.put("key", float("nan"))


async def test_bucket_tells_a_foreign_value(app: Holdfast, place: str) -> None:
    """A value that does not fit the type is told by its key, not returned half-read."""
    async with opened(app, place):
        await app.bucket("carts").put("ann", {"items": "many"})
        with pytest.raises(Unreadable, match="ann in bucket carts"):
            await app.bucket("carts", Cart).get("ann")


async def test_bucket_comes_back_after_it_was_removed(app: Holdfast) -> None:
    """Somebody deleted the bucket's stream under a running program: the next write makes it."""
    async with app:
        bucket = app.bucket("carts")
        await bucket.put("ann", 1)
        client = await client_of(app)
        await client.broker.api(f"STREAM.DELETE.KV_{client.broker.names.data('carts')}")
        assert await bucket.get("ann") is None
        await client.broker.api(f"STREAM.DELETE.KV_{client.broker.names.data('carts')}")
        await bucket.put("ann", 2)
        entry = await bucket.get("ann")
        assert entry
        assert entry.value == 2


async def test_schedules_at_run_time(app: Holdfast, nats: Server, namespace: str) -> None:
    """`job.schedule` and `Schedules.of(app)`: added, replaced, paused, triggered and removed."""
    seen: list[tuple[int, object]] = []

    @app.job
    async def tick(ctx: Context, n: int) -> None:
        seen.append((n, ctx.slot))

    async with RunningWorker(app, nats.url, namespace):
        schedules = await Schedules.of(app)
        await schedules.add(tick.schedule("nightly", cron="30 2 * * *", payload={"n": 7}))
        with pytest.raises(InvalidInput, match="already"):
            await schedules.add(tick.schedule("nightly", every="1h", payload={"n": 7}))
        await schedules.add(tick.schedule("nightly", every="1h", payload={"n": 8}), replace=True)
        assert (await schedules.pause("nightly")).paused
        await schedules.trigger("nightly")
        async with asyncio.timeout(60):
            while not seen:
                await asyncio.sleep(0.01)
        assert seen == [(8, None)], "a run by hand has no slot"
        await schedules.remove("nightly")
        assert await schedules.list() == []
    with pytest.raises(InvalidPayload):
        tick.schedule("wrong", every="1h", payload={"m": 1})


async def test_schedules_need_a_server(app: Holdfast) -> None:
    """In memory there is no scheduler, and that is said."""
    async with memory(app):
        with pytest.raises(InvalidInput, match="server"):
            await Schedules.of(app)


@pytest.mark.parametrize(
    ("run", "slot"),
    [
        ("tick/=t20261116T084500Z", "2026-11-16T08:45:00+00:00"),
        ("tick/=tnonsense", None),
        ("tick/=mr1", None),
        ("r1", None),
    ],
)
def test_context_knows_its_slot(run: str, slot: str | None) -> None:
    """`ctx.slot` is the due instant, also in a retry; None for a run that no schedule sent."""
    found = make_context(run=run).slot
    assert (found.isoformat() if found else None) == slot
