"""A server with the users of `holdfast auth`, and ways to log in to it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.broker import Broker
from holdfast.broker.streams import FLEET_BUCKETS, SETTINGS_BUCKETS
from holdfast.broker.wire import WireClient
from holdfast.client import Client
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.identity.credentials import Credentials
from holdfast.identity.users import UserFolder
from holdfast.names import Names
from holdfast.server import Cluster, Server

NAMESPACE = "hf"
AGENTS = ("alpha", "beta")


@dataclass(frozen=True)
class Site:
    """A server, and the folder of its users."""

    server: Server | Cluster
    folder: UserFolder
    open_as: str = ""
    """On a server without logins: the namespace."""
    homes: Mapping[str, str] = field(default_factory=dict)
    """Which server of a cluster a user connects to; all of them by default."""

    @property
    def names(self) -> Names:
        return Names(self.open_as or NAMESPACE)

    def file(self, user: str) -> str:
        return str(self.folder.credentials(user))

    def connection(self, user: str, **more: Any) -> ConnectionConfig:
        """How a process of that user connects."""
        url = self.homes.get(user, self.server.url)
        given = {"nats_url": url, "namespace": self.names.namespace, **more}
        return ConnectionConfig(**given, credentials_file="" if self.open_as else self.file(user))

    def environment(self, user: str) -> dict[str, str]:
        """The same as environment variables."""
        return {
            "HOLDFAST_NATS_URL": self.server.url,
            "HOLDFAST_NAMESPACE": NAMESPACE,
            "HOLDFAST_CREDENTIALS_FILE": self.file(user),
        }

    @contextlib.asynccontextmanager
    async def broker(self, user: str) -> AsyncIterator[Broker]:
        async with Broker(self.connection(user), name=user) as broker:
            yield broker

    @contextlib.asynccontextmanager
    async def operating(self) -> AsyncIterator[Client]:
        """An operator's client; every stream and bucket exists."""
        async with self.broker("operator") as broker:
            client = Client(broker, RecordConfig())
            await client.topology.ensure()
            await client.topology.ensure_buckets(*FLEET_BUCKETS, *SETTINGS_BUCKETS)
            yield client

    @contextlib.asynccontextmanager
    async def raw(self, user: str) -> AsyncIterator[Raw]:
        """A plain client that records what the server refused, as a thief would use."""
        login = Credentials.load(self.file(user))
        raw = Raw(login)
        await raw.open(self.server.url)
        try:
            yield raw
        finally:
            await raw.client.close()


@contextlib.contextmanager
def guarded(
    path: Path, agents: Sequence[str] = AGENTS, *, name: str = "auth", **options: Any
) -> Iterator[Site]:
    """A server that admits only the users of a new folder; `options` are for the server."""
    folder = UserFolder(path / name)
    folder.init(NAMESPACE)
    folder.add_agents(agents)
    with Server(fast=True, includes=[folder.config], **options) as server:
        yield Site(server, folder)
        server.kill()


class Raw:
    """nats-py with a login; its flush does not overtake what was published."""

    def __init__(self, login: Credentials) -> None:
        self.login = login
        self.errors: list[str] = []
        self.heard: list[Any] = []
        self.client = WireClient()

    async def open(self, url: str) -> None:
        async def on_error(error: Exception) -> None:
            self.errors.append(str(error))

        await self.client.connect(
            url,
            nkeys_seed_str=self.login.nkey_seed,
            inbox_prefix=self.login.inbox,
            error_cb=on_error,
            allow_reconnect=False,
        )

    async def may_publish(self, subject: str, reply: str = "") -> bool:
        """Whether the server accepts this; the message has no effect."""
        return await self._tried(self.client.publish(subject, b"", reply=reply), subject)

    async def may_hear(self, subject: str) -> bool:
        async def keep(message: Any) -> None:
            self.heard.append(message)

        return await self._tried(self.client.subscribe(subject, cb=keep), subject)

    async def _tried(self, step: Any, subject: str) -> bool:
        before = len(self.errors)
        await step
        await self.client.flush()
        return not any(f'"{subject.lower()}"' in e.lower() for e in self.errors[before:])
