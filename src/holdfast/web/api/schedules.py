"""Schedules and their slots: list, show, add, remove, pause, resume, trigger, backfill, why."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from holdfast.clock import rfc3339
from holdfast.durations import instant
from holdfast.errors import InvalidInput
from holdfast.model.schedule import Schedule, define, next_after
from holdfast.names import DEFAULT_GROUP, check_name
from holdfast.status import schedule_actions as table
from holdfast.status.schedules import MOST_NEXT, Outcome, outcomes
from holdfast.web.masking import masked_bytes
from holdfast.web.services import Access, ViewerAccess, acting
from holdfast.web.wire import (
    Cursor,
    Limit,
    Page,
    answer,
    as_value,
    does,
    page_of,
    raw,
    reads,
    returns,
    stamp,
    takes,
)

router = APIRouter(tags=["schedules"])

SLOTS_MOST = 500
"""How many of a schedule's newest slots can be listed: bounds the time of an answer."""

Name = Annotated[str, Path(max_length=64, description="The schedule.")]


class ScheduleShown(msgspec.Struct, frozen=True):
    """A schedule."""

    name: str
    rule: str
    job: str
    group: str
    paused: str
    """When it was paused; empty if active."""
    next: str
    """Its next slot; empty if there is none."""
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
    """`code` if an app defines it, `api` if it was added at run time."""
    since: str
    """When its rule took effect."""
    changed: str
    payload: Any = None
    headers: dict[str, str] = {}


class NewSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schedule to add, with exactly one of `cron`, `every` and `at`."""

    name: str
    job: str
    cron: str | None = None
    """5 fields, 6 with seconds first, or e.g. `@hourly`."""
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
    """Replace an existing schedule."""


class Backfill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The past range whose slots to fire, both ends included."""

    start: str | float
    end: str | float


class BackfillDone(msgspec.Struct, frozen=True):
    """The slots that were sent now, and those that had been sent before."""

    sent: list[str]
    known: list[str]


class NextSlot(msgspec.Struct, frozen=True):
    """A future slot, and when it is sent."""

    slot: str
    due: str


class WhyShown(msgspec.Struct, frozen=True):
    """What happened to a slot."""

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
    """A schedule that was removed."""

    name: str


async def shown(access: Access, schedule: Schedule) -> ScheduleShown:
    """A schedule as a user may see it."""
    now = access.client.broker.server_now()
    coming = next_after(schedule, now) if schedule.active else None
    body = bytes(schedule.payload)
    if not access.user.sees_secrets:
        body = masked_bytes(body, await access.parameters(schedule.job)).encode()
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
        as_value(body),
        access.headers(schedule.headers),
    )


@router.get("/schedules", summary="List schedules", **returns(Page[ScheduleShown]))
async def list_schedules(
    request: Request,
    access: ViewerAccess,
    app: Annotated[str, Query(description="Only schedules of this app.")] = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """By name."""
    found = await access.schedules.list(app=check_name(app, "app") if app else "")
    page = page_of(found, lambda s: s.name, limit, cursor)
    return answer(request, Page([await shown(access, s) for s in page.items], page.next))


@router.post(
    "/schedules",
    summary="Add a schedule",
    **takes(NewSchedule),
    **does(table.add_schedule, ScheduleShown, 201),
)
async def add(
    request: Request,
    access: Annotated[Access, acting(table.add_schedule)],
    wanted: Annotated[NewSchedule, Depends(reads(NewSchedule))],
) -> Response:
    given = msgspec.structs.asdict(wanted)
    replace, body = given.pop("replace"), raw(given.pop("payload"))
    added = await table.add_schedule(access, define(**given, body=body), replace=replace)
    return answer(request, await shown(access, added), 201)


@router.get("/schedules/{name}", summary="Show a schedule", **returns(ScheduleShown))
async def show(request: Request, access: ViewerAccess, name: Name) -> Response:
    """One schedule; for its slots see `/slots`."""
    return answer(request, await shown(access, await access.schedules.show(name)))


@router.delete(
    "/schedules/{name}", summary="Remove a schedule", **does(table.remove_schedule, Removed)
)
async def remove(
    request: Request, access: Annotated[Access, acting(table.remove_schedule)], name: Name
) -> Response:
    await table.remove_schedule(access, name)
    return answer(request, Removed(name))


@router.post(
    "/schedules/{name}/pause",
    summary="Pause a schedule",
    **does(table.pause_schedule, ScheduleShown),
)
async def pause(
    request: Request, access: Annotated[Access, acting(table.pause_schedule)], name: Name
) -> Response:
    return answer(request, await shown(access, await table.pause_schedule(access, name)))


@router.post(
    "/schedules/{name}/resume",
    summary="Resume a schedule",
    **does(table.resume_schedule, ScheduleShown),
)
async def resume(
    request: Request, access: Annotated[Access, acting(table.resume_schedule)], name: Name
) -> Response:
    return answer(request, await shown(access, await table.resume_schedule(access, name)))


@router.post(
    "/schedules/{name}/trigger",
    summary="Trigger a schedule",
    **does(table.trigger_schedule, Triggered),
)
async def trigger(
    request: Request, access: Annotated[Access, acting(table.trigger_schedule)], name: Name
) -> Response:
    return answer(request, Triggered(await table.trigger_schedule(access, name)))


@router.post(
    "/schedules/{name}/backfill",
    summary="Backfill a schedule",
    **takes(Backfill),
    **does(table.backfill_schedule, BackfillDone),
)
async def backfill(
    request: Request,
    access: Annotated[Access, acting(table.backfill_schedule)],
    name: Name,
    wanted: Annotated[Backfill, Depends(reads(Backfill))],
) -> Response:
    start, end = instant(wanted.start, "start"), instant(wanted.end, "end")
    done = await table.backfill_schedule(access, name, start, end)
    return answer(request, BackfillDone(done.sent, done.known))


@router.get(
    "/schedules/{name}/next", summary="List a schedule's next slots", **returns(Page[NextSlot])
)
async def coming(
    request: Request,
    access: ViewerAccess,
    name: Name,
    limit: Annotated[int, Query(ge=1, le=MOST_NEXT)] = 10,
) -> Response:
    """The next slots, and when each is sent (jitter)."""
    found = await access.slots.next(name, limit)
    return answer(request, Page([NextSlot(rfc3339(m), rfc3339(due)) for m, due in found]))


@router.get("/schedules/{name}/why", summary="Explain a slot", **returns(WhyShown))
async def why(
    request: Request,
    access: ViewerAccess,
    name: Name,
    at: Annotated[str, Query(description="The slot's time; by default the latest.")] = "",
) -> Response:
    """Why a schedule did or did not run at a time."""
    found = await access.slots.why(name, instant(at, "at") if at else None)
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


# ---- slots

slots = APIRouter(tags=["slots"])


class SlotShown(msgspec.Struct, frozen=True):
    """A slot and its run."""

    schedule: str
    slot: str
    verdict: str
    """The state of its run, else of the slot; `sent` if its run has no record."""
    state: str
    reason: str
    """Why it was skipped."""
    due: str
    dispatched: str
    node: str
    epoch: int
    count: int
    """How many slots this record stands for: a skipped series has one record."""
    run: str = ""
    run_state: str = ""
    error: str = ""
    run_seconds: float = 0.0
    backfill: bool = False
    caught_up: bool = False


@slots.get("/slots", summary="List slots", **returns(Page[SlotShown]))
async def list_slots(
    request: Request,
    access: ViewerAccess,
    schedule: Annotated[str, Query(max_length=64, description="The schedule.")],
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """The 500 newest recorded slots of a schedule, latest first."""
    await access.schedules.show(schedule)
    found = await outcomes(access.client, schedule, SLOTS_MOST)
    if cursor:
        try:
            before = instant(cursor, "cursor")
        except InvalidInput:
            raise InvalidInput("not a cursor: use `next` of the previous page") from None
        found = [one for one in found if one.moment < before]
    page = found[:limit]
    following = rfc3339(page[-1].moment) if len(found) > limit else ""
    return answer(request, Page([_slot(access, schedule, one) for one in page], following))


def _slot(access: Access, schedule: str, one: Outcome) -> SlotShown:
    slot = one.slot
    return SlotShown(
        schedule,
        rfc3339(one.moment),
        one.verdict,
        slot.state,
        slot.reason,
        stamp(slot.due),
        stamp(slot.dispatched),
        slot.sender or slot.node,
        slot.epoch,
        slot.count,
        one.run,
        one.run_state,
        access.text(one.error),
        one.seconds,
        slot.backfill,
        slot.caught_up,
    )


router.include_router(slots)
