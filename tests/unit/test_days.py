"""What a slot counts as on the page of a day."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.model.schedule import define
from holdfast.model.slot import Slot
from holdfast.status.days import CELL, CELLS, _add, kind
from holdfast.web.pages.schedules import day_line

FIRST = 1_795_046_400  # a midnight


@pytest.mark.parametrize(
    ("slot", "what"),
    [
        (Slot("dispatched", FIRST, dispatched=FIRST + 0.2), "fired"),
        (Slot("dispatched", FIRST, dispatched=FIRST + 60), "late"),
        (Slot("dispatched", FIRST, dispatched=FIRST + 1, caught_up=True), "late"),
        (Slot("dispatched", FIRST, dispatched=FIRST + 9_000, backfill=True), "fired"),
        (Slot("skipped", FIRST, reason="overlap"), "skipped"),
        (Slot("skipped", FIRST, reason="catch_up"), "missed"),
        (Slot("skipped", FIRST, reason="limit"), "missed"),
        (Slot("planned", FIRST), "waiting"),
    ],
)
def test_slot_counts_as_what_became_of_it(slot: Slot, what: str) -> None:
    """Missed is what an outage took; skipped is what a rule of the schedule left out."""
    assert kind(slot) == what


def test_quarter_of_an_hour_looks_as_its_worst_slot() -> None:
    """A missed series covers all that it stands for, within the day."""
    cells: dict[int, Counter[str]] = {}
    _add(cells, FIRST, FIRST + 60, "fired")
    _add(cells, FIRST, FIRST + 120, "missed", Slot("skipped", 0.0, reason="limit"))
    series = Slot("skipped", 0.0, reason="catch_up", last=FIRST + 26 * 3600, count=900)
    _add(cells, FIRST, FIRST + 23 * 3600, "missed", series)
    _add(cells, FIRST, FIRST - 60, "fired")  # yesterday's
    line = day_line(define("tidy", "tidy", every="1m"), FIRST, cells)
    assert [block.look for block in line.blocks] == ["dead"] * 5
    assert line.blocks[0].title == "00:00 UTC: 1 fired, 1 missed"
    assert max(cells) == CELLS - 1
    assert min(cells) == 0
    assert CELL * CELLS == 86_400
