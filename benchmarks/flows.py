"""`python -m benchmarks.flows`: how many a second, what a fan-out and sleepers cost, beside others.

    steps      flows of three steps per second of one worker process, from a full queue; beside
               plain runs, DBOS on Postgres and Temporal's dev server, each as its quickstart says
               and at the best setting that we found
    gather     one flow with 10,000 children without work, beside draining 10,000 plain runs
    wake       from the end of the last of three children until its flow continues, p50 and p99
    sleepers   100,000 sleeping flows: memory of server and worker; then a kill -9 of the server,
               while flows are due, until they are awake

Each row has a fresh server (default sync). Ratios inside one run mean more than the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import environments, tally
from benchmarks.limits import Stage, say
from benchmarks.plan import ROOT
from benchmarks.services import Missing
from benchmarks.stage import memory_mb
from benchmarks.subjects import flow_jobs
from holdfast.errors import BrokerError
from holdfast.names import consumer
from holdfast.server import Server

MODULE = "benchmarks.subjects.flow_jobs"
FLOWS = 6_000
ROUNDS = 3
PEER_FLOWS = {"dbos": 600, "temporal": 200}
"""A few seconds each."""
CHILDREN = 10_000
"""The most that one gather takes."""
WOKEN = 500
SLEEPERS = 100_000
DUE = 100
"""Sleepers that are due while the server is away."""
DAY_SECONDS = 86_400.0
PATIENCE_SECONDS = 300.0
GOALS = {"dbos": 5.0, "temporal": 30.0}


@contextlib.contextmanager
def staged() -> Iterator[Stage]:
    """A server, and the app of the flows bound to it."""
    with Server(fast=True) as server, tempfile.TemporaryDirectory() as folder:
        stage = Stage("none", server, Path(folder), module=MODULE)
        flow_jobs.app.connect_with(nats_url=server.url)
        try:
            yield stage
        finally:
            stage.end()


async def _drained(job: Any, arguments: list[Any], ends: int) -> float:
    """Seconds from the first start to the last end, with everything waiting at the start."""
    with staged() as stage:
        async with flow_jobs.app:
            for start in range(0, len(arguments), 5_000):
                await job.enqueue_many(arguments[start : start + 5_000])
            stage.work()
            await stage.until(tally.ENDED, ends)
        return stage.span()


# ---- steps


async def steps(count: int, peers: bool) -> None:
    """Flows of three steps, here and elsewhere."""
    rates: dict[str, list[float]] = {"plain": [], "three": []}
    for _ in range(ROUNDS):
        for name, found in rates.items():
            seconds = await _drained(flow_jobs.app.jobs[name], list(range(count)), count)
            found.append(count / seconds)
    flows = statistics.median(rates["three"])
    for name, found in rates.items():
        say(f"steps  {name:28s} {statistics.median(found):8,.0f} /s  {_few(found)}")
    if peers:
        environments.install(tuple(PEER_FLOWS))
        for peer, goal in GOALS.items():
            _beside(peer, flows, goal)


def _beside(peer: str, ours: float, goal: float) -> None:
    measure = {"dbos": _dbos, "temporal": _temporal}[peer]
    for how in ("quickstart", "tuned"):
        try:
            rate = measure(how)
        except (OSError, Missing, subprocess.SubprocessError) as error:
            say(f"steps  {peer} {how}: not measured: {str(error)[:300]}")
            if isinstance(error, subprocess.CalledProcessError):
                say(str(error.stderr)[-600:])
            continue
        say(
            f"steps  {peer + ' ' + how:28s} {rate:8,.1f} /s; ours: {ours / rate:.1f} times, "
            f"goal {goal:.0f} times"
        )


def _dbos(how: str) -> float:
    from tests.postgres import Postgres

    database = Postgres()
    database.start()
    try:
        return _printed("dbos", database.url, how)
    finally:
        database.kill()


def _temporal(how: str) -> float:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    program = environments.python("temporal").parent / "temporal"
    command = [str(program), "server", "start-dev", "--headless", "--port", port]
    with subprocess.Popen(
        [*command, "--log-level", "never"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            _listening(int(port))
            return _printed("temporal", port, how)
        finally:
            server.kill()


def _listening(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise Missing("Temporal's dev server did not start")


def _printed(peer: str, where: str, how: str) -> float:
    module = f"benchmarks.subjects.{peer}_flows"
    command = [str(environments.python(peer)), "-m", module, where, str(PEER_FLOWS[peer]), how]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    return float(done.stdout.split()[-1])


# ---- gather


async def gather(count: int) -> None:
    """A gather of children beside as many plain runs."""
    ratios = []
    for _ in range(ROUNDS):
        drained = await _drained(flow_jobs.plain, list(range(count)), count)
        gathered = await _drained(flow_jobs.wide, [count], count + 1)
        ratios.append(gathered / drained)
        say(f"gather {count:,} plain runs {drained:.2f} s, children {gathered:.2f} s")
    say(f"gather {statistics.median(ratios):.2f} times the plain runs, goal 2 times")


# ---- waking


async def wake() -> None:
    """From the end of a child's handler until the code of its flow continues."""
    with staged() as stage:
        async with flow_jobs.app:
            stage.work()
            for _ in range(WOKEN):
                await flow_jobs.woken.enqueue()
                await asyncio.sleep(0.02)
            await stage.until(tally.ENDED, WOKEN)
        waits = sorted(wait / 1e6 for wait in stage.tallies.waits())
    say(
        f"wake   {WOKEN} flows, last child to flow: p50 {waits[len(waits) // 2]:.1f} ms, "
        f"p99 {waits[int(len(waits) * 0.99)]:.1f} ms, goal p50 20 ms"
    )


# ---- sleepers


async def sleepers(count: int) -> None:
    """What sleeping flows cost, and how they wake after a kill of the server."""
    with staged() as stage:
        async with flow_jobs.app:
            stage.work()
            await flow_jobs.sleeper.enqueue(time.time() + DAY_SECONDS)
            await _asleep(stage, 1)
            server, worker = stage.server.pid, stage.workers[0].pid
            before = memory_mb([server]), memory_mb([worker])
            began = time.monotonic()
            for start in range(0, count, 5_000):
                part = [time.time() + DAY_SECONDS] * min(5_000, count - start)
                await flow_jobs.sleeper.enqueue_many(part)
            await _asleep(stage, count + 1)
            took = time.monotonic() - began
            after = memory_mb([server]), memory_mb([worker])
            say(
                f"sleepers {count:,} asleep after {took:.0f} s: "
                f"{after[0] - before[0]:.0f} MB more in the server, goal below 100 for 100,000; "
                f"{after[1] - before[1]:.0f} MB more in the worker"
            )
            due = time.time() + 10
            await flow_jobs.sleeper.enqueue_many([due] * DUE)
            await _asleep(stage, count + 1 + DUE)
            await asyncio.sleep(max(0.0, due - 1.0 - time.time()))
            stage.server.kill()
            await asyncio.sleep(max(0.0, due - time.time()) + 0.5)
            began = time.monotonic()
            await asyncio.to_thread(stage.server.restart, PATIENCE_SECONDS)
            up = time.monotonic() - began
            await stage.until(tally.ENDED, DUE)
            say(
                f"sleepers {DUE} due while the server was killed: it was up after {up:.2f} s with "
                f"{memory_mb([stage.server.pid]):.0f} MB, and all of them awake after "
                f"{time.monotonic() - began:.2f} s, goal 2 s"
            )


async def _asleep(stage: Stage, count: int) -> None:
    """Wait until so many flows were called and nothing waits or runs any more."""
    await stage.until(tally.STARTED, count)
    backend: Any = await flow_jobs.app.backend()
    broker = backend.broker
    # Not by the list of jobs: naming 100,000 subjects would cost the server memory of its own.
    where = f"CONSUMER.INFO.{broker.names.jobs}.{consumer('default', 'sleeper')}"
    while True:
        with contextlib.suppress(BrokerError):
            found = await broker.api(where)
            if not found["num_pending"] + found["num_ack_pending"]:
                return
        await asyncio.sleep(0.2)


def _few(values: list[float]) -> str:
    return "(" + ", ".join(f"{value:,.0f}" for value in values) + ")"


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flows", description=__doc__)
    parser.add_argument("rows", nargs="*", default=["steps", "gather", "wake", "sleepers"])
    parser.add_argument("--flows", type=int, default=FLOWS)
    parser.add_argument("--children", type=int, default=CHILDREN)
    parser.add_argument("--sleepers", type=int, default=SLEEPERS)
    parser.add_argument("--no-peers", action="store_true", help="only Holdfast")
    options = parser.parse_args()
    say(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    measures: dict[str, Callable[[], Any]] = {
        "steps": lambda: steps(options.flows, not options.no_peers),
        "gather": lambda: gather(options.children),
        "wake": wake,
        "sleepers": lambda: sleepers(options.sleepers),
    }
    for row in options.rows:
        asyncio.run(measures[row]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
