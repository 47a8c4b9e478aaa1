"""`holdfast demo` (`make demo`): a shop on real processes, with faults, on an embedded server.

It runs what `holdfast dev` runs, with two workers, plus two agents. Customers send orders, some of
them twice; the bank fails now and then, and one stock page always fails; every so often a worker is
killed with -9, and the fleet is pinged. Each line says what happened, and the pages show all of it.

The demo waits for the end of every accepted run: `lost` counts those of which neither a record nor
a message is left.

Everything is temporary, on free ports. It stops in order: traffic, processes, server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli import out
from holdfast.cli.command import command
from holdfast.cli.options import option
from holdfast.errors import HoldfastError, RunNotFound

if TYPE_CHECKING:
    from holdfast.app import Holdfast
    from holdfast.client import Client
    from holdfast.model.run import RunRecord
    from holdfast.server import Server
    from holdfast.worker.supervisor import KeptProcess, Spec, Supervisor

APP = "shop:app"
WORKERS = 2
AGENTS = ("web1", "db1")
KILL_SECONDS = 20.0
"""Long enough to see the runs of one killed worker recover before the next is killed."""
SHOW_SECONDS = 5.0
"""How often the totals are printed: rarely enough to read the lines in between."""
FLEET_SECONDS = 10.0
"""How often the agents are pinged: rarely, so that the lines about runs stay visible."""
PAUSE_SECONDS = 0.12
"""Between two orders: about eight a second keep two workers busy without filling the queue."""
PAID = "order-paid"
"""What a run of `charge` publishes when it is done."""
LOOK_SECONDS = 1.0
FOLLOW_SECONDS = 0.05
"""How often the runs of a killed worker are looked up: finer than the time that is printed."""
OFTEN = 10
"""Of frequent events (retries, repeats), one in this many is printed."""
ITEMS = ("lamp", "chair", "kettle", "clock", "globe")


@command("demo")
def demo(
    seconds: Annotated[float, option("Stop after this many seconds; 0: on Ctrl-C.", min=0)] = 0.0,
    kill_every: Annotated[
        float, option("Kill a worker every N seconds; 0: never.", "N", min=0)
    ] = KILL_SECONDS,
) -> None:
    """See it work: a shop with retries, dead letters, a fleet, and workers that get killed.

    Exit codes: 0, or 1 when an accepted run was lost.
    """
    from holdfast.process import run_loop
    from holdfast.server import Server

    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as name:
        folder = Path(name)
        with Server(store=folder / "server", fast=True) as server:
            code = run_loop(Demo(server, folder, seconds, kill_every).run())
    raise typer.Exit(code)


def sample_folder() -> Path:
    """Where shop.py is: in the examples of a clone, or next to this file in an installed
    package."""
    here = Path(__file__).resolve()
    for folder in (here.parents[3] / "examples", here.parent / "sample"):
        if (folder / "shop.py").exists():
            return folder
    raise FileNotFoundError("the sample app examples/shop.py is missing")


class _Lines(logging.Handler):
    """Prints warnings of this process among the demo's own lines."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())


class Tally:
    """Counts accepted runs and how they ended."""

    def __init__(self, app: Holdfast, client: Client, say: Callable[[str], None]) -> None:
        self.say = say
        self.client = client
        self.ended = self.lost = self.kills = 0
        self._counts = dict.fromkeys(("done", "retries", "dead", "discarded", "repeats"), 0)
        self._subscribers = [job.spec for job in app.jobs.values() if PAID in job.spec.on]
        self._accepted: dict[str, asyncio.Task[None]] = {}
        self._by_event: dict[str, str] = {}
        """The jobs of runs that an event causes: their message is the event's."""

    @property
    def under_way(self) -> int:
        """Accepted and not ended."""
        return len(self._accepted) - self.ended - self.lost

    @property
    def summary(self) -> str:
        """The totals in one line."""
        counts = ", ".join(f"{name} {count}" for name, count in self._counts.items())
        return (
            f"accepted {len(self._accepted)}, ended {self.ended}, under way {self.under_way} "
            f"({counts}), workers killed {self.kills}, lost: {self.lost}"
        )

    def accept(self, run: str, job: str, sequence: int = 0) -> None:
        """Note an accepted run; one that is known already is a repeat."""
        if run in self._accepted:
            if self._count("repeats"):
                self.say(f"{run} was sent again: detected, and not run twice")
        else:
            self._accepted[run] = asyncio.create_task(self._watch(run, job, sequence), name=run)

    async def _watch(self, run: str, job: str, sequence: int) -> None:
        from holdfast.names import event_message_id, event_run

        try:
            record = await self.client.wait(run, sequence, None)
        except RunNotFound:
            self._lose(run)
            return
        self.ended += 1
        ending = {"done": "done", "cancelled": "discarded"}.get(record.state, "dead")
        self._count(ending)
        if ending == "dead":
            self.say(f"{run} is a dead letter: {record.error}")
        if record.failures and self._count("retries", record.failures):
            self.say(f"{run} failed {record.failures} times before its end: {record.state}")
        if record.state == "done" and job == "charge":
            for spec in self._subscribers:  # an event starts a run of each job that subscribes
                started = event_run(spec.group, spec.name, event_message_id(run, PAID, 1))
                self._by_event[started] = spec.name
                self.accept(started, spec.name)

    def _count(self, name: str, more: int = 1) -> bool:
        """Count; True when it should be printed."""
        before = self._counts[name] // OFTEN
        self._counts[name] += more
        return self._counts[name] == more or self._counts[name] // OFTEN > before

    def _lose(self, run: str) -> None:
        self.lost += 1
        self.say(f"{run} is LOST: no record and no message is left")

    async def conclude(self) -> None:
        """Account for every run that has not ended: a record or a message has to be left of it."""
        open_ = [task for task in self._accepted.values() if not task.done()]
        for task in open_:
            task.cancel()
        await asyncio.gather(*open_, return_exceptions=True)
        gone = await self._gone([task.get_name() for task in open_])
        if gone:
            await asyncio.sleep(LOOK_SECONDS)  # a message may have moved between two looks
        for run in await self._gone(gone):
            self._lose(run)

    async def _gone(self, runs: Iterable[str]) -> list[str]:
        """Those runs of which neither a record nor a message is found."""
        from holdfast.status.jobs import Jobs

        unknown = [run for run in runs if not (await self.client.look(run)).known]
        jobs = await Jobs(self.client).list() if unknown else ()
        busy = {info.job for info in jobs if info.waiting or info.parked or info.in_flight}
        return [run for run in unknown if self._by_event.get(run) not in busy]

    async def held_by(self, pid: int) -> set[str]:
        """The runs that a worker is executing."""
        from holdfast.model import run as runs

        found = self.client.runs.records(runs.decode)
        return {entry.key async for entry, record in found if _holds(pid, record)}

    async def left(self, held: set[str], pid: int) -> set[str]:
        """Those runs that are still recorded as running on a worker."""
        records = {run: await self.client.read(run) for run in held}
        return {run for run, record in records.items() if record and _holds(pid, record)}


def _holds(pid: int, record: RunRecord) -> bool:
    """Whether a worker executes a run; node ids contain the process id."""
    return record.state == "running" and f"-{pid}-" in record.node


class Demo:
    """One demo on a server that is running."""

    def __init__(self, server: Server, folder: Path, seconds: float, kill_every: float) -> None:
        self._server = server
        self._folder = folder
        self._seconds = seconds
        self._kill_every = kill_every
        self._stop = asyncio.Event()
        self._began = time.monotonic()
        self._supervisor: Supervisor | None = None

    async def run(self) -> int:
        """Run to the end; returns the exit code."""
        from holdfast.cli.dev import WEB_HOST, has_web, web_port_of
        from holdfast.cli.loading import load_app
        from holdfast.cli.made_up import make_up
        from holdfast.client import Client
        from holdfast.process import handle_signals
        from holdfast.worker.supervisor import Supervisor

        handle_signals(self._stop.set, self._kill)
        samples = sample_folder()
        sys.path.insert(0, str(samples))
        os.environ["HOLDFAST_NATS_URL"] = self._server.url
        port = web_port_of(None) if has_web() else 0
        if port:
            out.say(f"pages:  http://{WEB_HOST}:{port}/   (ready in a few seconds)")
        out.say(f"NATS:   {self._server.url}   (export HOLDFAST_NATS_URL={self._server.url})")
        out.say(f"logs:   {self._folder / 'processes.log'}")
        out.say("Charts of 7 and 30 days begin with made-up history. Ctrl-C stops everything.")
        app = load_app(APP)
        logging.getLogger().handlers[:] = [_Lines(self._say)]
        with (self._folder / "processes.log").open("ab") as log:
            supervisor = Supervisor(self._specs(app, samples, port), stop_seconds=15.0, output=log)
            self._supervisor = supervisor
            async with app:
                client = await app.backend()
                assert isinstance(client, Client)
                await client.topology.ensure()
                await make_up(client)
                tally = Tally(app, client, self._say)
                await self._play(app, tally, supervisor)
                await tally.conclude()
        out.say(tally.summary)
        if tally.under_way:
            out.say("Runs under way have a record or a message on the server, which keeps them.")
        return 1 if tally.lost else 0

    def _say(self, text: str) -> None:
        out.say(f"{time.monotonic() - self._began:6.1f}s  {text}")

    def _specs(self, app: Holdfast, samples: Path, port: int) -> list[Spec]:
        """The processes of `holdfast dev` with two workers, plus the agents."""
        from holdfast.cli.dev import DevPlan

        paths = [str(samples), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        plan = DevPlan(APP, self._server.url, self._folder, WORKERS, (), port)
        agents = [
            plan.spec(f"agent {id}", ["agent", "--id", id, "--data", str(self._folder / id)])
            for id in AGENTS
        ]
        return [*plan.specs({job.spec.group for job in app.jobs.values()}), *agents]

    def _kill(self) -> None:
        if self._supervisor:
            self._supervisor.kill()
        self._server.kill()

    async def _play(self, app: Holdfast, tally: Tally, supervisor: Supervisor) -> None:
        """Traffic and faults until it is time to stop; then stop the processes in order."""
        working = asyncio.create_task(supervisor.run())
        workers = [k for k in supervisor.keepers if k.spec.name.startswith("worker")]
        tasks = [
            asyncio.create_task(Customers(app, tally).run(), name="customers"),
            asyncio.create_task(self._kill_workers(tally, workers), name="kills"),
            asyncio.create_task(self._ask_fleet(tally), name="fleet"),
            asyncio.create_task(self._show(tally), name="totals"),
        ]
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait(
                [stop, working, *tasks],
                timeout=self._seconds or None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done - {stop}:
                task.result()
            if working in done:
                raise HoldfastError(f"the processes cannot be kept running: {self._log_tail()}")
        finally:
            for task in (stop, *tasks):
                task.cancel()
            await asyncio.gather(stop, *tasks, return_exceptions=True)
            supervisor.stop()
            await working

    def _log_tail(self) -> str:
        text = (self._folder / "processes.log").read_text(encoding="utf-8", errors="replace")
        return " / ".join(text.splitlines()[-5:])

    async def _show(self, tally: Tally) -> None:
        while True:
            await asyncio.sleep(SHOW_SECONDS)
            tally.say(tally.summary)

    async def _kill_workers(self, tally: Tally, workers: list[KeptProcess]) -> None:
        if not self._kill_every:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(self._kill_every)
            victim = random.choice(workers)
            child = victim.child
            if child is None or not victim.up.is_set():
                continue
            held = await tally.held_by(child.pid)
            tally.kills += 1
            tally.say(f"kill -9 {victim.spec.name} (pid {child.pid}), which holds {len(held)} runs")
            child.signal(signal.SIGKILL)
            await _follow(tally, held, child.pid)

    async def _ask_fleet(self, tally: Tally) -> None:
        """Ping every agent now and then."""
        from holdfast.client.fleet import Fleet, new_run
        from holdfast.model.fleet import FleetRequest, Return

        while True:
            await asyncio.sleep(FLEET_SECONDS)
            request = FleetRequest(new_run(), "*", "ping", timeout=5.0)
            began = time.monotonic()
            try:
                follow = Fleet(tally.client.broker).follow(request)
                count = sum([isinstance(found, Return) async for found in follow])
            except HoldfastError as error:
                tally.say(f"fleet: no answer: {error}")
                continue
            took = 1000 * (time.monotonic() - began)
            tally.say(f"fleet: ping '*' returned by {count} agents in {took:.0f} ms")


async def _follow(tally: Tally, held: set[str], pid: int) -> None:
    """Wait until each run of a dead worker has ended or moved, and print how long that took."""
    began = time.monotonic()
    left = held
    while left := await tally.left(left, pid):  # noqa: ASYNC110 - only their records tell
        await asyncio.sleep(FOLLOW_SECONDS)
    if held:
        seconds = time.monotonic() - began
        tally.say(
            f"its {len(held)} runs have ended or run elsewhere, {seconds:.1f} s after the kill"
        )


class Customers:
    """Sends orders until cancelled, and notes each accepted run."""

    def __init__(self, app: Holdfast, tally: Tally) -> None:
        self._app = app
        self._tally = tally
        self._number = 0

    async def run(self) -> None:
        """Send; orders that the server does not accept are not counted."""
        while True:
            self._number += 1
            try:
                await self._send(self._number)
            except HoldfastError as error:
                self._tally.say(f"not accepted: {error}")
            await asyncio.sleep(PAUSE_SECONDS * random.uniform(0.5, 1.5))

    async def _send(self, number: int) -> None:
        if number % 8 == 0:  # an impatient customer sends an earlier order again
            number -= random.randint(1, min(5, number - 1))
        order = {"id": number, "item": ITEMS[number % len(ITEMS)], "cents": 100 * number}
        await self._enqueue("charge", order, key=f"order-{number}")
        if number % 10 == 0:
            delay = random.uniform(2, 6)
            await self._enqueue("remind", random.choice(("ann", "bob", "eve")), delay=delay)
        if number % 12 == 0:
            await self._enqueue("stock", number // 12 % 14)
        if number % 20 == 1:
            await self._enqueue("report", time.strftime("%Y-%m-%d"))

    async def _enqueue(self, job: str, payload: Any, **options: Any) -> None:
        request = self._app.jobs[job].options(**options).request(payload)
        sent = await self._tally.client.enqueue(request)
        self._tally.accept(sent.run, job, sent.sequence)
