"""Cron expressions: five fields, or six with seconds first, or a name such as `@hourly`.

cronsim finds the local times that match. This module decides what happens in the two nights a year
when local time jumps, by an hour or, as in Lord Howe, by half of one. A rule that names its hour
and minute (`30 2 * * *`) means "once a day": a time that is skipped fires when the skip is over, a
time that comes twice fires the first time only. A rule with a wildcard there (`*/5 * * * *`) means
"as time passes": it fires at every instant whose local time matches. Five and six fields follow the
same rule (in cronsim only five do).

Instants are whole seconds since 1970, so that no other module deals with time zones.
"""

from __future__ import annotations

import copy
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from holdfast.durations import LATEST
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

_SOME_DAY = datetime(2026, 1, 1, tzinfo=UTC)
"""cronsim wants a start; each search sets its own."""
_SHORTEST_STRETCH = 7 * 86_400
"""Seconds between two samples of a zone's offset: shorter than any period of another offset, so
none is missed. The shortest is Morocco's four weeks around Ramadan."""


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
    """Whether it names its time of day, including the second if it has six fields."""
    return not any(part.startswith("*") for part in parts[:3])


@lru_cache(maxsize=65_536)
def next_instant(expression: str, zone: str, after: int) -> int | None:
    """The first instant of a rule strictly after `after`, or None when there is none."""
    where = _zone(zone)
    search = _next_named if _once_a_day(_parsed(expression).parts) else _next_passing
    found = search(expression, where, after) if after < LATEST else None
    return found if found is not None and found < LATEST else None


def _local_times(expression: str, after: datetime) -> CronSim:
    """The rule's local times after one of them; cronsim sees no time zone, so it skips none."""
    sim = copy.copy(_parsed(expression))
    sim.dt = after
    return sim


def _next_named(expression: str, where: tzinfo, after: int) -> int | None:
    """For a rule that names its time of day: each local time once."""
    local = datetime.fromtimestamp(after, where).replace(tzinfo=None)
    for found in _local_times(expression, local):
        instant = _first_occurrence(found.replace(tzinfo=where))
        if instant > after:  # a local time that comes twice may be over already
            return instant
    return None


def _first_occurrence(local: datetime) -> int:
    """The first instant with this local time; if the clock skips it, the end of the skip."""
    later = int(local.timestamp())
    earlier = int(local.replace(fold=1).timestamp())
    if earlier >= later:  # fold=1 is later where the time comes twice, earlier where it is skipped
        return later
    assert local.tzinfo is not None
    return _next_change(local.tzinfo, earlier - 1, later) or later


def _next_passing(expression: str, where: tzinfo, after: int) -> int | None:
    """For a rule with wildcards: every instant whose local time matches.

    Between two changes of the zone's offset local time runs like UTC, so each such stretch is
    searched by itself, whatever the size of the change.
    """
    while after < LATEST:
        offset = _offset(where, after + 1)
        local = datetime.fromtimestamp(after + offset, UTC).replace(tzinfo=None)
        found = next(_local_times(expression, local), None)
        if found is None:
            return None
        instant = int(found.replace(tzinfo=UTC).timestamp()) - offset
        change = _next_change(where, after + 1, instant)
        if change is None:
            return instant
        after = change - 1
    return None


def _offset(where: tzinfo, instant: int) -> int:
    offset = datetime.fromtimestamp(instant, where).utcoffset()
    assert offset is not None
    return int(offset.total_seconds())


def _next_change(where: tzinfo, start: int, until: int) -> int | None:
    """The first instant after `start`, up to `until`, at which the UTC offset has changed."""
    offset = _offset(where, start)
    low, high = start, start
    while _offset(where, high) == offset:
        if high >= until:
            return None
        low, high = high, min(until, high + _SHORTEST_STRETCH)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _offset(where, middle) == offset else (low, middle)
    return high
