"""A fleet of agents converges on a new revision."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.server import Server
from holdfast.settings.canary import Trial
from tests.faults.processes import ROOT
from tests.faults.test_settings_publisher import write_tree
from tests.integration.settings_support import World, world
from tests.support import until

COUNT = 1000 if os.environ.get("HOLDFAST_SOAK") else 60
PROCESSES = 2
BACK_SECONDS = 10.0
"""For a fleet to be on the old snapshot, from the push of a broken one or the rollback on."""


async def test_fleet_converges_on_a_new_revision(
    namespace: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Every agent has it, whole, with its own secret opened; and the old one when it is back."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a thousand hosts, no shared disk
    disk = Path(tempfile.mkdtemp(prefix="holdfast-agents-", dir=place))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server(fast=True))
        stack.callback(shutil.rmtree, disk)
        async with world(server, namespace, tmp_path) as w:
            write_tree(w, 1)
            await w.push(*(f"web{n}" for n in range(COUNT)))
            fleet = [await start(server, namespace, disk, n) for n in range(PROCESSES)]
            try:
                for process in fleet:
                    assert await line(process) == ["ready"]
                for process in fleet:
                    assert (await line(process))[0] == "1"
                for number in (2, 3):
                    write_tree(w, number)
                    began = time.time()
                    await w.push()
                    pushed = time.time()
                    ended = [await line(process) for process in fleet]
                    assert [words[0] for words in ended] == [str(number)] * PROCESSES
                    last = max(float(words[2]) for words in ended)
                    report(
                        f"{COUNT} agents on revision {number}: push {pushed - began:.2f} s, "
                        f"last agent {last - began:.2f} s after the push began"
                    )

                async def told() -> bool:
                    reports = (await w.publisher.store.reports()).values()
                    assert sum(report.refused for report in reports) == 0
                    return [report.number for report in reports].count(3) == COUNT

                await until(told, what="a report of every agent")
                await _taken_back(w, report)
            finally:
                for process in fleet:
                    process.kill()
                    await process.wait()


async def _taken_back(w: World, report: Callable[[str], None]) -> None:
    """A broken file stops at its wave; after that, and after a rollback, all have the old one."""
    [in_force] = {r.manifest for r in (await w.publisher.store.reports()).values()}
    w.write(one="one: {{ facts.missing }}\n")
    wave = [f"web{n}" for n in range(COUNT // 20)]

    async def check(_: Sequence[str]) -> str:
        return ""

    began = time.time()
    _, plan, verdict = await Trial(w.broker, w.publisher, wave, 5.0, check).push(w.folder)
    assert plan.revision
    assert plan.revision.canary
    broken = plan.revision.canary.manifest
    assert verdict
    assert verdict.final.revision
    assert "refused it" in verdict.failure
    seconds = await _everywhere(w, verdict.final.revision.number, in_force, began, broken)
    report(f"a broken file on {len(wave)} of {COUNT} agents: all as before {seconds:.1f} s later")
    assert seconds < BACK_SECONDS
    began = time.time()
    back = await w.publisher.go_back(2)
    assert back.revision
    seconds = await _everywhere(w, back.revision.number, back.revision.manifest, began, in_force)
    report(f"a rollback of {COUNT} agents: all on the old snapshot {seconds:.1f} s later")
    assert seconds < BACK_SECONDS


async def _everywhere(w: World, number: int, manifest: str, began: float, never: str) -> float:
    """Wait until every agent has this manifest in force as this revision; returns how long."""

    async def all_have() -> bool:
        reports = (await w.publisher.store.reports()).values()
        return all((r.number, r.manifest) == (number, manifest) for r in reports)

    assert manifest != never
    await until(all_have, 60, f"revision {number} everywhere")
    return time.time() - began


async def start(server: Server, namespace: str, root: Path, n: int) -> asyncio.subprocess.Process:
    share = COUNT // PROCESSES
    arguments = [server.url, namespace, str(root), str(n * share), str(share)]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.faults.many_agents",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )


async def line(process: asyncio.subprocess.Process) -> list[str]:
    """The next line that a process prints, in words."""
    assert process.stdout
    async with asyncio.timeout(200):
        return (await process.stdout.readline()).decode().split()
