"""How long the pages take when there is much: `python -m benchmarks.pages [--runs 1000000]`.

Runs have ended, others wait, nodes and agents are there, written as the parts of Holdfast would
have written them. A web process of its own serves each page several times; then it is restarted,
and its charts must be the same as before. Exit code 1 if a median is above `MOST_MS`, the process
has more than `MOST_MEGABYTES`, or a chart differs.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import httpx
import msgspec

from benchmarks.history import Process, connected, megabytes
from benchmarks.history_app import work
from holdfast.broker.streams import FLEET_BUCKETS
from holdfast.client import Client
from holdfast.model import node as nodes
from holdfast.model.node import NodeRecord
from holdfast.model.run import Attempt, RunRecord
from holdfast.names import kv_subject
from holdfast.ownership.history import read_head
from holdfast.server import Server
from holdfast.server.process import free_ports
from holdfast.status.messages import stream_state

MOST_MS, MOST_MEGABYTES = 500, 300
TRIES = 7
CHUNK = 5_000
JOBS = 20
PATHS = (
    "/", "/?range=30d", "/jobs", "/jobs/default/work", "/runs", "/runs?state=dead",
    "/runs?state=queued", "/runs?job=work&state=done", "/runs?q=r0000017", "/runs?since=15m",
    "/runs/r0000017", "/flows", "/limits", "/schedules", "/schedules/day", "/dead", "/cluster",
    "/cluster/worker-7", "/fleet", "/fleet?target=G@os:linux", "/fleet/agents/host-7", "/alerts",
    "/audit", "/search?q=work",
)  # fmt: skip


def ended(now: float, n: int) -> RunRecord:
    """A run that has ended; every hundredth is dead."""
    state, error = ("dead", f"ValueError: no {n % 7}") if n % 100 == 0 else ("done", "")
    took = 0.01 * (1 + n % 50)
    attempt = Attempt(1, f"worker-{n % 50}", n, now - took, now, "failed" if error else "done")
    job = f"job{n % JOBS}" if n % JOBS else "work"
    return RunRecord(
        state, "default", job, created=now - took - 0.1, started=now - took,
        ended=now, attempts=(attempt,), error=error, result=msgspec.Raw(b'{"ok": true}'),
    )  # fmt: skip


async def fill(client: Client, runs: int, waiting: int) -> None:
    """The ends of runs, and runs that wait."""
    history = client.history
    for start in range(0, runs, CHUNK):
        now = client.broker.server_now()
        numbers = range(start, min(start + CHUNK, runs))
        await asyncio.gather(
            *(history.append(f"r{n:07}", ended(now, n), b'{"customer": 7}') for n in numbers)
        )
    for start in range(0, waiting, CHUNK):
        count = min(CHUNK, waiting - start)
        await work.enqueue_many([work.request(n) for n in range(start, start + count)])


async def counted(client: Client) -> None:
    """Wait until a coordinator has counted and indexed the history."""
    last = int((await stream_state(client.broker, client.broker.names.history))["last_seq"])
    while (await read_head(client.broker))[0].counted < last:  # noqa: ASYNC110 - only reading it tells
        await asyncio.sleep(0.5)


async def crowd(client: Client, workers: int, agents: int) -> None:
    """Nodes and agents that are online."""
    names, now = client.broker.names, client.broker.server_now()

    async def put(subjects: Iterable[tuple[str, bytes]]) -> None:
        for subject, body in subjects:
            await client.broker.publish(subject, body, {})
        await client.broker.flush()

    def node(id: str, role: str) -> bytes:
        record = NodeRecord(id, role, "default", "RUNNING", "at work", now, started=now)
        return nodes.encode(record)

    workers_ = [f"worker-{n}" for n in range(workers)]
    hosts = [f"host-{n}" for n in range(agents)]
    await put((kv_subject(names.nodes, id), node(id, "worker")) for id in workers_)
    await put((kv_subject(names.agents, id), node(id, "agent")) for id in hosts)
    for n, id in enumerate(hosts):
        facts = {"os": "linux", "rack": f"r{n % 40}", "roles": ["web", "db"][n % 2 : n % 2 + 1]}
        await client.broker.publish(kv_subject(names.facts, id), msgspec.json.encode(facts), {})
    await client.broker.flush()


def bars(http: httpx.Client) -> list[str]:
    """The bars of the throughput of a day."""
    page = http.get("/jobs/default/work?range=24h").text
    return re.findall(r'<rect class="fill-(?:done|failed|dead)" [^>]*height="[^"]*"', page)


def measure(folder: Path, url: str) -> bool:
    """Open every page, restart, and compare; whether all is well."""
    (port,) = free_ports(1)
    address = {"base_url": f"http://127.0.0.1:{port}", "headers": {"Accept": "text/html"}}
    rate = {"HOLDFAST_WEB_RATE_PER_SECOND": "0"}
    charts, well = [], True
    for measured in (True, False):
        web = Process(folder, url, "web", "--port", str(port), **rate)
        try:
            with httpx.Client(**address, timeout=60) as http:  # type: ignore[arg-type]
                until_served(http)
                if measured:
                    slow = [path for path in PATHS if visit(http, path) > MOST_MS]
                    memory = megabytes(web.pid)
                    print(f"memory of the web process: {memory} MB")
                    well = not slow and memory <= MOST_MEGABYTES
                charts.append(bars(http))
        finally:
            web.end()
    same = charts[0] == charts[1] and bool(charts[0])
    print(f"charts after a restart: {'the same' if same else 'DIFFERENT'}")
    return well and same


def until_served(http: httpx.Client) -> None:
    """Wait for the web process, and until its index of ended runs is complete."""
    for _ in range(600):
        try:
            if http.get("/runs").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit("the web process does not answer")


def visit(http: httpx.Client, path: str) -> float:
    """The median of one page, in milliseconds."""
    times = []
    for _ in range(TRIES):
        begun = time.perf_counter()
        answer = http.get(path)
        times.append((time.perf_counter() - begun) * 1000)
        if answer.status_code != 200:
            raise SystemExit(f"{path}: {answer.status_code}")
    median = statistics.median(times)
    print(f"{path:32} median {median:6.0f} ms, first {times[0]:6.0f}, {len(answer.content):,} B")
    return median


async def prepare(folder: Path, url: str, given: argparse.Namespace) -> None:
    """Everything that the pages show."""
    async with connected(url) as client:
        await client.topology.ensure_buckets(*FLEET_BUCKETS)
        await fill(client, given.runs, given.waiting)
        coordinator = Process(folder, url, "coordinator")
        try:
            await counted(client)
        finally:
            coordinator.end()  # it would judge the nodes that are only records
        await crowd(client, given.nodes, given.agents)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=1_000_000, help="runs that have ended")
    options.add_argument("--waiting", type=int, default=100_000, help="runs that wait")
    options.add_argument("--nodes", type=int, default=1_000)
    options.add_argument("--agents", type=int, default=10_000)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-pages-") as name, Server(fast=True) as server:
        folder = Path(name)
        begun = time.monotonic()
        asyncio.run(prepare(folder, server.url, given))
        print(f"prepared in {time.monotonic() - begun:.0f} s; the server has "
              f"{megabytes(server.pid):,} MB")  # fmt: skip
        return not measure(folder, server.url)


if __name__ == "__main__":
    sys.exit(main())
