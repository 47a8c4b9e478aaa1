"""Keys that a job computes itself, and what a send with a known key tells its sender."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from pydantic import BaseModel

from holdfast import Backoff, Context, Holdfast, Retry
from holdfast.config import RecordConfig
from holdfast.errors import DefinitionError, DuplicateRun, InvalidInput, InvalidPayload
from holdfast.server import Server
from holdfast.testing import memory
from tests.integration.cli_support import holdfast
from tests.integration.support import (
    Seen,
    all_records,
    client_of,
    dead_letter,
    queue_empty,
    raw,
    until,
    working,
)


class Document(BaseModel):
    id: int
    kind: str = "pdf"


async def test_plain_publishes_and_events_about_one_document_are_one_run(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """The worker computes the key that the sender left out, whatever message ids say."""

    @app.job(key="id", on="scanned")
    async def convert(ctx: Context, document: Document) -> None:
        seen.append((ctx.run, document.id))

    body = json.dumps({"id": 7}).encode()
    async with app, working(app), raw(nats) as (_, js):
        subject = f"{namespace}.job.default.convert"
        await js.publish(subject, body)
        await js.publish(subject, body, headers={"Nats-Msg-Id": "mine"})
        await js.publish(subject, json.dumps({"id": 8}).encode())
        await app.publish("scanned", {"id": 7})
        await app.publish("scanned", {"id": 7, "kind": "jpg"})
        run = await convert.enqueue(Document(id=7))
        assert run.id == "convert/7"
        await run.result(60)
        await until(lambda: queue_empty(app), 30, "all acknowledged")
        assert sorted(await all_records(app)) == ["convert/7", "convert/8"]
    assert sorted(seen) == [("convert/7", 7), ("convert/8", 8)]


async def test_retry_of_a_plain_publish_keeps_its_key_and_is_not_stranded(
    app: Holdfast, nats: Server, namespace: str, seen: Seen
) -> None:
    """The waiting message has another id than the run; the record knows it."""

    @app.job(key=lambda id, kind: f"{id}:{kind}", retry=Backoff.list(["1s", "1s"]))
    async def convert(ctx: Context, id: int, kind: str = "pdf") -> None:
        seen.append(ctx.run)
        if ctx.attempt == 1:
            raise Retry("later")

    async with app, working(app), raw(nats) as (_, js):
        await js.publish(f"{namespace}.job.default.convert", b'{"id": 7}')
        await seen.wait(1)
        run = app.run("convert/7=3Apdf")
        await until(lambda: _is(run, "failed", "done"), 30, "its first end")
        assert await run.result(60) is None
        record = (await all_records(app))["convert/7=3Apdf"]
        assert record.alias.startswith("s")
    assert seen == ["convert/7=3Apdf"] * 2


async def _is(run: Any, *states: str) -> bool:
    return (await run.status()).state in states


async def test_payload_without_a_key_is_refused_on_both_sides(
    app: Holdfast, nats: Server, namespace: str
) -> None:
    """At the sender as an error, at the worker as a dead letter; never run without its key."""

    @app.job(key="name")
    async def greet(name: str, times: int = 1) -> None:
        raise AssertionError("must not run")

    with pytest.raises(InvalidPayload, match="is empty"):
        greet.request("")
    async with app, working(app), raw(nats) as (_, js):
        await js.publish(f"{namespace}.job.default.greet", b'{"name": ""}')
        letter = await dead_letter(app, 30)
    assert "the key of job 'greet' is empty" in letter.story("Hf-Error")


def test_key_that_names_nothing_is_refused_with_the_nearest_name() -> None:
    """When the job is defined; so is a key where nothing could remember it."""
    app = Holdfast("shop")

    async def convert(document: Document) -> None: ...

    async def ship(order_id: int, cents: int) -> None: ...

    with pytest.raises(DefinitionError, match="did you mean 'kind'"):
        app.job(key="knd")(convert)
    with pytest.raises(DefinitionError, match="did you mean 'order_id'"):
        app.job(key="ordr_id")(ship)
    with pytest.raises(DefinitionError, match="at_least_once"):
        app.job(key="order_id", delivery="at_least_once")(ship)


# ---- duplicates


@pytest.mark.parametrize("where", ["nats", "memory"])
async def test_send_with_a_known_key_tells_what_became_of_it(
    app: Holdfast, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The handle has the state of the earlier run; `raise` and `replace` act on it."""
    broken = [True]

    @app.job(retry=Backoff.never())
    async def charge(ctx: Context, cents: int) -> int:
        if broken[0]:
            raise ValueError("no card")
        return cents

    send = charge.options(key="order-7")
    inside: Any = memory(app) if where == "memory" else working(app)
    async with app, inside as running:

        async def settled(run: Any) -> str:
            if where == "memory":
                await running.drain()
            await until(lambda: _is(run, "dead", "done"), 30, "its end")
            return str((await run.status()).state)

        first = await send.enqueue(100)
        assert (first.duplicate, first.state) == (False, "queued")
        assert await settled(first) == "dead"
        with caplog.at_level(logging.WARNING, "holdfast.client"):
            again = await send.enqueue(100)
        assert (again.duplicate, again.state) == (True, "dead")
        assert "exists already and is dead: ValueError: no card" in caplog.text
        with pytest.raises(DuplicateRun, match="is dead: ValueError: no card"):
            await charge.options(key="order-7", on_duplicate="raise").enqueue(100)
        [many] = await app.enqueue_many([send.request(100)])
        assert (many.duplicate, many.state) == (True, "dead")

        broken[0] = False
        replaced = await charge.options(key="order-7", on_duplicate="replace").enqueue(200)
        assert (replaced.duplicate, replaced.id) == (False, first.id)
        assert await settled(replaced) == "done"
        assert await replaced.result() == 200
        fresh = await charge.options(key="new", on_duplicate="replace").enqueue(300)
        assert await settled(fresh) == "done"
    with pytest.raises(InvalidInput, match="needs a key"):
        charge.options(on_duplicate="raise").request(1)


async def test_key_of_a_run_that_has_not_ended_is_known_however_it_is_sent(
    app: Holdfast, seen: Seen
) -> None:
    """Alone or among many, also after the server's window. `raise` sends nothing."""

    @app.job(retry=Backoff.list(["1h"]))
    async def charge(ctx: Context, cents: int) -> None:
        seen.append(cents)
        raise ValueError("no card")

    many = [charge.options(key=f"order-{n}").request(n) for n in range(3)]
    async with app, working(app, records=RecordConfig(dedup_window_seconds=0.1)):
        first = await charge.options(key="order-1").enqueue(1)
        await until(lambda: _is(first, "failed"), 30, "its first failure")
        plain = charge.options(key="order-1").request(1)
        client = await client_of(app)

        async def forgotten() -> bool:
            return not (await client._store_new(plain)).duplicate

        await until(forgotten, 30, "the window's end")
        sent = await app.enqueue_many(many)
        assert [run.duplicate for run in sent] == [False, True, False]
        assert sent[1].state == "failed"
        again = await app.send(plain)
        assert (again.duplicate, again.state) == (True, "failed")
        for run in sent:
            await until(lambda run=run: _is(run, "failed"), 30, run.id)
        await until(lambda: queue_empty(app), 30, "the next attempts stored")
        stored = await last_sequence(app)
        for delay in (None, "1h"):
            with pytest.raises(DuplicateRun, match=r"is failed: ValueError: no card\. Nothing was"):
                await charge.options(key="order-1", on_duplicate="raise", delay=delay).enqueue(1)
        assert await last_sequence(app) == stored


async def last_sequence(app: Holdfast) -> int:
    broker = (await client_of(app)).broker
    info = await broker.api(f"STREAM.INFO.{broker.names.jobs}")
    return int(info["state"]["last_seq"])


async def test_replacing_a_queued_or_running_run_cancels_it_first(
    app: Holdfast, seen: Seen
) -> None:
    """Only the newest payload is executed to its end."""
    started = asyncio.Event()

    @app.job
    async def index(text: str) -> str:
        if text == "slow":
            started.set()
            await asyncio.sleep(600)
        seen.append(text)
        return text

    replace = index.options(key="page", on_duplicate="replace")
    async with app:
        await index.options(key="page").enqueue("first")
        await replace.enqueue("second")
    async with app, working(app):
        assert await (await replace.enqueue("third")).result(60) == "third"
        await replace.enqueue("slow")
        await started.wait()
        assert await (await replace.enqueue("last")).result(60) == "last"
        await until(lambda: queue_empty(app), 60, "older messages dropped")
    assert seen[-2:] == ["third", "last"]
    assert "first" not in seen


async def test_command_knows_the_key_that_a_job_computes(app: Holdfast, seen: Seen) -> None:
    """Workers publish it, so that the printed id is the run's; two sends are one run."""

    @app.job(key="id")
    async def convert(document: Document) -> None:
        seen.append(document.id)

    @app.job(key="name")
    async def greet(name: str, times: int = 1) -> None:
        seen.append(name)

    async with app, working(app):
        for body in ('{"id": 7}', '{"id": 7, "kind": "jpg"}'):
            sent = await holdfast(app, "enqueue", "convert", body)
            assert sent.out.strip() == "convert/7"
        waited = await holdfast(app, "enqueue", "greet", '{"name": "ann"}', "--wait")
        assert waited.code == 0
        await app.run("convert/7").result(60)
        await app.run("greet/ann").result(60)
    assert sorted(map(str, seen)) == ["7", "ann"]


async def test_command_tells_what_became_of_a_known_key(app: Holdfast) -> None:
    """By text and exit code; `--on-duplicate` replaces the run, or fails."""

    @app.job(retry=Backoff.never())
    async def charge(cents: int) -> None:
        raise ValueError("no card")

    async with app, working(app):
        first = await charge.options(key="7").enqueue(1)
        await until(lambda: _is(first, "dead"), 30, "its end")
        again = await holdfast(app, "enqueue", "charge", "1", "--key", "7")
        assert again.code == 3
        assert "is dead: ValueError: no card: nothing new was sent; --on-duplicate" in again.err
        refused = ("enqueue", "charge", "1", "--key", "7", "--on-duplicate", "raise")
        assert "exists already" in (await holdfast(app, *refused)).err
        sent = ("enqueue", "charge", "1", "--key", "7", "--on-duplicate", "replace")
        assert (await holdfast(app, *sent)).out.strip() == "charge/7"
