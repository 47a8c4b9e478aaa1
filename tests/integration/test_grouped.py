"""Writes that travel in groups: each still succeeds or fails by its own revision."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from holdfast.broker import Broker, Stored, grouped
from holdfast.broker.grouped import GroupedBucket
from holdfast.broker.streams import Topology
from holdfast.clock import SystemClock
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.errors import BrokerError, Conflict
from holdfast.server import Server

MANY = 150


@contextlib.asynccontextmanager
async def grouping(nats: Server, namespace: str) -> AsyncIterator[GroupedBucket]:
    """A bucket that groups, whatever the server costs."""
    async with Broker(ConnectionConfig(nats_url=nats.url, namespace=namespace)) as broker:
        await Topology(broker, RecordConfig()).ensure()
        yield GroupedBucket(broker, broker.names.runs, grouping=True)


class Pace(SystemClock):
    """Only what a server needs for its writes takes time, however busy this machine is."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that were sent."""
    sizes: list[int] = []
    send = grouped.store_batch  # type: ignore[attr-defined]  # replaced where it is used

    async def counted(broker: Broker, writes: list[Any]) -> object:
        sizes.append(len(writes))
        return await send(broker, writes)

    monkeypatch.setattr(grouped, "store_batch", counted)
    return sizes


async def test_writes_that_gather_leave_together(
    nats: Server, namespace: str, batches: list[int]
) -> None:
    """Each gets its own revision, and a later write may build on it."""
    async with grouping(nats, namespace) as bucket:
        keys = [f"k{n}" for n in range(MANY)]
        first = await asyncio.gather(*(bucket.put(k, b"1", expected=0) for k in keys))
        assert sum(batches) > MANY // 2
        assert len(set(first)) == MANY
        second = await asyncio.gather(
            *(bucket.put(k, b"2", expected=r) for k, r in zip(keys, first, strict=True))
        )
        for key, revision in zip(keys, second, strict=True):
            entry = await bucket.get(key)
            assert entry is not None
            assert (entry.value, entry.revision) == (b"2", revision)


async def test_a_lost_race_is_its_own(nats: Server, namespace: str, batches: list[int]) -> None:
    """One write of a group expects what is no longer there: it alone is refused."""
    async with grouping(nats, namespace) as bucket:
        await bucket.put("taken", b"first", expected=0)
        writes = [bucket.put(f"k{n}", b"1", expected=0) for n in range(MANY)]
        writes.insert(MANY // 2, bucket.put("taken", b"second", expected=0))
        answers = await asyncio.gather(*writes, return_exceptions=True)
        assert batches
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        assert len(refused) == 1
        assert isinstance(refused[0], Conflict)
        assert isinstance(answers[MANY // 2], Conflict)
        entry = await bucket.get("taken")
        assert entry is not None
        assert entry.value == b"first"


async def test_a_refused_batch_goes_one_by_one(
    nats: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with too many batches under way refuses more: nothing is lost."""
    async with grouping(nats, namespace) as bucket:

        async def refuse(*_: object) -> None:
            raise BrokerError("batch publish not possible: too many are under way")

        monkeypatch.setattr(grouped, "store_batch", refuse)
        revisions = await asyncio.gather(
            *(bucket.put(f"k{n}", b"1", expected=0) for n in range(MANY)),
            bucket.put("x", b"", expected=0),
        )
        assert len(set(revisions)) == MANY + 1


async def test_a_cancelled_writer_holds_up_nobody(nats: Server, namespace: str) -> None:
    """Its write may be applied or not; the others are."""
    async with grouping(nats, namespace) as bucket:
        tasks = [bucket.put(f"k{n}", b"1", expected=0) for n in range(MANY)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        kept = [task for n, task in enumerate(tasks) if n % 3]
        assert len(set(await asyncio.gather(*kept))) == len(kept)
        assert await bucket.put("after", b"", expected=0)


async def test_bucket_finds_out_by_its_own_writes(
    nats: Server, namespace: str, batches: list[int], report: Callable[[str], None]
) -> None:
    """It tries both ways under load and keeps one; a few writes at a time try nothing."""
    async with Broker(ConnectionConfig(nats_url=nats.url, namespace=namespace)) as broker:
        await Topology(broker, RecordConfig()).ensure()
        bucket = GroupedBucket(broker, broker.names.runs)
        for n in range(3 * grouped.MEASURED_WRITES):
            await bucket.put(f"single{n}", b"", expected=0)
        assert (bucket.grouping, batches) == (False, [])
        for n in range(8):
            await asyncio.gather(*(bucket.put(f"k{n}.{i}", b"", expected=0) for i in range(MANY)))
        assert batches, "groups were tried"
        report(f"writes go {'in groups' if bucket.grouping else 'one by one'} here")
        count = 3 * grouped.MEASURED_WRITES + 8 * MANY
        assert len([entry async for entry in bucket.entries()]) == count, "nothing else is written"


@pytest.mark.parametrize("synced", [True, False])
async def test_bucket_groups_where_that_is_faster(
    nats: Server, namespace: str, monkeypatch: pytest.MonkeyPatch, synced: bool
) -> None:
    """A server that takes one write at a time, as with a sync for each, is sent groups."""
    clock = Pace()

    async def alone(self: Broker, *write: Any) -> Stored:
        await asyncio.sleep(0)
        clock.now += 0.001 if synced else 0.0  # without a sync they are stored side by side
        return Stored(seq=1)

    def put(self: Broker, *write: Any) -> asyncio.Future[Stored]:
        *rest, over = write
        stored = asyncio.create_task(alone(self, *rest))
        stored.add_done_callback(over)
        return stored

    async def batch(self: GroupedBucket, writes: list[Any]) -> list[int]:
        await asyncio.sleep(0)
        clock.now += 0.002
        return [1] * len(writes)

    monkeypatch.setattr(Broker, "store", alone)
    monkeypatch.setattr(Broker, "put", put)
    monkeypatch.setattr(GroupedBucket, "_batch", batch)
    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with Broker(config, clock=clock) as broker:
        bucket = GroupedBucket(broker, broker.names.runs)
        for _ in range(6):
            await asyncio.gather(*(bucket.put(f"k{i}", b"", expected=0) for i in range(MANY)))
        assert bucket.grouping is synced
