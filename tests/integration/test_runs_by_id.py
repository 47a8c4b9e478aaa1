"""`app.run(id)` and `app.runs(...)`: runs that somebody else sent; and many results at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Backoff, Holdfast, Limit, SyncApp
from holdfast.client import Client, waiting
from holdfast.client.waiting import OWN_MOST
from holdfast.errors import InvalidName, RunFailed, RunNotFound
from holdfast.testing import memory
from tests.integration.support import client_of, until, working


def define(app: Holdfast) -> Any:
    @app.job(retry=Backoff.never())
    async def charge(cents: int) -> dict[str, int]:
        if cents < 0:
            raise ValueError("negative")
        return {"cents": cents}

    return charge


@pytest.mark.parametrize("where", ["nats", "memory"])
async def test_run_is_found_by_its_id_in_every_state(app: Holdfast, where: str) -> None:
    """Queued, delayed, done and dead; with its typed result, and cancelled or sent again."""
    charge = define(app)
    inside: Any = memory(app) if where == "memory" else app
    async with inside as running:
        sent = await charge.enqueue(1)
        late = await charge.options(delay="1h").enqueue(2)
        assert (await app.run(sent.id).status()).state == "queued"
        assert (await app.run(late.id).status()).state == "delayed"
        assert await app.run(late.id).cancel()
        dead = await charge.options(key="bad").enqueue(-1)
        async with (_nothing if where == "memory" else working)(app):
            if where == "memory":
                await running.drain()
            assert await charge.run(sent.id).result(60) == {"cents": 1}
            handle = app.run("charge/bad")
            with pytest.raises(RunFailed, match="negative"):
                await handle.result(60)
            assert (handle.job, handle.group, handle.state) == ("charge", "default", "dead")
            assert "sent again" in await handle.retry()
            if where == "memory":
                await running.drain()
            await until(lambda: _twice(app, dead.id), 30, "its second end")
            found = await app.runs(job="charge", state="dead")
            assert [(run.id, run.state) for run in found] == [("charge/bad", "dead")]
            assert [run.id for run in await app.runs(key="bad")] == ["charge/bad"]
            assert {run.id for run in await app.runs()} == {sent.id, late.id, dead.id}
            assert not await app.run(sent.id).cancel()


async def _twice(app: Holdfast, run: str) -> bool:
    status = await app.run(run).status()
    return status.state == "dead" and len(status.record.attempts) == 2


class _nothing:
    def __init__(self, app: Holdfast) -> None: ...
    async def __aenter__(self) -> None: ...
    async def __aexit__(self, *exc: object) -> None: ...


@pytest.mark.parametrize("where", ["nats", "memory"])
async def test_unknown_run_is_a_clear_answer(app: Holdfast, where: str) -> None:
    """A state to ask for, and an error that says so where there is nothing to do."""
    define(app)
    async with memory(app) if where == "memory" else app:
        run = app.run("charge/none")
        status = await run.status()
        assert (status.state, status.known) == ("unknown", False)
        for ask in (run.result, run.cancel, run.retry):
            with pytest.raises(RunNotFound, match="no trace of run charge/none"):
                await ask()
        for id in ("a b", "a.b", "", "charge/\n", "é" * 500, "ocr/d2:none"):
            assert (await app.run(id).status()).state == "unknown"
            with pytest.raises(RunNotFound, match="no trace of run"):
                await app.run(id).result()
        with pytest.raises(InvalidName, match="must be a string"):
            app.run(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["nats", "memory"])
async def test_run_is_found_by_its_key_as_it_was_given(app: Holdfast, where: str) -> None:
    """As the command line finds it; and one key among many that begin with it."""
    charge = define(app)

    @app.job(group="scans")
    async def ocr(page: int) -> int:
        return page

    async with memory(app) if where == "memory" else app:
        for job, key in ((charge, "d2:ocr"), (ocr, "d2:left/é")):
            sent = await job.options(key=key).enqueue(1)
            home = "" if job is charge else "scans/"
            found = app.run(f"{home}{job.name}/{key}")
            assert (await found.status()).state == "queued"
            assert (found.id, found.job) == (sent.id, job.name)
            assert await app.run(f"{home}{job.name}/{key}").cancel()
        one = await charge.options(key="1").enqueue(1)
        await charge.enqueue_many(charge.options(key=f"1{n}").request(n) for n in range(20))
        for chosen in ({"job": "charge"}, {"state": "queued"}, {}):
            assert [r.id for r in await app.runs(key="1", limit=5, **chosen)] == [one.id]
        assert await app.runs(job="charge", key="1", state="done") == []
        assert await app.runs(job="charge", key="none") == []


async def test_result_is_not_waited_for_when_the_run_is_gone(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter that missed the end takes it from the history; without any trace it is an error.

    Also where the place of the message is not known: delayed, in a limit, or known by its id only.
    """
    monkeypatch.setattr(waiting, "LOOK_AGAIN_SECONDS", 0.02)

    @app.job(limits=[Limit(running=1)])
    async def paid(cents: int) -> int:
        return cents

    @app.job(delivery="at_least_once")
    async def ping(number: int) -> None: ...

    charge = define(app)
    async with app:
        client = await client_of(app)
        monkeypatch.setattr(client._waiting, "_read", _nothing_there)
        monkeypatch.setattr(client._waiting, "_notify", _ignored)
        late = await charge.options(delay="0.2s").enqueue(1)
        limited = await paid.enqueue(2)
        unrecorded = await ping.enqueue(3)
        by_id = asyncio.create_task(app.run(unrecorded.id).result())
        waits = [asyncio.create_task(client.wait(run.id, 0, 60)) for run in (late, limited)]
        await until(lambda: client._waiting._count == 3, what="three waiters")
        async with working(app):
            for wait, result in zip(waits, (b'{"cents":1}', b"2"), strict=True):
                assert bytes((await wait).result) == result
            with pytest.raises(RunNotFound, match="keeps no records"):
                await by_id


async def _nothing_there(run: str) -> None:
    """A read of a record that has expired."""


def _ignored(*_: object) -> None: ...


async def test_plain_code_finds_runs_too(app: Holdfast) -> None:
    """The same through `SyncApp`."""
    charge = define(app)
    async with working(app):
        sent = await charge.options(key="7").enqueue(7)
        await sent.result(60)

        def look() -> tuple[Any, str, list[str]]:
            with SyncApp(app) as shop:
                run = shop.run("charge/7")
                found = [run.id for run in shop.runs(job="charge")]
                return run.result(60), shop.run("charge/8").status().state, found

        assert await asyncio.to_thread(look) == ({"cents": 7}, "unknown", ["charge/7"])


async def test_many_results_share_one_subscription(app: Holdfast) -> None:
    """Beyond the first few; all are answered, and nothing stays subscribed."""
    charge = define(app)
    async with app:
        backend = await client_of(app)
        runs = await charge.enqueue_many(range(2000))
        waits = asyncio.gather(*(run.result() for run in runs))
        await until(lambda: _subscriptions(backend) > OWN_MOST, 30, "the waiters")
        assert _subscriptions(backend) <= OWN_MOST + 3
        async with working(app):
            assert await waits == [{"cents": n} for n in range(2000)]
        await until(lambda: _subscriptions(backend) < 3, 30, "their end")


def _subscriptions(client: Client) -> int:
    return len(client.broker._nc._subs)
