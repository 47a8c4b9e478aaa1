"""The lifecycle of a node, driven through many histories."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config import LivenessConfig
from holdfast.errors import ConfigError
from holdfast.model import node as nodes
from holdfast.model.lifecycle import ALIVE, GONE, TRANSITIONS, InvalidTransition, may_follow
from holdfast.model.liveness import PROFILES, Liveness, from_config
from holdfast.model.node import NodeRecord

STATES = sorted(TRANSITIONS)


@settings(max_examples=2_000)
@given(st.lists(st.sampled_from(STATES), max_size=30))
def test_lifecycle_never_returns_from_disconnected_to_running(wanted: list[str]) -> None:
    """No history, whatever is tried, leads from DISCONNECTED back to RUNNING."""
    record = NodeRecord("n", "worker")
    seen = [record.state]
    for state in wanted:
        try:
            record = nodes.move(record, state, by="c", at=float(len(seen)))  # type: ignore[arg-type]
        except InvalidTransition:
            continue
        seen.append(record.state)
    if "DISCONNECTED" in seen:
        assert "RUNNING" not in seen[seen.index("DISCONNECTED") :]
    assert all(may_follow(a, b) for a, b in pairwise(seen))


def test_lifecycle_has_the_transitions_of_the_table() -> None:
    """The table is the one that was agreed on, no more and no less."""
    assert {s: sorted(TRANSITIONS[s]) for s in TRANSITIONS} == {
        "CREATED": ["DISCONNECTED", "ERROR", "RUNNING"],
        "RUNNING": ["DISCONNECTED", "ERROR", "TERMINATING"],
        "ERROR": ["NOT_RUNNING", "TERMINATING"],
        "DISCONNECTED": ["NOT_RUNNING", "TERMINATING"],
        "TERMINATING": ["ERROR", "NOT_RUNNING", "TERMINATED_FORCED", "TERMINATED_GRACEFULLY"],
        "TERMINATED_GRACEFULLY": ["NOT_RUNNING"],
        "TERMINATED_FORCED": ["NOT_RUNNING"],
        "NOT_RUNNING": ["INACTIVE"],
        "INACTIVE": [],
    }


@pytest.mark.parametrize("state", STATES)
def test_lifecycle_state_may_follow_itself(state: str) -> None:
    """A heartbeat in any state is valid."""
    assert may_follow(state, state)


def test_lifecycle_every_state_leads_to_inactive() -> None:
    """Whatever happens to a node, it can be finished."""
    for state in STATES:
        reached, todo = {state}, [state]
        while todo:
            for after in TRANSITIONS[todo.pop()] - reached:
                reached.add(after)
                todo.append(after)
        assert "INACTIVE" in reached


def test_lifecycle_nobody_is_alive_and_gone() -> None:
    """A node holds what it claimed, or it does not."""
    assert not ALIVE & GONE


def test_move_keeps_a_reason_a_person_can_read() -> None:
    """Every transition has a reason, given or by default."""
    record = NodeRecord("n", "worker")
    for state in ("RUNNING", "TERMINATING", "TERMINATED_GRACEFULLY", "NOT_RUNNING", "INACTIVE"):
        record = nodes.move(record, state, by="n", at=1.0)
        assert " " in record.reason


def test_node_record_reads_what_other_versions_wrote() -> None:
    """Unknown members are ignored and missing ones have defaults."""
    old = b'{"id":"w-1","role":"worker","state":"RUNNING","since":1.5,"new_member":[1]}'
    record = nodes.decode(old)
    assert (record.id, record.state, record.liveness) == ("w-1", "RUNNING", Liveness())
    assert nodes.decode(nodes.encode(record)) == record


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"heartbeat_seconds": 6.0}, "at least twice the heartbeat"),
        ({"timeout_seconds": 1.0, "heartbeat_seconds": 0.1}, "at least 2 s"),
        ({"ping_seconds": 0.0}, "more than 0"),
        ({"ping_misses": 100}, "could never notice"),
        ({"grace_seconds": -1.0}, "cannot be negative"),
    ],
)
def test_liveness_refuses_numbers_that_cannot_work(given: dict[str, float], says: str) -> None:
    """Relations between the numbers are checked, and the sentence says which."""
    with pytest.raises(ConfigError, match=says):
        Liveness(**given).check()  # type: ignore[arg-type]


def test_liveness_takes_the_profile_and_what_is_given() -> None:
    """Numbers that are given replace the profile's, the others stay."""
    found = from_config(LivenessConfig(profile="wan", timeout_seconds=60.0), 30.0)
    assert found.timeout_seconds == 60
    assert found.grace_seconds == 30
    assert found.heartbeat_seconds == PROFILES["wan"].heartbeat_seconds
    assert not from_config(LivenessConfig(enabled="no")).enabled
