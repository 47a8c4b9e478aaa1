"""Schedulers through thousands of histories, crashed between every two steps."""

from __future__ import annotations

import os

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.model.schedule import Schedule, define
from tests.unit.scheduler_world import LARGE, MISSED_AFTER, START, TTL, Scheduler, World, check

HISTORIES = int(os.environ.get("HOLDFAST_HISTORIES", "1000"))
PROCESSES = 3
RATES = (1.0, 1.03, 0.97)
WAITS = (0.1, 0.4, 1.0, 2.0, 4.0, 7.0, 25.0)


def _schedules() -> list[Schedule]:
    defined = [
        define("all", "job", every=2, limit=1000),
        define("last", "job", every=3, catch_up="last"),
        define("none", "job", cron="*/4 * * * * *", catch_up="none"),
        define("spread", "job", every=5, jitter=3, limit=2),
        define("queued", "job", every=6, overlap="queue", limit=1000),
        define("skipping", "job", every=4, overlap="skip", limit=1000),
        define("replacing", "job", every=5, overlap="cancel", limit=1000),
        define(LARGE, "job", every=4, overlap="queue", limit=1000),
    ]
    started = define("started", "job", every=7, jitter=2, limit=1000, run_on_start=True)
    defined.append(msgspec.structs.replace(started, first=int(START) + 1))
    return [msgspec.structs.replace(s, since=START) for s in defined]


class History:
    """What happens, read from a list of numbers: three bits who, five bits what."""

    def __init__(self) -> None:
        self.world = World(_schedules())
        self.processes = [Scheduler(self.world, f"p{n}", RATES[n]) for n in range(PROCESSES)]
        self._born = PROCESSES

    def happen(self, number: int) -> None:
        who, what = number % PROCESSES, number // PROCESSES
        if what < 34:
            for _ in range(1 + what % 12):
                self.processes[who].step()
        elif what < 42:
            self.crash(who)
        elif what < 54:
            for _ in range(1 + what % 3):
                self.processes[who].step(lose=True)
        elif what < 58:
            self.processes[who].greedy = True
        elif what < 60:
            for run in sorted(self.world.running)[: who + 1]:
                self.world.running.discard(run)
        else:
            self.world.now += WAITS[(what - 60) % len(WAITS)]

    def crash(self, who: int) -> None:
        self.processes[who].crash()
        self.processes[who] = Scheduler(self.world, f"p{self._born}", RATES[who])
        self._born += 1

    def heal(self) -> float:
        """Everybody dies; one new scheduler has all the time it needs."""
        for who in range(PROCESSES):
            self.crash(who)
        self.world.now += TTL + 1
        survivor = self.processes[0]
        until = self.world.now
        for step in range(3000):
            survivor.step()
            self.world.running.clear()
            if step % 10 == 0 and self._is_done(until):
                break
            self.world.now += 0.002
        for process in self.processes:
            process.crash()
        return until

    def _is_done(self, until: float) -> bool:
        pending = any(slot.pending for slot, _ in self.world.slots.values())
        return self.world.progress.watermark >= until and not pending


LARGEST = PROCESSES * (60 + 2 * len(WAITS)) - 1


@settings(
    max_examples=HISTORIES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(st.integers(0, LARGEST), min_size=10, max_size=120))
def test_histories_lose_and_double_nothing(numbers: list[int]) -> None:
    """Whoever crashes, loses answers or robs a leader: each slot once, or as its policy says."""
    history = History()
    for number in numbers:
        history.happen(number)
    until = history.heal()
    assert until - history.world.progress.watermark <= MISSED_AFTER
    check(history.world, min(until, history.world.progress.watermark))
    assert not any(slot.pending for slot, _ in history.world.slots.values())
