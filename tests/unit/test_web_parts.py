"""The small parts of the web: addresses of runs, pages of lists, times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidInput, InvalidName
from holdfast.model.fleet import FleetRequest, FleetRun
from holdfast.names import encode
from holdfast.rates import MOST_KEYS, RateLimiter
from holdfast.testing import FakeClock
from holdfast.web.pages.fleet import return_line
from holdfast.web.wire import page_of, run_of, when


def test_limiter_gives_a_burst_and_then_the_rate() -> None:
    """So many in one go, then as many as time has passed for; keys do not share."""
    clock = FakeClock()
    limiter = RateLimiter(2.0, 4.0, clock.monotonic)
    assert [limiter.wait("a") for _ in range(4)] == [0.0] * 4
    assert limiter.wait("a") == pytest.approx(0.5)
    assert limiter.wait("b") == 0.0
    clock.advance(0.5)
    assert limiter.wait("a") == 0.0
    assert limiter.wait("a") > 0.0


def test_limiter_without_a_rate_never_waits() -> None:
    """0 means no limit."""
    limiter = RateLimiter(0.0, 1.0, lambda: 0.0)
    assert not any(limiter.wait("a") for _ in range(1000))


def test_limiter_forgets_who_was_quiet_for_longest() -> None:
    """However many addresses ask, it stays small, and who asks all the time is not forgotten."""
    limiter = RateLimiter(1.0, 1.0, lambda: 0.0)
    limiter.wait("loud")
    for n in range(2 * MOST_KEYS):
        limiter.wait(f"address {n}")
        if n % 100 == 0:
            assert limiter.wait("loud") > 0.0
    assert len(limiter._left) <= MOST_KEYS


@given(st.text(min_size=1, max_size=40), st.sampled_from(["add", "g/add"]))
def test_run_ids_survive_the_way_through_an_address(key: str, home: str) -> None:
    """A run's id as one part of an address leads back to it."""
    run = f"{home}/{encode(key)}"
    assert run_of(run.replace("/", "~")) == run


@pytest.mark.parametrize("part", ["", "a.b", "a b", "../x", "a%2Fb", "é"])
def test_what_is_no_run_is_refused(part: str) -> None:
    """Nothing that could reach a subject as more than one token."""
    with pytest.raises(InvalidName):
        run_of(part)


@given(st.sets(st.text(min_size=1)), st.integers(1, 10))
def test_pages_of_a_list_are_the_list(names: set[str], limit: int) -> None:
    """Page by page everything comes once, in order."""
    items = sorted(names)
    found: list[str] = []
    cursor = ""
    for _ in range(len(items) + 1):
        page = page_of(items, lambda name: name, limit, cursor)
        found += page.items
        cursor = page.next
        if not cursor:
            break
    assert found == items


def test_times_are_ago_or_absolute() -> None:
    """`10m` is counted back from now; a time is a time; anything else is explained."""
    assert when("", 1000.0, "since") == 0.0
    assert when("10m", 1000.0, "since") == 400.0
    assert when("1970-01-01T00:10:00Z", 1000.0, "since") == 600.0
    with pytest.raises(InvalidInput, match="since"):
        when("yesterday", 1000.0, "since")


def test_agent_that_refused_is_shown_with_its_reason() -> None:
    """An agent that said why it refuses is not shown as merely unreachable."""
    request = FleetRequest("r", "*", "ping")
    record = FleetRun(
        request, "partial", ("a", "b"), unreachable=("a", "b"), refused={"a": "unsigned"}
    )
    line = return_line(record, "a", None)
    assert (line.outcome, line.error) == ("refused", "refused: unsigned")
    assert return_line(record, "b", None).outcome == "unreachable"
