"""The model of fan-out runs: statuses, and whom to send to, through many histories."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Unreadable
from holdfast.model import fleet
from holdfast.model.fleet import FanOut, FleetRequest, FleetRun, final_status

COUNTS = st.integers(1, 20).flatmap(
    lambda t: st.integers(0, t).flatmap(
        lambda r: st.tuples(st.just(t), st.just(r), st.integers(0, r))
    )
)


@settings(deadline=None)
@given(COUNTS, st.booleans(), st.booleans())
def test_final_status_follows_the_rule(
    counts: tuple[int, int, int], cancelled: bool, given_up: bool
) -> None:
    """Cancelled with returns missing; else complete, failed, partial or timeout by the returns."""
    targets, returned, succeeded = counts
    status = final_status(targets, returned, succeeded, cancelled=cancelled, given_up=given_up)
    if cancelled and returned < targets:
        assert status == "cancelled"
    elif returned == targets:
        assert status == ("complete" if succeeded == targets else "failed")
    elif returned:
        assert status == "partial"
    else:
        assert status == ("failed" if given_up else "timeout")
    assert status in fleet.ENDED


@pytest.mark.parametrize(
    ("targets", "returned", "succeeded", "code"),
    [(3, 3, 3, 0), (3, 3, 2, 2), (3, 2, 2, 3), (3, 0, 0, 3), (3, 2, 1, 4)],
)
def test_exit_codes(targets: int, returned: int, succeeded: int, code: int) -> None:
    """0 all fine, 2 failed, 3 not answered, 4 both."""
    record = FleetRun(
        FleetRequest("f1", "*", "ping"),
        "partial",
        tuple(f"a{n}" for n in range(targets)),
        returned=returned,
        succeeded=succeeded,
    )
    assert fleet.exit_code(record) == code


def test_cancel_that_was_obeyed_is_cancelled() -> None:
    """Everybody answered that it stopped: that is no failure."""
    assert final_status(2, 2, 0, cancelled=True, cut_short=2) == "cancelled"
    assert final_status(2, 2, 2, cancelled=True) == "complete"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["tick", "ack", "return", "bad", "nobody", "stop", "foreign"]),
        st.integers(0, 9),
        st.floats(0, 3),
    ),
    max_size=80,
)


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 10), st.integers(0, 4), st.integers(0, 3), EVENTS)
def test_fan_out_histories(
    count: int, batch: int, most: int, events: list[tuple[str, int, float]]
) -> None:
    """Whatever happens: nobody gets more than two commands, waves wait, and it comes to an end."""
    targets = [f"a{n}" for n in range(count)]
    fan = FanOut(targets, batch=batch, max_failures=most, ack_seconds=1, grace_seconds=1)
    sent: dict[str, int] = {}
    now = 0.0

    def tick() -> None:
        before = set(sent)
        closed = all(a in fan.returned or a in fan.unreachable for a in before)
        first, again = fan.due(now)
        for agent in (*first, *again):
            sent[agent] = sent.get(agent, 0) + 1
        if first and batch:
            assert len(first) <= batch
            assert closed or all(a in fan.returned or a in fan.unreachable for a in before)
        assert not set(first) & before
        assert set(again) <= before

    for kind, number, passed in events:
        now += passed
        agent = targets[number % count]
        if kind == "tick":
            tick()
        elif kind == "ack":
            fan.heard_ack(agent)
        elif kind == "nobody":
            fan.heard_nobody(agent)
        elif kind == "stop":
            fan.stop()
        elif kind == "foreign":
            assert not fan.heard_return("stranger", True)
        else:
            known = agent in fan.returned
            assert fan.heard_return(agent, kind == "return") is not known
        assert not set(fan.returned) & fan.unreachable
        assert all(times <= 2 for times in sent.values())
    for _ in range(4 * count + 4):  # silence from now on, except for those that have acked
        now += 2
        tick()
        for agent in fan.pending():
            if agent not in fan.unreachable:
                fan.heard_return(agent, True)
    assert fan.over
    assert set(targets) == set(fan.returned) | fan.unreachable | set(fan.unsent)
    assert fan.stopped or not fan.unsent
    assert all(times <= 2 for times in sent.values())


def test_fan_out_skips_those_who_have_returned_to_the_last_owner() -> None:
    """An adopter sends only to those whose return is not stored."""
    fan = FanOut(["a", "b", "c"])
    assert fan.heard_return("b", True)
    assert fan.due(0.0) == (["a", "c"], [])
    assert fan.heard_return("a", True)
    assert fan.heard_return("c", True)
    assert fan.over


def test_unreachable_agent_that_returns_late_has_returned() -> None:
    """A verdict of silence is taken back by a voice."""
    fan = FanOut(["a", "b"], ack_seconds=1, grace_seconds=1)
    fan.due(0.0)
    fan.due(1.0)
    fan.due(2.0)
    assert fan.unreachable == {"a", "b"}
    assert fan.heard_return("a", True)
    assert fan.unreachable == {"b"}


def test_silence_while_we_were_away_says_nothing() -> None:
    """After the dispatcher's own outage the silent are asked again until they had time to return:
    agents that lost the same servers reconnect one by one, and nobody listens until then."""
    fan = FanOut(["a", "b"], ack_seconds=1, grace_seconds=1)
    assert fan.due(0.0) == (["a", "b"], [])
    assert fan.due(1.0) == ([], ["a", "b"])
    fan.start_over(60.0, 62.5)
    for now in (60.0, 61.0, 62.0):
        assert fan.due(now) == ([], ["a", "b"])
        fan.heard_nobody("a")
        assert not fan.unreachable
    fan.heard_ack("b")
    assert fan.due(63.0) == ([], ["a"])
    fan.heard_nobody("a")
    assert fan.unreachable == {"a"}
    assert not fan.over


GOLDEN = (
    b'{"request":{"run":"f1","target":"web*","function":"mark","args":["x"],"user":"ann",'
    b'"later":1},"status":"running","targets":["web1"],"owner":"d1","token":"d1.1","epoch":7,'
    b'"deadline":5.0,"new":true}'
)


def test_records_of_other_versions_are_read() -> None:
    """Members of newer versions are ignored; what is missing has a default."""
    record = fleet.decode(GOLDEN)
    assert (record.run, record.epoch, record.request.user) == ("f1", 7, "ann")
    assert (record.adoptions, record.request.timeout) == (0, 60.0)
    assert fleet.decode(fleet.encode(record)) == record
    for bad in (b"", b"[]", b"{}", b'{"request":1}', b"\xff"):
        with pytest.raises(Unreadable):
            fleet.decode(bad)
