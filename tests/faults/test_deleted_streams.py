"""Streams and buckets that somebody deletes while everything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.app import Holdfast
from holdfast.broker import Broker, Bucket
from holdfast.broker.streams import BUCKETS, FLEET_BUCKETS, Topology, stream_configs
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.errors import BrokerError, NotFound
from holdfast.names import Names, kv_stream
from holdfast.server import Server
from tests.faults.app import sender
from tests.faults.conftest import QUICK
from tests.faults.effects import Effects
from tests.faults.processes import Process, until, worker_fleet


def connect(url: str, namespace: str) -> Broker:
    return Broker(ConnectionConfig(nats_url=url, namespace=namespace))


async def exists(broker: Broker, stream: str) -> bool:
    try:
        await broker.api(f"STREAM.INFO.{stream}")
    except (NotFound, BrokerError):
        return False
    return True


async def works(app: Holdfast, key: str) -> None:
    """A run that is sent now ends; a send is repeated while its stream is away."""
    run = await app.jobs["work"].enqueue(key=key, seconds=0.0)
    assert await run.result(timeout=60) == key


@pytest.mark.timeout(240)
async def test_deleted_stream_is_made_again_and_work_goes_on(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Whichever stream or bucket is deleted, one that work needs or all the others at once: it is
    back within seconds, what is sent is executed, and no process ends or takes another for lost."""
    names = Names(namespace)
    streams = [c["name"] for c in stream_configs(names, RecordConfig(), 1)]
    streams += [kv_stream(names.bucket(noun)) for noun in FLEET_BUCKETS]
    needed = [names.jobs, *(kv_stream(names.bucket(noun)) for noun in BUCKETS)]
    control = Process(["control"], nats.url, namespace, tmp_path / "control.log", **QUICK)
    try:
        with worker_fleet(1, nats.url, namespace, tmp_path, **QUICK) as [worker]:
            await worker.ready()
            await until(lambda: "dispatching" in control.text(), what="the control roles")
            async with connect(nats.url, namespace) as broker, sender(nats.url, namespace) as app:
                for gone in [*([stream] for stream in needed), sorted({*streams} - {*needed})]:
                    for stream in gone:
                        await broker.api(f"STREAM.DELETE.{stream}")
                    for stream in gone:
                        await until(lambda s=stream: exists(broker, s), what=f"{stream} again")
                    await works(app, gone[0])
            assert worker.running, worker.text()
            assert "is lost" not in control.text()
        assert control.running, control.text()
        assert "does not exist: making it again" in control.text() + worker.text()
    finally:
        control.close()


@pytest.mark.timeout(120)
async def test_run_outlives_the_loss_of_its_record(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """The records are deleted while runs are executed: each ends, was started once, and epochs that
    are won afterwards are higher."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        with worker_fleet(1, nats.url, namespace, tmp_path, **QUICK) as [worker]:
            await worker.ready()
            kept = await app.jobs["held"].enqueue(key="a", gate="open")
            once = await app.jobs["once"].enqueue(key="b", seconds=3.0)
            await until(lambda: len(effects.starts()) == 2, what="both starts")
            async with connect(nats.url, namespace) as broker:
                stream = kv_stream(broker.names.runs)
                await broker.api(f"STREAM.DELETE.{stream}")
                await until(lambda: exists(broker, stream), 30, "the records' bucket")
                bucket = Bucket(broker, broker.names.runs)
                await until(lambda: bucket.get(kept.id), 30, "its record")
                await until(lambda: bucket.get(once.id), 30, "the record of the other")
            effects.open("open")
            await kept.result(timeout=60)
            await once.result(timeout=60)
            await works(app, "c")
    epochs = {start["key"]: start["epoch"] for start in effects.starts()}
    assert len(effects.starts()) == 3
    assert epochs["c"] > max(epochs["a"], epochs["b"])


async def test_sequences_grow_over_a_deletion(nats: Server, namespace: str) -> None:
    """A bucket or queue that is made again begins above all that its predecessor can have had."""
    async with connect(nats.url, namespace) as broker:
        topology = Topology(broker, RecordConfig())
        await topology.ensure()
        names = broker.names
        for stream in (names.jobs, names.events, kv_stream(names.runs), kv_stream(names.leases)):
            before = (await broker.api(f"STREAM.INFO.{stream}"))["state"]["last_seq"]
            await broker.api(f"STREAM.DELETE.{stream}")
            await topology.ensure()
            after = (await broker.api(f"STREAM.INFO.{stream}"))["state"]["first_seq"]
            assert after > before + 100, stream
