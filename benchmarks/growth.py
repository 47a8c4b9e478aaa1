"""`python -m benchmarks.growth`: what more of everything costs, at 1, 10 and 100 times.

Each row has a fresh server (default sync). Memory is resident, after the work or while idle; the
processor time is for one of the things counted, or of one core while nothing happens.

    ended      runs that one worker has executed, effectively_once; its start included
    waiting    runs in the queue, no worker
    delayed    runs that are due in an hour
    schedules  due in an hour; the process is a scheduler
    jobs       of one idle worker
    workers    idle, each with one job and its keeper; the process column is one of them
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks.plan import PRODUCT, ROOT, scheduler
from benchmarks.report import _aligned
from benchmarks.stage import _kill, cpu_seconds, memory_mb
from holdfast.broker import Broker, Bucket
from holdfast.broker.batch import Write, store_batch
from holdfast.broker.streams import Topology
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.model.message import first_message
from holdfast.model.schedule import define, encode
from holdfast.names import IdMaker, schedule_key
from holdfast.server import Server

PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- growth: written by make bench-growth -->", "<!-- end of growth -->"
TIMES = (1, 10, 100)
AT_ONCE = 500
IDLE_SECONDS = 10.0
SETTLE_SECONDS = 5.0
PATIENCE_SECONDS = 120.0
HOUR = 3600.0
BODY = b'{"n":1,"text":"' + b"x" * 60 + b'"}'


@dataclass(frozen=True)
class Row:
    """One line of the table; None where there is no such process."""

    what: str
    count: int
    server_mb: float
    server_cpu: str
    process_mb: float | None = None
    process_cpu: str = ""


class Growth:
    """One server, and what is started beside it."""

    def __init__(self, server: Server) -> None:
        self.url = server.url
        self._server = [server.pid]
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], **env: str) -> subprocess.Popen[bytes]:
        """Start a process of Holdfast."""
        given = {"HOLDFAST_NATS_URL": self.url, "HOLDFAST_LOG_LEVEL": "error", **env}
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **given}, start_new_session=True
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        """End what was started."""
        for process in self._started:
            _kill(process)

    def worker(self, jobs: int) -> subprocess.Popen[bytes]:
        """A worker of an app with this many jobs."""
        command = [PRODUCT, "-m", "holdfast", "worker", "benchmarks.subjects.many_jobs:app"]
        return self.start([*command, "--health-port", "0"], BENCH_JOBS=str(jobs))

    def cost(self, what: str, count: int, work: Callable[[], object]) -> Row:
        """What something costs the server, for each that was counted."""
        before = cpu_seconds(self._server)
        work()
        used = (cpu_seconds(self._server) - before) / count * 1e6
        return Row(what, count, memory_mb(self._server), f"{used:.0f} µs")

    def idle(self, what: str, count: int, process: subprocess.Popen[bytes]) -> Row:
        """What it costs while nothing happens."""
        time.sleep(SETTLE_SECONDS + count / 1000)
        both = self._server, [process.pid]
        before = [cpu_seconds(pids) for pids in both]
        time.sleep(IDLE_SECONDS)
        used = [(cpu_seconds(p) - b) / IDLE_SECONDS for p, b in zip(both, before, strict=True)]
        memory = [memory_mb(pids) for pids in both]
        return Row(what, count, memory[0], f"{used[0]:.1%}", memory[1], f"{used[1]:.1%}")

    # ---- what is counted

    def waiting(self, count: int) -> Row:
        return self.cost("waiting", count, lambda: asyncio.run(self._send(count, 0.0)))

    def delayed(self, count: int) -> Row:
        return self.cost("delayed", count, lambda: asyncio.run(self._send(count, HOUR)))

    def ended(self, count: int) -> Row:
        asyncio.run(self._send(count, 0.0))
        worker = self.worker(1)
        begin = cpu_seconds([worker.pid])
        row = self.cost("ended", count, lambda: asyncio.run(self._until_empty()))
        used = (cpu_seconds([worker.pid]) - begin) / count * 1e6
        return replace(row, process_mb=memory_mb([worker.pid]), process_cpu=f"{used:.0f} µs")

    def schedules(self, count: int) -> Row:
        asyncio.run(self._schedules(count))
        return self.idle("schedules", count, self.start(scheduler()))

    def jobs(self, count: int) -> Row:
        return self.idle("jobs", count, self.worker(count))

    def workers(self, count: int) -> Row:
        found = [self.worker(1) for _ in range(count)]
        time.sleep(count / 4)  # starting is the one thing that needs the processor
        return self.idle("workers", count, found[0])

    @contextlib.asynccontextmanager
    async def _namespace(self) -> AsyncIterator[Broker]:
        async with Broker(ConnectionConfig(nats_url=self.url)) as broker:
            await Topology(broker, RecordConfig()).ensure()
            yield broker

    async def _send(self, count: int, delay: float) -> None:
        async with self._namespace() as broker:
            ids, now, names = IdMaker(), broker.server_now(), broker.names
            due = now + delay if delay else None
            for start in range(0, count, AT_ONCE):
                some = [
                    first_message(names, "default", "job0", ids(), BODY, {}, due=due)
                    for _ in range(min(AT_ONCE, count - start))
                ]
                await store_batch(broker, [Write(*message) for message in some])

    async def _until_empty(self) -> None:
        async with self._namespace() as broker:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while time.monotonic() < deadline:
                wanted = {"subjects_filter": broker.names.job("default", "job0")}
                info = await broker.api(f"STREAM.INFO.{broker.names.jobs}", wanted)
                if not info["state"].get("subjects"):
                    return
                await asyncio.sleep(0.1)
            raise RuntimeError("the queue did not become empty in time")

    async def _schedules(self, count: int) -> None:
        async with self._namespace() as broker:
            bucket, now = Bucket(broker, broker.names.schedules), time.time()
            for start in range(0, count, AT_ONCE):
                rules = [
                    define(f"s{n}", "job0", at=now + HOUR) for n in range(start, start + AT_ONCE)
                ]
                made = [msgspec.structs.replace(r, since=now, changed=now) for r in rules]
                await asyncio.gather(
                    *(bucket.put(schedule_key(r.name), encode(r), expected=0) for r in made)
                )


SIZES = {
    "ended": 1_000,
    "waiting": 1_000,
    "delayed": 1_000,
    "schedules": 1_000,
    "jobs": 5,
    "workers": 1,
}


@contextlib.contextmanager
def fresh() -> Iterator[Growth]:
    """A server of its own for one row."""
    with Server(fast=True, monitor_port=0) as server:
        growth = Growth(server)
        try:
            yield growth
        finally:
            growth.end()


Cells = list[str]


def table(rows: list[Row], known: list[Cells]) -> str:
    """As Markdown, together with the rows of earlier runs that were not measured now."""
    lines = {(cells[0], cells[1]): cells for cells in known}
    for row in rows:
        memory = "" if row.process_mb is None else f"{row.process_mb:.0f}"
        cells = [row.server_cpu, memory, row.process_cpu]
        count = f"{row.count:,}"
        lines[row.what, count] = [row.what, count, f"{row.server_mb:.0f}", *cells]
    order = list(SIZES)
    found = sorted(lines.values(), key=lambda c: (order.index(c[0]), int(c[1].replace(",", ""))))
    head = ["what", "count", "server MB", "server CPU", "process MB", "process CPU"]
    return _aligned([head, *found])


def stored_rows(page: Path) -> list[Cells]:
    """The rows that the page has now."""
    text = page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return [cells for cells in lines if cells and cells[0] in SIZES]


def renew(page: Path, text: str) -> None:
    """Put the table into the page, between its marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> int:
    """Measure every row, print the table, write it into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(SIZES), metavar="WHAT")
    parser.add_argument("--times", nargs="*", type=int, default=list(TIMES), metavar="N")
    parser.add_argument("--dry", action="store_true", help="print only, write nothing")
    options = parser.parse_args()
    rows = []
    for what in options.only:
        for times in options.times:
            with fresh() as growth:
                rows.append(getattr(growth, what)(SIZES[what] * times))
            print(rows[-1], file=sys.stderr, flush=True)
    load = f"Load of the machine then {os.getloadavg()[0]:.1f}."
    known = (
        [] if options.only == list(SIZES) and options.times == list(TIMES) else stored_rows(PAGE)
    )
    what = "all rows" if not known else ", ".join(options.only)
    when = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores; last measured: {what}."
    text = f"{table(rows, known)}\n\n{when} {load}"
    print(text)
    if not options.dry:
        renew(PAGE, text)
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
