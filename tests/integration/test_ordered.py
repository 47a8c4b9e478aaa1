"""Ordered limits: each run starts after the one accepted before it has ended, retries included."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import Backoff, Holdfast, Limit
from holdfast.broker.kv import Bucket
from holdfast.errors import DefinitionError, InvalidInput
from holdfast.server import Server
from holdfast.status.limits import Limits
from holdfast.status.unreadable import UnreadableRecords
from tests.integration.support import broker_of, client_of, dead_letter, raw, until, working
from tests.integration.test_limits import empty, gates

AGAIN = Backoff.linear("300ms", "300ms", 3)


async def test_runs_of_a_key_start_in_the_order_of_acceptance(app: Holdfast) -> None:
    """Two workers with many places each: every key's runs end in the order they were sent."""
    done: dict[str, list[int]] = {}

    @app.job(limits=[Limit(running=1, per="order", ordered=True)])
    async def move(order: str, number: int) -> None:
        await asyncio.sleep(0.001 * (number % 3))
        done.setdefault(order, []).append(number)

    async with app, working(app), working(app):
        await move.enqueue_many([move.request(f"o{n % 4}", n) for n in range(80)])
        await until(lambda: sum(map(len, done.values())) == 80)
        await until(lambda: empty(app))
    assert done == {f"o{k}": list(range(k, 80, 4)) for k in range(4)}


async def test_retry_keeps_its_place_and_others_wait_for_it(app: Holdfast) -> None:
    """A run that fails twice is not overtaken; another key does not wait for it."""
    attempts: list[tuple[str, int]] = []

    @app.job(retry=AGAIN, limits=[Limit(running=1, per="order", ordered=True)])
    async def move(order: str, number: int) -> None:
        attempts.append((order, number))
        if (order, number) == ("a", 1) and attempts.count(("a", 1)) < 3:
            raise ValueError("not yet")

    async with app, working(app), working(app):
        await move.enqueue_many([move.request("a", n) for n in (1, 2, 3)])
        await move.enqueue("b", 1)
        await until(lambda: len(attempts) == 6)
        await until(lambda: empty(app))
    assert [number for order, number in attempts if order == "a"] == [1, 1, 1, 2, 3]
    assert attempts.index(("b", 1)) < attempts.index(("a", 2))


async def test_coordinator_leaves_the_place_of_a_run_that_waits_for_its_retry(
    app: Holdfast,
) -> None:
    """The repair that frees leaked places does not let anybody overtake a waiting retry."""
    attempts: list[int] = []

    @app.job(
        retry=Backoff.linear("3s", "3s", 3),
        limits=[Limit(running=1, per="order", ordered=True)],
    )
    async def move(order: str, number: int) -> None:
        attempts.append(number)
        if attempts == [1]:
            raise ValueError("not yet")

    async with app, working(app):
        await move.enqueue_many([move.request("a", n) for n in (1, 2)])
        await until(lambda: attempts == [1])
        limits = Limits(await client_of(app))
        for _ in range(3):
            await limits.repair(lines=True)
        assert [len(gate.held) for gate in (await gates(app)).values()] == [1]
        await until(lambda: attempts == [1, 1, 2])
        await until(lambda: empty(app))


async def test_cancelled_retry_frees_its_place_at_once(app: Holdfast) -> None:
    """Nobody waits for the next attempt of a run that was cancelled."""
    attempts: list[int] = []

    @app.job(
        retry=Backoff.linear("1h", "1h", 3),
        limits=[Limit(running=1, per="order", ordered=True)],
    )
    async def move(order: str, number: int) -> None:
        attempts.append(number)
        if number == 1:
            raise ValueError("never")

    async with app, working(app):
        first = await move.enqueue("a", 1)
        await move.enqueue("a", 2)

        async def failed() -> bool:
            return (await first.status()).state == "failed"

        await until(failed)
        assert attempts == [1]
        assert await first.cancel()
        await until(lambda: attempts == [1, 2])
        await until(lambda: empty(app))


async def test_dead_letter_lets_the_next_run_start(app: Holdfast) -> None:
    """A run that is given up no longer holds up its key."""
    attempts: list[int] = []

    @app.job(
        retry=Backoff.linear("50ms", "50ms", 2),
        limits=[Limit(running=1, per="order", ordered=True)],
    )
    async def move(order: str, number: int) -> None:
        attempts.append(number)
        if number == 1:
            raise ValueError("never")

    async with app, working(app):
        await move.enqueue_many([move.request("a", n) for n in (1, 2)])
        await until(lambda: attempts == [1, 1, 2])
        await until(lambda: empty(app))


async def test_run_without_room_for_its_headers_stops_nobody(
    app: Holdfast, nats: Server, namespace: str
) -> None:
    """A plain publish of the largest size becomes a dead letter; the runs behind it start."""
    done: list[str] = []

    @app.job(limits=[Limit(running=1, per="order", ordered=True)])
    async def move(order: str, filling: str = "") -> None:
        done.append(order)

    async with app, working(app), raw(nats) as (connection, js):
        frame = len(b'{"order":"a","filling":""}')
        body = b'{"order":"a","filling":"%s"}' % (b"x" * (connection.max_payload - frame))
        await js.publish(f"{namespace}.job.default.move", body)
        await move.enqueue("b")
        await until(lambda: done == ["b"])
        letter = await dead_letter(app)
        assert "no room" in letter.headers["Hf-Error"]
        await until(lambda: empty(app))


async def test_unreadable_gate_stops_its_key_and_no_other(app: Holdfast) -> None:
    """Other keys go on; once the gate is removed, a coordinator serves its line."""
    done: list[str] = []

    @app.job(limits=[Limit(running=1, per="order", ordered=True)])
    async def move(order: str) -> None:
        done.append(order)

    async with app, working(app):
        broker = await broker_of(app)
        bucket = Bucket(broker, broker.names.limits)
        await bucket.put("gate.move.bad", b"{", expected=0)
        await move.enqueue("bad")
        await move.enqueue("good")
        await until(lambda: done == ["good"])
        await UnreadableRecords(await client_of(app)).remove(bucket.name, "gate.move.bad")
        limits = Limits(await client_of(app))
        await limits.repair(lines=True)
        await until(lambda: done == ["good", "bad"])
        await until(lambda: empty(app))
        await limits.gates.close()


async def test_job_that_becomes_ordered_changes_its_consumer(app: Holdfast, namespace: str) -> None:
    """A worker of the new code delivers one arrival at a time, and one of the old code many."""

    @app.job
    async def move(order: str) -> None: ...

    async def pending() -> int:
        broker = await broker_of(app)
        info = await broker.api(f"CONSUMER.INFO.{broker.names.jobs}.default=move")
        return int(info["config"]["max_ack_pending"])

    later = Holdfast("later", nats_url=app.connection_config().nats_url, namespace=namespace)

    @later.job(name="move", limits=[Limit(running=1, per="order", ordered=True)])
    async def moved(order: str) -> None: ...

    async with app:
        async with working(app):
            assert await pending() > 1
        async with later, working(later):
            assert await pending() == 1
        async with working(app):
            assert await pending() > 1


def test_orders_that_nothing_could_keep_are_refused(app: Holdfast) -> None:
    """An order needs one place, waits, belongs to one job, and knows no priorities."""
    with pytest.raises(DefinitionError, match="running=1"):
        Limit(running=2, ordered=True)
    with pytest.raises(DefinitionError, match="running=1"):
        Limit(running=1, when_full="drop", ordered=True)
    with pytest.raises(DefinitionError, match="running=1"):
        Limit(starts="1/s", ordered=True)
    mine = Limit(running=1, ordered=True, name="mine")

    @app.job(limits=[mine])
    async def first() -> None: ...

    with pytest.raises(DefinitionError, match="another job has it"):

        @app.job(limits=[mine])
        async def second() -> None: ...

    with pytest.raises(InvalidInput, match="ordered"):
        first.options(priority="high").request()


async def test_operator_cannot_widen_an_ordered_limit(app: Holdfast) -> None:
    """Two at a time would be no order."""

    @app.job(limits=[Limit(running=1, ordered=True)])
    async def move() -> None: ...

    async with app, working(app):
        with pytest.raises(InvalidInput, match="order"):
            await Limits(await client_of(app)).set("move", running=2)
