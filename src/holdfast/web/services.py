"""What API and pages share: one connection, and what each user may do through it.

A web process keeps no state: everything is in NATS. It may be killed and restarted, and any number
may run side by side.

It connects when the app starts, or, where no lifespan runs (a mounted app), on the first request.
The process is a node of role `web`: it heartbeats, answers pings and can be drained. If it is
declared lost it joins again under a new name; it owns nothing that another node could take over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, TypeVar

import msgspec
from fastapi import Depends, Request

from holdfast.app import Holdfast
from holdfast.broker import Broker
from holdfast.broker.upkeep import Upkeep
from holdfast.client import Client
from holdfast.config import ConnectionConfig, RecordConfig, WebConfig
from holdfast.errors import BrokerError
from holdfast.model.liveness import Liveness
from holdfast.ownership.membership import Membership
from holdfast.status.actions import Action, Operator
from holdfast.status.dead import Body, as_text
from holdfast.status.listing import RunPages
from holdfast.status.run_index import RunIndex
from holdfast.status.schedules import SlotHistory
from holdfast.telemetry import Telemetry
from holdfast.web.auth import SESSIONS, Authenticate, Role, Sessions, Tokens, User, require
from holdfast.web.masking import masked_bytes, masked_headers, masked_text

log = logging.getLogger("holdfast.web")

R = TypeVar("R", bound=msgspec.Struct)

REJOIN_SECONDS: Final = 1.0
"""Pause before joining again after this node was declared lost."""
BODY_SPARE: Final = 64 * 1024
"""Room for what a request has besides a message's payload."""
LONG_BODY: Final = 16 * 1024
"""Longer bodies are masked in a thread, so that other requests are answered meanwhile."""


class Access(Operator):
    """One user's access to everything; what they do is audited under their name."""

    def __init__(self, services: Services, user: User) -> None:
        super().__init__(services.client, user.name)
        self.services = services
        self.user = user

    def parameters(self, job: str) -> Sequence[str] | None:
        """The names of a job's parameters; None if this process was given no app with that job."""
        found = self.services.app.jobs.get(job) if self.services.app else None
        return found.signature.parameters if found else None

    def text(self, text: str) -> str:
        """An error or note as the user may see it."""
        return text if self.user.sees_secrets else masked_text(text)

    def headers(self, headers: dict[str, str]) -> dict[str, str]:
        """A sender's headers as the user may see them."""
        return headers if self.user.sees_secrets else masked_headers(headers)

    def masked(self, record: R, *fields: str) -> R:
        """A record whose fields with free text are as the user may see them."""
        if self.user.sees_secrets:
            return record
        clean = {name: masked_text(getattr(record, name)) for name in fields}
        return msgspec.structs.replace(record, **clean)

    async def read(self, data: bytes, job: str | None = None) -> Body:
        """A body as the user may see it; for a payload, name its job."""
        if self.user.sees_secrets:
            return as_text(data)
        names = () if job is None else self.parameters(job)
        if len(data) > LONG_BODY:
            return Body("utf-8", await asyncio.to_thread(masked_bytes, data, names))
        return Body("utf-8", masked_bytes(data, names))

    @cached_property
    def run_pages(self) -> RunPages:
        """Lists of runs; from memory once the index is loaded."""
        self.services.run_index.start()
        return RunPages(self.client, index=self.services.run_index)

    @cached_property
    def slots(self) -> SlotHistory:
        return SlotHistory(self.client)


class Services:
    """The connection of a web process, and what uses it."""

    def __init__(
        self,
        config: WebConfig,
        connection: ConnectionConfig,
        *,
        records: RecordConfig | None = None,
        liveness: Liveness | None = None,
        app: Holdfast | None = None,
        authenticate: Authenticate | None = None,
        stop: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.app = app
        """The user's app, if one was given: it knows the parameters of its jobs."""
        self.tokens = Tokens(config)
        self.authenticate = authenticate
        self.telemetry = Telemetry()
        self.broker = Broker(connection, name="holdfast web")
        self.client = Client(self.broker, records or RecordConfig(), self.telemetry)
        self.run_index = RunIndex(self.client)
        self.sessions = Sessions(self.client, self.tokens, config.session_seconds)
        self.upkeep = Upkeep(self.client.topology, buckets=[SESSIONS])
        self.member: Membership | None = None
        self._liveness = liveness
        self._stop = stop or self._cannot_stop
        self.before_close: list[Callable[[], Awaitable[None]]] = []
        """What to close before the connection."""
        self._opening = asyncio.Lock()
        self._open = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def namespace(self) -> str:
        """The namespace that is shown."""
        return self.broker.names.namespace

    @property
    def body_limit(self) -> int:
        """The largest request body: a message, which JSON may double, plus `BODY_SPARE`."""
        most = self.broker.max_message_bytes if self._open else 1024 * 1024
        return 2 * most + BODY_SPARE

    @property
    def failed(self) -> asyncio.Task[None] | None:
        """The task that fails when something on the server cannot be created again."""
        return self._tasks[-1] if self._tasks else None

    def access(self, user: User) -> Access:
        """A user's access."""
        return Access(self, user)

    # ---- life

    async def open(self) -> None:
        """Connect and join, once."""
        async with self._opening:
            if self._open:
                return
            await self.broker.open()
            try:
                await self.client.topology.ensure()
                await self.sessions.ensure()
                await self._join()
            except BaseException:
                await self.broker.close()
                raise
            self._tasks = [
                asyncio.create_task(self._stay(), name="holdfast-heartbeat"),
                asyncio.create_task(self.upkeep.run(), name="holdfast-upkeep"),
            ]
            self._open = True

    async def close(self) -> None:
        """Leave and disconnect."""
        if not self._open:
            return
        self._open = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for end in self.before_close:
            await end()
        await self.run_index.close()
        if self.member:
            await self.member.stop()
        await self.broker.close()

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Any = None) -> AsyncIterator[None]:
        """Connected while it lasts."""
        await self.open()
        try:
            yield
        finally:
            await self.close()

    async def _join(self) -> None:
        self.member = Membership(
            self.broker, "web", liveness=self._liveness, stop=lambda: self._stop()
        )
        await self.member.start()

    async def _stay(self) -> None:
        """Heartbeat; after being declared lost, join again: there was nothing to take over."""
        while True:
            assert self.member is not None
            await self.member.heartbeat.run()
            log.warning("declared lost: joining again under a new name")
            await self.broker.clock.sleep(REJOIN_SECONDS)
            with contextlib.suppress(BrokerError):
                await self._join()

    def _cannot_stop(self) -> None:
        log.warning("cannot drain: mounted in another app, which must be stopped instead")


# ---- for routes


def services_of(request: Request) -> Services:
    """The services of the app that handles a request."""
    services: Services = request.app.state.services
    return services


def access_for(role: Role) -> Callable[[Request], Access]:
    """A dependency: the user's access, if they have this role or a higher one."""
    check = require(role)

    def access(request: Request) -> Access:
        return services_of(request).access(check(request))

    access.role = role  # type: ignore[attr-defined]  # tests read which role a route needs
    return access


def acting(action: Action[..., Any]) -> Any:
    """A dependency: the user's access, if their role may do an action."""
    return Depends(access_for(action.role))


ViewerAccess = Annotated[Access, Depends(access_for("viewer"))]
