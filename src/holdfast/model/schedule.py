"""A schedule: the rule that says when a job is due, and what is sent then.

The record is what is stored, one key per schedule. It has exactly one of three rules: `cron`,
`every` (whole seconds, counted from `start` or from 1970, so that any scheduler finds the same
instants) or `at` (once). Instants lie between `start` and `end` and after `since`, the time from
which the rule applies: it is set when the schedule is new, its rule changes or it is resumed.
`run_on_start` adds one instant, `first`: the second after the schedule was added.

Everything here is pure: the same record and the same time give the same instants on every machine.
Jitter is derived from the slot's id for the same reason.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, Literal, get_args

import msgspec

from holdfast import durations
from holdfast.clock import rfc3339
from holdfast.durations import LATEST, Duration, instant
from holdfast.errors import InvalidInput
from holdfast.model.codec import Codec, Count, Headers, Instant, Moment, Name, Seconds
from holdfast.model.cron import check_cron, check_zone, next_instant
from holdfast.names import DEFAULT_GROUP, check_header, check_name

CatchUp = Literal["all", "last", "none"]
Overlap = Literal["allow", "skip", "queue", "cancel"]
Source = Literal["code", "api"]

KEPT_PAUSES = 20
"""Pauses kept in the record: enough to explain recent slots, and the record stays small however
often somebody pauses."""
LARGEST_PAYLOAD = 256 * 1024
"""A quarter of the server's default message limit: each slot's record repeats the payload."""
NO_BODY = msgspec.Raw(b"")
_GAPS_LOOKED_AT = 50
"""How many gaps between instants are compared with the jitter: most rules repeat sooner."""
LONGEST_JITTER = 366 * 86_400
"""A year: a longer delay is a mistake in the unit."""
SOME_DAY = 1_767_225_600
"""2026-01-01: where rules are tried out when they are defined."""


class Pause(msgspec.Struct, frozen=True):
    """A time in which the schedule was paused."""

    since: Instant
    until: Instant


class Schedule(msgspec.Struct, omit_defaults=True, frozen=True):
    """One schedule as it is stored. Unknown members of newer versions are ignored."""

    name: Name
    job: Name
    group: Name = DEFAULT_GROUP
    cron: str = ""
    every: Moment = 0
    at: Moment = 0
    tz: str = "UTC"
    jitter: Seconds = 0.0
    start: Instant = 0.0
    end: Instant = 0.0
    payload: msgspec.Raw = NO_BODY
    headers: Headers = {}
    catch_up: str = "all"
    """One of `CatchUp`; an unknown one of a newer version counts as `all`."""
    limit: Count = 100
    overlap: str = "allow"
    """One of `Overlap`; an unknown one of a newer version counts as `allow`."""
    app: str = ""
    """The app whose code defines it; empty if it was added at run time."""
    release: str = ""
    source: str = "api"
    since: Instant = 0.0
    changed: Instant = 0.0
    paused: Instant = 0.0
    """When it was paused; 0 if active."""
    pauses: tuple[Pause, ...] = ()
    removed: Instant = 0.0
    """When it was removed; the record is kept for a while, so that every scheduler notices."""
    run_on_start: bool = False
    first: Moment = 0
    """The extra instant of `run_on_start`; without jitter."""
    salt: str = ""
    """On a host: its id, so that each host has its own jitter."""

    @property
    def rule(self) -> str:
        """The rule as people read it."""
        if self.cron:
            return f"{self.cron} ({self.tz})" if self.tz != "UTC" else self.cron
        return f"every {durations.text(self.every)}" if self.every else f"at {rfc3339(self.at)}"

    @property
    def timing(self) -> tuple[object, ...]:
        """The fields that decide its instants; a change of one resets `since`."""
        return (self.cron, self.every, self.at, self.tz, self.jitter, self.start, self.end)

    @property
    def active(self) -> bool:
        return not self.paused and not self.removed


CODEC: Final = Codec[Schedule](Schedule, "a schedule's record")
encode = CODEC.encode
decode = CODEC.decode


def usable(name: str, body: bytes) -> Schedule:
    """A stored schedule that can fire; `Unreadable` also if its rule makes no sense.

    It may have been stored without `define`, or by a newer version.
    """
    schedule = decode(body)
    try:
        if schedule.name != name:
            raise InvalidInput("its name and its key differ")
        if not (schedule.job and schedule.group):
            raise InvalidInput("it names no job")
        if not schedule.removed:
            check_rule(schedule)
    except InvalidInput as error:
        raise CODEC.unreadable(str(error)) from None
    return schedule


def check_rule(schedule: Schedule) -> None:
    """Raise `InvalidInput` if a stored rule makes no sense."""
    _check_one_rule(*(rule or None for rule in (schedule.cron, schedule.every, schedule.at)))
    if schedule.cron:
        check_cron(schedule.cron)
    check_zone(schedule.tz)
    _limit(schedule.limit)
    if schedule.jitter > LONGEST_JITTER:
        raise InvalidInput("its jitter is longer than a year")


# ---- making one


def define(
    name: str,
    job: str,
    *,
    cron: str | None = None,
    every: Duration | None = None,
    at: datetime | float | str | None = None,
    group: str = DEFAULT_GROUP,
    tz: str = "UTC",
    jitter: Duration = 0,
    start: datetime | float | str | None = None,
    end: datetime | float | str | None = None,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    catch_up: str = "all",
    limit: int = 100,
    overlap: str = "allow",
    run_on_start: bool = False,
    app: str = "",
    release: str = "",
    source: Source = "api",
) -> Schedule:
    """A checked schedule; `InvalidInput` says what to write instead."""
    _check_one_rule(cron, every, at)
    for key, value in (headers or {}).items():
        check_header(key, value)
    schedule = Schedule(
        check_name(name, "schedule"),
        check_name(job, "job"),
        check_name(group, "group"),
        check_cron(cron) if cron is not None else "",
        _interval(every) if every is not None else 0,
        math.ceil(instant(at, "at")) if at is not None else 0,
        check_zone(tz),
        durations.seconds(jitter, "jitter"),
        instant(start, "start") if start is not None else 0.0,
        instant(end, "end") if end is not None else 0.0,
        _checked_body(body),
        dict(headers or {}),
        _choice(catch_up, CatchUp, "catch_up"),
        _limit(limit),
        _choice(overlap, Overlap, "overlap"),
        app,
        check_release(release),
        source,
        run_on_start=run_on_start,
    )
    _check_bounds(schedule)
    _check_jitter(schedule)
    return schedule


def _check_one_rule(*given: object) -> None:
    if sum(rule is not None for rule in given) != 1:
        raise InvalidInput("a schedule has exactly one of cron=, every= and at=")


def _interval(every: Duration) -> int:
    value = durations.seconds(every, "every")
    if value < 1 or value != int(value):
        raise InvalidInput(f"every must be whole seconds, at least 1, not {every!r}")
    return int(value)


def _checked_body(body: bytes) -> msgspec.Raw:
    if len(body) > LARGEST_PAYLOAD:
        raise InvalidInput(
            f"the payload of a schedule is at most {LARGEST_PAYLOAD:,} bytes, not {len(body):,}: "
            "put the data into an object store and send its key"
        )
    if not body:
        return NO_BODY
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidInput("the payload of a schedule must be JSON") from None
    return msgspec.Raw(body)


def _choice(value: str, choices: Any, what: str) -> Any:
    if value not in get_args(choices):
        raise InvalidInput(f"{what} {value!r} is not one of {', '.join(get_args(choices))}")
    return value


def _limit(limit: object) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= 10_000:
        raise InvalidInput(f"limit must be a whole number from 1 to 10,000, not {limit!r}")
    return limit


def check_release(release: object) -> str:
    """Check a release; releases are compared number by number: `41`, `1.10.2`, `20261116.3`."""
    text = str(release)
    if text and not all(part.isascii() and part.isdigit() for part in text.split(".")):
        raise InvalidInput(
            f"release {text!r} must be numbers, optionally separated by dots: 41, 1.10.2 "
            "(a build number or a date; releases are compared, so a commit hash does not work)"
        )
    return text


def _check_bounds(schedule: Schedule) -> None:
    if schedule.start and schedule.end and schedule.end <= schedule.start:
        raise InvalidInput("end must be after start")
    if schedule.run_on_start and (schedule.at or schedule.start):
        raise InvalidInput(
            "run_on_start adds a slot at the time of the definition: it cannot be combined with "
            "at= or start=, which set a later time"
        )
    if schedule.cron and next_instant(schedule.cron, schedule.tz, SOME_DAY) is None:
        raise InvalidInput(f"cron {schedule.cron!r} names a day that never comes")


def _check_jitter(schedule: Schedule) -> None:
    """Refuse a jitter with which a slot could overtake the next one."""
    if not schedule.jitter or schedule.at:
        return
    found = []
    for moment in instants(schedule, schedule.start or SOME_DAY):
        found.append(moment)
        if len(found) > _GAPS_LOOKED_AT:
            break
    gap = min((b - a for a, b in itertools.pairwise(found)), default=LATEST)
    if schedule.jitter > gap:
        raise InvalidInput(
            f"jitter ({durations.text(schedule.jitter)}) is longer than the shortest time between "
            f"two slots ({durations.text(gap)}): slots would overtake each other"
        )


# ---- instants


def next_after(schedule: Schedule, after: float) -> int | None:
    """The first instant strictly after `after`, inside the schedule's bounds."""
    lower = math.floor(max(after, _before(schedule.start), schedule.since))
    if schedule.every:
        anchor = math.ceil(schedule.start)
        found: int | None = anchor + ((lower - anchor) // schedule.every + 1) * schedule.every
    elif schedule.at:
        found = schedule.at if schedule.at > lower else None
    else:
        found = next_instant(schedule.cron, schedule.tz, lower)
    if schedule.first > lower and (found is None or schedule.first < found):
        found = schedule.first
    if found is None or found >= LATEST or (schedule.end and found > schedule.end):
        return None
    return found


def _before(start: float) -> float:
    """`start` itself may be an instant; `after` is exclusive."""
    return math.ceil(start) - 1 if start else 0.0


def instants(schedule: Schedule, after: float, until: float = LATEST) -> Iterator[int]:
    """Every instant after `after`, up to and including `until`."""
    found = next_after(schedule, after)
    while found is not None and found <= until:
        yield found
        found = next_after(schedule, found)


def due_at(schedule: Schedule, moment: int) -> float:
    """When a slot is to be sent: its instant plus a jitter derived from its id (and its host)."""
    if not schedule.jitter or moment == schedule.first:
        return float(moment)
    text = f"{schedule.name}/{moment}" + (f"/{schedule.salt}" if schedule.salt else "")
    digest = hashlib.blake2s(text.encode(), digest_size=4).digest()
    return moment + schedule.jitter * int.from_bytes(digest, "big") / 2**32
