"""A process that died is noticed, and its work goes on elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, Run
from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.errors import RunLost
from holdfast.model.liveness import PROFILES
from holdfast.server import Server
from holdfast.status.dead import DeadLetters
from holdfast.status.nodes import Nodes
from tests.faults.app import sender
from tests.faults.conftest import QUICK
from tests.faults.effects import Effects
from tests.faults.processes import Process, WorkerProcess, until, worker_fleet
from tests.faults.proxy import Proxy

KILLS = int(os.environ.get("HOLDFAST_TEST_KILLS", "5"))
IN_FLIGHT = 10


@contextmanager
def coordinators(count: int, url: str, namespace: str, root: Path) -> Iterator[list[Process]]:
    """Several coordinators, gone afterwards."""
    found = [
        Process(["coordinator"], url, namespace, root / f"coordinator-{n}.log")
        for n in range(count)
    ]
    try:
        yield found
    finally:
        for process in found:
            process.close()


async def _watching(processes: list[Process]) -> None:
    for process in processes:
        await until(lambda p=process: "watching" in p.text(), what="a coordinator")


@pytest.mark.timeout(300)
async def test_killed_worker_is_recovered_within_seconds(
    nats: Server, namespace: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """kill -9 with 10 runs in flight, again and again: all restarted, higher epoch, effect once."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        gaps: list[float] = []
        with coordinators(2, nats.url, namespace, tmp_path) as judges:
            await _watching(judges)
            victim = _worker(nats.url, namespace, tmp_path)
            try:
                for kill in range(KILLS):
                    await victim.ready()
                    runs = await _ten_in_flight(app, effects, kill)
                    victim, dead = _worker(nats.url, namespace, tmp_path), victim
                    await victim.ready()
                    killed = time.time()
                    dead.kill()
                    effects.open(f"gate-{kill}")
                    for run in runs:
                        await run.result(timeout=40)
                    again = [s for s in effects.starts() if s["at"] > killed]
                    assert {start["run"] for start in again} == {run.id for run in runs}
                    gaps += [start["at"] - killed for start in again]
            finally:
                victim.close()
    starts = effects.starts_per_run()
    report(
        f"{KILLS} kills, {len(gaps)} runs restarted: median {statistics.median(gaps):.2f} s, "
        f"max {max(gaps):.2f} s after the kill"
    )
    assert len(gaps) == KILLS * IN_FLIGHT
    assert len(effects.done()) == KILLS * IN_FLIGHT
    assert all(count <= 2 for count in starts.values())
    _epochs_grow(effects)


@pytest.mark.timeout(200)
async def test_messages_without_a_claim_are_given_back_too(
    nats: Server, namespace: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Runs without a record, and those that waited for a slot, do not wait for `ack_wait`."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        patience = {"HOLDFAST_WORKER_ACK_WAIT_SECONDS": "600", "HOLDFAST_WORKER_CONCURRENCY": "4"}
        with coordinators(1, nats.url, namespace, tmp_path) as judges:
            await _watching(judges)
            with worker_fleet(1, nats.url, namespace, tmp_path, **patience) as [victim]:
                await victim.ready()
                loose = app.jobs["loose"]
                await loose.enqueue_many([loose.request(key=str(n), seconds=5.0) for n in range(4)])
                await until(lambda: len(effects.starts()) == 4, 20, "all in flight")
                await _past_initial_delay(nats.url, namespace)
                killed = time.time()
                victim.kill()
                victim.replace()
                await until(lambda: len(effects.starts()) == 8, 60, "new starts")
    late = [start["at"] - killed for start in effects.starts()[4:]]
    report(f"4 runs without a record started again {max(late):.2f} s after the kill")
    assert set(effects.starts_per_run().values()) == {2}


def _worker(url: str, namespace: str, root: Path) -> WorkerProcess:
    log = root / f"worker-{time.monotonic_ns()}.log"
    return WorkerProcess(url, namespace, root / "effects", log)


async def _ten_in_flight(app: Holdfast, effects: Effects, kill: int) -> list[Run[Any]]:
    before = len(effects.starts())
    held = app.jobs["held"]
    runs = await held.enqueue_many(
        [held.request(key=f"{kill}-{n}", gate=f"gate-{kill}") for n in range(IN_FLIGHT)]
    )
    await until(lambda: len(effects.starts()) == before + IN_FLIGHT, 20, "all in flight")
    return runs


def _epochs_grow(effects: Effects) -> None:
    last: dict[str, int] = {}
    for start in effects.starts():
        assert start["epoch"] > last.get(start["run"], 0)
        last[start["run"]] = start["epoch"]


async def _states(url: str, namespace: str) -> dict[str, str]:
    async with _client(url, namespace) as client:
        return {n.id: n.state for n in await Nodes(client).list(ended=True)}


async def _past_initial_delay(url: str, namespace: str) -> None:
    """Wait until every node may be judged."""
    async with _client(url, namespace) as client:

        async def judged() -> bool:
            found = await Nodes(client).list()
            return all(n.uptime_seconds > PROFILES["lan"].initial_delay_seconds for n in found)

        await until(judged, what="nodes that may be judged")


@asynccontextmanager
async def _client(url: str, namespace: str) -> AsyncIterator[Client]:
    async with Broker(ConnectionConfig(nats_url=url, namespace=namespace)) as broker:
        yield Client(broker, RecordConfig())


async def test_restart_strategies_are_kept(
    nats: Server, namespace: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """A killed worker's runs: `after_grace` waits for the grace, `never` is not run again."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        grace = {"HOLDFAST_LIVENESS_GRACE_SECONDS": "6"}
        with (
            coordinators(2, nats.url, namespace, tmp_path) as judges,
            worker_fleet(1, nats.url, namespace, tmp_path, **grace) as [worker],
        ):
            await _watching(judges)
            await worker.ready()
            names = ("patient", "fragile", "once", "slow")
            runs = {n: await app.jobs[n].enqueue(key=n, seconds=2.0) for n in names}
            await until(lambda: len(effects.starts()) == 4, what="four starts")
            killed = time.time()
            worker.replace()
            await until(lambda: len(effects.starts()) == 6, 40, "two restarts")
            for name in ("fragile", "once"):
                with pytest.raises(RunLost):
                    await runs[name].result(timeout=20)
            await runs["patient"].result(timeout=20)
            await runs["slow"].result(timeout=20)
            async with _client(nats.url, namespace) as client:
                dead = DeadLetters(client)
                letters = list(await dead.list())
                bodies = [await dead.body(letter.id) for letter in letters]
    again = {s["key"]: s["at"] - killed for s in effects.starts()[4:]}
    report(f"started again after {again}")
    assert set(again) == {"patient", "slow"}
    assert again["patient"] >= 6
    assert sorted(letter.job for letter in letters) == ["fragile", "once"]
    assert all(letter.reason == "lost" for letter in letters)
    assert all(b"2.0" in body for body in bodies)


async def test_frozen_node_stops_itself(nats: Server, namespace: str, tmp_path: Path) -> None:
    """SIGSTOP past the timeout, then SIGCONT: it is DISCONNECTED, says why, and exits by itself."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        other_root = tmp_path / "other"
        other_root.mkdir()
        (other_root / "effects").symlink_to(tmp_path / "effects")
        with (
            coordinators(2, nats.url, namespace, tmp_path) as judges,
            worker_fleet(1, nats.url, namespace, tmp_path, **QUICK) as [frozen],
        ):
            await _watching(judges)
            await frozen.ready()
            run = await app.jobs["slow"].enqueue(key="a", seconds=3.0)
            await until(lambda: effects.starts(), what="the start")
            frozen.signal(signal.SIGSTOP)
            with worker_fleet(1, nats.url, namespace, other_root, **QUICK) as [other]:
                await run.result(timeout=40)
                before = (await run.status()).record
                states = await _states(nats.url, namespace)
                frozen.signal(signal.SIGCONT)
                code = await frozen.stopped()
                assert (await run.status()).record == before
                assert other.running
    assert code == 1
    assert [s for n, s in states.items() if f"-{frozen.pid}-" in n] == ["DISCONNECTED"]
    text = frozen.text()
    assert "this node was declared" in text
    assert "this process was frozen for" in text
    assert "Traceback" not in text
    assert len(effects.starts()) == 2
    assert len(effects.done()) == 1


async def test_restart_of_nats_and_short_cut_lose_nobody(tmp_path: Path, namespace: str) -> None:
    """A NATS restart and a network cut of one second: no node is lost, nothing is run again."""
    effects = Effects(tmp_path / "effects")
    with Server(store=tmp_path / "store") as server:
        async with sender(server.url, namespace) as app, Proxy(server.port) as proxy:
            with (
                coordinators(2, server.url, namespace, tmp_path) as judges,
                worker_fleet(2, proxy.url, namespace, tmp_path) as fleet,
            ):
                await _watching(judges)
                for worker in fleet:
                    await worker.ready()
                slow = app.jobs["slow"]
                runs = await slow.enqueue_many(
                    [slow.request(key=str(n), seconds=12.0) for n in range(8)]
                )
                await until(lambda: len(effects.starts()) == 8, what="eight starts")
                await _past_initial_delay(server.url, namespace)
                await proxy.cut(1.0)
                await until(lambda: all("again" in w.text() for w in fleet), what="reconnects")
                server.kill()
                await asyncio.to_thread(server.restart)
                await until(lambda: all(w.text().count("again") >= 2 for w in fleet), 30)
                for run in runs:
                    await run.result(timeout=40)
                states = await _states(server.url, namespace)
    assert len(effects.starts()) == 8
    assert set(states.values()) == {"RUNNING"}
    assert not any("lost:" in judge.text() for judge in judges)


async def test_ended_node_is_finished_and_its_history_kept(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """SIGTERM: TERMINATED_GRACEFULLY, then NOT_RUNNING and INACTIVE, each step with its reason."""
    with coordinators(2, nats.url, namespace, tmp_path) as judges:
        await _watching(judges)
        with worker_fleet(1, nats.url, namespace, tmp_path) as [worker]:
            await worker.ready()
            worker.signal(signal.SIGTERM)
            assert await worker.stopped() == 0
            pid = worker.pid
        async with _client(nats.url, namespace) as client:
            nodes = Nodes(client)

            async def inactive() -> str:
                found = await nodes.list(role="worker", ended=True)
                return next((n.id for n in found if n.pid == pid and n.state == "INACTIVE"), "")

            node = await until(inactive, 20, "INACTIVE")
            history = await nodes.history(node)
    assert [step.after for step in history] == [
        "CREATED",
        "RUNNING",
        "TERMINATING",
        "TERMINATED_GRACEFULLY",
        "NOT_RUNNING",
        "INACTIVE",
    ]
    assert all(step.reason or step.after == "CREATED" for step in history)


async def test_lost_node_is_disconnected_by_one_coordinator_only(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """With several coordinators a killed node is DISCONNECTED once, for its whole grace period."""
    with coordinators(4, nats.url, namespace, tmp_path) as judges:
        await _watching(judges)
        with worker_fleet(4, nats.url, namespace, tmp_path) as fleet:
            for worker in fleet:
                await worker.ready()
            async with _client(nats.url, namespace) as client:
                nodes = Nodes(client)
                await _past_initial_delay(nats.url, namespace)
                for worker in fleet:
                    worker.kill()

                async def all_lost() -> bool:
                    found = await nodes.list(role="worker", ended=True)
                    return all(n.state == "DISCONNECTED" for n in found)

                await until(all_lost, 20, "every node DISCONNECTED")
                found = await nodes.list(role="worker", ended=True)
                histories = [await nodes.history(node.id) for node in found]
    assert len(histories) == 4
    for history in histories:
        assert [step.after for step in history] == ["CREATED", "RUNNING", "DISCONNECTED"]
