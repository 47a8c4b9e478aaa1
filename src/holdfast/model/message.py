"""A run's message: its subject, headers and message id, built and read in this one place.

A run travels as one message at a time. Its **first** message carries only the message id, which is
the run id, so that anything that can publish to NATS can start a run. Every **later** message, for
a retry, a replay or a repair, says which run it carries, its number, and what the run has been
through (`next_message`). A message that is due later waits under `hf.later.…`, and the server moves
it to the job's subject in time.

Guaranteed: two messages of one run have different message ids, unless one repeats the other and may
be dropped. What a user's headers say never replaces ours.

Reading never fails: headers are optional, anybody can write them, and nonsense counts as absent.
Forged numbers are not detected here but against the run's record (`model.run.believed`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Final, NamedTuple

from holdfast.clock import rfc3339
from holdfast.model.codec import LATEST, whole_number
from holdfast.names import (
    H_ATTEMPT,
    H_CAUSE,
    H_CRASHES,
    H_CREATED,
    H_EXPECTED,
    H_EXPECTED_SUBJECT,
    H_FAILURES,
    H_MSG_ID,
    H_RUN,
    H_SCHEDULE,
    H_SCHEDULE_TARGET,
    H_SLOT,
    H_SUBJECT,
    OWN_HEADERS,
    SERVER_HEADERS,
    Names,
    attempt_message_id,
    encode,
    event_run,
    sequence_run,
)

LARGEST_COUNT: Final = 1_000_000
"""No run fails or crashes this often: a larger number in a header is forged."""
NUMBER_DIGITS: Final = 15
"""The most digits of a number: every JSON parser keeps that many exactly, so it survives the run's
record."""
MADE_UP_CHARS: Final = 18
"""Ids that `IdMaker` makes start with `r` and have at least this many characters."""

RUN_CHARS: Final = 400
"""A run's id is part of a subject and of a key; longer ones are encoded."""

_RUN = re.compile(rf"[a-zA-Z0-9_=/-]{{1,{RUN_CHARS}}}")
_RESERVED = (OWN_HEADERS, SERVER_HEADERS)


class RunMessage(NamedTuple):
    """A message that is ready to be stored."""

    subject: str
    body: bytes
    headers: dict[str, str]


class Heading(NamedTuple):
    """What the headers of a stored message say about its run."""

    run: str
    keyed: bool
    """Its id was chosen by the sender, so the same id may come again."""
    number: int = 1
    """1 for the first message of a run, then counted up."""
    failures: int = 0
    created: float = 0.0
    """When the run was accepted."""


# ---- writing


def first_message(
    names: Names,
    group: str,
    job: str,
    run: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    cause: str = "",
    slot: float | None = None,
    keyed: bool = False,
    due: float | None = None,
    queue: str = "",
) -> RunMessage:
    """The first message of a run: `slot` is the instant of its schedule, `due` when to deliver it.

    While a delayed message waits, the server refuses another one with the same key: a delayed one
    expects its own subject to be empty, and a keyed one expects that of the delayed one to be.
    """
    ours = {**headers, H_MSG_ID: run}
    if cause:
        ours[H_CAUSE] = cause
    if slot is not None:
        ours[H_SLOT] = _slot_text(slot)
    target = names.job(group, job, queue)
    if due is not None:
        ours |= {H_RUN: run, H_EXPECTED: "0"}
        return delayed(RunMessage(target, body, ours), names.later(group, job, run, 1), due)
    if keyed:
        ours |= {H_EXPECTED: "0", H_EXPECTED_SUBJECT: names.later(group, job, run, 1)}
    return RunMessage(target, body, ours)


def next_message(
    names: Names,
    group: str,
    job: str,
    run: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    number: int,
    mark: str = "",
    failures: int | None = None,
    crashes: int | None = None,
    created: float | None = None,
    due: float | None = None,
    queue: str = "",
) -> RunMessage:
    """A later message of a run; `mark` tells apart two messages that share a number."""
    ours = {
        **user_headers(headers),
        H_RUN: run,
        H_MSG_ID: attempt_message_id(run, number) + mark,
        H_ATTEMPT: str(number),
    }
    if failures is not None:
        ours[H_FAILURES] = str(failures)
    if crashes is not None:
        ours[H_CRASHES] = str(crashes)
    if created is not None:
        ours[H_CREATED] = f"{created:.3f}"
    message = RunMessage(names.job(group, job, queue), body, ours)
    if due is None:
        return message
    return delayed(message, names.later(group, job, run, f"{number}{mark}"), due)


@lru_cache(maxsize=64)
def _slot_text(slot: float) -> str:
    """Cached, because many schedules are due at the same instant."""
    return rfc3339(slot)


def delayed(message: RunMessage, subject: str, due: float) -> RunMessage:
    """The message as one that waits under `subject` until it is due."""
    waiting = {H_SCHEDULE: f"@at {rfc3339(due)}", H_SCHEDULE_TARGET: message.subject}
    return RunMessage(subject, message.body, message.headers | waiting)


def user_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The user's own headers, which stay with the run wherever it goes."""
    return {name: value for name, value in headers.items() if not name.startswith(_RESERVED)}


# ---- reading


def read_heading(
    headers: Mapping[str, str],
    sequence: int,
    stored_ns: int,
    subscriber: tuple[str, str] | None = None,
) -> Heading:
    """Which run a stored message is for.

    `subscriber`: group and job, when the message is an event that becomes a run of that job.
    """
    run = headers.get(H_RUN)
    given = run or headers.get(H_MSG_ID)
    created = stored_ns / 1e9
    if H_CREATED in headers:
        created = _instant(headers[H_CREATED], created)
    if subscriber and not run:
        event = given or sequence_run(sequence, stored_ns)
        return Heading(event_run(*subscriber, event), True, created=created)
    if not given:
        return Heading(sequence_run(sequence, stored_ns), False, created=created)
    made_up = given[0] == "r" and len(given) >= MADE_UP_CHARS and given.isalnum()
    plain = (made_up and given.isascii() and len(given) <= RUN_CHARS) or _RUN.fullmatch(given)
    name = given if plain else encode(given)
    if not run:
        return Heading(name, not made_up, 1, 0, created)
    failures = count_of(headers, H_FAILURES)
    return Heading(name, not made_up, number_of(headers), failures, created)


def queue_of(names: Names, subject: str, headers: Mapping[str, str]) -> str:
    """The queue of its job that a message is in, will be moved to, or came from."""
    if names.parse_job(subject) is None:
        subject = headers.get(H_SCHEDULE_TARGET) or headers.get(H_SUBJECT, "")
    return names.parse_queue(subject)


def number_of(headers: Mapping[str, str]) -> int:
    """The number of the message that carries a run; only a later message has one."""
    if not headers.get(H_RUN):
        return 1
    return max(1, whole_number(headers.get(H_ATTEMPT), 1, digits=NUMBER_DIGITS))


def count_of(headers: Mapping[str, str], name: str) -> int:
    """A count in a header."""
    return min(whole_number(headers.get(name), 0, digits=7), LARGEST_COUNT)


def cause_of(headers: Mapping[str, str]) -> str:
    """The run that sent this one, if the header can be one."""
    found = headers.get(H_CAUSE, "")
    return found if _RUN.fullmatch(found) else ""


def due_of(headers: Mapping[str, str]) -> float:
    """When a waiting message is to be delivered; 0 for any other."""
    try:
        found = datetime.fromisoformat(headers.get(H_SCHEDULE, "").removeprefix("@at "))
    except ValueError:
        return 0.0
    return found.timestamp() if found.tzinfo else 0.0


def _instant(text: str, default: float) -> float:
    try:
        value = float(text)
    except ValueError:
        return default
    return value if 0 < value < LATEST else default
