"""`holdfast worker` as a process: signals, exit codes, several processes behind one port."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.process import SAME_SECONDS
from holdfast.server import Server
from tests.integration import gate_app
from tests.integration.command import (
    Command,
    Gates,
    ask,
    free_port,
    gone,
    ready,
    watched,
    worker,
)
from tests.integration.support import record_of
from tests.support import until

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a death signal")


@asynccontextmanager
async def sending(server: Server, namespace: str) -> AsyncIterator[Holdfast]:
    """The app of the gates, to send runs with."""
    sender = Holdfast("gates", nats_url=server.url, namespace=namespace)
    for job in gate_app.app.jobs.values():
        sender.job(name=job.name, group=job.spec.group)(job.func)
    async with sender:
        yield sender


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path)


async def test_worker_finishes_what_runs_on_sigterm(
    nats: Server, namespace: str, tmp_path: Path, gates: Gates
) -> None:
    """A run in flight at SIGTERM is finished, its result is kept, and the exit code is 0."""
    async with sending(nats, namespace) as app:
        with worker(app, tmp_path) as process:
            run = await app.enqueue("gate", "a")
            await gates.started("a")
            process.signal(signal.SIGTERM)
            await process.says("stopping: 1 running")
            gates.open("a")
            assert await process.ended() == 0
            assert await run.result(60) == process.pid
            record = await record_of(app, run.id)
    assert record is not None
    assert [a.outcome for a in record.attempts] == ["done"]


async def test_worker_gives_back_what_outlasts_the_grace(
    nats: Server, namespace: str, tmp_path: Path, gates: Gates
) -> None:
    """What cannot finish in time goes back uncounted, and another worker completes it."""
    async with sending(nats, namespace) as app:
        with worker(app, tmp_path, "--grace", "100ms") as first:
            run = await app.enqueue("gate", "a")
            await gates.started("a")
            first.signal(signal.SIGINT)
            assert await first.ended() == 0
        record = await record_of(app, run.id)
        assert record is not None
        assert (record.failures, record.crashes) == (0, 0)
        assert [a.outcome for a in record.attempts] == ["given_back"]
        gates.open("a")
        with worker(app, tmp_path) as second:
            assert await run.result(60) == second.pid


async def test_worker_exits_at_once_on_a_second_signal(
    nats: Server, namespace: str, tmp_path: Path, gates: Gates
) -> None:
    """Told twice, it does not wait for its runs: exit code 128 + signal."""
    async with sending(nats, namespace) as app:
        with worker(app, tmp_path) as process:
            await app.enqueue("gate", "a")
            await gates.started("a")
            process.signal(signal.SIGTERM)
            await process.says("stopping: 1 running")
            await asyncio.sleep(SAME_SECONDS)  # else it is the same one
            process.signal(signal.SIGINT)
            assert await process.ended(5) == 128 + signal.SIGINT


async def test_worker_ends_after_max_runs(nats: Server, namespace: str, tmp_path: Path) -> None:
    """One process alone ends well after its share of runs, for an orchestrator to replace it."""
    async with sending(nats, namespace) as app:
        runs = [await app.enqueue("quick", n) for n in range(3)]
        with worker(app, tmp_path, "--max-runs", "3") as process:
            assert await process.ended() == 0
        assert [await run.result(1) for run in runs] == [0, 1, 2]


async def test_worker_tells_a_lost_connection_in_one_line(
    namespace: str, tmp_path: Path, gates: Gates
) -> None:
    """The connection says two things of a server's restart, lost and again; work goes on."""
    with Server(fast=True) as server:
        async with sending(server, namespace) as app:
            with worker(app, tmp_path) as process:
                await process.says("up to 100 at a time")
                server.restart()
                await process.says("connected to NATS again")
                run = await app.enqueue("quick", 7)
                assert await run.result(30) == 7
                process.signal(signal.SIGTERM)
                assert await process.ended() == 0
                lines = [line for line in process.text.splitlines() if " broker: " in line]
    assert sum("lost" in line for line in lines) == 1, process.text
    assert sum("again" in line for line in lines) == 1, process.text
    assert "Traceback" not in process.text


@pytest.mark.parametrize("processes", ["1", "3"])
async def test_worker_without_a_job_in_the_group_says_so_once(
    nats: Server, namespace: str, tmp_path: Path, processes: str
) -> None:
    """A configuration that cannot work ends at once, with one sentence, however many processes."""
    async with sending(nats, namespace) as app:
        with worker(app, tmp_path, "--group", "none", "--processes", processes) as process:
            assert await process.ended() == 1
    assert process.text.count("has no job in group 'none': its groups are default, other") == 1


async def test_processes_are_one_worker_to_the_outside(
    nats: Server, namespace: str, tmp_path: Path, gates: Gates
) -> None:
    """One port: ready when all are; every process's metrics, each metric described once.

    A process that was killed is named there, replaced, and its run is completed by another.
    """
    port = free_port()
    flags = ("--processes", "3", "--health-port", str(port))
    async with sending(nats, namespace) as app:
        with worker(app, tmp_path, *flags) as supervisor:
            found = await ready(port)
            pids = [one["pid"] for one in found["processes"]]
            assert len(set(pids)) == 3
            await _check_metrics(port)
            run = await app.enqueue("gate", "a")
            (victim,) = await gates.started("a")
            os.kill(victim, signal.SIGKILL)
            await _check_unready(port, pids.index(victim))
            gates.open("a")
            assert await run.result(30) != victim
            assert victim not in [one["pid"] for one in (await ready(port))["processes"]]
            supervisor.signal(signal.SIGTERM)
            assert await supervisor.ended() == 0
    assert supervisor.text.count("ended, killed by signal 9: started again in 0.2 s") == 1


async def _check_metrics(port: int) -> None:
    status, text = await ask(port, "/metrics")
    assert status == 200
    for number in range(3):
        assert f'holdfast_attempts_running{{process="{number}"}} 0.0' in text
    described = [line for line in text.splitlines() if line.startswith("# HELP")]
    assert len(described) == len(set(described)) > 10


async def _check_unready(port: int, number: int) -> None:
    async def problem() -> bool:
        status, body = await ask(port, "/health/ready")
        return status == 503 and f"process {number}: " in body

    await until(problem, 10, "a problem that names the process")
    assert (await ask(port, "/health/live"))[0] == 200


async def test_processes_are_replaced_after_max_runs(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """A process that has done its share is replaced, and no run is lost on the way."""
    async with sending(nats, namespace) as app:
        flags = ("--processes", "2", "--concurrency", "1", "--max-runs", "4")
        with worker(app, tmp_path, *flags) as supervisor:
            runs = [await app.enqueue("quick", n) for n in range(12)]
            assert [await run.result(40) for run in runs] == list(range(12))
            await supervisor.says("has done its share of runs: replaced", count=2)
            supervisor.signal(signal.SIGTERM)
            assert await supervisor.ended() == 0
    assert "killed by signal" not in supervisor.text


@linux_only
@pytest.mark.parametrize("how", ["second signal", "kill -9"])
async def test_processes_do_not_outlive_their_supervisor(
    nats: Server, namespace: str, tmp_path: Path, gates: Gates, how: str
) -> None:
    """Told twice, or killed outright: no process is left behind, not even a busy one."""
    async with sending(nats, namespace) as app:
        with worker(app, tmp_path, "--processes", "2") as supervisor:
            await app.enqueue("gate", "a")
            await gates.started("a")
            with watched(*await supervisor.children()) as children:
                assert children
                if how == "kill -9":
                    supervisor.signal(signal.SIGKILL)
                else:
                    supervisor.signal(signal.SIGTERM)
                    await supervisor.says("stopping: 1 running")
                    await asyncio.sleep(SAME_SECONDS)  # else it is the same one
                    supervisor.signal(signal.SIGTERM)
                    assert await supervisor.ended(5) == 128 + signal.SIGTERM
                await gone(children)


async def test_signal_that_comes_twice_at_once_is_one(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """`timeout` signals a process and then its group: that is a drain, not an exit."""
    async with sending(nats, namespace) as app:
        with worker(app, tmp_path) as process:
            await process.says("at a time")
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGINT)
            assert await process.ended() == 0


async def test_worker_with_a_failing_hook_shows_where(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """An error of the user's own, at start, is shown with its traceback; exit code 1."""
    (tmp_path / "hooked.py").write_text(
        "from holdfast import Holdfast\n"
        f"app = Holdfast('hooked', nats_url={nats.url!r}, namespace={namespace!r})\n"
        "@app.job\nasync def nothing() -> None: ...\n"
        "@app.on_startup\ndef connect() -> None:\n    raise OSError('no database')\n"
    )
    with Command("worker", "hooked:app", folder=tmp_path, cwd=tmp_path) as process:
        assert await process.ended() == 1
    assert "in connect" in process.text
    assert "OSError: no database" in process.text
