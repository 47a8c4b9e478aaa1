"""Failed attempts: how long they wait, where they wait, how they are counted, how they end."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest

from holdfast import Backoff, Context, Discard, Holdfast, Retry, Snooze, SyncContext
from holdfast.errors import RunCancelled, RunFailed
from holdfast.model.run import RunRecord
from holdfast.server import Server
from tests.integration.support import (
    Seen,
    consumer_info,
    dead_letter,
    dead_letters,
    lag,
    metric,
    parked,
    queue_empty,
    raw,
    record_of,
    until,
    working,
)

DAY = 86_400.0


async def failed(app: Holdfast, run: str) -> RunRecord | None:
    """The record, once the run waits for its next attempt."""
    record = await record_of(app, run)
    return record if record and record.state == "failed" else None


# ---- waits


@pytest.mark.parametrize(
    ("policy", "waits"),
    [
        (Backoff.list(["50ms", "150ms"]), [0.05, 0.15]),
        (Backoff.linear("50ms", "150ms", attempts=4), [0.05, 0.1, 0.15]),
        (Backoff.exponential("50ms", "1s", attempts=4), [0.05, 0.1, 0.2]),
    ],
    ids=["list", "linear", "exponential"],
)
async def test_waits_follow_the_policy(
    app: Holdfast, seen: Seen, policy: Backoff, waits: list[float]
) -> None:
    """Between two attempts passes what the policy says; every attempt is in the record."""

    @app.job(retry=policy)
    async def flaky(ctx: Context) -> int:
        seen.append(time.monotonic())
        if ctx.attempt <= len(waits):
            raise ValueError(f"no {ctx.attempt}")
        return ctx.attempt

    async with working(app):
        run = await flaky.enqueue()
        assert await run.result(60) == len(waits) + 1
        gaps = [b - a for a, b in itertools.pairwise(seen)]
        for gap, wait in zip(gaps, waits, strict=True):
            assert wait - 0.005 <= gap
        record = await record_of(app, run.id)
        assert record is not None
        assert [a.outcome for a in record.attempts] == ["failed"] * len(waits) + ["done"]
        assert [a.number for a in record.attempts] == list(range(1, len(waits) + 2))
        assert record.attempts[0].error == "ValueError: no 1"
        epochs = [a.epoch for a in record.attempts]
        assert epochs == sorted(set(epochs))


async def test_default_policy_has_fifteen_attempts_over_days(app: Holdfast) -> None:
    """Without `retry=` a run gets 15 attempts, one minute to one day apart."""

    @app.job
    async def plain() -> None: ...

    policy = plain.spec.retry
    assert policy.attempts == 15
    assert (policy.waits[0], policy.waits[-1]) == (60.0, DAY)
    assert sum(policy.waits) > 6 * DAY


async def test_short_wait_stays_with_the_consumer(app: Holdfast) -> None:
    """A short wait is a nak: the same message comes back, and counts as lag meanwhile."""
    go = asyncio.Event()

    @app.job(retry=Backoff.list(["300ms"]))
    async def flaky(ctx: Context) -> None:
        if ctx.attempt == 1:
            raise ValueError("no")
        await go.wait()

    async with working(app) as worker:
        run = await flaky.enqueue()
        record = await until(lambda: failed(app, run.id), 5, "the first failure")
        assert (record.failures, record.message) == (1, 1)
        assert await lag(app, "flaky") == 1
        assert not await parked(app)
        assert metric(worker, "holdfast_retries_total", how="nak") == 1
        await until(lambda: _running(app, run.id), 5, "the second attempt")
        assert (await consumer_info(app, "flaky"))["num_redelivered"] == 1
        go.set()
        await run.result(60)


async def test_long_wait_is_parked_and_is_no_lag(app: Holdfast) -> None:
    """A wait of a day is a scheduled message: the consumer is empty, scale-to-zero works."""

    @app.job(retry=Backoff.list(["1d"]))
    async def flaky(n: int) -> None:
        raise ValueError("no")

    async with working(app) as worker:
        run = await flaky.options(key="a b", headers={"Trace": "abc"}).enqueue(7)
        record = await until(lambda: failed(app, run.id), 5, "the first failure")
        await until(lambda: _no_lag(app, "flaky"), 5, "no lag")
        info = await consumer_info(app, "flaky")
        assert (info["num_pending"], info["num_ack_pending"]) == (0, 0)
        assert await queue_empty(app)
        assert record.message == 2
        assert record.due == pytest.approx(time.time() + DAY, abs=10)
        [message] = await parked(app)
        assert message.body == b"7"
        assert message.headers["Hf-Run"] == run.id
        assert message.headers["Hf-Attempt"] == "2"
        assert message.headers["Hf-Failures"] == "1"
        assert message.headers["Nats-Msg-Id"] == f"{run.id}.2"
        assert message.headers["Nats-Schedule-Target"].endswith(".job.default.flaky")
        assert message.headers["Trace"] == "abc"
        assert metric(worker, "holdfast_retries_total", how="parked") == 1
        status = await run.status()
        assert (status.state, status.failures, status.attempt) == ("failed", 1, 1)


async def test_attempt_count_survives_long_waits(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """A day later the second attempt knows that it is the second, and so on to the last."""

    @app.job(retry=Backoff.list(["1d", "1d"]))
    async def flaky(ctx: Context) -> None:
        seen.append((ctx.attempt, ctx.headers.get("Trace")))
        raise ValueError(f"no {ctx.attempt}")

    async with working(app), raw(nats) as (_, js):
        run = await flaky.options(headers={"Trace": "abc"}).enqueue()
        for attempt in (1, 2):
            await until(lambda: failed(app, run.id), 5, "a failure")
            [message] = [m for m in await parked(app) if m.headers["Hf-Failures"] == str(attempt)]
            # what the server sends when it is due: the same message without its own headers
            fired = {k: v for k, v in message.headers.items() if not k.startswith("Nats-")}
            await js.publish(f"{namespace}.job.default.flaky", message.body, headers=fired)
            await seen.wait(attempt + 1)
        letter = await dead_letter(app)
        assert seen == [(1, "abc"), (2, "abc"), (3, "abc")]
        assert letter.headers["Hf-Failures"] == "3"
        assert [a["number"] for a in letter.story("Hf-Attempts")] == [1, 2, 3]
        # the parked originals fire later: they are known as repeats
        await js.publish(f"{namespace}.job.default.flaky", b"", headers=fired)
        await until(lambda: queue_empty(app), 5, "an empty queue")
        assert len(seen) == 3


async def test_older_message_of_a_run_is_superseded(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """While a later message carries the run, an earlier one that comes again changes nothing."""

    @app.job(retry=Backoff.list(["1d"]))
    async def flaky(ctx: Context) -> None:
        seen.append(ctx.attempt)
        raise ValueError("no")

    async with working(app) as worker, raw(nats) as (_, js):
        run = await flaky.enqueue()
        before = await until(lambda: failed(app, run.id), 5, "a failure")
        await js.publish(f"{namespace}.job.default.flaky", headers={"Hf-Run": run.id})
        dropped = lambda: metric(worker, "holdfast_claims_total", verdict="superseded")  # noqa: E731
        await until(dropped, 5, "the older message dropped")
        assert await record_of(app, run.id) == before
        assert seen == [1]


async def test_retry_is_never_dropped_as_a_duplicate(app: Holdfast, seen: Seen) -> None:
    """Every parked attempt has its own message id: five within one window all arrive."""

    @app.job(retry=Backoff.list(["50ms"] * 4))
    async def flaky(ctx: Context) -> int:
        seen.append(ctx.attempt)
        if ctx.attempt < 5:
            raise ValueError("no")
        return ctx.attempt

    async with working(app, short_wait_seconds=0) as worker:
        runs = [await flaky.options(key="k").enqueue(), await flaky.enqueue()]
        assert [await r.result(60) for r in runs] == [5, 5]
        assert sorted(seen) == sorted([1, 2, 3, 4, 5] * 2)
        assert metric(worker, "holdfast_retries_total", how="parked") == 8
        assert not await parked(app)


async def test_last_of_fifteen_attempts_is_the_last(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """The fifteenth failure is final, wherever the first fourteen happened."""

    @app.job
    async def plain(ctx: Context) -> None:
        seen.append(ctx.attempt)
        raise ValueError("no")

    async with working(app), raw(nats) as (_, js):
        headers = {"Hf-Run": "old", "Hf-Attempt": "15", "Hf-Failures": "14"}
        await js.publish(f"{namespace}.job.default.plain", headers=headers)
        letter = await dead_letter(app)
        assert seen == [15]
        assert letter.headers["Hf-Failures"] == "15"


# ---- the end


async def test_exhausted_run_is_a_dead_letter_with_its_story(app: Holdfast) -> None:
    """Raw bytes, headers, reason, the user's own traceback, every attempt: all in the letter."""

    def deep() -> None:
        raise KeyError("the reason: é☃🎉")

    @app.job(retry=Backoff.list(["10ms", "10ms"]))
    async def bad(ctx: Context, data: dict[str, Any]) -> None:
        deep()

    async with working(app) as worker:
        run = await bad.options(headers={"Trace": "abc"}).enqueue({"n": 1, "é": "☃"})
        with pytest.raises(RunFailed, match="KeyError: 'the reason: é☃🎉'") as caught:
            await run.result(60)
        assert caught.value.run == run.id
        letter = await dead_letter(app)
        assert letter.body == '{"n":1,"é":"☃"}'.encode()
        assert letter.headers["Trace"] == "abc"
        assert letter.headers["Hf-Run"] == run.id
        assert letter.headers["Hf-Reason"] == "failed"
        assert letter.headers["Hf-Failures"] == "3"
        assert letter.headers["Hf-Crashes"] == "0"
        assert letter.story("Hf-Error") == "KeyError: 'the reason: é☃🎉'"
        story = letter.story("Hf-Traceback")
        assert "in deep" in story
        assert "in bad" in story
        assert "calling.py" not in story
        attempts = letter.story("Hf-Attempts")
        assert [(a["number"], a["outcome"], a["node"]) for a in attempts] == [
            (n, "failed", worker.node) for n in (1, 2, 3)
        ]
        assert attempts[0]["error"] == letter.story("Hf-Error")
        status = await run.status()
        assert (status.state, status.failures, status.attempt) == ("dead", 3, 3)
        assert await queue_empty(app)


@pytest.mark.parametrize("how", ["huge", "surrogate", "unshowable", "exit", "group", "newlines"])
async def test_errors_of_any_kind_are_told(app: Holdfast, how: str) -> None:
    """Whatever a handler raises, the run becomes a dead letter and the worker goes on."""

    class Unshowable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not even this")

    async def fail() -> None:
        raise ValueError("inner")

    @app.job(retry=Backoff.never())
    async def bad(how: str) -> None:
        if how == "huge":
            raise ValueError("x" * 3_000_000)
        if how == "surrogate":
            raise ValueError("\ud800")
        if how == "unshowable":
            raise Unshowable
        if how == "exit":
            raise SystemExit(3)
        if how == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
        raise ValueError("a\r\nNats-Msg-Id: forged\r\n\r\nb")

    @app.job
    async def good() -> None: ...

    async with working(app):
        run = await bad.enqueue(how)
        with pytest.raises(RunFailed):
            await run.result(60)
        letter = await dead_letter(app)
        assert letter.headers["Hf-Run"] == run.id
        assert letter.story("Hf-Traceback")
        await (await good.enqueue()).result(60)


# ---- signals


async def test_retry_signal_waits_as_told_and_counts(app: Holdfast, seen: Seen) -> None:
    """`Retry(delay=…)` replaces the policy's wait, counts as a failure, and runs out like one."""

    @app.job(retry=Backoff.list(["1d", "1d"]))
    async def polite(ctx: Context) -> None:
        seen.append(ctx.attempt)
        raise Retry("the other side is busy", delay="20ms")

    async with working(app):
        run = await polite.enqueue()
        with pytest.raises(RunFailed, match="busy"):
            await run.result(60)
        assert seen == [1, 2, 3]
        letter = await dead_letter(app)
        assert letter.story("Hf-Error") == "Retry: the other side is busy"


async def test_snooze_signal_does_not_count(app: Holdfast, seen: Seen) -> None:
    """`Snooze` comes back without using up an attempt, short or long."""

    @app.job(retry=Backoff.never())
    async def later(ctx: Context) -> str:
        seen.append(ctx.attempt)
        if len(seen) < 4:
            raise Snooze("20ms" if len(seen) % 2 else 0.1)
        return "at last"

    async with working(app, short_wait_seconds=0.05):
        run = await later.enqueue()
        assert await run.result(60) == "at last"
        assert seen == [1, 1, 1, 1]
        record = await record_of(app, run.id)
        assert record is not None
        assert [a.outcome for a in record.attempts] == ["snoozed"] * 3 + ["done"]
        assert record.failures == 0
        assert not await dead_letters(app)


async def test_discard_signal_ends_without_a_dead_letter(app: Holdfast, seen: Seen) -> None:
    """`Discard` gives a run up for good: no retry, no dead letter, and the caller is told."""

    @app.job
    async def moot() -> None:
        seen.append(1)
        raise Discard("the image is gone")

    async with working(app):
        run = await moot.enqueue()
        with pytest.raises(RunCancelled, match="discarded: the image is gone"):
            await run.result(60)
        assert (await run.status()).state == "cancelled"
        await until(lambda: queue_empty(app), 5, "an empty queue")
        assert not await dead_letters(app)
        assert len(seen) == 1


@pytest.mark.parametrize("signal", [Snooze("soon"), Snooze(-1), Retry(delay="x"), Snooze(1e12)])
async def test_signal_with_an_unreadable_delay_is_a_failure(
    app: Holdfast, signal: Exception
) -> None:
    """A signal that cannot be understood fails the attempt, not the worker."""

    @app.job(retry=Backoff.never())
    async def odd() -> None:
        raise signal

    async with working(app):
        with pytest.raises(RunFailed, match="delay"):
            await (await odd.enqueue()).result(60)


async def test_signals_work_from_threads(app: Holdfast, seen: Seen) -> None:
    """A plain handler may raise the same signals."""

    @app.job
    def sync(ctx: SyncContext) -> str:
        seen.append(ctx.attempt)
        if len(seen) == 1:
            raise Snooze("10ms")
        if len(seen) == 2:
            raise Retry(delay="10ms")
        return "ok"

    async with working(app):
        assert await (await sync.enqueue()).result(60) == "ok"
        assert seen == [1, 1, 2]


# ---- time


async def test_timeout_ends_an_attempt_and_counts(app: Holdfast, seen: Seen) -> None:
    """An attempt that takes too long is cancelled, counted and tried again."""

    @app.job(timeout="100ms", retry=Backoff.list(["10ms", "10ms"]))
    async def slow(ctx: Context) -> int:
        try:
            if ctx.attempt < 3:
                await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append(ctx.attempt)
            raise
        return ctx.attempt

    async with working(app):
        run = await slow.enqueue()
        assert await run.result(60) == 3
        assert seen == [1, 2]
        record = await record_of(app, run.id)
        assert record is not None
        assert [a.outcome for a in record.attempts] == ["timeout", "timeout", "done"]
        assert record.attempts[0].error == "TimeoutError: the attempt took longer than 100ms"


async def test_timeout_at_last_is_a_dead_letter(app: Holdfast) -> None:
    """A handler that is always too slow becomes a dead letter with that reason."""

    @app.job(timeout="50ms", retry=Backoff.list(["10ms"]))
    async def slow() -> None:
        await asyncio.sleep(30)

    async with working(app):
        with pytest.raises(RunFailed, match="longer than 50ms"):
            await (await slow.enqueue()).result(60)
        letter = await dead_letter(app)
        assert letter.headers["Hf-Reason"] == "timeout"
        assert letter.headers["Hf-Failures"] == "2"


async def test_own_timeout_of_a_handler_is_an_ordinary_failure(app: Holdfast) -> None:
    """`asyncio.timeout` inside a handler works as anywhere, in every attempt of the slot."""

    @app.job(retry=Backoff.list(["10ms"]), timeout="5s")
    async def slow(ctx: Context) -> str:
        try:
            async with asyncio.timeout(0.02):
                await asyncio.sleep(30)
        except TimeoutError:
            if ctx.attempt == 1:
                raise
        return "gave up waiting"

    async with working(app, concurrency=1):
        run = await slow.enqueue()
        assert await run.result(60) == "gave up waiting"
        record = await record_of(app, run.id)
        assert record is not None
        assert [a.outcome for a in record.attempts] == ["failed", "done"]


async def test_run_timeout_limits_all_attempts_together(app: Holdfast, seen: Seen) -> None:
    """When the next attempt could not start in time any more, the run ends at once."""

    @app.job(run_timeout="400ms", retry=Backoff.list(["100ms"] * 20))
    async def flaky(ctx: Context) -> None:
        seen.append(ctx.attempt)
        raise ValueError("no")

    async with working(app):
        run = await flaky.enqueue()
        with pytest.raises(RunFailed):
            await run.result(60)
        assert 2 <= len(seen) <= 4
        assert (await dead_letter(app)).headers["Hf-Reason"] == "failed"


async def test_run_timeout_cuts_an_attempt_short(app: Holdfast) -> None:
    """An attempt gets no more than what is left of the run's time."""

    @app.job(run_timeout="200ms")
    async def slow() -> None:
        await asyncio.sleep(30)

    async with working(app):
        with pytest.raises(RunFailed, match="longer than 200ms"):
            await (await slow.enqueue()).result(60)
        assert (await dead_letter(app)).headers["Hf-Reason"] == "timeout"


async def test_run_timeout_counts_from_acceptance_through_parking(app: Holdfast) -> None:
    """A run whose time was over while it waited does not start."""

    @app.job(run_timeout="50ms")
    async def late() -> None:
        raise AssertionError("must not run")

    async with app:
        run = await late.enqueue()
        await asyncio.sleep(0.06)  # the run's own time, which nothing announces
        async with working(app):
            with pytest.raises(RunFailed, match="over before"):
                await run.result(60)


@pytest.mark.parametrize("delivery", ["effectively_once", "at_least_once"])
async def test_run_longer_than_ack_wait_runs_once(app: Holdfast, seen: Seen, delivery: Any) -> None:
    """What is held is extended: a long run, and one that waits behind it, start once."""

    @app.job(delivery=delivery)
    async def long(n: int) -> None:
        seen.append(n)
        await asyncio.sleep(1.2)
        seen.append(n)

    quick: dict[str, Any] = {"ack_wait_seconds": 0.5, "extend_seconds": 0.2, "concurrency": 1}
    async with working(app, **quick):
        await long.enqueue_many([1, 2])
        await seen.wait(4)
        await until(lambda: queue_empty(app), 5, "an empty queue")
        info = await consumer_info(app, "long")
        assert (info["num_redelivered"], info["delivered"]["consumer_seq"]) == (0, 2)
        assert seen == [1, 1, 2, 2]


# ---- shutdown


async def test_shutdown_gives_back_without_counting(app: Holdfast, seen: Seen) -> None:
    """A run interrupted by a shutdown is taken up by the next worker as the same attempt."""
    started = asyncio.Event()

    @app.job(retry=Backoff.never())
    async def slow(ctx: Context) -> str:
        seen.append((ctx.attempt, ctx.node))
        if len(seen) == 1:
            started.set()
            await asyncio.sleep(30)
        return "finished"

    async with app:
        run = await slow.enqueue()
        async with working(app, grace_seconds=0.01) as first:
            await asyncio.wait_for(started.wait(), 5)
        assert (await run.status()).state == "failed"
        async with working(app) as second:
            assert await run.result(60) == "finished"
        assert seen == [(1, first.node), (1, second.node)]
        record = await record_of(app, run.id)
        assert record is not None
        assert [a.outcome for a in record.attempts] == ["given_back", "done"]
        assert (record.failures, record.crashes) == (0, 0)


async def test_shutdown_lets_running_handlers_finish(app: Holdfast, seen: Seen) -> None:
    """Within the grace period what runs is finished, and what waits is given back at once."""
    started, go = asyncio.Event(), asyncio.Event()

    @app.job
    async def slow(n: int) -> int:
        seen.append(n)
        started.set()
        await go.wait()
        return n

    async with app:
        runs = await slow.enqueue_many([1, 2, 3])
        async with working(app, concurrency=1) as worker:
            await asyncio.wait_for(started.wait(), 5)
            worker.stop()
            go.set()
        assert await runs[0].result(60) == 1
        assert seen == [1]
        async with working(app):
            assert [await r.result(60) for r in runs[1:]] == [2, 3]


async def test_error_raised_while_being_stopped_is_no_failure(app: Holdfast, seen: Seen) -> None:
    """A handler that answers the shutdown with another error is given back all the same."""
    started = asyncio.Event()

    @app.job(retry=Backoff.never())
    async def rude() -> str:
        seen.append(1)
        if len(seen) > 1:
            return "finished"
        started.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise RuntimeError("interrupted") from None
        return "never"

    async with app:
        run = await rude.enqueue()
        async with working(app, grace_seconds=0.01):
            await asyncio.wait_for(started.wait(), 5)
        async with working(app):
            assert await run.result(60) == "finished"
        assert not await dead_letters(app)


async def test_slot_is_as_good_as_new_after_an_interrupted_run(app: Holdfast, seen: Seen) -> None:
    """After a handler that swallowed its cancellation the next run in the slot is not disturbed."""

    @app.job(timeout="50ms", retry=Backoff.never())
    async def stubborn() -> str:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return "swallowed"
        return "never"

    @app.job(retry=Backoff.list(["10ms"]))
    async def quits(ctx: Context) -> str:
        if ctx.attempt == 1:
            raise asyncio.CancelledError
        async with asyncio.timeout(60):
            return "fine"

    async with working(app, concurrency=1):
        assert await (await stubborn.enqueue()).result(60) == "swallowed"
        run = await quits.enqueue()
        assert await run.result(60) == "fine"
        record = await record_of(app, run.id)
        assert record is not None
        assert record.attempts[0].error == "CancelledError: the handler cancelled itself"


async def _running(app: Holdfast, run: str) -> bool:
    record = await record_of(app, run)
    return bool(record and record.state == "running")


async def _no_lag(app: Holdfast, job: str) -> bool:
    return await lag(app, job) == 0
