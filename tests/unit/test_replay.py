"""When a dead letter may be sent again, as a pure rule."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.model.replay import MARK, Refused, Replay, again, decide_replay
from holdfast.model.run import LARGEST_LEAP, TERMINAL, RunRecord, State, Verdict, decide

STATES = st.sampled_from(get_args(State))
NUMBERS = st.integers(1, 50)
TOKENS = st.sampled_from(("", "worker-a.1", MARK + "op"))


def record_in(state: State, message: int = 1, token: str = "") -> RunRecord:
    return RunRecord(state, "default", "send", message=message, token=token, failures=3)


@given(STATES, NUMBERS, TOKENS, NUMBERS)
def test_replayed_message_is_never_an_older_one(
    state: State, message: int, token: str, attempt: int
) -> None:
    """What is sent again is newer than the letter, and what the record then expects."""
    record = record_in(state, message, token)
    decision = decide_replay(record, attempt)
    if isinstance(decision, Refused):
        assert decision.why
        return
    assert decision.message > attempt
    if decision.write:
        record = again(record, message=decision.message, token="op", now=9.0)
    verdict = decide(record, message=decision.message, holder_alive=True, crash_limit=3)
    assert verdict is Verdict.CLAIM
    older = decide(record, message=attempt, holder_alive=True, crash_limit=3)
    assert older is Verdict.SUPERSEDED


@given(NUMBERS, NUMBERS)
def test_replay_twice_publishes_the_same_message(message: int, attempt: int) -> None:
    """Before a worker has claimed it, replaying the letter again repeats the message only."""
    first = decide_replay(record_in("dead", message), max(message, attempt))
    assert isinstance(first, Replay)
    record = again(record_in("dead", message), message=first.message, token="op", now=9.0)
    second = decide_replay(record, max(message, attempt))
    assert second == Replay(first.message, write=False)


@pytest.mark.parametrize("state", ["done", "running"])
def test_run_that_is_done_or_running_is_not_replayed(state: State) -> None:
    """A letter of a run that went on without it is refused."""
    assert isinstance(decide_replay(record_in(state), 1), Refused)


@pytest.mark.parametrize("state", sorted(TERMINAL - {"done"}))
def test_older_letter_of_a_run_that_ended_again_is_refused(state: State) -> None:
    """Of two letters of one run the older one was replayed before."""
    assert isinstance(decide_replay(record_in(state, message=2), 1), Refused)
    assert isinstance(decide_replay(record_in(state, message=2), 2), Replay)


def test_forged_number_is_not_counted_up_from() -> None:
    """It counts as the one that the record expects: the letter can be replayed as any other."""
    assert decide_replay(None, LARGEST_LEAP + 1) == Replay(2, write=True)
    assert decide_replay(record_in("dead", message=7), 10**14) == Replay(8, write=True)
    assert decide_replay(None, 1) == Replay(2, write=True)


def test_replay_starts_with_fresh_counts_and_keeps_the_story() -> None:
    """Failures, crashes and the run's time start anew; its attempts stay on the record."""
    before = msgspec.structs.replace(record_in("dead"), crashes=2, created=1.0, error="boom")
    after = again(before, message=2, token="op", now=9.0)
    assert (after.state, after.failures, after.crashes, after.created) == ("failed", 0, 0, 9.0)
    assert after.token.startswith(MARK)
    assert after.attempts == before.attempts
