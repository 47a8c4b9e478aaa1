"""A node's heartbeat on a store that fails now and then."""

from __future__ import annotations

import pytest

from holdfast.errors import BrokerError, OutcomeUnknown, Unavailable
from holdfast.model import node as nodes
from holdfast.model.node import NodeRecord
from holdfast.ownership.heartbeat import Heartbeat
from holdfast.ownership.store import MemoryStore
from holdfast.retrying import PATIENCE_SECONDS


class StepClock:
    """Sleeping moves it on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def utc(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


class FailingStore(MemoryStore):
    """Refuses the next writes, or applies them and loses the answer."""

    def __init__(self, clock: StepClock, failures: list[BrokerError]) -> None:
        super().__init__(clock)
        self.failures = failures

    async def put(
        self, key: str, value: bytes, *, expected: int | None, ttl: float | None = None
    ) -> int:
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, Unavailable):
            raise failure
        revision = await super().put(key, value, expected=expected, ttl=ttl)
        if failure:
            raise failure
        return revision


async def test_start_waits_out_an_election() -> None:
    """A bucket without a leader, or an answer that is lost, is no reason not to start."""
    clock = StepClock()
    store = FailingStore(
        clock, [Unavailable("no leader"), OutcomeUnknown("lost"), OutcomeUnknown("")]
    )
    heartbeat = Heartbeat(store, NodeRecord("n1", "worker"), clock)
    await heartbeat.start()
    entry = await store.get("n1")
    assert entry is not None
    assert nodes.decode(entry.value).state == "RUNNING"
    assert heartbeat.trusted


async def test_start_gives_up_when_nobody_is_elected() -> None:
    """A cluster that stays without a leader is an error in the end, not a silent wait."""
    clock = StepClock()
    store = FailingStore(clock, [Unavailable("no leader")] * 1000)
    with pytest.raises(Unavailable):
        await Heartbeat(store, NodeRecord("n1", "worker"), clock).start()
    assert clock.now - 1000.0 < PATIENCE_SECONDS + 1


class LostKeeper:
    """A deputy that found its node declared lost."""

    active = False
    acknowledged = 0.0
    steady_since = 0.0
    revision = 0
    lost = True
    gap = False
    blocked = False

    def verified(self) -> None:
        """Nothing to do."""

    def proved(self) -> None:
        """Nothing to do."""


async def test_node_that_leaves_ends_when_its_keeper_was_told_that_it_is_lost() -> None:
    """Its record is gone and it is TERMINATING: the heartbeat ends, without an error."""
    clock = StepClock()
    store = MemoryStore(clock)
    heartbeat = Heartbeat(store, NodeRecord("n1", "worker"), clock)
    await heartbeat.start()
    await heartbeat.move("TERMINATING")
    await store.delete("n1")
    heartbeat.deputy = LostKeeper()
    await heartbeat.run()
    assert heartbeat.lost.is_set()
