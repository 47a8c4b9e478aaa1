"""Schedules of hosts: what settings may say, whom they are for, and once per slot."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.schedules import FILE, MISSED, OVERLAPPED, Schedules
from holdfast.errors import InvalidInput
from holdfast.model import host_schedule
from holdfast.model.fleet import Order
from holdfast.model.host_schedule import HostSchedule
from holdfast.model.schedule import due_at
from holdfast.model.slot import slot_id

NOON = 1_800_000_000 // 3600 * 3600


def one(agent: str = "web1", **members: Any) -> HostSchedule:
    written = {"function": "ping", "every": "1h", **members}
    return host_schedule.read({"s": written}, agent)["s"].counting_from(NOON - 7200)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ([1], "a table of schedules by name"),
        ({"s": {"every": "1h"}}, "schedule 's'.*function"),
        ({"s": {"function": "ping"}}, "exactly one of cron"),
        ({"s": {"function": "ping", "every": "1h", "cron": "* * * * *"}}, "exactly one of cron"),
        ({"s": {"function": "ping", "cron": "61 * * * *"}}, "schedule 's'"),
        ({"s": {"function": "ping", "every": "1h", "sply": "1m"}}, "sply"),
        ({"s": {"function": "ping", "every": "1h", "splay": "2h"}}, "overtake"),
        ({"s": {"function": "ping", "every": "1h", "target": "G@("}}, "schedule 's'"),
        ({"a b": {"function": "ping", "every": "1h"}}, "not usable"),
    ],
)
def test_mistake_is_refused_by_name(values: Any, what: str) -> None:
    """A mistake is not a schedule that never fires."""
    with pytest.raises(InvalidInput, match=what):
        host_schedule.read(values, "web1")


def test_target_and_enabled_decide_who_runs_it() -> None:
    values = {
        "schedules": {
            "all": {"function": "ping", "every": "1h"},
            "db": {"function": "ping", "every": "1h", "target": "G@role:db"},
            "off": {"function": "ping", "every": "1h", "enabled": False},
        }
    }
    assert set(host_schedule.chosen(values, "web1", {"role": "web"}, {}, 5.0)) == {"all"}
    assert set(host_schedule.chosen(values, "web1", {"role": "db"}, {}, 5.0)) == {"all", "db"}


def test_unchanged_schedule_keeps_counting_and_a_changed_one_begins_again() -> None:
    values = {"schedules": {"s": {"function": "ping", "every": "1h"}}}
    first = host_schedule.chosen(values, "web1", {}, {}, 5.0)
    values["schedules"]["s"]["function"] = "facts.keys"
    second = host_schedule.chosen(values, "web1", {}, first, 9.0)
    assert second["s"].timing.since == 5.0
    assert second["s"].function == "facts.keys"
    values["schedules"]["s"]["every"] = "2h"
    third = host_schedule.chosen(values, "web1", {}, second, 9.0)
    assert third["s"].timing.since == 9.0
    kept = {"s": third["s"].timing.since}
    assert host_schedule.restored(values, "web1", kept) == third


def test_splay_differs_by_host_and_stays() -> None:
    dues = [due_at(one(f"web{n}", splay="10m").timing, NOON) - NOON for n in range(200)]
    assert 0 <= min(dues) < 60
    assert 540 < max(dues) <= 600
    assert due_at(one("web7", splay="10m").timing, NOON) == NOON + dues[7]


class World:
    """A host with a clock that is set by hand."""

    def __init__(self, folder: Path, schedule: HostSchedule) -> None:
        self.folder = folder
        self.at = float(NOON - 3601)
        self.wanted = {"s": schedule}
        self.fired: list[str] = []
        self.skipped: list[tuple[str, str]] = []
        self.busy: set[str] = set()
        self.start()

    def start(self) -> None:
        self.schedules = Schedules(self.folder, self, lambda: self.at, lambda: self.wanted, self)

    def monotonic(self) -> float:
        return self.at

    def utc(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()

    def fire(self, run: str, order: Order) -> None:
        self.fired.append(run)

    def skip(self, run: str, why: str) -> None:
        self.skipped.append((run, why))

    def runs(self, run: str) -> bool:
        return run in self.busy

    async def step(self, at: float) -> None:
        """One look at the clock."""
        self.at = at
        running = asyncio.create_task(self.schedules.run())
        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def slot(moment: int) -> str:
    return slot_id("s", moment)


async def test_slot_fires_once_across_restarts(tmp_path: Path) -> None:
    world = World(tmp_path, one())
    await world.step(NOON - 0.5)
    before = list(world.fired)
    await world.step(NOON + 0.5)
    assert world.fired[len(before) :] == [slot(NOON)]
    world.start()
    await world.step(NOON + 1)
    assert world.fired[len(before) :] == [slot(NOON)]
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("policy", "fired", "skipped"),
    [("last", [3], [1, 2]), ("none", [], [1, 2, 3]), ("all", [1, 2, 3], [])],
)
async def test_missed_slots_by_policy(
    tmp_path: Path, policy: str, fired: list[int], skipped: list[int]
) -> None:
    """Every missed slot is run or answered."""
    world = World(tmp_path, one(catch_up=policy))
    await world.step(NOON + 1)
    world.fired.clear()
    world.skipped.clear()
    world.start()
    await world.step(NOON + 3.5 * 3600)
    assert world.fired == [slot(NOON + n * 3600) for n in fired]
    assert world.skipped == [(slot(NOON + n * 3600), MISSED) for n in skipped]


async def test_slot_is_skipped_while_the_one_before_runs(tmp_path: Path) -> None:
    world = World(tmp_path, one())
    await world.step(NOON + 1)
    world.busy.add(slot(NOON))
    await world.step(NOON + 3601)
    assert world.skipped[-1] == (slot(NOON + 3600), OVERLAPPED)
    world.busy.clear()
    await world.step(NOON + 7201)
    assert world.fired[-1] == slot(NOON + 7200)


async def test_clock_that_was_ahead_does_not_stop_the_schedules(tmp_path: Path) -> None:
    world = World(tmp_path, one())
    await world.step(NOON + 30 * 86_400)
    world.start()
    await world.step(NOON + 1)
    world.fired.clear()
    await world.step(NOON + 3601)
    assert world.fired == [slot(NOON + 3600)]


async def test_unreadable_progress_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"\xff{")
    world = World(tmp_path, one())
    await world.step(NOON - 1)
    await world.step(NOON + 1)
    assert slot(NOON) in world.fired
