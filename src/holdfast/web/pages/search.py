"""`/search`: one box for everything: runs, jobs, flows, limits, schedules, nodes, agents, alerts,
dead letters.

Each kind shows the first few hits and links to its own page, which has the rest. The search is
bounded: it reads one page of runs, and lists that other pages read too.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from holdfast.errors import HoldfastError, InvalidInput, RunNotFound
from holdfast.status.alerts import alerts
from holdfast.status.finding import Finder
from holdfast.web.pages import fleet
from holdfast.web.pages.request import PageRequest, ViewerPage
from holdfast.web.pages.run_list import Wanted

router = APIRouter(include_in_schema=False)

SHOWN: Final = 8
"""Hits of each kind."""
LOOK: Final = 300
"""Messages that are searched for a run that has no record yet: a search reads many other things."""


class Hit(msgspec.Struct, frozen=True):
    """One thing that was found."""

    text: str
    path: str
    note: str = ""
    state: str = ""


class Hits(msgspec.Struct, frozen=True):
    """The first hits of one kind."""

    kind: str
    found: list[Hit]
    more: str = ""
    """Where all of them are."""


@router.get("/search")
async def show(page: ViewerPage, q: str = "") -> Response:
    """Everything whose name contains a text."""
    text = q.strip()
    kinds = await _all(page, text) if text else []
    return await page.show("search.html", "search", q=q, kinds=[k for k in kinds if k.found])


async def _all(page: PageRequest, text: str) -> list[Hits]:
    runs, flows, letter, limits, board = await asyncio.gather(
        _runs(page, text),
        _flows(page, text),
        _letter(page, text),
        page.all_limits(),
        alerts(page.client.broker),
    )
    jobs, schedules, nodes, agents = await asyncio.gather(
        page.all_jobs(),
        page.all_schedules(),
        page.all_nodes(),
        fleet.agents(page),
    )
    low = text.casefold()

    def has(*parts: str) -> bool:
        return any(low in part.casefold() for part in parts)

    return [
        Hits("Jobs", [Hit(j.job, f"/jobs/{j.group}/{j.job}", j.group) for j in jobs if has(j.job)]),
        runs,
        Hits("Flows", flows, "/flows"),
        Hits("Dead letters", letter),
        Hits(
            "Limits",
            [Hit(x.name, f"/limits/{x.name}", ", ".join(x.jobs)) for x in limits if has(x.name)],
            "/limits",
        ),
        Hits(
            "Alerts",
            [
                Hit(page.text(x.text), x.path or "/alerts", x.rule, "firing")
                for x in board.firing
                if has(page.text(x.text), x.rule)
            ],
        ),
        Hits(
            "Schedules",
            [Hit(s.name, f"/schedules/{s.name}", s.rule) for s in schedules if has(s.name, s.job)],
            "/schedules",
        ),
        Hits(
            "Nodes",
            [Hit(n.id, f"/cluster/{n.id}", n.role, n.state) for n in nodes if has(n.id, n.host)],
            "/cluster",
        ),
        Hits(
            "Agents",
            [Hit(a.id, f"/fleet/agents/{a.id}", a.host) for a in agents if has(a.id, a.host)],
        ),
    ]


async def _runs(page: PageRequest, text: str) -> Hits:
    """A run with that id or key, or those that contain the text."""
    hits: list[Hit] = []
    with contextlib.suppress(RunNotFound, InvalidInput):
        exact = await Finder(page.client, LOOK).find(text)
        state = exact.record.state if exact.record else "queued" if exact.carrier else "dead"
        hits.append(Hit(exact.run, f"/runs/{exact.run}", exact.job, state))
    try:
        found = await page.run_pages.page(Wanted(q=text).filter(page, page.now), SHOWN)
    except InvalidInput:  # a viewer may not search for a member of a payload
        return Hits("Runs", hits)
    known = {hit.text for hit in hits}
    hits += [
        Hit(info.run, f"/runs/{info.run}", info.job, info.state)
        for info in found.runs
        if info.run not in known
    ]
    return Hits("Runs", hits, "/runs")


async def _flows(page: PageRequest, text: str) -> list[Hit]:
    """Flows that wait; the others are among the runs."""
    try:
        wanted = Wanted(q=text).filter(page, page.now, "parked")
        found = await page.run_pages.page(wanted, SHOWN)
    except InvalidInput:
        return []
    return [Hit(info.run, f"/flows/{info.run}", info.job, info.state) for info in found.runs]


async def _letter(page: PageRequest, text: str) -> list[Hit]:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        return []
    try:
        letter = await page.dead.show(int(text))
    except HoldfastError:
        return []
    return [Hit(str(letter.id), f"/dead/{letter.id}", letter.job, "dead letter")]
