"""Trace which files of the package take part in the seven flows, in real processes.

The tree's own commands run on a real nats-server. A `sitecustomize` on their path installs a
profile function while a flow is on its way: SIGUSR1 starts it, SIGUSR2 ends it and writes down the
files in which a function was called. A first, untraced pass of every flow loads and caches what is
only needed once.

What the count does not tell apart is background work that happens to run meanwhile, such as a
heartbeat; the windows are short, and every tree is traced in the same way. Not counted are the
lowest layer (names, errors, the clock, metrics, configuration), which every flow calls everywhere,
and the `register` functions of a command line that starts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from holdfast.server import Server
from holdfast.server.process import free_ports

LIMIT_SECONDS = 120.0
"""A loaded machine starts a role in about ten; a flow that takes longer does not work."""
AFTER_SECONDS = 0.3
"""What is left to do when a flow's result can be seen from outside: the acknowledgement."""
LOWEST = ("names", "clock", "config", "telemetry", "tracing", "errors", "durations", "version")

APP = """
import asyncio, os
from pathlib import Path
from holdfast import Context, Holdfast

app = Holdfast("flows")
folder = Path(os.environ["FLOWS"])

def note(name: str) -> None:
    with (folder / name).open("a") as file:
        file.write(f"{os.getpid()}\\n")

@app.job
async def work(number: int) -> int:
    return number

@app.job
async def hold(name: str, ctx: Context) -> None:
    note(name)
    while not (folder / f"{name}.open").exists():
        await asyncio.sleep(0.05)
"""
TICKING = (
    APP
    + """
@app.every("1s", overlap="allow")
async def tick(ctx: Context) -> None:
    note("tick")
"""
)
DRIVER = """
import asyncio, sys
import sitecustomize
from flows_app import app, hold, work

async def main() -> None:
    async with app:
        for line in iter(sys.stdin.readline, ""):
            verb, name = line.split()
            if verb == "enqueue":
                await work.enqueue(1)
                sitecustomize.start()
                await work.enqueue(2)
                sitecustomize.stop()
            elif verb == "work":
                await (await work.enqueue(3)).result(timeout=60)
            else:
                await hold.enqueue(name)
            print("done", flush=True)

asyncio.run(main())
"""
HOOK = """
import atexit, inspect, os, signal, sys

out = os.environ.get("FLOW_OUT")
package = os.environ.get("FLOW_PACKAGE", "?")
seen = set()

def importing(frame):
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False

def profile(frame, event, arg):
    code = frame.f_code
    name = code.co_filename
    if event != "call" or name in seen or not name.startswith(package):
        return
    if code.co_flags & inspect.CO_OPTIMIZED and code.co_name != "register" and not importing(frame):
        seen.add(name)

def start(*_):
    seen.clear()
    sys.setprofile(profile)

def stop(*_):
    sys.setprofile(None)
    draft = f"{out}.draft"
    with open(draft, "w") as file:
        file.write("\\n".join(seen))
    os.replace(draft, out)

if out:
    signal.signal(signal.SIGUSR1, start)
    signal.signal(signal.SIGUSR2, stop)
    if os.environ.get("FLOW_WHOLE"):
        atexit.register(stop)
        start()
"""


class Site:
    """A server, and processes of the tree on it."""

    def __init__(self, root: Path, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.package = root / "src" / "holdfast"
        self._root = root
        self._stack = stack
        self.folder.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(HOOK)
        (folder / "flows_app.py").write_text(APP)
        (folder / "ticking_app.py").write_text(TICKING)
        (folder / "driver.py").write_text(DRIVER)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
        self.env |= {
            "PYTHONPATH": os.pathsep.join([str(folder), str(root / "src")]),
            "FLOWS": str(folder),
            "FLOW_PACKAGE": str(self.package),
            "HOLDFAST_NAMESPACE": "flows",
        }

    def serve(self, **options: object) -> None:
        server = self._stack.enter_context(Server(fast=True, **options))  # type: ignore[arg-type]
        self.env["HOLDFAST_NATS_URL"] = server.url

    def out(self, name: str) -> Path:
        return self.folder / f"{name}.files"

    def start(self, name: str, *words: str, **env: str) -> subprocess.Popen[str]:
        """A process that is ended with the site; its output is kept in a file."""
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *words],
                env=self.env | {"FLOW_OUT": str(self.out(name))} | env,
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if words[0].endswith(".py") else log,
                stderr=log,
                text=True,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def role(self, name: str, *words: str, **env: str) -> subprocess.Popen[str]:
        """A role of Holdfast, ready when this returns."""
        (port,) = free_ports(1)
        process = self.start(name, "-m", "holdfast", *words, "--health-port", str(port), **env)
        wait(lambda: is_ready(port), f"{name} is ready: see {self.folder / name}.log")
        return process

    def run(self, name: str, *words: str, traced: bool = False, **env: str) -> bool:
        """One command to its end; whether it succeeded."""
        whole = {"FLOW_WHOLE": "1"} if traced else {}
        process = self.start(name, "-m", "holdfast", *words, **whole, **env)
        return process.wait(LIMIT_SECONDS) == 0

    @contextmanager
    def traced(self, **processes: subprocess.Popen[str]) -> Iterator[None]:
        """Trace these processes inside the block."""
        for process in processes.values():
            process.send_signal(signal.SIGUSR1)
        time.sleep(AFTER_SECONDS)
        yield
        time.sleep(AFTER_SECONDS)
        for name, process in processes.items():
            process.send_signal(signal.SIGUSR2)
            wait(self.out(name).exists, f"the trace of {name}")

    def files(self, *names: str) -> list[str]:
        """The files that the traces of these processes name, without the lowest layer."""
        found = {Path(p) for name in names for p in self.out(name).read_text().split("\n") if p}
        inside = (str(path.relative_to(self.package)) for path in found)
        return sorted(f for f in inside if not f.startswith(LOWEST))


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"not within {LIMIT_SECONDS:g} s: {what}")
        time.sleep(0.05)


def noted(site: Site, name: str) -> list[int]:
    """The processes that have written to a file of the app, in order."""
    path = site.folder / name
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def ask(driver: subprocess.Popen[str], text: str) -> None:
    """Let the driver do something, to its end."""
    assert driver.stdin
    assert driver.stdout
    driver.stdin.write(f"{text}\n")
    driver.stdin.flush()
    assert driver.stdout.readline() == "done\n", text


def runs(site: Site) -> dict[str, list[str]]:
    """Sending, working, listing, dying."""
    found = {}
    driver = site.start("driver", str(site.folder / "driver.py"))
    worker = site.role("worker", "worker", "flows_app:app")
    ask(driver, "enqueue -")
    found["enqueue to stored"] = site.files("driver")
    ask(driver, "work -")
    with site.traced(worker=worker):
        ask(driver, "work -")
    found["message to ack"] = site.files("worker")

    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/api/v1/runs"
    web = site.role("web", "web", "--host", "127.0.0.1", "--port", str(port))
    for traced in (False, True):
        with site.traced(web=web) if traced else ExitStack():
            assert json.load(urllib.request.urlopen(url, timeout=LIMIT_SECONDS))
    found["GET runs"] = site.files("web")

    coordinator = site.role("coordinator", "coordinator")
    for name, traced in (("first", False), ("second", True)):
        ask(driver, f"hold {name}")
        wait(lambda n=name: noted(site, n), "a run that starts")
        with site.traced(coordinator=coordinator) if traced else ExitStack():
            os.kill(noted(site, name)[0], signal.SIGKILL)
            site.role(f"worker-after-{name}", "worker", "flows_app:app")
            wait(lambda n=name: len(noted(site, n)) > 1, "a run that starts again")
        (site.folder / f"{name}.open").touch()
    found["death to restart"] = site.files("coordinator")
    return found


def slots(site: Site) -> dict[str, list[str]]:
    """A slot that comes due."""
    env = {"HOLDFAST_NAMESPACE": "ticking"}
    scheduler = site.role("scheduler", "scheduler", "ticking_app:app", **env)
    site.role("ticking", "worker", "ticking_app:app", **env)
    wait(lambda: noted(site, "tick"), "a slot")
    with site.traced(scheduler=scheduler):
        before = len(noted(site, "tick"))
        wait(lambda: len(noted(site, "tick")) >= before + 2, "two slots")
    return {"slot to run": site.files("scheduler")}


def fleet(site: Site) -> dict[str, list[str]]:
    """A command for an agent, and settings that are pushed to it; both need logins."""
    assert site.run("init", "auth", "init", "--out", "secrets")
    assert site.run("issue", "auth", "agent", "host", "--dir", "secrets")
    secrets = site.folder / "secrets"
    config = next(path for path in secrets.iterdir() if path.suffix == ".conf")
    site.serve(includes=[config])
    logins = {path.stem: str(path) for path in secrets.rglob("*.json")}

    def login(user: str) -> dict[str, str]:
        return {"HOLDFAST_CREDENTIALS_FILE": logins[user]}

    seed = {"HOLDFAST_DISPATCHER_SEED_FILE": str(secrets / "account.seed")}
    dispatcher = site.role("dispatcher", "dispatcher", **login("control"), **seed)
    data = site.folder / "data"
    agent = site.role("agent", "agent", "--id", "host", "--data", str(data), **login("agent-host"))
    command = ("fleet", "run", "host", "ping")
    wait(lambda: site.run("warm", *command, **login("operator")), "an answer of the agent")
    with site.traced(dispatcher=dispatcher, agent=agent):
        assert site.run("fleet", *command, traced=True, **login("operator"))
    found = {"fleet run": site.files("fleet", "dispatcher", "agent")}

    tree = site.folder / "tree"
    tree.mkdir()
    (tree / "top.yaml").write_text("base: {'*': [db]}\n")
    push = ("settings", "push", "tree", "--seed", "secrets/account.seed")
    for name in ("first", "second"):
        (tree / "db.yaml").write_text(f"db: {{name: {name}}}\n")
        traced = name == "second"
        site.out("agent").unlink(missing_ok=True)
        with site.traced(agent=agent) if traced else ExitStack():
            assert site.run("push", *push, traced=traced, **login("operator"))
            kept = data / "settings.json"
            wait(lambda n=name, k=kept: k.exists() and n in k.read_text(), "settings in force")
    found["settings push to in force"] = site.files("push", "agent")
    return found


FLOWS = (
    *("enqueue to stored", "message to ack", "death to restart", "slot to run"),
    *("fleet run", "settings push to in force", "GET runs"),
)


def trace(root: Path) -> dict[str, list[str]]:
    """The files of each flow in a tree."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-flows-"))
    found: dict[str, list[str]] = {}
    with ExitStack() as stack:
        site = Site(root, folder / "plain", stack)
        site.serve()
        found |= runs(site)
        found |= slots(site)
        found |= fleet(Site(root, folder / "logins", stack))
    shutil.rmtree(folder)
    return {flow: found[flow] for flow in FLOWS}
