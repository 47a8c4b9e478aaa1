"""When the absence of a node counts as its death, and when it does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.model.liveness import PROFILES, Liveness
from holdfast.model.suspicion import HOLD_NODES, HOLD_SECONDS, Hold, Suspicion

LAN = PROFILES["lan"]
STEP = LAN.confirm_seconds / 3


def _round(case: Suspicion, now: float, *, nobody: bool, gone: bool | None) -> None:
    """One regular ping, and what came of it."""
    case.next_round(now)
    if nobody:
        case.nobody(now)
    else:
        case.doubt(now)
    if gone is not None:
        case.connection(now, open=not gone)


def test_killed_process_is_confirmed_by_its_server() -> None:
    """Nobody takes the pings and the connection is gone, for as long as is demanded: it is dead."""
    case = Suspicion()
    for look in range(4):
        assert not case.confirmed(look * STEP - 0.01, LAN)
        case.ping(look * STEP)
        case.nobody(look * STEP)
        case.connection(look * STEP, open=False)
    assert case.confirmed(3 * STEP, LAN)


def test_tap_hides_nothing_from_the_server() -> None:
    """No ping is refused while somebody listens to everything; the server's word is enough."""
    case = Suspicion()
    case.next_round(0.0)
    assert case.overdue(0.21, LAN)
    case.doubt(0.21)
    case.connection(0.22, open=False)
    assert not case.confirmed(0.22 + LAN.confirm_seconds, LAN), "one proof is not enough"
    case.connection(0.4, open=False)
    assert case.confirmed(0.22 + LAN.confirm_seconds, LAN)


def test_node_that_answers_slowly_gets_more_time() -> None:
    """Where answers take long, coming back does as well; it fades when they are quick again."""
    case = Suspicion()
    case.took(0.2)
    for look in range(30):
        case.nobody(look * STEP)
        case.connection(look * STEP, open=False)
        late = look * STEP >= LAN.confirm_seconds + 1.2
        assert case.confirmed(look * STEP, LAN) == late
    for _ in range(60):
        case.took(0.001)
    assert case.slowness < 0.01


def test_busy_process_is_left_to_its_timeout() -> None:
    """However many pings it does not answer, a node whose connection stands is not judged."""
    case = Suspicion()
    for number in range(100):
        now = number * LAN.ping_seconds
        _round(case, now, nobody=False, gone=False)
        assert not case.confirmed(now + 0.3, LAN)
        assert not case.missing(LAN, askable=True)


def test_silent_server_proves_nothing() -> None:
    """A server that was killed takes its word with it: its nodes are on their way to another."""
    case = Suspicion()
    for number in range(100):
        now = number * LAN.ping_seconds
        _round(case, now, nobody=True, gone=None)
        assert not case.confirmed(now + 0.3, LAN)
        assert not case.missing(LAN, askable=True)


def test_node_is_judged_by_pings_where_servers_cannot_be_asked() -> None:
    """An older login, a leaf node: more than `ping_misses` rounds without anybody, as ever."""
    case = Suspicion()
    for number in range(LAN.ping_misses):
        _round(case, number * LAN.ping_seconds, nobody=True, gone=None)
        case.nobody(number * LAN.ping_seconds)  # a second look in one round counts once
    assert not case.missing(LAN, askable=False)
    _round(case, 2.0, nobody=True, gone=None)
    assert case.missing(LAN, askable=False)


@given(st.lists(st.sampled_from(["nobody", "gone", "alive", "open"]), max_size=30))
def test_a_sign_of_life_starts_everything_over(story: list[str]) -> None:
    """Whatever was seen before: after an answer, or while the connection stands, nobody is lost."""
    case = Suspicion()
    now = 0.0
    for number, event in enumerate([*story, "alive"]):
        now = number * STEP
        case.next_round(now)
        if event == "nobody":
            case.nobody(now)
        elif event == "gone":
            case.connection(now, open=False)
        elif event == "open":
            case.connection(now, open=True)
        else:
            case.alive()
    assert not case.confirmed(now + 10, LAN)
    assert not case.missing(LAN, askable=False)


def test_only_a_node_that_kept_its_connection_has_outlived_a_suspect() -> None:
    """Nodes behind one proxy are dropped a moment apart, and come back one by one: neither an
    answer of before, nor one of a node that was dropped as well, makes the last one dead."""
    case, never, heard = Suspicion(), float("-inf"), 4.8
    assert not case.outlived_by(10.0, never, heard, LAN), "nobody is suspected"
    case.nobody(5.0)
    assert not case.outlived_by(4.9, never, heard, LAN)
    assert not case.outlived_by(5.01, never, heard, LAN)
    later = 5.0 + LAN.confirm_seconds
    assert case.outlived_by(later, never, heard, LAN)
    assert not case.outlived_by(later, 4.7, heard, LAN), "dropped just before"
    assert not case.outlived_by(later, 5.1, heard, LAN), "dropped just after"
    assert case.outlived_by(later, 2.0, heard, LAN), "dropped long before"
    case.forget()
    case.nobody(8.0)
    assert not case.outlived_by(later, never, heard, LAN), "an answer of before"
    assert not case.outlived_by(9.0, 5.1, heard, LAN), "dropped together, though forgotten since"


def test_answer_of_long_ago_confirms_nothing() -> None:
    """The server must have said so just now, not before the node may have come back."""
    case = Suspicion()
    case.nobody(0.0)
    case.connection(0.0, open=False)
    case.connection(0.1, open=False)
    assert case.confirmed(LAN.confirm_seconds, LAN)
    assert not case.confirmed(10.0, LAN)


def test_hold_keeps_everybody_while_many_are_missing() -> None:
    """A few deaths at once are deaths; more are a disturbance until most nodes are back."""
    hold = Hold()
    assert not any(hold.accused(f"n{n}", 10.0, 20, 0.8) for n in range(HOLD_NODES))
    assert not hold.accused("n0", 10.1, 20, 0.8), "the same node again is no other one"
    assert hold.open(10.1)
    assert hold.accused("another", 10.2, 20, 0.8)
    for tenth in range(103, 200):  # for ten seconds they are looked for, and missing
        for n in range(HOLD_NODES + 1):
            hold.accused(f"n{n}", tenth / 10, 20, 0.8)
        assert not hold.open(tenth / 10)
    assert hold.open(19.9 + HOLD_SECONDS)
    assert not hold.accused("n0", 30.0, 20, 0.8), "the others are back since long"


def test_hold_grows_with_the_fleet() -> None:
    """Of a thousand nodes fifty may be missing before it counts as a disturbance."""
    hold = Hold()
    assert not any(hold.accused(f"n{n}", 1.0, 1000, 0.8) for n in range(50))
    assert hold.accused("n50", 1.0, 1000, 0.8)


def test_hold_forgets_who_was_judged() -> None:
    """Deaths one after the other, each judged, are no disturbance however many they are."""
    hold = Hold()
    for n in range(100):
        assert not hold.accused(f"n{n}", 1.0, 20, 0.8)
        hold.cleared(f"n{n}")


def test_far_nodes_get_more_time() -> None:
    """What is confirmed on one network within a moment takes seconds between sites."""
    assert PROFILES["wan"].confirm_seconds > 10 * PROFILES["lan"].confirm_seconds
    assert not Suspicion().overdue(1.0, PROFILES["wan"])
    assert Liveness().confirm_seconds == LAN.confirm_seconds
