"""The index of the history, and what it adds up to."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from holdfast import Backoff, Discard, Holdfast
from holdfast.cli.made_up import SLOWER, make_up
from holdfast.client import Client
from holdfast.coordinator import indexer
from holdfast.coordinator.indexer import Indexer
from holdfast.errors import Conflict, OutcomeUnknown
from holdfast.model.job import JobSpec
from holdfast.model.run import RunRecord
from holdfast.names import keyed_run
from holdfast.ownership.history import History, read_head
from holdfast.status import run_index
from holdfast.status.dead import DeadLetters
from holdfast.status.listing import RunFilter, RunPages
from holdfast.status.run_index import EndedIndex
from holdfast.status.totals import Archive, counted
from holdfast.telemetry import Telemetry
from holdfast.worker.counting import Counting
from tests.integration.support import client_of, working
from tests.support import until

SMALL = 50
"""Lines in a block, so that a few hundred runs make several."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "BLOCK_LINES", SMALL)


@pytest.fixture
async def client(app: Holdfast) -> AsyncIterator[Client]:
    async with app:
        found = await client_of(app)
        await found.topology.ensure()
        yield found


_numbers: Iterator[int] = itertools.count()


async def end(client: Client, count: int, **members: Any) -> list[str]:
    """Append the ends of some runs; returns their ids."""
    runs = [f"r{next(_numbers)}" for _ in range(count)]
    for run in runs:
        await client.history.append(run, record(client, **members), b"1")
    return runs


def record(client: Client, state: str = "done", took: float = 1.0, **members: Any) -> RunRecord:
    now = client.broker.server_now()
    times: dict[str, Any] = {"created": now - took - 2, "started": now - took, "ended": now}
    return RunRecord(state, "default", members.pop("job", "work"), **times, **members)


def looks(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the messages that look-ups decode or skip one by one."""
    seen: list[int] = []
    real = History.lines

    def lines(self: History, message: Any, run: str = "") -> Any:
        seen.append(1)
        return real(self, message, run)

    monkeypatch.setattr(History, "lines", lines)
    return seen


async def test_run_is_found_by_the_index(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long history, a look-up reads one message and what is not indexed yet."""
    early = await end(client, 330)
    keyed = keyed_run("default", "work", "invoice:7")
    await client.history.append(keyed, record(client), b"7")
    await Indexer(client.broker, "c1").step()
    late = await end(client, 5)
    head, _ = await read_head(client.broker)
    assert head.indexed < head.counted
    seen = looks(client, monkeypatch)
    for run in (early[0], early[200], early[-1], late[0], keyed):
        seen.clear()
        found = await client.history.find(run)
        assert found is not None
        assert found.run == run
        assert len(seen) < SMALL + 10
    by_key = [line.run async for line in client.history.find_all(keyed.rpartition("/")[2])]
    assert by_key == [keyed]
    assert await client.history.find("r-unknown") is None


async def test_run_that_ended_twice_is_found_with_its_newest_end(client: Client) -> None:
    """One end is indexed, the other not; an instant leaves the older one out."""
    await client.history.append("work/a", record(client, "dead"))
    await end(client, 2 * SMALL)
    await Indexer(client.broker, "c1").step()
    between = client.broker.server_now()
    await client.history.append("work/a", record(client))
    found = await client.history.find("work/a")
    assert found is not None
    assert found.record.state == "done"
    states = [line.record.state async for line in client.history.find_all("work/a")]
    assert states == ["dead", "done"]
    since = [line.record.state async for line in client.history.find_all("work/a", since=between)]
    assert since == ["done"]


async def test_successor_counts_each_run_once(client: Client) -> None:
    """An indexer that stops anywhere, and one that goes on beside it: totals are exact."""
    first, second = Indexer(client.broker, "c1"), Indexer(client.broker, "c2")
    runs = await end(client, 120)
    await first.step()
    await end(client, 30, state="dead")
    await second.step()  # stands by: the first one has just worked
    assert (await read_head(client.broker))[0].by == "c1"
    head, revision = await read_head(client.broker)
    second._head, second._next = head, head.indexed + 1  # as if the first one were long silent
    second._revision = revision
    await second.step()
    assert (await read_head(client.broker))[0].by == "c2"
    first._revision = revision  # awake again: it does not know of the other
    with pytest.raises(Conflict):
        await first._write_head(revision)
    await first.step()
    await end(client, 10)
    await second.step()
    found = await counted(client, 3600)
    assert sum(p.ended.get("done", 0) for p in found.periods) == 130
    assert sum(p.ended.get("dead", 0) for p in found.periods) == 30
    for run in runs:
        assert await client.history.find(run) is not None


async def test_totals_tell_jobs_and_percentiles(client: Client) -> None:
    """Counts by state and job; percentiles to a tenth; hours are sums of minutes."""
    for took in (0.1, 1.0, 10.0):
        await end(client, 33, took=took)
    await end(client, 1, took=100.0)
    await end(client, 5, job="other", state="dead", failures=3)
    await Indexer(client.broker, "c1").step()
    for seconds in (3600, 30 * 86_400):
        found = await counted(client, seconds, job="work")
        merged = [p for p in found.periods if p.ended]
        assert sum(p.ended["done"] for p in merged) == 100
        assert all("dead" not in p.ended for p in merged)
    hours = await counted(client, 30 * 86_400)
    assert sum(p.failures for p in hours.periods) == 15
    if len(hours.periods) == 1:  # unless an hour ended meanwhile
        p50, p95, p99 = (await counted(client, 30 * 86_400, job="work")).periods[0].took
        assert p50 == pytest.approx(1.0, rel=0.2)
        assert p95 == pytest.approx(10.0, rel=0.2)
        assert p99 == pytest.approx(10.0, rel=0.2)


async def test_minutes_and_hours_are_stored_when_they_are_over(client: Client) -> None:
    """What is over is a record of its own; the current period is in the head."""
    await end(client, 3)
    one = Indexer(client.broker, "c1")
    await one.step()
    head, _ = await read_head(client.broker)
    now = head.minute.at
    for later in (60, 3600, 7200):  # as if lines had come then
        await one._turn(now + later)
        one._head.minute.of("default work").ended["done"] = 1
    await one._write_head((await read_head(client.broker))[1])
    minutes = await counted(client, 86_400)
    assert [p.ended["done"] for p in minutes.periods] == [3, 1, 1, 1]
    hours = await counted(client, 7 * 86_400)
    assert sum(p.ended["done"] for p in hours.periods) == 6
    assert len(hours.periods) >= 3


async def test_runs_without_a_record_are_counted(client: Client) -> None:
    """What workers counted is added once, whatever the coordinator does; what is left is kept."""
    telemetry = Telemetry()
    loose = JobSpec("loose", "default", delivery="at_least_once")
    worker = Counting(client.broker, telemetry, "w1", [loose, JobSpec("kept", "default")])
    tally = telemetry.tally("default", "loose")

    def work(count: int) -> None:
        for _ in range(count):
            tally.finish("done", 0.3)
            tally.end("done")
            telemetry.tally("default", "kept").end("done")  # the history tells of those

    work(3)
    tally.end("dead", failures=2)
    await worker.store()
    await end(client, 5)
    first, second = Indexer(client.broker, "c1"), Indexer(client.broker, "c2")
    await first.step()
    work(4)
    await worker.store()
    await worker.store()  # nothing new
    head, second._revision = await read_head(client.broker)
    second._head, second._next = head, head.indexed + 1
    await second.step()
    await first.step()  # stands by
    found = await counted(client, 3600, job="loose")
    assert sum(p.ended["done"] for p in found.periods) == 7
    assert sum(p.ended.get("dead", 0) for p in found.periods) == 1
    assert sum(p.failures for p in found.periods) == 2
    assert found.periods[0].took[0] == pytest.approx(0.5, rel=0.2)  # the bound above 0.3
    assert not (await counted(client, 3600, job="kept")).periods[-1].ended
    assert sum(p.ended["done"] for p in (await counted(client, 3600, job="work")).periods) == 5


async def test_counts_survive_a_lost_answer(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that may have been stored is sent again as the same one."""
    telemetry = Telemetry()
    spec = JobSpec("loose", "default", delivery="at_least_once")
    worker = Counting(client.broker, telemetry, "w1", [spec])
    telemetry.tally("default", "loose").end("done")
    store = client.broker.store

    async def lost(*given: Any) -> Any:
        await store(*given)
        raise OutcomeUnknown("the answer was lost")

    with monkeypatch.context() as patched:
        patched.setattr(client.broker, "store", lost)
        await worker.store()
    telemetry.tally("default", "loose").end("done")
    await worker.store()
    await worker.store()
    await Indexer(client.broker, "c1").step()
    found = await counted(client, 3600, job="loose")
    assert sum(p.ended["done"] for p in found.periods) == 2


async def test_worker_counts_what_leaves_no_record(app: Holdfast) -> None:
    """Runs that are done, dead or discarded; one that is redelivered is in the history instead."""
    tried: list[str] = []

    @app.job(delivery="at_least_once", retry=Backoff.list(["10ms"]))
    async def loose(how: str) -> None:
        tried.append(how)
        if how == "again" and tried.count("again") == 1:
            raise ValueError("once more")
        if how == "bad":
            raise ValueError("no good")
        if how == "drop":
            raise Discard("not wanted")

    @app.job(delivery="at_least_once", retry=Backoff.never())
    async def strict(n: int) -> None:
        raise ValueError("no good")

    async with app:
        for how in ("good", "good", "again", "bad", "drop"):
            await loose.enqueue(how)
        await strict.enqueue(1)
        client = await client_of(app)
        letters = DeadLetters(client)

        async def over() -> bool:
            return len(tried) == 7 and len(await letters.list()) == 2

        async with working(app):
            await until(over, 60, "the end of all runs")
        await Indexer(client.broker, "c1").step()
        ends = (await counted(client, 3600, job="loose")).ends()
        assert ends == {"done": 3, "dead": 1, "cancelled": 1, "failed": 3}
        assert (await counted(client, 3600, job="strict")).ends() == {"dead": 1, "failed": 1}


async def test_damaged_index_hides_nothing(client: Client) -> None:
    """Blocks, totals and a head that cannot be read are passed over."""
    runs = await end(client, 2 * SMALL)
    names = client.broker.names
    for part in (*range(64), "minute", "hour", "head"):
        for body in (b"", b"\xff", b'{"first":1,"last":-1,"entries":"x"}'):
            await client.broker.store(names.indexed(part), body)
    assert (await counted(client, 3600)).periods == []
    await Indexer(client.broker, "c1").step()
    assert await client.history.find(runs[0]) is not None
    assert sum(p.ended["done"] for p in (await counted(client, 3600)).periods) == 2 * SMALL


@pytest.mark.parametrize("most", [1_000, 70])
async def test_index_in_memory_gives_what_the_server_gives(client: Client, most: int) -> None:
    """It follows the history and stays as small as it was told to; lists go on behind it."""
    await end(client, 80)
    index = EndedIndex(client, most)
    index.start()
    try:
        await until(lambda: index.complete, what="an index")
        newest = (await end(client, 30, state="dead"))[-1]
        await until(lambda: index.select(RunFilter(prefix=newest), 1)[0], what="the newest")
        assert len(index) <= most
        for wanted in (RunFilter(), RunFilter(state="dead"), RunFilter(job="work", state="done")):
            assert await listed(client, wanted, index) == await listed(client, wanted, None)
    finally:
        await index.close()


async def test_index_in_memory_keeps_fewer_runs_with_long_errors(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that all fail differently do not outgrow the process; lists go on behind the index."""
    monkeypatch.setattr(run_index, "MOST_ERRORS", 1_000)
    for n in range(20):
        await end(client, 1, state="dead", error=f"{n}".ljust(200, "."))
    index = EndedIndex(client)
    index.start()
    try:
        await until(lambda: index.complete, what="an index")
        newest = (await end(client, 1, state="dead", error="!".ljust(200, ".")))[0]
        await until(lambda: index.select(RunFilter(prefix=newest), 1)[0], what="the newest")
        assert 1 <= len(index) <= 5
        assert len(await listed(client, RunFilter(), index)) == 21
    finally:
        await index.close()


async def listed(client: Client, wanted: RunFilter, index: EndedIndex | None) -> list[str]:
    found: list[str] = []
    cursor = ""
    while True:
        page = await RunPages(client, ends=index).page(wanted, 7, cursor)
        found += [info.run for info in page.runs]
        cursor = page.older
        if not cursor:
            return found


async def test_made_up_history_is_told_apart(client: Client) -> None:
    """The demo's weeks are in the charts and the comparison of weeks, and marked; nothing else."""
    await make_up(client)
    await end(client, 3)
    await Indexer(client.broker, "c1").step()
    month = await counted(client, 30 * 86_400)
    now = client.broker.server_now()
    assert now - 3600 <= month.made_up <= now
    assert month.ends()["done"] > 100_000
    assert not (await counted(client, 3600)).made_up
    changes = await Archive(client).changes()
    assert changes["default", SLOWER].slower > 1.5
    assert changes["default", "charge"].slower < 1.5
