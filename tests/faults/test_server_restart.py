"""After the server comes back, work goes on by itself: never connected and deaf."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from holdfast.broker import Broker
from holdfast.config import ConnectionConfig
from holdfast.errors import BrokerError, NotFound
from holdfast.names import consumer
from holdfast.server import Cluster, Server
from tests.faults.app import sender
from tests.faults.effects import Effects
from tests.faults.processes import until, worker_fleet


class Nats(Protocol):
    """One node or three."""

    @property
    def url(self) -> str: ...


def _kill_all(nats: Server | Cluster) -> None:
    for node in _nodes(nats):
        node.kill()


def _start_all(nats: Server | Cluster) -> None:
    for node in _nodes(nats):
        node.start()
    for node in _nodes(nats):
        node.wait_ready()


def _nodes(nats: Server | Cluster) -> list[Server]:
    return nats.nodes if isinstance(nats, Cluster) else [nats]


@contextmanager
def _nats(kind: str, root: Path) -> Iterator[Server | Cluster]:
    if kind == "one node":
        with Server(store=root / "store") as server:
            yield server
    else:
        with Cluster(store=root / "store") as cluster:
            yield cluster


@pytest.mark.timeout(180)
@pytest.mark.parametrize("deleted", [False, True], ids=["kept", "consumer deleted"])
@pytest.mark.parametrize("kind", ["one node", "R3"])
async def test_consumption_resumes_after_restart(
    kind: str,
    deleted: bool,
    tmp_path: Path,
    namespace: str,
    report: Callable[[str], None],
) -> None:
    """kill -9 of every node and a restart: runs are consumed again, the time is reported."""
    effects = Effects(tmp_path / "effects")
    with _nats(kind, tmp_path) as nats:
        async with sender(nats.url, namespace) as app:
            with worker_fleet(1, nats.url, namespace, tmp_path) as [worker]:
                await worker.ready()
                first = await app.jobs["work"].enqueue(key="before", seconds=0.01)
                await first.result(timeout=20)
                _kill_all(nats)
                _start_all(nats)
                led = await _leaders(nats.url, namespace, delete=deleted)
                async with sender(nats.url, namespace) as fresh:
                    run = await _accepted(fresh)
                    accepted = time.monotonic()
                    await until(lambda: effects.count() >= 2, what="consumption after the restart")
                    resumed = time.monotonic()
                    assert await run.result(timeout=60) == "after"
                losses = worker.text().count("connection to NATS lost")
    report(
        f"resumed {resumed - led:.2f} s after leaders, "
        f"{resumed - accepted:.2f} s after the next run was accepted"
    )
    assert 1 <= losses <= len(_nodes(nats))
    assert "Traceback" not in worker.text()
    assert len(effects.starts()) == 2


async def _accepted(app):  # type: ignore[no-untyped-def]
    while True:
        try:
            return await app.jobs["work"].options(key="after").enqueue(key="after", seconds=0.01)
        except BrokerError:
            continue


async def _leaders(url: str, namespace: str, *, delete: bool) -> float:
    """Wait until stream and consumer answer; delete the consumer when asked to."""
    name = consumer("default", "work")
    stream = f"{namespace.upper()}_JOBS"

    async def answers() -> bool:
        try:
            await broker.api(f"CONSUMER.INFO.{stream}.{name}")
            await broker.api(f"STREAM.INFO.KV_{namespace}_runs")
        except NotFound:
            return False
        except BrokerError:
            return False
        return True

    config = ConnectionConfig(nats_url=url, namespace=namespace, request_timeout_seconds=1)
    broker = await _broker(config)
    try:
        await until(answers, 60, "leaders")
        if delete:
            await broker.api(f"CONSUMER.DELETE.{stream}.{name}")
        return time.monotonic()
    finally:
        await broker.close()


async def _broker(config: ConnectionConfig) -> Broker:
    while True:
        broker = Broker(config)
        try:
            await broker.open()
        except BrokerError:
            continue
        return broker
