"""The live view of a bucket: what it hears, what it finds by counting, what it never forgets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from holdfast.broker import Broker, Bucket, Entry
from holdfast.broker.mirror import Mirror
from holdfast.broker.streams import Topology
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.server import Server
from tests.integration.support import until


class Copy:
    """A bucket as a mirror tells of it."""

    def __init__(self, broker: Broker, *, trusting: bool = True) -> None:
        self.values: dict[str, bytes] = {}
        self.deleted = 0
        self.bucket = Bucket(broker, broker.names.schedules)
        self.mirror = Mirror(
            self.bucket, self._take, self._gone, trusting=trusting, on_deleted=self._on_deleted
        )

    def _take(self, entry: Entry) -> None:
        self.values[entry.key] = entry.value

    def _gone(self, key: str) -> None:
        self.values.pop(key, None)

    async def _on_deleted(self) -> None:
        self.deleted += 1


@pytest.fixture
async def broker(nats: Server, namespace: str) -> AsyncIterator[Broker]:
    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with Broker(config) as broker:
        await Topology(broker, RecordConfig()).ensure()
        yield broker


@contextlib.asynccontextmanager
async def following(copy: Copy) -> AsyncIterator[Copy]:
    await copy.mirror.open()
    task = asyncio.create_task(copy.mirror.run())
    try:
        yield copy
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("trusting", [True, False])
async def test_mirror_follows_writes_and_deletions(broker: Broker, trusting: bool) -> None:
    """What was there, what is written, what a marker deletes."""
    bucket = Bucket(broker, broker.names.schedules)
    await bucket.put("old", b"1", expected=0)
    async with following(Copy(broker, trusting=trusting)) as copy:
        assert copy.values == {"old": b"1"}
        revision = await bucket.put("new", b"2", expected=0)
        await until(lambda: copy.values == {"old": b"1", "new": b"2"}, 3, "the write")
        await bucket.remove("new", expected=revision)
        await until(lambda: copy.values == {"old": b"1"}, 3, "the deletion")
        assert copy.mirror.seen == revision + 1


async def test_mirror_ignores_a_forged_notice(broker: Broker) -> None:
    """Without trust in notices, only what is stored counts."""
    bucket = Bucket(broker, broker.names.schedules)
    async with following(Copy(broker, trusting=False)) as copy:
        revision = await bucket.put("key", b"stored", expected=0)
        await until(lambda: copy.values == {"key": b"stored"}, 3, "the write")
        headers = {"Nats-Sequence": str(revision + 1), "Nats-Time-Stamp": "2030-01-01T00:00:00Z"}
        subject = broker.names.changed(bucket.name, "key")
        await broker.publish(subject, b"forged", headers)
        await broker.flush()
        await bucket.put("other", b"2", expected=0)
        await until(lambda: "other" in copy.values, 3, "the next write")
        assert copy.values["key"] == b"stored"


async def test_mirror_finds_what_it_did_not_hear(broker: Broker) -> None:
    """Writes, deletions with a marker and purges without a trace: found by counting."""
    copy = Copy(broker)
    await copy.mirror.open()
    for sub in list(broker._nc._subs.values()):
        if sub.subject.endswith("_schedules.>"):
            await broker.unsubscribe(sub)
    bucket = copy.bucket
    for key in ("a", "b", "c"):
        await bucket.put(key, key.encode(), expected=0)
    await copy.mirror.look()
    assert set(copy.values) == {"a", "b", "c"}
    await bucket.remove_stray("a")
    await copy.mirror.look()
    assert set(copy.values) == {"b", "c"}
    await bucket.delete("b")
    await copy.mirror.look()
    assert set(copy.values) == {"c"}
    await bucket.delete("c")
    await bucket.put("d", b"d", expected=0)
    await copy.mirror.look()
    assert set(copy.values) == {"d"}


async def test_mirror_keeps_what_a_deleted_bucket_held(broker: Broker) -> None:
    """Who follows it decides what to put back; nothing is reported as gone."""
    topology = Topology(broker, RecordConfig())
    copy = Copy(broker)
    await copy.bucket.put("kept", b"1", expected=0)
    await copy.mirror.open()
    await broker.api(f"STREAM.DELETE.{copy.bucket.stream}")
    await topology.ensure()
    await copy.bucket.put("new", b"2", expected=0)
    await copy.mirror.look()
    assert copy.deleted == 1
    assert copy.values == {"kept": b"1", "new": b"2"}
