"""Large results, payloads and dead letters: named by their holder, gone when their record is."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast import Backoff, Context, Holdfast
from holdfast.broker.objects import Objects
from holdfast.config import RecordConfig
from holdfast.errors import NotFound
from holdfast.model.run import RunRecord
from holdfast.ownership.claims import Claims
from holdfast.server import Server
from holdfast.status.messages import subject_counts
from tests.integration.support import (
    Seen,
    broker_of,
    client_of,
    dead_letter,
    dead_letters,
    raw,
    record_of,
    until,
    working,
)

LARGE = 1_000_000


def sending(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The app has a connection of its own, which outlives the worker's."""

    @functools.wraps(test)
    async def wrapped(app: Holdfast, **fixtures: Any) -> None:
        async with app:
            await test(app=app, **fixtures)

    return wrapped


async def _objects(app: Holdfast) -> int:
    """How many values the object store has."""
    broker = await broker_of(app)
    stream = f"OBJ_{broker.names.objects}"
    try:
        return len(await subject_counts(broker, stream, f"$O.{broker.names.objects}.M.>"))
    except NotFound:
        return 0


@sending
async def test_large_result_expires_after_its_record(app: Holdfast) -> None:
    """It is kept for an hour, or longer if the record is; old ones do not fill the disk."""

    @app.job
    async def bulky() -> str:
        return "x" * LARGE

    async with working(app, records=RecordConfig(keyless_ttl_seconds=5_000)):
        run = await bulky.enqueue()
        assert len(await run.result(timeout=60)) == LARGE
    broker = await broker_of(app)
    stream = f"OBJ_{broker.names.objects}"
    sequences = range(1, 1 + (await broker.api(f"STREAM.INFO.{stream}"))["state"]["last_seq"])
    for sequence in sequences:
        found = await broker.request(
            f"$JS.API.DIRECT.GET.{stream}", b'{"seq": %d}' % sequence, timeout=5
        )
        assert found.headers["Nats-TTL"] == "5060s"


@sending
async def test_result_of_an_older_version_is_found(app: Holdfast, nats: Server) -> None:
    """It lies under the run's id alone, in a bucket that knows no TTLs and was made elsewhere."""

    @app.job
    async def bulky() -> str:
        return "x" * LARGE

    broker = await broker_of(app)
    async with raw(nats) as (_, js):
        store = await js.create_object_store(broker.names.objects)
        await store.put("result/old", b'"what an old worker wrote"')
    backend = await app.backend()
    record = RunRecord("done", "default", "bulky", result_object="result/old")
    assert await backend.result_bytes(record) == b'"what an old worker wrote"'
    async with working(app):
        run = await bulky.enqueue()
        assert len(await run.result(timeout=60)) == LARGE
        found = await record_of(app, run.id)
        assert found is not None
        async with raw(nats) as (_, js):
            store = await js.object_store(broker.names.objects)
            read = await store.get(found.result_object)
            assert read.data == b'"' + b"x" * LARGE + b'"', "old readers find it by its name"


@sending
async def test_object_bucket_that_was_deleted_is_made_again(app: Holdfast, nats: Server) -> None:
    """A worker that has used the bucket before stores the next large result all the same."""

    @app.job
    async def bulky() -> str:
        return "x" * LARGE

    async with working(app):
        await (await bulky.enqueue()).result(timeout=60)
        broker = await broker_of(app)
        await broker.api(f"STREAM.DELETE.OBJ_{broker.names.objects}")
        assert len(await (await bulky.enqueue()).result(timeout=20)) == LARGE


@sending
async def test_large_payload_of_an_at_most_once_run_belongs_to_its_message(
    app: Holdfast, seen: Seen
) -> None:
    """Another send of the key while it runs does not change what a dead letter would tell."""

    @app.job(delivery="at_most_once")
    async def once(ctx: Context, text: str) -> None:
        seen.append(text[0])
        await asyncio.sleep(60)

    async with working(app, records=RecordConfig(dedup_window_seconds=0.2), grace_seconds=0.1):
        run = await once.options(key="a").enqueue("1" * (LARGE - 50_000))
        await seen.wait(1)
        await asyncio.sleep(0.5)  # the server's window of message ids
        await once.options(key="a").enqueue("2" * (LARGE - 50_000))
        record = await record_of(app, run.id)
        assert record is not None
        await until(lambda: _objects_are(app, 1), 10, "the second payload dropped")
        backend = await client_of(app)
        assert (await backend.objects.get(record.body_object))[:2] == b'"1'
    letter = await dead_letter(app)
    assert letter.body[:2] == b'"1'


async def _objects_are(app: Holdfast, count: int) -> bool:
    return await _objects(app) == count


@sending
async def test_dead_letter_of_a_replaced_holder_is_taken_back(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced after it asked and before it settled: its letter goes, the successor's stays."""
    taken: list[str] = []

    @app.job(retry=Backoff.never())
    async def fails(text: str) -> None:
        raise ValueError("no")

    settle = Claims.settle

    async def replaced(self: Claims, claim: Any, *args: Any, **kwargs: Any) -> None:
        if not taken:  # somebody else takes the run over between the letter and the settle
            taken.append(claim.run)
            entry = await self._store.get(claim.run)
            assert entry is not None
            await self._store.put(
                claim.run, entry.value.replace(b"worker-", b"other-"), expected=entry.revision
            )
            claim.tokens.clear()
        await settle(self, claim, *args, **kwargs)

    monkeypatch.setattr(Claims, "settle", replaced)
    async with working(app, ack_wait_seconds=1, extend_seconds=0.3):
        broker = await broker_of(app)
        body = b'"' + b"x" * (broker.max_message_bytes - 500) + b'"'
        headers = {"Nats-Msg-Id": "fails/a"}
        await broker.store(broker.names.job("default", "fails"), body, headers)
        await until(lambda: taken, 10, "the first letter")
        await until(lambda: _is_dead(app, "fails/a"), 20, "the successor's settle")
        letters = await dead_letters(app)
    assert len(letters) == 1
    assert await _objects(app) == 1
    assert await Objects(broker).get(letters[0].headers["Hf-Object"]) == body


async def _is_dead(app: Holdfast, run: str) -> bool:
    record = await record_of(app, run)
    return record is not None and record.state == "dead"
