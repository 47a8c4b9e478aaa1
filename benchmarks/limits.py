"""`python -m benchmarks.limits`: what limits cost, how fair they are, and peers beside them.

    drain      runs per second of one worker process: without a limit, with `running` per key over
               1,000 keys, with a shared limit that is never full, and with 20 keys of one place
    customers  1,000 runs of 100 customers, three at a time of each, 1 s of work: the time from the
               first start to the last end over the ideal; Holdfast, DBOS on Postgres, taskiq on
               Redis with locks
    fair       a key with many runs in line, then one run each of 100 other keys: p50 and p99 from
               enqueue to start, beside the same without the line; and the memory of the line
    handover   20 keys, 3 at a time of each, 60 to 140 ms of work: p50 and p99 from the end of a
               handler until the next run of its key starts
    paced      `starts="50/s"` with four workers, two of them killed

Each row has a fresh server (default sync). Samples of one row are taken in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import environments, services, tally
from benchmarks.plan import PRODUCT, ROOT
from benchmarks.stage import memory_mb
from holdfast import Holdfast
from holdfast.broker import Received
from holdfast.client import Client
from holdfast.errors import Unreadable
from holdfast.model.limit import GATE, Gate, change, credited
from holdfast.names import gate_key
from holdfast.server import Server

MODULE = "benchmarks.subjects.limited_jobs"
DRAINED = 4_000
ROUNDS = 3
RUNS, CUSTOMERS, WORK_SECONDS = 1_000, 100, 1.0
IDEAL_SECONDS = 4.0
"""Ten runs of each customer, three at a time."""
LINED_UP = 100_000
HANDOVERS, HANDOVER_KEYS = 2_000, 20
OTHERS = 100
PACED_SECONDS = 60
RATE, BURST = 50, 5
PATIENCE_SECONDS = 240.0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Stage:
    """A server, and workers of the product's own command."""

    def __init__(self, limit: str, server: Server, folder: Path, *, module: str = MODULE) -> None:
        self.limit = limit
        self._module = module
        self.server = server
        self.folder = folder
        self.tallies = tally.Tallies(folder)
        self.workers: list[subprocess.Popen[bytes]] = []
        os.environ["HOLDFAST_NATS_URL"] = server.url
        self.env = {
            **os.environ,
            "BENCH_LIMIT": limit,
            "HOLDFAST_LOG_LEVEL": "error",
            "PYTHONPATH": str(ROOT),
            tally.FOLDER: str(folder),
        }
        self.app = Holdfast("bench-limits", nats_url=server.url)
        self.job: Any = self.app.job(name="work")(_work)

    def work(self, *options: str) -> None:
        command = [PRODUCT, "-m", "holdfast", "worker", f"{self._module}:app", "--health-port", "0"]
        self.workers.append(subprocess.Popen([*command, *options], env=self.env))

    def end(self) -> None:
        """End every worker."""
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(20)
            worker.kill()

    async def send(self, count: int, key: Callable[[int], str], **more: Any) -> None:
        for start in range(0, count, 5_000):
            part = range(start, min(count, start + 5_000))
            await self.job.enqueue_many([self.job.request(key=key(n), **more) for n in part])

    async def until(self, cell: int, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.tallies.total(cell) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.limit}: {self.tallies.total(cell)} of {count}")
            await asyncio.sleep(0.005)

    def span(self) -> float:
        """Seconds from the first start to the last end."""
        first = min(cell for cell in self.tallies.of(tally.FIRST) if cell)
        return (max(self.tallies.of(tally.LAST)) - first) / 1e9


async def _work(key: str, sent: int = 0, nap: float = 0.0) -> None: ...


@contextlib.contextmanager
def staged(limit: str) -> Iterator[Stage]:
    """A stage with a fresh server, ended afterwards."""
    with Server(fast=True, monitor_port=0) as server, tempfile.TemporaryDirectory() as folder:
        stage = Stage(limit, server, Path(folder))
        try:
            yield stage
        finally:
            stage.end()


async def drain(limit: str, keys: int) -> float:
    """Runs per second from a full queue."""
    with staged(limit) as stage:
        async with stage.app:
            await stage.send(DRAINED, lambda n: f"k{n % keys}")
            stage.work()
            await stage.until(tally.ENDED, DRAINED)
        return DRAINED / stage.span()


async def drains() -> None:
    """The costs of limits, as shares of no limit."""
    rows = {"none": 1_000, "keys": 1_000, "shared": 1_000, "contended": 20}
    found: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(ROUNDS):
        for name, keys in rows.items():
            found[name].append(await drain(name, keys))
    base = statistics.median(found["none"])
    for name, values in found.items():
        middle = statistics.median(values)
        say(f"drain {name:10s} {middle:8,.0f} runs/s  {middle / base:5.0%}  {_few(values)}")


def _few(values: list[float]) -> str:
    return "(" + ", ".join(f"{value:,.0f}" for value in values) + ")"


# ---- beside the others


async def holdfast_customers() -> float:
    with staged("customers") as stage:
        async with stage.app:
            await stage.send(RUNS, lambda n: f"c{n % CUSTOMERS}", nap=WORK_SECONDS)
            stage.work("--concurrency", "1000")
            await stage.until(tally.ENDED, RUNS)
        return stage.span()


def dbos_customers() -> float:
    from tests.postgres import Postgres

    database = Postgres()
    database.start()
    try:
        return _printed("dbos", "benchmarks.subjects.dbos_jobs", database.url, *_size())
    finally:
        database.kill()


def taskiq_customers() -> float:
    with services.redis() as url:
        os.environ["BENCH_URL"] = url
        python = environments.python("taskiq-redis")
        command = [str(python), "-m", "taskiq", "worker", "--workers", "1", "--log-level", "ERROR"]
        command += ["--max-async-tasks", "1000", "benchmarks.subjects.taskiq_lock_jobs:broker"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        worker = subprocess.Popen(command, env=env)
        try:
            return _printed("taskiq-redis", "benchmarks.subjects.taskiq_lock_jobs", *_size())
        finally:
            worker.kill()
            worker.wait()


def _size() -> tuple[str, str, str]:
    return str(RUNS), str(CUSTOMERS), str(WORK_SECONDS)


def _printed(peer: str, module: str, *words: str) -> float:
    command = [str(environments.python(peer)), "-m", module, *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    return float(done.stdout.split()[-1])


async def customers() -> None:
    """The same work on three systems, as a multiple of the ideal time."""
    environments.install(("dbos", "taskiq-redis"))
    others: dict[str, Callable[[], float]] = {
        "DBOS on Postgres": dbos_customers,
        "taskiq on Redis, locks": taskiq_customers,
    }
    found = {"Holdfast": await holdfast_customers()}
    for name, measure in others.items():
        try:
            found[name] = await asyncio.to_thread(measure)
        except (OSError, services.Missing, subprocess.SubprocessError) as error:
            say(f"customers {name}: not measured: {str(error)[:300]}")
            if isinstance(error, subprocess.CalledProcessError):
                say(str(error.stderr)[-600:])
    for name, seconds in found.items():
        say(f"customers {name:24s} {seconds:7.2f} s  {seconds / IDEAL_SECONDS:5.2f} x the ideal")


# ---- fairness


async def _others(stage: Stage) -> list[float]:
    before = len(stage.tallies.waits())
    for number in range(OTHERS):
        await stage.job.enqueue(key=f"other-{number}", sent=time.monotonic_ns())
    await stage.until(tally.WAITS, before + OTHERS)
    return sorted(wait / 1e6 for wait in stage.tallies.waits()[before:])


async def fair(count: int) -> None:
    """Another key's first run beside a long line, and what the line costs."""
    with staged("line") as stage:
        async with stage.app:
            stage.work()
            idle = (await _others(stage), await _others(stage))[1]
            server, worker = stage.server.pid, stage.workers[0].pid
            before = memory_mb([server]), memory_mb([worker])
            began = time.monotonic()
            await stage.job.enqueue(key="busy", nap=3_600.0)
            await stage.send(count, lambda _: "busy")
            await _lined_up(stage, count)
            lined = time.monotonic() - began
            after = memory_mb([server]), memory_mb([worker])
            busy = await _others(stage)
            for sick in stage.workers:
                sick.kill()  # its run would last for an hour
    say(f"fair  {count:,} in line after {lined:.0f} s")
    say(
        f"fair  idle p50 {_at(idle, 0.5):.1f} p99 {_at(idle, 0.99):.1f} ms; beside the line "
        f"p50 {_at(busy, 0.5):.1f} p99 {_at(busy, 0.99):.1f} ms"
    )
    say(
        f"fair  the line: {after[0] - before[0]:.0f} MB in the server, "
        f"{after[1] - before[1]:.0f} MB in the worker"
    )


async def _lined_up(stage: Stage, count: int) -> None:
    from holdfast.status.limits import Limits

    client = await stage.app.backend()
    assert isinstance(client, Client)
    limits = Limits(client)
    while sum(one.waiting for one in await limits.list()) < count:  # noqa: ASYNC110 - by a worker
        await asyncio.sleep(0.5)


def _at(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


# ---- handing over


async def handover() -> None:
    """From a freed place to the start of the run that waited for it, far from saturation."""
    with staged("handover") as stage:
        async with stage.app:
            for number in range(HANDOVERS):
                nap = 0.06 + 0.08 * (number * 7 % 10) / 10  # not all at the same instant
                await stage.job.enqueue(key=f"k{number % HANDOVER_KEYS}", nap=nap)
            began = time.monotonic()
            stage.work()
            await stage.until(tally.ENDED, HANDOVERS)
            rate = HANDOVERS / (time.monotonic() - began)
        waits = sorted(wait / 1e6 for wait in stage.tallies.waits())
    say(
        f"handover {len(waits):,} places taken over at {rate:,.0f} runs/s: "
        f"p50 {_at(waits, 0.5):.1f} ms, p99 {_at(waits, 0.99):.1f} ms, goal p50 10 ms"
    )


# ---- pace


async def paced(seconds: int) -> None:
    """Starts of four workers of which two are killed, by the tokens that were taken.

    A token is counted at the instant, on the server's clock, of the write that took it. Handlers
    start a little later, and on a busy machine closer together.
    """
    taken: list[float] = []
    with staged("paced") as stage:
        async with stage.app:
            await _count_tokens(stage, taken)
            await stage.send(RATE * seconds * 2, lambda n: "all", sent=1)
            for _ in range(4):
                stage.work()
            await stage.until(tally.STARTED, BURST)
            began = min(cell for cell in stage.tallies.of(tally.FIRST) if cell) / 1e9
            for killed, share in ((0, 0.3), (1, 0.6)):
                await asyncio.sleep(max(0.0, began + seconds * share - time.monotonic()))
                stage.workers[killed].kill()
            await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
    starts = [at for at in taken if at < taken[0] + seconds]
    most = max(bisect_left(taken, at + 1) - bisect_left(taken, at) for at in taken)
    say(
        f"paced {len(starts):,} of {RATE * seconds:,} starts in {seconds} s "
        f"({len(starts) / (RATE * seconds):.1%}); most in one second {most}"
    )


async def _count_tokens(stage: Stage, taken: list[float]) -> None:
    """Append the instant of every token that is taken, from the writes of the gate."""
    client = await stage.app.backend()
    assert isinstance(client, Client)
    await client.topology.ensure()
    last = Gate()

    async def changed(message: Received) -> None:
        nonlocal last
        with contextlib.suppress(Unreadable):
            gate = GATE.decode(message.body)
            before = credited(last, gate.at) if last.at else credited(gate, gate.at)
            before = before if last.at else change(before, tokens=float(gate.allowed.burst))
            taken.extend([gate.at] * round(before.tokens - gate.tokens))
            last = gate

    names = client.broker.names
    await client.broker.subscribe(names.changed(names.limits, gate_key("work", "*")), changed)


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=__doc__)
    parser.add_argument(
        "rows", nargs="*", default=["drain", "customers", "fair", "handover", "paced"]
    )
    parser.add_argument("--lined-up", type=int, default=LINED_UP)
    parser.add_argument("--paced-seconds", type=int, default=PACED_SECONDS)
    options = parser.parse_args()
    say(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for row in options.rows:
        if row == "drain":
            asyncio.run(drains())
        elif row == "customers":
            asyncio.run(customers())
        elif row == "fair":
            asyncio.run(fair(options.lined_up))
        elif row == "handover":
            asyncio.run(handover())
        else:
            asyncio.run(paced(options.paced_seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
