"""The trust window: a leader stops before anybody can see its lease expire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Unreadable
from holdfast.model.lease import (
    LeaseRecord,
    TermRecord,
    TrustWindow,
    decode_lease,
    decode_term,
    encode,
)


@given(
    st.floats(1, 60),
    st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20)), min_size=1, max_size=10),
    st.floats(0, 100),
)
def test_trust_ends_before_the_lease_can_expire(
    ttl: float, renewals: list[tuple[float, float]], later: float
) -> None:
    """However slow the answers: the server counts from the storing, which is after the sending."""
    window, now, stored = TrustWindow(ttl), 0.0, 0.0
    for wait, trip in renewals:
        now += wait
        sent = now
        stored = sent  # the earliest moment from which the server can count
        now += trip
        window.confirmed(sent)
    now += later
    if window.open(now):
        assert now < stored + ttl
    assert (window.left(now) > 0) == window.open(now)


def test_slow_successful_renewal_does_not_extend_the_window() -> None:
    """An answer that comes after the window has ended does not open it again."""
    window = TrustWindow(5.0)
    window.confirmed(0.0)
    window.confirmed(1.0)
    assert window.open(5.4)
    assert not window.open(5.6)
    window.confirmed(0.5)  # an answer out of order
    assert window.open(5.4)


def test_window_that_was_ended_stays_closed() -> None:
    """After a release or a loss nothing is trusted."""
    window = TrustWindow(5.0)
    assert not window.open(0.0)
    window.confirmed(0.0)
    window.ended()
    assert not window.open(0.0)
    assert window.left(0.0) == 0.0


def test_lease_records_read_back_and_refuse_nonsense() -> None:
    """What somebody else wrote under the key is nobody's lease."""
    assert decode_lease(encode(LeaseRecord("a", "t", 1.0, 2))) == LeaseRecord("a", "t", 1.0, 2)
    assert decode_term(encode(TermRecord("a", "t"))) == TermRecord("a", "t")
    for decode in (decode_lease, decode_term):
        with pytest.raises(Unreadable):
            decode(b"hello")
