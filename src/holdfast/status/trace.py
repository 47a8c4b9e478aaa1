"""A run's history from its acceptance to what it caused, as an ordered list of steps.

Attempts come from the record or the history, how it was given up from the dead-letter stream,
operators' actions from the ledger, what it published from the events stream, and what that led to
from the causes in other records. Expired parts are missing; nothing is guessed. Runs that it caused
are searched only among the newest `SEARCH_MOST`; `children` counts them exactly.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Final, Literal

import msgspec

from holdfast.broker.kv import parse_time
from holdfast.client import Client
from holdfast.model.run import Attempt, RunRecord
from holdfast.names import H_CAUSE, kv_key, kv_subject
from holdfast.ownership.history import CLOCKS_SECONDS, stored_since
from holdfast.status.audit import Audit
from holdfast.status.dead import DeadLetter, read_letter
from holdfast.status.finding import Finder, Found, read_record
from holdfast.status.messages import Kept, newest

SEARCH_MOST: Final = 20_000  # bounds the time of a trace
ACTIONS_MOST: Final = 5_000  # operators act rarely: those since its acceptance are soon read

What = Literal[
    "accepted",
    "queued",
    "delayed",
    "started",
    "ended",
    "waiting",
    "event",
    "caused",
    "dead letter",
    "operator",
    "done",
    "cancelled",
    "dead",
    "lost",
]


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that happened to a run."""

    at: float
    """By the server's clock, or by that of the node that did it."""
    what: What
    attempt: int = 0
    node: str = ""
    epoch: int = 0
    outcome: str = ""
    error: str = ""
    until: float = 0.0
    run: str = ""
    """Another run that this one caused."""
    event: str = ""
    dead_letter: int = 0
    detail: str = ""


class Trace(msgspec.Struct, frozen=True, omit_defaults=True):
    """The history of one run."""

    run: str
    state: str
    group: str
    job: str
    steps: list[Step]
    cause: str = ""


async def trace(client: Client, run: str, search: int = SEARCH_MOST) -> Trace:
    """A run's history; raises `RunNotFound` when there is no trace of it."""
    return await story(client, await Finder(client).find(run), search)


async def story(
    client: Client, found: Found, search: int = SEARCH_MOST, *, caused: bool = True
) -> Trace:
    """The history of a run that was found; with `caused`, also the runs that it led to."""
    run, record = found.run, found.record
    since = record.created - CLOCKS_SECONDS if record and record.created else 0.0
    steps = _from_record(record) if record else _from_message(found)
    letters = [letter async for letter in _letters(client, found, search)]
    steps += [_letter(letter) for letter in letters]
    if record is None and letters:
        steps += [s for a in letters[0].attempts for s in _attempt(a)]
    for action in await Audit(client).actions(run, ACTIONS_MOST, since):
        steps.append(Step(action.at, "operator", detail=f"{action.verb} by {action.who}"))
    steps += [s async for s in _events(client, found, since)]
    if caused:
        steps += [s async for s in _caused(client, run, search)]
    state = record.state if record else ("queued" if found.carrier else "dead")
    steps.sort(key=lambda step: step.at)
    return Trace(run, state, found.group, found.job, steps, record.cause if record else "")


def _from_record(record: RunRecord) -> list[Step]:
    steps = [step for attempt in record.attempts for step in _attempt(attempt)]
    if record.created:
        before = 2 * sum(attempt.ended <= record.created for attempt in record.attempts)
        detail = "again, by a replay" if before else ""
        steps.insert(before, Step(record.created, "accepted", detail=detail))
    if record.state == "running":
        steps.append(Step(record.started, "started", record.attempt, record.node))
    if record.state == "failed" and record.due:
        last = record.attempts[-1].ended if record.attempts else record.created
        steps.append(Step(last, "waiting", record.attempt, until=record.due))
    if record.terminal:
        steps.append(Step(record.ended, record.state, error=record.error))  # type: ignore[arg-type]
    return _in_order(steps)


def _in_order(steps: list[Step]) -> list[Step]:
    """Raise times where clocks disagree, so that steps stay in their known order."""
    latest, ordered = 0.0, []
    for step in steps:
        latest = max(latest, step.at)
        ordered.append(msgspec.structs.replace(step, at=latest))
    return ordered


def _attempt(attempt: Attempt) -> list[Step]:
    of = (attempt.number, attempt.node, attempt.epoch)
    return [
        Step(attempt.started, "started", *of),
        Step(attempt.ended, "ended", *of, attempt.outcome or "", attempt.error),
    ]


def _from_message(found: Found) -> list[Step]:
    if not found.carrier:
        return []
    kept = found.carrier.kept
    return [
        Step(kept.stored, "accepted"),
        Step(kept.stored, "delayed" if found.carrier.later else "queued", until=kept.due),
    ]


def _letter(letter: DeadLetter) -> Step:
    return Step(
        letter.at,
        "dead letter",
        error=letter.error,
        dead_letter=letter.id,
        detail=letter.reason,
    )


async def _letters(client: Client, found: Found, search: int) -> AsyncIterator[DeadLetter]:
    names = client.broker.names
    subject = names.dead_letter(found.group, found.job)
    async for kept in _newest(client, names.dead, subject, search):
        if kept.run == found.run:
            yield read_letter(kept, names)


async def _events(client: Client, found: Found, since: float) -> AsyncIterator[Step]:
    """What it published: between its acceptance and its end, so that newer events do not matter."""
    names, record, looked = client.broker.names, found.record, 0
    if record is None or not record.attempt:
        return
    until = record.ended + CLOCKS_SECONDS if record.ended else math.inf
    async for message in stored_since(client.broker, names.events, names.event(">"), since):
        looked += 1
        stored = parse_time(message.headers["Nats-Time-Stamp"])
        if stored > until or looked > SEARCH_MOST:
            return
        if message.headers.get(H_CAUSE) == found.run:
            event = names.parse_event(message.headers["Nats-Subject"]) or ""
            yield Step(stored, "event", event=event)


async def _caused(client: Client, run: str, search: int) -> AsyncIterator[Step]:
    bucket, names, told = client.runs, client.broker.names, set[str]()
    async for kept in _newest(client, bucket.stream, kv_subject(bucket.name, ">"), search):
        name = kv_key(bucket.name, kept.subject)
        record = read_record(client.broker, name, kept.body)
        if record and record.cause == run:
            told.add(name)
            yield Step(record.created, "caused", run=name, detail=f"{record.job}: {record.state}")
    async for kept in _newest(client, names.history, names.ended("*", "*", "*"), search):
        for line in client.history.read(kept.sequence, kept.body):
            record = line.record
            if record.cause == run and line.run not in told:
                told.add(line.run)
                detail = f"{record.job}: {record.state}"
                yield Step(record.created, "caused", run=line.run, detail=detail)
    (queues,) = names.queues()
    async for kept in _newest(client, names.jobs, queues, search):
        if kept.headers.get(H_CAUSE) == run and await client.runs.get(kept.run) is None:
            where = names.parse_job(kept.subject)
            yield Step(
                kept.stored, "caused", run=kept.run, detail=f"{where[1] if where else ''}: queued"
            )


async def _newest(client: Client, stream: str, subject: str, most: int) -> AsyncIterator[Kept]:
    looked = 0
    async for kept in newest(client.broker, stream, subject):
        looked += 1
        if looked > most:
            return
        yield kept
