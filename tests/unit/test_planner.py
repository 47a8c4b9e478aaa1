"""The planner: what is due, once, in order, and by policy."""

from __future__ import annotations

import time

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.model.planner import Decision, Planner, first_open
from holdfast.model.schedule import Schedule, define, due_at, instants

T = 1_800_000_000


def made(name: str = "a", **options: object) -> Schedule:
    """A schedule that counts since T."""
    return msgspec.structs.replace(define(name, "job", **options), since=float(T))  # type: ignore[arg-type]


def planner(*schedules: Schedule, watermark: float = T) -> Planner:
    """A planner that knows them."""
    found = Planner(10.0)
    for schedule in schedules:
        found.add(schedule, watermark)
    return found


def moments(decisions: list[Decision]) -> list[int]:
    return [d.moment - T for d in decisions]


def test_planner_takes_each_slot_once_in_order() -> None:
    """Every instant is decided exactly once, at or after its time."""
    p = planner(made(every=2), made("b", every=3))
    seen = []
    for now in (T + 1, T + 2.5, T + 2.6, T + 7, T + 7):
        seen += [(d.schedule.name, d.moment - T) for d in p.take(now)]
    assert sorted(seen) == [("a", 2), ("a", 4), ("a", 6), ("b", 3), ("b", 6)]
    assert p.next_due == T + 8


def test_planner_put_back_is_due_again() -> None:
    """What could not be written is decided the same again."""
    p = planner(made(every=2), made("b", every=3, jitter=2))
    first = p.take(T + 9)
    p.put_back(first)
    assert p.take(T + 9) == first


def test_planner_put_back_does_not_revive_a_changed_rule() -> None:
    """A schedule whose rule changed meanwhile keeps its new one."""
    p = planner(made(every=2))
    taken = p.take(T + 3)
    p.add(msgspec.structs.replace(made(every=60), since=float(T + 3)), T)
    p.put_back(taken)
    assert p.take(T + 30) == []


def test_planner_removed_schedules_are_not_due() -> None:
    """Neither a removed nor a paused one."""
    p = planner(made(every=2), made("b", every=2))
    p.remove("a")
    p.add(msgspec.structs.replace(made("b", every=2), paused=1.0), T)
    assert p.take(T + 5) == []
    assert len(p) == 0


def test_catch_up_policies_decide_about_missed_slots() -> None:
    """Late ones fire; of the missed ones all up to the limit, the last, or none."""
    taken = planner(made(every=1, limit=5)).take(T + 30)
    assert moments(taken) == [1, *range(16, 31)]
    assert (taken[0].skip, taken[0].last - T, taken[0].count) == ("limit", 15, 15)
    assert [d.caught_up for d in taken[1:6]] == [True] * 5
    taken = planner(made(every=1, catch_up="last")).take(T + 30)
    assert moments(taken) == [1, *range(20, 31)]
    assert (taken[0].skip, taken[0].last - T) == ("catch_up", 19)
    taken = planner(made(every=1, catch_up="none")).take(T + 30)
    assert moments(taken) == [1, *range(21, 31)]
    assert (taken[0].last - T, taken[0].count) == (20, 20)


def test_catch_up_of_a_long_outage_is_quick() -> None:
    """A week of a rule that fires each second is not counted through instant by instant."""
    for rule in ({"every": 1}, {"cron": "* * * * * *"}):
        p = planner(made(**rule), watermark=T - 7 * 86_400)
        schedule = msgspec.structs.replace(made(**rule), since=float(T - 7 * 86_400))
        p.add(schedule, T - 7 * 86_400)
        began = time.process_time()
        taken = p.take(T)
        assert time.process_time() - began < 2
        fired = [d for d in taken if not d.skip]
        assert moments(fired) == list(range(-109, 1))
        assert taken[0].skip == "limit"
        assert taken[0].last == fired[0].moment - 1


def test_planner_follows_another_leader() -> None:
    """What somebody else recorded is not due here."""
    p = planner(made(every=2), made("b", every=3, jitter=3))
    p.follow(T + 5)
    assert all(d.due > T + 5 for d in p.take(T + 20))


def test_planner_new_schedule_starts_at_its_own_time() -> None:
    """A slot between its registration and a watermark that did not know it is not lost."""
    new = msgspec.structs.replace(made(every=1), since=float(T))
    assert first_open(new, T + 5, seen=False) == T + 1
    assert first_open(new, T + 5, seen=True) == T + 6


@given(
    st.integers(1, 30),
    st.floats(0, 1),
    st.lists(st.floats(0.1, 40), min_size=1, max_size=20),
    st.integers(0, 19),
)
@example(every=10, share=0.0, waits=[9.9995, 1.0], handover=0)
def test_planner_watermark_leaves_no_gap(
    every: int, share: float, waits: list[float], handover: int
) -> None:
    """A successor that knows only the watermark goes on exactly where the other stopped."""
    schedule = made(every=every, jitter=every * share, limit=10_000)
    p, now, seen = planner(schedule), float(T), []
    for number, wait in enumerate(waits):
        now += wait
        seen += [d.moment for d in p.take(now)]
        if number == handover:
            p = planner(schedule, watermark=now)
    wanted = [m for m in instants(schedule, T, now) if due_at(schedule, m) <= now]
    assert seen == wanted


def test_planner_slot_of_the_start_is_one_among_the_others() -> None:
    """`first` lies off the interval's grid and has no jitter; missed, it is for `catch_up`."""
    started = msgspec.structs.replace(made(every=10, jitter=5, run_on_start=True), first=T + 1)
    p = planner(started)
    assert p.next_due == T + 1
    assert moments(p.take(T + 1)) == [1]
    assert moments(p.take(T + 16)) == [10]
    late = planner(started)
    assert moments(late.take(T + 45)) == [1, 10, 20, 30, 40]
    none = planner(msgspec.structs.replace(started, catch_up="none", jitter=0.0))
    [skipped, *fired] = none.take(T + 45)
    assert (skipped.moment, skipped.last, skipped.count) == (T + 1, T + 30, 4)
    assert skipped.skip == "catch_up"
    assert moments(fired) == [40]
