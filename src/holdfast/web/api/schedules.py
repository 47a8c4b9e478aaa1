"""Schedules: list, show, add, remove, pause, resume, trigger, backfill, next, why."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from holdfast.client.backfill import backfill as fill
from holdfast.clock import rfc3339
from holdfast.durations import instant
from holdfast.model.schedule import Schedule, define, next_after
from holdfast.names import DEFAULT_GROUP, check_name
from holdfast.status.schedules import MOST_NEXT
from holdfast.web.masking import hides, masked_bytes, masked_headers
from holdfast.web.services import AdminDesk, Desk, OperatorDesk, ViewerDesk
from holdfast.web.wire import (
    Cursor,
    Limit,
    Page,
    answer,
    as_value,
    page_of,
    raw,
    reads,
    returns,
    stamp,
    takes,
)

router = APIRouter(tags=["schedules"])

Name = Annotated[str, Path(max_length=64, description="The schedule.")]


class ScheduleShown(msgspec.Struct, frozen=True):
    """A schedule for people and programs."""

    name: str
    rule: str
    job: str
    group: str
    paused: str
    """Since when it is paused; empty: it is not."""
    next: str
    """Its next slot; empty: none will come."""
    tz: str
    catch_up: str
    limit: int
    overlap: str
    jitter_seconds: float
    start: str
    end: str
    app: str
    release: str
    source: str
    """`code`: an app defines it; `api`: it was added at run time."""
    since: str
    """Since when its rule counts."""
    changed: str
    payload: Any = None
    headers: dict[str, str] = {}


class NewSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schedule to be added: exactly one of `cron`, `every` and `at`."""

    name: str
    job: str
    cron: str | None = None
    """5 fields, 6 with seconds first, or `@hourly`."""
    every: str | float | None = None
    """An interval: `30s`, `5m`, or seconds."""
    at: str | float | None = None
    """Once: 2026-11-16T09:00:00+01:00, or seconds since 1970."""
    tz: str = "UTC"
    group: str = DEFAULT_GROUP
    payload: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    headers: dict[str, str] = {}
    jitter: str | float = 0
    start: str | float | None = None
    end: str | float | None = None
    catch_up: str = "all"
    """`all`, `last` or `none`."""
    limit: int = 100
    overlap: str = "allow"
    """`allow`, `skip`, `queue` or `cancel`."""
    replace: bool = False
    """Replace one that exists."""


class Backfill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A past time whose slots are to be fired; both ends are included."""

    start: str | float
    end: str | float


class BackfillDone(msgspec.Struct, frozen=True):
    """The slots that were sent, and those that had been sent before."""

    sent: list[str]
    known: list[str]


class Instant(msgspec.Struct, frozen=True):
    """A slot to come, and when it is sent."""

    slot: str
    due: str


class WhyShown(msgspec.Struct, frozen=True):
    """What became of a slot."""

    schedule: str
    slot: str
    verdict: str
    """dispatched, planned, waiting, skipped, paused, not_due, future, overdue, expired, removed."""
    explanation: str
    run: str = ""
    run_state: str = ""


class Triggered(msgspec.Struct, frozen=True):
    """The run that was sent."""

    run: str


class Removed(msgspec.Struct, frozen=True):
    """A schedule that is no more."""

    name: str


def shown(desk: Desk, schedule: Schedule) -> ScheduleShown:
    """A schedule as a user may see it."""
    now = desk.client.broker.server_now()
    coming = next_after(schedule, now) if schedule.active else None
    body, headers = bytes(schedule.payload), schedule.headers
    if hides(desk.user):
        body = masked_bytes(body, desk.parameters(schedule.job)).encode()
        headers = masked_headers(headers)
    payload = as_value(body)
    return ScheduleShown(
        schedule.name,
        schedule.rule,
        schedule.job,
        schedule.group,
        stamp(schedule.paused),
        rfc3339(coming) if coming is not None else "",
        schedule.tz,
        schedule.catch_up,
        schedule.limit,
        schedule.overlap,
        schedule.jitter,
        stamp(schedule.start),
        stamp(schedule.end),
        schedule.app,
        schedule.release,
        schedule.source,
        stamp(schedule.since),
        stamp(schedule.changed),
        payload,
        headers,
    )


@router.get("/schedules", summary="List schedules", **returns(Page[ScheduleShown]))
async def list_schedules(
    request: Request,
    desk: ViewerDesk,
    app: Annotated[str, Query(description="Of one app only.")] = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """By name."""
    found = await desk.schedules.list(app=check_name(app, "app") if app else "")
    page = page_of(found, lambda s: s.name, limit, cursor)
    return answer(request, Page([shown(desk, s) for s in page.items], page.next))


@router.post(
    "/schedules", summary="Add a schedule", **takes(NewSchedule), **returns(ScheduleShown, 201)
)
async def add(
    request: Request, desk: AdminDesk, wanted: Annotated[NewSchedule, Depends(reads(NewSchedule))]
) -> Response:
    """Or replace one that was added at run time; one in an app's code belongs to that app."""
    given = msgspec.structs.asdict(wanted)
    replace, body = given.pop("replace"), raw(given.pop("payload"))
    schedule = define(**given, body=body)
    added = await desk.schedules.add(schedule, replace=replace)
    await desk.audit.write("add", group=added.group, job=added.job, detail=added.name)
    return answer(request, shown(desk, added), 201)


@router.get("/schedules/{name}", summary="Show a schedule", **returns(ScheduleShown))
async def show(request: Request, desk: ViewerDesk, name: Name) -> Response:
    """One schedule; its slots are at `/slots`."""
    return answer(request, shown(desk, await desk.schedules.show(name)))


@router.delete("/schedules/{name}", summary="Remove a schedule", **returns(Removed))
async def remove(request: Request, desk: AdminDesk, name: Name) -> Response:
    """Slots that are planned already are still sent. An app whose code defines it adds it again
    when it starts."""
    await desk.schedules.remove(name)
    await desk.audit.write("remove", detail=name)
    return answer(request, Removed(name))


@router.post("/schedules/{name}/pause", summary="Pause a schedule", **returns(ScheduleShown))
async def pause(request: Request, desk: OperatorDesk, name: Name) -> Response:
    """It fires no more; what it misses meanwhile is not made up for."""
    paused = await desk.schedules.pause(name)
    await desk.audit.write("pause", detail=f"schedule {name}")
    return answer(request, shown(desk, paused))


@router.post("/schedules/{name}/resume", summary="Resume a schedule", **returns(ScheduleShown))
async def resume(request: Request, desk: OperatorDesk, name: Name) -> Response:
    """It fires again, from now on."""
    resumed = await desk.schedules.resume(name)
    await desk.audit.write("resume", detail=f"schedule {name}")
    return answer(request, shown(desk, resumed))


@router.post("/schedules/{name}/trigger", summary="Fire it now", **returns(Triggered))
async def trigger(request: Request, desk: OperatorDesk, name: Name) -> Response:
    """One run of it, beside its slots."""
    run = await desk.schedules.trigger(name)
    await desk.audit.write("trigger", runs=[run], detail=name)
    return answer(request, Triggered(run))


@router.post(
    "/schedules/{name}/backfill",
    summary="Fire past slots",
    **takes(Backfill),
    **returns(BackfillDone),
)
async def backfill(
    request: Request,
    desk: OperatorDesk,
    name: Name,
    wanted: Annotated[Backfill, Depends(reads(Backfill))],
) -> Response:
    """Those that did not run; those that did are left alone."""
    done = await fill(desk.client, name, instant(wanted.start, "start"), instant(wanted.end, "end"))
    await desk.audit.write("backfill", count=len(done.sent), detail=name)
    return answer(request, BackfillDone(done.sent, done.known))


@router.get("/schedules/{name}/next", summary="Slots to come", **returns(Page[Instant]))
async def coming(
    request: Request,
    desk: ViewerDesk,
    name: Name,
    limit: Annotated[int, Query(ge=1, le=MOST_NEXT)] = 10,
) -> Response:
    """The next instants, and when each is sent (jitter)."""
    found = await desk.slots.next(name, limit)
    return answer(request, Page([Instant(rfc3339(m), rfc3339(due)) for m, due in found]))


@router.get("/schedules/{name}/why", summary="Why it did or did not run", **returns(WhyShown))
async def why(
    request: Request,
    desk: ViewerDesk,
    name: Name,
    at: Annotated[str, Query(description="The slot's time; empty: the newest slot.")] = "",
) -> Response:
    """What became of a slot, also of one that did not run."""
    found = await desk.slots.why(name, instant(at, "at") if at else None)
    return answer(
        request,
        WhyShown(
            found.schedule,
            found.time,
            found.verdict,
            found.explanation,
            found.run,
            found.run_state,
        ),
    )
