"""The judge of `benchmarks.documents`: what counts as done twice."""

from __future__ import annotations

from benchmarks.documents import GAP_SECONDS, Execution, judge

KILLED = {1: 10.0}


def test_repeat_after_a_kill_is_excused_and_any_other_is_not() -> None:
    """Only an execution whose process was killed right after it may be repeated."""
    again = Execution(7, 2, 11.0)
    assert judge([again, Execution(8, 2, 1.0)], KILLED) == (2, 2, 0, [])
    assert judge([again, Execution(7, 1, 10.0 - GAP_SECONDS / 2)], KILLED) == (1, 2, 1, [])
    for first in (Execution(7, 1, 10.0 - 2 * GAP_SECONDS), Execution(7, 3, 9.9)):
        assert judge([first, again], KILLED) == (1, 2, 0, [7])


def test_each_repeat_needs_its_own_kill() -> None:
    """A third execution is one too many if only the first was killed."""
    ones = [Execution(7, 1, 9.9), Execution(7, 2, 11.0), Execution(7, 3, 12.0)]
    assert judge(ones, KILLED) == (1, 3, 1, [7])
    assert judge(ones, KILLED | {2: 11.5}) == (1, 3, 2, [])
