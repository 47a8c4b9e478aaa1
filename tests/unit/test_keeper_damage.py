"""A keeper that finds something else in its node's place: only a verdict that it knows counts."""

from __future__ import annotations

import pytest

from holdfast.keeper.record import ALIVE, ENDED, _verdict, after_death
from holdfast.model.lifecycle import STATES, may_follow
from tests.faults.damage import DAMAGE


@pytest.mark.parametrize("kind", DAMAGE)
def test_keeper_takes_no_damage_for_a_verdict(kind: str) -> None:
    """What cannot be read, or names a state that is not known, leaves the node as it is."""
    assert _verdict(DAMAGE[kind]).get("state", "CREATED") in ALIVE


def test_keeper_believes_a_verdict() -> None:
    """A record that says that the node is lost is taken at its word."""
    found = _verdict(b'{"state":"DISCONNECTED","by":"coordinator-1","since":5.0,"beat":3}')
    assert (found["state"], found["by"]) == ("DISCONNECTED", "coordinator-1")


def test_keeper_knows_every_state() -> None:
    """It has its own list of states, to stay small."""
    assert ALIVE | ENDED == STATES


@pytest.mark.parametrize("state", sorted(ALIVE))
def test_keeper_moves_a_node_only_as_the_lifecycle_allows(state: str) -> None:
    """It writes ERROR before it kills a worker, and another state after any death."""
    assert may_follow(state, "ERROR")
    assert may_follow(state, after_death(state))
