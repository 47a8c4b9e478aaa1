"""`holdfast demo`: a server, two workers, a coordinator and a shop, with crashes, shown live.

Every so often one of the workers is killed with -9; its runs go on in the other one, and a
successor takes its place. The demo keeps its own list of every run that was accepted, and of every
run that an event must have started, and looks each one up that has not ended in time: `lost`
counts those of which neither a record nor a message is left.

Everything is temporary and on ports of its own. The end is in order: traffic, workers, server.
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
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import Cli, say
from holdfast.cli.demo_board import Board, Tally
from holdfast.cli.demo_view import open_view, summary
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.app import Holdfast
    from holdfast.cli.demo_watch import Watch
    from holdfast.server import Server
    from holdfast.worker.supervisor import Keeper, Spec, Supervisor

APP = "shop:app"
WORKERS = 2
GRACE_SECONDS = 3.0
STOP_SECONDS = GRACE_SECONDS + 5.0
SHOW_SECONDS = 1.0
KILL_SECONDS = 20.0


def register(app: Cli) -> None:
    """Add `holdfast demo`."""
    app.command("demo")(demo)


def demo(
    seconds: Annotated[
        float, typer.Option(help="Stop by itself after so many; 0: when you press Ctrl-C.", min=0)
    ] = 0.0,
    kill_every: Annotated[
        float, typer.Option(help="Seconds between two kills of a worker; 0: none.", min=0)
    ] = KILL_SECONDS,
) -> None:
    """See it work: a shop, its workers, and one of them killed every 20 seconds.

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
    """Where shop.py is: in the examples of a clone, or beside us in an installed package."""
    here = Path(__file__).resolve()
    for folder in (here.parents[3] / "examples", here.parent / "sample"):
        if (folder / "shop.py").exists():
            return folder
    raise FileNotFoundError("the sample app examples/shop.py is missing")


def plan(folder: Path, samples: Path) -> list[Spec]:
    """Two workers and a coordinator, on the server that the environment names."""
    from holdfast.cli.worker import SOCKET_VARIABLE
    from holdfast.worker.supervisor import Spec

    paths = [str(samples), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "holdfast"]
    workers = [
        Spec(
            f"worker {n}",
            [*command, "worker", APP, "--grace", f"{GRACE_SECONDS:g}s"],
            {**env, SOCKET_VARIABLE: str(folder / f"{n}.sock")},
            folder / f"{n}.sock",
        )
        for n in range(WORKERS)
    ]
    return [*workers, Spec("coordinator", [*command, "coordinator"], env)]


class BoardHandler(logging.Handler):
    """Puts what our own processes log on the board, where it does not disturb the picture."""

    def __init__(self, board: Board) -> None:
        super().__init__(logging.WARNING)
        self._board = board

    def emit(self, record: logging.LogRecord) -> None:
        self._board.say(record.getMessage())


class Demo:
    """One run of the demo, on a server that is up already."""

    def __init__(self, server: Server, folder: Path, seconds: float, kill_every: float) -> None:
        self._server = server
        self._folder = folder
        self._seconds = seconds
        self._kill_every = kill_every
        self._stop = asyncio.Event()
        self._began = time.monotonic()

    async def run(self) -> int:
        """From the first run to the last; returns the exit code."""
        from holdfast.cli.demo_watch import Watch
        from holdfast.cli.loading import load_app
        from holdfast.process import handle_signals
        from holdfast.worker.supervisor import Supervisor

        samples = sample_folder()
        sys.path.insert(0, str(samples))
        os.environ["HOLDFAST_NATS_URL"] = self._server.url
        app = load_app(APP)
        board = Board({name: Tally() for name in app.jobs})
        logging.getLogger().handlers[:] = [BoardHandler(board)]
        with (self._folder / "processes.log").open("ab") as log:
            specs = plan(self._folder, samples)
            supervisor = Supervisor(specs, stop_seconds=STOP_SECONDS, output=log)
            handle_signals(self._stop.set, lambda: self._kill(supervisor))
            async with app, Watch(app, board) as watch:
                await self._play(app, watch, supervisor)
                await watch.account(0.0)
        say(summary(board))
        if board.under_way:
            say("What was under way has a record or a message on the server, which keeps it.")
        return 1 if board.lost else 0

    def _kill(self, supervisor: Supervisor) -> None:
        supervisor.kill()
        self._server.kill()

    async def _play(self, app: Holdfast, watch: Watch, supervisor: Supervisor) -> None:
        """Traffic and kills until it is enough; then the processes end in order."""
        from holdfast.cli.demo_traffic import Traffic

        board = watch.board
        working = asyncio.create_task(supervisor.run())
        tasks = [
            asyncio.create_task(Traffic(app, board).run(), name="traffic"),
            asyncio.create_task(watch.run(), name="watch"),
            asyncio.create_task(self._kill_workers(board, supervisor), name="kills"),
            asyncio.create_task(self._show(board, supervisor), name="view"),
        ]
        stop = asyncio.create_task(self._stop.wait())
        try:
            limit = self._seconds or None
            done, _ = await asyncio.wait(
                [stop, working, *tasks], timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done - {stop}:
                task.result()
            if working in done:
                raise HoldfastError(f"the workers cannot be kept running: {self._log_tail()}")
        finally:
            for task in (stop, *tasks):
                task.cancel()
            await asyncio.gather(stop, *tasks, return_exceptions=True)
            supervisor.stop()
            await working

    def _log_tail(self) -> str:
        text = (self._folder / "processes.log").read_text(encoding="utf-8", errors="replace")
        return " / ".join(text.splitlines()[-5:])

    async def _show(self, board: Board, supervisor: Supervisor) -> None:
        with open_view(f"Holdfast demo on {self._server.url}") as view:
            while True:
                processes = [_shown(keeper) for keeper in supervisor.keepers]
                view.show(board, processes, time.monotonic() - self._began)
                await asyncio.sleep(SHOW_SECONDS)

    async def _kill_workers(self, board: Board, supervisor: Supervisor) -> None:
        if not self._kill_every:
            await asyncio.Event().wait()
        workers = supervisor.keepers[:WORKERS]
        while True:
            await asyncio.sleep(self._kill_every)
            victim = random.choice(workers)
            child = victim.child
            if child is None or not victim.up.is_set():
                continue
            held = board.held_by(f"-{child.pid}-")
            board.kills += 1
            board.say(f"kill -9 {victim.spec.name} (pid {child.pid}) with {len(held)} runs in hand")
            child.signal(signal.SIGKILL)
            await _follow(board, held, f"-{child.pid}-")


async def _follow(board: Board, held: list[str], node: str) -> None:
    """Wait until every run of a dead worker is done or in other hands, and say how long it took."""
    began = time.monotonic()
    while set(held) & set(board.held_by(node)):
        await board.changed()
    if held:
        seconds = time.monotonic() - began
        board.say(
            f"all {len(held)} of its runs go on or have ended, {seconds:.1f} s after the kill"
        )


def _shown(keeper: Keeper) -> str:
    if keeper.child is None or keeper.trouble:
        return f"{keeper.spec.name}: {keeper.trouble}"
    return f"{keeper.spec.name}: pid {keeper.child.pid}, start {keeper.starts}"
