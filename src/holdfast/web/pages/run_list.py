"""`/runs`: the list of runs, filtered by state, time and content; the filters are in its address.

The counts of the tabs come from the server's own counts where they are exact: queues, records that
have not ended, and the totals of the history over the chosen time. A tab whose count is not known,
or not for these filters, has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from holdfast.errors import InvalidInput
from holdfast.status.jobs import JobInfo
from holdfast.status.listing import STATES, RunFilter, RunInfo
from holdfast.status.searching import member
from holdfast.web.bulks import VERBS
from holdfast.web.pages import jobs
from holdfast.web.pages.request import PageRequest, ViewerPage
from holdfast.web.services import Access
from holdfast.web.wire import when

router = APIRouter(include_in_schema=False)

SHOWN: Final = 50
"""Rows of one page."""
RANGES: Final = ("15m", "1h", "24h", "7d", "30d")
ENDED: Final = ("done", "cancelled", "dead", "lost")
BULK: Final = {"cancel": "Cancel …", "retry": "Run again …"}
"""What is offered for all runs that match."""


class Wanted(msgspec.Struct, frozen=True):
    """The filters of the list, as in its address."""

    q: str = ""
    job: str = ""
    group: str = ""
    state: str = ""
    node: str = ""
    prefix: str = ""
    cause: str = ""
    since: str = ""
    until: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Wanted:
        """The filters among the fields of a form or an address."""
        return cls(**{name: given.get(name, "").strip() for name in cls.__struct_fields__})

    @property
    def empty(self) -> bool:
        return not any(msgspec.structs.astuple(self))

    @property
    def narrow(self) -> bool:
        """Whether it has filters that the counts cannot take into account."""
        return bool(self.q or self.node or self.prefix or self.cause or self.until)

    def filter(self, by: Access, now: float, state: str = "") -> RunFilter:
        """The filter for the list; raises `InvalidInput` if it makes no sense."""
        if member(self.q) and not by.user.sees_secrets:
            raise InvalidInput("only operators may search payloads and headers")
        return RunFilter(
            self.job,
            self.group,
            state or self.state,
            self.node,
            self.prefix,
            when(self.since, now, "since"),
            self.q,
            when(self.until, now, "until"),
            self.cause,
            by.text,
        )


@router.get("/runs")
async def list_runs(request: Request, page: ViewerPage, before: str = "") -> Response:
    """The runs that match, latest change first."""
    wanted = Wanted.of(request.query_params)
    problem, found = "", None
    try:
        found = await page.run_pages.page(wanted.filter(page, page.now), SHOWN, before)
    except InvalidInput as error:  # the filter is still being typed
        problem = str(error)
    every = await page.all_jobs()
    return await page.show(
        "runs.html",
        "runs",
        found=found,
        problem=problem,
        chosen=msgspec.structs.asdict(wanted),
        tabs=await tabs(page, wanted, every),
        ranges=RANGES,
        before=before,
        bulk=bulk(wanted),
        known=sorted({one.job for one in every}),
        groups=sorted({one.group for one in every}),
        reasons=await reasons(page, found.runs if found else [], every),
    )


def bulk(wanted: Wanted) -> list[tuple[str, str]]:
    """What can be done with all runs that match: nothing that no run in the chosen state allows."""
    if wanted.empty:
        return []
    return [
        (name, text)
        for name, text in BULK.items()
        if not wanted.state or wanted.state in VERBS[name].states
    ]


async def tabs(
    page: PageRequest, wanted: Wanted, every: Sequence[JobInfo]
) -> list[tuple[str, int | None]]:
    """Every state with how many runs are in it; None where that is not known."""
    if wanted.narrow:
        return [(state, None) for state in STATES]
    mine = [j for j in every if wanted.job in ("", j.job) and wanted.group in ("", j.group)]
    counts: dict[str, int] = {"queued": sum(j.waiting for j in mine)}
    counts["delayed"] = sum(j.delayed for j in mine)
    if not wanted.job and not wanted.group:  # a line belongs to a limit, not to a job
        counts["waiting"] = sum(limit.waiting for limit in await page.all_limits())
    if (states := await page.states()) is not None:
        homes = {(j.group, j.job) for j in mine}
        for state in ("running", "failed", "parked"):
            counts[state] = sum(
                n for key, n in states.items() if key[2] == state and key[:2] in homes
            )
    chosen = wanted.since or "30d"
    if chosen in jobs.RANGES and mine:  # the name is still being typed
        found = await jobs.ended(page, chosen, wanted.job, wanted.group)
        if found.made_up:  # by a demo, which is younger than a day
            found = await jobs.ended(page, "24h", wanted.job, wanted.group)
        ends = found.ends()
        counts |= {state: ends[state] for state in ENDED}
    return [(state, counts.get(state)) for state in STATES]


async def reasons(
    page: PageRequest, runs: list[RunInfo], every: Sequence[JobInfo]
) -> dict[str, str]:
    """Why a queued run on this page does not start, if it is not simply waiting for its turn."""
    serving = {
        n.group for n in await page.all_nodes() if n.role == "worker" and n.state == "RUNNING"
    }
    paused = {(j.group, j.job) for j in every if j.paused}
    served = {(j.group, j.job) for j in every if j.served}
    found = {}
    for info in runs:
        home = (info.group, info.job)
        if info.state == "queued" and home in paused:
            found[info.run] = "the job is paused"
        elif info.state == "queued" and info.group not in serving:
            found[info.run] = "no worker is running"
        elif info.state == "queued" and home not in served:
            found[info.run] = "no worker has ever served this job"
        elif info.state == "queued":
            found[info.run] = "in the queue"
        elif info.state == "waiting":
            found[info.run] = f"for a place in {info.limit}" if info.limit else "for a place"
    return found
