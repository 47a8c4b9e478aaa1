"""Jobs: what waits for each, pause, resume, purge."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Path, Request
from starlette.responses import Response

from holdfast.errors import UnknownJob
from holdfast.names import check_name
from holdfast.status.jobs import JobInfo, Purged, Which, check_which
from holdfast.web.services import AdminDesk, Desk, OperatorDesk, ViewerDesk
from holdfast.web.wire import Cursor, Limit, Page, answer, page_of, reads, returns, takes

router = APIRouter(tags=["jobs"])

Group = Annotated[str, Path(max_length=64)]
Job = Annotated[str, Path(max_length=64)]


class JobShown(msgspec.Struct, frozen=True):
    """A job, and what its code says when `holdfast web` was given the app."""

    info: JobInfo
    parameters: tuple[str, ...] | None = None
    """The names of its payload's members; None: its code is not known here."""
    doc: str = ""


class Purge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which runs of a job to remove for good."""

    which: Which
    """`waiting` in its queue, `parked` until they are due, or `all`."""


@router.get("/jobs", summary="List jobs", **returns(Page[JobInfo]))
async def list_jobs(
    request: Request,
    desk: ViewerDesk,
    job: str = "",
    group: str = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """Every job that a worker has served, or that something was sent to, by group and name."""
    found = await desk.jobs.list(_checked(job, "job"), _checked(group, "group"))
    return answer(request, page_of(found, lambda j: f"{j.group}/{j.job}", limit, cursor))


def _checked(name: str, what: str) -> str:
    return check_name(name, what) if name else ""


@router.get("/jobs/{group}/{job}", summary="Show a job", **returns(JobShown))
async def show(request: Request, desk: ViewerDesk, group: Group, job: Job) -> Response:
    """Its numbers, and its parameters."""
    info = await _info(desk, group, job)
    app = desk.services.app
    known = app.jobs.get(job) if app else None
    if known is None or known.spec.group != group:
        return answer(request, JobShown(info))
    doc = (known.func.__doc__ or "").strip()
    return answer(request, JobShown(info, known.signature.parameters, doc))


async def _info(desk: Desk, group: str, job: str) -> JobInfo:
    found = await desk.jobs.list(check_name(job, "job"), check_name(group, "group"))
    if found:
        return found[0]
    app = desk.services.app
    known = app.jobs.get(job) if app else None
    if known and known.spec.group == group:
        return JobInfo(group, job)
    raise UnknownJob(f"there is no job {job!r} in group {group!r}: /api/v1/jobs lists them")


@router.post("/jobs/{group}/{job}/pause", summary="Pause a job", **returns(JobInfo))
async def pause(request: Request, desk: OperatorDesk, group: Group, job: Job) -> Response:
    """Nothing more is delivered; what is running goes on."""
    check_name(group, "group")
    return answer(request, (await desk.jobs.pause(check_name(job, "job"), group))[0])


@router.post("/jobs/{group}/{job}/resume", summary="Resume a job", **returns(JobInfo))
async def resume(request: Request, desk: OperatorDesk, group: Group, job: Job) -> Response:
    """Deliveries go on."""
    check_name(group, "group")
    return answer(request, (await desk.jobs.resume(check_name(job, "job"), group))[0])


@router.post("/jobs/{group}/{job}/purge", summary="Purge a job", **takes(Purge), **returns(Purged))
async def purge(
    request: Request,
    desk: AdminDesk,
    group: Group,
    job: Job,
    wanted: Annotated[Purge, Depends(reads(Purge))],
) -> Response:
    """Remove its runs that have not started, for good."""
    check_name(group, "group")
    which = check_which(wanted.which)
    return answer(request, (await desk.jobs.purge(check_name(job, "job"), group, which))[0])
