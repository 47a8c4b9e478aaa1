"""Schedules: what they accept, and which instants they have."""

from __future__ import annotations

import functools
import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.schedules import merged
from holdfast.errors import InvalidInput
from holdfast.model import schedule as schedules
from holdfast.model.schedule import Schedule, define, due_at, instants, next_after
from holdfast.model.slot import (
    SchedulerProgress,
    Slot,
    decode,
    decode_progress,
    encode,
    parse_stamp,
    stamp,
)


def at(text: str, zone: str = "UTC") -> float:
    """A local time as an instant."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def utc(schedule: Schedule, after: str, count: int) -> list[str]:
    """The next instants, as UTC texts."""
    found = []
    for moment in instants(schedule, at(after)):
        found.append(datetime.fromtimestamp(moment, UTC).strftime("%m-%d %H:%M:%S"))
        if len(found) == count:
            break
    return found


def test_schedule_six_fields_have_seconds_first() -> None:
    """`*/20 * * * * *` fires every twenty seconds, five fields once a minute."""
    six = define("a", "job", cron="*/20 * * * * *")
    assert utc(six, "2026-11-16T00:00:00", 3) == [
        "11-16 00:00:20",
        "11-16 00:00:40",
        "11-16 00:01:00",
    ]
    five = define("a", "job", cron="* * * * *")
    assert utc(five, "2026-11-16T00:00:30", 2) == ["11-16 00:01:00", "11-16 00:02:00"]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("@hourly", "11-16 01:00:00"),
        ("@daily", "11-17 00:00:00"),
        ("@midnight", "11-17 00:00:00"),
        ("@weekly", "11-22 00:00:00"),
        ("@monthly", "12-01 00:00:00"),
        ("@yearly", "01-01 00:00:00"),
    ],
)
def test_schedule_knows_the_usual_names(name: str, first: str) -> None:
    """`@hourly` and its like."""
    assert utc(define("a", "job", cron=name), "2026-11-16T00:00:01", 1) == [first]


# Zone, the day local time jumps forward with the hour that does not exist, the day it goes back
# with the hour that comes twice, and the offset in minutes.
CHANGES = [
    ("Europe/Paris", "2026-03-29", 2, "2026-10-25", 2, 60),
    ("America/New_York", "2026-03-08", 2, "2026-11-01", 1, 60),
    ("Australia/Sydney", "2026-10-04", 2, "2026-04-05", 2, 60),
    ("America/Santiago", "2026-09-06", 0, "2026-04-04", 23, 60),
    ("Australia/Lord_Howe", "2026-10-04", 2, "2026-04-05", 1, 30),
]


@pytest.mark.parametrize(("zone", "spring", "gap", "autumn", "twice", "minutes"), CHANGES)
def test_schedule_of_a_named_hour_fires_once_a_day(
    zone: str, spring: str, gap: int, autumn: str, twice: int, minutes: int
) -> None:
    """In an hour that does not exist it fires right after it; in one that comes twice, once."""
    for fields in ("15 {} * * *", "0 15 {} * * *"):
        lost = define("a", "job", cron=fields.format(gap), tz=zone)
        day = datetime.fromisoformat(spring)
        found = list(
            instants(
                lost, at(str(day - timedelta(days=2)), zone), at(str(day + timedelta(days=3)), zone)
            )
        )
        assert len(found) == 5, fields
        local = [datetime.fromtimestamp(m, ZoneInfo(zone)) for m in found]
        assert [t.date() for t in local] == [(day + timedelta(days=n)).date() for n in range(-2, 3)]
        after = local[2]
        assert (after.hour * 60 + after.minute) == gap * 60 + minutes, fields
        repeated = define("a", "job", cron=fields.format(twice), tz=zone)
        day = datetime.fromisoformat(autumn)
        found = list(
            instants(
                repeated,
                at(str(day - timedelta(days=2)), zone),
                at(str(day + timedelta(days=3)), zone),
            )
        )
        assert len(found) == 5, fields


@pytest.mark.parametrize(("zone", "spring", "gap", "autumn", "twice", "minutes"), CHANGES)
def test_schedule_with_wildcards_follows_real_time(
    zone: str, spring: str, gap: int, autumn: str, twice: int, minutes: int
) -> None:
    """`*/15 * * * *` fires every quarter of a real hour on both nights, no more and no less."""
    quarter = define("a", "job", cron="*/15 * * * *", tz=zone)
    for day in (spring, autumn):
        start = at(str(datetime.fromisoformat(day) - timedelta(days=1)), zone)
        found = list(instants(quarter, start, start + 3 * 86400))
        gaps = {b - a for a, b in itertools.pairwise(found)}
        assert gaps == {900}


# A minute field with and without a wildcard, with the minutes that it means; hours likewise.
MINUTES = {
    "*": set(range(60)),
    "*/7": set(range(0, 60, 7)),
    "*/45": {0, 45},
    "0": {0},
    "15,45": {15, 45},
    "5-50/15": {5, 20, 35, 50},
}
HOURS = {
    "*": set(range(24)),
    "*/2": set(range(0, 24, 2)),
    "*/5": set(range(0, 24, 5)),
    "1-3": {1, 2, 3},
    "2": {2},
    "0,3": {0, 3},
}
NIGHTS = [
    ("Europe/Paris", "2026-03-29"),
    ("Europe/Paris", "2026-10-25"),
    ("Australia/Lord_Howe", "2026-10-04"),
    ("Australia/Lord_Howe", "2026-04-05"),
    ("Pacific/Chatham", "2026-09-27"),
    ("Pacific/Chatham", "2026-04-05"),
    ("America/Santiago", "2026-09-06"),
    ("America/Santiago", "2026-04-05"),
    ("Africa/Casablanca", "2026-02-15"),
    ("Africa/Casablanca", "2026-03-22"),
    ("Antarctica/Troll", "2026-03-29"),
    ("Asia/Kathmandu", "2026-03-29"),
]


@functools.cache
def _minutes_around(zone: str, night: str) -> list[tuple[int, datetime]]:
    """Every minute from two days before a night to two days after it, with its local time."""
    where = ZoneInfo(zone)
    middle = int(datetime.fromisoformat(night).replace(tzinfo=where).timestamp())
    minutes = range(middle - 2 * 86_400, middle + 2 * 86_400, 60)
    return [(m, datetime.fromtimestamp(m, where).replace(tzinfo=None)) for m in minutes]


@pytest.mark.parametrize(("zone", "night"), NIGHTS)
@pytest.mark.parametrize("hour", HOURS)
def test_schedule_gives_what_a_look_at_every_minute_gives(hour: str, zone: str, night: str) -> None:
    """Over a night in which local time jumps, by whatever amount, no slot is missed or added."""
    clock = _minutes_around(zone, night)
    for minute in MINUTES:
        if "*" in minute or "*" in hour:
            expected = [
                m for m, t in clock if t.hour in HOURS[hour] and t.minute in MINUTES[minute]
            ]
        else:
            expected = _once_each(clock, minute, hour)
        rule = define("a", "job", cron=f"{minute} {hour} * * *", tz=zone)
        assert list(instants(rule, clock[0][0] - 1, clock[-1][0])) == expected, minute


def _once_each(clock: list[tuple[int, datetime]], minute: str, hour: str) -> list[int]:
    """Each matching local time at its first minute, or at the first minute after its skip."""
    found: set[int] = set()
    reached = clock[0][1] - timedelta(minutes=1)
    for moment, now in clock:
        while reached < now:
            reached += timedelta(minutes=1)
            if reached.hour in HOURS[hour] and reached.minute in MINUTES[minute]:
                found.add(moment)
    return sorted(found)


def test_schedule_asked_inside_the_second_hour_does_not_go_back() -> None:
    """Asked after its time, in the hour that comes twice, a rule gives tomorrow's."""
    paris = define("a", "job", cron="30 2 * * *", tz="Europe/Paris")
    second = datetime(2026, 10, 25, 2, 15, tzinfo=ZoneInfo("Europe/Paris"), fold=1).timestamp()
    assert next_after(paris, second) == at("2026-10-26T02:30:00", "Europe/Paris")


@given(
    st.integers(1, 100_000),
    st.integers(1_700_000_000, 1_900_000_000),
    st.floats(0, 1e6, allow_nan=False),
)
def test_schedule_interval_is_the_same_everywhere(every: int, start: int, after: float) -> None:
    """Whoever asks, and from when on: the instants lie on one grid, and none is skipped."""
    schedule = define("a", "job", every=every, start=float(start))
    found = next_after(schedule, start + after)
    assert found is not None
    assert (found - start) % every == 0
    assert start + after < found <= start + after + every


def test_schedule_bounds_are_kept() -> None:
    """`start` and `end` belong to the time; nothing lies before `since`."""
    bounded = define("a", "job", every=10, start=1000.0, end=1030.0)
    assert list(instants(bounded, 0)) == [1000, 1010, 1020, 1030]
    assert list(instants(msgspec.structs.replace(bounded, since=1010.0), 0)) == [1020, 1030]
    once = define("a", "job", at=1_800_000_000.5)
    assert list(instants(once, 0)) == [1_800_000_001]


@given(st.integers(1_000_000_000, 4_000_000_000), st.floats(0.5, 3600))
def test_schedule_jitter_is_derived_from_the_slot(moment: int, jitter: float) -> None:
    """The same slot always gets the same delay, within the jitter."""
    schedule = Schedule("a", "job", every=3600, jitter=jitter)
    due = due_at(schedule, moment)
    assert moment <= due <= moment + jitter
    assert due == due_at(schedule, moment)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cron": "* * * *"}, "has 4 fields"),
        ({"cron": "61 * * * *"}, "bad minute"),
        ({"cron": "@sometimes"}, "every='5m'"),
        ({"cron": "0 0 30 2 *"}, "bad day-of-month"),
        ({"cron": ""}, "must be a text"),
        ({"every": "500ms"}, "at least 1"),
        ({"every": 1.5}, "whole seconds"),
        ({"every": 5, "cron": "* * * * *"}, "exactly one"),
        ({}, "exactly one"),
        ({"at": datetime(2026, 1, 1)}, "needs a time zone"),  # noqa: DTZ001 - what is refused
        ({"at": "tomorrow"}, "is not a time"),
        ({"every": 5, "tz": "Europe/Nowhere"}, "not a time zone"),
        ({"every": 5, "jitter": "6s"}, "overtake"),
        ({"every": 5, "catch_up": "some"}, "all, last, none"),
        ({"every": 5, "overlap": "maybe"}, "allow, skip, queue, cancel"),
        ({"every": 5, "limit": 0}, "from 1 to 10,000"),
        ({"every": 5, "start": 2000.0, "end": 1000.0}, "end must be after start"),
        ({"every": 5, "body": b"{"}, "must be JSON"),
        ({"every": 5, "body": b'"' + b"x" * 300_000 + b'"'}, "object store"),
        ({"every": 5, "headers": {"Nats-Msg-Id": "x"}}, "reserved"),
        ({"every": 5, "release": "abc123"}, "commit hash"),
        ({"every": 5, "group": "a.b"}, "not usable"),
    ],
)
def test_schedule_refusals_teach(options: dict, words: str) -> None:  # type: ignore[type-arg]
    """What cannot work is refused with what to write instead."""
    with pytest.raises(InvalidInput) as refused:
        define("name", "job", **options)
    assert words in str(refused.value)


def test_records_ignore_members_they_do_not_know() -> None:
    """Old code reads what new code writes, and defaults are not written."""
    assert schedules.decode(b'{"name":"a","job":"b","every":5,"colour":"red"}').every == 5
    assert schedules.encode(Schedule("a", "b", every=5)) == b'{"name":"a","job":"b","every":5}'
    assert decode(b'{"state":"planned","due":1.5,"mood":"good"}') == Slot("planned", 1.5)
    assert decode_progress(b'{"watermark":7,"x":1}') == SchedulerProgress(watermark=7)
    assert encode(Slot("planned", 1.5)) == b'{"state":"planned","due":1.5}'


@given(st.integers(0, 4_102_444_799))
def test_slot_stamp_reads_back(moment: int) -> None:
    """A slot's time survives its id."""
    assert parse_stamp(stamp(moment)) == moment


def test_schedule_that_runs_on_start_has_one_instant_more() -> None:
    """Right after it was added, once: neither after a change of its rule nor after a resume."""
    added = at("2026-11-16T00:10:30") + 0.4
    new = merged(None, define("a", "job", every="1h", jitter="1m", run_on_start=True), added)
    assert utc(new, "2026-11-16T00:00:00", 2) == ["11-16 00:10:31", "11-16 01:00:00"]
    assert due_at(new, new.first) == new.first
    later = added + 60
    changed = merged(new, define("a", "job", every="2h", run_on_start=True), later)
    assert changed.first == new.first
    assert utc(changed, "2026-11-16T00:00:00", 1) == ["11-16 02:00:00"]
    resumed = msgspec.structs.replace(new, since=later)
    assert utc(resumed, "2026-11-16T00:00:00", 1) == ["11-16 01:00:00"]
    old = merged(None, define("a", "job", every="1h"), added)
    assert not merged(old, define("a", "job", every="1h", run_on_start=True), later).first
    for rule in ({"at": later}, {"every": 5, "start": later}):
        with pytest.raises(InvalidInput, match="cannot be combined with at= or start="):
            define("a", "job", run_on_start=True, **rule)  # type: ignore[arg-type]
