"""The demo's tally: every accepted run is open until its record says how it ended."""

from __future__ import annotations

from holdfast.cli.demo_board import Board, Tally
from holdfast.model.run import RunRecord


def board() -> Board:
    return Board({"charge": Tally()})


def record(state: str, **facts: object) -> RunRecord:
    return RunRecord(state, "default", "charge", **facts)  # type: ignore[arg-type]


def test_board_follows_a_run_to_its_end() -> None:
    """Accepted, running, failed and tried again, taken over, done."""
    found = board()
    found.accept("r1", "charge", 0.0)
    found.change("r1", record("running", node="w-1-a"), 0.1)
    assert (found.under_way, found.held_by("-1-")) == (1, ["r1"])
    found.change("r1", record("failed", failures=1, error="E"), 0.2)
    found.change("r1", record("running", failures=1, node="w-2-b"), 0.3)
    found.change("r1", record("running", failures=1, crashes=1, node="w-3-c"), 0.4)
    assert found.change("r1", record("done", failures=1, crashes=1), 0.5)
    assert found.jobs["charge"] == Tally(done=1, retries=1, crashes=1)
    assert (found.accepted, found.ended, found.under_way) == (1, 1, 0)


def test_board_counts_a_run_once_however_it_hears_of_it() -> None:
    """The record may come before the answer, and more than once."""
    found = board()
    found.change("r1", record("running"), 0.0)
    found.change("r1", record("done"), 0.1)
    found.change("r1", record("done"), 0.2)
    found.accept("r1", "charge", 0.3)
    found.change("r2", record("running"), 0.4)
    found.accept("r2", "charge", 0.5)
    found.accept("r2", "charge", 0.6)
    assert (found.accepted, found.ended, found.jobs["charge"].done) == (2, 1, 1)


def test_board_says_which_runs_are_overdue() -> None:
    """Only accepted ones, and a delay is granted."""
    found = board()
    found.accept("soon", "charge", 0.0)
    found.accept("later", "charge", 0.0, delay=60.0)
    found.change("unasked", record("running"), 0.0)
    assert [run for run, _ in found.overdue(20.0, 10.0)] == ["soon"]


def test_board_tells_of_a_dead_letter() -> None:
    """Given up is ended too, and worth a line."""
    found = board()
    found.accept("r1", "charge", 0.0)
    found.change("r1", record("dead", error="ValueError: page 13"), 1.0)
    assert (found.jobs["charge"].dead, found.under_way) == (1, 0)
    assert found.news == ["r1 is a dead letter: ValueError: page 13"]
