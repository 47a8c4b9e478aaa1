"""A request for a page: the user, what they may read, and reads that several pages share.

Reads that every page makes (jobs, nodes, totals) are shared for about a second: ten people looking
at the same page cost as much as one.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
from fastapi import Depends, Request
from starlette.responses import Response

from holdfast.clock import Clock
from holdfast.model.schedule import Schedule
from holdfast.status.dead import dead_totals
from holdfast.status.jobs import JobInfo
from holdfast.status.limits import LimitInfo
from holdfast.status.nodes import NodeInfo
from holdfast.status.totals import Change
from holdfast.web.auth import Role, User, require
from holdfast.web.live import Feed
from holdfast.web.masking import MASK
from holdfast.web.pages.rendering import Question, redirect, render, shown
from holdfast.web.services import Access, services_of
from holdfast.web.wire import as_value

T = TypeVar("T")

SHARED_SECONDS: Final = 1.0
"""How long reads are shared: live pages refresh about every second, so longer would be
noticeable."""
SCHEDULES_SECONDS: Final = 2.0
"""Schedules and agents seldom change, and there may be thousands."""

COUNTED_SECONDS: Final = 5.0
"""How long counts of the history are shared between pages: the newest minute changes meanwhile."""
TREND_SECONDS: Final = 900
"""A quarter of an hour, recent enough to act on."""
MOST_SHARED: Final = 200
"""Answers that are kept: far more than people look at within seconds. A limit, because some keys
contain a job's name."""


class Shared:
    """Keeps answers for a moment; concurrent readers wait for one read."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: dict[str, tuple[float, Any]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, key: str, seconds: float, read: Callable[[], Awaitable[T]]) -> T:
        """An answer at most `seconds` old."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            at, kept = self._kept.get(key, (-1e9, None))
            if self._clock.monotonic() - at > seconds:
                kept = await read()
                self._kept.pop(key, None)
                self._kept[key] = (self._clock.monotonic(), kept)
                self._shrink()
        return cast(T, kept)

    def _shrink(self) -> None:
        """Drop the oldest answers above `MOST_SHARED`, and the locks that nobody needs."""
        for key in list(self._kept)[: max(0, len(self._kept) - MOST_SHARED)]:
            del self._kept[key]
        if len(self._locks) > 2 * MOST_SHARED:
            for key in [k for k, lock in self._locks.items() if not lock.locked()]:
                if key not in self._kept:
                    del self._locks[key]

    def forget(self) -> None:
        """Drop all answers: something was changed, and the next page must show it."""
        self._kept.clear()


class PageRequest(Access):
    """Everything that a page needs: the user's access, shared reads, and ways to answer."""

    def __init__(self, request: Request, user: User) -> None:
        super().__init__(services_of(request), user)
        self.request = request
        self.feed: Feed = request.app.state.feed
        self._shared: Shared = request.app.state.shared

    @property
    def now(self) -> float:
        return self.client.broker.server_now()

    async def shared(self, key: str, seconds: float, read: Callable[[], Awaitable[T]]) -> T:
        """An answer at most `seconds` old, shared between users."""
        return await self._shared.get(key, seconds, read)

    # ---- shared reads

    async def all_jobs(self) -> Sequence[JobInfo]:
        """Every job."""
        return await self.shared("jobs", SHARED_SECONDS, self.jobs.list)

    async def all_nodes(self) -> list[NodeInfo]:
        """Every node that has a record, including stopped ones."""
        return await self.shared("nodes", SHARED_SECONDS, lambda: self.nodes.list(ended=True))

    async def all_schedules(self) -> list[Schedule]:
        """Every schedule."""
        return await self.shared("schedules", SCHEDULES_SECONDS, self.schedules.list)

    async def all_limits(self) -> Sequence[LimitInfo]:
        """Every limit."""
        return await self.shared("limits", SHARED_SECONDS, self.limits.list)

    async def dead_totals(self) -> dict[tuple[str, str], int]:
        """How many dead letters each job has."""
        return await self.shared("dead", SHARED_SECONDS, lambda: dead_totals(self.client))

    async def trends(self) -> dict[tuple[str, str], list[int]]:
        """How many runs of each job ended in each of the last minutes, oldest first."""
        read = functools.partial(self.services.archive.trends, TREND_SECONDS)
        return await self.shared("trends", COUNTED_SECONDS, read)

    async def changes(self) -> dict[tuple[str, str], Change]:
        """How long the runs of each job took in the last seven days, and in those before."""
        return await self.shared("changes", COUNTED_SECONDS, self.services.archive.changes)

    async def states(self) -> Counter[tuple[str, str, str]] | None:
        """How many recorded runs have not ended, by group, job and state; None until it is known.

        The server's count of runs in flight includes waiting retries: this separates them.
        """
        index = self.services.run_index
        index.start()

        async def read() -> Counter[tuple[str, str, str]] | None:
            return index.states()

        return await self.shared("states", SHARED_SECONDS, read)

    # ---- data as the user may see it

    async def body(self, data: bytes, job: str | None = None) -> str:
        """A payload or result, formatted; for a payload, name its job."""
        if self.user.sees_secrets:
            return shown(data)
        return shown((await self.read(data, job)).text)

    async def shown_result(self, data: bytes, job: str) -> str:
        """What a job returned, as text."""
        return MASK if await self.hides_result(job, as_value(data)) else await self.body(data)

    async def value(self, value: Any) -> str:
        """A decoded value."""
        try:
            return await self.body(msgspec.json.encode(value))
        except RecursionError:
            return "nested too deeply to be shown"

    # ---- answers

    async def show(self, template: str, section: str, **data: Any) -> Response:
        """A page of a section; the feed starts with the first one."""
        await self.feed.start()
        totals = await self.dead_totals()
        dead_count = sum(totals.values())
        return render(self.request, template, section=section, dead_count=dead_count, **data)

    def ask(self, question: Question, section: str) -> Response:
        """A confirmation page; scripts show it as a dialog."""
        return render(self.request, "confirm.html", question=question, section=section)

    def done(self, to: str, text: str, level: str = "good") -> Response:
        """Go to a page after a change, and say there what was done."""
        self._shared.forget()
        return redirect(self.request, to, text, level)


def page_for(role: Role) -> Callable[[Request], PageRequest]:
    """A dependency: a page request by a user who has this role or a higher one."""
    check = require(role)

    def page(request: Request) -> PageRequest:
        return PageRequest(request, check(request))

    page.role = role  # type: ignore[attr-defined]  # tests read which role a route needs
    return page


ViewerPage = Annotated[PageRequest, Depends(page_for("viewer"))]
OperatorPage = Annotated[PageRequest, Depends(page_for("operator"))]
AdminPage = Annotated[PageRequest, Depends(page_for("admin"))]
