"""A fleet of thousands: every agent has its own connection and login, many share a process.

    python -m benchmarks.fleet --agents 10000 --processes 4

Measures dispatch, returns, a killed dispatcher, the idle cost, a settings push and its rollback, a
process of agents that is frozen for a while, a restart of NATS and a target over 100,000 sets of
facts, and prints one line for each. Everything runs on this machine, so agents, dispatchers and
server share its cores; on real hosts only the dispatchers and the server would. Files are in
memory, as if every host had a disk of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fleet_stage import Stage, cpu, say
from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.client.fleet import Fleet, new_run
from holdfast.config import RecordConfig
from holdfast.errors import TryAgain
from holdfast.model.fleet import FleetRequest, FleetRun
from holdfast.model.target import parse
from holdfast.settings.publisher import Publisher
from holdfast.settings.sealing import Sealer
from holdfast.status.fleet import FleetStatus

RUNS = 3
FROZEN_SECONDS = 8.0
FACT_SETS = 100_000

# ---- measures


class Followed:
    """One run as its sender saw it."""

    def __init__(self) -> None:
        self.sent = time.time()
        self.claimed = 0.0
        self.times: list[float] = []
        self.record: FleetRun | None = None

    async def follow(
        self, fleet: Fleet, request: FleetRequest, claimed: Callable[[FleetRun], None] | None = None
    ) -> Followed:
        async for found in fleet.follow(request):
            if isinstance(found, FleetRun):
                if not self.claimed and claimed:
                    claimed(found)
                self.claimed = self.claimed or time.time() - self.sent
                self.record = found
            else:
                self.times.append(time.time() - self.sent)
        self.times.sort()
        return self

    def text(self) -> str:
        assert self.record
        times, count = self.times, len(self.times)
        if not times:
            return f"{self.record.status}, nothing returned of {len(self.record.targets)}"
        return (
            f"{self.record.status}, {count} of {len(self.record.targets)} returned: "
            f"p50 {times[count // 2]:.2f} s, p99 {times[int(count * 0.99)]:.2f} s, "
            f"last {times[-1]:.2f} s"
        )


def _request(function: str, *args: Any, timeout: float = 60.0) -> FleetRequest:
    return FleetRequest(new_run(), "*", function, args, timeout=timeout, user="benchmark")


async def measure(stage: Stage) -> None:
    """Print the figures."""
    async with stage.operator() as broker:
        fleet = Fleet(broker)
        while len(await fleet.resolve("*")) < stage.agents:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.5)
        for number in range(RUNS):
            disturbance = stage.disturbance()
            run = await Followed().follow(fleet, _request("ping"))
            say(f"ping {number}: {await _sent(broker, run)}; {run.text()}; {disturbance()}")
        for number in range(RUNS):
            label = f"quick{number}"
            disturbance = stage.disturbance()
            run = await Followed().follow(fleet, _request("mark", label))
            told = await stage.tally(label)
            say(
                f"run {number}: {await _sent(broker, run)}; last agent had the command after "
                f"{told['last'] - run.sent:.2f} s; {run.text()}; {disturbance()}"
            )
            assert told["agents"] == told["executions"] == stage.agents, told
        say(f"used: {stage.used()}")
        await _killed(stage, fleet)
        await _idle(stage)
        await _frozen(stage, fleet)
        await _settings(stage, broker)
        await _restarted(stage, fleet)
        say(f"used: {stage.used()}")
    _target()


async def _sent(broker: Broker, run: Followed) -> str:
    """When the commands were sent, by the run's history."""
    assert run.record
    history = await FleetStatus(Client(broker, RecordConfig())).history(run.record.run)
    sent = next((step for step in history if step.what == "sent"), None)
    return f"claimed after {run.claimed:.2f} s, {sent.detail if sent else 'sent in parts'}"


async def _killed(stage: Stage, fleet: Fleet) -> None:
    """Kill the owner while agents work; each executes once, and each return counts."""

    def kill(record: FleetRun) -> None:
        owner = next(
            p for p in stage.control if f"-{p}-" in record.owner or f"-{p}" in record.owner
        )
        loop = asyncio.get_running_loop()
        loop.call_later(0.6, os.kill, owner, signal.SIGKILL)

    run = await Followed().follow(fleet, _request("mark", "killed", 2.0), kill)
    told = await stage.tally("killed")
    assert run.record
    say(
        f"dispatcher killed in the middle: {run.text()}; {int(told['executions'])} executions on "
        f"{int(told['agents'])} agents, owners lost: {run.record.adoptions}"
    )


async def _idle(stage: Stage, seconds: float = 40.0) -> None:
    def counted() -> tuple[int, int]:
        found = stage.server.monitor("/varz", timeout=30)
        return int(found["in_msgs"]), int(found["out_msgs"])

    before = counted()
    await asyncio.sleep(seconds)
    after = counted()
    sent, received = (after[n] - before[n] for n in (0, 1))
    per = 10 / seconds / stage.agents
    say(
        f"idle: the server got {sent * per:.2f} and sent {received * per:.2f} messages per agent "
        f"and 10 s ({sent * per * 360:.0f} and {received * per * 360:.0f} an hour)"
    )


async def _frozen(stage: Stage, fleet: Fleet) -> None:
    """Freeze a process of agents during a run: the others return, these later, and each once."""
    host = stage.hosts[0]
    host.send_signal(signal.SIGSTOP)
    loop = asyncio.get_running_loop()
    loop.call_later(FROZEN_SECONDS, host.send_signal, signal.SIGCONT)
    run = await Followed().follow(fleet, _request("mark", "frozen"))
    told = await stage.tally("frozen")
    say(
        f"{-(-stage.agents // len(stage.hosts))} agents frozen for {FROZEN_SECONDS:.0f} s: "
        f"{run.text()}; {int(told['executions'])} executions on {int(told['agents'])} agents"
    )


async def _settings(stage: Stage, broker: Broker) -> None:
    """A push, and its rollback, until every agent has reported it in force."""
    tree = stage.root / "tree"
    tree.mkdir()
    (tree / "top.yaml").write_text("base:\n  '*': [common]\n")
    publisher = Publisher(broker, Sealer(stage.folder.seed()))

    async def everywhere(number: int) -> None:
        while True:
            with contextlib.suppress(TryAgain):  # the server is busy with ten thousand agents
                reports = await publisher.store.reports()
                if sum(report.number == number for report in reports.values()) >= stage.agents:
                    return
            await asyncio.sleep(0.5)

    for number in (1, 2, 3):
        (tree / "common.yaml").write_text(f"port: {number}\nname: {{{{ facts.id }}}}\n")
        begun, disturbance = time.perf_counter(), stage.disturbance()
        if number < 3:
            await publisher.push(tree)
        else:
            await publisher.go_back(1)
        pushed = time.perf_counter() - begun
        await everywhere(number)
        what = "rollback" if number == 3 else "push"
        took = time.perf_counter() - begun
        say(
            f"settings, {what}: stored after {pushed:.2f} s, in force everywhere after {took:.1f} "
            f"s; {disturbance()}"
        )


def _target() -> None:
    """How long a target takes over the facts of a very large fleet."""
    facts = {
        f"web{n}": {"os": "linux", "mem": n % 64, "role": ("web", "db")[n % 2], "dc": f"dc{n % 9}"}
        for n in range(FACT_SETS)
    }
    for text in ("web1*", "G@role:db", "G@mem>=32 and G@dc:dc3 and not web9*"):
        target = parse(text)
        begun = time.perf_counter()
        found = sum(target.matches(agent, known) for agent, known in facts.items())
        took = (time.perf_counter() - begun) * 1000
        say(f"target {text!r} over {FACT_SETS:,} sets of facts: {took:.0f} ms, {found:,} agents")


async def _restarted(stage: Stage, fleet: Fleet) -> None:
    """Restart NATS while a run is active: every agent is back, and every return arrives."""
    request, disturbance = _request("mark", "restart", 3.0, timeout=300.0), stage.disturbance()
    following = asyncio.create_task(Followed().follow(fleet, request))
    await asyncio.sleep(1.5)
    begun = time.perf_counter()
    await asyncio.to_thread(stage.server.restart, 60.0)
    up = time.perf_counter() - begun
    most = 0.0
    while (await stage.tally())["connected"] < stage.agents:
        count, at = _connections(stage), time.perf_counter()
        await asyncio.sleep(1.0)
        most = max(most, (_connections(stage) - count) / (time.perf_counter() - at))
    back = time.perf_counter() - begun
    spent = cpu(stage.server.pid) / stage.agents * 1000
    run = await following
    told = await stage.tally("restart")
    say(
        f"NATS restarted: up after {up:.1f} s, all agents connected after {back:.1f} s "
        f"({stage.agents / max(back - up, 0.1):.0f} a second, at most {most:.0f}; "
        f"{_connections(stage) - stage.agents} tries failed, {spent:.1f} ms of the server's CPU "
        f"for each agent); {run.text()}; "
        f"{int(told['executions'])} executions on {int(told['agents'])} agents; {disturbance()}"
    )
    run = await Followed().follow(fleet, _request("ping"))
    say(f"ping after that: {run.text()}")


def _connections(stage: Stage) -> int:
    """Connections that the server has taken since it started."""
    return int(stage.server.monitor("/varz", timeout=30)["total_connections"])


async def main(options: argparse.Namespace, root: Path) -> int:
    async with Stage(root, options.agents, options.processes, options.dispatchers).open() as stage:
        await measure(stage)
    return 0


def run(options: argparse.Namespace) -> int:
    """Measure in a folder in memory, if possible."""
    shared = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="holdfast-fleet-", dir=shared if shared.is_dir() else None))
    try:
        return asyncio.run(main(options, root))
    finally:
        for log in sorted(root.glob("*.log")):
            found = [x for x in log.read_text().splitlines() if "ERROR" in x or "Traceback" in x]
            for line in found[:3]:
                say(log.name, line)
        shutil.rmtree(root, ignore_errors=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--dispatchers", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run(_options()))
