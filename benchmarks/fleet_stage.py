"""The stage of `benchmarks.fleet`: a server with logins, control processes, processes of agents.

python -m benchmarks.fleet_stage URL FOLDER FIRST COUNT     one process of agents

The first process has the agents that a measure cuts off: they connect through a proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from holdfast.agent import Agent, Function
from holdfast.broker import Broker
from holdfast.client.fleet import Fleet
from holdfast.config import AgentConfig, ConnectionConfig
from holdfast.errors import HoldfastError, NotConnected
from holdfast.identity.credentials import AgentCredentials
from holdfast.identity.users import UserFolder
from holdfast.process import run_loop
from holdfast.server import Server
from holdfast.settings.renderer import Renderer
from holdfast.telemetry import Telemetry
from tests.faults.proxy import Proxy

STARTING = 8
"""Agents of a process that start at the same time."""
TICKS = os.sysconf("SC_CLK_TCK")
MOST_CUT_OFF = 1_000
RECONNECT_SECONDS = 20.0
"""Agents come back spread over this time: their logins share two cores with the server here."""


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


# ---- the agents of one process


class Host:
    """Many agents, and what they executed."""

    def __init__(self, url: str, folder: Path, first: int, count: int) -> None:
        self._url = url
        self._folder = folder
        self._ids = [f"web{n}" for n in range(first, first + count)]
        self._telemetry = Telemetry()
        self._renderer = Renderer()
        self._executed: dict[str, Counter[str]] = {}
        self._last: dict[str, float] = {}

    async def run(self) -> int:
        gate = asyncio.Semaphore(STARTING)

        async def start(id: str) -> Agent:
            async with gate:
                return await self._start(id)

        agents = await asyncio.gather(*map(start, self._ids))
        gc.collect()
        gc.freeze()  # a host has one agent: nobody else's garbage collector looks at thousands
        say("ready", len(agents))
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            label = line.strip()
            done = self._executed.get(label, Counter())
            connected = sum(agent.broker.connected for agent in agents)
            facts = {"agents": len(done), "executions": done.total(), "connected": connected}
            say(json.dumps({**facts, "last": self._last.get(label, 0.0)}))
        os._exit(0)  # ten thousand orderly goodbyes are not what is measured

    async def _start(self, id: str) -> Agent:
        async def mark(label: str, seconds: float = 0.0) -> bool:
            self._executed.setdefault(label, Counter())[id] += 1
            self._last[label] = time.time()
            if seconds:
                await asyncio.sleep(seconds)
            return True

        file = self._folder / "auth" / "credentials" / f"agent-{id}.json"
        agent = Agent(
            AgentConfig(
                data_dir=str(self._folder / "state" / id), reconnect_seconds=RECONNECT_SECONDS
            ),
            connection=ConnectionConfig(nats_url=self._url, credentials_file=str(file)),
            credentials=AgentCredentials.load(file),
            functions=[Function("mark", mark, mutating=False)],
            renderer=self._renderer,
            telemetry=self._telemetry,
        )
        while True:
            try:
                await agent.broker.open(check=False)
                break
            except NotConnected:  # a server gives a login two seconds, and this machine is busy
                await asyncio.sleep(1)
        await agent.start()
        return agent


# ---- the stage


class Stage:
    """A server with the fleet's logins, dispatchers, a coordinator, and processes of agents."""

    def __init__(
        self, root: Path, agents: int, processes: int, dispatchers: int, *, fast: bool
    ) -> None:
        self.root = root
        self.agents = agents
        self.behind = min(MOST_CUT_OFF, agents // 4)
        """Agents behind the proxy."""
        self._processes = processes
        self._dispatchers = dispatchers
        self._fast = fast
        self.folder = UserFolder(root / "auth")
        self.control: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
        self.hosts: list[asyncio.subprocess.Process] = []

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Stage]:
        begun = time.perf_counter()
        self.folder.init("hf")
        self.folder.add_agents([f"web{n}" for n in range(self.agents)])
        size = self.folder.config.stat().st_size / 1e6
        say(f"logins: {time.perf_counter() - begun:.1f} s, auth.conf {size:.1f} MB")
        with Server(fast=self._fast, includes=[self.folder.config]) as self.server:
            port = int(self.server.url.rsplit(":", 1)[1])
            try:
                async with Proxy(port) as self.proxy:
                    await self._start()
                    yield self
            finally:
                for _, process in self.control.values():
                    process.kill()
                    process.wait()
                for host in self.hosts:
                    host.kill()
                    await host.wait()

    async def _start(self) -> None:
        for role in ["dispatcher"] * self._dispatchers + ["coordinator"]:
            self._start_control(role)
        async with self.operator() as broker:
            while True:
                try:
                    await Fleet(broker).resolve("L@web0")
                    break
                except HoldfastError:
                    await asyncio.sleep(0.5)
        begun = time.perf_counter()
        await self._start_host(self.proxy.url, 0, self.behind)
        each = -(-(self.agents - self.behind) // self._processes)
        for first in range(self.behind, self.agents, each):
            await self._start_host(self.server.url, first, min(each, self.agents - first))
        for host in self.hosts:
            assert host.stdout
            assert b"ready" in await host.stdout.readline()
        spent = cpu(self.server.pid) / self.agents * 1000
        say(
            f"started: {self.agents} agents in {time.perf_counter() - begun:.1f} s, "
            f"{spent:.1f} ms of the server's CPU each"
        )

    async def _start_host(self, url: str, first: int, count: int) -> None:
        words = [url, str(self.root), str(first), str(count)]
        module = ("-m", "benchmarks.fleet_stage")
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        host = await asyncio.create_subprocess_exec(
            sys.executable, *module, *words, stdin=pipe, stdout=pipe, stderr=nothing
        )
        self.hosts.append(host)

    def _start_control(self, role: str) -> None:
        words = [role] + (
            ["--seed", str(self.root / "auth" / "account.seed")] * (role != "coordinator")
        )
        env = os.environ | {
            "HOLDFAST_NATS_URL": self.server.url,
            "HOLDFAST_CREDENTIALS_FILE": str(self.folder.credentials(role)),
        }
        with (self.root / f"{role}-{len(self.control)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", *words], env=env, stdout=log, stderr=log
            )
        self.control[process.pid] = role, process

    @contextlib.asynccontextmanager
    async def operator(self) -> AsyncIterator[Broker]:
        file = str(self.folder.credentials("operator"))
        config = ConnectionConfig(nats_url=self.server.url, credentials_file=file)
        async with Broker(config, name="operator") as broker:
            yield broker

    async def tally(self, label: str = "") -> dict[str, float]:
        """What the agents of all processes executed."""
        found: Counter[str] = Counter()
        last = 0.0
        for host in self.hosts:
            assert host.stdin
            assert host.stdout
            host.stdin.write(f"{label}\n".encode())
            await host.stdin.drain()
            told = json.loads(await host.stdout.readline())
            last = max(last, told.pop("last"))
            found.update(told)
        return {**found, "last": last}

    def used(self) -> str:
        """Memory and CPU time of the server and of each dispatcher."""
        found = [used("nats-server", self.server.pid)]
        found += [used(what, pid) for pid, (what, _) in self.control.items()]
        return ", ".join(found)

    def spent(self) -> Callable[[], str]:
        """CPU time that each kind of process uses for each agent from now on."""

        def now() -> dict[str, float]:
            found = {"server": cpu(self.server.pid), "this process": cpu(os.getpid())}
            found["agents"] = sum(cpu(host.pid) for host in self.hosts)
            found["dispatchers"] = sum(
                cpu(pid) for pid, (role, _) in self.control.items() if role == "dispatcher"
            )
            return found

        before = now()

        def text() -> str:
            return ", ".join(
                f"{who} {(used - before[who]) / self.agents * 1000:.2f} ms"
                for who, used in now().items()
            )

        return text

    def disturbance(self) -> Callable[[], str]:
        """What other work takes of the processors from now on, until the result is called."""
        pids = [self.server.pid, os.getpid(), *self.control, *(host.pid for host in self.hosts)]

        def taken() -> tuple[float, float]:
            every = [int(n) for n in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
            busy = (sum(every) - every[3] - every[4]) / TICKS  # without idle and iowait
            return busy - sum(map(cpu, pids)), sum(every) / TICKS

        before = taken()

        def found() -> str:
            others, total = (now - then for now, then in zip(taken(), before, strict=True))
            return f"other work took {max(0.0, others) / max(total, 0.01):.0%}"

        return found


def cpu(pid: int) -> float:
    """Seconds of CPU that a process has used; 0 if it is gone."""
    try:
        times = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(times[11]) + int(times[12])) / TICKS


def used(name: str, pid: int) -> str:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return f"{name} gone"
    lines = status.splitlines()
    memory = next((int(line.split()[1]) for line in lines if "VmRSS" in line), 0)
    return f"{name} {memory // 1024} MB {cpu(pid):.1f} s CPU"


if __name__ == "__main__":
    url, folder, first, count = sys.argv[1:]
    os.nice(19)  # on real hosts, agents take no time from dispatchers and server
    sys.exit(run_loop(Host(url, Path(folder), int(first), int(count)).run()))
