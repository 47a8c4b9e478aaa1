"""Slots of taskiq's schedules, without a server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from taskiq import ScheduledTask

from holdfast.integrations.taskiq.slots import TaskiqSlot, identities, slot_of, unsent


def schedule(**rule: Any) -> ScheduledTask:
    """A schedule of one task."""
    return ScheduledTask(task_name="t", labels={}, args=[], kwargs={}, **rule)


@given(
    interval=st.integers(1, 86_400),
    phase=st.integers(0, 86_400),
    late=st.lists(st.floats(-0.04, 0.9), min_size=5, max_size=5),
)
def test_slot_every_process_comes_by_each_window_once(
    interval: int, phase: int, late: list[float]
) -> None:
    """Whatever second it counts from, and a moment early or late: no window twice or left out."""
    task = schedule(interval=interval)
    ticks = [1_700_000_000 + phase + n * interval + delay for n, delay in enumerate(late)]
    windows = [int(slot_of(task, "s", now).at) // interval for now in ticks]
    assert windows == list(range(windows[0], windows[0] + len(ticks)))


def test_slot_of_a_cron_schedule_is_its_minute() -> None:
    """Two processes that tick at different seconds of a minute name it the same."""
    task = schedule(cron="* * * * *")
    noon = datetime(2026, 11, 16, 12, tzinfo=UTC).timestamp()
    first = slot_of(task, "s", noon)
    assert slot_of(task, "s", noon - 0.01) == first == slot_of(task, "s", noon + 59.9)
    assert slot_of(task, "s", noon + 60) != first


def test_slot_of_a_one_off_is_its_instant_whenever_it_is_sent() -> None:
    """A naive time is UTC, as for taskiq; the time of the dispatch does not matter."""
    naive = schedule(time=datetime(2026, 11, 16, 12))  # noqa: DTZ001 - that is the case
    aware = schedule(time=datetime(2026, 11, 16, 13, tzinfo=UTC) - timedelta(hours=1))
    assert slot_of(naive, "s", 1.0) == slot_of(aware, "s", 99_999.0)


def test_schedule_of_a_label_is_known_by_what_it_says() -> None:
    """Ids differ from start to start; equal schedules of one process stay two."""
    tasks = [schedule(cron="* * * * *"), schedule(cron="* * * * *"), schedule(cron="0 * * * *")]
    again = [schedule(cron="* * * * *"), schedule(cron="* * * * *"), schedule(cron="0 * * * *")]
    first, second = (identities(found, by_content=True) for found in (tasks, again))
    assert list(first.values()) == list(second.values())
    assert len(set(first.values())) == 3
    assert not first.keys() & second.keys()


def test_schedule_with_an_id_is_known_by_it() -> None:
    """Two schedules that say the same and have ids are two."""
    tasks = [schedule(interval=5, schedule_id="a"), schedule(interval=5, schedule_id="b")]
    assert identities(tasks, by_content=False) == {"a": "a", "b": "b"}


NOON = int(datetime(2026, 11, 16, 12, tzinfo=UTC).timestamp())


def test_slots_left_out_by_an_interval_are_made_up() -> None:
    """From the last one sent to the newest, as far back as allowed and as long as it is known."""
    task, newest = schedule(interval=2), TaskiqSlot("s", NOON, 2)
    assert [s.at - NOON for s in unsent(task, newest, NOON - 6, 0)] == [-4, -2, 0]
    assert [s.at - NOON for s in unsent(task, newest, NOON - 6, NOON - 3)] == [-2, 0]
    assert len(unsent(task, newest, NOON - 3600, 0)) == 60
    assert unsent(task, newest, None, 0) == [newest]
    assert unsent(task, newest, NOON, 0) == []


def test_minutes_left_out_by_a_cron_schedule_are_made_up_if_they_match() -> None:
    """Only those that the rule means, in its own time zone."""
    newest = TaskiqSlot("s", NOON + 60, 60)
    every, hourly = schedule(cron="* * * * *"), schedule(cron="1 * * * *")
    assert [s.at - NOON for s in unsent(every, newest, NOON - 60, 0)] == [0, 60]
    assert [s.at - NOON for s in unsent(hourly, newest, NOON - 3540, 0)] == [60]


def test_one_off_is_sent_unless_it_was_this_instant() -> None:
    """An id that is used again for another instant is another slot, also for an earlier one."""
    newest = TaskiqSlot("s", NOON)
    task = schedule(time=datetime.fromtimestamp(NOON, UTC))
    assert unsent(task, newest, NOON + 60, 0) == [newest]
    assert unsent(task, newest, NOON, 0) == []
