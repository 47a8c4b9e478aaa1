"""The state of a check, and how a new result changes it. Pure: no clock, no I/O.

The state is one record per check, changed only by compare-and-swap. A point carries the instant of
its slot, and the state remembers the newest points: a result that arrives twice (a repeated
attempt) changes nothing, and a late one finds its place. So days and spans count each slot once.

Notices are written to the state's `outbox` in the same write that decides them, and removed after
they are sent; `holdfast.notices` says what that guarantees.

    up ──► degraded                `failures` results in a row not good, not all of them failed
    up, degraded ──► down          `failures` failed results in a row
    down ──► degraded              an answer that is not good, but an answer
    down, degraded ──► up          `recoveries` good results in a row

Each period in `degraded` or `down` is an incident with its own id, opened by one slot.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from holdfast.notices import unsent
from uptime.probes import Outcome, Verdict

Status = Literal["unknown", "up", "degraded", "down"]
Told = Literal["opened", "closed"]

POINTS = 120  # bounds the record; later repeats of older results are ignored
SPANS = 144  # a day
SPAN_SECONDS = 600
DAYS = 90
DAY_SECONDS = 86_400
_RANK = {"unknown": 0, "up": 0, "degraded": 1, "down": 2}


class Point(NamedTuple):
    """One result: the instant of its slot, how long it took, how good it was."""

    at: int
    ms: int
    verdict: Verdict


class Span(NamedTuple):
    """Ten minutes of results that had an answer."""

    at: int
    answers: int
    ms: int
    """Their sum."""
    worst: int


class Day(NamedTuple):
    """A day's results, counted."""

    day: int
    """Days since 1970."""
    ok: int = 0
    degraded: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        return self.ok + self.degraded + self.failed


@dataclass(frozen=True, slots=True)
class Incident:
    """A period in which a check was not up."""

    id: str
    check: str
    name: str
    status: Status
    started: int
    """The first bad result in the row."""
    ended: int = 0
    """0 while it lasts."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """What to send: an incident opened or closed."""

    incident: Incident
    told: Told
    quiet: bool = False
    """Recorded but not sent: replaced by a worse one, or paused by a user."""

    @property
    def id(self) -> str:
        return f"{self.incident.id}.{self.told}"


@dataclass(frozen=True, slots=True)
class State:
    """Everything known about one check."""

    status: Status = "unknown"
    since: int = 0
    points: tuple[Point, ...] = ()
    spans: tuple[Span, ...] = ()
    days: tuple[Day, ...] = ()
    detail: str = ""
    expires: int = 0
    incident: Incident | None = None
    outbox: tuple[Notice, ...] = ()


class Rules(NamedTuple):
    """The part of a check that decides its state."""

    check: str
    name: str
    failures: int
    recoveries: int


@dataclass(frozen=True, slots=True)
class Result:
    """One result in full, kept for a limited time."""

    at: int
    verdict: Verdict
    ms: int
    detail: str = ""
    code: int = 0
    node: str = ""
    attempt: int = 1


def apply(state: State, at: int, outcome: Outcome, rules: Rules) -> State:
    """The state after one more result."""
    if _is_known(state, at):
        return state
    points = _with_point(state.points, Point(at, outcome.ms, outcome.verdict))
    newest = points[-1].at == at
    grown = replace(
        state,
        points=points,
        spans=_with_span(state.spans, at, outcome),
        days=_with_day(state.days, at, outcome.verdict),
        detail=outcome.detail if newest else state.detail,
        expires=outcome.expires if newest else state.expires,
    )
    status = _status(grown, rules)
    return grown if status == state.status else _moved(grown, status, points[-1].at, rules)


def reset(state: State, at: int) -> State:
    """The state of a check that is paused or removed: its incident ends quietly."""
    if state.incident is None:
        return replace(state, status="unknown", since=at)
    ended = Notice(replace(state.incident, ended=at), "closed", quiet=True)
    outbox = (*state.outbox, ended)
    return replace(state, status="unknown", since=at, incident=None, outbox=outbox)


def sent(state: State, done: tuple[Notice, ...]) -> State:
    """The state without the notices that were sent."""
    return replace(state, outbox=unsent(state.outbox, done))


def _is_known(state: State, at: int) -> bool:
    """Whether a result was counted before, is too old to tell, or predates a pause."""
    full = len(state.points) >= POINTS
    old = (full and at < state.points[0].at) or (state.status == "unknown" and at <= state.since)
    return old or any(p.at == at for p in state.points)


def _with_point(points: tuple[Point, ...], point: Point) -> tuple[Point, ...]:
    found = list(points)
    insort(found, point)
    return tuple(found[-POINTS:])


def _with_span(spans: tuple[Span, ...], at: int, outcome: Outcome) -> tuple[Span, ...]:
    if outcome.verdict == "failed":
        return spans
    start = at - at % SPAN_SECONDS
    found = {span.at: span for span in spans}
    old = found.get(start, Span(start, 0, 0, 0))
    found[start] = Span(start, old.answers + 1, old.ms + outcome.ms, max(old.worst, outcome.ms))
    return tuple(found[key] for key in sorted(found)[-SPANS:])


def _with_day(days: tuple[Day, ...], at: int, verdict: Verdict) -> tuple[Day, ...]:
    number = at // DAY_SECONDS
    found = {day.day: day for day in days}
    old = found.get(number, Day(number))
    found[number] = old._replace(**{verdict: getattr(old, verdict) + 1})
    return tuple(found[key] for key in sorted(found)[-DAYS:])


def _status(state: State, rules: Rules) -> Status:
    """The status according to the newest results."""
    verdicts = [p.verdict for p in state.points]
    bad, good = verdicts[-rules.failures :], verdicts[-rules.recoveries :]
    if len(bad) == rules.failures and "ok" not in bad:
        return "down" if set(bad) == {"failed"} else "degraded"
    if set(good) == {"ok"} and (len(good) == rules.recoveries or state.status == "unknown"):
        return "up"
    return "degraded" if state.status == "down" and verdicts[-1] == "degraded" else state.status


def _moved(state: State, status: Status, at: int, rules: Rules) -> State:
    """Change the status: an incident ends, another may begin."""
    outbox, incident = list(state.outbox), None
    if state.incident is not None:
        worse = _RANK[status] > _RANK[state.status]
        outbox.append(Notice(replace(state.incident, ended=at), "closed", quiet=worse))
    if status in ("degraded", "down"):
        incident = Incident(
            f"{rules.check}.{at}-{status}",
            rules.check,
            rules.name,
            status,
            _row_began(state.points, at),
            reason=state.detail,
        )
        outbox.append(Notice(incident, "opened"))
    return replace(state, status=status, since=at, incident=incident, outbox=tuple(outbox))


def _row_began(points: tuple[Point, ...], at: int) -> int:
    """The first of the bad results that led here."""
    for point in reversed(points):
        if point.verdict == "ok":
            break
        at = point.at
    return at
