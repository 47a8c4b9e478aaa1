"""Limits over all workers: never one more, nobody waits for a free place, nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from holdfast import Backoff, Holdfast, Limit
from holdfast.broker.kv import Bucket
from holdfast.client import Client
from holdfast.coordinator import Coordinator
from holdfast.errors import DefinitionError, InvalidInput, RunCancelled
from holdfast.model.limit import GATE, Gate
from holdfast.names import GATES
from holdfast.server import Server
from holdfast.status.limits import Limits
from holdfast.status.listing import RunFilter
from holdfast.status.runs import Runs
from holdfast.status.unreadable import UnreadableRecords
from tests.integration.support import Seen, broker_of, client_of, lag, raw, working
from tests.support import running, until


async def gates(app: Holdfast) -> dict[str, Gate]:
    """Every gate, by its key."""
    broker = await broker_of(app)
    bucket = Bucket(broker, broker.names.limits)
    return {e.key: g async for e, g in bucket.records(GATE.decode, GATES)}


async def line(app: Holdfast) -> int:
    """How many messages wait in all lines."""
    broker = await broker_of(app)
    names = broker.names
    request = {"subjects_filter": names.line("*", "*", "*")}
    info = await broker.api(f"STREAM.INFO.{names.jobs}", request)
    return len(info["state"].get("subjects") or {})


async def empty(app: Holdfast) -> bool:
    """Whether nobody holds a place or waits for one."""
    return all(gate.idle for gate in (await gates(app)).values()) and not await line(app)


class Crowd(Counter[str]):
    """How many handlers run at the same time, by key."""

    def __init__(self) -> None:
        super().__init__()
        self.most: Counter[str] = Counter()
        self.done: list[tuple[str, int]] = []

    async def visit(self, key: str, number: int, seconds: float = 0.01) -> None:
        self[key] += 1
        self.most[key] = max(self.most[key], self[key])
        await asyncio.sleep(seconds)
        self[key] -= 1
        self.done.append((key, number))


async def test_limit_per_key_holds_over_workers(app: Holdfast) -> None:
    """Two workers, three keys: of each key at most two runs at the same time, and all are done."""
    crowd = Crowd()

    @app.job(limits=[Limit(running=2, per="customer")])
    async def charge(customer: str, amount: int) -> None:
        await crowd.visit(customer, amount)

    async with app, working(app), working(app):
        await charge.enqueue_many([charge.request(f"c{n % 3}", n) for n in range(90)])
        await until(lambda: len(crowd.done) == 90)
        await until(lambda: empty(app))
    assert set(crowd.most.values()) == {2}
    assert len(set(crowd.done)) == 90


async def test_shared_limit_counts_the_runs_of_all_its_jobs(app: Holdfast) -> None:
    """Two jobs share one place: their runs never overlap."""
    crowd = Crowd()
    one = app.limit("printer", running=1)

    @app.job(limits=[one])
    async def letter(number: int) -> None:
        await crowd.visit("printer", number)

    @app.job(limits=[one])
    async def label(number: int) -> None:
        await crowd.visit("printer", 100 + number)

    async with app, working(app), working(app):
        for n in range(10):
            await letter.enqueue(n)
            await label.enqueue(n)
        await until(lambda: len(crowd.done) == 20)
        await until(lambda: empty(app))
    assert crowd.most == {"printer": 1}


async def test_two_limits_are_both_kept(app: Holdfast) -> None:
    """A run needs a place in each of its limits, and gives all of them back."""
    crowd, total = Crowd(), Crowd()
    three = app.limit("three", running=3)

    @app.job(limits=[three, Limit(running=1, per="customer")])
    async def charge(customer: str, amount: int) -> None:
        await asyncio.gather(crowd.visit(customer, amount), total.visit("all", amount))

    assert [limit.name for limit in charge.spec.limits] == ["charge", "three"]
    async with app, working(app), working(app):
        await charge.enqueue_many([charge.request(f"c{n % 6}", n) for n in range(60)])
        await until(lambda: len(crowd.done) == 60)
        await until(lambda: empty(app))
    assert set(crowd.most.values()) == {1}
    assert total.most["all"] == 3


async def test_retry_gives_its_place_to_others(app: Holdfast, seen: Seen) -> None:
    """While a failed run waits for its next attempt, another one runs."""

    @app.job(limits=[Limit(running=1)], retry=Backoff.list([0.3]))
    async def flaky(number: int) -> None:
        seen.append(number)
        if seen.count(1) == 1 and number == 1:
            raise ValueError("once")

    async with app, working(app):
        await flaky.enqueue(1)
        await seen.wait(1)
        await flaky.enqueue(2)
        await seen.wait(3)
        await until(lambda: empty(app))
    assert list(seen) == [1, 2, 1]


async def test_full_limit_drops_a_run_if_told_to(app: Holdfast) -> None:
    """`when_full="drop"`: the run ends as cancelled, with the reason, and nothing waits."""
    go = asyncio.Event()

    @app.job(limits=[Limit(running=1, per="doc", when_full="drop")])
    async def render(doc: str) -> str:
        await go.wait()
        return doc

    async with app, working(app):
        first = await render.enqueue("a")
        await until(lambda: gates(app))
        dropped, other = await render.enqueue("a"), await render.enqueue("b")
        with pytest.raises(RunCancelled, match="dropped: limit 'render' was full"):
            await dropped.result(timeout=10)
        go.set()
        assert await first.result(timeout=10) == "a"
        assert await other.result(timeout=10) == "b"
        await until(lambda: empty(app))


async def test_retry_is_not_dropped(app: Holdfast) -> None:
    """A run that was attempted waits for a place, although its limit drops what finds it full."""
    go = asyncio.Event()
    attempts: list[str] = []

    @app.job(limits=[Limit(running=1, when_full="drop")], retry=Backoff.list([2.0]))
    async def render(doc: str) -> str:
        attempts.append(doc)
        if attempts == ["a"]:
            raise ValueError("once")
        await go.wait()
        return doc

    async with app, working(app):
        first = await render.enqueue("a")
        await until(lambda: attempts == ["a"])
        await until(lambda: empty(app))
        second = await render.enqueue("b")
        await until(lambda: _has(line(app), 1))
        go.set()
        assert await second.result(timeout=10) == "b"
        assert await first.result(timeout=10) == "a"
        await until(lambda: empty(app))


async def test_paused_limit_drops_nothing(app: Holdfast) -> None:
    """`when_full="drop"`: what arrives during a pause waits, and all of it runs after it."""

    @app.job(limits=[Limit(running=1, when_full="drop")])
    async def render(doc: str) -> str:
        return doc

    async with app, working(app):
        limits = Limits(await client_of(app))
        await limits.pause("render")
        sent = [await render.enqueue(doc) for doc in "abc"]
        await until(lambda: _has(line(app), 3))
        await limits.resume("render")
        assert [await run.result(timeout=10) for run in sent] == ["a", "b", "c"]
        await until(lambda: empty(app))
        await limits.gates.close()


async def test_run_that_waits_for_its_second_limit_keeps_its_first_place(app: Holdfast) -> None:
    """No repair frees it and the doctor reports nothing; order and places stay as they are."""
    done: list[int] = []
    stripe = app.limit("stripe", running=1)

    @app.job(limits=[Limit(running=1, per="order", ordered=True), stripe])
    async def charge(order: str, number: int) -> None:
        done.append(number)

    async with app, working(app):
        limits = Limits(await client_of(app))
        await limits.pause("stripe")
        await charge.enqueue_many([charge.request("a", n) for n in range(4)])
        await until(lambda: _has(line(app), 4))
        before = {key: gate.held for key, gate in (await gates(app)).items()}
        assert sum(map(len, before.values())) == 1
        for _ in range(3):
            assert not await limits.repair(lines=True)
        assert not await limits.leaked()
        assert {key: gate.held for key, gate in (await gates(app)).items()} == before
        await limits.resume("stripe")
        await until(lambda: len(done) == 4)
        await until(lambda: empty(app))
        await limits.gates.close()
    assert done == [0, 1, 2, 3]


async def test_waiting_run_costs_nothing_and_can_be_cancelled(
    app: Holdfast, nats: Server, namespace: str
) -> None:
    """A waiting run is nobody's backlog, says why it waits, and is cancelled like any other."""
    go = asyncio.Event()

    @app.job(limits=[Limit(running=1)])
    async def slow(number: int) -> int:
        await go.wait()
        return number

    async with app, working(app):
        first = await slow.enqueue(0)
        await until(lambda: gates(app))
        second, third = await slow.enqueue(1), await slow.enqueue(2)
        await until(lambda: _has(line(app), 2))
        await until(lambda: _has(lag(app, "slow"), 1))  # the one that runs
        assert (await second.status()).state == "waiting"
        backend = await client_of(app)
        where = (await Runs(backend).show(third.id)).where
        assert where.startswith("waiting for a place in limit slow: number 2 in line")
        listed = await Runs(backend).list(RunFilter(state="waiting"))
        assert {info.run for info in listed} == {second.id, third.id}
        assert await second.cancel()
        go.set()
        assert await third.result(timeout=20) == 2
        assert await first.result(timeout=20) == 0
        assert (await second.status()).state == "cancelled"
        await until(lambda: empty(app))


async def _has(count: Any, wanted: int) -> bool:
    return bool(await count == wanted)


async def test_plain_publish_obeys_the_limit(app: Holdfast, nats: Server, namespace: str) -> None:
    """A message of any NATS client is limited like one of ours."""
    crowd = Crowd()

    @app.job(limits=[Limit(running=1, per="customer")])
    async def charge(customer: str, amount: int) -> None:
        await crowd.visit(customer, amount)

    async with app, working(app), working(app), raw(nats) as (_, js):
        for n in range(10):
            body = f'{{"customer": "c", "amount": {n}}}'.encode()
            await js.publish(f"{namespace}.job.default.charge", body)
        await until(lambda: len(crowd.done) == 10)
        await until(lambda: empty(app))
    assert crowd.most == {"c": 1}


async def test_starts_are_paced_and_none_is_lost(app: Holdfast) -> None:
    """Starts never exceed the rate and the burst, counted from the first one."""
    times: list[float] = []
    stripe = app.limit("stripe", starts="50/s", burst=3)

    @app.job(limits=[stripe])
    async def call(number: int) -> None:
        times.append(asyncio.get_running_loop().time())

    async with app, working(app), working(app):
        await call.enqueue_many([call.request(n) for n in range(40)])
        await until(lambda: len(times) == 40)
        await until(lambda: empty(app))
    assert times[-1] - times[0] >= (40 - 3) / 50 - 0.1


async def test_operator_changes_and_pauses_a_limit(app: Holdfast) -> None:
    """A paused limit starts nothing; more places take effect at once; a restart keeps them."""
    crowd = Crowd()

    @app.job(limits=[Limit(running=1)])
    async def slow(number: int) -> None:
        await crowd.visit("slow", number)

    async with app, working(app):
        backend = await client_of(app)
        limits = Limits(backend)
        await limits.pause("slow")
        await slow.enqueue_many([slow.request(n) for n in range(9)])
        await until(lambda: _has(line(app), 9))
        await limits.set("slow", running=3)
        info = (await limits.list())[0]
        assert (info.running, info.waiting, info.held, info.paused) == (3, 9, 0, True)
        assert not crowd.done
        await limits.resume("slow")
        await until(lambda: len(crowd.done) == 9)
        await until(lambda: empty(app))
        assert crowd.most == {"slow": 3}
        async with working(app):
            assert (await limits.list())[0].running == 3
        assert (await limits.set("slow")).numbers.running == 1
        with pytest.raises(InvalidInput, match="'slow' is one of running"):
            await limits.set("slow", starts="5/s")
        await limits.gates.close()


async def test_deleted_gates_are_written_again(app: Holdfast, nats: Server) -> None:
    """Without its bucket a limit is kept all the same: workers name what they run."""
    crowd = Crowd()

    @app.job(limits=[Limit(running=2)])
    async def slow(number: int) -> None:
        await crowd.visit("slow", number, 0.05)

    async with app, working(app), running(Coordinator(app.connection_config())):
        await slow.enqueue_many([slow.request(n) for n in range(60)])
        await until(lambda: len(crowd.done) > 5)
        async with raw(nats) as (_, js):
            broker = await broker_of(app)
            await js.delete_stream(f"KV_{broker.names.limits}")
        await until(lambda: len(crowd.done) == 60)
        await until(lambda: empty(app))


async def test_unreadable_gate_waits_for_a_person(app: Holdfast) -> None:
    """A damaged gate stops its runs and nothing else; once it is removed they run."""
    done: list[str] = []

    @app.job(limits=[Limit(running=1, per="key")])
    async def job(key: str, number: int) -> None:
        done.append(key)

    async with app, working(app, ack_wait_seconds=0.5, extend_seconds=0.1):
        broker = await broker_of(app)
        bucket = Bucket(broker, broker.names.limits)
        await bucket.put("gate.job.bad", b"{", expected=0)
        await job.enqueue("bad", 1)
        await job.enqueue("good", 2)
        await until(lambda: done == ["good"])
        backend = await client_of(app)
        damaged = await UnreadableRecords(backend).list()
        assert [one.key for one in damaged] == ["gate.job.bad"]
        await UnreadableRecords(backend).remove(bucket.name, "gate.job.bad")
        await until(lambda: done == ["good", "bad"])


async def test_leaked_place_is_found_and_freed(app: Holdfast) -> None:
    """A place of a run that is nowhere is found by the doctor and freed by its repair."""

    @app.job(limits=[Limit(running=1)])
    async def job(number: int) -> int:
        return number

    async with app, working(app):
        await (await job.enqueue(1)).result(timeout=10)
        await until(lambda: empty(app))
        broker, backend = await broker_of(app), await app.backend()
        assert isinstance(backend, Client)
        bucket = Bucket(broker, broker.names.limits)
        revision, _ = await bucket.last("gate.job.=all")
        gone = GATE.encode(Gate(held={"rgone": 1}))
        await bucket.put("gate.job.=all", gone, expected=revision)
        waiting = await job.enqueue(2)
        await until(lambda: _has(line(app), 1))
        limits = Limits(backend)
        assert await limits.leaked() == ["job: rgone"]
        await limits.repair()
        assert await waiting.result(timeout=10) == 2
        await limits.gates.close()


@pytest.mark.parametrize(
    ("limits", "delivery", "message"),
    [
        ([Limit(running=1)], "at_least_once", "belongs to a claim, which at_least_once does not"),
        ([Limit(running=n, name=f"l{n}") for n in (1, 2, 3)], "effectively_once", "at most 2"),
        ([Limit(running=1, per="nobody")], "effectively_once", "not a member of its payload"),
        ([Limit(running=1), Limit(running=1)], "effectively_once", ""),
        (Limit(running=1), "effectively_once", "takes a list"),
    ],
)
async def test_impossible_limits_are_refused_where_they_are_defined(
    limits: Any, delivery: Any, message: str
) -> None:
    """The error says what is wrong with the job and what to do."""
    app = Holdfast("shop")
    if not message:
        app.job(limits=limits, delivery=delivery)(handler)
        assert sorted(app.limits) == ["handler", "handler-2"]
        return
    with pytest.raises(DefinitionError, match=message):
        app.job(limits=limits, delivery=delivery)(handler)


def handler(one: int, two: int) -> None:
    pass


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"running": 0},
        {"running": 1, "starts": "1/s"},
        {"starts": "fast"},
        {"starts": "0/s"},
        {"running": 1, "burst": 2},
        {"running": 1, "when_full": "panic"},
        {"running": True},
        {"running": 1, "name": "a b"},
    ],
)
def test_limit_that_cannot_work_is_refused(wrong: Any) -> None:
    """`Limit(...)` checks its numbers."""
    with pytest.raises(DefinitionError, match=r"^Limit: "):
        Limit(**wrong)
