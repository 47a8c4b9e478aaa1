"""One visit to a page: who looks, through which desk, and what several pages read at once.

Reads that every page makes (jobs, nodes, totals) are shared for about a second: ten people who look
at the same page cost as much as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
from fastapi import Depends, Request
from starlette.responses import Response

from holdfast.clock import Clock
from holdfast.model.schedule import Schedule
from holdfast.status.dead_groups import dead_totals
from holdfast.status.jobs import JobInfo
from holdfast.status.nodes import NodeInfo
from holdfast.web.auth import Role
from holdfast.web.live import Feed
from holdfast.web.masking import MASK, hides, is_secret, masked_headers, masked_text
from holdfast.web.pages.rendering import Question, ask, done, page, shown
from holdfast.web.services import Desk, at_desk

T = TypeVar("T")

SHARED_SECONDS: Final = 1.0
SCHEDULES_SECONDS: Final = 2.0


class Shared:
    """Answers that are good for a moment, and asked for once at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: dict[str, tuple[float, Any]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, key: str, seconds: float, read: Callable[[], Awaitable[T]]) -> T:
        """What was read less than so many seconds ago, or what is read now."""
        async with self._locks.setdefault(key, asyncio.Lock()):
            at, kept = self._kept.get(key, (-1e9, None))
            if self._clock.monotonic() - at > seconds:
                kept = await read()
                self._kept[key] = (self._clock.monotonic(), kept)
            return cast(T, kept)

    def forget(self) -> None:
        """Somebody has changed something: the next page must show it."""
        self._kept.clear()


class Visit:
    """What a page works with."""

    def __init__(self, request: Request, desk: Desk) -> None:
        self.request = request
        self.desk = desk
        self.client = desk.client
        self.feed: Feed = request.app.state.feed
        self._shared: Shared = request.app.state.shared

    @property
    def now(self) -> float:
        return self.client.broker.server_now()

    async def shared(self, key: str, seconds: float, read: Callable[[], Awaitable[T]]) -> T:
        """What was read less than so many seconds ago, by whomever."""
        return await self._shared.get(key, seconds, read)

    # ---- what several pages read

    async def jobs(self) -> Sequence[JobInfo]:
        """Every job with its numbers."""
        return await self._shared.get("jobs", SHARED_SECONDS, self.desk.jobs.list)

    async def nodes(self) -> list[NodeInfo]:
        """Every node that has a record, also those that have ended."""
        return await self._shared.get("nodes", SHARED_SECONDS, self._read_nodes)

    async def _read_nodes(self) -> list[NodeInfo]:
        return await self.desk.nodes.list(ended=True)

    async def schedules(self) -> list[Schedule]:
        """Every schedule."""
        return await self._shared.get("schedules", SCHEDULES_SECONDS, self.desk.schedules.list)

    async def dead_totals(self) -> dict[tuple[str, str], int]:
        """How many dead letters each job has."""
        return await self._shared.get("dead", SHARED_SECONDS, lambda: dead_totals(self.client))

    @property
    def uncounted(self) -> set[tuple[str, str]]:
        """Group and name of the jobs of which no chart knows: they keep no records.

        Only an app's code tells which they are: none when `holdfast web` was given no app.
        """
        app = self.desk.services.app
        specs = [job.spec for job in app.jobs.values()] if app else []
        return {(spec.group, spec.name) for spec in specs if not spec.recorded}

    # ---- what others wrote

    def text(self, text: str) -> str:
        """An error or a note; secrets are masked for those who only look."""
        return masked_text(text) if hides(self.desk.user) else text

    async def body(self, data: bytes, job: str | None = None) -> str:
        """A payload or a result for reading, likewise; of a payload, say which job's it is."""
        if not hides(self.desk.user):
            return shown(data)
        return shown((await self.desk.read(data, job)).text)

    async def result(self, data: bytes, job: str) -> str:
        """What a job returned, likewise; a bare value has no name but the job's."""
        bare = is_secret(job) and data.lstrip()[:1] != b"{"
        return MASK if bare and hides(self.desk.user) else await self.body(data)

    async def value(self, value: Any) -> str:
        """A value that came decoded, likewise."""
        try:
            return await self.body(msgspec.json.encode(value))
        except RecursionError:
            return "nested too deeply to be shown"

    def headers(self, headers: dict[str, str]) -> dict[str, str]:
        """The sender's headers, likewise."""
        return masked_headers(headers) if hides(self.desk.user) else headers

    # ---- answers

    async def show(self, template: str, section: str, **data: Any) -> Response:
        """A page of a section; the feed runs from the first one on."""
        await self.feed.start()
        totals = await self.dead_totals()
        return page(
            self.request, template, section=section, dead_count=sum(totals.values()), **data
        )

    def ask(self, question: Question, section: str) -> Response:
        """A question before something is changed."""
        return ask(self.request, question, section)

    def done(self, to: str, text: str, level: str = "good") -> Response:
        """Something was changed: go on, and say what."""
        self._shared.forget()
        return done(self.request, to, text, level)


def visit(role: Role) -> Callable[..., Visit]:
    """A dependency: a visit by somebody who has this role or more."""
    sit = Depends(at_desk(role))

    def begin(request: Request, desk: Desk = sit) -> Visit:
        return Visit(request, desk)

    return begin


ViewerVisit = Annotated[Visit, Depends(visit("viewer"))]
OperatorVisit = Annotated[Visit, Depends(visit("operator"))]
AdminVisit = Annotated[Visit, Depends(visit("admin"))]
