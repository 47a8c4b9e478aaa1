"""`python -m benchmarks.history`: what ended runs cost, and how fast they are found afterwards.

First the cost: a queue of runs is drained by one worker, with history and without, in turns. Then
the growth: runs end at the highest rate of the machine, far beyond the bound of the history, while
the memory of the server is sampled; then runs are listed, shown and searched, by command line and
pages. One run is held from the beginning, and a thousand keys are sent again at the end: none of
them may be forgotten.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.history_app import app, hold, work
from holdfast.client import Client
from holdfast.config import ConnectionConfig, RecordConfig, WebConfig
from holdfast.server import Server
from holdfast.status.listing import RunFilter
from holdfast.status.messages import stream_state
from holdfast.status.runs import Runs
from holdfast.status.totals import counted
from holdfast.web import create_app

ROOT = Path(__file__).parent.parent
CHUNK = 5_000
QUEUE = 20_000
"""Runs that wait at most, so that neither sender nor worker starves."""
KEYS = 1_000
SAMPLE_SECONDS = 5.0
TRIES = 5


class Process:
    """A process of Holdfast."""

    def __init__(self, folder: Path, url: str, *command: str, **env: str) -> None:
        base = {**os.environ, "HOLDFAST_NATS_URL": url, "HOLDFAST_LOG_LEVEL": "warning", **env}
        self.log = folder / f"{command[0]}.log"
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", *command],
                cwd=ROOT,
                env=base,
                stdout=output,
                stderr=output,
            )
        self.pid = self._process.pid

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def cpu(pid: int) -> float:
    """Seconds of processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def megabytes(pid: int) -> int:
    """Resident memory."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) // 1024 if found else 0


@contextlib.contextmanager
def worker(folder: Path, url: str, **env: str) -> Iterator[Process]:
    command = ("worker", "benchmarks.history_app:app", "--concurrency", "200")
    process = Process(folder, url, *command, **env)
    try:
        yield process
    finally:
        process.end()


async def waiting(client: Client) -> int:
    """Runs that are not acknowledged yet."""
    return int((await stream_state(client.broker, client.broker.names.jobs))["messages"])


async def until_waiting(client: Client, most: int) -> None:
    """Wait until no more than this many runs are left."""
    while await waiting(client) > most:  # noqa: ASYNC110 - the server counts them
        await asyncio.sleep(0.02)


# ---- the cost


async def drain(folder: Path, count: int, history: bool) -> tuple[float, float]:
    """Runs per second, and microseconds of the worker for each."""
    env = {} if history else {"BENCH_WITHOUT_HISTORY": "1"}
    with Server(fast=True) as server:
        async with connected(server.url) as client:
            for start in range(0, count, CHUNK):
                await work.enqueue_many([work.request(n) for n in range(start, start + CHUNK)])
            with worker(folder, server.url, **env) as process:
                await until_waiting(client, count - CHUNK)  # it has started
                begun, used, left = time.perf_counter(), cpu(process.pid), await waiting(client)
                await until_waiting(client, CHUNK)
                done = left - await waiting(client)
                took = time.perf_counter() - begun
                return done / took, (cpu(process.pid) - used) / done * 1e6


@contextlib.asynccontextmanager
async def connected(url: str) -> Any:
    """The app on one server."""
    os.environ["HOLDFAST_NATS_URL"] = url
    async with app:
        client = await app.backend()
        assert isinstance(client, Client)
        await client.topology.ensure()
        yield client


async def cost(folder: Path, count: int, rounds: int) -> None:
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for n in range(2 * rounds):
        history = n % 2 == 0
        found[history].append(await drain(folder, count, history))
    for history, name in ((False, "without history"), (True, "with history")):
        rates, used = zip(*found[history], strict=True)
        print(
            f"{name:16} {statistics.median(rates):8,.0f} runs/s "
            f"({min(rates):,.0f}–{max(rates):,.0f}), worker {statistics.median(used):.0f} µs each",
            flush=True,
        )


# ---- the growth


async def grow(folder: Path, count: int, seconds: float, history_megabytes: int) -> None:
    env = {
        "HOLDFAST_RECORD_HISTORY_MEGABYTES": str(history_megabytes),
        "HOLDFAST_WEB_LOG_LEVEL": "warning",
    }
    os.environ.update(env)
    with Server(fast=True) as server:
        async with connected(server.url) as client:
            held = await hold.enqueue()
            keyed = [work.options(key=f"key-{n}").request(n) for n in range(KEYS)]
            await work.enqueue_many(keyed)
            coordinator = Process(folder, server.url, "coordinator", **env)
            try:
                with worker(folder, server.url, **env):
                    await fill(client, server, count, seconds)
                    await look(client, server.url)
                    await check(client, held, keyed)
            finally:
                coordinator.end()


async def fill(client: Client, server: Server, count: int, seconds: float) -> None:
    """Let runs end until there are enough, or time is up; tells what the server needs."""
    begun = sampled = time.perf_counter()
    sent, most = 0, 0
    print(f"{'ended':>12} {'runs/s':>8} {'server MB':>10} {'history MB':>11} {'lines kept':>11}")
    while sent < count and time.perf_counter() - begun < seconds:
        left = await waiting(client)
        if left < QUEUE:
            await work.enqueue_many([work.request(n) for n in range(sent, sent + CHUNK)])
            sent += CHUNK
        else:
            await asyncio.sleep(0.02)
        now = time.perf_counter()
        if now - sampled >= SAMPLE_SECONDS:
            sampled = now
            ended, memory = sent - left, megabytes(server.pid)
            most = max(most, memory)
            history = await stream_state(client.broker, client.broker.names.history)
            print(
                f"{ended:12,} {ended / (now - begun):8,.0f} {memory:10,} "
                f"{history['bytes'] // 10**6:11,} {history['messages']:11,}",
                flush=True,
            )
    await until_waiting(client, 1)
    took = time.perf_counter() - begun
    print(f"{sent:,} runs ended, {sent / took:,.0f} a second; the server had {most:,} MB at most")


async def timed(what: str, step: Callable[[], Awaitable[object]]) -> None:
    times = []
    for _ in range(TRIES):
        begun = time.perf_counter()
        await step()
        times.append(time.perf_counter() - begun)
    print(f"{what:44} {statistics.median(times) * 1000:7.0f} ms ({max(times) * 1000:.0f} at most)")


async def look(client: Client, url: str) -> None:
    """List, show and search what is kept, by what command line, API and pages use."""
    await asyncio.sleep(5)  # the indexer's last step
    runs, history = Runs(client), client.history
    state = await stream_state(client.broker, client.broker.names.history)
    middle = await nth(client, (int(state["first_seq"]) + int(state["last_seq"])) // 2)
    oldest = await nth(client, int(state["first_seq"]))
    newest = (await runs.list(limit=1))[0].run
    await timed("runs list", lambda: runs.list(limit=50))
    for name, run in (("newest", newest), ("middle", middle), ("oldest", oldest)):
        await timed(f"runs show, {name}", lambda run=run: runs.show(run))
    for state_ in ("done", "dead", "running"):
        wanted = RunFilter(job="work", state=state_)
        await timed(f"runs list --job work --state {state_}", lambda w=wanted: runs.list(w))
    await timed("look-up of an id that never was", lambda: history.find("r0000000000000000000"))
    await timed("totals of 24 h", lambda: counted(client, 86_400))
    totals = await counted(client, 86_400)
    told = sum(sum(period.ended.values()) for period in totals.periods)
    print(f"the totals tell of {told:,} ended runs")
    for command in (["runs", "list"], ["runs", "show", middle]):
        await timed(f"holdfast {' '.join(command)[:30]}", lambda c=command: cli(url, c))
    await pages(url, middle)


async def nth(client: Client, sequence: int) -> str:
    """The run in the message at a place in the history."""
    async for line in client.history.all(after=sequence - 1):
        return line.run
    raise LookupError(sequence)


async def cli(url: str, command: list[str]) -> None:
    env = {**os.environ, "HOLDFAST_NATS_URL": url}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "holdfast", *command, env=env, stdout=subprocess.DEVNULL
    )
    if await process.wait():
        raise SystemExit(f"holdfast {' '.join(command)} failed")


async def pages(url: str, run: str) -> None:
    connection = ConnectionConfig(nats_url=url)
    site = create_app(connection=connection, config=WebConfig(), open_to_all=True)
    services = site.state.services
    async with services.lifespan():
        transport = httpx.ASGITransport(site)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:

            async def get(path: str) -> None:
                answer = await http.get(path)
                if answer.status_code != 200:
                    raise SystemExit(f"{path}: {answer.status_code}")

            await get("/runs")
            paths = ["/", "/runs", "/runs?state=dead", "/runs?job=work&state=done", f"/runs/{run}"]
            paths += [f"/runs?prefix={run[:12]}", "/jobs", "/dead", "/cluster", "/schedules"]
            for path in paths:
                await timed(f"page {path[:38]}", lambda p=path: get(p))
    print(f"memory of this process, which sent the runs and served the pages: {_own()} MB")


def _own() -> int:
    return megabytes(os.getpid())


async def check(client: Client, held: Any, keyed: list[Any]) -> None:
    """The held run is still held, and every key is still known."""
    status = await held.status()
    known = 0
    for request in keyed:
        record = await client.read(request.run)
        known += record is not None and record.state == "done"
    await work.enqueue_many(keyed)
    await until_waiting(client, 1)
    again = 0
    for request in keyed:
        record = await client.read(request.run)
        again += record is None or record.begun != 1
    print(f"the held run is {status.state}; {known} of {KEYS} keys are known, {again} ran again")
    if status.state != "running" or known != KEYS or again:
        raise SystemExit(1)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=10_000_000, help="how many runs end")
    options.add_argument("--seconds", type=float, default=150.0, help="at most this long")
    options.add_argument("--megabytes", type=int, default=200, help="bound of the history")
    options.add_argument("--drain", type=int, default=60_000, help="runs in a sample of the cost")
    options.add_argument("--rounds", type=int, default=3, help="samples of the cost")
    given = options.parse_args()
    assert RecordConfig().keyless_ttl_seconds == 120, "the figures are for the default"
    with tempfile.TemporaryDirectory(prefix="bench-history-") as folder:
        if given.rounds:
            asyncio.run(cost(Path(folder), given.drain, given.rounds))
        if given.seconds:
            asyncio.run(grow(Path(folder), given.runs, given.seconds, given.megabytes))


if __name__ == "__main__":
    main()
