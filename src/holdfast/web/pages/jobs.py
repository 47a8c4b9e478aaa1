"""`/jobs`: every job and its queue; and one job with its history, its runs and a form to run it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from holdfast.client.run import make_request
from holdfast.errors import InvalidInput, UnknownJob
from holdfast.model.job import JobSpec
from holdfast.model.lifecycle import ALIVE
from holdfast.model.run import fingerprint
from holdfast.payload import published
from holdfast.payload.published import Published
from holdfast.status.actions import enqueue
from holdfast.status.jobs import JobInfo
from holdfast.status.listing import RunFilter, RunInfo
from holdfast.status.totals import Change, Counted
from holdfast.web.pages import charts, job_form
from holdfast.web.pages.request import COUNTED_SECONDS, OperatorPage, PageRequest, ViewerPage
from holdfast.web.security import Fields

router = APIRouter(include_in_schema=False)

SHOWN: Final = 200
"""Rows of one page; to find others, the filter is faster."""
RANGES: Final = {"15m": 900, "1h": 3_600, "24h": 86_400, "7d": 604_800, "30d": 2_592_000}
PARTS: Final = {"15m": 60, "1h": 60, "24h": 1_800, "7d": 10_800, "30d": 43_200}
"""How many seconds a bar stands for: about sixty bars fit the width of a chart."""
SLOWEST: Final = 5
"""Rows of the slowest runs and of the kinds of error."""
LOOKED: Final = 20_000
"""How many ended runs are examined for these lists: bounds the time of the page."""
CHANGED: Final = 1.25
"""A smaller change of a percentile is within the steps in which durations are counted."""
LATEST: Final = 10
"""Runs on a job's page: enough to see whether it works now."""


@router.get("/jobs")
async def list_jobs(page: ViewerPage, q: str = "") -> Response:
    """The jobs whose name or group contains `q`."""
    every = await page.all_jobs()
    found = [j for j in every if q.lower() in f"{j.group}/{j.job}".lower()]
    ending = await page.trends()
    states = await page.states()
    alive = {n.group for n in await page.all_nodes() if n.role == "worker" and n.state == "RUNNING"}
    return await page.show(
        "jobs.html",
        "jobs",
        jobs=found[:SHOWN],
        count=len(found),
        every=len(every),
        q=q,
        alive=alive,
        trends={
            home: (charts.spark(values), sum(values))
            for home, values in ending.items()
            if any(values)
        },
        loads={(j.group, j.job): load(j, states) for j in found[:SHOWN]},
        paces={home: pace(change) for home, change in (await page.changes()).items()},
    )


def pace(change: Change) -> tuple[str, str]:
    """What 95 % of a job's runs took at most in the last seven days, and how that has changed."""
    if not change.now.runs:
        return "", ""
    ratio = change.slower
    told = "slower" if ratio >= CHANGED else "faster" if 0 < ratio <= 1 / CHANGED else ""
    factor = ratio if ratio >= 1 else 1 / ratio if ratio else 0.0
    return charts.brief(change.now.p95), f"{factor:.1f}× {told}" if told else ""


class Load(NamedTuple):
    """Runs that a job's workers hold: the server only knows the sum of both kinds, as in flight."""

    running: int
    retrying: int
    """How many wait for their next attempt."""


def load(job: JobInfo, states: Counter[tuple[str, str, str]] | None) -> Load:
    """Separate running runs from those that wait for a retry, as far as there are records."""
    if states is None:
        return Load(job.in_flight, 0)
    running, retrying = (states[job.group, job.job, s] for s in ("running", "failed"))
    return Load(running, retrying) if running or retrying else Load(job.in_flight, 0)


# ---- one job


@router.get("/jobs/{group}/{job}")
async def show(page: ViewerPage, group: str, job: str, range: str = "24h") -> Response:
    """One job."""
    return await _job(page, group, job, range)


async def _job(
    page: PageRequest,
    group: str,
    job: str,
    range: str = "24h",
    given: Mapping[str, str] | None = None,
    wrong: str = "",
) -> Response:
    info = next((j for j in await page.all_jobs() if (j.group, j.job) == (group, job)), None)
    if info is None:
        raise UnknownJob(
            f"no job {job!r} in group {group!r}: no worker has served it, and no run was sent to it"
        )
    chosen = range if range in RANGES else "24h"
    seconds = RANGES[chosen]
    history = await ended(page, chosen, job, group)
    latest = await page.run_pages.page(RunFilter(job, group), LATEST, "")
    parameters = await page.jobs.published(job, group)
    answer = await page.show(
        "job.html",
        "jobs",
        info=info,
        workers=[
            n
            for n in await page.all_nodes()
            if n.group == group and job in n.jobs and n.state in ALIVE
        ],
        schedules=[s for s in await page.all_schedules() if (s.group, s.job) == (group, job)],
        throughput=charts.ended(history, page.now, seconds),
        took=charts.spread(history, page.now, seconds, lambda period: period.took),
        waited=charts.spread(history, page.now, seconds, lambda period: period.waited),
        total=sum(sum(period.ended.values()) for period in history.periods),
        behind=history.behind(page.now),
        made_up=history.made_up,
        lag=charts.lag(history, page.now, seconds),
        load=load(info, await page.states()),
        latest=latest.runs,
        recent=recent(page, job, group, page.now - seconds),
        parameters=parameters,
        fields=job_form.fields_of(parameters, given),
        given=(given or {}).get("payload") or sample(parameters),
        as_json="payload" in (given or {}),
        options=parameters.options if parameters else {},
        wrong=wrong,
        ranges=list(RANGES),
        chosen=chosen,
    )
    answer.status_code = 422 if wrong else 200
    return answer


class Recent(NamedTuple):
    """A summary of the newest ended runs of a job."""

    looked: int
    slowest: list[RunInfo]
    errors: list[tuple[str, int, RunInfo]]
    """Kinds of error with their counts, and the newest run with each."""


def recent(page: PageRequest, job: str, group: str, since: float) -> Recent:
    """The slowest runs and the kinds of error of a job, among the newest that have ended."""
    index = page.services.ended_index
    index.start()
    found, _ = index.select(RunFilter(job, group, since=since), LOOKED)
    infos = [info for _, info in found]
    timed = [info for info in infos if info.started]
    slowest = sorted(timed, key=lambda info: info.started - info.ended)[:SLOWEST]
    kinds: dict[str, list[RunInfo]] = {}
    for info in infos:
        if info.error and info.state != "done":
            kinds.setdefault(fingerprint(info.error), []).append(info)
    errors = [(page.text(one[0].error), len(one), one[0]) for one in kinds.values()]
    errors.sort(key=lambda error: -error[1])
    return Recent(len(infos), slowest, errors[:SLOWEST])


async def ended(page: PageRequest, chosen: str, job: str = "", group: str = "") -> Counted:
    """How runs ended in one of the ranges, of one job or of all."""
    return await page.shared(
        f"counted {group} {job} {chosen}",
        COUNTED_SECONDS,
        lambda: page.services.archive.counted(RANGES[chosen], job, group, part=PARTS[chosen]),
    )


@router.post("/do/runs/enqueue")
async def run(page: OperatorPage, fields: Fields) -> Response:
    """Send a run with the payload of the form; or show what is wrong with it."""
    group, job = fields.get("group", ""), fields.get("job", "")
    try:
        request = make_request(JobSpec(job, group), await _body(page, group, job, fields))
        await page.jobs.check(job, group, request.body)
    except InvalidInput as error:
        return await _job(page, group, job, given=fields, wrong=str(error))
    done = await enqueue(page, request)
    return page.done(f"/runs/{done.run}", f"run {done.run} was sent")


async def _body(page: PageRequest, group: str, job: str, fields: Mapping[str, str]) -> bytes:
    """The payload, from the fields of the form or from its text."""
    if "payload" in fields:
        return checked(fields["payload"])
    parameters = await page.jobs.published(job, group)
    return job_form.payload(parameters, fields) if parameters else b""


def checked(text: str) -> bytes:
    """The payload of a form; `InvalidInput` unless it is JSON."""
    try:
        json.loads(text or "null")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the payload must be JSON ({error})") from None
    return text.encode()


def sample(parameters: Published | None) -> str:
    """A payload to start from, as text."""
    found = published.sample(parameters) if parameters else msgspec.UNSET
    if found is msgspec.UNSET:
        return ""
    return json.dumps(found, indent=2 if isinstance(found, dict) else None)
