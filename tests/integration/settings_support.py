"""A publisher and agents with their folders, and ways to tamper with what lies between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.agent.settings import AgentSettings
from holdfast.broker import Broker
from holdfast.config import ConnectionConfig
from holdfast.identity.seed import AccountSeed
from holdfast.names import kv_subject
from holdfast.server import Server
from holdfast.settings.plan import Plan
from holdfast.settings.publisher import Publisher
from holdfast.settings.renderer import Renderer
from holdfast.settings.sealing import Sealer
from tests.support import until

SEED = AccountSeed(bytes(range(32)))
CANARY = "canary-6f1d2c9b77-plaintext"

FILES = {
    "top": "base:\n  'web*': [common, db]\n  'G@os:debian': [apt]\n",
    "common": "name: {{ facts.name }}\ndb: {port: 1}\n",
    "db": f"db:\n  host: db1\n  password: !encrypted {CANARY}\n",
    "apt": "apt: {mirror: m1}\n",
}


@dataclass
class World:
    """A namespace with a publisher and any number of agents."""

    broker: Broker
    root: Path
    seed: AccountSeed = SEED
    renderer: Renderer = field(default_factory=lambda: Renderer(seconds=3))
    """Shared by the agents of a test."""

    @property
    def folder(self) -> Path:
        return self.root / "tree"

    @property
    def publisher(self) -> Publisher:
        return Publisher(self.broker, Sealer(self.seed))

    def write(self, **files: str) -> None:
        """Put files into the tree; an empty text removes one."""
        for name, text in files.items():
            path = self.folder / f"{name.replace('__', '/')}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text) if text else path.unlink()

    async def push(self, *agents: str, **options: Any) -> Plan:
        _, plan = await self.publisher.push(self.folder, agents=agents, **options)
        return plan

    def agent(
        self,
        id: str,
        facts: Mapping[str, Any] | None = None,
        *,
        seed: AccountSeed | None = None,
        as_agent: str = "",
        **options: Any,
    ) -> AgentSettings:
        """An agent that has not started, with a separate state folder."""
        keys = (seed or self.seed).agent_keys(as_agent or id)
        known = dict(facts or {"name": id, "os": "debian"})
        made = AgentSettings(
            self.broker,
            id,
            keys,
            lambda: known,
            self.root / "state" / id,
            renderer=self.renderer,
            jitter=0,
            **options,
        )
        made.load()
        return made

    async def put(self, bucket: str, key: str, body: bytes) -> None:
        """Write directly, bypassing the publisher, as an over-privileged client could."""
        await self.broker.store(kv_subject(self.broker.names.bucket(bucket), key), body)


@contextlib.asynccontextmanager
async def world(server: Server, namespace: str, root: Path) -> AsyncIterator[World]:
    """A connected world with a small tree."""
    async with Broker(ConnectionConfig(nats_url=server.url, namespace=namespace)) as broker:
        made = World(broker, root)
        made.write(**FILES)
        try:
            yield made
        finally:
            await made.renderer.close()


@contextlib.asynccontextmanager
async def following(*agents: AgentSettings) -> AsyncIterator[None]:
    """Agents follow the server while the block lasts."""
    runs = [asyncio.create_task(agent.run()) for agent in agents]
    try:
        yield
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


async def reaches(agent: AgentSettings, number: int) -> None:
    """Wait until a revision is in force on an agent."""
    await until(lambda: agent.report.number == number, 30, f"revision {number} on {agent.agent}")
