"""When a dead letter may be sent again, and as which message.

    none, dead, lost, cancelled ──► failed, next message number ──► publish ──► (a worker claims it)

The arrow to `failed` is a compare-and-swap on the record, made before the publish, so of any number
of operators one wins. It marks the record with a replay token. While the record has that token,
nobody has claimed the run, so the same message may be published again. That repairs a crash between
the two steps; the server drops a repeat by its message id.

A letter that is older than the message its record expects has been replayed before: it is refused,
as is anything for a run that is running, waiting for a retry of its own, or done.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from holdfast.model import run as runs
from holdfast.model.run import RunRecord

MARK = runs.REPLAY_MARK


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a letter may not be sent again."""

    why: str


@dataclass(frozen=True, slots=True)
class Replay:
    """How to send it: as which message, and whether the record must be written first."""

    message: int
    write: bool


def decide_replay(record: RunRecord | None, attempt: int) -> Replay | Refused:
    """The rule for a dead letter with this attempt number."""
    attempt = runs.believed(record, attempt)
    if record is None:
        return Replay(attempt + 1, write=True)
    if record.state == "done":
        return Refused("the run has been done since: drop the dead letter")
    if record.state == "running":
        return Refused(f"the run is running on {record.node}")
    if record.state == "failed":
        return _decide_waiting(record, attempt)
    if attempt < record.message:
        return Refused("the run has been replayed since: a newer dead letter tells how it ended")
    return Replay(attempt + 1, write=True)


def _decide_waiting(record: RunRecord, attempt: int) -> Replay | Refused:
    if not record.token.startswith(MARK):
        return Refused("the run waits for its next attempt")
    if attempt < record.message:
        return Replay(record.message, write=False)
    # The replayed message itself became a dead letter without a change of the record, as
    # at_least_once does; so the mark is from the previous replay.
    return Replay(attempt + 1, write=True)


def again(record: RunRecord, *, message: int, token: str, now: float) -> RunRecord:
    """The record of a run that is sent again: fresh counts, and a fresh time for `run_timeout`."""
    fresh = runs.replayed(record, token=MARK + token)
    return msgspec.structs.replace(fresh, message=message, created=now)
