"""Limits as a model: never one more, nobody stuck, nothing leaked, whatever crashes when."""

from __future__ import annotations

import asyncio
import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.model.limit import Entry, Gate, Numbers, change, credited, stamped, take
from tests.unit.limit_world import KEY, Process, World

HISTORIES = int(os.environ.get("HOLDFAST_HISTORIES", "150"))
"""`HOLDFAST_HISTORIES=100000` is the long demonstration."""


@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    runs=st.integers(1, 9),
    processes=st.integers(1, 3),
    running=st.integers(1, 3),
    crashes=st.integers(0, 4),
)
def test_gate_never_gives_one_place_too_many(
    seed: int, runs: int, processes: int, running: int, crashes: int
) -> None:
    """With a crash between any two steps: at most `running` claims, none stuck, none leaked."""
    world = World(seed, runs=runs, processes=processes, allowed=Numbers(running=running))
    asyncio.run(world.play(crashes))


@settings(max_examples=HISTORIES // 3, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), burst=st.integers(1, 4), crashes=st.integers(0, 3))
def test_gate_of_starts_keeps_its_rate_and_serves_its_line_after_any_crash(
    seed: int, burst: int, crashes: int
) -> None:
    """Every run starts, none keeps a grant that it does not use, and tokens are taken at most at
    the rate, with the burst, in any time, by the instants of the writes that took them."""
    world = World(seed, runs=6, processes=2, allowed=Numbers(rate=20.0, burst=burst))
    asyncio.run(world.play(crashes))


@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    runs=st.integers(1, 7),
    processes=st.integers(1, 3),
    crashes=st.integers(0, 4),
)
def test_ordered_gate_never_lets_a_run_overtake(
    seed: int, runs: int, processes: int, crashes: int
) -> None:
    """With a crash between any two steps: each run starts after the one before it is done."""
    world = World(seed, runs=runs, processes=processes, allowed=Numbers(running=1), ordered=True)
    asyncio.run(world.play(crashes))


def test_all_free_places_are_given_away() -> None:
    """However many are free at once: after one look none is, while somebody waits."""

    async def play() -> Gate:
        world = World(1, runs=0, processes=1, allowed=Numbers(running=200))
        world.line = [Entry(n, f"r{n}", 2) for n in range(1, 301)]
        process = Process(world)
        process.start(process.gates.look(KEY))
        await world.finish()
        return world.stored_gate()

    gate = asyncio.run(play())
    assert (len(gate.held), gate.head, gate.tail) == (200, 200, 300)


def test_late_write_is_not_followed_by_a_second_burst() -> None:
    """A process that was frozen between its decision and its write brings no tokens with it."""
    decided = credited(Gate(allowed=Numbers(rate=5.0, burst=5)), 100.0)
    for run in range(5):
        decided, taken = take(decided, f"r{run}", 1)
        assert taken
    stored = credited(stamped(decided, 110.0), 110.001)
    assert take(stored, "r6", 1)[1] is False
    assert credited(stamped(decided, 100.5), 100.5).tokens == 0.0
    half_full = change(decided, tokens=1.0, taken=1)
    assert round(stamped(half_full, 100.2).tokens, 6) == 2.0
