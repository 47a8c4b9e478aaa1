"""What a process takes for the server's time, when its own clocks cannot be believed."""

from __future__ import annotations

import time

import pytest

from holdfast.broker import Broker
from holdfast.broker.streams import Topology
from holdfast.clock import SystemClock
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.server import Server
from tests.integration.support import until

NEAR = 5.0
"""Far less than any leap here, far more than a busy machine takes."""


class LeapingClock(SystemClock):
    """The real clock, with hands that can be moved."""

    wall = 0.0
    lost = 0.0

    def utc(self) -> float:
        return super().utc() + self.wall

    def monotonic(self) -> float:
        return super().monotonic() - self.lost


@pytest.fixture
def clock() -> LeapingClock:
    return LeapingClock()


def distance(broker: Broker) -> float:
    """How far it is from what the server, on the same machine, takes for the time."""
    return abs(broker.server_now() - time.time())


@pytest.mark.parametrize("leap", [3600.0, -3600.0])
async def test_wall_clock_that_is_set_changes_nothing(
    nats: Server, namespace: str, clock: LeapingClock, leap: float
) -> None:
    """Not even for a moment: delays, expiries and grace are judged by the server's time."""
    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with Broker(config, clock=clock) as broker:
        await Topology(broker, RecordConfig()).ensure()
        assert distance(broker) < NEAR
        clock.wall = leap
        assert distance(broker) < NEAR
        assert abs(await Topology(broker, RecordConfig()).measure_clock() + leap) < NEAR


async def test_machine_that_slept_learns_the_time_again(
    nats: Server, namespace: str, clock: LeapingClock
) -> None:
    """The monotonic clock stands still meanwhile; the wall clock gives it away."""
    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with Broker(config, clock=clock) as broker:
        await Topology(broker, RecordConfig()).ensure()
        clock.lost = 600.0
        assert distance(broker) > 500
        await until(lambda: distance(broker) < NEAR, 20, "the server's time")


async def test_clock_that_was_wrong_at_the_start_does_not_matter(
    nats: Server, namespace: str, clock: LeapingClock
) -> None:
    """Measured once, the difference is known."""
    clock.wall = 86_400.0
    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with Broker(config, clock=clock) as broker:
        await Topology(broker, RecordConfig()).ensure()
        assert distance(broker) < NEAR
        clock.wall = 0.0
        assert distance(broker) < NEAR
