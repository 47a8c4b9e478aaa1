"""Whose turn it is among the messages of a lane."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from holdfast.worker.backlog import HIGH, LOW, NORMAL, Backlog


def item(rank: int, since: float = 0.0) -> Any:
    return SimpleNamespace(rank=rank, since=since)


def starts(backlog: Backlog, ranks: tuple[int, ...], count: int) -> Counter[int]:
    """Which ranks start while a message of each of these is always at hand."""
    found: Counter[int] = Counter()
    for rank in ranks:
        backlog.append(item(rank))
    for _ in range(count):
        first = backlog.first
        rank = backlog.pop().rank
        assert first.rank == rank
        found[rank] += 1
        backlog.append(item(rank))
    return found


def test_low_gets_its_share_and_normal_a_fifth_of_the_rest() -> None:
    """In every long enough stretch, but for one start."""
    found = starts(Backlog(0.1), (HIGH, NORMAL, LOW), 1_000)
    assert abs(found[LOW] - 100) <= 1
    assert abs(found[NORMAL] - 180) <= 1
    assert found.total() == 1_000


def test_low_gets_its_share_beside_normal_too() -> None:
    """The share is that of all starts, whoever else waits."""
    for other in (NORMAL, HIGH):
        assert starts(Backlog(0.25), (other, LOW), 100) == {other: 75, LOW: 25}


def test_a_priority_alone_gets_everything() -> None:
    """A share is no limit."""
    for rank in (HIGH, NORMAL, LOW):
        assert starts(Backlog(0.1), (rank,), 50) == {rank: 50}


def test_order_of_arrival_stays_within_a_priority() -> None:
    """And what waited too long is removed, oldest first."""
    backlog = Backlog()
    for since in (1.0, 2.0, 3.0):
        backlog.append(item(NORMAL, since))
    backlog.append(item(LOW, 1.5))
    assert [held.since for held in backlog.late(2.5)] == [1.0, 2.0, 1.5]
    assert (len(backlog), backlog.pop().since) == (1, 3.0)
