"""A process that only looked dead can do no harm when it wakes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from holdfast import Run
from holdfast.server import Server
from holdfast.status.messages import subject_counts
from tests.faults.app import sender
from tests.faults.conftest import QUICK
from tests.faults.effects import Effects
from tests.faults.processes import until, worker_fleet
from tests.integration.support import client_of


async def test_frozen_worker_changes_nothing(nats: Server, namespace: str, tmp_path: Path) -> None:
    """SIGSTOP past the claim, then SIGCONT: the successor's result stands, nothing doubles."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        with worker_fleet(1, nats.url, namespace, tmp_path, **QUICK) as [frozen]:
            await frozen.ready()
            run = await app.jobs["slow"].enqueue(key="a", seconds=3.0)
            await until(lambda: effects.starts(), what="the first start")
            frozen.signal(signal.SIGSTOP)
            other_root = tmp_path / "other"
            other_root.mkdir()
            (other_root / "effects").symlink_to(tmp_path / "effects")
            with worker_fleet(1, nats.url, namespace, other_root, **QUICK) as [other]:
                winner = await run.result(timeout=40)
                before = await run.status()
                frozen.signal(signal.SIGCONT)
                await until(lambda: "taken over" in frozen.text(), 20, "the zombie noticing")
                after = await run.status()
                assert other.running
                assert frozen.running
    assert before.record == after.record
    assert before.record is not None
    assert before.record.crashes == 1
    assert [e["node"] for e in effects.done()] == [winner]
    epochs = [start["epoch"] for start in effects.starts()]
    assert len(epochs) == 2
    assert epochs[0] < epochs[1]


async def test_frozen_worker_does_not_replace_a_large_result(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Large results are not in the fenced record: those of a replaced holder lie elsewhere."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        with worker_fleet(1, nats.url, namespace, tmp_path, **QUICK) as [frozen]:
            await frozen.ready()
            run = await app.jobs["bulky"].enqueue(key="a", seconds=3.0)
            await until(lambda: effects.starts(), what="the first start")
            frozen.signal(signal.SIGSTOP)
            other_root = tmp_path / "other"
            other_root.mkdir()
            (other_root / "effects").symlink_to(tmp_path / "effects")
            with worker_fleet(1, nats.url, namespace, other_root, **QUICK):
                winner = await run.result(timeout=40)
                frozen.signal(signal.SIGCONT)
                await until(lambda: "taken over" in frozen.text(), 20, "the zombie noticing")
                again = await run.result(timeout=60)
        backend = await client_of(app)
        stream = f"OBJ_{backend.broker.names.objects}"
        kept = (await subject_counts(backend.broker, stream, "$O.*.M.>")).values()
    nodes = [start["node"] for start in effects.starts()]
    assert winner.rstrip(".") == nodes[1]
    assert again == winner
    assert list(kept) == [1], "what the replaced holder stored is gone"


async def test_long_run_starts_once(nats: Server, namespace: str, tmp_path: Path) -> None:
    """A run longer than every time-out in the system is started once, with idle workers around."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        with worker_fleet(2, nats.url, namespace, tmp_path, **QUICK) as fleet:
            for worker in fleet:
                await worker.ready()
            run = await app.jobs["slow"].enqueue(key="a", seconds=7.0)
            await run.result(timeout=30)
    assert len(effects.starts()) == 1


async def test_poison_run_is_stopped_by_the_crash_limit(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """A run that kills its worker is dead-lettered after three crashes; bystanders all finish."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        with worker_fleet(1, nats.url, namespace, tmp_path, **QUICK) as [worker]:
            await worker.ready()
            bad = await app.jobs["poison"].enqueue(how="exit")
            good = await app.jobs["work"].enqueue_many(
                [app.jobs["work"].request(key=str(n), seconds=0.2) for n in range(40)]
            )
            for _ in range(3):
                await until(lambda: not worker.running, 40, "the crash")
                worker.replace()
            await until(lambda: _dead(bad), 40, "the dead letter")
            for run in good:
                assert await run.result(timeout=30) is not None
            assert worker.running
            status = await bad.status()
    assert effects.starts_per_run()[bad.id] == 3
    assert status.crashes == 3
    assert "3 workers died" in status.error


async def test_poison_runs_close_together_kill_no_bystander(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Several runs that kill their workers, one after the other: only they become dead letters.

    Bystanders are in many of the crashes, and on their last chance are executed alone.
    """
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        with worker_fleet(1, nats.url, namespace, tmp_path, **QUICK) as [worker]:
            await worker.ready()
            good = await app.jobs["work"].enqueue_many(
                [app.jobs["work"].request(key=str(n), seconds=1.5) for n in range(6)]
            )
            bad, deaths = [], 0

            async def over() -> bool:
                """Replace a dead worker; send a poison when bystanders are on their last chance."""
                nonlocal deaths
                if not worker.running:
                    deaths += 1
                    worker.replace()
                    if deaths in (2, 4):
                        bad.append(await app.jobs["poison"].enqueue(how="exit"))
                return len(bad) == 3 and all([await _dead(run) for run in bad])

            bad.append(await app.jobs["poison"].enqueue(how="exit"))
            await until(over, 150, "three dead letters")
            for run in good:
                assert await run.result(timeout=60) is not None
            statuses = [await run.status() for run in bad]
    assert [status.crashes for status in statuses] == [3, 3, 3]
    assert {run.id for run in bad} < set(effects.starts_per_run())


async def _dead(run: Run[Any]) -> bool:
    return (await run.status()).state == "dead"
