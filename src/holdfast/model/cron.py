"""Cron expressions: five fields, or six with seconds first, or a name such as `@hourly`.

The calendar work is cronsim's. What is decided here is the two nights a year when local time
jumps. A rule that names its hour and minute (`30 2 * * *`) means "once a day": in the hour that
does not exist it fires at the first moment after it, in the hour that comes twice only the first
time. A rule with a wildcard there (`*/5 * * * *`) means "as time passes": it fires in each real
hour, no more and no less. Five and six fields follow the same rule (in cronsim only five do).

Instants are whole seconds since 1970, so that nobody has to think of time zones further on.
"""

from __future__ import annotations

import copy
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from holdfast.errors import InvalidInput

NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
LATEST = 4_102_444_800
"""2100: no instant after it is looked for."""

_SOME_DAY = datetime(2026, 1, 1, tzinfo=UTC)


def check_cron(expression: object) -> str:
    """The expression in its plain form, or an error that says what is wrong with it."""
    if not isinstance(expression, str) or not expression.strip():
        raise InvalidInput("cron must be a text such as '*/5 * * * *' or '@hourly'")
    text = " ".join(expression.split())
    if text.startswith("@"):
        if text.lower() not in NICKNAMES:
            raise InvalidInput(
                f"cron {text!r} is not a known name: there are {', '.join(NICKNAMES)}; "
                "for an interval use every='5m'"
            )
        return NICKNAMES[text.lower()]
    count = len(text.split())
    if count not in (5, 6):
        raise InvalidInput(
            f"cron {text!r} has {count} fields: it takes 5 (minute hour day month weekday) "
            "or 6 (second first)"
        )
    try:
        _parsed(text)
    except CronSimError as error:
        raise InvalidInput(
            f"cron {text!r}: {str(error).lower()}; it takes *, numbers, names (MON, JAN), "
            "a-b, a,b and /step"
        ) from None
    return text


def check_zone(name: object) -> str:
    """A time zone that this machine knows."""
    if not isinstance(name, str) or not name:
        raise InvalidInput("tz must be the name of a time zone, such as 'Europe/Paris'")
    _zone(name)
    return name


@lru_cache(maxsize=1024)
def _zone(name: str) -> tzinfo:
    if name in ("UTC", "Etc/UTC"):
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidInput(
            f"tz {name!r} is not a time zone that this machine knows: write one such as "
            "'Europe/Paris'; if that is missing too, install the tzdata package"
        ) from None


@lru_cache(maxsize=16_384)
def _parsed(expression: str) -> CronSim:
    return CronSim(expression, _SOME_DAY)


def _once_a_day(parts: list[str]) -> bool:
    """Whether it names its time of day, in seconds too where there are six fields."""
    return not any(part.startswith("*") for part in parts[:3])


@lru_cache(maxsize=65_536)
def next_instant(expression: str, zone: str, after: int) -> int | None:
    """The first instant of a rule strictly after `after`, or None when there is none."""
    if after >= LATEST:
        return None
    where = _zone(zone)
    sim = copy.copy(_parsed(expression))
    local = datetime.fromtimestamp(after, where)
    if where is not UTC and _once_a_day(sim.parts):
        sim.fixup_tz = where
        local = local.replace(tzinfo=None)
    sim.dt = local
    for found in sim:
        instant = int(found.timestamp())
        if instant > after:  # in the hour that comes twice the search may start too early
            return instant if instant < LATEST else None
    return None
