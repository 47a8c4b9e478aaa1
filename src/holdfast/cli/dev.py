"""`holdfast dev APP`: everything on this machine, restarted when the code changes.

    embedded server ──► load the app ──► its processes ──► (a .py file changes) stop them ──► load …

The app is loaded in a fresh process each time, so the running code is always that on disk. An app
that cannot be loaded prints its traceback and waits for the next change; so does one whose
processes keep failing. The server and its data outlive every restart. Shutdown reverses the start:
first the processes, which give back what they hold, then the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shlex
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli import out
from holdfast.cli.command import command
from holdfast.cli.options import AppArgument, LogFormat, LogLevel, option
from holdfast.cli.processes import start_logging
from holdfast.cli.server import DEV_STORE, LAST_PORT, PORT, monitor_port_of
from holdfast.cli.worker import SOCKET_VARIABLE

if TYPE_CHECKING:
    from holdfast.server import Server
    from holdfast.worker.supervisor import Spec, Supervisor

GRACE_SECONDS = 3.0  # short: a developer waits for each restart
STOP_SECONDS = GRACE_SECONDS + 10.0  # time to give back runs before SIGKILL
LOOK_SECONDS = 0.5  # how late a change is noticed; reading the times of a project takes 1 ms
WEB_HOST = "127.0.0.1"
WEB_PORT = 8080  # as `holdfast web` by default
SKIPPED = frozenset({"node_modules", "__pycache__"})


@command("dev")
def dev(
    app: AppArgument,
    port: Annotated[
        int | None,
        option("Port of the server; default: 4222, or a free one.", min=0, max=LAST_PORT),
    ] = None,
    store: Annotated[
        Path, option("Directory that keeps the data.", "DIR", file_okay=False)
    ] = DEV_STORE,
    processes: Annotated[int, option("Worker processes per group.", min=1)] = 1,
    reload: Annotated[
        bool, option("Restart when a .py file changes.", None, "--reload/--no-reload")
    ] = True,
    reload_dir: Annotated[
        list[Path] | None, option("Directory to watch, instead of this one; may be repeated.")
    ] = None,
    web: Annotated[bool, option("Serve the API and the pages too.", None, "--web/--no-web")] = True,
    web_port: Annotated[
        int | None, option("Port of the pages; default: 8080, or a free one.", max=LAST_PORT)
    ] = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Run an app with its own NATS server and restart it when its code changes.

    Accepted runs survive a restart: the data stays in --store. Ctrl-C stops everything.
    """
    from holdfast.process import run_loop

    start_logging(log_level, log_format)
    flags = _flags({"--log-level": log_level, "--log-format": log_format})
    with _server(port, store) as server, tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        folders = [path.resolve() for path in reload_dir or [Path()]]
        watch = Changes(folders) if reload else None
        page = web_port_of(web_port) if web and has_web() else 0
        plan = DevPlan(app, server.url, Path(folder), processes, flags, page)
        code = run_loop(Dev(plan, server, store, watch).run())
    raise typer.Exit(code)


def has_web() -> bool:
    """Whether the optional packages of the web are installed."""
    there = all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn"))
    if not there:
        out.note("the pages are not served: pip install 'holdfast-jobs[web]'")
    return there


def web_port_of(wanted: int | None) -> int:
    """The port of the pages: the given one, else the default if it is free."""
    from holdfast.server.process import free_ports

    if wanted:
        return wanted
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind((WEB_HOST, WEB_PORT))
            return WEB_PORT
    return free_ports(1)[0]


def _flags(given: dict[str, str | None]) -> list[str]:
    return [part for name, value in given.items() if value for part in (name, value)]


@contextlib.contextmanager
def _server(port: int | None, store: Path) -> Iterator[Server]:
    """The embedded server; on 4222 if that is free and no port was given."""
    from holdfast.server import PortInUse, Server

    _ignored_by_git(store)
    wanted = PORT if port is None else port
    server = Server(wanted, store.resolve(), fast=True, monitor_port=monitor_port_of(wanted, 1))
    try:
        server.start()
        server.wait_ready()
    except PortInUse as error:
        if port is not None:
            raise
        out.note(f"port {error.port} is taken: choosing another one")
        server.close()
        server = Server(0, store.resolve(), fast=True)
        server.start()
        server.wait_ready()
    try:
        yield server
    finally:
        server.close()


def _ignored_by_git(store: Path) -> None:
    store.mkdir(parents=True, exist_ok=True)
    ignore = store / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class DevPlan:
    """Which processes an app needs besides the server."""

    target: str
    url: str
    folder: Path
    processes: int
    flags: Sequence[str]
    web_port: int = 0
    """Where the pages are served; 0 if they are not."""

    def specs(self, groups: Iterable[str]) -> list[Spec]:
        """Workers for each group, the control roles and the pages; none for an app without jobs."""
        workers = [
            self._worker(group, n) for group in sorted(groups) for n in range(self.processes)
        ]
        if not workers:
            return []
        return [*workers, self._control(), *([self._web()] if self.web_port else [])]

    def _web(self) -> Spec:
        ready = self.folder / "web.ready"
        where = ["--host", WEB_HOST, "--port", str(self.web_port), "--ready-file", str(ready)]
        return self.spec("web", ["web", "--app", self.target, *where], ready)

    def _worker(self, group: str, number: int) -> Spec:
        name = f"worker {group}" + (f" {number}" if self.processes > 1 else "")
        socket = self.folder / f"{name.replace(' ', '-')}.sock"
        arguments = ["worker", self.target, "--group", group, "--grace", f"{GRACE_SECONDS:g}s"]
        return self.spec(name, arguments, socket, {SOCKET_VARIABLE: str(socket)})

    def _control(self) -> Spec:
        ready = self.folder / "control.ready"
        return self.spec("control", ["control", self.target, "--ready-file", str(ready)], ready)

    def spec(
        self,
        name: str,
        arguments: Sequence[str],
        announces: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> Spec:
        """One process of the `holdfast` command, on the embedded server."""
        from holdfast.worker.supervisor import Spec

        # The flag overrides a URL in the app's code; the variable is for processes that this code
        # starts.
        command = [sys.executable, "-m", "holdfast", *arguments, *self.flags]
        given = {"HOLDFAST_NATS_URL": self.url, **(env or {})}
        return Spec(name, [*command, "--nats-url", self.url], given, announces)


class Changes:
    """Notices that a Python file below some directories was added, changed or removed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self._seen = self._look()

    async def wait(self) -> list[Path]:
        """Return the files that differ from when this last returned."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            found = await asyncio.to_thread(self._look)
            if found != self._seen:
                changed = dict(found.items() ^ self._seen.items())
                self._seen = found
                return sorted(changed)

    def _look(self) -> dict[Path, int]:
        return {path: when for folder in self.folders for path, when in _python_files(folder)}


def _python_files(folder: Path) -> Iterator[tuple[Path, int]]:
    for here, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if not _is_skipped(Path(here), f)]
        for path in (Path(here, name) for name in files if name.endswith(".py")):
            with contextlib.suppress(OSError):  # removed between listing and reading
                yield path, path.stat().st_mtime_ns


def _is_skipped(parent: Path, name: str) -> bool:
    return name.startswith(".") or name in SKIPPED or (parent / name / "pyvenv.cfg").exists()


class Dev:
    """One session: the server keeps running while the app's processes come and go."""

    def __init__(self, plan: DevPlan, server: Server, store: Path, changes: Changes | None) -> None:
        self._plan = plan
        self._server = server
        self._store = store
        self._changes = changes
        self._stop = asyncio.Event()
        self._server_ended = asyncio.Event()
        self._welcomed = False
        self._supervisor: Supervisor | None = None

    async def run(self) -> int:
        """Run until a signal, or until the server ends; returns the exit code."""
        from holdfast.process import handle_signals

        handle_signals(self._stop.set, self._kill)
        self._watch_server(asyncio.get_running_loop())
        while True:
            code = await self._round()
            if code is not None:
                return code

    def _kill(self) -> None:
        if self._supervisor:
            self._supervisor.kill()
        self._server.kill()

    def _watch_server(self, loop: asyncio.AbstractEventLoop) -> None:
        def watch() -> None:
            self._server.wait_ended()
            with contextlib.suppress(RuntimeError):  # the loop is closed: we ended first
                loop.call_soon_threadsafe(self._server_ended.set)

        threading.Thread(target=watch, daemon=True).start()

    async def _round(self) -> int | None:
        """One run of the app's processes; returns the exit code if it was the last."""
        from holdfast.worker.supervisor import Supervisor

        specs = await self._load()
        supervisor = self._supervisor = Supervisor(specs, stop_seconds=STOP_SECONDS)
        working = asyncio.create_task(supervisor.run())
        try:
            if not specs and not self._changes and not self._stop.is_set():
                return 1
            return await self._until_over(working)
        finally:
            supervisor.stop()
            await working

    async def _load(self) -> list[Spec]:
        """The processes of the app as it is on disk now; none when it cannot be loaded."""
        output = self._plan.folder / "app.json"
        command = [sys.executable, "-m", "holdfast.cli.loading", self._plan.target, str(output)]
        if await _finished(command, self._stop) != 0:
            self._wait_for_change()
            return []
        app = json.loads(output.read_text(encoding="utf-8"))
        specs = self._plan.specs({job["group"] for job in app["jobs"]})
        if not specs:
            out.note(f"error: app {app['name']!r} has no jobs")
            self._wait_for_change()
        elif not self._welcomed:
            self._welcome(app)
        return specs

    async def _until_over(self, working: asyncio.Task[int]) -> int | None:
        """Wait for something to end this round."""
        stop = asyncio.create_task(self._stop.wait())
        server = asyncio.create_task(self._server_ended.wait())
        waiting: set[asyncio.Task[Any]] = {stop, server}
        change = asyncio.create_task(self._changes.wait()) if self._changes else None
        if change:
            waiting.add(change)
        try:
            await asyncio.wait({*waiting, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and change and not (stop.done() or server.done()):
                self._wait_for_change()
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                return 0
            if server.done():
                out.note(
                    f"error: the nats-server ended; its log ends with:\n{self._server.log_tail()}",
                    lines=True,
                )
                return 1
            if change is None:
                return 1
            out.note(f"{_shown(change.result())} changed: restarting")
            return None
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def _wait_for_change(self) -> None:
        if self._changes and not self._stop.is_set():
            out.note("waiting for a change")

    def _welcome(self, app: dict[str, Any]) -> None:
        self._welcomed = True
        out.say(f"{self._plan.target} runs on {self._plan.url}, data in {self._store}")
        out.say("From another terminal:")
        if self._plan.url != f"nats://127.0.0.1:{PORT}":
            out.say(f"  export HOLDFAST_NATS_URL={self._plan.url}")
        out.say(f"  holdfast enqueue {_example(app['jobs'][0])}")
        if self._plan.web_port:
            out.say(f"Pages: http://{WEB_HOST}:{self._plan.web_port}/")
        if self._changes:
            folders = ", ".join(str(folder) for folder in self._changes.folders)
            out.say(f"A change of a .py file below {folders} restarts it. Ctrl-C stops everything.")


async def _finished(command: Sequence[str], stop: asyncio.Event) -> int:
    """Run a command to its end; killed when `stop` is set."""
    from holdfast.child import Child

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def on_exit() -> None:
        loop.call_soon_threadsafe(ended.set)

    child = Child(command, on_exit=on_exit)
    waiting = [asyncio.create_task(event.wait()) for event in (ended, stop)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    child.kill()
    await ended.wait()
    for task in waiting:
        task.cancel()
    return child.code or 0


def _example(job: dict[str, Any]) -> str:
    """How to enqueue a job, with a payload that it takes."""
    sample = job["sample"]
    return shlex.join([job["name"], sample]) if sample else str(job["name"])


def _shown(paths: Sequence[Path]) -> str:
    first = paths[0]
    text = str(first.relative_to(Path.cwd()) if first.is_relative_to(Path.cwd()) else first)
    return text if len(paths) == 1 else f"{text} and {len(paths) - 1} more files"
