"""`/runs/RUN`: one run with its attempts, its log, its data, its cause and its effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from holdfast.errors import BrokerError, InvalidInput, RunError
from holdfast.model import run as runs
from holdfast.model.run import Attempt, RunRecord
from holdfast.names import parse_slot_run
from holdfast.status.children import children_of
from holdfast.status.copies import Copies, copies_of
from holdfast.status.dead import read_letter
from holdfast.status.finding import Finder, Found, payload_of
from holdfast.status.trace import Step, story
from holdfast.web.pages.actions import confirm
from holdfast.web.pages.charts import Block
from holdfast.web.pages.jobs import checked
from holdfast.web.pages.rendering import SHOWN_BYTES, clock, long, look
from holdfast.web.pages.request import OperatorPage, PageRequest, ViewerPage
from holdfast.web.security import Fields

router = APIRouter(include_in_schema=False)

SEARCH: Final = 300
"""How many of the newest dead letters of its job are searched: a page must be quick."""
ANCESTORS: Final = 5
"""How many causes above a run are shown."""
FIND: Final = 3_000
"""How many messages are searched for a run that has no record yet: bounds the time of the page."""
SHOWN_LINES: Final = 500
"""The newest log lines on the page; `holdfast runs logs` shows all."""
WIDTH: Final = 1000
ROW: Final = 26
"""Sizes in SVG units; the drawing is scaled to the width of the page."""


# ---- one run


class Row(msgspec.Struct, frozen=True):
    """An attempt on the timeline."""

    attempt: Attempt
    x: float
    width: float
    y: int
    look: str
    title: str
    changed: bool
    """Whether it ran on a different node from the attempt before."""


class Gantt(msgspec.Struct, frozen=True):
    """The attempts of a run on a timeline."""

    rows: list[Row]
    waits: list[Block]
    height: int
    start: float
    end: float


@router.get("/runs/{run:path}")
async def show(page: ViewerPage, run: str, at: int = 0) -> Response:
    """One run."""
    return await _run(page, run, at)


@router.post("/do/runs/edit")
async def edit(page: OperatorPage, fields: Fields) -> Response:
    """Confirm to run it with another payload; or show what is wrong with that one."""
    run, text = fields.get("run", ""), fields.get("body", "").strip()
    found = await Finder(page.client, FIND).find(run)
    try:
        await page.jobs.check(found.job, found.group, checked(text))
    except InvalidInput as error:
        return await _run(page, run, given=text, wrong=str(error))
    return await confirm(page, "runs/retry", {"run": run, "body": text})


async def _run(
    page: PageRequest, run: str, at: int = 0, given: str = "", wrong: str = ""
) -> Response:
    found = await Finder(page.client, FIND).find(run, at)
    detail = await page.runs.describe(found)
    trace = await story(page.client, found, SEARCH, caused=False)
    accepted = found.record.created if found.record else detail.info.created
    clock_ = page.client.broker.clock
    payload, headers = await _payload(page, found, detail.info.job)
    slot = parse_slot_run(run)
    answer = await page.show(
        "run.html",
        "runs",
        info=detail.info,
        where=detail.where,
        letter=detail.dead_letter,
        record=found.record,
        gantt=gantt(found.record, page.now) if found.record else None,
        lines=log(trace.steps),
        children=await children_of(page.run_pages, clock_, found.run, accepted),
        ancestors=await _ancestors(page, detail.info.cause),
        traceback=await _traceback(page, found),
        logged=(await page.log_lines(run))[-SHOWN_LINES:],
        payload=payload,
        headers=headers,
        result=await _result(page, found.record),
        slot=slot,
        ended=bool(found.record and found.record.terminal),
        retryable=_retryable(found, payload),
        copies=await _copies(page, found) if page.user.may("operator") else None,
        given=given or payload,
        wrong=wrong,
    )
    answer.status_code = 422 if wrong else 200
    return answer


async def _ancestors(page: PageRequest, cause: str) -> list[tuple[str, RunRecord | None]]:
    """The causes of a run, the first one first, as far as they are still known."""
    found: list[tuple[str, RunRecord | None]] = []
    while cause and len(found) < ANCESTORS and cause not in (run for run, _ in found):
        record = await page.client.runs.get(cause)
        known = page.client.runs.read(runs.decode, record) if record else None
        if known is None and (line := await page.client.history.find(cause)):
            known = line.record
        found.append((cause, known))
        cause = known.cause if known else ""
    return found[::-1]


async def _traceback(page: PageRequest, found: Found) -> str:
    """The traceback of a run that was given up, from its dead letter."""
    if found.letter is None:
        return ""
    return page.text(read_letter(found.letter, page.client.broker.names).traceback)


def _retryable(found: Found, payload: str | None) -> bool:
    record = found.record
    if record is None:
        return bool(found.letter and not found.carrier)
    if record.terminal:
        return bool(found.letter) or payload is not None
    return (record.state == "failed" and bool(found.carrier)) or bool(found.letter)


async def _payload(page: PageRequest, found: Found, job: str) -> tuple[str | None, dict[str, str]]:
    try:
        payload = await payload_of(page.client, found)
    except BrokerError:  # just removed
        payload = None
    if payload is None:
        return None, {}
    return await page.body(payload[0], job), page.headers(payload[1])


async def _copies(page: PageRequest, found: Found) -> Copies | None:
    """How to send the run again from elsewhere; None if its payload is gone or not JSON."""
    try:
        copied = await copies_of(page.client, found, str(page.request.base_url).rstrip("/"))
    except (BrokerError, RunError):
        return None
    return copied if len(copied.payload) <= SHOWN_BYTES else None


async def _result(page: PageRequest, record: RunRecord | None) -> str | None:
    if record is None or record.state != "done":
        return None
    try:
        return await page.shown_result(await page.client.result_bytes(record), record.job)
    except BrokerError:
        return "too large for the record, and its object has expired"


# ---- attempts


def gantt(record: RunRecord, now: float) -> Gantt | None:
    """The place of each attempt on the timeline from acceptance to end."""
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
    """The waits between attempts: in the queue, or until a retry was due."""
    found, before = [], start
    for n, attempt in enumerate(begun):
        if attempt.started > before:
            x = place(before)
            title = f"waited {long(attempt.started - before)}"
            found.append(Block(x, n * ROW, place(attempt.started) - x, ROW, "", title))
        before = max(before, attempt.ended)
    return found


# ---- log


class Line(msgspec.Struct, frozen=True):
    """One line of the log; an error is not repeated in consecutive lines."""

    step: Step
    text: str
    error: str


def log(steps: Sequence[Step]) -> list[Line]:
    """The log of a run."""
    found, last = [], ""
    for step in steps:
        found.append(Line(step, sentence(step), step.error if step.error != last else ""))
        last = step.error or last
    return found


def sentence(step: Step) -> str:
    """A step as text; the template adds links."""
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
    "queued": lambda s: "waiting in the queue",
    "delayed": lambda s: f"delayed until {clock(s.until)} UTC",
    "started": _started,
    "ended": _ended,
    "waiting": lambda s: f"waiting for attempt {s.attempt}, due at {clock(s.until)} UTC",
    "event": lambda s: f"published the event {s.event}",
    "caused": lambda s: f"led to a run of {s.detail}",
    "dead letter": lambda s: f"given up ({s.detail}): dead letter {s.dead_letter}",
    "operator": lambda s: f"operator: {s.detail}",
}
