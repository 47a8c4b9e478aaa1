"""`/do/schedules/add`: a form for a new schedule: by cron, at an interval, or once.

Errors are shown next to their fields. A valid schedule is previewed with its next run times before
it is added. Other options of a schedule need `holdfast schedules add` or the API.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from holdfast.client.schedules import UnknownSchedule
from holdfast.errors import HoldfastError, InvalidInput
from holdfast.model.cron import check_zone
from holdfast.model.schedule import Schedule, define, instants, next_after
from holdfast.names import DEFAULT_GROUP, check_name
from holdfast.status.schedule_actions import add_schedule
from holdfast.web.pages.rendering import Question
from holdfast.web.pages.request import AdminPage, PageRequest
from holdfast.web.security import Fields

router = APIRouter(include_in_schema=False)

KINDS: Final = (("cron", "by cron"), ("every", "at an interval"), ("at", "once"))
GIVEN: Final = ("name", "job", "group", "kind", "rule", "tz", "payload")
FIRST: Final = {"group": DEFAULT_GROUP, "kind": "cron", "tz": "UTC"}
SHOWN: Final = 5
"""Next instants in the preview: enough to see a wrong rule."""


@router.get("/do/schedules/add")
async def form(page: AdminPage) -> Response:
    """The empty form."""
    return await _form(page, FIRST)


async def _form(
    page: PageRequest, given: dict[str, str], wrong: dict[str, str] | None = None
) -> Response:
    answer = await page.show(
        "new_schedule.html",
        "schedules",
        given={name: given.get(name, "") for name in GIVEN},
        wrong={name: (wrong or {}).get(name, "") for name in GIVEN},
        kinds=KINDS,
        known=sorted({one.job for one in await page.all_jobs()}),
    )
    answer.status_code = 422 if wrong else 200
    return answer


@router.post("/do/schedules/ask")
async def ask(page: AdminPage, fields: Fields) -> Response:
    """Preview the run times; or show errors next to their fields."""
    wrong = await _wrong(page, fields)
    if wrong:
        return await _form(page, fields, wrong)
    schedule = _made(fields)
    preview = await add_schedule.preview(page, schedule)
    question = Question(
        preview.title,
        preview.effects,
        add_schedule.button,
        "/do/schedules/add",
        [(name, fields.get(name, "")) for name in GIVEN],
        "/do/schedules/add",
        listed=_times(schedule, fields, page.now),
    )
    return page.ask(question, "schedules")


@router.post("/do/schedules/add")
async def add(page: AdminPage, fields: Fields) -> Response:
    """Add it; refused if the name was taken meanwhile."""
    added = await add_schedule(page, _made(fields))
    return page.done(f"/schedules/{added.name}", f"{added.name} is added")


# ---- the form


def _made(fields: dict[str, str]) -> Schedule:
    """The schedule that a form describes."""
    return define(
        fields.get("name", "").strip(),
        fields.get("job", "").strip(),
        group=fields.get("group", "").strip() or DEFAULT_GROUP,
        body=_body(fields),
        **_rule(fields),
    )


def _body(fields: dict[str, str]) -> bytes:
    text = fields.get("payload", "").strip()
    try:
        msgspec.json.decode(text or "null")
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InvalidInput(f"the payload must be JSON ({error})") from None
    return text.encode()


def _zone(fields: dict[str, str]) -> str:
    return check_zone(fields.get("tz", "").strip() or "UTC")


def _rule(fields: dict[str, str]) -> dict[str, Any]:
    """The rule as `define` takes it; a time without an offset is in the form's time zone."""
    kind, rule = fields.get("kind", ""), fields.get("rule", "").strip()
    if kind == "cron":
        return {"cron": rule, "tz": _zone(fields)}
    if kind == "every":
        return {"every": rule}
    if kind != "at":
        raise InvalidInput("choose when it runs: by cron, at an interval, or once")
    with suppress(ValueError):  # `define` reports what is wrong with it
        moment = datetime.fromisoformat(rule)
        if moment.tzinfo is None:
            zone = _zone(fields)
            moment = moment.replace(tzinfo=UTC if zone == "UTC" else ZoneInfo(zone))
        rule = moment.isoformat()
    return {"at": rule}


async def _wrong(page: PageRequest, fields: dict[str, str]) -> dict[str, str]:
    """An error for each invalid field."""
    checks: dict[str, Callable[[], object]] = {
        "name": lambda: check_name(fields.get("name", "").strip(), "schedule"),
        "job": lambda: check_name(fields.get("job", "").strip(), "job"),
        "group": lambda: check_name(fields.get("group", "").strip() or DEFAULT_GROUP, "group"),
        "tz": lambda: _zone(fields),
        "payload": lambda: define("x", "x", every=1, body=_body(fields)),
    }
    wrong: dict[str, str] = {}
    for name, check in checks.items():
        try:
            check()
        except HoldfastError as error:
            wrong[name] = str(error)
    if "tz" not in wrong:
        wrong |= _wrong_rule(page, fields)
    if "name" not in wrong and await _is_taken(page, fields.get("name", "").strip()):
        wrong["name"] = "a schedule with this name exists: choose another name, or remove it first"
    return wrong


def _wrong_rule(page: PageRequest, fields: dict[str, str]) -> dict[str, str]:
    try:
        schedule = define("x", "x", **_rule(fields))
    except HoldfastError as error:
        return {"rule": str(error)}
    if next_after(schedule, page.now) is None:
        why = "this time has passed" if schedule.at else "its first run is too far away"
        return {"rule": f"{why}: it would never run"}
    return {}


async def _is_taken(page: PageRequest, name: str) -> bool:
    try:
        await page.schedules.show(name)
    except UnknownSchedule:
        return False
    return True


def _times(schedule: Schedule, fields: dict[str, str], now: float) -> list[str]:
    """Its first run times, in its time zone, and in UTC if that differs."""
    zone = _zone(fields)
    found = []
    for moment in itertools.islice(instants(schedule, now), SHOWN):
        text = datetime.fromtimestamp(moment, UTC).strftime("%a %Y-%m-%d %H:%M:%S UTC")
        if zone != "UTC":
            local = datetime.fromtimestamp(moment, ZoneInfo(zone))
            text = f"{local.strftime('%a %Y-%m-%d %H:%M:%S %Z')}  ({text[4:]})"
        found.append(text)
    return found
