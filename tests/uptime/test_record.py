"""States, incidents and what is told: pure, so any order of results can be tried."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from uptime.probes import Outcome, Verdict
from uptime.record import POINTS, Incident, Notice, Rules, State, apply, reset, sent

RULES = Rules("shop", "Shop", failures=2, recoveries=1)
START = 1_800_000_000
VERDICTS: st.SearchStrategy[Verdict] = st.sampled_from(["ok", "degraded", "failed"])
LETTERS: dict[str, Verdict] = {"o": "ok", "d": "degraded", "f": "failed"}


def outcome(verdict: Verdict, ms: int = 20) -> Outcome:
    return Outcome(verdict, ms, f"it was {verdict}")


def story(letters: str, rules: Rules = RULES) -> tuple[State, list[str]]:
    """The state after some results, and its status after each."""
    state = State()
    seen: list[str] = []
    for number, letter in enumerate(letters):
        state = apply(state, START + 60 * number, outcome(LETTERS[letter]), rules)
        seen.append(state.status)
    return state, seen


def told(state: State) -> list[str]:
    return [f"{n.told} {n.incident.status}{' quietly' if n.quiet else ''}" for n in state.outbox]


def test_state_goes_down_after_failures_in_a_row() -> None:
    """One failure changes nothing, two in a row do; one good result is a recovery."""
    state, seen = story("ofoffo")
    assert seen == ["up", "up", "up", "up", "down", "up"]
    assert told(state) == ["opened down", "closed down"]
    opened, closed = state.outbox
    assert opened.incident.id == closed.incident.id == f"shop.{START + 240}-down"
    assert opened.incident.started == START + 180, "the first failure of the row"
    assert (opened.incident.ended, closed.incident.ended) == (0, START + 300)
    assert opened.incident.reason == "it was failed"


def test_state_degraded_is_between() -> None:
    """Slow in a row is degraded; getting worse is told as down, getting better as recovered."""
    state, seen = story("oddffdo")
    assert seen == ["up", "up", "degraded", "degraded", "down", "degraded", "up"]
    assert told(state) == [
        "opened degraded",
        "closed degraded quietly",
        "opened down",
        "closed down",
        "opened degraded",
        "closed degraded",
    ]
    assert len({n.id for n in state.outbox}) == 6


def test_state_of_a_new_check() -> None:
    """Before anything is known it is unknown, also after one failure."""
    assert story("ff")[1] == ["unknown", "down"]
    assert story("fo")[1] == ["unknown", "up"]
    assert story("f", RULES._replace(failures=1))[1] == ["down"]


def test_state_recovers_after_as_many_as_it_wants() -> None:
    """With three recoveries a single good result in between is no recovery."""
    rules = RULES._replace(recoveries=3)
    state, seen = story("offofoooo", rules)
    assert seen == ["up", "up", "down", "down", "down", "down", "down", "up", "up"]
    assert told(state) == ["opened down", "closed down"]


def test_reset_ends_an_incident_quietly() -> None:
    """Who pauses a check needs no mail about it."""
    state = reset(story("ff")[0], START + 500)
    assert (state.status, state.incident) == ("unknown", None)
    assert told(state) == ["opened down", "closed down quietly"]
    assert reset(State(), START).status == "unknown"


def test_reset_ignores_a_look_that_was_under_way() -> None:
    """A check that was paused while somebody looked is not called down by that look."""
    state = reset(story("of")[0], START + 200)
    late = apply(state, START + 180, outcome("failed"), RULES)
    assert late == state
    assert apply(state, START + 260, outcome("ok"), RULES).status == "up"


def test_sent_takes_out_what_was_told_and_no_more() -> None:
    """What came into the outbox meanwhile stays."""
    before = story("ff")[0]
    after = story("ffo")[0]
    assert told(sent(after, before.outbox)) == ["closed down"]


@given(st.lists(VERDICTS, max_size=60), st.randoms(use_true_random=False))
def test_state_repeats_change_nothing(verdicts: list[Verdict], dice: object) -> None:
    """A result that comes again, any number of times, is counted and told once."""
    once = twice = State()
    for number, verdict in enumerate(verdicts):
        once = apply(once, START + number, outcome(verdict), RULES)
        twice = apply(twice, START + number, outcome(verdict), RULES)
        again = dice.randint(0, number)  # type: ignore[attr-defined]
        twice = apply(twice, START + again, outcome(verdicts[again]), RULES)
    assert once == twice


@given(st.lists(VERDICTS, min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_state_counts_late_results(verdicts: list[Verdict], dice: object) -> None:
    """In any order, days and spans count every slot once, and points stand in order."""
    order = list(enumerate(verdicts))
    dice.shuffle(order)  # type: ignore[attr-defined]
    state = State()
    for number, verdict in order:
        state = apply(state, START + number, outcome(verdict), RULES)
    assert [p.verdict for p in state.points] == verdicts
    assert sum(day.total for day in state.days) == len(verdicts)
    assert sum(day.failed for day in state.days) == verdicts.count("failed")
    assert sum(s.answers for s in state.spans) == len(verdicts) - verdicts.count("failed")
    assert state.detail == f"it was {verdicts[-1]}"


@given(st.lists(VERDICTS, max_size=80), st.integers(1, 4), st.integers(1, 3))
def test_state_tells_each_incident_once(
    verdicts: list[Verdict], failures: int, recoveries: int
) -> None:
    """Each incident opens once and closes at most once, in order; the last is open or none is."""
    state = State()
    rules = RULES._replace(failures=failures, recoveries=recoveries)
    for number, verdict in enumerate(verdicts):
        state = apply(state, START + number, outcome(verdict), rules)
    open_now: str = ""
    for notice in state.outbox:
        if notice.told == "opened":
            assert not open_now
            open_now = notice.incident.id
        else:
            assert notice.incident.id == open_now
            open_now = ""
    assert open_now == (state.incident.id if state.incident else "")
    assert len({n.id for n in state.outbox}) == len(state.outbox)
    assert (state.incident is not None) == (state.status in ("degraded", "down"))


def test_state_is_bounded() -> None:
    """Points, spans and days are kept up to their number, whatever comes; the oldest go."""
    state = State()
    for number in range(400):
        state = apply(state, START + number * 86_400, outcome("ok"), RULES)
    assert (len(state.points), len(state.days), len(state.spans)) == (POINTS, 90, 144)
    assert state.points[-1].at == START + 399 * 86_400
    assert apply(state, START, outcome("failed"), RULES) == state, "too old to be told apart"


def test_notice_ids_differ_by_what_is_told() -> None:
    """Opening and closing are two notices of one incident."""
    incident = Incident("shop.1-down", "shop", "Shop", "down", 1)
    ended = replace(incident, ended=2)
    assert Notice(incident, "opened").id == "shop.1-down.opened"
    assert Notice(ended, "closed").id == "shop.1-down.closed"
