"""Accepted means stored: keys, delays, headers, batches, limits and a server that restarts."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest

from holdfast import Context, Holdfast
from holdfast.broker.wire import ENVELOPE_BYTES
from holdfast.config import RecordConfig
from holdfast.errors import InvalidInput, InvalidName, NotConnected, PayloadTooLarge, RunNotFound
from holdfast.names import decode
from holdfast.server import Server
from tests.integration.support import (
    Seen,
    broker_of,
    client_of,
    metric,
    parked,
    queue_empty,
    record_of,
    until,
    working,
)

KEYS = [
    "image-42",
    "with space",
    "dots.and.*.>",
    "..",
    "a/b:c=d",
    "é☃🎉",
    "line\r\nbreak",
    "\x00\x7f",
    "=h" + "0" * 64,
    "k" * 10_000,
    "k" * 9_999 + "!",
    "é" * 5_000,
]


@pytest.fixture
def recorded(app: Holdfast, seen: Seen) -> Holdfast:
    """An app whose job reports its number and run id."""

    @app.job
    async def work(ctx: Context, n: int) -> int:
        seen.append((n, ctx.run))
        return n

    return app


# ---- keys


async def test_key_is_known_at_publish(recorded: Holdfast, seen: Seen) -> None:
    """A second enqueue with the key is dropped by the server; its handle is the first run's."""
    work = recorded.jobs["work"]
    async with working(recorded) as worker:
        first = await work.enqueue(1, key="image-42")
        again = await work.enqueue(2, key="image-42")
        assert (first.duplicate, again.duplicate) == (False, True)
        assert first.id == again.id == "work/image-42"
        assert await again.result(60) == 1
        assert metric(worker, "holdfast_duplicates_suppressed_total", where="publish") == 1
        assert seen == [(1, "work/image-42")]


async def test_key_is_known_at_claim_after_the_window(recorded: Holdfast, seen: Seen) -> None:
    """When the server has forgotten the message id, the run's record still knows the key."""
    work = recorded.jobs["work"]
    records = RecordConfig(dedup_window_seconds=0.1)
    async with working(recorded, records=records) as worker:
        assert await (await work.enqueue(1, key="image-42")).result(60) == 1

        client = await client_of(recorded)
        repeat = work.options(key="image-42").request(2)

        async def stored() -> bool:  # by a sender that has not seen the record
            return not (await client._store_new(repeat)).duplicate

        await until(stored, 5, "a repeat after the window")
        dropped = "holdfast_duplicates_suppressed_total"
        await until(lambda: metric(worker, dropped, where="claim") == 1, 5, "the repeat dropped")
        await until(lambda: queue_empty(recorded), 5, "an empty queue")
        assert len(seen) == 1


async def test_key_counts_per_job_and_group(app: Holdfast, seen: Seen) -> None:
    """The same key of two jobs, or of two groups, is two runs."""

    @app.job
    async def one() -> None:
        seen.append("one")

    @app.job
    async def two() -> None:
        seen.append("two")

    other = Holdfast("other", **app._overrides)

    @other.job(name="one", group="far")
    async def far_one() -> None:
        seen.append("far one")

    async with working(app), working(other, group="far"):
        runs = [
            await one.options(key="k").enqueue(),
            await two.options(key="k").enqueue(),
            await one.options(key="k", group="far").enqueue(),
        ]
        assert [r.duplicate for r in runs] == [False] * 3
        assert len({r.id for r in runs}) == 3
        for run in runs:
            await run.result(60)
        assert sorted(seen) == ["far one", "one", "two"]


async def test_keys_of_any_characters_are_one_run_each(recorded: Holdfast, seen: Seen) -> None:
    """Wildcards, dots, emoji, line breaks, 10,000 characters: every key is itself and no other."""
    work = recorded.jobs["work"]
    async with working(recorded):
        runs = [await work.enqueue(n, key=key) for n, key in enumerate(KEYS)]
        again = [await work.enqueue(-1, key=key) for key in KEYS]
        assert [r.duplicate for r in runs] == [False] * len(KEYS)
        assert [r.duplicate for r in again] == [True] * len(KEYS)
        for number, run in enumerate(again):
            assert await run.result(60) == number
        assert len(seen) == len(KEYS)
        short = [k for k in KEYS if len(k) < 40]
        assert {decode(r.id.split("/", 1)[1]) for r in runs} >= set(short)


@pytest.mark.parametrize("key", ["", 5, b"k", True])
async def test_key_that_is_no_text_is_refused(recorded: Holdfast, key: object) -> None:
    """A key is a text that is not empty; anything else is refused before anything is sent."""
    with pytest.raises(InvalidName, match="key"):
        await recorded.jobs["work"].enqueue(1, key=key)


async def test_job_parameter_named_like_an_option_wins(app: Holdfast) -> None:
    """A parameter called `key` is payload; `options()` then says how to send it."""

    @app.job
    async def put(key: str, delay: int = 0) -> str:
        return f"{key} {delay}"

    async with working(app):
        run = await put.enqueue(key="a", delay=3)
        assert not run.id.startswith("put/")
        assert await run.result(60) == "a 3"
        keyed = await put.options(key="b").enqueue(key="c")
        assert keyed.id == "put/b"
        assert await keyed.result(60) == "c 0"


# ---- delays


async def test_delayed_run_starts_when_it_is_due(recorded: Holdfast, seen: Seen) -> None:
    """`delay=` and `at=` hold a run back, visibly, and then run it."""
    work = recorded.jobs["work"]
    async with working(recorded):
        began = time.time()
        late = await work.enqueue(1, delay="500ms")
        at = await work.enqueue(2, at=datetime.now(UTC) + timedelta(milliseconds=500))
        stamp = await work.enqueue(3, at=time.time() + 0.5)
        assert [(await r.status()).state for r in (late, at, stamp)] == ["delayed"] * 3
        assert [await r.result(60) for r in (late, at, stamp)] == [1, 2, 3]
        assert time.time() - began >= 0.45
        assert {run for _, run in seen} == {late.id, at.id, stamp.id}
        assert not await parked(recorded)


async def test_delayed_run_in_the_past_starts_at_once(recorded: Holdfast) -> None:
    """An instant that is over is due now."""
    async with working(recorded):
        run = await recorded.jobs["work"].enqueue(1, at=datetime(2020, 1, 1, tzinfo=UTC))
        assert await run.result(60) == 1


async def test_delayed_run_of_a_known_key_is_not_stored_twice(recorded: Holdfast) -> None:
    """A delayed run's key is known as long as it waits, also after the window of message ids."""
    work = recorded.jobs["work"]
    records = RecordConfig(dedup_window_seconds=0.1)
    async with working(recorded, records=records):
        first = await work.enqueue(1, key="k", delay="1h")
        again = await work.enqueue(2, key="k", delay="2h")
        assert (first.duplicate, again.duplicate) == (False, True)

        client = await client_of(recorded)
        probe = work.options(key="window").request(0)

        async def window_over() -> bool:
            return not (await client._store_new(probe)).duplicate

        assert await window_over()
        await until(window_over, 5, "the end of the window")
        assert (await work.enqueue(3, key="k", delay="3h")).duplicate
        [waiting] = await parked(recorded)
        assert waiting.body == b"1"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"at": datetime(2030, 1, 1)}, "time zone"),  # noqa: DTZ001 - that is the point
        ({"at": "tomorrow"}, "is not a time"),
        ({"at": True}, "datetime"),
        ({"at": -1}, "datetime"),
        ({"at": float("nan")}, "datetime"),
        ({"delay": "soon"}, "delay"),
        ({"delay": -1}, "delay"),
        ({"delay": "1s", "at": 1.0}, "either"),
    ],
)
async def test_delay_that_is_unclear_is_refused(
    recorded: Holdfast, options: dict[str, object], error: str
) -> None:
    """A naive datetime, a negative delay, both at once: refused before anything is sent."""
    with pytest.raises(InvalidInput, match=error):
        await recorded.jobs["work"].enqueue(1, **options)


# ---- headers


async def test_headers_travel_with_the_run(app: Holdfast) -> None:
    """A user's headers reach the handler, also through a delay."""

    @app.job
    async def read(ctx: Context) -> str:
        return ctx.headers["Trace"] + ctx.headers["tenant"]

    async with working(app):
        headers = {"Trace": "é☃", "tenant": "a: b"}
        assert await (await read.options(headers=headers).enqueue()).result(60) == "é☃a: b"
        assert (
            await (await read.options(headers=headers, delay=0.2).enqueue()).result(60) == "é☃a: b"
        )


@pytest.mark.parametrize(
    "headers",
    [
        {"Hf-Run": "x"},
        {"hf-attempt": "x"},
        {"Nats-Msg-Id": "x"},
        {"nats-ttl": "1s"},
        {"A": "b\r\nNats-Msg-Id: x"},
        {"A": "b\n"},
        {"A": "\x00"},
        {"A\r\nB": "x"},
        {"A:B": "x"},
        {"A B": "x"},
        {"": "x"},
        {"é": "x"},
        {"A": 5},
        {"A": "\ud800"},
    ],
)
async def test_headers_that_could_forge_are_refused(
    recorded: Holdfast, headers: dict[str, str]
) -> None:
    """Reserved names, line breaks and control characters are refused before anything is sent."""
    with pytest.raises(InvalidName, match="header"):
        await recorded.jobs["work"].enqueue(1, headers=headers)


# ---- many


async def test_many_are_stored_in_order(recorded: Holdfast, seen: Seen) -> None:
    """5,000 runs at once, even before the streams exist: all stored, in order, each run once."""
    work = recorded.jobs["work"]
    async with recorded:
        runs = await work.enqueue_many(range(5_000))
        assert len({r.id for r in runs}) == 5_000
        sequences = [r._sequence for r in runs]
        assert sequences == sorted(sequences)
        assert not any(r.duplicate for r in runs)
        async with working(recorded):
            await seen.wait(5_000, 30)
            assert sorted(n for n, _ in seen) == list(range(5_000))
            assert {run for _, run in seen} == {r.id for r in runs}
            await until(lambda: queue_empty(recorded), 10, "an empty queue")


async def test_many_of_several_jobs_with_keys_and_delays(app: Holdfast, seen: Seen) -> None:
    """One batch may mix jobs, keys and delays; the handles come in the order of the requests."""

    @app.job
    async def one(n: int) -> int:
        return n

    @app.job
    async def two(n: int) -> int:
        return -n

    async with working(app):
        requests = [
            one.options(key="k").request(1),
            two.request(2),
            one.options(key="k").request(3),
            two.options(delay=0.3).request(4),
        ]
        runs = await app.enqueue_many(requests)
        assert [r.duplicate for r in runs] == [False, False, True, False]
        assert [await r.result(60) for r in runs] == [1, -2, 1, -4]


# ---- group


async def test_group_option_sends_to_the_other_group(app: Holdfast, seen: Seen) -> None:
    """`group=` reaches the workers of that group, and only them."""

    @app.job
    async def work() -> None:
        seen.append("default")

    other = Holdfast("other", **app._overrides)

    @other.job(name="work", group="far")
    async def far_work() -> None:
        seen.append("far")

    async with working(app), working(other, group="far"):
        run = await work.options(group="far").enqueue()
        assert run.group == "far"
        await run.result(60)
        assert seen == ["far"]
    with pytest.raises(InvalidName):
        await work.options(group="no such.group").enqueue()


# ---- limits


async def test_message_over_the_limit_is_refused_and_the_connection_stays(app: Holdfast) -> None:
    """1 MiB with headers raises `PayloadTooLarge`; the same connection sends the next run."""

    @app.job
    async def load(text: str) -> int:
        return len(text)

    async with working(app):
        broker = await broker_of(app)
        limit = broker.max_message_bytes
        with pytest.raises(PayloadTooLarge) as caught:
            await load.options(headers={"Trace": "abc"}).enqueue("x" * limit)
        assert caught.value.size > caught.value.limit == limit - ENVELOPE_BYTES
        with pytest.raises(PayloadTooLarge):
            await load.enqueue_many(["x", "x" * limit, "y"])
        with pytest.raises(PayloadTooLarge):
            await app.publish("loaded", "x" * limit)
        assert broker.connected
        room = limit - ENVELOPE_BYTES - 200
        assert await (await load.enqueue("x" * room)).result(60) == room


async def test_batch_with_one_refused_member_sends_nothing(recorded: Holdfast, seen: Seen) -> None:
    """A batch is checked whole before its first message leaves."""

    @recorded.job
    async def load(text: str) -> None: ...

    async with working(recorded):
        work = recorded.jobs["work"]
        with pytest.raises(PayloadTooLarge):
            await recorded.enqueue_many([work.request(1), load.request("x" * 2_000_000)])
        assert await (await work.enqueue(2)).result(60) == 2
        assert [n for n, _ in seen] == [2]


# ---- outages


async def test_enqueue_during_a_server_restart_waits_and_succeeds(
    namespace: str, seen: Seen
) -> None:
    """While the server is away `enqueue` waits; each run is then stored once."""
    with Server(fast=True) as server:
        app = Holdfast("shop", nats_url=server.url, namespace=namespace)

        @app.job
        async def work(n: int) -> int:
            seen.append(n)
            return n

        async with app:
            await work.enqueue(0)
            server.kill()
            sending = [asyncio.create_task(work.enqueue(n)) for n in range(1, 10)]
            many = asyncio.create_task(work.enqueue_many(range(10, 20)))
            await until(lambda: _disconnected(app), 5, "the loss noticed")
            await asyncio.to_thread(server.restart)
            runs = [await s for s in sending] + await many
            assert not any(r.duplicate for r in runs)
            async with working(app):
                await seen.wait(20, 20)
                assert sorted(seen) == list(range(20))
                assert [await r.result(60) for r in runs] == list(range(1, 20))


async def test_enqueue_without_a_server_says_so(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is not there ends the wait with an error that says what to do."""
    monkeypatch.setenv("HOLDFAST_CONNECT_TIMEOUT_SECONDS", "0.3")
    with Server(fast=True) as server:
        url = server.url
    app = Holdfast("shop", nats_url=url, namespace=namespace)

    @app.job
    async def work() -> None: ...

    with pytest.raises(NotConnected, match="holdfast server"):
        await work.enqueue()


async def test_result_of_a_purged_run_is_not_waited_for(recorded: Holdfast) -> None:
    """A run that is neither queued nor recorded is told as such instead of waited for."""
    async with recorded:
        run = await recorded.jobs["work"].enqueue(1)
        assert (await run.status()).state == "queued"
        broker = await broker_of(recorded)
        backend = await recorded.backend()
        await backend.topology.purge(broker.names.jobs, f"{broker.names.namespace}.job.>")  # type: ignore[attr-defined]
        with pytest.raises(RunNotFound):
            await run.result(60)
        assert (await run.status()).state == "unknown"


async def test_status_tells_where_a_run_is(app: Holdfast) -> None:
    """Queued, running, done: `status()` follows the run."""
    go = asyncio.Event()

    @app.job
    async def work() -> None:
        await go.wait()

    async with app:
        run = await work.enqueue()
        assert (await run.status()).state == "queued"
        async with working(app) as worker:
            await until(lambda: record_of(app, run.id), 5, "the claim")
            status = await run.status()
            assert (status.state, status.attempt, status.node) == ("running", 1, worker.node)
            go.set()
            await run.result(60)
            status = await run.status()
            assert (status.state, status.attempt, status.failures) == ("done", 1, 0)


async def _disconnected(app: Holdfast) -> bool:
    return not (await broker_of(app)).connected
