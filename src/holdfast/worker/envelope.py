"""Reading and writing the headers around a payload: who the run is, and its story."""

from __future__ import annotations

import re
from typing import Any

from holdfast.model import run as runs
from holdfast.model.codec import whole_number
from holdfast.model.dead import dead_headers
from holdfast.model.run import RunRecord
from holdfast.names import (
    H_ATTEMPT,
    H_CAUSE,
    H_CRASHES,
    H_CREATED,
    H_FAILURES,
    H_MSG_ID,
    H_RUN,
    OWN_HEADERS,
    SERVER_HEADERS,
    encode,
    event_run,
    keyed_run,
    sequence_run,
)
from holdfast.ownership.claims import Claim
from holdfast.worker.held import Held

LARGEST_NUMBER = 1_000_000
STAMP_DIGITS = 15
"""A stamp is read as it is, since it was counted up by a worker; more digits than this no JSON
parser keeps exactly. What is forged, `runs.believed` finds out by the record."""
LATEST = 32_503_680_000.0
"""The year 3000: a record with a later time could not be shown."""
_RUN = re.compile(r"[a-zA-Z0-9_=/-]{1,400}")
MADE_UP_CHARS = 18
"""Ids that `IdMaker` makes start with `r` and are at least this long."""


def identify(held: Held) -> None:
    """Find out which run a message is for; headers are optional and may be nonsense."""
    message, headers = held.message, held.message.headers
    spec = held.job.spec
    run = headers.get(H_RUN)
    given = run or headers.get(H_MSG_ID)
    if held.event and not run:
        own = given or sequence_run(message.sequence, message.stored_ns)
        held.run, held.keyed = event_run(spec.group, spec.name, own), True
    elif given and given[0] == "r" and len(given) >= MADE_UP_CHARS and given.isalnum():
        held.run = given if given.isascii() else encode(given)
    elif given:
        held.run = given if _RUN.fullmatch(given) else encode(given)
        held.keyed = True
    else:
        held.run = sequence_run(message.sequence, message.stored_ns)
    if run:
        held.stamp = stamp(headers.get(H_ATTEMPT))
        held.failures = number(headers.get(H_FAILURES), 0)
    held.attempt = held.failures + 1
    held.created = message.stored_ns / 1e9
    if H_CREATED in headers:
        held.created = _instant(headers[H_CREATED], held.created)


def scope(held: Held) -> None:
    """Another job uses the same id: keep the two apart."""
    spec = held.job.spec
    held.run, held.keyed = keyed_run(spec.group, spec.name, held.run), True


def adopt(held: Held, claim: Claim) -> None:
    """Take over what the record knows better than the message."""
    held.claim = claim
    held.failures = claim.record.failures
    held.attempt = claim.record.attempt
    held.stamp = claim.record.message
    held.created = claim.record.created or held.created


def is_recorded(held: Held) -> bool:
    """Whether the run has a record: by its job's contract, or because it was redelivered once."""
    return (
        held.job.spec.recorded or held.message.deliveries > 1 or H_CRASHES in held.message.headers
    )


def crashes(held: Held) -> int:
    """Crashes of a run that was recorded because it was redelivered."""
    return number(held.message.headers.get(H_CRASHES), 0)


def number(text: str | None, default: int) -> int:
    """A header's number; nonsense counts as absent."""
    return min(whole_number(text, default, digits=7), LARGEST_NUMBER)


def stamp(text: str | None) -> int:
    """The number of the message that carries a run; nonsense counts as the first."""
    return max(1, whole_number(text, 1, digits=STAMP_DIGITS))


def cause(headers: dict[str, str]) -> str:
    """The run that sent this one, if the header can be one."""
    found = headers.get(H_CAUSE, "")
    return found if _RUN.fullmatch(found) else ""


def _instant(text: str, default: float) -> float:
    try:
        value = float(text)
    except ValueError:
        return default
    return value if 0 < value < LATEST else default


def own_headers(headers: dict[str, str]) -> dict[str, str]:
    """The user's own headers, which travel with the run wherever it goes."""
    return {k: v for k, v in headers.items() if not k.startswith((OWN_HEADERS, SERVER_HEADERS))}


def parked_headers(held: Held, stamp: int) -> dict[str, str]:
    """The headers of the message that carries a run's next attempt."""
    headers = own_headers(held.message.headers)
    headers |= {
        H_RUN: held.run,
        H_MSG_ID: f"{held.run}.{mark(held, stamp)}",
        H_ATTEMPT: str(stamp),
        H_FAILURES: str(held.failures),
        H_CREATED: f"{held.created:.3f}",
    }
    if held.claim and not held.job.spec.recorded:
        headers[H_CRASHES] = str(held.claim.record.crashes)
    return headers


def mark(held: Held, stamp: int) -> str:
    """What tells apart the messages that carry one run.

    Without a record a key may be used again: what becomes of the second must not be mistaken for
    a repeat of the first.
    """
    return str(stamp) if held.job.spec.recorded else f"{stamp}-{held.message.sequence}"


def story_headers(
    held: Held, reason: str, error: str, story: str, record: RunRecord | None, now: float
) -> dict[str, str]:
    """The headers of a dead letter: the user's own, and the story of the run."""
    headers = own_headers(held.message.headers) | dead_headers(
        run=held.run,
        message=held.stamp if held.claim else runs.believed(None, held.stamp),
        subject=held.message.subject,
        reason=reason,
        error=error,
        now=now,
        story=story,
        failures=held.failures + (reason in ("failed", "timeout")),
        crashes=record.crashes if record else crashes(held),
        attempts=record.attempts if record else (),
    )
    epoch = f".{held.claim.epoch}" if held.claim else ""
    headers[H_MSG_ID] = f"{held.run}.dead.{mark(held, held.stamp)}{epoch}"
    return headers


def log_fields(held: Held, node: str) -> dict[str, Any]:
    """What every log line of a run carries."""
    return {
        "run": held.run,
        "job": held.job.name,
        "attempt": held.attempt,
        "node": node,
        "epoch": held.claim.epoch if held.claim else 0,
    }
