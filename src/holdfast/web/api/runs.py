"""Runs: enqueue, list, show, result, trace, cancel, retry.

In an address the `/` of a run id is written `~`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from holdfast.client.run import make_request
from holdfast.errors import NoRecord, NotFound, RunNotFound
from holdfast.model.job import JobSpec
from holdfast.model.run import Attempt, Progress
from holdfast.names import DEFAULT_GROUP
from holdfast.status.dead import Body
from holdfast.status.finding import Finder, Found
from holdfast.status.payloads import payload_of
from holdfast.status.runs import RunFilter, RunInfo
from holdfast.status.trace import Step, Trace
from holdfast.status.trace import trace as tell
from holdfast.web.masking import MASK, hides, is_secret, masked_headers, masked_text
from holdfast.web.paths import run_of
from holdfast.web.services import Desk, OperatorDesk, ViewerDesk
from holdfast.web.wire import Cursor, Limit, answer, as_value, raw, reads, returns, takes, when

router = APIRouter(tags=["runs"])

WAIT_MOST = 30.0
SEARCH_MOST = 2_000
"""What a story's consequences are searched among: the newest so many."""

RunPart = Annotated[
    str,
    Path(
        alias="run",
        min_length=1,
        max_length=400,
        pattern=r"^[a-zA-Z0-9_=~-]+$",
        description="The run's id, with `~` for each `/`.",
    ),
]


class Enqueue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run to be sent."""

    job: str
    payload: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Its payload, any JSON; left out: no arguments."""
    group: str | None = None
    """The group of its workers; left out: the job's own, or `default`."""
    key: str | None = None
    """Two runs of one job and key are one run."""
    delay: str | float | None = None
    """Start it after so many seconds, or `10m`."""
    at: str | float | None = None
    """Start it at a time: 2026-11-16T01:45:00Z, or seconds since 1970."""
    headers: dict[str, str] = {}


class Accepted(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run that was stored."""

    run: str
    job: str
    group: str
    duplicate: bool
    """The key was known: nothing new was sent."""
    hint: str = ""
    """A sentence when no worker has ever served the job: the run waits until one does."""


class RunPageOut(msgspec.Struct, frozen=True):
    """A part of the list of runs, newest change first."""

    items: list[RunInfo]
    next: str
    """The cursor of the next page; empty: this was the last."""
    looked: int
    """How many were looked at; a filter that few match may give a short page that goes on."""


class RunShown(msgspec.Struct, frozen=True):
    """All about one run."""

    info: RunInfo
    where: str
    """A sentence: where it is, and what will happen to it."""
    attempts: tuple[Attempt, ...] = ()
    progress: Progress | None = None
    payload: Body | None = None
    """Its payload, while it is kept."""
    headers: dict[str, str] = {}
    dead_letter: int = 0


class Result(msgspec.Struct, frozen=True):
    """How a run ended, or that it has not."""

    run: str
    state: str
    result: Any = None
    error: str = ""


class Cancelled(msgspec.Struct, frozen=True):
    """Whether a run was cancelled; if not, it had ended."""

    run: str
    cancelled: bool


class Retried(msgspec.Struct, frozen=True):
    """What was done to run it again."""

    run: str
    detail: str


@router.post("/runs", summary="Enqueue a run", **takes(Enqueue), **returns(Accepted, 201))
async def enqueue(
    request: Request, desk: OperatorDesk, wanted: Annotated[Enqueue, Depends(reads(Enqueue))]
) -> Response:
    """The run is stored when this answers. With your app given to `holdfast web`, its payload is
    checked by the job's own parameters first. A job that no worker has ever served is taken too:
    `hint` says so."""
    from holdfast.durations import instant

    spec = _spec(desk, wanted)
    made = make_request(
        spec,
        raw(wanted.payload),
        key=wanted.key,
        delay=wanted.delay,
        at=instant(wanted.at, "at") if wanted.at is not None else None,
        headers=dict(wanted.headers),
        group=wanted.group,
    )
    done = await desk.client.enqueue(made)
    await desk.audit.write("enqueue", runs=[done.run], group=made.group, job=spec.name)
    hint = await desk.jobs.unserved(spec.name, made.group)
    return answer(request, Accepted(done.run, spec.name, made.group, done.duplicate, hint), 201)


def _spec(desk: Desk, wanted: Enqueue) -> JobSpec:
    app = desk.services.app
    job = app.jobs.get(wanted.job) if app else None
    if job is None:
        return JobSpec(wanted.job, wanted.group or DEFAULT_GROUP)
    job.signature.decode(raw(wanted.payload))
    return job.spec


@router.get("/runs", summary="List runs", **returns(RunPageOut))
async def list_runs(
    request: Request,
    desk: ViewerDesk,
    job: str = "",
    group: str = "",
    state: Annotated[str, Query(description="queued, delayed, running, failed, done, …")] = "",
    node: Annotated[str, Query(description="Running there.")] = "",
    prefix: Annotated[str, Query(description="How its id or key begins.")] = "",
    since: Annotated[str, Query(description="Changed in the last 10m, or since a time.")] = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """Newest change first. A page is bounded: it may be short and still have a `next`."""
    at = when(since, desk.client.broker.server_now(), "since")
    wanted = RunFilter(job, group, state, node, prefix, at)
    page = await desk.run_pages.page(wanted, limit, cursor)
    items = [_info(desk, run) for run in page.runs]
    return answer(request, RunPageOut(items, page.older, page.looked))


def _info(desk: Desk, info: RunInfo) -> RunInfo:
    if not info.error or not hides(desk.user):
        return info
    return msgspec.structs.replace(info, error=masked_text(info.error))


@router.get("/runs/{run}", summary="Show a run", **returns(RunShown))
async def show(request: Request, desk: ViewerDesk, part: RunPart) -> Response:
    """Its record, where it is, and its payload while that is kept."""
    found = await Finder(desk.client).find(run_of(part))
    detail = await desk.runs.describe(found)
    body, headers = await _payload(desk, found, detail.info.job)
    attempts = detail.record.attempts if detail.record else ()
    if hides(desk.user):
        headers = masked_headers(headers)
        attempts = tuple(msgspec.structs.replace(a, error=masked_text(a.error)) for a in attempts)
    progress = detail.record.progress if detail.record else None
    return answer(
        request,
        RunShown(
            _info(desk, detail.info),
            detail.where,
            attempts,
            progress,
            body,
            headers,
            detail.dead_letter,
        ),
    )


async def _payload(desk: Desk, found: Found, job: str) -> tuple[Body | None, dict[str, str]]:
    try:
        payload = await payload_of(desk.client, found)
    except NotFound:  # it has just been removed
        payload = None
    return (await desk.read(payload[0], job), payload[1]) if payload else (None, {})


@router.get(
    "/runs/{run}/result",
    summary="How a run ended",
    **returns(Result, also={202: "It has not ended yet."}),
)
async def result(
    request: Request,
    desk: ViewerDesk,
    part: RunPart,
    wait: Annotated[
        float, Query(ge=0, le=WAIT_MOST, description="Wait so many seconds for its end.")
    ] = 0.0,
) -> Response:
    """What its handler returned; 202 while it has not ended."""
    run = run_of(part)
    record = await desk.client.read(run)
    if record is None:
        await Finder(desk.client).find(run)  # raises when there is no trace of it
    if wait and (record is None or not record.terminal):
        try:
            record = await desk.client.wait(run, 0, wait)
        except (TimeoutError, RunNotFound, NoRecord):
            record = await desk.client.read(run)
    if record is None or not record.terminal:
        return answer(request, Result(run, record.state if record else "queued"), 202)
    value: Any = None
    if record.state == "done":
        value = as_value(await desk.client.result_bytes(record))
    error = record.error
    if hides(desk.user):
        bare = is_secret(record.job) and not isinstance(value, dict)
        value, error = MASK if bare else value, masked_text(error)
    return answer(request, Result(run, record.state, value, error))


@router.get("/runs/{run}/trace", summary="A run's story", **returns(Trace))
async def trace(request: Request, desk: ViewerDesk, part: RunPart) -> Response:
    """Every attempt, its end, and what it caused."""
    story = await tell(desk.client, run_of(part), SEARCH_MOST)
    if hides(desk.user):
        steps = [_step(step) for step in story.steps]
        story = msgspec.structs.replace(story, steps=steps)
    return answer(request, story)


def _step(step: Step) -> Step:
    return msgspec.structs.replace(
        step, error=masked_text(step.error), detail=masked_text(step.detail)
    )


@router.post("/runs/{run}/cancel", summary="Cancel a run", **returns(Cancelled))
async def cancel(request: Request, desk: OperatorDesk, part: RunPart) -> Response:
    """Queued, delayed, waiting for a retry or running."""
    run = run_of(part)
    return answer(request, Cancelled(run, await desk.runs.cancel(run)))


@router.post("/runs/{run}/retry", summary="Run it again", **returns(Retried))
async def retry(request: Request, desk: OperatorDesk, part: RunPart) -> Response:
    """A dead or lost run is sent again; a failed one starts its next attempt now."""
    run = run_of(part)
    return answer(request, Retried(run, await desk.runs.retry(run)))
