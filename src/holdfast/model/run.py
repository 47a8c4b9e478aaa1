"""A run's record, which is also its claim, and the rules by which it moves.

    (none) ──► running ──► done | cancelled | dead | lost
                 ▲  │
                 │  └────► failed          waiting for its next attempt
                 ├───────────┘
                 │  └────► parked          a flow that waits: for a time, its children, an event
                 └───────────┘

Every arrow is one compare-and-swap on the record's revision, made by its holder. `decide` says what
a worker must do with a delivered message; it never writes.

Guaranteed by these rules: one holder at a time; a terminal record never moves again except by an
operator's replay, or by a new send of a run whose message was gone (`vacant`); a message older than
the one the record expects is superseded, as long as that one exists; a live holder never loses its
run. An older message of a run that nobody holds may carry it as well as the newest: the payload is
the same, and the record lets one of them win. Failures (the handler raised) and crashes (the holder
vanished) are counted apart, and neither a snooze nor a give-back counts as either.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final, Literal, get_args

import msgspec

from holdfast.model.codec import Address, Codec, Count, GivenName, Instant, Name, ObjectName

State = Literal["running", "done", "failed", "parked", "cancelled", "dead", "lost"]
Outcome = Literal[
    "done", "failed", "timeout", "crashed", "cancelled", "snoozed", "given_back", "parked"
]
Restart = Literal["immediately", "after_grace", "never"]

TERMINAL: frozenset[str] = frozenset({"done", "cancelled", "dead", "lost"})
RESTARTS: frozenset[str] = frozenset(get_args(Restart))
KEPT_ATTEMPTS = 30
"""Attempts kept in a record, the first and the newest ones: twice as many as the default retry
policy makes. The record stays far below the server's message limit even if each has an error of
`ERROR_CHARS`."""
ERROR_CHARS = 2_000
"""Characters kept of an error in a record: enough for the message; the traceback is in the dead
letter."""
NO_RESULT = msgspec.Raw(b"null")
REPLAY_MARK = "replay."
"""Prefix of the token of an operator's replay."""
DOUBTFUL_CRASHES = 3
"""Crashes beside other runs count only against this multiple of the limit. Without any limit, a run
that never gets to run alone would kill its workers forever."""
LARGEST_LEAP = 1_000_000
"""More than the attempts of any run: a message's number so far ahead of its record is forged."""


class Attempt(msgspec.Struct, omit_defaults=True, frozen=True):
    """One try at a run by one worker."""

    number: Count
    node: Name
    epoch: Count = 0
    started: Instant = 0.0
    ended: Instant = 0.0
    outcome: str | None = None
    """One of `Outcome`; a newer version may know more."""
    error: str = ""


class Progress(msgspec.Struct, omit_defaults=True, frozen=True):
    """The progress that a handler last reported."""

    fraction: float | None = None
    note: str = ""
    at: Instant = 0.0


class RunRecord(msgspec.Struct, omit_defaults=True, frozen=True):
    """Everything that is known about one run. Unknown members of newer versions are ignored."""

    state: str
    """One of `State`; a newer version may know more."""
    group: GivenName
    job: GivenName
    message: Count = 1
    """The number of the message that carries the run; older messages are superseded."""
    failures: Count = 0
    crashes: Count = 0
    node: Name = ""
    """Who holds it while it is running."""
    token: str = ""
    """Unique per write of a holder: tells after a lost answer whether the write was ours."""
    reply: Address = ""
    """The reply subject with which its message can be given back."""
    keyed: bool = False
    created: Instant = 0.0
    """When it was accepted, by the server's clock."""
    started: Instant = 0.0
    ended: Instant = 0.0
    due: Instant = 0.0
    """When the next attempt is to start, while failed."""
    restart: str = "immediately"
    """One of `Restart`; a newer version may know more."""
    attempts: tuple[Attempt, ...] = ()
    error: str = ""
    result: msgspec.Raw = NO_RESULT
    result_object: ObjectName = ""
    progress: Progress | None = None
    once: bool = False
    """Its message is acknowledged before it starts (`at_most_once`)."""
    body: bytes = b""
    """The payload of such a run, while it is running."""
    body_object: ObjectName = ""
    """The payload's name in the object store, when it is too large for the record."""
    cause: str = ""
    """The run that published the event or enqueued this run."""
    vacant: bool = False
    """It ended because its message was gone: the next message with its id is a new run."""
    alias: str = ""
    """The id by its first message, where the worker computed the run's key from the payload."""
    alone: bool = False
    """Its holder executes nothing else: if the holder dies, this run caused it."""
    flow: bool = False
    """It has a journal."""
    waits: str = ""
    """What a parked flow waits for, in words."""
    parent: str = ""
    """The flow that waits for its end, if it is a child (`model.journal.Parent`)."""
    generation: Count = 0
    """Of a flow: differs each time its id is used again, by a replay or for a key; 0 the first
    time."""

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def attempt(self) -> int:
        """The number of the current attempt, or of the next one."""
        return self.failures + self.crashes + 1

    @property
    def begun(self) -> int:
        """How many attempts have begun; those that do not count are left out."""
        return self.failures + self.crashes + (self.state in ("running", "done"))


CODEC: Final = Codec[RunRecord](RunRecord, "a run's record")
encode = CODEC.encode
decode = CODEC.decode
_ENDED: Final = tuple(b'{"state":"%s"' % state.encode() for state in sorted(TERMINAL))


def may_be_open(encoded: bytes) -> bool:
    """Whether a record may belong to a run that has not ended; other records need no decoding."""
    return not encoded.startswith(_ENDED)


def may_be_parked(encoded: bytes) -> bool:
    """Whether a record may belong to a flow that waits."""
    return b'"state":"parked"' in encoded


class Verdict(Enum):
    """What to do with a message that was handed to a worker."""

    CLAIM = "nobody holds it: claim it"
    TAKE_OVER = "its holder is gone: claim it as crashed"
    POISON = "it has crashed too many workers: dead-letter it"
    LOST = "its holder is gone and it must not be restarted: dead-letter it"
    BEGUN = "it has begun before its job became at_most_once: dead-letter it"
    HELD = "a live node holds it, or a version that knows more: give the message back"
    CROWDED = "it has crashed workers, and others run here: give the message back for a while"
    DUPLICATE = "it has ended: drop the message"
    FOREIGN = "another job uses the same run id: keep the two apart"
    UNREADABLE = "its record cannot be read: give the message back until it can, or is removed"
    SUPERSEDED = "a newer message carries it: drop this one, unless the newer one is gone"


def decide(
    record: RunRecord | None,
    *,
    message: int,
    holder_alive: bool,
    crash_limit: int,
    in_grace: bool = False,
    once: bool = False,
) -> Verdict:
    """The rule for a delivered message; the holder matters only while it is running.

    `in_grace`: the holder is lost, and may still be finishing within its grace period. `once`: the
    job is `at_most_once` now, whatever it was when the record was written.

    A crash beside other runs may be the fault of any of them, so a run that never crashed alone is
    given up only after several times the limit.
    """
    doubtful = crash_limit * DOUBTFUL_CRASHES
    if record is None:
        return Verdict.CLAIM
    if record.terminal:
        return Verdict.CLAIM if record.vacant else Verdict.DUPLICATE
    older = message < record.message
    if record.state in ("failed", "parked"):
        if older:
            return Verdict.SUPERSEDED
        return Verdict.BEGUN if once and _may_not_start_again(record) else Verdict.CLAIM
    if record.state != "running" or record.restart not in RESTARTS:
        return Verdict.HELD  # a newer version wrote it: its workers know what to do
    if holder_alive:
        return Verdict.SUPERSEDED if older else Verdict.HELD
    if in_grace and record.restart == "after_grace":
        return Verdict.HELD
    if record.restart == "never" or once:
        return Verdict.LOST
    if record.crashes + 1 >= (crash_limit if record.alone or crash_limit == 1 else doubtful):
        return Verdict.POISON
    return Verdict.TAKE_OVER


def waits_for(record: RunRecord, message: int) -> bool:
    """Whether a record waits for the message of this number."""
    return record.state == "failed" and record.message == believed(record, message)


def _may_not_start_again(record: RunRecord) -> bool:
    """Whether a waiting run was started under another delivery mode; an operator may replay it."""
    return bool(record.attempts) and not record.once and not starts_over(record)


def starts_over(record: RunRecord) -> bool:
    """Whether it was sent again from its beginning, and nobody has claimed it since."""
    return record.token.startswith(REPLAY_MARK)


def believed(record: RunRecord | None, message: int) -> int:
    """A message's number, unless it is forged.

    A number that no chain of attempts can have reached counts as the one that the record expects:
    the message is not dropped, and later numbers are not counted up from it.
    """
    expected = record.message if record else 1
    return message if 0 < message < expected + LARGEST_LEAP else expected


def is_suspect(record: RunRecord, crash_limit: int) -> bool:
    """Whether a run has only one crash left; it is then executed alone."""
    crashes = record.crashes + (record.state == "running" and record.node != "")
    return crashes >= max(1, crash_limit - 1)


def claimed(
    record: RunRecord,
    *,
    node: str,
    token: str,
    reply: str,
    message: int,
    now: float,
    alone: bool = False,
) -> RunRecord:
    """The record of a run that `node` is about to execute."""
    taken_over = record.state == "running" and record.node != ""
    base = close_crashed(record, now) if taken_over else record
    return msgspec.structs.replace(
        base,
        state="running",
        node=node,
        token=token,
        reply=reply,
        message=max(message, base.message),
        started=now,
        due=0.0,
        waits="",
        progress=record.progress if record.flow else None,
        alone=alone,
    )


def close_crashed(record: RunRecord, now: float) -> RunRecord:
    """Record that the holder vanished during its attempt."""
    attempt = Attempt(
        record.attempt, record.node, started=record.started, ended=now, outcome="crashed"
    )
    return msgspec.structs.replace(
        record, crashes=record.crashes + 1, attempts=_add(record.attempts, attempt)
    )


def ended(record: RunRecord, state: State, *, error: str, token: str, now: float) -> RunRecord:
    """The record of a run that ends without its holder: cancelled, dead or lost."""
    closed = close_crashed(record, now) if record.state == "running" else record
    return msgspec.structs.replace(
        closed,
        state=state,
        token=token,
        reply="",
        ended=now,
        due=0.0,
        error=error[:ERROR_CHARS],
        waits="",
        body=b"",
        body_object="",
    )


def cancelled(
    record: RunRecord | None, run: str, group: str, job: str, *, now: float, why: str = "cancelled"
) -> RunRecord:
    """The record of a cancelled run that nobody holds; None if it never had one."""
    base = record or RunRecord("cancelled", group, job, keyed=True, created=now)
    return ended(base, "cancelled", error=why, token=f"cancel.{run}", now=now)


def settled(
    record: RunRecord,
    state: State,
    outcome: Outcome,
    *,
    epoch: int,
    token: str,
    now: float,
    error: str = "",
    message: int | None = None,
    due: float = 0.0,
    result: bytes = b"",
    result_object: str = "",
    begun: bool = True,
    waits: str = "",
) -> RunRecord:
    """The record after its holder has finished the attempt; one that never began is not listed.

    A flow that parks has made progress: earlier crashes no longer count against it.
    """
    attempt = Attempt(
        record.attempt, record.node, epoch, record.started, now, outcome, error[:ERROR_CHARS]
    )
    counts = outcome in ("failed", "timeout")
    return msgspec.structs.replace(
        record,
        state=state,
        token=token,
        reply="",
        message=message or record.message,
        failures=record.failures + counts,
        crashes=0 if state == "parked" else record.crashes,
        waits=waits,
        ended=now if state in TERMINAL else 0.0,
        due=due,
        error=error[:ERROR_CHARS],
        result=msgspec.Raw(result) if result else NO_RESULT,
        result_object=result_object,
        body=b"",
        body_object="",
        attempts=_add(record.attempts, attempt) if begun else record.attempts,
    )


def replayed(record: RunRecord, *, token: str) -> RunRecord:
    """The record of a dead run that an operator sends again, with fresh counts."""
    return msgspec.structs.replace(
        record,
        state="failed",
        node="",
        token=token,
        failures=0,
        crashes=0,
        message=record.message + 1,
        ended=0.0,
        due=0.0,
        error="",
    )


def _add(attempts: tuple[Attempt, ...], attempt: Attempt) -> tuple[Attempt, ...]:
    kept = (*attempts, attempt)
    if len(kept) <= KEPT_ATTEMPTS:
        return kept
    return (kept[0], *kept[-(KEPT_ATTEMPTS - 1) :])


def fingerprint(error: str) -> str:
    """A text that errors of the same kind share: numbers and quoted parts are blanked."""
    head = error.split("\n", 1)[0]
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", head))[:200]
