"""Events: every subscribing job gets each one, a retry repeats nothing, none is lost in silence."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from holdfast import Backoff, Context, Holdfast
from holdfast.broker.kv import direct_batch
from holdfast.broker.streams import Topology
from holdfast.config import RecordConfig
from holdfast.errors import InvalidName, InvalidPayload, PayloadTooLarge, RunFailed
from holdfast.names import consumer
from holdfast.server import Server
from holdfast.worker import intake
from tests.integration.support import (
    Seen,
    all_records,
    broker_of,
    dead_letters,
    lag,
    metric,
    parked,
    until,
    working,
)


async def stored_events(app: Holdfast) -> list[tuple[str, str, bytes]]:
    """Subject, id and body of every event that is kept."""
    broker = await broker_of(app)
    names = broker.names
    pattern = f"{names.namespace}.event.>"
    return [
        (m.headers["Nats-Subject"], m.headers.get("Nats-Msg-Id", ""), m.body)
        async for m in direct_batch(broker, names.events, pattern)
    ]


async def test_event_reaches_every_subscribing_job(
    app: Holdfast, namespace: str, seen: Seen
) -> None:
    """Two jobs subscribe to one event and each gets it, as a run of its own."""

    @app.job(on="resized")
    async def index(ctx: Context, data: dict[str, int]) -> None:
        seen.append(("index", data, ctx.run))

    @app.job(on="resized")
    async def notify(ctx: Context, data: dict[str, int]) -> None:
        seen.append(("notify", data, ctx.run))

    @app.job
    async def resize(ctx: Context) -> None:
        await ctx.publish("resized", {"n": 1})
        await ctx.publish("resized", {"n": 2})
        await ctx.publish("resized.small", None)

    async with working(app):
        run = await resize.enqueue()
        await run.result(60)
        await seen.wait(4)
        assert sorted((job, data["n"]) for job, data, _ in seen) == [
            ("index", 1),
            ("index", 2),
            ("notify", 1),
            ("notify", 2),
        ]
        assert await stored_events(app) == [
            (f"{namespace}.event.resized", f"{run.id}.resized.1", b'{"n":1}'),
            (f"{namespace}.event.resized", f"{run.id}.resized.2", b'{"n":2}'),
            (f"{namespace}.event.resized.small", f"{run.id}.resized.small.1", b"null"),
        ]
        records = await all_records(app)
        assert len({r for _, _, r in seen}) == 4
        assert all(records[r].cause == run.id for _, _, r in seen)


async def test_retry_of_the_publisher_repeats_nothing(app: Holdfast, seen: Seen) -> None:
    """An attempt that failed after publishing publishes the same ids again: nobody runs twice."""

    @app.job(on="resized")
    async def index(n: int) -> None:
        seen.append(n)

    @app.job(retry=Backoff.list(["10ms", "10ms"]))
    async def resize(ctx: Context) -> int:
        await ctx.publish("resized", 1)
        await ctx.publish("resized", 2)
        if ctx.attempt < 3:
            raise ValueError("no")
        await ctx.publish("resized", 3)
        return ctx.attempt

    async with working(app):
        assert await (await resize.enqueue()).result(60) == 3
        await seen.wait(3)
        await until(lambda: _no_lag(app, "index", "resized"), 5, "no lag")
        assert sorted(seen) == [1, 2, 3]
        assert len(await stored_events(app)) == 3


async def test_retry_after_the_window_repeats_nothing_either(app: Holdfast, seen: Seen) -> None:
    """When the server has forgotten the event's id, the subscriber's record still knows it."""

    @app.job(on="resized")
    async def index(n: int) -> None:
        seen.append(n)

    @app.job(retry=Backoff.list(["300ms"]))
    async def resize(ctx: Context) -> None:
        await ctx.publish("resized", 1)
        if ctx.attempt == 1:
            raise ValueError("no")

    async with working(app, records=RecordConfig(dedup_window_seconds=0.1)) as worker:
        await (await resize.enqueue()).result(60)
        assert len(await stored_events(app)) == 2
        dropped = "holdfast_duplicates_suppressed_total"
        await until(lambda: metric(worker, dropped, where="claim") == 1, 5, "the repeat dropped")
        assert seen == [1]


@pytest.mark.parametrize("wait", ["50ms", "300ms"])
async def test_retry_of_one_subscriber_does_not_bother_the_other(
    app: Holdfast, seen: Seen, wait: str
) -> None:
    """A subscriber's retries go through its own job subject: the other one sees the event once."""

    @app.job(on="resized", retry=Backoff.list([wait] * 2))
    async def flaky(ctx: Context, n: int) -> None:
        seen.append(("flaky", ctx.attempt, ctx.run))
        if ctx.attempt < 3:
            raise ValueError("no")

    @app.job(on="resized")
    async def steady(ctx: Context, n: int) -> None:
        seen.append(("steady", ctx.attempt, ctx.run))

    async with working(app):
        await app.publish("resized", 7)
        await seen.wait(4)
        assert [s[1] for s in seen if s[0] == "flaky"] == [1, 2, 3]
        assert [s[1] for s in seen if s[0] == "steady"] == [1]
        assert len({s[2] for s in seen}) == 2
        assert len(await stored_events(app)) == 1
        for job in ("flaky", "steady"):
            await until(lambda job=job: _no_lag(app, job, "resized"), 5, "no lag")


async def test_parked_retry_of_a_subscriber_is_its_own_run(
    app: Holdfast, namespace: str, seen: Seen
) -> None:
    """A long wait of a subscriber is parked for its job, and the events consumer is free of it."""

    @app.job(on="resized", retry=Backoff.list(["1d"]))
    async def flaky(n: int) -> None:
        raise ValueError("no")

    async with working(app):
        await app.publish("resized", 7, id="e7")
        [message] = await until(lambda: parked(app), 5, "the parked retry")
        assert message.headers["Nats-Schedule-Target"] == f"{namespace}.job.default.flaky"
        assert message.headers["Hf-Failures"] == "1"
        assert message.headers["Hf-Run"].startswith("flaky/")
        assert message.body == b"7"
        await until(lambda: _no_lag(app, "flaky", "resized"), 5, "no lag")


async def test_event_that_nobody_subscribes_to_is_told(
    app: Holdfast, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning, a metric, and the event itself kept: not gone without a word."""

    @app.job
    async def shout(ctx: Context) -> None:
        await ctx.publish("nobody", 1)
        await ctx.publish("somebody", 2)

    @app.job(on="somebody")
    async def listen(n: int) -> None:
        seen.append(n)

    async with working(app) as worker:
        with caplog.at_level(logging.WARNING, "holdfast"):
            await (await shout.enqueue()).result(60)
            await app.publish("nobody-outside", 3)
            await app.publish("somebody", 4)
        warned = [r.getMessage() for r in caplog.records if "subscribes" in r.getMessage()]
        assert len(warned) == 2
        assert "'nobody'" in warned[0]
        assert "'nobody-outside'" in warned[1]
        assert metric(worker, "holdfast_events_unclaimed_total", event="nobody") == 1
        assert metric(worker, "holdfast_events_unclaimed_total", event="somebody") == 0
        assert sorted(await seen.wait(2)) == [2, 4]
        assert len(await stored_events(app)) == 4


async def test_event_from_outside_with_an_id_is_published_once(app: Holdfast, seen: Seen) -> None:
    """`app.publish` needs no run; its `id` makes a repeat known as one."""

    @app.job(on="paid")
    async def book(ctx: Context, order: dict[str, Any]) -> None:
        seen.append((order["id"], ctx.run))

    async with app, working(app):
        await app.publish("paid", {"id": 1}, id="order 1 / paid")
        await app.publish("paid", {"id": 1}, id="order 1 / paid")
        await app.publish("paid", {"id": 2})
        await app.publish("paid", {"id": 2})
        await seen.wait(3)
        assert sorted(n for n, _ in seen) == [1, 2, 2]
        assert len({run for _, run in seen}) == 3


async def test_subscriber_made_after_the_event_gets_only_later_ones(
    app: Holdfast, seen: Seen
) -> None:
    """A new subscription starts now: the past is kept, and not replayed."""

    @app.job(on="resized")
    async def first(n: int) -> None:
        seen.append(("first", n))

    async with app:
        async with working(app):
            await app.publish("resized", 1)
            await seen.wait()

        @app.job(on="resized")
        async def second(n: int) -> None:
            seen.append(("second", n))

        async with working(app):
            await app.publish("resized", 2)
            await seen.wait(3)
            assert sorted(seen) == [("first", 1), ("first", 2), ("second", 2)]


async def test_subscriber_that_was_away_gets_what_it_missed(app: Holdfast, seen: Seen) -> None:
    """Events published while no worker runs wait for the next one."""

    @app.job(on="resized")
    async def index(n: int) -> None:
        seen.append(n)

    async with app:
        async with working(app):
            pass
        for number in range(5):
            await app.publish("resized", number)
        async with working(app):
            assert sorted(await seen.wait(5)) == [0, 1, 2, 3, 4]


async def test_subscription_deleted_under_the_worker_loses_nothing(
    app: Holdfast, seen: Seen
) -> None:
    """A subscription that is deleted is made again, and goes on where it was."""

    @app.job(on="resized")
    async def index(n: int) -> None:
        seen.append(n)

    async with app, working(app):
        await app.publish("resized", 0)
        await seen.wait()
        broker = await broker_of(app)
        name = consumer("default", "index", "resized")
        await broker.api(f"CONSUMER.DELETE.{broker.names.events}.{name}")
        for number in range(1, 6):
            await app.publish("resized", number)
        await seen.wait(6)
        await until(lambda: _no_lag(app, "index", "resized"), 5, "no lag")
        assert sorted(seen) == [0, 1, 2, 3, 4, 5]


async def test_failing_subscriber_survives_the_loss_of_its_subscription(
    app: Holdfast, seen: Seen
) -> None:
    """A retry does not depend on the subscription it came from."""
    deleted = asyncio.Event()

    @app.job(on="resized", retry=Backoff.list(["100ms"]))
    async def index(ctx: Context, n: int) -> None:
        seen.append(ctx.attempt)
        if ctx.attempt == 1:
            await deleted.wait()
            raise ValueError("no")

    async with app, working(app):
        await app.publish("resized", 0)
        await seen.wait()
        broker = await broker_of(app)
        name = consumer("default", "index", "resized")
        await broker.api(f"CONSUMER.DELETE.{broker.names.events}.{name}")
        deleted.set()
        await seen.wait(2)
        assert seen == [1, 2]


async def test_job_may_subscribe_to_several_events_and_be_enqueued_too(
    app: Holdfast, seen: Seen
) -> None:
    """One job, three ways in, each with its own run."""

    @app.job(on=["image.resized", "image.cropped"])
    async def index(ctx: Context, n: int) -> None:
        seen.append((n, ctx.run))

    async with working(app):
        await app.publish("image.resized", 1)
        await app.publish("image.cropped", 2)
        await index.enqueue(3)
        await seen.wait(3)
        assert sorted(n for n, _ in seen) == [1, 2, 3]
        assert len({run for _, run in seen}) == 3


async def test_event_of_the_wrong_shape_is_the_subscribers_dead_letter(
    app: Holdfast, seen: Seen
) -> None:
    """What does not fit one subscriber is its own dead letter; the other one runs."""

    @app.job(on="resized")
    async def strict(n: int) -> None:
        raise AssertionError("must not run")

    @app.job(on="resized")
    async def easy(data: Any) -> None:
        seen.append(data)

    async with working(app):
        await app.publish("resized", {"no": "number"})
        assert await seen.wait() == [{"no": "number"}]
        [letter] = await until(lambda: dead_letters(app), 5, "a dead letter")
        assert letter.subject.endswith(".dead.default.strict")
        assert letter.headers["Hf-Subject"].endswith(".event.resized")


async def test_event_that_cannot_be_sent_fails_the_attempt(app: Holdfast) -> None:
    """A wrong name, a value that is no JSON, too large a body: the handler is told."""

    @app.job(retry=Backoff.never())
    async def shout(ctx: Context, what: str) -> None:
        if what == "name":
            await ctx.publish("a..b", 1)
        if what == "value":
            await ctx.publish("a", object())
        await ctx.publish("a", "x" * 2_000_000)

    async with working(app):
        for what, error in (
            ("name", "InvalidName"),
            ("value", "InvalidPayload"),
            ("size", "Large"),
        ):
            with pytest.raises(RunFailed, match=error):
                await (await shout.enqueue(what)).result(60)
        with pytest.raises(InvalidName):
            await app.publish("a.*", 1)
        with pytest.raises(InvalidPayload):
            await app.publish("a", float("nan"))
        with pytest.raises(PayloadTooLarge):
            await app.publish("a", "x" * 2_000_000)
        assert not await stored_events(app)


@pytest.mark.parametrize("event", ["a..b", "a.*", ">", "", "a b", ".a", "é"])
def test_subscription_to_an_impossible_name_is_refused(app: Holdfast, event: str) -> None:
    """A name that no event can have is refused where it is written."""
    with pytest.raises(InvalidName):

        @app.job(on=event)
        async def index() -> None: ...


async def test_two_groups_each_get_the_event(app: Holdfast, seen: Seen) -> None:
    """A job of the same name in another group subscribes for itself."""

    @app.job(on="resized")
    async def index(n: int) -> None:
        seen.append("default")

    other = Holdfast("other", **app._overrides)

    @other.job(name="index", group="far", on="resized")
    async def far(n: int) -> None:
        seen.append("far")

    async with working(app), working(other, group="far"):
        await app.publish("resized", 1)
        await seen.wait(2)
        assert sorted(seen) == ["default", "far"]


async def test_several_workers_share_a_subscription(app: Holdfast, seen: Seen) -> None:
    """Workers of one group are one subscriber: each event runs once among them."""

    @app.job(on="resized")
    async def index(ctx: Context, n: int) -> None:
        seen.append((n, ctx.node))

    async with working(app), working(app):
        for number in range(40):
            await app.publish("resized", number)
        await seen.wait(40)
        await until(lambda: _no_lag(app, "index", "resized"), 5, "no lag")
        assert sorted(n for n, _ in seen) == list(range(40))


async def _no_lag(app: Holdfast, job: str, event: str) -> bool:
    return await lag(app, job, event) == 0


async def test_subscriber_in_another_group_takes_over_what_the_old_one_left(
    nats: Server, namespace: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that subscribes moves to another group: events that waited for the old one are executed
    in the new one, each event once, and the old consumer is removed."""
    monkeypatch.setattr(intake, "MOVED_SECONDS", 0.2)

    def version(group: str) -> Holdfast:
        app = Holdfast("shop", nats_url=nats.url, namespace=namespace)

        @app.job(on="sold", group=group)
        async def book(n: int) -> None:
            seen.append((group, n))

        return app

    old = version("first")
    async with old:
        async with working(old, group="first"):
            await old.publish("sold", {"n": 1})
            await seen.wait(1)
        await old.publish("sold", {"n": 2})
        new = version("second")
        async with new, working(new, group="second"):
            await new.publish("sold", {"n": 3})
            await seen.wait(3, 30)
            broker = await broker_of(new)
            topology = Topology(broker, RecordConfig())

            async def left() -> list[str]:
                return [c["name"] for c in await topology.consumers(broker.names.events)]

            async def moved_on() -> bool:
                return await left() == ["second=book=sold"]

            await until(moved_on, 30, "the old consumer's end")
    assert sorted(seen) == [("first", 1), ("second", 2), ("second", 3)]
