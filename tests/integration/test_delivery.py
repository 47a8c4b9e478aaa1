"""The delivery modes: what each promises, and what it cannot answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Backoff, Context, Discard, Holdfast, Snooze
from holdfast.config import RecordConfig
from holdfast.errors import DefinitionError, NoRecord, RunFailed, RunLost
from holdfast.names import consumer
from holdfast.server import Server
from tests.integration.support import (
    Seen,
    all_records,
    consumer_info,
    dead_letter,
    dead_letters,
    parked,
    queue_empty,
    raw,
    until,
    working,
)

# ---- at_least_once


async def test_at_least_once_writes_no_record(app: Holdfast, seen: Seen) -> None:
    """A normal run leaves nothing behind: no record, no message, no letter."""

    @app.job(delivery="at_least_once")
    async def loose(n: int) -> int:
        seen.append(n)
        return n

    async with working(app):
        await loose.enqueue_many(range(50))
        await seen.wait(50)
        await until(lambda: queue_empty(app), 5, "an empty queue")
        assert sorted(seen) == list(range(50))
        assert not await all_records(app)


async def test_at_least_once_cannot_answer_what_needs_a_record(app: Holdfast, seen: Seen) -> None:
    """Result, status, cancel, epoch, progress and ownership raise `NoRecord`, with a way out."""

    @app.job(delivery="at_least_once")
    async def loose(ctx: Context) -> None:
        for ask in (ctx.still_owner, ctx.progress):
            try:
                await ask()
            except NoRecord as error:
                seen.append(str(error))
        try:
            seen.append(ctx.epoch)
        except NoRecord as error:
            seen.append(str(error))

    async with working(app):
        run = await loose.enqueue()
        for ask in (run.result, run.status, run.cancel):
            with pytest.raises(NoRecord, match="effectively_once"):
                await ask()
        await seen.wait(3)
        assert all("effectively_once" in text for text in seen)


async def test_at_least_once_counts_attempts_in_headers(app: Holdfast, seen: Seen) -> None:
    """Attempts travel with the message, short waits and long; the last one is a dead letter."""

    @app.job(delivery="at_least_once", retry=Backoff.list(["10ms", "20ms"]))
    async def loose(ctx: Context, n: int) -> None:
        seen.append((ctx.attempt, ctx.run))
        raise ValueError(f"no {ctx.attempt}")

    async with working(app):
        run = await loose.options(headers={"Trace": "abc"}).enqueue(7)
        letter = await dead_letter(app)
        assert seen == [(1, run.id), (2, run.id), (3, run.id)]
        assert letter.body == b"7"
        assert letter.headers["Hf-Failures"] == "3"
        assert letter.headers["Trace"] == "abc"
        assert letter.story("Hf-Error") == "ValueError: no 3"
        assert not await all_records(app)
        assert not await parked(app)
        await until(lambda: queue_empty(app), 5, "an empty queue")


async def test_at_least_once_parks_with_counts(app: Holdfast, seen: Seen) -> None:
    """A long wait is a scheduled message that says how many attempts have failed."""

    @app.job(delivery="at_least_once", retry=Backoff.list(["1d"]))
    async def loose() -> None:
        raise ValueError("no")

    async with working(app):
        run = await loose.options(key="k").enqueue()
        [message] = await until(lambda: parked(app), 5, "the parked message")
        assert message.headers["Hf-Run"] == run.id
        assert (message.headers["Hf-Attempt"], message.headers["Hf-Failures"]) == ("2", "1")
        await until(lambda: queue_empty(app), 5, "an empty queue")


async def test_at_least_once_signals_work(app: Holdfast, seen: Seen) -> None:
    """`Snooze` does not count and `Discard` ends, without a record too."""

    @app.job(delivery="at_least_once", retry=Backoff.never())
    async def loose(ctx: Context) -> None:
        seen.append(ctx.attempt)
        if len(seen) < 3:
            raise Snooze("10ms")
        raise Discard("enough")

    async with working(app):
        await loose.enqueue()
        assert await seen.wait(3) == [1, 1, 1]
        await until(lambda: queue_empty(app), 5, "an empty queue")
        assert not await dead_letters(app)


async def test_at_least_once_result_that_is_no_json_does_not_matter(
    app: Holdfast, seen: Seen
) -> None:
    """A result that nobody can ask for is not looked at."""

    @app.job(delivery="at_least_once")
    async def loose() -> object:
        seen.append(1)
        return object()

    async with working(app):
        await loose.enqueue()
        await seen.wait()
        await until(lambda: queue_empty(app), 5, "an empty queue")
        assert not await dead_letters(app)


async def test_at_least_once_redelivery_is_handled_with_a_record(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """What a crashed worker held comes again, and from then on is claimed like any other run."""

    @app.job(delivery="at_least_once")
    async def loose(ctx: Context, n: int) -> None:
        seen.append((n, ctx.epoch > 0))

    quick: dict[str, Any] = {"ack_wait_seconds": 0.5, "extend_seconds": 0.2}
    async with app:
        async with working(app, **quick):
            pass  # the consumer is there
        await loose.enqueue(7)
        async with raw(nats) as (_, js):
            name = consumer("default", "loose")
            taken = await js.pull_subscribe_bind(name, f"{namespace.upper()}_JOBS")
            [message] = await taken.fetch(1)
            assert message.data == b"7"
        # the one that took it is gone without a word
        async with working(app, **quick):
            assert await seen.wait() == [(7, True)]
            await until(lambda: queue_empty(app), 5, "an empty queue")
            [record] = (await all_records(app)).values()
            assert record.state == "done"


async def test_at_least_once_redelivery_is_no_attempt(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """A message that was given back unstarted is still a first attempt, and the next a second."""

    @app.job(delivery="at_least_once", retry=Backoff.list(["20ms", "20ms"]))
    async def loose(ctx: Context) -> None:
        seen.append(ctx.attempt)
        raise ValueError("no")

    async with app:
        async with working(app):
            pass  # the consumer is there
        await loose.enqueue()
        async with raw(nats) as (_, js):
            name = consumer("default", "loose")
            taken = await js.pull_subscribe_bind(name, f"{namespace.upper()}_JOBS")
            [message] = await taken.fetch(1)
            await message.nak()
        async with working(app, short_wait_seconds=0):
            letter = await dead_letter(app)
            assert seen == [1, 2, 3]
            assert letter.headers["Hf-Crashes"] == "0"


async def test_at_least_once_letters_of_one_key_are_all_kept(app: Holdfast, seen: Seen) -> None:
    """Without a record a key may run again: what becomes of it is no repeat of the first run."""

    @app.job(delivery="at_least_once", retry=Backoff.list(["10ms"]))
    async def loose(ctx: Context) -> None:
        seen.append(ctx.attempt)
        if len(seen) == 1:
            await asyncio.sleep(0.5)  # so that the second run ends soon after the first
        raise ValueError("no")

    async with working(app, records=RecordConfig(dedup_window_seconds=0.6)):

        async def accepted() -> bool:
            return not (await loose.options(key="k").enqueue()).duplicate

        assert await accepted()
        await until(accepted, 5, "the end of the window")
        await until(lambda: _letters(app, 2), 5, "two dead letters")
        assert sorted(seen) == [1, 1, 2, 2]


async def test_at_least_once_body_without_room_for_headers_is_retried(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """A message that cannot take our headers stays with its consumer, and ends as a letter."""

    @app.job(delivery="at_least_once", retry=Backoff.list(["20ms", "20ms"]))
    async def load(text: str) -> None:
        seen.append(len(text))
        raise ValueError("no")

    size = nats.max_payload - 2
    async with working(app), raw(nats) as (connection, _):
        await connection.publish(f"{namespace}.job.default.load", b'"' + b"x" * size + b'"')
        letter = await dead_letter(app)
        assert letter.headers["Hf-Object"]
        assert 3 <= len(seen) <= 4
        await until(lambda: queue_empty(app), 5, "an empty queue")


async def _letters(app: Holdfast, count: int) -> bool:
    return len(await dead_letters(app)) == count


# ---- at_most_once


async def test_at_most_once_message_is_gone_before_the_handler_starts(app: Holdfast) -> None:
    """Nothing can bring the run back once it has started."""

    @app.job(delivery="at_most_once")
    async def once() -> dict[str, Any]:
        info = await consumer_info(app, "once")
        return {"empty": await queue_empty(app), "pending": info["num_ack_pending"]}

    async with working(app):
        run = await once.enqueue()
        assert await run.result(60) == {"empty": True, "pending": 0}
        assert (await run.status()).state == "done"


async def test_at_most_once_failure_is_final(app: Holdfast, seen: Seen) -> None:
    """A failed run is a dead letter with its bytes at once: never a second start."""

    @app.job(delivery="at_most_once")
    async def once(n: int) -> None:
        seen.append(n)
        raise ValueError("no")

    async with working(app):
        run = await once.enqueue(7)
        with pytest.raises(RunFailed, match="no"):
            await run.result(60)
        letter = await dead_letter(app)
        assert letter.body == b"7"
        assert seen == [7]


async def test_at_most_once_snooze_is_a_failure(app: Holdfast, seen: Seen) -> None:
    """To come back later would be a second start: the run is a dead letter instead."""

    @app.job(delivery="at_most_once")
    async def once() -> None:
        seen.append(1)
        raise Snooze("10ms")

    async with working(app):
        with pytest.raises(RunFailed, match="Snooze"):
            await (await once.enqueue()).result(60)
        assert (await dead_letter(app)).headers["Hf-Reason"] == "failed"
        assert seen == [1]


async def test_at_most_once_timeout_is_final(app: Holdfast, seen: Seen) -> None:
    """Too long is a failure like any other."""

    @app.job(delivery="at_most_once", timeout="50ms")
    async def once() -> None:
        seen.append(1)
        await asyncio.sleep(30)

    async with working(app):
        with pytest.raises(RunFailed, match="longer than 50ms"):
            await (await once.enqueue()).result(60)
        assert seen == [1]


async def test_at_most_once_interrupted_by_a_shutdown_is_a_dead_letter(
    app: Holdfast, seen: Seen
) -> None:
    """A run that was stopped half-way is told to a person, not started again."""
    started = asyncio.Event()

    @app.job(delivery="at_most_once")
    async def once(n: int) -> None:
        seen.append(n)
        started.set()
        await asyncio.sleep(30)

    async with app:
        run = await once.enqueue(7)
        async with working(app, grace_seconds=0.01):
            await asyncio.wait_for(started.wait(), 5)
        async with working(app):
            with pytest.raises(RunLost, match="at most once"):
                await run.result(60)
            letter = await dead_letter(app)
            assert (letter.headers["Hf-Reason"], letter.body) == ("lost", b"7")
        assert seen == [7]


async def test_at_most_once_key_is_known(app: Holdfast, seen: Seen) -> None:
    """A repeat of a key is no second start either."""

    @app.job(delivery="at_most_once")
    async def once() -> None:
        seen.append(1)

    async with working(app):
        first = await once.options(key="k").enqueue()
        await first.result(60)
        assert (await once.options(key="k").enqueue()).duplicate
        assert seen == [1]


# ---- definitions


@pytest.mark.parametrize(
    ("contract", "reason"),
    [
        ({"delivery": "at_most_once", "retry": Backoff.linear()}, "one attempt only"),
        ({"delivery": "at_most_once", "restart": "immediately"}, "implies restart='never'"),
        ({"delivery": "at_least_once", "restart": "never"}, "does not keep"),
        ({"delivery": "at_least_once", "restart": "after_grace"}, "does not keep"),
        ({"delivery": "exactly_once"}, "is not one of effectively_once"),
        ({"restart": "sometimes"}, "is not one of immediately"),
        ({"timeout": "2h", "run_timeout": "1h"}, "longer than run_timeout"),
        ({"timeout": 0}, "more than 0"),
        ({"run_timeout": 0}, "more than 0"),
        ({"retry": 5}, "takes a Backoff"),
    ],
)
def test_impossible_mix_is_refused_at_definition(
    app: Holdfast, contract: dict[str, Any], reason: str
) -> None:
    """A contract that cannot hold is refused where it is written, with the reason."""
    with pytest.raises(DefinitionError, match=reason):

        @app.job(**contract)
        async def work() -> None: ...

    assert "work" not in app.jobs


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once", "effectively_once"])
def test_possible_mix_is_accepted(app: Holdfast, delivery: Any) -> None:
    """Each mode works without a further word, and `at_most_once` restates what it implies."""

    @app.job(delivery=delivery)
    async def work() -> None: ...

    if delivery == "at_most_once":
        assert (work.spec.retry.attempts, work.spec.restart) == (1, "never")

        @app.job(delivery=delivery, retry=Backoff.never(), restart="never")
        async def same() -> None: ...


def test_job_defined_twice_is_refused(app: Holdfast) -> None:
    """Two functions cannot be one job."""

    @app.job
    async def work() -> None: ...

    with pytest.raises(DefinitionError, match="defined twice"):

        @app.job(name="work")
        async def other() -> None: ...
