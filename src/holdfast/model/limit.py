"""Limits over all workers: how many runs at the same time, how many starts per second.

A limit has one *gate* for each key, a record that is changed by compare-and-swap. It names the runs
that hold a place, and how far its *line* was served. The line consists of the stored messages of
the runs that wait, in the order of their sequences. Runs wait exactly while `tail > head`.

    take     a delivered message asks for a place: there is one, or its run must wait
    park     its message is stored in the line, and the gate counts it
    grant    the next in the line gets a place; its message is sent again to its job's queue
    leave    the run has ended, or waits for its next attempt: its place is free

Each function here is one step on the value of a gate; `holdfast.ownership.gates` writes them. A
place belongs to a run and carries the number of the message that holds it. `leave` with an older
message's number does nothing, so a late redelivery cannot free the place of a newer message. Only a
claim lets a handler start, and a claimed run always has its place.

A limit of `starts` gives out tokens instead of places: `held` then contains only runs whose message
is on its way to a worker.

Guaranteed: places never exceed `running`, unless an operator lowers it. Tokens taken between two
instants are at most `rate` times the seconds between them, plus `burst`; each is taken at the
instant when the server stored the write that took it. The next in line is never
skipped, and a new message never overtakes the line.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from holdfast.durations import seconds
from holdfast.errors import DefinitionError, InvalidInput
from holdfast.model.codec import Codec, Count, Instant, Name, Release, RunId
from holdfast.names import check_name, encode, release_order

WhenFull = Literal["wait", "drop"]

MOST_RUNNING: Final = 10_000
"""Most places of a limit: the gate names each holder in about 40 bytes, and every change writes all
of them."""
FASTEST: Final = 100_000.0
"""The highest rate, in starts per second: more than one server can store."""
BURST_SECONDS: Final = 0.1
"""The default burst is the tokens of this time, so that a gate that is served a little late loses
none."""
EVERYBODY: Final = "=all"
"""The key of a limit without keys. `encode` never produces it, so no user's key can equal it."""
IDLE_SECONDS: Final = 3_600.0
"""How long an unused gate is kept, at least: there may be one for each customer."""

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(\d*(?:\.\d+)?)(ms|s|m|h|d)")

Rate = Annotated[float, Meta(ge=0, le=FASTEST)]


class Numbers(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a limit allows."""

    running: Count = 0
    """Runs at the same time; 0: any number."""
    rate: Rate = 0.0
    """Starts per second; 0: any number."""
    burst: Count = 0
    """Starts that may happen at once after a quiet time."""

    def __str__(self) -> str:
        if self.running:
            return f"{self.running:,} running"
        return f"{starts_text(self.rate)}, burst {self.burst:,}"


def starts_text(rate: float) -> str:
    """A rate as people write it: `100/s`, `30/m`, `5/h`."""
    for unit, length in (("s", 1), ("m", 60), ("h", 3600), ("d", 86_400)):
        if rate * length >= 1 and math.isclose(rate * length, round(rate * length), rel_tol=1e-6):
            return f"{round(rate * length)}/{unit}"
    return f"{rate:.4g}/s" if rate >= 1 else f"{rate * 86_400:.4g}/d"


def starts_rate(text: object) -> float:
    """Starts per second of a text such as `100/s`, `30/m` or `5/10s`."""
    found = _RATE.fullmatch(text.strip()) if isinstance(text, str) and len(text) < 40 else None
    if found is None:
        raise InvalidInput(f"starts={text!r} cannot be read: write '100/s', '30/m' or '5/10s'")
    rate = float(found[1]) / max(1e-9, seconds(f"{found[2] or 1}{found[3]}"))
    if not 0 < rate <= FASTEST:
        raise InvalidInput(f"starts={text!r} must be more than 0 and at most {FASTEST:,.0f}/s")
    return rate


def numbers(running: int | None, starts: str | None, burst: int | None) -> Numbers:
    """Check what a limit is given: either `running`, or `starts` with an optional `burst`."""
    if (running is None) == (starts is None):
        raise InvalidInput("a limit has either running= or starts=: write two limits for both")
    if running is not None:
        if burst is not None:
            raise InvalidInput("burst= belongs to starts=")
        return Numbers(running=_whole(running, "running", MOST_RUNNING))
    rate = starts_rate(starts)
    if burst is None:
        burst = max(1, min(MOST_RUNNING, math.ceil(rate * BURST_SECONDS)))
    return Numbers(rate=rate, burst=_whole(burst, "burst", MOST_RUNNING))


def _whole(value: object, what: str, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidInput(f"{what}={value!r} must be a whole number from 1 to {most:,}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit on the runs of a job, or, made by `app.limit`, of several jobs together."""

    running: int | None = None
    """At most this many runs at the same time, over all workers."""
    starts: str | None = None
    """At most this many starts in a time: `"100/s"`, `"30/m"`."""
    burst: int | None = None
    """How many starts may happen at once; by default the starts of a tenth of a second."""
    per: str = ""
    """A member of the payload: the limit applies to each of its values separately."""
    when_full: WhenFull = "wait"
    """`wait`: a run that finds no place waits for one. `drop`: it ends as cancelled, unless it has
    begun before or the limit is paused."""
    ordered: bool = False
    """Start each run after the one accepted before it has ended, retries included."""
    name: str = ""
    """What operators call it; by default the job's name."""

    def __post_init__(self) -> None:
        try:
            self.numbers  # noqa: B018 - checks them
            if self.name:
                check_name(self.name, "limit")
        except InvalidInput as error:
            raise DefinitionError(f"Limit: {error}") from None
        if self.when_full not in ("wait", "drop"):
            raise DefinitionError(f"Limit: when_full={self.when_full!r} is not 'wait' or 'drop'")
        if not isinstance(self.per, str):
            raise DefinitionError("Limit: per= is the name of a member of the payload")
        if self.ordered and (self.running != 1 or self.when_full != "wait"):
            raise DefinitionError("Limit: ordered=True needs running=1 and when_full='wait'")

    @property
    def numbers(self) -> Numbers:
        """What it allows."""
        return numbers(self.running, self.starts, self.burst)

    @property
    def order(self) -> tuple[bool, bool, bool, str]:
        """The order in which every job takes its limits: ordered ones first, then keyed before
        shared, start tokens last."""
        return not self.ordered, self.starts is not None, not self.per, self.name

    def named(self, name: str) -> Limit:
        """The same limit, with a name."""
        return self if self.name else replace(self, name=name)

    def key_of(self, body: bytes, parameters: tuple[str, ...]) -> str:
        """The key in a payload."""
        return key_of(self.per, body, parameters)


def key_of(per: str, body: bytes, parameters: tuple[str, ...]) -> str:
    """The key in a payload; a body that is no JSON object has none."""
    if not per:
        return EVERYBODY
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and (per in value or parameters != (per,)):
        value = value.get(per)
    if not isinstance(value, str):
        value = msgspec.json.encode(value).decode()
    return encode(value) if value else EVERYBODY


# ---- the rule: what code and operators say


class Rule(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a limit allows now, according to the code and to operators."""

    code: Numbers = Numbers()
    """As the code says."""
    chosen: Numbers | None = None
    """As set by an operator; valid until the code changes."""
    paused: bool = False
    per: str = ""
    app: Name = ""
    release: Release = ""
    jobs: tuple[str, ...] = ()
    """Which jobs have it, as the registering app knows."""
    ordered: bool = False
    """A run keeps its place while it waits for its next attempt."""

    @property
    def numbers(self) -> Numbers:
        return self.chosen or self.code


RULE: Final = Codec[Rule](Rule, "a limit's rule")


def registered(old: Rule | None, new: Rule) -> Rule:
    """The rule after an app has registered a limit of its code.

    A lower release changes nothing. An operator's choice stays until the code itself changes.
    """
    if old is None:
        return new
    if release_order(old.release) > release_order(new.release):
        return old
    chosen = old.chosen if old.code == new.code else None
    return msgspec.structs.replace(new, chosen=chosen, paused=old.paused)


# ---- the gate


class Entry(NamedTuple):
    """A run that waits: its message in the line."""

    sequence: int
    run: str
    number: int
    """The number of the message that will carry it."""


class Gate(msgspec.Struct, frozen=True, omit_defaults=True):
    """One key of a limit: who holds a place, and how far the line was served."""

    allowed: Numbers = Numbers()
    paused: bool = False
    rule: Count = 0
    """The revision of the rule that these numbers come from; an older rule changes nothing."""
    held: dict[RunId, Count] = {}
    """The runs that hold a place, each with the number of the message that holds it."""
    head: Count = 0
    """The sequence of the last message of the line that got a place."""
    tail: Count = 0
    """The sequence of the last known message of the line."""
    tokens: Annotated[float, Meta(ge=0, le=MOST_RUNNING)] = 0.0
    at: Instant = 0.0
    """When the tokens were counted, by the server's clock; 0: never."""
    taken: Count = 0
    """Tokens that the write of this value took."""

    @property
    def waiting(self) -> bool:
        return self.tail > self.head

    @property
    def has_room(self) -> bool:
        """Whether there is a place for the next run."""
        if self.paused:
            return False
        if self.allowed.rate:
            return self.tokens >= 1
        return not self.allowed.running or len(self.held) < self.allowed.running

    @property
    def idle(self) -> bool:
        return not self.held and not self.waiting

    @property
    def kept_seconds(self) -> float:
        """How long an idle gate is kept: until all its tokens are back."""
        refill = self.allowed.burst / self.allowed.rate if self.allowed.rate else 0.0
        return max(IDLE_SECONDS, 2 * refill)


GATE: Final = Codec[Gate](Gate, "a limit's gate")

change = msgspec.structs.replace


def ruled(gate: Gate, rule: Rule | None, revision: int) -> Gate:
    """The gate with a rule's numbers, unless it has those of a newer one."""
    if rule is None or (gate.rule >= revision and (gate.rule or gate.allowed == rule.numbers)):
        return gate
    return change(gate, allowed=rule.numbers, paused=rule.paused, rule=revision)


def credited(gate: Gate, now: float) -> Gate:
    """The gate with the tokens that have accrued."""
    allowed = gate.allowed
    if not allowed.rate:
        return gate
    if not gate.at:
        return change(gate, tokens=float(allowed.burst), at=now, taken=0)
    tokens = gate.tokens + allowed.rate * max(0.0, now - gate.at)
    return change(gate, tokens=min(tokens, float(allowed.burst)), at=max(now, gate.at), taken=0)


def stamped(gate: Gate, stored: float) -> Gate:
    """The gate with its tokens counted at the instant when it was stored.

    Its writer counted them a little earlier, or much earlier if it was frozen. Tokens above `burst`
    at the time of the write are lost; otherwise as many tokens again could be taken right after a
    late write.
    """
    if not gate.allowed.rate or not gate.at or stored <= gate.at:
        return gate
    before = gate.tokens + gate.taken + gate.allowed.rate * (stored - gate.at)
    tokens = max(0.0, min(before, float(gate.allowed.burst)) - gate.taken)
    return change(gate, tokens=tokens, at=stored, taken=0)


def next_token(gate: Gate) -> float:
    """When the next token exists, by the server's clock."""
    return gate.at + max(0.0, 1.0 - gate.tokens) / gate.allowed.rate


def take(gate: Gate, run: str, number: int) -> tuple[Gate, bool]:
    """A delivered message asks for a place; False: its run must wait."""
    granted = gate.held.get(run)
    if granted is not None:
        if gate.allowed.rate:
            return _without(gate, run), True
        return (_with(gate, run, number) if number > granted else gate), True
    if gate.waiting or not gate.has_room:
        return gate, False
    if gate.allowed.rate:
        return _spent(gate), True
    return _with(gate, run, number), True


def restore(gate: Gate, run: str, number: int) -> Gate:
    """A running run whose gate was deleted gets its place back, even if the gate is full."""
    return gate if gate.allowed.rate else _with(gate, run, max(number, gate.held.get(run, 0)))


def park(gate: Gate, sequence: int) -> Gate:
    """A message was stored in the line."""
    return change(gate, tail=max(gate.tail, sequence))


def leave(gate: Gate, run: str, number: int) -> Gate:
    """A run gives up the place that it held with this message, or with an older one."""
    granted = gate.held.get(run)
    return gate if granted is None or granted > number else _without(gate, run)


def grant(gate: Gate, entry: Entry | None) -> Gate:
    """The next in the line gets a place; None: nobody is left in it."""
    if entry is None:
        return change(gate, head=gate.tail)
    known = gate.held.get(entry.run)
    granted = change(
        _with(gate, entry.run, max(entry.number, known or 0)),
        head=entry.sequence,
        tail=max(gate.tail, entry.sequence),
    )
    if gate.allowed.rate and known is None:
        granted = _spent(granted)
    return granted


def _spent(gate: Gate) -> Gate:
    return change(gate, tokens=gate.tokens - 1, taken=gate.taken + 1)


def _with(gate: Gate, run: str, number: int) -> Gate:
    return change(gate, held={**gate.held, run: number})


def _without(gate: Gate, run: str) -> Gate:
    return change(gate, held={name: n for name, n in gate.held.items() if name != run})
