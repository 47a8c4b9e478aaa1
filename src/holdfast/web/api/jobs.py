"""Jobs: their queues; pause, resume, purge."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Path, Request
from starlette.responses import Response

from holdfast.errors import UnknownJob
from holdfast.names import check_name
from holdfast.status import actions as table
from holdfast.status.jobs import JobInfo, Purged, Which, check_which
from holdfast.web.services import Access, ViewerAccess, acting
from holdfast.web.wire import Cursor, Limit, Page, answer, does, page_of, reads, returns, takes

router = APIRouter(tags=["jobs"])

Group = Annotated[str, Path(max_length=64)]
Job = Annotated[str, Path(max_length=64)]


class JobShown(msgspec.Struct, frozen=True):
    """A job; with its parameters and doc if `holdfast web` was given the app."""

    info: JobInfo
    parameters: tuple[str, ...] | None = None
    """The names of its parameters; null if its code is not known here."""
    doc: str = ""


class Purge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which runs of a job to delete."""

    which: Which
    """`waiting` in the queue, `parked` until due, or `all`."""


@router.get("/jobs", summary="List jobs", **returns(Page[JobInfo]))
async def list_jobs(
    request: Request,
    access: ViewerAccess,
    job: str = "",
    group: str = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """Every job that a worker has served or a run was sent to, by group and name."""
    found = await access.jobs.list(_checked(job, "job"), _checked(group, "group"))
    return answer(request, page_of(found, lambda j: f"{j.group}/{j.job}", limit, cursor))


def _checked(name: str, what: str) -> str:
    return check_name(name, what) if name else ""


@router.get("/jobs/{group}/{job}", summary="Show a job", **returns(JobShown))
async def show(request: Request, access: ViewerAccess, group: Group, job: Job) -> Response:
    """Its queue and its parameters."""
    info = await _info(access, group, job)
    app = access.services.app
    known = app.jobs.get(job) if app else None
    if known is None or known.spec.group != group:
        return answer(request, JobShown(info))
    doc = (known.func.__doc__ or "").strip()
    return answer(request, JobShown(info, known.signature.parameters, doc))


async def _info(access: Access, group: str, job: str) -> JobInfo:
    found = await access.jobs.list(check_name(job, "job"), check_name(group, "group"))
    if found:
        return found[0]
    app = access.services.app
    known = app.jobs.get(job) if app else None
    if known and known.spec.group == group:
        return JobInfo(group, job)
    raise UnknownJob(f"no job {job!r} in group {group!r}: see /api/v1/jobs")


@router.post("/jobs/{group}/{job}/pause", summary="Pause a job", **does(table.pause_job, JobInfo))
async def pause(
    request: Request, access: Annotated[Access, acting(table.pause_job)], group: Group, job: Job
) -> Response:
    done = await table.pause_job(access, check_name(job, "job"), check_name(group, "group"))
    return answer(request, done[0])


@router.post(
    "/jobs/{group}/{job}/resume", summary="Resume a job", **does(table.resume_job, JobInfo)
)
async def resume(
    request: Request, access: Annotated[Access, acting(table.resume_job)], group: Group, job: Job
) -> Response:
    done = await table.resume_job(access, check_name(job, "job"), check_name(group, "group"))
    return answer(request, done[0])


@router.post(
    "/jobs/{group}/{job}/purge",
    summary="Purge a job",
    **takes(Purge),
    **does(table.purge_job, Purged),
)
async def purge(
    request: Request,
    access: Annotated[Access, acting(table.purge_job)],
    group: Group,
    job: Job,
    wanted: Annotated[Purge, Depends(reads(Purge))],
) -> Response:
    names = check_name(job, "job"), check_name(group, "group")
    return answer(request, (await table.purge_job(access, *names, check_which(wanted.which)))[0])
