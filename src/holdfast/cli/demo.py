"""`holdfast demo` (`make demo`): a shop on real processes, with faults, on an embedded server.

It runs what `holdfast dev` runs, with two workers, plus two agents. Customers send orders, some of
them twice; the bank fails now and then, and one stock page always fails; every so often a worker is
killed with -9, and the fleet is pinged. Each line says what happened, and the pages show all of it.

The demo keeps its own list of accepted runs, and looks up those that have not ended in time
(`demo_tally`): `lost` counts runs with neither a record nor a message left.

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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.common import Cli, say
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.app import Holdfast
    from holdfast.cli.demo_tally import Tally, Watch
    from holdfast.server import Server
    from holdfast.worker.supervisor import Keeper, Spec, Supervisor

APP = "shop:app"
WORKERS = 2
AGENTS = ("web1", "db1")
KILL_SECONDS = 20.0
"""Long enough to see the runs of one killed worker recover before the next is killed."""
SHOW_SECONDS = 5.0
"""How often the totals are printed."""
FLEET_SECONDS = 10.0
"""How often the agents are pinged: rarely, so that the lines about runs stay visible."""
PAUSE_SECONDS = 0.12
"""Between two orders: about eight a second keep two workers busy without filling the queue."""
ITEMS = ("lamp", "chair", "kettle", "clock", "globe")


def register(app: Cli) -> None:
    """Add `holdfast demo`."""
    app.command("demo")(demo)


def demo(
    seconds: Annotated[
        float, typer.Option(help="Stop after this many seconds; 0: on Ctrl-C.", min=0)
    ] = 0.0,
    kill_every: Annotated[
        float, typer.Option(help="Kill a worker every N seconds; 0: never.", metavar="N", min=0)
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

    def __init__(self, tally: Tally) -> None:
        super().__init__(logging.WARNING)
        self._tally = tally

    def emit(self, record: logging.LogRecord) -> None:
        self._tally.say(record.getMessage())


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
        from holdfast.cli.demo_tally import Tally, Watch
        from holdfast.cli.dev import WEB_HOST, has_web, web_port_of
        from holdfast.cli.loading import load_app
        from holdfast.process import handle_signals
        from holdfast.worker.supervisor import Supervisor

        handle_signals(self._stop.set, self._kill)
        samples = sample_folder()
        sys.path.insert(0, str(samples))
        os.environ["HOLDFAST_NATS_URL"] = self._server.url
        port = web_port_of(None) if has_web() else 0
        if port:
            say(f"pages:  http://{WEB_HOST}:{port}/   (ready in a few seconds)")
        say(f"NATS:   {self._server.url}   (export HOLDFAST_NATS_URL={self._server.url})")
        say(f"logs:   {self._folder / 'processes.log'}")
        say("Ctrl-C stops everything.")
        app = load_app(APP)
        tally = Tally(app.jobs, self._say)
        logging.getLogger().handlers[:] = [_Lines(tally)]
        with (self._folder / "processes.log").open("ab") as log:
            supervisor = Supervisor(self._specs(app, samples, port), stop_seconds=15.0, output=log)
            self._supervisor = supervisor
            async with app, Watch(app, tally) as watch:
                await self._play(app, watch, supervisor)
                await watch.conclude()
        say(tally.summary)
        if tally.under_way:
            say("Runs under way have a record or a message on the server, which keeps them.")
        return 1 if tally.lost else 0

    def _say(self, text: str) -> None:
        say(f"{time.monotonic() - self._began:6.1f}s  {text}")

    def _specs(self, app: Holdfast, samples: Path, port: int) -> list[Spec]:
        """The processes of `holdfast dev` with two workers, plus the agents."""
        from holdfast.cli.dev import Plan

        paths = [str(samples), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        plan = Plan(APP, self._server.url, self._folder, WORKERS, (), port)
        agents = [
            plan.spec(f"agent {id}", ["agent", "--id", id, "--data", str(self._folder / id)])
            for id in AGENTS
        ]
        return [*plan.specs({job.spec.group for job in app.jobs.values()}), *agents]

    def _kill(self) -> None:
        if self._supervisor:
            self._supervisor.kill()
        self._server.kill()

    async def _play(self, app: Holdfast, watch: Watch, supervisor: Supervisor) -> None:
        """Traffic and faults until it is time to stop; then stop the processes in order."""
        working = asyncio.create_task(supervisor.run())
        workers = [k for k in supervisor.keepers if k.spec.name.startswith("worker")]
        tasks = [
            asyncio.create_task(Customers(app, watch.tally).run(), name="customers"),
            asyncio.create_task(watch.run(), name="watch"),
            asyncio.create_task(self._kill_workers(watch.tally, workers), name="kills"),
            asyncio.create_task(self._ask_fleet(watch), name="fleet"),
            asyncio.create_task(self._show(watch.tally), name="totals"),
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

    async def _kill_workers(self, tally: Tally, workers: list[Keeper]) -> None:
        if not self._kill_every:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(self._kill_every)
            victim = random.choice(workers)
            child = victim.child
            if child is None or not victim.up.is_set():
                continue
            node = f"-{child.pid}-"  # node ids contain the process id
            held = tally.held_by(node)
            tally.kills += 1
            tally.say(f"kill -9 {victim.spec.name} (pid {child.pid}), which holds {len(held)} runs")
            child.signal(signal.SIGKILL)
            await _follow(tally, held, node)

    async def _ask_fleet(self, watch: Watch) -> None:
        """Ping every agent now and then."""
        from holdfast.client.fleet import Fleet, new_run
        from holdfast.model.fleet import FleetRequest, Return

        while True:
            await asyncio.sleep(FLEET_SECONDS)
            request = FleetRequest(new_run(), "*", "ping", timeout=5.0)
            began = time.monotonic()
            try:
                follow = Fleet(watch.client.broker).follow(request)
                count = sum([isinstance(found, Return) async for found in follow])
            except HoldfastError as error:
                watch.tally.say(f"fleet: no answer: {error}")
                continue
            took = 1000 * (time.monotonic() - began)
            watch.tally.say(f"fleet: ping '*' returned by {count} agents in {took:.0f} ms")


async def _follow(tally: Tally, held: list[str], node: str) -> None:
    """Wait until each run of a dead worker has ended or moved, and print how long that took."""
    began = time.monotonic()
    while set(held) & set(tally.held_by(node)):
        await tally.changed()
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
        run = await self._app.jobs[job].enqueue(payload, **options)
        if run.duplicate:
            self._tally.duplicate(run.id)
        else:
            delay = options.get("delay", 0.0)
            self._tally.accept(run.id, job, time.monotonic() + delay)
