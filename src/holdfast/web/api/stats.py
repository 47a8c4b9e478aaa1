"""Stats: how it goes, in numbers: throughput, lag, failures, the oldest run, the next slot."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from holdfast.clock import rfc3339
from holdfast.status.jobs import JobInfo
from holdfast.status.nodes import by_role
from holdfast.status.schedules import coming, overdue_since
from holdfast.web.live import Feed
from holdfast.web.rates import KEPT_SECONDS
from holdfast.web.services import ViewerDesk
from holdfast.web.wire import answer, returns

router = APIRouter(tags=["stats"])

FAILURES = ("failed", "dead", "lost")


class Oldest(msgspec.Struct, frozen=True):
    """The run that has waited for longest."""

    group: str
    job: str
    seconds: float


class DueNext(msgspec.Struct, frozen=True):
    """A slot to come."""

    schedule: str
    job: str
    due: str


class Stats(msgspec.Struct, frozen=True):
    """One look at everything."""

    at: str
    namespace: str
    seconds: int
    """How far back `ended`, `per_minute` and `failures` look."""
    counted_since: str
    """From when on nothing is missing in them; later than asked for while a process is young."""
    ended: dict[str, int]
    """How many attempts and runs ended how; without jobs that keep no records (`at_least_once`)."""
    per_minute: float
    failures: int
    waiting: int
    in_flight: int
    lag: int
    parked: int
    dead: int
    oldest_waiting: Oldest | None
    next_due: list[DueNext]
    overdue_seconds: float
    """How long a slot is due that nobody has fired; 0: none is."""
    nodes: dict[str, dict[str, int]]
    """By role, how many are in which state."""


@router.get("/stats", summary="Stats", **returns(Stats))
async def stats(
    request: Request,
    desk: ViewerDesk,
    seconds: Annotated[int, Query(ge=60, le=KEPT_SECONDS)] = 300,
) -> Response:
    """Counts of what ended are this process's own, completed from the newest records when it
    starts; everything else is read from the server."""
    feed: Feed = request.app.state.feed
    await feed.start()
    jobs, nodes, schedules, progress = await asyncio.gather(
        desk.jobs.list(), desk.nodes.list(), desk.schedules.list(), desk.slots.progress()
    )
    now = desk.client.broker.server_now()
    ended = feed.rates.totals(now, seconds)
    oldest = max(jobs, key=_age, default=None)
    waiting, in_flight = sum(j.waiting for j in jobs), sum(j.in_flight for j in jobs)
    found = Stats(
        rfc3339(now),
        desk.services.names,
        seconds,
        rfc3339(max(feed.rates.since, now - seconds)),
        dict(ended),
        round(60 * ended.total() / seconds, 3),
        sum(ended[kind] for kind in FAILURES),
        waiting,
        in_flight,
        waiting + in_flight,
        sum(j.parked for j in jobs),
        sum(j.dead for j in jobs),
        Oldest(oldest.group, oldest.job, _age(oldest)) if oldest and _age(oldest) else None,
        [DueNext(d.name, d.job, rfc3339(d.at)) for d in coming(schedules, now)],
        round(overdue_since(schedules, progress.watermark, now), 3),
        {role: dict(states) for role, states in by_role(nodes)},
    )
    return answer(request, found)


def _age(job: JobInfo) -> float:
    return job.oldest_seconds or 0.0
