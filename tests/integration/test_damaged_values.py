"""Damage in places that no role reads: objects, `app.once` and the buckets of taskiq."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from holdfast import Holdfast
from holdfast.broker import Broker
from holdfast.broker.objects import Objects
from holdfast.broker.streams import Topology
from holdfast.client import Client, once
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.errors import ClaimLost, NotFound, Unreadable
from holdfast.integrations.taskiq.slots import SentSlots, TaskiqSlot
from holdfast.names import (
    H_ROLLUP,
    attempts_key,
    encode,
    floor_key,
    kv_subject,
    object_meta,
    sent_key,
)
from holdfast.server import Server
from holdfast.status.unreadable import UnreadableRecords
from tests.faults.damage import DAMAGE
from tests.integration.support import client_of
from tests.integration.taskiq_support import make_broker, receiving
from tests.support import until

FORGED = {
    "wildcard": b'{"name":"x","nuid":">"}',
    "one word": b'{"name":"x","nuid":"*"}',
    "line break": b'{"name":"x","nuid":"a\\nb"}',
    "number": b'{"name":"x","nuid":7}',
    "list": b"[1]",
}
"""Records of objects whose chunks would be those of others, or nobody's."""
LOUD = [kind for kind in DAMAGE if kind not in ("newer", "huge-numbers")]
"""Kinds that no record of `app.once` can be: it has a state of any name, and ignores the rest."""


@pytest.fixture
async def broker(nats: Server, namespace: str) -> AsyncIterator[Broker]:
    async with Broker(ConnectionConfig(nats_url=nats.url, namespace=namespace)) as broker:
        yield broker


@pytest.fixture
async def client(app: Holdfast) -> AsyncIterator[Client]:
    async with app:
        client = await client_of(app)
        yield client


@pytest.mark.parametrize("kind", [*DAMAGE, *FORGED])
async def test_damaged_object_is_none_and_costs_no_other(broker: Broker, kind: str) -> None:
    """It reads as missing, is replaced by the next write, and removed without touching others."""
    objects = Objects(broker)
    await objects.put("bystander", b"kept" * 100_000)
    meta = object_meta(broker.names.objects, "damaged")
    for step in ("put", "delete"):
        await broker.store(meta, (DAMAGE | FORGED)[kind], {H_ROLLUP: "sub"})
        assert not await objects.exists("damaged")
        with pytest.raises(NotFound):
            await objects.get("damaged")
        if step == "put":
            await objects.put("damaged", b"whole again")
            assert await objects.get("damaged") == b"whole again"
        else:
            await objects.delete("damaged")
        assert await objects.get("bystander") == b"kept" * 100_000


@pytest.mark.parametrize("kind", LOUD)
async def test_damaged_record_of_once_is_said_and_removed(
    app: Holdfast, client: Client, kind: str
) -> None:
    """Whether the work is done is unknown: the caller is told, and an operator removes it."""
    bucket = client.broker.names.data(once.BUCKET)
    await client.data(once.BUCKET)
    await client.broker.store(kv_subject(bucket, encode("invoice 7")), DAMAGE[kind])
    with pytest.raises(Unreadable, match="invoice 7"):
        async with app.once("invoice 7"):
            raise AssertionError("entered")
    records = UnreadableRecords(client)
    [found] = [one for one in await records.list() if one.bucket == bucket]
    await records.remove(found.bucket, found.key)
    async with app.once("invoice 7") as first:
        assert first


@pytest.mark.parametrize("kind", LOUD)
async def test_once_whose_record_is_damaged_is_lost(
    app: Holdfast, client: Client, kind: str
) -> None:
    """A holder over whose record somebody wrote does not complete the work."""
    bucket = client.broker.names.data(once.BUCKET)
    guard = app.once("invoice 8")
    await guard.__aenter__()
    await client.broker.store(kv_subject(bucket, encode("invoice 8")), DAMAGE[kind])
    with pytest.raises(ClaimLost):
        await guard.complete()


@pytest.mark.parametrize("kind", DAMAGE)
async def test_damaged_records_of_a_taskiq_queue_stop_nobody(
    nats: Server, namespace: str, broker: Broker, kind: str
) -> None:
    """Attempts and floors that cannot be read count as none; every task is executed."""
    done: list[int] = []
    tasks = make_broker(nats.url, namespace)

    @tasks.task(task_name="count")
    async def count(number: int) -> None:
        done.append(number)
        if done.count(number) == 1:
            raise ValueError("once more")

    await Topology(broker, RecordConfig()).ensure_buckets("taskiq_queues")
    stream, consumer = f"{namespace}_stream", "workers"
    keys = [floor_key(stream, consumer), *(attempts_key(stream, consumer, n) for n in (1, 2))]
    for key in keys:
        await broker.store(kv_subject(broker.names.taskiq_queues, key), DAMAGE[kind])
    async with receiving(tasks):
        for number in (1, 2):
            await count.kiq(number)
        await until(lambda: sorted(done) == [1, 1, 2, 2], 20, "both tasks, twice each")


@pytest.mark.parametrize("kind", DAMAGE)
async def test_damaged_record_of_a_taskiq_schedule_is_replaced(broker: Broker, kind: str) -> None:
    """A record that cannot be read holds no slot back."""
    await Topology(broker, RecordConfig()).ensure_buckets("taskiq_slots")
    key = kv_subject(broker.names.taskiq_slots, sent_key("site", "nightly"))
    await broker.store(key, DAMAGE[kind])
    slots, slot = SentSlots(broker, "site", "node", kept=False), TaskiqSlot("nightly", 120.0, 60)
    await slots.all()
    _, sent = await slots.read(slot)
    assert slot.is_after(sent)
    assert await slots.mark(slot)
    assert await slots.all() == {"nightly": 120.0}
