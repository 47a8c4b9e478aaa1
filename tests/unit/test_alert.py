"""Rules of alerts, and what they decide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidInput
from holdfast.model import alert
from holdfast.model.alert import BOARD, Board, Reading, claim, judge, parse_rules, record

LAG = "lag > 10 for 1m"
[RULE] = parse_rules(LAG)


def lagging(subject: str = "default/work", rule: str = LAG) -> Reading:
    return Reading(rule, subject, f"{subject} has 11 runs waiting", f"/jobs/{subject}")


def told(board: Board) -> list[tuple[str, str]]:
    return [(n.told, n.text) for n in board.outbox]


def round_(board: Board, now: float, *readings: Reading, clear: float = 30.0) -> None:
    judge(board, [RULE], readings, now, channels=["ops"], clear=clear)


# ---- rules


def test_rules_are_read_with_thresholds_times_and_patterns() -> None:
    """One to a line or separated by semicolons; comments and repeats do not count."""
    found = parse_rules("lag>1000 for 5m ; wait > 10m of billing/*\n# a note\nnode_lost\nnode_lost")
    assert [(r.kind, r.above, r.seconds, r.of) for r in found] == [
        ("lag", 1000.0, 300.0, "*"),
        ("wait", 600.0, 0.0, "billing/*"),
        ("node_lost", 0.0, 0.0, "*"),
    ]
    assert found[1].covers("billing/charge")
    assert not found[1].covers("default/charge")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lags > 3", "kinds are lag"),
        ("lag", "say from when on"),
        ("lag > many", "whole number"),
        ("wait > 10 parsecs", "is not a rule"),
        ("wait > soon", "threshold"),
        ("node_lost > 3", "no threshold"),
        ("lag > 3 for ever", "for"),
        ("lag < 3", "is not a rule"),
    ],
)
def test_rule_that_cannot_be_read_says_what_to_write(text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        parse_rules(text)


# ---- judging


def test_alert_fires_after_its_time_and_is_told_once() -> None:
    """However often it is judged."""
    board = Board()
    round_(board, 1000.0, lagging())
    assert told(board) == []
    assert [a.subject for a in board.pending] == ["default/work"]
    for now in (1060.0, 1070.0, 1080.0):
        round_(board, now, lagging())
    assert told(board) == [("opened", "default/work has 11 runs waiting")]


def test_alert_that_comes_and_goes_is_told_once() -> None:
    """It is over only after it was false for as long as configured."""
    board = Board()
    round_(board, 1000.0, lagging())
    round_(board, 1060.0, lagging())
    round_(board, 1070.0)
    round_(board, 1090.0, lagging())
    round_(board, 1100.0)
    assert len(board.outbox) == 1
    round_(board, 1130.0)
    assert [n.told for n in board.outbox] == ["opened", "closed"]
    assert board.outbox[1].text.startswith("over after 2m10s: ")
    assert not board.alerts


def test_what_was_never_told_ends_without_a_word() -> None:
    board = Board()
    round_(board, 1000.0, lagging())
    round_(board, 1010.0)
    assert not board.alerts
    assert not board.outbox


def test_alert_stays_while_its_kind_cannot_be_read() -> None:
    """Not knowing is not being over."""
    board = Board()
    round_(board, 1000.0, lagging())
    round_(board, 1060.0, lagging())
    judge(board, [RULE], (), 2000.0, clear=0.0, unread={"lag": "no answer"})
    assert [a.subject for a in board.firing] == ["default/work"]
    assert board.unread == {"lag": "no answer"}


def test_rule_that_is_gone_takes_its_alerts_along() -> None:
    board = Board()
    round_(board, 1000.0, lagging())
    round_(board, 1060.0, lagging())
    judge(board, parse_rules("node_lost"), (), 1070.0, channels=["ops"])
    assert not board.alerts
    assert [n.told for n in board.outbox] == ["opened"]


def test_many_at_once_are_told_together() -> None:
    """A rack that loses power is one notice, not a thousand."""
    [rule] = parse_rules("node_lost")
    board = Board()
    lost = [Reading("node_lost", f"w{n:03}", f"w{n:03} was lost") for n in range(300)]
    judge(board, [rule], lost, 1000.0, channels=["ops"])
    [notice] = board.outbox
    assert "300 at once" in notice.text
    assert "290 more" in notice.text
    judge(board, [rule], (), 2000.0, channels=["ops"])
    assert board.outbox == (notice,), "that a node is lost does not end"


def test_board_is_bounded_and_can_be_read_back() -> None:
    """Whatever fires, and however long a channel fails: the board fits one message."""
    [rule] = parse_rules("lag > 1")
    board = Board()
    for hour in range(400):
        now = 1000.0 + 3600 * hour
        some = [Reading(rule.text, f"g/{hour}-{n}", "x" * 200) for n in range(4)]
        judge(board, [rule], some, now, channels=["ops"])
    assert len(board.outbox) <= alert.MOST_OUTBOX
    assert len(board.told) <= alert.MOST_TOLD
    assert all("other notices" in n.failed["ops"] for n in board.told)
    many = [Reading(rule.text, f"h/{n}", "x" * 200) for n in range(5_000)]
    judge(board, [rule], many, 9e6, channels=["ops"])
    assert len(board.alerts) <= alert.MOST_FIRING
    body = BOARD.encode(board)
    assert len(body) < 800_000
    assert BOARD.decode(body) == board


# ---- telling


def test_delivery_is_claimed_once_and_then_waits() -> None:
    """A second look at the same board finds nothing to do until the pause is over."""
    board = Board()
    round_(board, 1000.0, lagging())
    round_(board, 1060.0, lagging())
    [(notice, channel)] = claim(board, 1060.0)
    assert claim(board, 1060.0) == []
    record(board, [(notice.id, channel, "HTTP 500")])
    assert claim(board, 1060.0 + alert.FIRST_PAUSE - 1) == []
    assert claim(board, 1060.0 + alert.FIRST_PAUSE) == [(notice, channel)]
    record(board, [(notice.id, channel, "")])
    assert not board.outbox
    assert [n.id for n in board.told] == [notice.id]
    assert board.told[0].failed == {}


def test_channel_that_never_answers_is_given_up() -> None:
    """And the page says why."""
    board, now = Board(), 1060.0
    round_(board, 1000.0, lagging())
    round_(board, now, lagging())
    for _ in range(alert.TRIES):
        [(notice, channel)] = claim(board, now)
        record(board, [(notice.id, channel, "HTTP 500")])
        now += alert.LONGEST_PAUSE
    assert claim(board, now) == []
    assert board.told[0].failed == {"ops": "HTTP 500"}


def test_channel_that_is_no_longer_configured_is_not_told() -> None:
    board = Board()
    round_(board, 1000.0, lagging())
    round_(board, 1060.0, lagging())
    alert.drop_channels(board, ["others"])
    assert claim(board, 1060.0) == []
    assert board.told[0].failed == {"ops": "no longer configured"}


@given(st.lists(st.sets(st.sampled_from("abc")), max_size=30))
def test_opened_and_closed_alternate(rounds: list[set[str]]) -> None:
    """Over any history, each subject is opened, then closed, and so on, each under its own id."""
    [rule] = parse_rules("lag > 1")
    board = Board()
    for n, true in enumerate(rounds):
        some = [Reading(rule.text, subject, subject) for subject in true]
        judge(board, [rule], some, 1000.0 + n, channels=["ops"])
    notices = board.outbox
    assert len({n.id for n in notices}) == len(notices)
    for subject in "abc":
        states = [n.told for n in notices if n.subjects == (subject,)]
        assert states == ["opened", "closed"] * (len(states) // 2) + ["opened"] * (len(states) % 2)
