"""How often a process looks for reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from holdfast.process import COLLECT_AFTER, collect_rarely


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_process_looks_rarely_and_still_finds_cycles() -> None:
    """Garbage in a cycle is freed without anybody asking for it."""
    gc.set_threshold(700, 10, 10)
    collect_rarely()
    assert gc.get_threshold()[0] == COLLECT_AFTER
    assert gc.get_freeze_count() > 0
    before = gc.get_stats()[0]["collections"]
    kept: list[list[int]] = [[] for _ in range(2 * COLLECT_AFTER)]
    assert gc.get_stats()[0]["collections"] > before
    assert kept


def test_process_leaves_what_somebody_has_set() -> None:
    """An app that chose its own thresholds keeps them."""
    gc.set_threshold(123, 5, 5)
    collect_rarely()
    assert gc.get_threshold() == (123, 5, 5)
