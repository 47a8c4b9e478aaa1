"""Every role as a real process, and proof that each of them works.

`Everybody` starts control (scheduler, coordinator, dispatcher), a worker, an agent and the web
service. `works` checks that a run is executed, a slot fires, a command returns and pages load;
`quiet` checks that no process has ended and no log has a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from holdfast.broker import Broker
from holdfast.broker.streams import FLEET_BUCKETS, SETTINGS_BUCKETS, Topology
from holdfast.client import Client, once
from holdfast.client.fleet import Fleet, new_run
from holdfast.client.schedules import Schedules
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.errors import ResultTimeout
from holdfast.model.fleet import FleetRequest, FleetRun, Return
from holdfast.model.schedule import define
from holdfast.web.auth import make_token
from tests.faults.app import sender
from tests.faults.conftest import QUICK
from tests.faults.effects import Effects
from tests.faults.processes import Process
from tests.faults.scheduling import free_port
from tests.support import until

AGENT = "agent1"
TOKEN, HASHED = make_token("tester", "admin")
PAGES = ("/", "/runs", "/schedules", "/cluster", "/fleet", "/dead", "/jobs")
LISTS = (
    "runs",
    "schedules",
    "nodes",
    "agents",
    "fleet/runs",
    "dead",
    "dead/groups",
    "jobs",
    "audit",
    "settings",
    "settings/agents",
    "slots?schedule=tick",
    "stats",
)
COMMANDS = (
    ("runs", "list"),
    ("schedules", "list"),
    ("nodes", "list", "--all"),
    ("agents", "list"),
    ("fleet", "list"),
    ("fleet", "active"),
    ("dead", "list"),
    ("jobs", "list"),
    ("settings", "status"),
    ("unreadable", "list"),
)


class Everybody:
    """One namespace with every role in it."""

    def __init__(self, url: str, namespace: str, root: Path) -> None:
        self.url, self.namespace, self.root = url, namespace, root
        self.connection = ConnectionConfig(nats_url=url, namespace=namespace)
        self.broker = Broker(self.connection, name="test")
        self.app = sender(url, namespace)
        self.effects = Effects(root / "effects")
        self.processes: dict[str, Process] = {}
        self.ports: dict[str, int] = {}
        self._slots = 0

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Everybody]:
        """With a connection, and every bucket created."""
        (self.root / "effects").mkdir(exist_ok=True)
        async with self.broker:
            topology = Topology(self.broker, RecordConfig())
            await topology.ensure()
            for noun in (*FLEET_BUCKETS, *SETTINGS_BUCKETS, "sessions", "limits"):
                await topology.ensure_buckets(noun)
            self.client = Client(self.broker, RecordConfig())
            await self.client.data(once.BUCKET)
            try:
                yield self
            finally:
                for process in self.processes.values():
                    process.close()
                await self.app.close()

    async def start(self) -> None:
        """Start every role, and wait until each is ready."""
        tick = define("tick", "loose", every=1, body=b'{"key":"tick"}', catch_up="none")
        await Schedules(self.client).add(tick, replace=True)
        self._start("control", ["control"])
        self._start("worker", ["worker", "tests.faults.app:app"])
        self._start("agent", ["agent", "--id", AGENT, "--data", str(self.root / "agent")])
        self._start("web", ["web", "--port", "0"], HOLDFAST_WEB_TOKENS=HASHED)
        for name in self.processes:
            await until(lambda name=name: self._ready(name), 60, f"{name} ready")
        said = await until(lambda: re.findall(r"(http://\S+:\d+)/", self.log("web")), 30, "web")
        self.web = said[-1]

    def _start(self, name: str, command: list[str], **env: str) -> None:
        port = self.ports[name] = free_port()
        given = [*command, "--health-port", str(port), "--health-host", "127.0.0.1"]
        env |= {"EFFECTS": str(self.root / "effects"), **QUICK}
        log = self.root / f"{name}.log"
        self.processes[name] = Process(given, self.url, self.namespace, log, **env)

    async def _ready(self, name: str) -> bool:
        process = self.processes[name]
        assert process.running, f"{name} ended:\n{self.log(name)}"
        async with httpx.AsyncClient() as http:
            try:
                answer = await http.get(f"http://127.0.0.1:{self.ports[name]}/health/ready")
            except httpx.HTTPError:
                return False
        return answer.status_code == 200

    def log(self, name: str) -> str:
        return self.processes[name].text()

    # ---- proof

    async def works(self, label: str) -> None:
        """Check that each role does its work."""
        await self._run_is_executed(label)
        await self._slot_is_fired()
        record, returns = await self.command()
        assert (record.status, record.succeeded) == ("complete", 1), (record, returns)
        await self._pages_are_shown()
        self.quiet()

    async def _run_is_executed(self, label: str) -> None:
        sent = await self.app.jobs["work"].enqueue(key=label, seconds=0.0)
        try:
            assert await sent.result(timeout=60) == label
        except ResultTimeout:
            raise AssertionError(f"not executed:\n{self.log('worker')[-4000:]}") from None

    async def _slot_is_fired(self) -> None:
        def fired() -> int:
            return sum(start["key"] == "tick" for start in self.effects.starts())

        before = fired()
        await until(lambda: fired() > before, 60, "a slot to be fired")

    async def command(self, timeout: float = 30.0) -> tuple[FleetRun, dict[str, Return]]:
        """Send a command to the agent and wait for its end."""
        fleet = Fleet(self.broker)
        request = FleetRequest(new_run(), f"L@{AGENT}", "ping", timeout=timeout)
        record = await fleet.start(request)

        async def over() -> FleetRun | None:
            found = await fleet.read(request.run)
            return found if found.over else None

        record = await until(over, timeout + 30, "the command to end")
        return record, await fleet.returns(request.run)

    async def _pages_are_shown(self) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}", "Accept": "text/html"}
        async with httpx.AsyncClient(base_url=self.web, timeout=30, headers=headers) as http:
            for page in PAGES:
                answer = await http.get(page)
                assert answer.status_code == 200, (page, answer.status_code, answer.text[:300])
            for noun in LISTS:
                answer = await http.get(f"/api/v1/{noun}", headers={"Accept": "application/json"})
                assert answer.status_code == 200, (noun, answer.status_code, answer.text[:300])

    def quiet(self) -> None:
        """No process has ended, and no log has a traceback."""
        for name, process in self.processes.items():
            assert process.running, f"{name} has ended:\n{process.text()[-3000:]}"
            assert "Traceback" not in process.text(), f"{name}:\n{process.text()[-5000:]}"

    # ---- reporting

    async def metric(self, name: str, metric: str) -> dict[str, float]:
        """The values of a metric of one process, by bucket."""
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"http://127.0.0.1:{self.ports[name]}/metrics")).text
        found = re.findall(rf'^{metric}{{bucket="([^"]*)"}} (\S+)$', text, re.MULTILINE)
        return {bucket: float(value) for bucket, value in found}

    def memory(self) -> dict[str, int]:
        """The resident memory of each process, in kB."""
        found = {}
        for name, process in self.processes.items():
            status = Path(f"/proc/{process.pid}/status").read_text()
            found[name] = int(re.findall(r"VmRSS:\s+(\d+)", status)[0])
        return found

    async def slowest_answer(self, over: asyncio.Event) -> float:
        """The longest response time of any process's health probe, until `over` is set."""
        worst = 0.0
        async with httpx.AsyncClient(timeout=30) as http:
            while not over.is_set():
                for port in self.ports.values():
                    begun = time.monotonic()
                    await http.get(f"http://127.0.0.1:{port}/health/live")
                    worst = max(worst, time.monotonic() - begun)
                await asyncio.sleep(0.05)
        return worst
