"""Shared by API and pages: one connection, and what each user may do through it.

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
from holdfast.model.runlog import LogLine
from holdfast.ownership.membership import Membership
from holdfast.redaction import is_secret
from holdfast.status.dead import Body, as_text
from holdfast.status.jobs import Jobs
from holdfast.status.listing import RunPages
from holdfast.status.operators import Action, Operator
from holdfast.status.run_index import EndedIndex, RunIndex
from holdfast.status.schedules import SlotHistory
from holdfast.status.totals import Archive
from holdfast.telemetry import Telemetry
from holdfast.web.auth import SESSIONS, Authenticate, Role, Sessions, Tokens, User, require
from holdfast.web.masking import MASK, masked, masked_bytes, masked_headers, masked_text
from holdfast.web.proxy_login import ProxyLogin

log = logging.getLogger("holdfast.web")

R = TypeVar("R", bound=msgspec.Struct)

REJOIN_SECONDS: Final = 1.0
"""Pause before joining again after this node was declared lost; pages are served meanwhile."""
BODY_SPARE: Final = 64 * 1024
"""Bytes of a request beside a message's payload: names, headers and options."""
LEARN_SECONDS: Final = 10.0
"""How long the published parameters of jobs are cached: reading them lists every job's consumer."""
LONG_BODY: Final = 16 * 1024
"""Longer bodies are masked in a thread, so that other requests are answered meanwhile."""


class Access(Operator):
    """One user's access to everything; what they do is audited under their name."""

    def __init__(self, services: Services, user: User) -> None:
        super().__init__(services.client, user.name)
        self.services = services
        self.user = user

    async def parameters(self, job: str) -> Sequence[str] | None:
        """The names of a job's parameters; None if neither the app nor a worker told them."""
        found = self.services.app.jobs.get(job) if self.services.app else None
        return found.signature.parameters if found else await self.services.published(job)

    async def hides_result(self, job: str, value: Any) -> bool:
        """Whether what a job returned is hidden from the user.

        A job that takes a secret may return it under any name. A bare text has no name at all, and
        is shown only if the names of the job and of its parameters are known to be harmless.
        """
        if self.user.sees_secrets:
            return False
        names = await self.parameters(job)
        if names is None:
            return isinstance(value, str) or (is_secret(job) and not isinstance(value, dict))
        if any(is_secret(name) for name in names):
            return value is not None
        return is_secret(job) and not isinstance(value, dict)

    async def result(self, value: Any, job: str) -> Any:
        """What a job returned, as the user may see it; `answer` masks the rest."""
        return MASK if await self.hides_result(job, value) else value

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
        names = () if job is None else await self.parameters(job)
        if len(data) > LONG_BODY:
            return Body("utf-8", await asyncio.to_thread(masked_bytes, data, names))
        return Body("utf-8", masked_bytes(data, names))

    async def log_lines(self, run: str, after: int = 0) -> list[LogLine]:
        """What a run has logged, as the user may see it."""
        found = await self.client.logs(run, after)
        if self.user.sees_secrets:
            return found
        return await asyncio.to_thread(lambda: [_masked_line(line) for line in found])

    @cached_property
    def run_pages(self) -> RunPages:
        """Lists of runs; from memory once the index is loaded."""
        services = self.services
        services.run_index.start()
        services.ended_index.start()
        return RunPages(self.client, index=services.run_index, ends=services.ended_index)

    @cached_property
    def slots(self) -> SlotHistory:
        return SlotHistory(self.client)


def _masked_line(line: LogLine) -> LogLine:
    text, extra = masked_text(line.text), masked(line.extra)
    return msgspec.structs.replace(line, text=text, extra=extra)


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
        """The user's app, if one was given, which knows the parameters of its jobs."""
        self.tokens = Tokens(config)
        self.proxy_login = ProxyLogin(config)
        self.authenticate = authenticate
        self.telemetry = Telemetry()
        self.broker = Broker(connection, name="holdfast web")
        self.client = Client(self.broker, records or RecordConfig(), self.telemetry)
        self.run_index = RunIndex(self.client)
        self.ended_index = EndedIndex(self.client)
        self.archive = Archive(self.client)
        self.sessions = Sessions(self.client, self.tokens, config.session_seconds)
        self.upkeep = Upkeep(self.client.topology, buckets=[SESSIONS])
        self.member: Membership | None = None
        self._liveness = liveness
        self._stop = stop or self._cannot_stop
        self.before_close: list[Callable[[], Awaitable[None]]] = []
        """Things to close before the connection."""
        self._parameters: dict[str, tuple[str, ...] | None] = {}
        self._learned = -1e9
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

    async def published(self, job: str) -> Sequence[str] | None:
        """The published parameters of a job, at most some seconds old."""
        now = self.broker.clock.monotonic()
        if now - self._learned > LEARN_SECONDS:
            with contextlib.suppress(BrokerError):
                self._parameters = await Jobs(self.client).parameters()
                self._learned = now
        return self._parameters.get(job)

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
        await self.ended_index.close()
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
