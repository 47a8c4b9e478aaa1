"""`/schedules/<name>`: one schedule: its rule, its slots, and why each did or did not run."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from holdfast.durations import instant
from holdfast.errors import InvalidInput, InvalidName
from holdfast.model import slot as slots
from holdfast.model.schedule import Schedule
from holdfast.status.outcomes import Outcome, outcomes
from holdfast.status.schedules import Why, explain
from holdfast.web.pages.schedules import ticks
from holdfast.web.pages.visit import ViewerVisit, Visit

router = APIRouter(include_in_schema=False)

SLOTS: Final = 40
LISTED: Final = 20
NEXT: Final = 8


@router.get("/schedules/{name}")
async def show(visit: ViewerVisit, name: str, at: str = "") -> Response:
    """One schedule; with `at`, what became of that slot."""
    schedule = await visit.desk.schedules.show(name)
    found = await outcomes(visit.client, name, SLOTS)
    why, problem = await _why(visit, name, at)
    return await visit.show(
        "schedule.html",
        "schedules",
        schedule=schedule,
        payload=await visit.body(bytes(schedule.payload), schedule.job),
        headers=visit.headers(dict(schedule.headers)),
        coming=await visit.desk.slots.next(name, NEXT) if schedule.active else [],
        ticks=ticks(visit, name, found),
        listed=[(one, _text(schedule, one)) for one in found[:LISTED]],
        stamp=slots.stamp,
        why=why,
        problem=problem,
        at=at,
    )


def _text(schedule: Schedule, one: Outcome) -> str:
    return explain(schedule, one.slot)


async def _why(visit: Visit, name: str, at: str) -> tuple[Why | None, str]:
    """What became of a slot, or why that cannot be told."""
    if not at:
        return None, ""
    try:
        return await visit.desk.slots.why(name, _moment(at)), ""
    except InvalidInput as error:
        return None, str(error)


def _moment(text: str) -> float:
    """A slot's time: as in its id, or as a person writes it."""
    try:
        return float(slots.parse_stamp(text))
    except InvalidName:
        return instant(text, "the time")
