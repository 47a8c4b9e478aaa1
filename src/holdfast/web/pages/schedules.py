"""`/schedules`: every schedule with what it did lately and what comes next; and its switches."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from holdfast.clock import rfc3339
from holdfast.errors import Unreadable
from holdfast.model import slot as slots
from holdfast.model.schedule import Schedule, due_at, next_after
from holdfast.status.audit import Verb
from holdfast.status.outcomes import Outcome, outcomes
from holdfast.web.pages.rendering import Question, exact, first_line, long
from holdfast.web.pages.runs import address
from holdfast.web.pages.visit import AdminVisit, OperatorVisit, ViewerVisit, Visit
from holdfast.web.security import checked_form

router = APIRouter(include_in_schema=False)
Fields = Annotated[dict[str, str], Depends(checked_form)]

SHOWN: Final = 25
TICKS: Final = 20

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


class Tick(msgspec.Struct, frozen=True):
    """One slot in a strip."""

    look: str
    title: str
    href: str


class Line(msgspec.Struct, frozen=True):
    """One schedule in the list."""

    schedule: Schedule
    next: float
    last: Outcome | None
    ticks: list[Tick]


@router.get("/schedules")
async def list_schedules(visit: ViewerVisit, q: str = "", start: int = 0) -> Response:
    """The schedules whose name or job has `q` in it."""
    every = await visit.schedules()
    found = [s for s in every if q.lower() in f"{s.name} {s.job} {s.app}".lower()]
    start = max(0, start)
    chosen = found[start : start + SHOWN]
    lines = await asyncio.gather(*(_line(visit, schedule) for schedule in chosen))
    return await visit.show(
        "schedules.html",
        "schedules",
        lines=lines,
        count=len(found),
        every=len(every),
        q=q,
        start=start,
        older=start + SHOWN if start + SHOWN < len(found) else 0,
    )


async def _line(visit: Visit, schedule: Schedule) -> Line:
    found = await outcomes(visit.client, schedule.name, TICKS)
    moment = next_after(schedule, visit.now) if schedule.active else None
    due = due_at(schedule, moment) if moment is not None else 0.0
    return Line(schedule, due, found[0] if found else None, ticks(visit, schedule.name, found))


def ticks(visit: Visit, name: str, found: list[Outcome]) -> list[Tick]:
    """Outcomes as a strip: the latest on the right."""
    root = str(visit.request.scope.get("root_path", ""))
    return [
        Tick(
            _LOOKS.get(one.verdict, "unknown"),
            visit.text(tick_title(one)),
            f"{root}/schedules/{name}?at={slots.stamp(one.moment)}",
        )
        for one in reversed(found)
    ]


def tick_title(one: Outcome) -> str:
    """What a slot came to, in a line."""
    text = f"{exact(one.moment)}: {one.verdict}"
    if one.slot.state == "skipped":
        text += f" ({one.slot.reason})"
    if one.seconds:
        text += f" in {long(one.seconds)}"
    if one.slot.caught_up:
        text += ", caught up"
    return text + (f": {first_line(one.error)}" if one.error and one.verdict != "done" else "")


# ---- switches


@router.get("/do/schedules/pause")
async def ask_pause(visit: OperatorVisit, name: str) -> Response:
    """Say what a pause does."""
    await visit.desk.schedules.show(name)
    effects = [
        "It fires no more until it is resumed.",
        "What falls due meanwhile stays missed: it is not caught up.",
        "Runs that were sent already go on.",
    ]
    return _ask(visit, f"Pause {name}?", effects, "Pause it", "pause", name)


@router.get("/do/schedules/resume")
async def ask_resume(visit: OperatorVisit, name: str) -> Response:
    """Say what a resume does."""
    schedule = await visit.desk.schedules.show(name)
    moment = next_after(msgspec.structs.replace(schedule, paused=0.0), visit.now)
    coming = f"its next slot is {rfc3339(moment)}" if moment else "it has no slot to come"
    effects = [f"It fires again from now on: {coming}.", "What was missed stays missed."]
    return _ask(visit, f"Resume {name}?", effects, "Resume it", "resume", name)


@router.get("/do/schedules/trigger")
async def ask_trigger(visit: OperatorVisit, name: str) -> Response:
    """Say what a trigger does."""
    schedule = await visit.desk.schedules.show(name)
    effects = [
        f"One run of {schedule.job} is sent now, with the schedule's payload.",
        "It comes beside the slots: none is moved or left out, whatever the overlap policy says.",
    ]
    return _ask(visit, f"Run {name} now?", effects, "Send a run", "trigger", name)


@router.get("/do/schedules/remove")
async def ask_remove(visit: AdminVisit, name: str) -> Response:
    """Say what a removal does."""
    effects = ["It fires no more. Slots that are planned already are still sent."]
    try:
        schedule = await visit.desk.schedules.show(name)
    except Unreadable as error:
        effects.append(f"It is removed without being read ({error}).")
    else:
        if schedule.source == "code":
            app = schedule.app
            effects.append(f"The code of app {app} defines it: it is back when {app} registers.")
    question = Question(
        f"Remove {name}?",
        effects,
        "Remove it",
        "/do/schedules/remove",
        [("name", name)],
        f"/schedules/{name}",
        danger=True,
    )
    return visit.ask(question, "schedules")


def _ask(
    visit: Visit, title: str, effects: list[str], button: str, verb: str, name: str
) -> Response:
    fields = [("name", name)]
    back = f"/schedules/{name}"
    question = Question(title, effects, button, f"/do/schedules/{verb}", fields, back)
    return visit.ask(question, "schedules")


@router.post("/do/schedules/pause")
async def pause(visit: OperatorVisit, fields: Fields) -> Response:
    """Let it fire no more."""
    name = fields.get("name", "")
    await visit.desk.schedules.pause(name)
    await _note(visit, "pause", name)
    return visit.done(f"/schedules/{name}", f"{name} is paused")


@router.post("/do/schedules/resume")
async def resume(visit: OperatorVisit, fields: Fields) -> Response:
    """Let it fire again."""
    name = fields.get("name", "")
    await visit.desk.schedules.resume(name)
    await _note(visit, "resume", name)
    return visit.done(f"/schedules/{name}", f"{name} fires again")


@router.post("/do/schedules/trigger")
async def trigger(visit: OperatorVisit, fields: Fields) -> Response:
    """Send one run now."""
    name = fields.get("name", "")
    run = await visit.desk.schedules.trigger(name)
    await _note(visit, "trigger", name, run)
    return visit.done(address(run), f"A run of {name} was sent")


@router.post("/do/schedules/remove")
async def remove(visit: AdminVisit, fields: Fields) -> Response:
    """Remove it."""
    name = fields.get("name", "")
    await visit.desk.schedules.remove(name)
    await _note(visit, "remove", name)
    return visit.done("/schedules", f"{name} is removed")


async def _note(visit: Visit, verb: Verb, name: str, run: str = "") -> None:
    await visit.desk.audit.write(verb, runs=[run] if run else [], detail=f"schedule {name}")
