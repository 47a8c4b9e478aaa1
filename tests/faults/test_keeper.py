"""A worker's signs of life do not depend on its event loop, nor on the interpreter's lock."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast import Holdfast, Run
from holdfast.model.lifecycle import may_follow
from holdfast.server import Server
from holdfast.status.nodes import NodeInfo, Nodes
from tests.faults.app import sender
from tests.faults.conftest import QUICK
from tests.faults.effects import Effects
from tests.faults.processes import WorkerProcess, keepers, until, worker_fleet
from tests.faults.test_liveness import coordinators
from tests.integration.support import client_of

BLOCKED_SECONDS = 5
"""Longer than two timeouts of `QUICK`."""


async def nodes_of(app: Holdfast) -> list[NodeInfo]:
    """Every worker, also those that have ended."""
    backend = await client_of(app)
    return await Nodes(backend).list(role="worker", ended=True)


@contextmanager
def another(nats: Server, namespace: str, root: Path, **env: str) -> Iterator[WorkerProcess]:
    """One more worker, with the same effects."""
    other = root / "other"
    other.mkdir()
    (other / "effects").symlink_to(root / "effects")
    with worker_fleet(1, nats.url, namespace, other, **{**QUICK, **env}) as [worker]:
        yield worker


async def start_all(app: Holdfast, effects: Effects, job: str, seconds: int) -> list[Run[object]]:
    """A run that will block its worker, and others beside it, with and without a record."""
    runs: list[Run[object]] = [await app.jobs[job].enqueue(gate="block", seconds=seconds)]
    runs += [await app.jobs["held"].enqueue(key=str(n), gate="end") for n in range(3)]
    runs += [await app.jobs["loose"].enqueue(key=f"l{n}", seconds=seconds + 3) for n in range(3)]
    await until(lambda: len(effects.starts()) == len(runs), what="every start")
    return runs


@pytest.mark.parametrize("job", ["block", "hold_interpreter", "many_threads"])
async def test_blocked_worker_keeps_its_node_and_every_run(
    nats: Server, namespace: str, tmp_path: Path, job: str
) -> None:
    """Past the timeout and `ack_wait`, beside a worker that would take over: nothing is restarted,
    and the node's record names what blocks it."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        with (
            coordinators(1, nats.url, namespace, tmp_path),
            worker_fleet(1, nats.url, namespace, tmp_path, **QUICK) as [worker],
        ):
            await worker.ready()
            runs = await start_all(app, effects, job, BLOCKED_SECONDS)
            with another(nats, namespace, tmp_path) as other:
                await other.ready()
                effects.open("block")
                if job != "many_threads":  # there the loop moves now and then

                    async def named() -> bool:
                        return any(job in node.trouble for node in await nodes_of(app))

                    await until(named, 30, "the culprit in the node's record")
                    assert runs[0].id in worker.text()
                    assert f"in {job}" in worker.text()
                await runs[0].result(timeout=60)
                effects.open("end")
                await until(lambda: effects.count() == len(runs) - 1, 60, "the end of the others")
                assert {node.state for node in await nodes_of(app)} == {"RUNNING"}
    assert set(effects.starts_per_run().values()) == {1}


async def test_computing_runs_start_once_and_cost_no_node(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Plain handlers that compute, on two workers with as many threads as there are cores."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        with (
            coordinators(1, nats.url, namespace, tmp_path),
            worker_fleet(2, nats.url, namespace, tmp_path, **QUICK) as workers,
        ):
            for worker in workers:
                await worker.ready()
            runs = [await app.jobs["compute"].enqueue(key=str(n), seconds=0.1) for n in range(60)]
            for run in runs:
                await run.result(timeout=120)
            assert {node.state for node in await nodes_of(app)} == {"RUNNING"}
    assert set(effects.starts_per_run().values()) == {1}
    assert len(effects.starts()) == 60


async def test_killed_worker_takes_its_keeper_along_and_is_reported_by_it(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """kill -9 of the worker, without a coordinator: its keeper says so, gives back, and ends."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        slow = {**QUICK, "HOLDFAST_LIVENESS_TIMEOUT_SECONDS": "60"}
        with worker_fleet(1, nats.url, namespace, tmp_path, **slow) as [worker]:
            await worker.ready()
            runs = [await app.jobs["held"].enqueue(key=str(n), gate="end") for n in range(3)]
            await until(lambda: len(effects.starts()) == 3, what="the first starts")
            [keeper] = await until(lambda: keepers(worker.pid), what="the keeper")
            with another(nats, namespace, tmp_path, **slow) as other:
                await other.ready()
                worker.kill()
                await until(lambda: len(effects.starts()) == 6, 30, "the runs to start again")
                effects.open("end")
                for run in runs:
                    await run.result(timeout=30)
                gone = [n for n in await nodes_of(app) if n.pid == worker.pid]
                await until(lambda: not Path(f"/proc/{keeper}").exists(), 20, "the keeper's end")
    assert [node.state for node in gone] == ["DISCONNECTED"]
    assert "its keeper saw it end" in gone[0].reason
    assert set(effects.starts_per_run().values()) == {2}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_lost_keeper_loses_nothing(
    nats: Server, namespace: str, tmp_path: Path, number: signal.Signals
) -> None:
    """A keeper that is killed, or does not move: the worker beats itself and starts another."""
    # A keeper that does not move is replaced after two seconds: the node must outlast them.
    patient = {"HOLDFAST_LIVENESS_TIMEOUT_SECONDS": "8"}
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        with (
            coordinators(1, nats.url, namespace, tmp_path),
            worker_fleet(1, nats.url, namespace, tmp_path, **{**QUICK, **patient}) as [worker],
        ):
            await worker.ready()
            run = await app.jobs["held"].enqueue(key="a", gate="end")
            await until(effects.starts, what="the first start")
            [keeper] = await until(lambda: keepers(worker.pid), what="the keeper")
            with another(nats, namespace, tmp_path) as other:
                await other.ready()
                os.kill(keeper, number)

                def replaced() -> bool:
                    return bool(found := keepers(worker.pid)) and keeper not in found

                await until(replaced, 60, "another keeper")
                effects.open("end")
                await run.result(timeout=30)
                assert {node.state for node in await nodes_of(app)} == {"RUNNING"}
    assert set(effects.starts_per_run().values()) == {1}


async def test_worker_blocked_for_too_long_is_ended_and_only_the_culprit_counts_a_crash(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """ERROR with the culprit in the node's history, then SIGKILL; bystanders start again with no
    crash of theirs."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        limit = {"HOLDFAST_WORKER_BLOCKED_SECONDS": "3"}
        with (
            coordinators(1, nats.url, namespace, tmp_path),
            worker_fleet(1, nats.url, namespace, tmp_path, **QUICK, **limit) as [worker],
        ):
            await worker.ready()
            culprit = await app.jobs["block"].enqueue(gate="block", seconds=3600)
            others = [await app.jobs["held"].enqueue(key=str(n), gate="end") for n in range(3)]
            await until(lambda: len(effects.starts()) == 4, what="every start")
            effects.open("block")
            assert await worker.stopped(60) == -signal.SIGKILL
            backend = await client_of(app)
            [node] = [n for n in await nodes_of(app) if n.pid == worker.pid]
            with another(nats, namespace, tmp_path, **limit):
                effects.open("end")
                for run in (culprit, *others):
                    await run.result(timeout=60)
                history = await Nodes(backend).history(node.id)
                [errored] = [step for step in history if step.after == "ERROR"]
                records = [(await run.status()).record for run in (culprit, *others)]
    assert culprit.id in errored.reason
    assert "block" in errored.reason
    assert all(may_follow(step.before, step.after) for step in history)
    assert [record.crashes for record in records if record] == [1, 0, 0, 0]
