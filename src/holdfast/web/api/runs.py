"""Runs: enqueue, list, show, result, logs, trace, cancel, retry."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from holdfast.client.run import OnDuplicate, make_request
from holdfast.durations import instant
from holdfast.errors import InvalidPayload, NoRecord, NotFound, RunNotFound
from holdfast.model.codec import MOST
from holdfast.model.job import JobSpec, Priority
from holdfast.model.run import Attempt, Progress
from holdfast.model.runlog import LogLine
from holdfast.names import DEFAULT_GROUP
from holdfast.payload.misfit import misfit
from holdfast.payload.published import published, read_label
from holdfast.status import actions as table
from holdfast.status.dead import Body
from holdfast.status.finding import Finder, Found, payload_of
from holdfast.status.listing import RunFilter, RunInfo
from holdfast.status.trace import Trace
from holdfast.status.trace import trace as trace_of
from holdfast.web.services import Access, ViewerAccess, acting
from holdfast.web.wire import (
    Cursor,
    Limit,
    RunPart,
    answer,
    as_value,
    does,
    raw,
    reads,
    returns,
    run_of,
    takes,
    when,
)

router = APIRouter(tags=["runs"])

WAIT_MOST = 30.0
"""Longest wait for a result: shorter than the timeout of usual proxies."""
SEARCH_MOST = 2_000
"""How many of the newest messages are searched for runs that a run caused: bounds the time of an
answer."""


class Enqueue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run to enqueue."""

    job: str
    payload: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Any JSON; leave out for no arguments."""
    group: str | None = None
    """The worker group; by default the job's own, or `default`."""
    key: str | None = None
    """Deduplication key: enqueuing the same job and key again returns the same run."""
    delay: str | float | None = None
    """Start after this many seconds, or e.g. `10m`."""
    at: str | float | None = None
    """Start at a time: 2026-11-16T01:45:00Z, or seconds since 1970."""
    headers: dict[str, str] = {}
    priority: Priority | None = None
    """Priority, instead of the job's own."""
    on_duplicate: OnDuplicate = "return"
    """If a run with the key exists: answer with it, replace it, or fail."""


class Accepted(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run that was stored."""

    run: str
    job: str
    group: str
    duplicate: bool
    """A run with this key exists: nothing was enqueued."""
    state: str = ""
    """The state of the earlier run with this key; otherwise `queued` or `delayed`."""
    hint: str = ""
    """Set if no worker has ever served the job: the run waits until one does."""


class RunPageOut(msgspec.Struct, frozen=True):
    """One page of runs, latest change first."""

    items: list[RunInfo]
    next: str
    """The cursor of the next page; empty on the last."""
    looked: int
    """How many were searched; if few match, a page may be short without being the last."""


class RunShown(msgspec.Struct, frozen=True):
    """Everything about one run."""

    info: RunInfo
    where: str
    """Where it is and what happens next, as a sentence."""
    attempts: tuple[Attempt, ...] = ()
    progress: Progress | None = None
    payload: Body | None = None
    """Its payload, as long as it is kept."""
    headers: dict[str, str] = {}
    dead_letter: int = 0


class Result(msgspec.Struct, frozen=True):
    """How a run ended, or its state if it has not."""

    run: str
    state: str
    result: Any = None
    error: str = ""


class LogsOut(msgspec.Struct, frozen=True):
    """Log lines of a run, oldest first."""

    items: list[LogLine]
    next: int
    """Pass it as `after` to get only newer lines."""


class Cancelled(msgspec.Struct, frozen=True):
    """Whether a run was cancelled; if not, it had already ended."""

    run: str
    cancelled: bool


class Retried(msgspec.Struct, frozen=True):
    """How the run was sent again."""

    run: str
    detail: str


@router.post(
    "/runs", summary="Enqueue a run", **takes(Enqueue), **does(table.enqueue, Accepted, 201)
)
async def enqueue(
    request: Request,
    access: Annotated[Access, acting(table.enqueue)],
    wanted: Annotated[Enqueue, Depends(reads(Enqueue))],
) -> Response:
    # The payload is checked first: by the user's app, or by what workers have published.
    spec, key = await _checked(access, wanted)
    made = make_request(
        spec,
        raw(wanted.payload),
        key=key,
        delay=wanted.delay,
        at=instant(wanted.at, "at") if wanted.at is not None else None,
        headers=dict(wanted.headers),
        group=wanted.group,
        priority=wanted.priority,
        on_duplicate=wanted.on_duplicate,
        key_follows=True,
    )
    done = await table.enqueue(access, made)
    hint = await access.jobs.unserved(spec.name, made.group)
    accepted = Accepted(done.run, spec.name, made.group, done.duplicate, done.state, hint)
    return answer(request, accepted, 201)


async def _checked(access: Access, wanted: Enqueue) -> tuple[JobSpec, str | None]:
    """The request for the job, with the run's key if it can be computed here."""
    app, body = access.services.app, raw(wanted.payload)
    job = app.jobs.get(wanted.job) if app else None
    if job is None:
        spec = JobSpec(wanted.job, wanted.group or DEFAULT_GROUP)
        if not wanted.group:
            await access.jobs.check_default_group(spec.name)
        await access.jobs.check(spec.name, spec.group, body)
        return spec, wanted.key
    try:
        bound = job.signature.decode(body)
    except InvalidPayload as error:
        known = read_label(published(job.signature))  # names the member that is misspelt
        raise InvalidPayload((known and misfit(known, body)) or str(error)) from None
    key = wanted.key
    return job.spec, job.key.of(bound) if job.key and key is None else key


@router.get("/runs", summary="List runs", **returns(RunPageOut))
async def list_runs(
    request: Request,
    access: ViewerAccess,
    job: str = "",
    group: str = "",
    state: Annotated[str, Query(description="queued, delayed, waiting, running, …")] = "",
    node: Annotated[str, Query(description="Only runs running on this node.")] = "",
    prefix: Annotated[str, Query(description="Only runs whose id or key starts with this.")] = "",
    since: Annotated[
        str, Query(description="Only runs changed in the last e.g. `10m`, or since a time.")
    ] = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """Latest change first. A page may be short, even empty, and still have a `next`."""
    at = when(since, access.client.broker.server_now(), "since")
    wanted = RunFilter(job, group, state, node, prefix, at)
    page = await access.run_pages.page(wanted, limit, cursor)
    items = [access.masked(run, "error") for run in page.runs]
    return answer(request, RunPageOut(items, page.older, page.looked))


@router.get("/runs/{run}", summary="Show a run", **returns(RunShown))
async def show(request: Request, access: ViewerAccess, part: RunPart) -> Response:
    """Its record, where it is, and its payload as long as that is kept."""
    found = await Finder(access.client).find(run_of(part))
    detail = await access.runs.describe(found)
    body, headers = await _payload(access, found, detail.info.job)
    attempts = detail.record.attempts if detail.record else ()
    shown = RunShown(
        access.masked(detail.info, "error"),
        detail.where,
        tuple(access.masked(attempt, "error") for attempt in attempts),
        detail.record.progress if detail.record else None,
        body,
        access.headers(headers),
        detail.dead_letter,
    )
    return answer(request, shown)


async def _payload(access: Access, found: Found, job: str) -> tuple[Body | None, dict[str, str]]:
    try:
        payload = await payload_of(access.client, found)
    except NotFound:  # just removed
        payload = None
    return (await access.read(payload[0], job), payload[1]) if payload else (None, {})


@router.get(
    "/runs/{run}/result",
    summary="Get a run's result",
    **returns(Result, also={202: "The run has not ended yet."}),
)
async def result(
    request: Request,
    access: ViewerAccess,
    part: RunPart,
    wait: Annotated[
        float, Query(ge=0, le=WAIT_MOST, description="Wait up to N seconds for the run to end.")
    ] = 0.0,
) -> Response:
    """What its handler returned; 202 if the run has not ended."""
    run = run_of(part)
    record = await access.client.read(run)
    if record is None:
        record = (await Finder(access.client).find(run)).record  # raises if there is no trace
    if wait and (record is None or not record.terminal):
        try:
            record = await access.client.wait(run, 0, wait)
        except (TimeoutError, RunNotFound, NoRecord):
            record = await access.client.read(run)
    if record is None or not record.terminal:
        return answer(request, Result(run, record.state if record else "queued"), 202)
    value: Any = None
    if record.state == "done":
        value = as_value(await access.client.result_bytes(record))
    value = await access.result(value, record.job)
    return answer(request, Result(run, record.state, value, access.text(record.error)))


@router.get("/runs/{run}/logs", summary="Get a run's log lines", **returns(LogsOut))
async def logs(
    request: Request,
    access: ViewerAccess,
    part: RunPart,
    after: Annotated[int, Query(ge=0, le=MOST, description="Only newer lines: `next`.")] = 0,
) -> Response:
    """What its handler has logged and printed, in all attempts; the newest lines are kept."""
    lines = await access.log_lines(run_of(part), after)
    return answer(request, LogsOut(lines, lines[-1].position if lines else after))


@router.get("/runs/{run}/trace", summary="Trace a run", **returns(Trace))
async def trace(request: Request, access: ViewerAccess, part: RunPart) -> Response:
    """Every attempt, how it ended, and what it led to."""
    found = await trace_of(access.client, run_of(part), SEARCH_MOST)
    steps = [access.masked(step, "error", "detail") for step in found.steps]
    return answer(request, msgspec.structs.replace(found, steps=steps))


@router.post("/runs/{run}/cancel", summary="Cancel a run", **does(table.cancel_run, Cancelled))
async def cancel(
    request: Request, access: Annotated[Access, acting(table.cancel_run)], part: RunPart
) -> Response:
    run = run_of(part)
    return answer(request, Cancelled(run, await table.cancel_run(access, run)))


@router.post("/runs/{run}/retry", summary="Retry a run", **does(table.retry_run, Retried))
async def retry(
    request: Request, access: Annotated[Access, acting(table.retry_run)], part: RunPart
) -> Response:
    run = run_of(part)
    return answer(request, Retried(run, await table.retry_run(access, run)))
