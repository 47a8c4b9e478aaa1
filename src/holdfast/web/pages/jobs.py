"""`/jobs`: every job and its queue; pause, resume and purge."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from holdfast.errors import UnknownJob
from holdfast.status.jobs import JobInfo, check_which
from holdfast.web.pages import charts
from holdfast.web.pages.rendering import Question, many
from holdfast.web.pages.request import AdminPage, OperatorPage, PageRequest, ViewerPage
from holdfast.web.security import Fields

router = APIRouter(include_in_schema=False)

SHOWN: Final = 200
TREND_SECONDS: Final = 900
TREND_PARTS: Final = 30


@router.get("/jobs")
async def list_jobs(page: ViewerPage, q: str = "") -> Response:
    """The jobs whose name or group contains `q`."""
    every = await page.all_jobs()
    found = [j for j in every if q.lower() in f"{j.group}/{j.job}".lower()]
    trends = page.feed.rates.by_job(page.now, TREND_SECONDS, TREND_PARTS)
    alive = {n.group for n in await page.all_nodes() if n.role == "worker" and n.state == "RUNNING"}
    return await page.show(
        "jobs.html",
        "jobs",
        jobs=found[:SHOWN],
        count=len(found),
        every=len(every),
        q=q,
        alive=alive,
        uncounted=page.uncounted,
        trends={
            home: (charts.spark(values), sum(values))
            for home, values in trends.items()
            if any(values)
        },
    )


async def _job(page: PageRequest, group: str, job: str) -> JobInfo:
    found = await page.jobs.list(job, group)
    if not found or not job or not group:
        raise UnknownJob(f"there is no job {job!r} in group {group!r}: see the list of jobs")
    return found[0]


# ---- pause and resume


@router.get("/do/jobs/pause")
async def ask_pause(page: OperatorPage, job: str, group: str) -> Response:
    """Say what a pause does."""
    info = await _job(page, group, job)
    effects = [
        "No worker gets a new run of it, from the queue or from its events.",
        f"{many(info.in_flight, 'run')} in flight go on to their end.",
        "Runs that are sent meanwhile wait; nothing is lost.",
    ]
    return _ask(page, f"Pause {job}?", effects, "Pause it", "pause", info)


@router.get("/do/jobs/resume")
async def ask_resume(page: OperatorPage, job: str, group: str) -> Response:
    """Say what a resume does."""
    info = await _job(page, group, job)
    effects = [f"Workers get its runs again; {many(info.waiting, 'run')} waiting."]
    return _ask(page, f"Resume {job}?", effects, "Resume it", "resume", info)


@router.get("/do/jobs/purge")
async def ask_purge(page: AdminPage, job: str, group: str) -> Response:
    """Say what a purge does."""
    info = await _job(page, group, job)
    effects = [
        f"{many(info.waiting, 'run')} waiting and {many(info.parked, 'run')} put off until later "
        "are removed for good: they will not run, and their payloads are gone.",
        "What is in flight is left alone, and so are events.",
    ]
    return _ask(page, f"Purge {job}?", effects, "Remove them for good", "purge", info, danger=True)


def _ask(
    page: PageRequest,
    title: str,
    effects: list[str],
    button: str,
    verb: str,
    info: JobInfo,
    danger: bool = False,
) -> Response:
    fields = [("job", info.job), ("group", info.group)]
    question = Question(title, effects, button, f"/do/jobs/{verb}", fields, "/jobs", danger)
    return page.ask(question, "jobs")


@router.post("/do/jobs/pause")
async def pause(page: OperatorPage, fields: Fields) -> Response:
    """Stop deliveries."""
    job, group = fields.get("job", ""), fields.get("group", "")
    await _job(page, group, job)
    await page.jobs.pause(job, group)
    return page.done("/jobs", f"{job} is paused")


@router.post("/do/jobs/resume")
async def resume(page: OperatorPage, fields: Fields) -> Response:
    """Let deliveries go on."""
    job, group = fields.get("job", ""), fields.get("group", "")
    await _job(page, group, job)
    await page.jobs.resume(job, group)
    return page.done("/jobs", f"{job} goes on")


@router.post("/do/jobs/purge")
async def purge(page: AdminPage, fields: Fields) -> Response:
    """Remove what has not started."""
    job, group = fields.get("job", ""), fields.get("group", "")
    await _job(page, group, job)
    done = await page.jobs.purge(job, group, check_which(fields.get("which", "all")))
    count = sum(one.waiting + one.parked for one in done)
    return page.done("/jobs", f"{many(count, 'run')} of {job} removed")
