"""`/`: the overview: problems, throughput, waiting runs, and what runs next."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from holdfast.model.lifecycle import ALIVE
from holdfast.model.schedule import Schedule
from holdfast.status.dead import DeadFilter, dead_since
from holdfast.status.jobs import JobInfo
from holdfast.status.nodes import NodeInfo, by_role
from holdfast.status.schedules import coming, overdue_since
from holdfast.web.pages import charts, jobs
from holdfast.web.pages.rendering import many, span
from holdfast.web.pages.request import ViewerPage

router = APIRouter(include_in_schema=False)

RANGES: Final = jobs.RANGES
SHOWN: Final = 6
"""Rows of each list: the overview fits one screen."""
OLD_SECONDS: Final = 60.0
"""A run that waits longer than this needs attention; usual waits are far below a second."""
RECENT_SECONDS: Final = 3600.0
"""Older problems are only on their own page."""
RATE_RANGE: Final = "15m"
"""The period of the throughput: long enough to smooth out bursts."""
TROUBLE: Final = ("DISCONNECTED", "ERROR")


class Finding(msgspec.Struct, frozen=True):
    """Something that needs attention."""

    level: str
    text: str
    path: str


@router.get("/")
async def overview(page: ViewerPage, range: str = "15m") -> Response:
    """The overview page."""
    chosen = range if range in RANGES else "15m"
    seconds = RANGES[chosen]
    hour_ago = page.now - RECENT_SECONDS
    every, nodes, schedules, progress, letters, died = await asyncio.gather(
        page.all_jobs(),
        page.all_nodes(),
        page.all_schedules(),
        page.slots.progress(),
        page.dead.list(DeadFilter(since=hour_ago), SHOWN),
        dead_since(page.client, hour_ago),
    )
    now, history = page.now, await jobs.ended(page, chosen)
    ends, states = history.ends(), await page.states()
    overdue = overdue_since(schedules, progress.watermark, now)
    recent = sum(
        sum(period.ended.values()) for period in (await jobs.ended(page, RATE_RANGE)).periods
    )
    busiest = sorted(every, key=lambda j: -(j.waiting + j.in_flight))[:SHOWN]
    return await page.show(
        "overview.html",
        "overview",
        findings=findings(every, nodes, schedules, overdue, died),
        jobs=busiest,
        loads={(j.group, j.job): jobs.load(j, states) for j in busiest},
        retrying=sum(n for key, n in (states or {}).items() if key[2] == "failed"),
        most=max((j.waiting + j.in_flight for j in every), default=0),
        waiting=sum(j.waiting for j in every),
        running=sum(n.running for n in nodes if n.role == "worker" and n.state in ALIVE),
        oldest=max((j for j in every if j.oldest_seconds), key=_age, default=None),
        per_minute=recent / (RANGES[RATE_RANGE] / 60),
        failed=sum(ends[kind] for kind in ("failed", "dead", "lost")),
        roles=by_role(nodes),
        due=coming(schedules, now),
        letters=letters,
        totals=await page.dead_totals(),
        throughput=charts.ended(history, now, seconds),
        lag=charts.lag(history, now, seconds),
        ranges=list(RANGES),
        chosen=chosen,
        behind=history.behind(now),
        made_up=history.made_up,
    )


def _age(job: JobInfo) -> float:
    return job.oldest_seconds or 0.0


# ---- problems


def findings(
    jobs: Sequence[JobInfo],
    nodes: Sequence[NodeInfo],
    schedules: Sequence[Schedule],
    overdue: float,
    died: int,
) -> list[Finding]:
    """What needs attention, the worst first."""
    found = [*_of_jobs(jobs, nodes), *_of_nodes(nodes)]
    if overdue:
        text = f"a slot is {span(overdue)} overdue: is 'holdfast scheduler' running?"
        found.append(Finding("bad", text, "/schedules"))
    if died:
        text = f"{many(died, 'dead letter')} in the last hour"
        found.append(Finding("warn", text, "/dead"))
    paused = [s for s in schedules if s.paused]
    if paused:
        found.append(Finding("note", f"{many(len(paused), 'schedule')} paused", "/schedules"))
    return sorted(found, key=lambda f: ("bad", "warn", "note").index(f.level))


def _of_jobs(jobs: Sequence[JobInfo], nodes: Sequence[NodeInfo]) -> list[Finding]:
    serving = {n.group for n in nodes if n.role == "worker" and n.state == "RUNNING"}
    stuck = Counter(dict[str, int]())
    for job in jobs:
        if job.waiting and job.group not in serving:
            stuck[job.group] += job.waiting
    found = [
        Finding(
            "bad",
            f"group {group} has {many(count, 'run')} waiting and no running worker: start one with "
            f"'holdfast worker APP{'' if group == 'default' else f' --group {group}'}'",
            f"/jobs?q={group}",
        )
        for group, count in stuck.items()
    ]
    found += [
        Finding(
            "warn",
            f"{j.job} has {many(j.waiting, 'run')} waiting, but no worker has ever served it: "
            "check its name, or start its worker",
            f"/jobs?q={j.job}",
        )
        for j in [j for j in jobs if j.waiting and not j.served and j.group in serving][:3]
    ]
    slow = [j for j in jobs if (j.oldest_seconds or 0) > OLD_SECONDS and j.group in serving]
    found += [
        Finding(
            "warn",
            f"the oldest run of {j.job} has been waiting for {span(_age(j))}",
            f"/jobs?q={j.job}",
        )
        for j in slow[:3]
        if not j.paused and j.served
    ]
    found += [
        Finding("warn", f"{j.job} is paused, with {many(j.waiting, 'run')} waiting", "/jobs")
        for j in jobs
        if j.paused and j.waiting
    ]
    return found


def _of_nodes(nodes: Sequence[NodeInfo]) -> list[Finding]:
    lost = [n for n in nodes if n.state in TROUBLE]
    found = [
        Finding("bad", f"{n.id} is {n.state}: {n.reason}", f"/cluster/{n.id}") for n in lost[:3]
    ]
    blocked = [n for n in nodes if n.trouble and n.state not in TROUBLE]
    found += [Finding("warn", f"{n.id}: {n.trouble}", f"/cluster/{n.id}") for n in blocked[:3]]
    if len(lost) > 3:
        found.append(Finding("bad", f"{len(lost) - 3} more nodes are in trouble", "/cluster"))
    alive = {n.role for n in nodes if n.state == "RUNNING"}
    if "worker" in alive and "coordinator" not in alive:
        text = "no coordinator is running, so dead workers are detected late: start one"
        found.append(Finding("warn", text, "/cluster"))
    return found
