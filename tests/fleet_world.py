"""A fleet inside a test: many agents on one connection, dispatchers and coordinators too."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from holdfast.agent import Agent, Function
from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.client.fleet import Fleet, new_run
from holdfast.config import AgentConfig, ConnectionConfig, DispatcherConfig, RecordConfig
from holdfast.coordinator import Coordinator
from holdfast.dispatcher import Dispatcher
from holdfast.identity.credentials import AgentCredentials
from holdfast.model.fleet import FleetRequest, FleetRun, Return
from holdfast.model.liveness import PROFILES
from holdfast.server import Cluster, Server
from holdfast.telemetry import Telemetry
from tests.support import running, until


class Effects(list[tuple[str, str]]):
    """What agents executed: agent and label, in order."""

    def of(self, label: str) -> Counter[str]:
        """How often each agent executed a label."""
        return Counter(agent for agent, given in self if given == label)


def offered(effects: Effects, agent: str) -> list[Function]:
    """Functions that record their execution."""

    async def mark(agent: str, label: str, seconds: float = 0.0) -> str:
        effects.append((agent, label))
        if seconds:
            await asyncio.sleep(seconds)
        return f"{agent}:{label}"

    async def fail(agent: str, label: str = "") -> None:
        effects.append((agent, label))
        raise ValueError(f"{agent} does not like it")

    async def big(agent: str, size: int) -> str:
        return "x" * size

    mine: Callable[..., Any] = functools.partial
    return [
        Function("mark", mine(mark, agent)),
        Function("look", mine(mark, agent), mutating=False),
        Function("fail", mine(fail, agent)),
        Function("big", mine(big, agent), mutating=False),
    ]


class World:
    """One namespace with agents and control services."""

    def __init__(self, server: Server | Cluster, namespace: str, root: Path) -> None:
        self.connection = ConnectionConfig(nats_url=server.url, namespace=namespace)
        self.effects = Effects()
        self.agents: dict[str, Agent] = {}
        self.telemetry = Telemetry()
        """Shared by all agents."""
        self._root = root
        self._dispatchers = 0
        self._stack = contextlib.AsyncExitStack()
        self.broker = Broker(self.connection, name="agents")
        self.sender = Broker(self.connection, name="sender")
        self.fleet = Fleet(self.sender)
        self.client = Client(self.sender, RecordConfig())

    async def __aenter__(self) -> World:
        await self._stack.enter_async_context(self.broker)
        await self._stack.enter_async_context(self.sender)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(agent.close() for agent in self.agents.values()))
        await self._stack.aclose()

    async def start_agents(self, *ids: str, **config: Any) -> None:
        """Start agents on the shared connection; running dispatchers know them afterwards."""
        await asyncio.gather(*(self.start_agent(agent, **config) for agent in ids))
        if self._dispatchers:
            await until(lambda: self._known(set(ids)), what=f"{ids} known to every dispatcher")

    async def _known(self, ids: set[str]) -> bool:
        """Ask often enough to reach every dispatcher: the server chooses which one answers."""
        asked = 1 if self._dispatchers == 1 else 4 * self._dispatchers
        return all([ids <= set(await self.fleet.resolve("*")) for _ in range(asked)])

    async def start_agent(
        self, id: str, credentials: AgentCredentials | None = None, **config: Any
    ) -> Agent:
        """Start one agent."""
        given = {"grace_seconds": 0.0, "data_dir": str(self._root / id), **config}
        agent = Agent(
            AgentConfig(id=id, **given),
            broker=self.broker,
            credentials=credentials,
            functions=offered(self.effects, id),
            telemetry=self.telemetry,
        )
        await agent.start()
        self.agents[id] = agent
        return agent

    @contextlib.asynccontextmanager
    async def dispatcher(self, **config: Any) -> AsyncIterator[Dispatcher]:
        """A dispatcher on this loop, which hands over what it owns at the end."""
        made = Dispatcher(self.connection, DispatcherConfig(**config), liveness=PROFILES["local"])
        async with running(made):
            self._dispatchers += 1
            try:
                yield made
            finally:
                self._dispatchers -= 1

    @contextlib.asynccontextmanager
    async def coordinator(self) -> AsyncIterator[Coordinator]:
        """A coordinator on this loop."""
        made = Coordinator(self.connection, liveness=PROFILES["local"])
        async with running(made):
            yield made

    # ---- asking

    def request(self, target: str, function: str, *args: Any, **options: Any) -> FleetRequest:
        """A request with a new id."""
        run = options.pop("run", "") or new_run()
        return FleetRequest(run, target, function, args, user="tester", **options)

    async def run(
        self, target: str, function: str, *args: Any, **options: Any
    ) -> tuple[FleetRun, dict[str, Return]]:
        """Send a command and wait for its end."""
        return await self.followed(self.request(target, function, *args, **options))

    async def followed(self, request: FleetRequest | str) -> tuple[FleetRun, dict[str, Return]]:
        """Follow a run to its end."""
        returns: dict[str, Return] = {}
        record: FleetRun | None = None
        async for found in self.fleet.follow(request):
            if isinstance(found, FleetRun):
                record = found
            else:
                returns[found.agent] = found
        assert record is not None
        return record, returns

    def commands(self, verdict: str) -> float:
        """How many commands the agents accepted or refused with this verdict."""
        return (
            self.telemetry.registry.get_sample_value(
                "holdfast_commands_total", {"verdict": verdict}
            )
            or 0.0
        )


@contextlib.contextmanager
def folder() -> Any:
    """A folder in memory, if possible: a thousand agents sync a thousand journals."""
    shared = Path("/dev/shm")
    made = tempfile.mkdtemp(prefix="holdfast-", dir=shared if shared.is_dir() else None)
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)
