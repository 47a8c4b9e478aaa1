"""The outbox on a real Postgres: a run for each committed row, once, in order per key."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, event, func, select
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast import Holdfast
from holdfast.errors import InvalidInput
from holdfast.integrations import outbox
from holdfast.integrations import relay as relays
from holdfast.integrations.relay import Batch, WaitingRow, turns
from holdfast.server import Server
from tests.integration.support import Seen, working
from tests.postgres import Postgres
from tests.support import until


@pytest.fixture
async def app(nats: Server, namespace: str) -> AsyncIterator[Holdfast]:
    """An app whose own connection, the relay's, is closed at the end."""
    async with Holdfast("shop", nats_url=nats.url, namespace=namespace) as app:
        yield app


@pytest.fixture
def engine(postgres: Postgres) -> Iterator[Engine]:
    engine = create_engine(postgres.url, pool_pre_ping=True)  # Postgres is killed below
    outbox.metadata.drop_all(engine)
    outbox.create(engine)
    yield engine
    engine.dispose()


def waiting(engine: Engine) -> int:
    with Session(engine) as session:
        return session.scalar(select(func.count()).select_from(outbox.OutboxRow)) or 0


async def test_run_exists_if_the_transaction_commits(
    app: Holdfast, engine: Engine, seen: Seen
) -> None:
    """A rollback leaves no run, and a commit leaves exactly one, with its options."""

    @app.job
    async def charge(order: int) -> None:
        seen.append(order)

    with Session(engine) as session:
        outbox.enqueue(session, charge, 1)
        session.rollback()
        outbox.enqueue(session, charge, 2)
        outbox.enqueue(session, charge.options(key="three"), 3)
        outbox.enqueue(session, charge.options(key="three"), 3)
        session.commit()
    assert waiting(engine) == 3
    relay = outbox.Relay(app, engine)
    assert await relay.send_all() == 3
    assert waiting(engine) == 0
    async with working(app):
        await seen.wait(2)
        assert await (await charge.options(key="three").enqueue(3)).result() is None
    assert sorted(seen) == [2, 3]


async def test_async_session_and_engine(
    app: Holdfast, engine: Engine, postgres: Postgres, seen: Seen
) -> None:
    """An async engine creates the table, `AsyncSession` writes rows, and a relay sends them."""

    @app.job
    async def charge(order: int) -> None:
        seen.append(order)

    async_engine = create_async_engine(postgres.url)
    outbox.metadata.drop_all(engine)
    await outbox.create(async_engine)
    async with AsyncSession(async_engine) as session, session.begin():
        outbox.enqueue(session, charge, 7)
    relay = outbox.Relay(app, async_engine)
    await relay.start()
    async with working(app):
        await seen.wait()
    await relay.aclose()
    await async_engine.dispose()
    assert waiting(engine) == 0


async def test_order_of_a_key_with_several_relays(
    app: Holdfast, engine: Engine, seen: Seen
) -> None:
    """Three relays side by side send each row once, and rows of one key in their order."""

    @app.job
    async def step(key: str, number: int) -> None:
        seen.append((key, number))

    keys = [f"order-{n}" for n in range(7)]
    with Session(engine) as session:
        for number in range(60):
            for key in random.sample(keys, len(keys)):
                outbox.ordered(key).enqueue(session, step, key, number)
            session.commit()
    relays = [outbox.Relay(app, engine, batch=25) for _ in range(3)]
    for relay in relays:
        await relay.start()
    await until(lambda: waiting(engine) == 0, what="an empty outbox")
    for relay in relays:
        await relay.aclose()
    async with working(app, concurrency=1):
        await seen.wait(60 * len(keys))
    for key in keys:
        assert [number for of, number in seen if of == key] == list(range(60))


async def test_row_that_cannot_be_sent_is_set_aside(
    app: Holdfast, engine: Engine, seen: Seen
) -> None:
    """One row is too large and one is damaged: they stay with a reason, and the rest is sent."""

    @app.job
    async def save(text: str) -> None:
        seen.append(text[:5])

    with Session(engine) as session, session.begin():
        outbox.enqueue(session, save, "small")
        outbox.enqueue(session, save, "x" * 2_000_000)
        session.add(outbox.OutboxRow(job="save", run="r", entry=b"\xff{"))
        outbox.enqueue(session, save, "later")
    assert await outbox.Relay(app, engine).send_all() == 2
    async with working(app):
        await seen.wait(2)
    assert sorted(seen) == ["later", "small"]
    with Session(engine) as session:
        reasons = sorted(row.error or "" for row in session.scalars(select(outbox.OutboxRow)))
    assert "cannot be read" in reasons[0]
    assert "2,0" in reasons[1]


async def test_row_for_a_forbidden_group_is_set_aside(
    engine: Engine, seen: Seen, tmp_path: Path
) -> None:
    """The relay's login may not send to one group: those rows stay, and the others are sent."""
    login = tmp_path / "login.conf"
    login.write_text(
        "authorization { users: [{ user: relay, password: p, permissions: "
        '{ publish: { deny: ["hf.job.billing.>"] } } }] }'
    )
    with Server(fast=True, includes=[login]) as server:
        async with Holdfast("shop", nats_url=server.url.replace("//", "//relay:p@")) as app:

            @app.job
            async def ship(order: int) -> None:
                seen.append(order)

            with Session(engine) as session, session.begin():
                for order in range(10):
                    chosen = ship if order % 3 else ship.options(group="billing")
                    outbox.enqueue(session, chosen, order)
            assert await outbox.Relay(app, engine).send_all() == 6
            async with working(app):
                await seen.wait(6)
    assert sorted(seen) == [1, 2, 4, 5, 7, 8]
    with Session(engine) as session:
        reasons = session.scalars(select(outbox.OutboxRow.error)).all()
    assert len(reasons) == 4
    assert all("permissions violation" in (reason or "") for reason in reasons)


async def test_options_of_a_run_travel_with_its_row(
    app: Holdfast, engine: Engine, seen: Seen
) -> None:
    """A priority of its own is kept; what cannot be kept is refused when the row is written."""

    @app.job
    async def charge(order: int) -> None:
        seen.append(order)

    with Session(engine) as session, session.begin():
        for order in range(20):
            outbox.enqueue(session, charge, order)
        outbox.enqueue(session, charge.options(priority="high"), 99)
        replacing = charge.options(key="k", on_duplicate="replace")
        with pytest.raises(InvalidInput, match="on_duplicate"):
            outbox.enqueue(session, replacing, 1)
    assert await outbox.Relay(app, engine).send_all() == 21
    async with working(app, concurrency=1):
        await seen.wait(21)
    assert seen.index(99) < 10


class Broken(relays.Table):
    """A table whose driver has a bug, for a while."""

    def __init__(self) -> None:
        self.asked = 0

    def batch(self, most: int) -> AbstractAsyncContextManager[Batch]:
        self.asked += 1
        raise RuntimeError("the driver is broken")


async def test_relay_that_cannot_work_ends(app: Holdfast) -> None:
    """As a process it raises what is no outage, so that it is started again."""
    with pytest.raises(RuntimeError, match="driver"):
        await relays.Relay(app, Broken()).run()


async def test_relay_in_a_worker_says_why_and_tries_again(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing would start it again there."""
    monkeypatch.setattr(relays, "AFTER_ERROR_SECONDS", 0.01)
    table = Broken()
    relay = relays.Relay(app, table)
    with caplog.at_level(logging.ERROR, "holdfast.outbox"):
        await relay.start()
        await until(lambda: table.asked > 2, what="another try")
    await relay.aclose()
    assert "the driver is broken" in caplog.text


async def test_relay_waits_for_a_database_whose_driver_raises_its_own_errors(
    app: Holdfast, engine: Engine, seen: Seen
) -> None:
    """Not every driver's error of connecting is one of SQLAlchemy's."""

    @app.job
    async def charge(order: int) -> None:
        seen.append(order)

    tries = 0

    @event.listens_for(engine, "do_connect")
    def refuse(*_: object) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ValueError("the database system is starting up")

    engine.dispose()
    relay = outbox.Relay(app, engine)
    running = asyncio.create_task(relay.run())
    await until(lambda: tries >= 3, what="a connection")
    with Session(engine) as session, session.begin():
        outbox.enqueue(session, charge, 1)
    async with working(app):
        await seen.wait()
    relay.stop()
    await running


async def test_relay_waits_for_its_database(
    app: Holdfast, engine: Engine, postgres: Postgres, seen: Seen
) -> None:
    """A relay outlives a crash of Postgres, and sends what was committed."""

    @app.job
    async def charge(order: int) -> None:
        seen.append(order)

    relay = outbox.Relay(app, engine)
    await relay.start()
    with Session(engine) as session, session.begin():
        outbox.enqueue(session, charge, 1)
    await until(lambda: waiting(engine) == 0, what="the first row sent")
    postgres.kill()
    await asyncio.to_thread(postgres.start)
    with Session(engine) as session, session.begin():
        outbox.enqueue(session, charge, 2)
    async with working(app):
        await seen.wait(2)
    await relay.aclose()
    assert sorted(seen) == [1, 2]


def test_turns_hold_one_of_each_key() -> None:
    """Rows of one key go in separate portions, in order; rows without a key go first."""
    keys = ["a", "b", "a", None, "a", None, "b"]
    rows = [WaitingRow(n, key, b"") for n, key in enumerate(keys)]
    assert [[row.id for row in turn] for turn in turns(rows)] == [[0, 1, 3, 5], [2, 6], [4]]


async def test_relay_stopped_while_it_connects_keeps_no_connection(
    app: Holdfast, engine: Engine
) -> None:
    """A relay that is closed while its thread connects gives the connection back."""
    connecting, go_on = threading.Event(), threading.Event()

    @event.listens_for(engine, "engine_connect")
    def wait(_connection: object) -> None:
        connecting.set()
        go_on.wait()

    relay = outbox.Relay(app, engine)
    await relay.start()
    await asyncio.to_thread(connecting.wait)
    closing = asyncio.create_task(relay.aclose())
    await asyncio.sleep(0)  # the task has been cancelled by now, and its thread still connects
    go_on.set()
    await closing
    assert engine.pool.status().endswith("Current Checked out connections: 0")
