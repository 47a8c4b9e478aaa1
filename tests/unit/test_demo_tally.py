"""The demo's tally: every accepted run is open until its record says how it ended."""

from __future__ import annotations

from holdfast.cli.demo_tally import Tally
from holdfast.model.run import RunRecord


def tally(said: list[str] | None = None) -> Tally:
    return Tally(["charge"], (said if said is not None else []).append)


def record(state: str, **facts: object) -> RunRecord:
    return RunRecord(state, "default", "charge", **facts)  # type: ignore[arg-type]


def test_tally_follows_a_run_to_its_end() -> None:
    """Accepted, running, failed and retried, taken over, done."""
    found = tally()
    found.accept("r1", "charge", 0.0)
    found.change("r1", record("running", node="w-1-a"), 0.1)
    assert (found.under_way, found.held_by("-1-")) == (1, ["r1"])
    found.change("r1", record("failed", failures=1, error="E"), 0.2)
    found.change("r1", record("running", failures=1, node="w-2-b"), 0.3)
    assert found.change("r1", record("done", failures=1, crashes=1), 0.5)
    assert (found.counts["done"], found.counts["retries"]) == (1, 1)
    assert (found.accepted, found.ended, found.under_way) == (1, 1, 0)


def test_tally_counts_a_run_once_however_it_hears_of_it() -> None:
    """The record may come before the answer, and more than once."""
    found = tally()
    found.change("r1", record("running"), 0.0)
    found.change("r1", record("done"), 0.1)
    found.change("r1", record("done"), 0.2)
    found.accept("r1", "charge", 0.3)
    found.change("r2", record("running"), 0.4)
    found.accept("r2", "charge", 0.5)
    found.accept("r2", "charge", 0.6)
    assert (found.accepted, found.ended, found.counts["done"]) == (2, 1, 1)


def test_tally_says_which_runs_are_overdue() -> None:
    """Only accepted ones, counted from when they were due."""
    found = tally()
    found.accept("soon", "charge", 0.0)
    found.accept("later", "charge", 60.0)
    found.change("unasked", record("running"), 0.0)
    assert [run for run, _ in found.overdue(20.0, 10.0)] == ["soon"]


def test_run_is_lost_only_when_it_is_missing_twice_in_a_row() -> None:
    """A message may move from waiting to the queue between two questions."""
    found = tally()
    found.accept("moved", "charge", 0.0)
    found.missing("moved")
    found.change("moved", record("running"), 1.0)
    found.missing("moved")
    assert found.lost == 0
    found.missing("moved")
    assert (found.lost, found.open) == (1, {})


def test_tally_reports_a_dead_letter() -> None:
    """Given up is ended too, and worth a line."""
    said: list[str] = []
    found = tally(said)
    found.accept("r1", "charge", 0.0)
    found.change("r1", record("dead", error="ValueError: page 13"), 1.0)
    assert (found.counts["dead"], found.under_way) == (1, 0)
    assert said == ["r1 is a dead letter: ValueError: page 13"]
