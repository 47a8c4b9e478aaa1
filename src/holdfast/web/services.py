"""What API and pages share: one connection, the readers of `holdfast.status`, the user's app.

Nothing in here is the truth: that is in NATS. A web process may be killed and started again, and
any number may run side by side.

It connects when the app starts, or, where no lifespan runs (a mounted app), with the first request.
The process is a node of role `web`: it heartbeats, answers pings and can be drained. One that was
declared lost holds nothing that could be harmed, so it joins again under a new name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cached_property
from typing import Annotated, Any, Final

from fastapi import Depends, Request

from holdfast.app import Holdfast
from holdfast.broker import Broker
from holdfast.broker.upkeep import Upkeep
from holdfast.client import Client
from holdfast.client.schedules import Schedules
from holdfast.config import ConnectionConfig, RecordConfig, WebConfig
from holdfast.errors import BrokerError
from holdfast.model.liveness import Liveness
from holdfast.ownership.membership import Membership
from holdfast.status.agents import Agents
from holdfast.status.audit import Audit
from holdfast.status.dead import Body, DeadLetters, as_text
from holdfast.status.fleet import FleetStatus
from holdfast.status.jobs import Jobs
from holdfast.status.nodes import Nodes
from holdfast.status.paging import RunPages
from holdfast.status.run_index import RunIndex
from holdfast.status.runs import Runs
from holdfast.status.schedules import SlotHistory
from holdfast.telemetry import Telemetry
from holdfast.web.auth import Authenticate, Role, Tokens, User, require
from holdfast.web.masking import hides, masked_bytes
from holdfast.web.sessions import BUCKET as SESSIONS
from holdfast.web.sessions import Sessions

log = logging.getLogger("holdfast.web")

REJOIN_SECONDS = 1.0
BODY_SPARE = 64 * 1024


LONG_BODY: Final = 16 * 1024
"""A longer body is masked in a thread, so that others are answered meanwhile."""


class Desk:
    """What one user works with: readers and actions that write the user's name to the audit."""

    def __init__(self, services: Services, user: User) -> None:
        self.services = services
        self.client = services.client
        self.user = user

    def parameters(self, job: str) -> Sequence[str] | None:
        """The names of a job's parameters; None when this process was given no app that has it."""
        found = self.services.app.jobs.get(job) if self.services.app else None
        return found.signature.parameters if found else None

    async def read(self, data: bytes, job: str | None = None) -> Body:
        """A foreign body as the user may read it; of a job's payload, say which job's it is."""
        if not hides(self.user):
            return as_text(data)
        names = () if job is None else self.parameters(job)
        if len(data) > LONG_BODY:
            return Body("utf-8", await asyncio.to_thread(masked_bytes, data, names))
        return Body("utf-8", masked_bytes(data, names))

    @cached_property
    def audit(self) -> Audit:
        return Audit(self.client, who=self.user.name)

    @cached_property
    def runs(self) -> Runs:
        return Runs(self.client, self.audit)

    @cached_property
    def run_pages(self) -> RunPages:
        """Lists of runs; from memory, as soon as that is filled."""
        self.services.run_index.start()
        return RunPages(self.client, index=self.services.run_index)

    @cached_property
    def dead(self) -> DeadLetters:
        return DeadLetters(self.client, self.audit)

    @cached_property
    def jobs(self) -> Jobs:
        return Jobs(self.client, self.audit)

    @cached_property
    def nodes(self) -> Nodes:
        return Nodes(self.client, self.audit)

    @cached_property
    def fleet(self) -> FleetStatus:
        return FleetStatus(self.client, self.user.name)

    @cached_property
    def agents(self) -> Agents:
        return Agents(self.client, self.user.name)

    @cached_property
    def schedules(self) -> Schedules:
        return Schedules(self.client)

    @cached_property
    def slots(self) -> SlotHistory:
        return SlotHistory(self.client)


class Services:
    """The connection of a web process, and what hangs on it."""

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
        """The user's app, when one was given: for the signatures of its jobs."""
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
        """What is to end while the connection is still there."""
        self._opening = asyncio.Lock()
        self._open = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def names(self) -> str:
        """The namespace that is shown."""
        return self.broker.names.namespace

    @property
    def body_limit(self) -> int:
        """The longest request that can make sense: what one message carries, and some more."""
        most = self.broker.max_message_bytes if self._open else 1024 * 1024
        return 2 * most + BODY_SPARE

    @property
    def failed(self) -> asyncio.Task[None] | None:
        """The task that ends, with an error, when something on the server cannot be made again."""
        return self._tasks[-1] if self._tasks else None

    def desk(self, user: User) -> Desk:
        """What a user works with."""
        return Desk(self, user)

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
        """Heartbeat; whoever was declared lost joins again, because nothing was taken over."""
        while True:
            assert self.member is not None
            await self.member.heartbeat.run()
            log.warning("this node was declared lost: it joins again")
            await self.broker.clock.sleep(REJOIN_SECONDS)
            with contextlib.suppress(BrokerError):
                await self._join()

    def _cannot_stop(self) -> None:
        log.warning("asked to drain, but this is part of another app: stop that one")


# ---- for routes


def services_of(request: Request) -> Services:
    """The services of the app that handles a request."""
    services: Services = request.app.state.services
    return services


def at_desk(role: Role) -> Callable[[Request], Desk]:
    """A dependency: the desk of the user, if they have this role or more."""
    check = require(role)

    def sit(request: Request) -> Desk:
        return services_of(request).desk(check(request))

    sit.role = role  # type: ignore[attr-defined]  # as `require` does
    return sit


ViewerDesk = Annotated[Desk, Depends(at_desk("viewer"))]
OperatorDesk = Annotated[Desk, Depends(at_desk("operator"))]
AdminDesk = Annotated[Desk, Depends(at_desk("admin"))]
