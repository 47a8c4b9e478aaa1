"""What a process takes for the server's time, from measurements that are always a little late."""

from __future__ import annotations

import pytest

from holdfast.broker.time import MEASURE_SECONDS, WINDOW_SECONDS, ServerTime
from holdfast.testing import FakeClock

AHEAD = 1_000.0
"""How far the server's clock is ahead of our monotonic one."""


class World:
    """A server whose answers take as long as a test says."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.time = ServerTime(self.clock)
        self.ahead = AHEAD

    async def measure(self) -> None:
        raise AssertionError("nobody measures in here")

    def answer(self, late: float) -> None:
        now = self.clock.monotonic()
        self.time.learn(now + self.ahead - late, now, self.measure)

    @property
    def early(self) -> float:
        return self.time.now() - (self.clock.monotonic() + self.ahead)


@pytest.fixture
def world() -> World:
    return World()


def test_time_is_this_machines_until_measured(world: World) -> None:
    """Without a measurement there is nothing better, and nobody may rely on it."""
    assert not world.time.known
    assert world.time.now() == world.clock.utc()


def test_time_follows_the_fastest_answer(world: World) -> None:
    """It is never early, and late by as little as the best of the measurements."""
    for late in (0.2, 0.01, 0.3):
        world.answer(late)
        world.clock.advance(5)
    assert world.early == pytest.approx(-0.01)


def test_measurements_expire(world: World) -> None:
    """Clocks drift: a fast answer from long ago says less than a slow one from now."""
    world.answer(0.0)
    world.clock.advance(WINDOW_SECONDS)
    world.answer(0.2)
    assert world.early == pytest.approx(-0.2)


def test_clock_that_was_set_forward_is_followed_at_once(world: World) -> None:
    """One measurement is enough: no answer can be that early."""
    world.answer(0.0)
    world.ahead += 30
    world.answer(0.01)
    assert world.early == pytest.approx(-0.01)


def test_clock_that_was_set_back_is_followed_after_three(world: World) -> None:
    """A single low measurement may just be a slow answer."""
    world.answer(0.0)
    world.answer(4.0)
    assert world.early == pytest.approx(0.0)
    world.ahead -= 30
    for _ in range(3):
        world.answer(0.01)
    assert world.early == pytest.approx(-0.01)


def test_time_is_doubtful_when_old_or_after_a_leap(world: World) -> None:
    """Then it is measured again, by whoever has the connection."""
    assert not world.time.doubtful
    world.answer(0.0)
    assert not world.time.doubtful
    world.clock.advance(MEASURE_SECONDS + 1)
    assert world.time.doubtful
