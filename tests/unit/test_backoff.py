"""Retry policies: how many attempts, and how long between them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidInput
from holdfast.model.backoff import DEFAULT, MOST_ATTEMPTS, Backoff

spans = st.floats(0.001, 1e6)
counts = st.integers(1, 50)


def test_default_lasts_about_seven_days() -> None:
    """The default has 15 attempts, 14 waits from a minute to a day, and ends after 7 days."""
    waits = [DEFAULT.wait(n) for n in range(1, 15)]
    assert DEFAULT.attempts == 15
    assert waits[0] == 60
    assert waits[-1] == 86400
    assert sum(w for w in waits if w is not None) == pytest.approx(7 * 86400, rel=0.001)
    assert DEFAULT.wait(15) is None


@given(spans, spans, counts)
def test_linear_grows_in_equal_steps(one: float, other: float, attempts: int) -> None:
    """Waits start at first, end at last, and each step is as large as the one before."""
    low, high = sorted((one, other))
    waits = Backoff.linear(low, high, attempts).waits
    assert len(waits) == attempts - 1
    assert all(low <= w <= high for w in waits)
    if len(waits) > 1:
        assert waits[0] == low
        assert waits[-1] == pytest.approx(high)
    steps = [b - a for a, b in itertools.pairwise(waits)]
    assert all(step == pytest.approx(steps[0], abs=1e-6) for step in steps)


@given(spans, spans, st.floats(1, 1000), counts)
def test_exponential_multiplies_up_to_last(
    one: float, other: float, factor: float, attempts: int
) -> None:
    """Each wait is factor times the one before, and none is longer than last."""
    low, high = sorted((one, other))
    waits = Backoff.exponential(low, high, factor, attempts).waits
    assert len(waits) == attempts - 1
    for before, after in itertools.pairwise(waits):
        assert after == pytest.approx(min(before * factor, high))


def test_exponential_with_many_attempts_stays_finite() -> None:
    """The largest factor and the most attempts do not overflow."""
    policy = Backoff.exponential("1s", "1h", 1000, MOST_ATTEMPTS)
    assert policy.wait(MOST_ATTEMPTS - 1) == 3600


def test_list_has_one_attempt_more_than_waits() -> None:
    """Three waits lie between four attempts."""
    policy = Backoff.list(["1s", 10, "1m"])
    assert policy.attempts == 4
    assert [policy.wait(n) for n in (1, 2, 3, 4)] == [1, 10, 60, None]


def test_never_has_one_attempt() -> None:
    """The first failure is final."""
    assert Backoff.never().attempts == 1
    assert Backoff.never().wait(1) is None


def test_wait_refuses_to_count_from_zero() -> None:
    """Failures are counted from 1; a caller that counts otherwise is told so."""
    with pytest.raises(InvalidInput, match="counted from 1"):
        DEFAULT.wait(0)


@given(st.text(min_size=1), st.integers(1, 14), st.floats(0, 1))
def test_jitter_is_bounded_and_repeatable(seed: str, failures: int, jitter: float) -> None:
    """The same run gets the same wait everywhere, within the stated fraction."""
    policy = Backoff.linear(jitter=jitter)
    plain, wait = policy.wait(failures), policy.wait(failures, seed)
    assert plain is not None
    assert wait is not None
    assert wait == Backoff.linear(jitter=jitter).wait(failures, seed)
    assert plain * (1 - jitter) - 1e-6 <= wait <= plain * (1 + jitter) + 1e-6


def test_jitter_spreads_different_runs() -> None:
    """Runs that failed together do not come back together."""
    policy = Backoff.list(["1m"], jitter=0.5)
    waits = {policy.wait(1, f"run-{n}") for n in range(1000)}
    assert len(waits) > 990
    assert all(30 <= w <= 90 for w in waits if w is not None)
    assert sum(w for w in waits if w is not None) / len(waits) == pytest.approx(60, abs=3)


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        (DEFAULT, "15 attempts, 1m to 1d linear"),
        (Backoff.exponential(), "15 attempts, 1s to 1h exponential"),
        (Backoff.list(["500ms", "1.5s"]), "3 attempts, waits 500ms, 1.5s"),
        (Backoff.list(["1s"] * 9), "10 attempts, waits 1s, 1s, 1s, 1s, 1s, 1s and 3 more"),
        (Backoff.linear(attempts=2), "2 attempts, waits 1m"),
        (Backoff.never(), "1 attempt, no retry"),
        (Backoff.linear(jitter=0.1), "15 attempts, 1m to 1d linear, jitter 10%"),
    ],
)
def test_describe_says_it_in_one_line(policy: Backoff, line: str) -> None:
    """A policy can be shown to people."""
    assert policy.describe() == line


@pytest.mark.parametrize(
    ("maker", "arguments", "teaches"),
    [
        (Backoff.linear, {"attempts": 0}, "between 1"),
        (Backoff.linear, {"attempts": 10**9}, "between 1"),
        (Backoff.linear, {"attempts": 2.5}, "whole number"),
        (Backoff.linear, {"attempts": True}, "whole number"),
        (Backoff.linear, {"first": "2h", "last": "1h"}, "Backoff.list"),
        (Backoff.linear, {"first": "soon"}, "first 'soon' is not readable"),
        (Backoff.linear, {"last": -1}, "last must be between"),
        (Backoff.linear, {"jitter": 2}, "jitter must be between 0 and 1"),
        (Backoff.linear, {"jitter": "much"}, "jitter must be a number"),
        (Backoff.exponential, {"factor": 0.5}, "factor must be between"),
        (Backoff.exponential, {"factor": math.nan}, "factor must be between"),
        (Backoff.exponential, {"first": 0}, "above 0"),
        (Backoff.list, {"waits": "1s"}, "list of durations"),
        (Backoff.list, {"waits": 5}, "list of durations"),
        (Backoff.list, {"waits": ["1s", None]}, "wait must be seconds"),
        (Backoff.list, {"waits": [1] * 5000}, "at most"),
    ],
)
def test_bad_policy_is_refused_with_a_teaching_sentence(
    maker: Any, arguments: dict[str, Any], teaches: str
) -> None:
    """A policy that cannot work fails where it is written, and the message says why."""
    with pytest.raises(InvalidInput, match=teaches):
        maker(**arguments)
