"""Debounce as a model: whatever arrives in whichever order, the last one runs, and all end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.model.debounce import BurstMark, Debounce, decide, read_mark
from holdfast.names import H_DEBOUNCE

RULE = Debounce(5.0, latest=12.0)
SECOND = 1_000_000_000


@given(
    order=st.permutations(range(6)),
    crashes=st.lists(st.integers(0, 5), max_size=4),
)
def test_the_newest_waits_and_every_other_one_ends(order: list[int], crashes: list[int]) -> None:
    """In any order of arrival, with a crash before the replaced run was ended."""
    waiting: tuple[str, BurstMark] | None = None
    ended: set[str] = set()
    for number in [again for one in order for again in ([one, one] if one in crashes else [one])]:
        crash = number in crashes and f"seen-{number}" not in ended
        run = f"r{number}"
        decision = decide(RULE, run, (1_000 + number) * SECOND, waiting)
        if decision.mark is not None:
            waiting = run, decision.mark
            assert decision.due <= decision.mark.first / SECOND + RULE.latest
        if crash:
            ended.add(f"seen-{number}")  # killed before the replaced run has ended
        elif decision.end:
            ended.add(decision.end)
    assert waiting is not None
    assert waiting[0] == "r5"
    assert {run for run in ended if run.startswith("r")} == {f"r{n}" for n in range(5)}


@given(
    first=st.integers(1, 2**62), stored=st.integers(1, 2**62), replaced=st.text("abc/=", max_size=5)
)
def test_a_mark_is_read_as_it_was_written(first: int, stored: int, replaced: str) -> None:
    """And nonsense is no mark."""
    mark = BurstMark(first, stored, replaced)
    assert read_mark({H_DEBOUNCE: str(mark)}) == mark
    assert read_mark({}) is None
    assert read_mark({H_DEBOUNCE: "soon"}) is None
    assert read_mark({H_DEBOUNCE: "1"}) is None
