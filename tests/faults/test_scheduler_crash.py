"""A schedule that was due fires, once, whichever scheduler dies and however."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.server import Server
from tests.faults.processes import until
from tests.faults.scheduling import (
    SchedulerProcess,
    figures,
    leader_of,
    rounds,
    scheduler_fleet,
    ticking,
)

Report = Callable[[str], None]


async def _replace(fleet: list[SchedulerProcess], gone: SchedulerProcess) -> None:
    """Start another in its place, with a log of its own."""
    new = gone.log.with_name(f"{gone.log.stem}x.log")
    fleet[fleet.index(gone)] = gone.successor(new)


@pytest.mark.timeout(600)
async def test_leader_killed_costs_no_slot(
    nats: Server, namespace: str, tmp_path: Path, report: Report
) -> None:
    """kill -9 of the leader, again and again: no slot missed, none twice, 99 % within a second."""
    dice = random.Random(4)
    kills = rounds(3, 20)
    async with ticking(nats, namespace) as ticks:
        with scheduler_fleet(2, nats.url, namespace, tmp_path) as fleet:
            for process in fleet:
                await process.ready()
            await leader_of(fleet)
            began = time.time() + 1
            for _ in range(kills):
                leader = await leader_of(fleet)
                for process in fleet:
                    await process.ready()
                await asyncio.sleep(dice.uniform(0.5, 1.5))
                leader.kill()
                await _replace(fleet, leader)
            await leader_of(fleet)
            end = time.time() + 2
            await ticks.settle(end)
            count, _ = ticks.check(end)
    late, noise = ticks.fired.late(began, end), ticks.noise.allowance
    report(figures(f"leader killed {kills} times (noise {noise:.2f} s)", count, late))
    assert late


async def _terminate(
    fleet: list[SchedulerProcess], turns: int, dice: random.Random, *, leading: bool
) -> None:
    """End the leader, or the other one, and start another in its place, again and again."""
    for _ in range(turns):
        for process in fleet:
            await process.ready()
        leader = await leader_of(fleet)
        await asyncio.sleep(dice.uniform(0.5, 1.5))
        chosen = leader if leading else next(p for p in fleet if p is not leader)
        chosen.signal(signal.SIGTERM)
        assert await chosen.stopped() == 0, chosen.text()
        await _replace(fleet, chosen)


@pytest.mark.timeout(600)
async def test_handover_on_sigterm_is_not_noticed(
    nats: Server, namespace: str, tmp_path: Path, report: Report
) -> None:
    """SIGTERM to the leader costs no slot; how late they were is told beside that of a standby."""
    turns = rounds(3, 20)
    dice = random.Random(5)
    async with ticking(nats, namespace) as ticks:
        with scheduler_fleet(2, nats.url, namespace, tmp_path) as fleet:
            for process in fleet:
                await process.ready()
            quiet = time.time() + 1
            await _terminate(fleet, turns, dice, leading=False)
            busy = time.time()
            await _terminate(fleet, turns, dice, leading=True)
            end = time.time() + 1
            await ticks.settle(end)
            count, _ = ticks.check(end)
    undisturbed = ticks.fired.late(quiet, busy)
    disturbed = ticks.fired.late(busy, end)
    report(figures(f"SIGTERM to a standby {turns} times", len(undisturbed), undisturbed))
    noise = ticks.noise.allowance
    report(
        figures(
            f"SIGTERM to the leader {turns} times (noise {noise:.2f} s)", len(disturbed), disturbed
        )
    )
    assert count
    assert disturbed


@pytest.mark.timeout(300)
async def test_frozen_leader_does_no_harm(
    nats: Server, namespace: str, tmp_path: Path, report: Report
) -> None:
    """SIGSTOP past the lease, then SIGCONT: nothing twice, its late writes refused and counted."""
    freezes = [3.0, 1.0] * rounds(1, 3)  # after its lease, which another has by then
    refused = 0.0
    async with ticking(nats, namespace) as ticks:
        with scheduler_fleet(2, nats.url, namespace, tmp_path, health=True) as fleet:
            for process in fleet:
                await process.ready()
            for freeze in freezes:
                frozen = await leader_of(fleet)
                before = await frozen.metric("holdfast_fenced_writes_total")
                frozen.signal(signal.SIGSTOP)
                await leader_of([p for p in fleet if p is not frozen])
                await asyncio.sleep(freeze)
                frozen.signal(signal.SIGCONT)
                await until(lambda p=frozen: not p.leads, 10, "the zombie standing down")
                refused += await frozen.metric("holdfast_fenced_writes_total") - before
            end = time.time() + 1
            await ticks.settle(end)
            count, late = ticks.check(end)
    title = f"leader frozen {len(freezes)} times, {refused:.0f} late writes refused"
    report(figures(title, count, late))
    assert refused >= len(freezes)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedulers", [3, 5])
async def test_any_number_of_schedulers(
    schedulers: int, nats: Server, namespace: str, tmp_path: Path, report: Report
) -> None:
    """Three and five schedulers at once, one killed: each slot fires once."""
    async with ticking(nats, namespace, fast=20, slow=60) as ticks:
        with scheduler_fleet(schedulers, nats.url, namespace, tmp_path) as fleet:
            for process in fleet:
                await process.ready()
            leader = await leader_of(fleet)
            began = time.time()
            await ticks.settle(began + 1)
            leader.kill()
            await leader_of([p for p in fleet if p is not leader])
            end = time.time() + 3
            await ticks.settle(end)
            count, _ = ticks.check(end)
    late = ticks.fired.late(began, end)
    report(figures(f"{schedulers} schedulers, one killed", count, late))
