"""Alerts: the rules, what fires, and the notices to send. Pure: no clock, no I/O.

A rule is one line:

    lag > 1000 for 5m            a job has more than 1,000 runs waiting, for five minutes
    wait > 10m of billing/*      the oldest waiting run of a job of that group is older than that
    dead_letters > 0             a job has dead letters
    node_lost                    a node was declared lost
    schedule_missed              a slot is overdue, or was skipped because it was missed
    limit_saturated for 10m      runs wait for a place in a limit

The board is one record, changed only by compare-and-swap. The write that changes an alert also puts
the notice into the board's outbox, with the channels to send it to. So each notice is created once,
however many processes run. A delivery is claimed by the same kind of write before it is tried
(`holdfast.notices`).

    true ──(for)──► firing: "opened" ──(absent for `clear`)──► over: "closed"

If more than a few subjects of a rule change at the same time, one notice covers them all.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from holdfast import durations
from holdfast.errors import InvalidInput
from holdfast.model.codec import Codec, Count, Instant

KINDS: Final = {
    "lag": "runs",
    "wait": "time",
    "dead_letters": "count",
    "node_lost": "",
    "schedule_missed": "",
    "limit_saturated": "",
}
"""What can be watched, and the unit of its threshold: runs, a time, a count, or none."""
EVENTS: Final = frozenset({"node_lost"})
"""Kinds that are events and not states: no notice says that they are over."""
MOST_FIRING: Final = 500
"""Alerts on the board at a time: it has to fit one message."""
MOST_ALONE: Final = 5
"""Separate notices of one rule in one round; more subjects share one notice."""
MOST_NAMED: Final = 10
"""Subjects named in a notice about many, which must stay readable."""
MOST_TOLD: Final = 100
"""Notices that are remembered for the page; the board has to fit one message."""
MOST_OUTBOX: Final = 200
"""Notices that wait for a channel that fails; the oldest are given up first."""
TRIES: Final = 15
"""Attempts to deliver one notice to one channel, over about an hour."""
FIRST_PAUSE: Final = 5.0
LONGEST_PAUSE: Final = 300.0

_RULE: Final = re.compile(
    r"^(?P<kind>\w+)(?:\s*>\s*(?P<above>\S+))?(?P<rest>(?:\s+(?:for|of)\s+\S+)*)$"
)


# ---- rules


class Rule(msgspec.Struct, frozen=True):
    """When to alert."""

    text: str
    kind: str
    above: float = 0.0
    """The threshold; seconds if the kind is a time."""
    seconds: float = 0.0
    """How long it must be true."""
    of: str = "*"
    """Which jobs (`group/job`), nodes, schedules or limits."""

    def covers(self, subject: str) -> bool:
        return self.of == "*" or fnmatchcase(subject, self.of)


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Rules, one to a line or separated by semicolons; `InvalidInput` says what is wrong."""
    lines = [" ".join(line.split()) for line in text.replace(";", "\n").splitlines()]
    return tuple(_rule(line) for line in dict.fromkeys(lines) if line and line[0] != "#")


def _rule(line: str) -> Rule:
    found = _RULE.match(line)
    kind = found["kind"] if found else line.split()[0]
    if found is None or kind not in KINDS:
        known = ", ".join(KINDS)
        raise InvalidInput(
            f"{line!r} is not a rule: write KIND > NUMBER for TIME of PATTERN, as in "
            f"'lag > 1000 for 5m'; kinds are {known}"
        )
    above = _threshold(line, kind, found["above"])
    words = found["rest"].split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    seconds = durations.seconds(options["for"], f"'for' in {line!r}") if "for" in options else 0.0
    return Rule(line, kind, above, seconds, options.get("of", "*"))


def _threshold(line: str, kind: str, given: str | None) -> float:
    unit = KINDS[kind]
    if not unit:
        if given is not None:
            raise InvalidInput(f"{line!r}: {kind} has no threshold; write 'for TIME' instead")
        return 0.0
    if given is None:
        raise InvalidInput(f"{line!r}: say from when on, as in '{kind} > {_SAMPLE[unit]}'")
    if unit == "time":
        return durations.seconds(given, f"the threshold in {line!r}")
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        raise InvalidInput(f"{line!r}: the threshold must be a whole number, not {given!r}")
    return float(given)


_SAMPLE: Final = {"runs": "1000", "count": "0", "time": "10m"}


# ---- records


class Reading(msgspec.Struct, frozen=True):
    """A subject for which a rule is true now."""

    rule: str
    subject: str
    text: str
    """The whole sentence."""
    path: str = ""
    """Its page."""


class Alert(msgspec.Struct, omit_defaults=True):
    """A rule that is true for a subject."""

    rule: str
    subject: str
    text: str
    path: str = ""
    since: Instant = 0.0
    """Since when it is true."""
    fired: Instant = 0.0
    """When it fired; 0 while it has not been true for long enough."""
    gone: Instant = 0.0
    """When it stopped being true; 0 while it is true."""


class Delivery(msgspec.Struct, omit_defaults=True):
    """A notice on its way to one channel."""

    tries: Count = 0
    next: Instant = 0.0
    """When to try (again)."""
    error: str = ""


class Notice(msgspec.Struct, omit_defaults=True):
    """Something to tell."""

    id: str
    told: str
    """`opened` or `closed`."""
    rule: str
    text: str
    at: Instant
    since: Instant = 0.0
    path: str = ""
    subjects: tuple[str, ...] = ()
    left: dict[str, Delivery] = {}
    """The channels that have not got it yet."""
    failed: dict[str, str] = {}
    """The channels that could not be reached, and why."""


class Board(msgspec.Struct, omit_defaults=True):
    """Everything about the alerts of a namespace."""

    by: str = ""
    """The node that evaluates the rules."""
    at: Instant = 0.0
    every: float = 0.0
    """How often it does so, in seconds."""
    rules: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    unread: dict[str, str] = {}
    """Kinds that could not be read in the last round, and why."""
    alerts: dict[str, Alert] = {}
    outbox: tuple[Notice, ...] = ()
    told: tuple[Notice, ...] = ()
    """The newest first."""

    @property
    def firing(self) -> list[Alert]:
        """Alerts that fire, the newest first."""
        return sorted((a for a in self.alerts.values() if a.fired), key=lambda a: -a.fired)

    @property
    def pending(self) -> list[Alert]:
        """Alerts that are true, but not for long enough yet."""
        return [alert for alert in self.alerts.values() if not alert.fired]


BOARD: Final = Codec[Board](Board, "the board of alerts")


# ---- judging


def judge(
    board: Board,
    rules: Sequence[Rule],
    readings: Iterable[Reading],
    now: float,
    *,
    channels: Sequence[str] = (),
    clear: float = 0.0,
    unread: dict[str, str] | None = None,
) -> None:
    """Update the alerts by what is true now; notices go into the outbox.

    Alerts of kinds in `unread` stay as they are; those of rules that are gone are dropped.
    """
    by_text = {rule.text: rule for rule in rules}
    board.unread = unread or {}
    true = {(r.rule, r.subject): r for r in readings if r.rule in by_text}
    for key in [k for k, alert in board.alerts.items() if alert.rule not in by_text]:
        del board.alerts[key]
    opened, closed = list[Alert](), list[Alert]()
    for (rule, subject), reading in sorted(true.items(), key=lambda item: item[0]):
        key = f"{rule} {subject}"
        if key not in board.alerts and len(board.alerts) >= MOST_FIRING:
            continue
        alert = board.alerts.setdefault(key, Alert(rule, subject, "", since=now))
        alert.text, alert.path, alert.gone = reading.text, reading.path, 0.0
        if not alert.fired and now - alert.since >= by_text[rule].seconds:
            alert.fired = now
            opened.append(alert)
    for key, alert in list(board.alerts.items()):
        kind = by_text[alert.rule].kind
        if (alert.rule, alert.subject) in true or kind in board.unread:
            continue
        alert.gone = alert.gone or now
        if not alert.fired or now - alert.gone >= clear:
            del board.alerts[key]
            closed += [alert] if alert.fired and kind not in EVENTS else []
    _put(board, [*_notices(opened, "opened", now), *_notices(closed, "closed", now)], channels)


def _notices(alerts: Sequence[Alert], told: str, now: float) -> list[Notice]:
    by_rule: dict[str, list[Alert]] = {}
    for alert in alerts:
        by_rule.setdefault(alert.rule, []).append(alert)
    found = []
    for rule, group in by_rule.items():
        parts = [group] if len(group) > MOST_ALONE else [[one] for one in group]
        found += [_notice(rule, part, told, now) for part in parts]
    return found


def _notice(rule: str, alerts: Sequence[Alert], told: str, now: float) -> Notice:
    subjects = tuple(alert.subject for alert in alerts)
    since = min(alert.since for alert in alerts)
    mark = hashlib.sha256("\n".join((rule, *subjects)).encode()).hexdigest()[:16]
    first = alerts[0]
    text = first.text
    if len(alerts) > 1:
        more = f" and {len(alerts) - MOST_NAMED} more" if len(alerts) > MOST_NAMED else ""
        text = f"{rule}: {len(alerts)} at once: {', '.join(subjects[:MOST_NAMED])}{more}"
    if told == "closed":
        text = f"over after {durations.text(round(max(0.0, now - since)))}: {text}"
    path = first.path if len(alerts) == 1 else "/alerts"
    named = subjects[:MOST_NAMED]
    return Notice(f"{mark}.{round(since * 1000)}.{told}", told, rule, text, now, since, path, named)


def _put(board: Board, notices: Sequence[Notice], channels: Sequence[str]) -> None:
    for notice in notices:
        notice.left = {channel: Delivery() for channel in channels}
    waiting = (*board.outbox, *(notice for notice in notices if notice.left))
    given_up, board.outbox = waiting[:-MOST_OUTBOX], waiting[-MOST_OUTBOX:]
    untold = [notice for notice in notices if not notice.left]
    for notice in given_up:
        notice.failed |= dict.fromkeys(notice.left, "dropped: too many other notices waited")
        notice.left = {}
    _remember(board, [*given_up, *untold])


def _remember(board: Board, over: Sequence[Notice]) -> None:
    board.told = (*sorted(over, key=lambda notice: -notice.at), *board.told)[:MOST_TOLD]


# ---- telling


def claim(board: Board, now: float) -> list[tuple[Notice, str]]:
    """Claim the deliveries that are due: whoever stores the board may try each of them once."""
    due = []
    for notice in board.outbox:
        for channel, delivery in notice.left.items():
            if delivery.next <= now:
                delivery.tries += 1
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (delivery.tries - 1))
                delivery.next = now + pause
                due.append((notice, channel))
    return due


def record(board: Board, outcomes: Sequence[tuple[str, str, str]]) -> None:
    """Record the outcome of deliveries: notice id, channel, and the error or nothing."""
    by_id = {notice.id: notice for notice in board.outbox}
    for id_, channel, error in outcomes:
        notice = by_id.get(id_)
        if notice is None or channel not in notice.left:
            continue
        delivery = notice.left[channel]
        delivery.error = error
        if not error:
            del notice.left[channel]
        elif delivery.tries >= TRIES:
            del notice.left[channel]
            notice.failed[channel] = error
    over = [notice for notice in board.outbox if not notice.left]
    board.outbox = tuple(notice for notice in board.outbox if notice.left)
    _remember(board, over)


def drop_channels(board: Board, channels: Sequence[str]) -> None:
    """Give up notices for channels that are no longer configured."""
    for notice in board.outbox:
        for channel in [c for c in notice.left if c not in channels]:
            del notice.left[channel]
            notice.failed[channel] = "no longer configured"
    record(board, ())
