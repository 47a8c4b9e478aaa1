"""Workers inside a test, and helpers to inspect what they leave on the server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import nats
from nats.aio.client import Client as RawClient
from nats.js import JetStreamContext

from holdfast import Holdfast, Worker
from holdfast.broker import Broker
from holdfast.broker.kv import direct_batch
from holdfast.client import Client
from holdfast.config import RecordConfig, WorkerConfig
from holdfast.errors import NotFound
from holdfast.model import run as runs
from holdfast.model.run import RunRecord
from holdfast.names import Names, consumer
from holdfast.server import Server
from tests.support import running, until


class Seen(list[Any]):
    """What handlers reported, in order, with a way to wait for it."""

    async def wait(self, count: int = 1, limit: float = 10.0) -> Seen:
        """Wait until there are at least `count` reports."""
        await until(lambda: len(self) >= count, limit, f"{count} reports; there are {list(self)}")
        return self


HURRIED: dict[str, Any] = {"ack_wait_seconds": 1.0, "extend_seconds": 0.3}
"""For `working`: what a worker held when it vanished is delivered again after a second, not after
five. The first worker of a job decides."""


@contextlib.asynccontextmanager
async def working(
    app: Holdfast, *, records: RecordConfig | None = None, health_path: str = "", **config: Any
) -> AsyncIterator[Worker]:
    """One worker of an app on the test's loop: pulling when the block begins, drained after it."""
    worker = Worker(app, WorkerConfig(**config), records=records, health_path=health_path)
    async with running(worker, lambda: worker.pulling):
        yield worker


@contextlib.asynccontextmanager
async def raw(server: Server) -> AsyncIterator[tuple[RawClient, JetStreamContext]]:
    """A plain nats-py connection, as any other client would have."""
    connection = await nats.connect(server.url)
    try:
        yield connection, connection.jetstream()
    finally:
        await connection.close()


async def client_of(app: Holdfast) -> Client:
    """The app's client, connected."""
    client = await app.backend()
    assert isinstance(client, Client)
    return client


@contextlib.asynccontextmanager
async def operating(app: Holdfast) -> AsyncIterator[Client]:
    """The namespace with its streams, and no worker yet."""
    async with app:
        client = await client_of(app)
        await client.topology.ensure()
        yield client


async def broker_of(app: Holdfast) -> Broker:
    """The app's connection."""
    backend = await client_of(app)
    return backend.broker


async def record_of(app: Holdfast, run: str) -> RunRecord | None:
    """A run's record as it is stored."""
    backend = await app.backend()
    return await backend.read(run)


async def all_records(app: Holdfast) -> dict[str, RunRecord]:
    """Every stored record."""
    backend = await client_of(app)
    return {e.key: runs.decode(e.value) async for e in backend.runs.entries()}


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter as it is stored."""

    subject: str
    body: bytes
    headers: dict[str, str]

    def story(self, header: str) -> Any:
        """A header that carries JSON."""
        return json.loads(self.headers[header])


async def dead_letters(app: Holdfast) -> list[DeadLetter]:
    """Every dead letter of the namespace."""
    broker = await broker_of(app)
    names = broker.names
    pattern = f"{names.namespace}.dead.>"
    return [
        DeadLetter(m.headers["Nats-Subject"], m.body, m.headers)
        async for m in direct_batch(broker, names.dead, pattern)
    ]


async def dead_letter(app: Holdfast, limit: float = 10.0) -> DeadLetter:
    """The one dead letter, once it is stored."""
    found = await until(lambda: dead_letters(app), limit, "a dead letter")
    assert len(found) == 1, found
    letter: DeadLetter = found[0]
    return letter


async def parked(app: Holdfast) -> list[DeadLetter]:
    """Every parked message."""
    broker = await broker_of(app)
    names = broker.names
    pattern = f"{names.namespace}.later.>"
    return [
        DeadLetter(m.headers["Nats-Subject"], m.body, m.headers)
        async for m in direct_batch(broker, names.jobs, pattern)
    ]


async def consumer_info(
    app: Holdfast, job: str, event: str = "", group: str = ""
) -> dict[str, Any]:
    """The server's info about a job's consumer."""
    broker = await broker_of(app)
    stream = broker.names.events if event else broker.names.jobs
    name = consumer(group or app.jobs[job].spec.group, job, event)
    return await broker.api(f"CONSUMER.INFO.{stream}.{name}")


async def lag(app: Holdfast, job: str, event: str = "") -> int:
    """What KEDA would see: pending and not yet acknowledged."""
    info = await consumer_info(app, job, event)
    return int(info["num_pending"] + info["num_ack_pending"])


async def queue_empty(app: Holdfast) -> bool:
    """Whether no run's message is left, waiting or in flight."""
    broker = await broker_of(app)
    names: Names = broker.names
    info = await broker.api(
        f"STREAM.INFO.{names.jobs}", {"subjects_filter": f"{names.namespace}.job.>"}
    )
    return not info["state"].get("subjects")


async def exists(app: Holdfast, stream: str) -> bool:
    """Whether a stream exists."""
    broker = await broker_of(app)
    try:
        await broker.api(f"STREAM.INFO.{stream}")
    except NotFound:
        return False
    return True


def metric(worker: Worker, name: str, **labels: str) -> float:
    """A metric's value; 0 when it was never set."""
    return worker.telemetry.registry.get_sample_value(name, labels) or 0.0
