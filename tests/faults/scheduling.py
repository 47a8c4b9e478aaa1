"""Fleets of schedulers over a set of schedules, and a log of what was fired, outside the system.

The schedules send runs of one job to a worker in the test's own process, which appends each start
to a list: run id and time. That is the effect log; the checker compares it with every instant that
was due.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import Context, Holdfast, Worker
from holdfast.client.schedules import Schedules
from holdfast.config import WorkerConfig
from holdfast.model.schedule import Schedule, define, instants
from holdfast.model.slot import parse_stamp
from holdfast.names import parse_slot_run
from holdfast.server import Cluster, Server
from tests.faults.processes import Process, until
from tests.integration.support import operating
from tests.support import running

SLOW_EVERY = range(2, 11)
PACE_SECONDS = 0.02


def free_port() -> int:
    """A free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def rounds(quick: int, full: int) -> int:
    """How often a fault is repeated: a few times in `make test`, fully in `make soak`."""
    return full if os.environ.get("HOLDFAST_SOAK") else quick


@dataclass
class Fired:
    """What handlers saw: which slot, and how late by this machine's clock."""

    slots: list[tuple[str, int, float]] = field(default_factory=list)

    def add(self, run: str) -> None:
        parsed = parse_slot_run(run)
        assert parsed, run
        self.slots.append((parsed[0], parse_stamp(parsed[1]), time.time()))

    def late(self, start: float, end: float) -> list[float]:
        """How late each slot in a period was, sorted."""
        return sorted(at - moment for _, moment, at in self.slots if start <= moment < end)


class SchedulerProcess(Process):
    """One real `holdfast scheduler`."""

    def __init__(self, url: str, namespace: str, log: Path, port: int = 0, **env: str) -> None:
        command = ["scheduler", "--health-port", str(port)]
        self._given = (url, namespace, port, env)
        super().__init__(command, url, namespace, log, **env)

    def successor(self, log: Path) -> SchedulerProcess:
        """Another one like it, with a separate log."""
        url, namespace, port, env = self._given
        return SchedulerProcess(url, namespace, log, port, **env)

    async def ready(self) -> None:
        """Wait until it has loaded the schedules."""
        await until(lambda: " schedules" in self.text() or not self.running, 30, "a scheduler")
        assert self.running, self.text()

    async def metric(self, name: str) -> float:
        """The sum of a metric's values, from its metrics page."""
        url = f"http://127.0.0.1:{self._given[2]}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read())
        lines = [line for line in page.decode().splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    @property
    def leads(self) -> bool:
        """Whether its newest log line about leadership says that it leads."""
        text = self.text()
        won = text.rfind(" leads scheduler, epoch")
        lost = max(text.rfind("lost leadership of scheduler"), text.rfind("stands down"))
        return self.running and won > lost


@contextmanager
def scheduler_fleet(
    count: int, url: str, namespace: str, root: Path, *, health: bool = False, **env: str
) -> Iterator[list[SchedulerProcess]]:
    """Several schedulers, killed afterwards in any case."""
    root.mkdir(exist_ok=True)
    fleet = [
        SchedulerProcess(
            url, namespace, root / f"scheduler-{n}.log", free_port() if health else 0, **env
        )
        for n in range(count)
    ]
    try:
        yield fleet
    finally:
        for process in fleet:
            process.close()


async def leader_of(fleet: list[SchedulerProcess], limit: float = 20) -> SchedulerProcess:
    """The one that leads."""
    return await until(lambda: next((p for p in fleet if p.leads), None), limit, "a leader")


class Noise:
    """How badly the machine serves this process: the worst delays of a timer, while it runs.

    A shared machine may stall for longer than the measured times; limits do not include that.
    """

    def __init__(self) -> None:
        self.delays = [0.0]

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(PACE_SECONDS)
            self.delays.append(time.monotonic() - began - PACE_SECONDS)

    @property
    def allowance(self) -> float:
        """How much worse a figure may be because of it: a run passes through several processes."""
        return max(self.delays) + 5 * percentile(sorted(self.delays), 0.99)


@dataclass
class Ticks:
    """A namespace with schedules and a worker that logs."""

    app: Holdfast
    schedules: list[Schedule]
    fired: Fired
    noise: Noise = field(default_factory=Noise)

    async def settle(self, until_moment: float, limit: float = 60, since: float = 0.0) -> None:
        """Wait until every slot up to a moment has fired, or time is up; `check` decides."""
        wanted = self.expected(since or self.since, until_moment)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            seen = {(name, moment) for name, moment, _ in self.fired.slots}
            if wanted <= seen:
                return
            await asyncio.sleep(0.1)

    @property
    def since(self) -> float:
        return max(s.since for s in self.schedules)

    def expected(self, start: float, end: float) -> set[tuple[str, int]]:
        """Every slot that is due in a period."""
        return {(s.name, moment) for s in self.schedules for moment in instants(s, start, end)}

    def check(self, end: float) -> tuple[int, list[float]]:
        """Every slot due until `end` was fired, exactly once; returns how many and how late."""
        wanted = self.expected(self.since, end)
        count = Counter((name, moment) for name, moment, _ in self.fired.slots)
        missed = sorted(wanted - set(count))
        twice = [slot for slot, n in count.items() if n > 1]
        early = [s for s in self.fired.slots if s[2] < s[1]]
        assert not missed, f"{len(missed)} slots missed, such as {missed[:5]}"
        assert not twice, f"{len(twice)} slots fired twice, such as {twice[:5]}"
        assert not early, f"{len(early)} slots fired early, such as {early[:5]}"
        return len(wanted), self.fired.late(self.since, end)


@contextlib.asynccontextmanager
async def ticking(
    nats: Server | Cluster,
    namespace: str,
    *,
    fast: int = 50,
    slow: int = 200,
    catch_up: str = "all",
) -> AsyncIterator[Ticks]:
    """Schedules at 1 s and at 2 to 10 s, registered, with a worker that logs what they fire."""
    app = Holdfast("ticks", nats_url=nats.url, namespace=namespace)
    fired = Fired()

    @app.job
    async def tick(ctx: Context) -> None:
        fired.add(ctx.run)

    every = [1] * fast + [SLOW_EVERY[n % len(SLOW_EVERY)] for n in range(slow)]
    defined = [
        define(f"s{n}", "tick", every=gap, catch_up=catch_up, limit=1000)
        for n, gap in enumerate(every)
    ]
    worker = Worker(app, WorkerConfig(concurrency=1000))
    async with operating(app) as client, running(worker, lambda: worker.pulling):
        registry = Schedules(client)
        await registry.sync("ticks", defined)
        found = Ticks(app, await registry.list(), fired)
        measuring = asyncio.create_task(found.noise.run())
        try:
            yield found
        finally:
            measuring.cancel()


def percentile(values: list[float], share: float) -> float:
    """A percentile of a sorted list."""
    return values[min(len(values) - 1, int(len(values) * share))]


def figures(title: str, count: int, late: list[float]) -> str:
    """One line for the report."""
    return (
        f"{title}: {count} slots, 0 missed, 0 twice; late: median {percentile(late, 0.5):.3f} s, "
        f"99 % {percentile(late, 0.99):.3f} s, most {late[-1]:.3f} s"
    )
