"""A fleet of thousands: every agent has its own connection and login, many share a process.

    python -m benchmarks.fleet --agents 10000 --processes 4

Measures dispatch, returns, a killed dispatcher, the idle cost, a settings push and its rollback, a
thousand agents that are cut off, a restart of NATS, and a target over 100,000 sets of facts. Prints
each figure beside its goal, and ends with 1 if a goal was missed: a return that is lost or stored
twice, an agent that executes a run twice or never, a figure that is too large.

Everything runs on this machine. Real hosts bring their own processors, so the simulated agents run
at the lowest priority here: dispatchers and server are served first. What each of them used is
printed for every run. Files are in memory, as if every host had a disk of its own, and the server
does not sync each write (`--sync`: it does).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fleet_goals import Goals
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
CUT_SECONDS = 8.0
FACT_SETS = 100_000
DISPATCH_SECONDS = 1.0
RETURNED_SECONDS = 5.0
IDLE_MESSAGES = 1.0
SETTINGS_SECONDS = 10.0
TARGET_SECONDS = 0.25
"""Half of what a person notices; a dispatcher matches in a thread."""

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

    def at(self, share: float) -> float:
        """When this share of the returns had arrived."""
        return self.times[min(int(len(self.times) * share), len(self.times) - 1)]

    def text(self) -> str:
        assert self.record
        if not self.times:
            return f"{self.record.status}, nothing returned of {len(self.record.targets)}"
        return f"p50 {self.at(0.5):.2f} s, p99 {self.at(0.99):.2f} s, last {self.at(1.0):.2f} s"

    def complete(self, goals: Goals, what: str) -> None:
        """Every target returned, and was counted once."""
        assert self.record
        record, heard = self.record, len(self.times)
        goals.check(
            record.status == "complete" and heard == record.returned == len(record.targets),
            f"{what}: {record.status}, {heard:,} returns heard and {record.returned:,} counted of "
            f"{len(record.targets):,}",
        )


def _request(function: str, *args: Any, timeout: float = 60.0) -> FleetRequest:
    return FleetRequest(new_run(), "*", function, args, timeout=timeout, user="benchmark")


async def measure(stage: Stage, goals: Goals) -> None:
    """Print the figures."""
    async with stage.operator() as broker:
        fleet = Fleet(broker)
        while len(await fleet.resolve("*")) < stage.agents:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.5)
        for number in range(RUNS):
            await _run(stage, broker, goals, f"ping {number}", "ping")
        for number in range(RUNS):
            await _run(stage, broker, goals, f"run {number}", "mark", f"quick{number}")
        say(f"used: {stage.used()}")
        await _killed(stage, fleet, goals)
        await _idle(stage, goals)
        await _cut_off(stage, fleet, goals)
        await _settings(stage, broker, goals)
        await _restarted(stage, fleet, goals)
        say(f"used: {stage.used()}")
    _target(goals)


async def _run(
    stage: Stage, broker: Broker, goals: Goals, what: str, function: str, *args: str
) -> None:
    """A command to all agents while nothing happens."""
    disturbance, spent = stage.disturbance(), stage.spent()
    run = await Followed().follow(Fleet(broker), _request(function, *args))
    cost = spent()
    run.complete(goals, what)
    if args:
        told = await stage.tally(args[0])
        goals.once(what, told, stage.agents)
        say(f"{what}: the last agent had the command after {told['last'] - run.sent:.2f} s")
    sent = await _sent(broker, run)
    goals.below(f"{what}, all commands handed to NATS after", sent, DISPATCH_SECONDS)
    goals.below(f"{what}, 99 of 100 returns after", run.at(0.99), RETURNED_SECONDS)
    say(f"{what}: {run.text()}; CPU for each agent: {cost}; {disturbance()}")


async def _sent(broker: Broker, run: Followed) -> float:
    """When the last command was sent after the request, by the run's history."""
    assert run.record
    history = await FleetStatus(Client(broker, RecordConfig())).history(run.record.run)
    sent = next((step.at for step in history if step.what == "sent"), math.inf)
    return sent - run.sent


async def _killed(stage: Stage, fleet: Fleet, goals: Goals) -> None:
    """Kill the owner while agents work; each executes once, and each return counts."""

    def kill(record: FleetRun) -> None:
        owner = next(
            p for p in stage.control if f"-{p}-" in record.owner or f"-{p}" in record.owner
        )
        loop = asyncio.get_running_loop()
        loop.call_later(0.6, os.kill, owner, signal.SIGKILL)

    run = await Followed().follow(fleet, _request("mark", "killed", 2.0), kill)
    assert run.record
    what = f"dispatcher killed, {run.record.adoptions} adoptions"
    run.complete(goals, what)
    goals.once(what, await stage.tally("killed"), stage.agents)
    say(f"{what}: {run.text()}")


async def _idle(stage: Stage, goals: Goals, seconds: float = 40.0) -> None:
    def counted() -> dict[str, int]:
        found = stage.server.monitor("/connz?limit=100000", timeout=60)["connections"]
        every = stage.server.monitor("/varz", timeout=30)
        agents = [c for c in found if c.get("name", "").startswith("agent ")]
        return {
            "agents": sum(c["in_msgs"] + c["out_msgs"] for c in agents),
            "server": int(every["in_msgs"]) + int(every["out_msgs"]),
        }

    before = await asyncio.to_thread(counted)
    await asyncio.sleep(seconds)
    after = await asyncio.to_thread(counted)
    own, every = (
        (after[n] - before[n]) * 10 / seconds / stage.agents for n in ("agents", "server")
    )
    goals.below("idle, messages from and to an agent in 10 s", own, IDLE_MESSAGES, "")
    say(
        f"idle: with what {len(stage.control)} other processes hear of it, the server got and sent "
        f"{every:.2f} messages per agent and 10 s ({every * 360:.0f} an hour)"
    )


async def _cut_off(stage: Stage, fleet: Fleet, goals: Goals) -> None:
    """Cut a thousand agents off during a run: they return when they are back, and each once."""
    cut = asyncio.create_task(stage.proxy.cut(CUT_SECONDS))
    run = await Followed().follow(fleet, _request("mark", "cut", timeout=120.0))
    await cut
    what = f"{stage.behind:,} agents cut off for {CUT_SECONDS:.0f} s"
    run.complete(goals, what)
    goals.once(what, await stage.tally("cut"), stage.agents)
    say(f"{what}: {run.text()}")


async def _settings(stage: Stage, broker: Broker, goals: Goals) -> None:
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
        say(f"settings, {what}: stored after {pushed:.2f} s; {disturbance()}")
        goals.below(f"settings, {what} in force everywhere after", took, SETTINGS_SECONDS)


def _target(goals: Goals) -> None:
    """How long a target takes over the facts of a very large fleet."""
    facts = {
        f"web{n}": {"os": "linux", "mem": n % 64, "role": ("web", "db")[n % 2], "dc": f"dc{n % 9}"}
        for n in range(FACT_SETS)
    }
    for text in ("web1*", "G@role:db", "G@mem>=32 and G@dc:dc3 and not web9*"):
        target = parse(text)
        begun = time.perf_counter()
        found = sum(target.matches(agent, known) for agent, known in facts.items())
        took = time.perf_counter() - begun
        what = f"target {text!r} over {FACT_SETS:,} sets of facts, {found:,} agents"
        goals.below(what, took, TARGET_SECONDS)


async def _restarted(stage: Stage, fleet: Fleet, goals: Goals) -> None:
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
    say(
        f"NATS restarted: up after {up:.1f} s, all agents connected after {back:.1f} s "
        f"({stage.agents / max(back - up, 0.1):.0f} a second, at most {most:.0f}; "
        f"{_connections(stage) - stage.agents} tries failed, {spent:.1f} ms of the server's CPU "
        f"for each agent); {run.text()}; {disturbance()}"
    )
    run.complete(goals, "NATS restarted during a run")
    goals.once("NATS restarted during a run", await stage.tally("restart"), stage.agents)
    run = await Followed().follow(fleet, _request("ping"))
    run.complete(goals, "ping after that")


def _connections(stage: Stage) -> int:
    """Connections that the server has taken since it started."""
    return int(stage.server.monitor("/varz", timeout=30)["total_connections"])


async def main(options: argparse.Namespace, root: Path) -> int:
    goals = Goals()
    stage = Stage(
        root, options.agents, options.processes, options.dispatchers, fast=not options.sync
    )
    async with stage.open():
        await measure(stage, goals)
    say(f"{len(goals.missed)} goals missed")
    return 1 if goals.missed else 0


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
    parser.add_argument("--sync", action="store_true", help="the server syncs every write")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run(_options()))
