"""`FakeClock`: time that passes when it is told to."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from holdfast.clock import Clock
from holdfast.errors import InvalidInput
from holdfast.testing import FakeClock


def test_clock_stands_still_until_it_is_advanced() -> None:
    """Both of its faces move together, by exactly what was asked."""
    clock: Clock = FakeClock(datetime(2026, 3, 1, tzinfo=UTC))
    assert isinstance(clock, FakeClock)
    monotonic, utc = clock.monotonic(), clock.utc()
    assert (clock.monotonic(), clock.utc()) == (monotonic, utc)
    clock.advance("1h30m")
    assert clock.monotonic() - monotonic == 5400
    assert datetime.fromtimestamp(clock.utc(), UTC) == datetime(2026, 3, 1, 1, 30, tzinfo=UTC)


def test_clock_adds_small_steps_exactly() -> None:
    """Ten steps of a tenth of a second are a second."""
    clock = FakeClock(0.0)
    for _ in range(10):
        clock.advance(0.1)
    assert clock.utc() == 1.0


async def test_advance_wakes_sleepers_in_order() -> None:
    """Who is due first wakes first, whoever began to sleep first."""
    clock, woken = FakeClock(), []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    async with asyncio.TaskGroup() as group:
        for seconds in (30, 10, 20, 10.5):
            group.create_task(sleeper(seconds))
        await clock.sleepers(4)
        clock.advance(9.9)
        assert woken == []
        clock.advance(50)
    assert woken == [10, 10.5, 20, 30]


async def test_advance_leaves_those_asleep_that_are_not_due() -> None:
    """A sleeper wakes at its time and not before; one that sleeps again counts from then."""
    clock = FakeClock()
    beats = 0

    async def heartbeat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await clock.sleep(5)

    task = asyncio.create_task(heartbeat())
    for expected in (1, 2, 3):
        await clock.sleepers(1)
        assert beats == expected
        clock.advance(4)
        assert beats == expected
        clock.advance(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_sleepers_does_not_count_the_cancelled() -> None:
    """A task that was cancelled in its sleep is nobody that could be woken."""
    clock = FakeClock()
    task = asyncio.create_task(clock.sleep(10))
    await clock.sleepers(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await clock.sleepers(1)
    clock.advance(20)


async def test_sleep_of_no_time_only_lets_others_run() -> None:
    """Zero is a way to yield, as in asyncio."""
    others: list[str] = []
    asyncio.get_running_loop().call_soon(others.append, "ran")
    await FakeClock().sleep(0)
    assert others == ["ran"]


def test_advance_refuses_to_go_back() -> None:
    """Time does not run backwards, and nonsense is refused."""
    clock = FakeClock()
    for nonsense in (-1, "soon"):
        with pytest.raises(InvalidInput):
            clock.advance(nonsense)
