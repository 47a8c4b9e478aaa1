"""Totals of the history: percentiles, sums, and blocks of the index."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.model import totals
from holdfast.model.totals import Spread


@given(st.lists(st.floats(0.002, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_percentile_is_exact_to_a_step(durations: list[float], fraction: float) -> None:
    """A percentile is the real one, rounded up by at most a fifth."""
    spread = Spread()
    for duration in durations:
        spread.add(duration)
    real = sorted(durations)[max(0, -(-int(fraction * 1e6) * len(durations) // 10**6) - 1)]
    assert real * 0.999 <= spread.percentile(fraction) <= max(durations) * 1.2001


def test_sum_of_two_spreads_is_the_spread_of_both() -> None:
    """Hours are sums of minutes."""
    one, two, both = Spread(), Spread(), Spread()
    for n in range(100):
        (one if n % 2 else two).add(n)
        both.add(n)
    one.merge(two)
    assert one == both
    assert Spread().percentile(0.5) == 0.0


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(5, 1000)), max_size=300))
def test_block_names_every_place(entries: list[tuple[int, int]]) -> None:
    """What was indexed is found in its part, and only there."""
    parts = totals.blocks(entries, 5, 1000)
    for sum_, sequence in entries:
        block = totals.BLOCK.decode(parts[sum_ % totals.PARTS])
        assert sequence in totals.places(block, sum_)
    assert len(parts) == totals.PARTS


@pytest.mark.parametrize(
    ("run", "names"),
    [("r1", ("r1",)), ("work/a", ("work/a", "a")), ("g/work/a", ("g/work/a", "a"))],
)
def test_run_is_found_by_id_and_key(run: str, names: tuple[str, ...]) -> None:
    """A keyed run is indexed twice."""
    assert totals.names_of(run) == names
