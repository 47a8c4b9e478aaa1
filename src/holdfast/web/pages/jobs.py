"""`/jobs`: every job and its queue: what waits, what is in flight, and the switches."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends
from starlette.responses import Response

from holdfast.errors import UnknownJob
from holdfast.status.jobs import JobInfo, check_which
from holdfast.web.pages import charts
from holdfast.web.pages.rendering import Question, many
from holdfast.web.pages.visit import AdminVisit, OperatorVisit, ViewerVisit, Visit
from holdfast.web.security import checked_form

router = APIRouter(include_in_schema=False)
Fields = Annotated[dict[str, str], Depends(checked_form)]

SHOWN: Final = 200
TREND_SECONDS: Final = 900
TREND_PARTS: Final = 30


@router.get("/jobs")
async def list_jobs(visit: ViewerVisit, q: str = "") -> Response:
    """The jobs whose name or group has `q` in it."""
    every = await visit.jobs()
    found = [j for j in every if q.lower() in f"{j.group}/{j.job}".lower()]
    trends = visit.feed.rates.by_job(visit.now, TREND_SECONDS, TREND_PARTS)
    alive = {n.group for n in await visit.nodes() if n.role == "worker" and n.state == "RUNNING"}
    return await visit.show(
        "jobs.html",
        "jobs",
        jobs=found[:SHOWN],
        count=len(found),
        every=len(every),
        q=q,
        alive=alive,
        uncounted=visit.uncounted,
        trends={
            home: (charts.spark(values), sum(values))
            for home, values in trends.items()
            if any(values)
        },
    )


async def _job(visit: Visit, group: str, job: str) -> JobInfo:
    found = await visit.desk.jobs.list(job, group)
    if not found or not job or not group:
        raise UnknownJob(f"there is no job {job!r} in group {group!r}: see the list of jobs")
    return found[0]


# ---- pause and resume


@router.get("/do/jobs/pause")
async def ask_pause(visit: OperatorVisit, job: str, group: str) -> Response:
    """Say what a pause does."""
    info = await _job(visit, group, job)
    effects = [
        "No worker gets a new run of it, from the queue or from its events.",
        f"{many(info.in_flight, 'run')} in flight go on to their end.",
        "Runs that are sent meanwhile wait; nothing is lost.",
    ]
    return _ask(visit, f"Pause {job}?", effects, "Pause it", "pause", info)


@router.get("/do/jobs/resume")
async def ask_resume(visit: OperatorVisit, job: str, group: str) -> Response:
    """Say what a resume does."""
    info = await _job(visit, group, job)
    effects = [f"Workers get its runs again; {many(info.waiting, 'run')} waiting."]
    return _ask(visit, f"Resume {job}?", effects, "Resume it", "resume", info)


@router.get("/do/jobs/purge")
async def ask_purge(visit: AdminVisit, job: str, group: str) -> Response:
    """Say what a purge does."""
    info = await _job(visit, group, job)
    effects = [
        f"{many(info.waiting, 'run')} waiting and {many(info.parked, 'run')} put off until later "
        "are removed for good: they will not run, and their payloads are gone.",
        "What is in flight is left alone, and so are events.",
    ]
    return _ask(visit, f"Purge {job}?", effects, "Remove them for good", "purge", info, danger=True)


def _ask(
    visit: Visit,
    title: str,
    effects: list[str],
    button: str,
    verb: str,
    info: JobInfo,
    danger: bool = False,
) -> Response:
    fields = [("job", info.job), ("group", info.group)]
    question = Question(title, effects, button, f"/do/jobs/{verb}", fields, "/jobs", danger)
    return visit.ask(question, "jobs")


@router.post("/do/jobs/pause")
async def pause(visit: OperatorVisit, fields: Fields) -> Response:
    """Stop deliveries."""
    job, group = fields.get("job", ""), fields.get("group", "")
    await _job(visit, group, job)
    await visit.desk.jobs.pause(job, group)
    return visit.done("/jobs", f"{job} is paused")


@router.post("/do/jobs/resume")
async def resume(visit: OperatorVisit, fields: Fields) -> Response:
    """Let deliveries go on."""
    job, group = fields.get("job", ""), fields.get("group", "")
    await _job(visit, group, job)
    await visit.desk.jobs.resume(job, group)
    return visit.done("/jobs", f"{job} goes on")


@router.post("/do/jobs/purge")
async def purge(visit: AdminVisit, fields: Fields) -> Response:
    """Remove what has not started."""
    job, group = fields.get("job", ""), fields.get("group", "")
    await _job(visit, group, job)
    done = await visit.desk.jobs.purge(job, group, check_which(fields.get("which", "all")))
    count = sum(one.waiting + one.parked for one in done)
    return visit.done("/jobs", f"{many(count, 'run')} of {job} removed")
