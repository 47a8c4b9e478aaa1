"""`/runs/<run>`: one run: its attempts on a line of time, who held it, its story, its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from holdfast.errors import BrokerError
from holdfast.model.run import Attempt, RunRecord
from holdfast.names import parse_slot_run
from holdfast.status.finding import Finder, Found
from holdfast.status.payloads import payload_of
from holdfast.status.runs import Runs
from holdfast.status.trace import Step, story
from holdfast.web.pages.charts import Block
from holdfast.web.pages.rendering import clock, long, look
from holdfast.web.pages.visit import ViewerVisit, Visit

router = APIRouter(include_in_schema=False)

SEARCH: Final = 300
"""How many of the newest messages are looked through for what the run has led to."""
FIND: Final = 3_000
WIDTH: Final = 1000
ROW: Final = 26


class Row(msgspec.Struct, frozen=True):
    """An attempt, or the one that is running, on the line of time."""

    attempt: Attempt
    x: float
    width: float
    y: int
    look: str
    title: str
    changed: bool
    """Another node holds it than before."""


class Gantt(msgspec.Struct, frozen=True):
    """The attempts of a run on one line of time."""

    rows: list[Row]
    waits: list[Block]
    height: int
    start: float
    end: float


@router.get("/runs/{run:path}")
async def show(visit: ViewerVisit, run: str, at: int = 0) -> Response:
    """One run."""
    found = await Finder(visit.client, FIND).find(run, at)
    detail = await Runs(visit.client, visit.desk.audit).describe(found)
    told = await story(visit.client, found, SEARCH)
    payload, headers = await _payload(visit, found, detail.info.job)
    slot = parse_slot_run(run)
    return await visit.show(
        "run.html",
        "runs",
        info=detail.info,
        where=detail.where,
        letter=detail.dead_letter,
        record=found.record,
        gantt=gantt(found.record, visit.now) if found.record else None,
        lines=log(told.steps),
        payload=payload,
        headers=headers,
        result=await _result(visit, found.record),
        slot=slot,
        ended=bool(found.record and found.record.terminal),
        retryable=_retryable(found),
    )


def _retryable(found: Found) -> bool:
    record = found.record
    if record is None:
        return bool(found.letter and not found.carrier)
    return (record.state == "failed" and bool(found.carrier)) or bool(found.letter)


async def _payload(visit: Visit, found: Found, job: str) -> tuple[str | None, dict[str, str]]:
    try:
        payload = await payload_of(visit.client, found)
    except BrokerError:  # it has just been removed
        payload = None
    if payload is None:
        return None, {}
    return await visit.body(payload[0], job), visit.headers(payload[1])


async def _result(visit: Visit, record: RunRecord | None) -> str | None:
    if record is None or record.state != "done":
        return None
    try:
        return await visit.result(await visit.client.result_bytes(record), record.job)
    except BrokerError:
        return "it was too large for the record, and is not kept any more"


# ---- attempts


def gantt(record: RunRecord, now: float) -> Gantt | None:
    """Where each attempt lies between acceptance and end."""
    attempts = [*record.attempts]
    if record.state == "running":
        attempts.append(Attempt(record.attempt, record.node, 0, record.started))
    begun = [a for a in attempts if a.started]
    if not begun:
        return None
    start = min([record.created or begun[0].started, *(a.started for a in begun)])
    end = max([record.due, record.ended, *(a.ended or now for a in begun)])
    whole = max(end - start, 0.001)

    def place(at: float) -> float:
        return (at - start) / whole * WIDTH

    rows = []
    for n, a in enumerate(begun):
        until = a.ended or now
        kind = look(a.outcome or "running")
        before = begun[n - 1].node if n else a.node
        title = (
            f"attempt {a.number} on {a.node}: {a.outcome or 'running'}, {long(until - a.started)}"
        )
        width = max(3.0, place(until) - place(a.started))
        rows.append(
            Row(
                a, min(place(a.started), WIDTH - 3.0), width, n * ROW, kind, title, before != a.node
            )
        )
    return Gantt(rows, _waits(begun, start, record.due, place), len(rows) * ROW, start, end)


def _waits(
    begun: Sequence[Attempt], start: float, due: float, place: Callable[[float], float]
) -> list[Block]:
    """The times between attempts: in the queue, or until a retry was due."""
    found, before = [], start
    for n, attempt in enumerate(begun):
        if attempt.started > before:
            x = place(before)
            title = f"waited {long(attempt.started - before)}"
            found.append(Block(x, n * ROW, place(attempt.started) - x, ROW, "", title))
        before = max(before, attempt.ended)
    return found


# ---- the story as sentences


class Line(msgspec.Struct, frozen=True):
    """One line of the log; an error that was told just before is not told again."""

    step: Step
    text: str
    error: str


def log(steps: Sequence[Step]) -> list[Line]:
    """The story of a run, line by line."""
    found, told = [], ""
    for step in steps:
        found.append(Line(step, sentence(step), step.error if step.error != told else ""))
        told = step.error or told
    return found


def sentence(step: Step) -> str:
    """A step as a person would say it; what belongs to links is left to the template."""
    return _SENTENCES.get(step.what, _plain)(step)


def _plain(step: Step) -> str:
    return " ".join(part for part in (step.what, step.detail) if part)


def _started(step: Step) -> str:
    epoch = f", epoch {step.epoch}" if step.epoch else ""
    return f"attempt {step.attempt} started on {step.node}{epoch}"


def _ended(step: Step) -> str:
    return f"attempt {step.attempt} on {step.node} ended: {step.outcome or 'unknown'}"


_SENTENCES: Final[dict[str, Callable[[Step], str]]] = {
    "accepted": lambda s: f"accepted {s.detail}".strip(),
    "queued": lambda s: "waits in its queue",
    "delayed": lambda s: f"put off until {clock(s.until)} UTC",
    "started": _started,
    "ended": _ended,
    "waiting": lambda s: f"waits for attempt {s.attempt}, due at {clock(s.until)} UTC",
    "event": lambda s: f"published the event {s.event}",
    "caused": lambda s: f"led to a run of {s.detail}",
    "dead letter": lambda s: f"given up ({s.detail}): dead letter {s.dead_letter}",
    "operator": lambda s: f"operator: {s.detail}",
}
