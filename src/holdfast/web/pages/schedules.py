"""`/schedules`: the list of schedules; and one schedule with its slots, and why each ran or not."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from holdfast.clock import rfc3339
from holdfast.durations import DAY, instant
from holdfast.errors import InvalidInput, InvalidName
from holdfast.model import slot as slots
from holdfast.model.schedule import Schedule, due_at, next_after
from holdfast.status.days import CELL, CELLS, KINDS, day
from holdfast.status.schedules import Outcome, Why, explain, outcomes
from holdfast.web.pages.charts import Block
from holdfast.web.pages.rendering import clock, first_line, long, zoned
from holdfast.web.pages.request import PageRequest, ViewerPage

router = APIRouter(include_in_schema=False)

SHOWN: Final = 25
"""Each schedule on the page costs one read of its slots."""
TICKS: Final = 20
"""Past slots in one row of the list."""
SLOTS: Final = 40
"""Past slots drawn on a schedule's page."""
LISTED: Final = 20
"""How many of them are rows of the table."""
DAY_SHOWN: Final = 100
"""Schedules on the page of a day."""
DAY_SECONDS: Final = 5.0
"""How long a day is shared between pages: reading it may take most of a second."""
NEXT: Final = 8
"""Future slots shown: enough to notice a wrong rule."""

_LOOKS: Final = {
    "done": "done",
    "failed": "failed",
    "dead": "dead",
    "lost": "lost",
    "running": "running",
    "cancelled": "cancelled",
    "sent": "unknown",
    "skipped": "skipped",
    "planned": "hollow",
    "waiting": "hollow",
}


_DAY_LOOKS: Final = {
    "missed": "dead",
    "skipped": "cancelled",
    "late": "failed",
    "waiting": "running",
    "fired": "done",
    "due": "unknown",
}


class Tick(msgspec.Struct, frozen=True):
    """One slot in a strip of slots."""

    look: str
    title: str
    href: str


class ScheduleLine(msgspec.Struct, frozen=True):
    """One schedule in the list."""

    schedule: Schedule
    next: float
    last: Outcome | None
    ticks: list[Tick]


@router.get("/schedules")
async def list_schedules(page: ViewerPage, q: str = "", start: int = 0) -> Response:
    """The schedules whose name, job or app contains `q`."""
    every = await page.all_schedules()
    found = [s for s in every if q.lower() in f"{s.name} {s.job} {s.app}".lower()]
    start = max(0, start)
    chosen = found[start : start + SHOWN]
    lines = await asyncio.gather(*(_line(page, schedule) for schedule in chosen))
    return await page.show(
        "schedules.html",
        "schedules",
        lines=lines,
        count=len(found),
        every=len(every),
        q=q,
        start=start,
        older=start + SHOWN if start + SHOWN < len(found) else 0,
    )


async def _line(page: PageRequest, schedule: Schedule) -> ScheduleLine:
    found = await outcomes(page.client, schedule.name, TICKS)
    moment = next_after(schedule, page.now) if schedule.active else None
    due = due_at(schedule, moment) if moment is not None else 0.0
    return ScheduleLine(
        schedule, due, found[0] if found else None, ticks(page, schedule.name, found, schedule.tz)
    )


def ticks(page: PageRequest, name: str, found: list[Outcome], tz: str) -> list[Tick]:
    """Slots as a strip, the latest on the right."""
    root = str(page.request.scope.get("root_path", ""))
    return [
        Tick(
            _LOOKS.get(one.verdict, "unknown"),
            page.text(tick_title(one, tz)),
            f"{root}/schedules/{name}?at={slots.stamp(one.moment)}",
        )
        for one in reversed(found)
    ]


def tick_title(one: Outcome, tz: str = "UTC") -> str:
    """What happened to a slot, in one line, with its time in the schedule's zone."""
    text = f"{zoned(one.moment, tz)}: {one.verdict}"
    if one.slot.state == "skipped":
        text += f" ({one.slot.reason})"
    if one.seconds:
        text += f" in {long(one.seconds)}"
    if one.slot.caught_up:
        text += ", caught up"
    return text + (f": {first_line(one.error)}" if one.error and one.verdict != "done" else "")


# ---- one day of all schedules


class DayLine(msgspec.Struct, frozen=True):
    """One schedule on one day."""

    name: str
    tz: str
    blocks: list[Block]
    told: str
    """How many slots of each kind."""


@router.get("/schedules/day")
async def show_day(page: ViewerPage, date: str = "", start: int = 0) -> Response:
    """What became of all slots of a day, and what is still due; today unless a date is given."""
    at = _day(date) if date else page.now
    every = await page.all_schedules()
    first = int(at) // DAY * DAY
    found = await page.shared(f"day {first}", DAY_SECONDS, lambda: day(page.client, every, at))
    start = max(0, start)
    chosen = every[start : start + DAY_SHOWN]
    return await page.show(
        "schedule_day.html",
        "schedules",
        date=rfc3339(first)[:10],
        days=[rfc3339(page.now + n * DAY)[:10] for n in range(-6, 2)],
        today=first == int(page.now) // DAY * DAY,
        lines=[day_line(one, found.first, found.cells.get(one.name, {})) for one in chosen],
        since=found.since if found.since > first else 0,
        count=len(every),
        start=start,
        older=start + DAY_SHOWN if start + DAY_SHOWN < len(every) else 0,
    )


def _day(text: str) -> float:
    """Midnight of a date."""
    return instant(f"{text}T00:00:00Z", "the date")


def day_line(schedule: Schedule, first: int, cells: dict[int, Counter[str]]) -> DayLine:
    """The quarters of an hour of one schedule, each as bad as its worst slot."""
    width, blocks = 1000 / CELLS, []
    for cell, counts in sorted(cells.items()):
        worst = next((kind for kind in KINDS if counts[kind]), "due")
        begin = clock(first + cell * CELL)[:5]
        title = f"{begin} UTC: {_counts(counts)}"
        blocks.append(Block(cell * width, 0, width - 1, 18, _DAY_LOOKS[worst], title))
    total = sum(cells.values(), Counter[str]())
    still = total.pop("due", 0)  # not all of them were looked at
    told = _counts(total) or ("none yet" if still else "none")
    return DayLine(schedule.name, schedule.tz, blocks, told)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in reversed(KINDS) if counts[kind])


# ---- one schedule


@router.get("/schedules/{name}")
async def show(page: ViewerPage, name: str, at: str = "") -> Response:
    """One schedule; with `at`, what happened to that slot."""
    schedule = await page.schedules.show(name)
    found = await outcomes(page.client, name, SLOTS)
    why, problem = await _why(page, name, at)
    return await page.show(
        "schedule.html",
        "schedules",
        schedule=schedule,
        payload=await page.body(bytes(schedule.payload), schedule.job),
        headers=page.headers(dict(schedule.headers)),
        coming=await page.slots.next(name, NEXT) if schedule.active else [],
        ticks=ticks(page, name, found, schedule.tz),
        listed=[(one, explain(schedule, one.slot)) for one in found[:LISTED]],
        stamp=slots.stamp,
        why=why,
        problem=problem,
        at=at,
    )


async def _why(page: PageRequest, name: str, at: str) -> tuple[Why | None, str]:
    """What happened to a slot, or what is wrong with `at`."""
    if not at:
        return None, ""
    try:
        return await page.slots.why(name, _moment(at)), ""
    except InvalidInput as error:
        return None, str(error)


def _moment(text: str) -> float:
    """A slot's time, as in its id or as people write it."""
    try:
        return float(slots.parse_stamp(text))
    except InvalidName:
        return instant(text, "the time")
