"""A publish from any client is a valid run: headers are optional, and may be nonsense."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Backoff, Context, Holdfast
from holdfast.config import RecordConfig
from holdfast.server import Server
from holdfast.status.dead import DeadFilter, DeadLetters
from tests.integration.support import (
    Seen,
    all_records,
    client_of,
    dead_letter,
    dead_letters,
    metric,
    queue_empty,
    raw,
    record_of,
    until,
    working,
)

DROPPED = "holdfast_duplicates_suppressed_total"
NONSENSE = {
    "Hf-Run": "../* >\u00e9 {}",
    "Hf-Attempt": "minus one",
    "Hf-Failures": "-3",
    "Hf-Crashes": "1e9",
    "Hf-Created": "NaN",
    "Hf-Cause": "??",
    "Hf-Event": "x" * 2000,
    "Hf-Unknown": "",
}


FORGED = ["999999", "1000000", "9999999", "999999999999999", "9" * 19, "-1", "0", "٣٤"]


@pytest.mark.parametrize("delivery", ["effectively_once", "at_least_once"])
async def test_forged_numbers_neither_lose_nor_block_a_run(
    app: Holdfast, nats: Server, namespace: str, seen: Seen, delivery: Any
) -> None:
    """Whatever number a publisher makes up, the run has its attempts, parked ones included."""
    app.job(delivery=delivery, retry=Backoff.list(["1s"]))(_failing(seen))
    async with working(app, short_wait_seconds=0), raw(nats) as (_, js):
        for n, forged in enumerate(FORGED):
            headers = {"Hf-Run": f"forged-{n}", "Hf-Attempt": forged}
            await js.publish(f"{namespace}.job.default.fails", str(n).encode(), headers=headers)
        await until(lambda: sorted(seen) == sorted([*range(len(FORGED))] * 2), 20, "two attempts")
        letters = await until(lambda: _letters(app, len(FORGED)), 10, "the letters")
        client = await client_of(app)
        await until(lambda: queue_empty(app), 5, "their acknowledgements")
        replayed = await DeadLetters(client).replay(DeadFilter(job="fails"))
        assert [(r.result, r.why) for r in replayed] == [("replayed", "")] * len(letters)
        await seen.wait(3 * len(FORGED))


def _failing(seen: Seen) -> Any:
    async def fails(n: int) -> None:
        seen.append(n)
        raise ValueError("no")

    return fails


async def _letters(app: Holdfast, count: int) -> list[Any]:
    found = await dead_letters(app)
    return found if len(found) == count else []


async def test_core_publish_without_headers_runs(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """`nats pub hf.job.default.resize '{"id": 42}'` runs, once, with a record of its own."""

    @app.job
    async def resize(ctx: Context, data: dict[str, Any]) -> str:
        seen.append((data, ctx.run, ctx.attempt))
        return "resized"

    async with working(app), raw(nats) as (connection, _):
        await connection.publish(f"{namespace}.job.default.resize", b'{"id": 42}')
        [(data, run, attempt)] = await seen.wait()
        assert (data, attempt) == ({"id": 42}, 1)
        record = await until(lambda: _done(app, run), 5, "its record")
        assert bytes(record.result) == b'"resized"'
        assert run.startswith("s")
        await until(lambda: queue_empty(app), 5, "an empty queue")


async def test_jetstream_publish_with_a_message_id_runs_once(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """`Nats-Msg-Id` is the run's id: a repeat is dropped by the server, and later by the claim."""

    @app.job
    async def resize(ctx: Context) -> None:
        seen.append(ctx.run)

    records = RecordConfig(dedup_window_seconds=0.1)
    subject = f"{namespace}.job.default.resize"
    async with working(app, records=records) as worker, raw(nats) as (_, js):
        first = await js.publish(subject, b"", headers={"Nats-Msg-Id": "order-7"})
        again = await js.publish(subject, b"", headers={"Nats-Msg-Id": "order-7"})
        assert (first.duplicate, again.duplicate) == (None, True)
        await until(lambda: _done(app, "order-7"), 5, "its record")

        async def stored_again() -> bool:
            answer = await js.publish(subject, b"", headers={"Nats-Msg-Id": "order-7"})
            return not answer.duplicate

        await until(stored_again, 5, "a repeat after the window")
        await until(
            lambda: metric(worker, DROPPED, where="claim") >= 1, 5, "a repeat known at claim"
        )
        assert seen == ["order-7"]


async def test_message_ids_of_any_characters_are_encoded(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """A foreign message id with wildcards, dots, spaces or 5,000 characters is a run too."""

    @app.job
    async def resize(ctx: Context) -> None:
        seen.append(ctx.run)

    ids = ["a.b.*.>", "two words", "é☃🎉", "x" * 5000, "..", "$SYS.>", "a/b=c"]
    async with working(app), raw(nats) as (_, js):
        for id in ids:
            await js.publish(f"{namespace}.job.default.resize", headers={"Nats-Msg-Id": id})
        await seen.wait(len(ids))
        assert len(set(seen)) == len(ids)
        for run in seen:
            await until(lambda run=run: _done(app, run), 5, "its record")


async def test_nonsense_in_our_headers_is_survived(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """Every `Hf-` header may carry anything: the run still happens, as a first attempt."""

    @app.job
    async def resize(ctx: Context, data: dict[str, Any]) -> None:
        seen.append((data["n"], ctx.attempt))

    async with working(app), raw(nats) as (_, js):
        subject = f"{namespace}.job.default.resize"
        for number, (name, value) in enumerate(NONSENSE.items()):
            await js.publish(subject, b'{"n": %d}' % number, headers={name: value})
        await js.publish(subject, b'{"n": 99}', headers={**NONSENSE, "Hf-Run": "all-at-once"})
        await seen.wait(len(NONSENSE) + 1)
        expected = [(n, 1) for n in range(len(NONSENSE))] + [(99, 1)]
        assert sorted(seen) == sorted(expected)
        await until(lambda: queue_empty(app), 5, "an empty queue")


async def test_same_message_id_for_two_jobs_runs_both(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """Two jobs may be sent the same foreign id: each has its own run and record."""

    @app.job
    async def resize() -> None:
        seen.append("resize")

    @app.job
    async def index() -> None:
        seen.append("index")

    records = RecordConfig(dedup_window_seconds=0.1)
    async with working(app, records=records), raw(nats) as (_, js):

        async def sent(job: str) -> bool:
            headers = {"Nats-Msg-Id": "order-7"}
            answer = await js.publish(f"{namespace}.job.default.{job}", headers=headers)
            return not answer.duplicate

        assert await sent("resize")
        await until(lambda: sent("index"), 5, "the window over")
        assert sorted(await seen.wait(2)) == ["index", "resize"]
        await until(lambda: queue_empty(app), 5, "an empty queue")
        found = await all_records(app)
        assert sorted(r.job for r in found.values()) == ["index", "resize"]
        assert all(r.state == "done" for r in found.values())


async def test_message_id_with_the_job_in_it_is_safe_within_the_window(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """Of two equal ids the server drops the second, for whichever job, and tells its sender."""

    @app.job
    async def resize(ctx: Context) -> None:
        seen.append(ctx.run)

    @app.job
    async def index(ctx: Context) -> None:
        seen.append(ctx.run)

    async with working(app), raw(nats) as (_, js):

        async def dropped(job: str, id: str) -> bool:
            subject = f"{namespace}.job.default.{job}"
            return bool((await js.publish(subject, headers={"Nats-Msg-Id": id})).duplicate)

        assert not await dropped("resize", "order-7")
        assert await dropped("index", "order-7")
        assert not await dropped("resize", "resize/order-7")
        assert not await dropped("index", "index/order-7")
        expected = ["index/order-7", "order-7", "resize/order-7"]
        assert sorted(await seen.wait(3)) == expected
        await until(lambda: queue_empty(app), 5, "an empty queue")


@pytest.mark.parametrize("body", [b"", b"  \n", b"null"])
async def test_empty_body_means_no_arguments(
    app: Holdfast, nats: Server, namespace: str, seen: Seen, body: bytes
) -> None:
    """An empty body calls a handler without arguments, or with its defaults."""

    @app.job
    async def none() -> None:
        seen.append("none")

    @app.job
    async def default(n: int = 5, m: int = 6) -> None:
        seen.append((n, m))

    async with working(app), raw(nats) as (connection, _):
        await connection.publish(f"{namespace}.job.default.none", body)
        await connection.publish(f"{namespace}.job.default.default", body)
        await seen.wait(2)
        assert set(seen) == {"none", (5, 6)}


@pytest.mark.parametrize(
    "body",
    [b"\xff\xfe\x00not json\r\n", b"{", b'{"id": "a text"}', b"[1]", b'{"id": NaN}', b'"' * 3],
    ids=["bytes", "cut off", "wrong type", "wrong shape", "NaN", "quotes"],
)
async def test_body_that_does_not_fit_is_a_dead_letter_with_its_bytes(
    app: Holdfast, nats: Server, namespace: str, body: bytes
) -> None:
    """What cannot be decoded is not retried: the letter has the very bytes and headers."""

    @app.job
    async def resize(id: int, size: int = 1) -> None:
        raise AssertionError("must not run")

    async with working(app), raw(nats) as (_, js):
        headers = {"Trace": "abc", "Nats-Msg-Id": "m1"}
        await js.publish(f"{namespace}.job.default.resize", body, headers=headers)
        letter = await dead_letter(app)
        assert letter.body == body
        assert letter.subject == f"{namespace}.dead.default.resize"
        assert letter.headers["Hf-Reason"] == "invalid"
        assert letter.headers["Hf-Run"] == "m1"
        assert letter.headers["Trace"] == "abc"
        assert letter.headers["Hf-Subject"] == f"{namespace}.job.default.resize"
        assert "InvalidPayload" in letter.story("Hf-Error")
        await until(lambda: queue_empty(app), 5, "an empty queue")
        record = await record_of(app, "m1")
        assert record is not None
        assert record.state == "dead"


async def test_empty_body_for_a_needed_argument_is_a_dead_letter(
    app: Holdfast, nats: Server, namespace: str
) -> None:
    """A missing payload is told as such."""

    @app.job
    async def resize(id: int) -> None:
        raise AssertionError("must not run")

    async with working(app), raw(nats) as (connection, _):
        await connection.publish(f"{namespace}.job.default.resize")
        letter = await dead_letter(app)
        assert letter.body == b""
        assert "empty" in letter.story("Hf-Error")


async def test_body_of_the_full_message_size_is_retried_and_buried(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """A publish that leaves no room for our headers still has its retry and its dead letter."""

    @app.job(retry=Backoff.list(["200ms"]))
    async def load(ctx: Context, text: str) -> None:
        seen.append(ctx.attempt)
        raise ValueError("no")

    body = b'"' + b"x" * (nats.max_payload - 2) + b'"'
    async with working(app, short_wait_seconds=0), raw(nats) as (connection, _):
        await connection.publish(f"{namespace}.job.default.load", body)
        letter = await dead_letter(app)
        assert seen == [1, 2]
        assert letter.body == b""
        backend = await app.backend()
        assert await backend.objects.get(letter.headers["Hf-Object"]) == body  # type: ignore[attr-defined]
        await until(lambda: queue_empty(app), 5, "an empty queue")


async def test_plain_publish_to_a_job_nobody_has_waits(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """A run for a job that no worker knows yet stays queued until one does."""

    @app.job
    async def known() -> None: ...

    async with working(app), raw(nats) as (_, js):
        await js.publish(f"{namespace}.job.default.future", b"1")

    @app.job
    async def future(n: int) -> None:
        seen.append(n)

    async with working(app):
        assert await seen.wait() == [1]
        assert not await dead_letters(app)


async def _done(app: Holdfast, run: str) -> Any:
    record = await record_of(app, run)
    return record if record and record.state == "done" else None
