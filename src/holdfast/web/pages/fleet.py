"""`/fleet`: the agents with their facts, what was sent to them, and which settings they have."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from holdfast.errors import InvalidInput, NotFound, Unavailable
from holdfast.settings.records import Report, claimed
from holdfast.settings.store import Store
from holdfast.status.agents import AgentInfo
from holdfast.status.fleet import FleetInfo
from holdfast.web.masking import hides, masked
from holdfast.web.pages.visit import ViewerVisit, Visit

router = APIRouter(include_in_schema=False)

AGENTS: Final = 50
RUNS: Final = 15
DOTS: Final = 600
SHARED_SECONDS: Final = 2.0


class Settings(msgspec.Struct, frozen=True):
    """Which revision is published, and who is on which."""

    number: int
    at: float
    reports: dict[str, Report]
    current: int
    failed: list[tuple[str, Report]]


@router.get("/fleet")
async def show(visit: ViewerVisit, target: str = "", start: int = 0) -> Response:
    """The agents that a target means, and the newest fan-out runs."""
    every, runs, settings = await asyncio.gather(agents(visit), runs_of(visit), settings_of(visit))
    found, problem = every, ""
    if target:
        try:
            seen = masked if hides(visit.desk.user) else None
            found = list(await visit.desk.agents.list(target, seen=seen))
        except InvalidInput as error:  # a target that is being typed
            found, problem = [], str(error)
    start = max(0, start)
    found = sorted(found, key=lambda a: (a.online, a.id))
    return await visit.show(
        "fleet.html",
        "fleet",
        agents=found[start : start + AGENTS],
        count=len(found),
        every=len(every),
        online=sum(a.online for a in every),
        dots=sorted(every, key=lambda a: (a.online, a.id))[:DOTS],
        runs=runs,
        settings=settings,
        target=target,
        problem=problem,
        start=start,
        older=start + AGENTS if start + AGENTS < len(found) else 0,
    )


async def agents(visit: Visit) -> list[AgentInfo]:
    """Every agent that is known."""

    async def read() -> list[AgentInfo]:
        return list(await visit.desk.agents.list())

    return await visit.shared("agents", SHARED_SECONDS, read)


async def runs_of(visit: Visit) -> Sequence[FleetInfo]:
    """The newest fan-out runs; of those that go on, with what has been returned so far."""

    async def read() -> Sequence[FleetInfo]:
        active = {info.run: info for info in await visit.desk.fleet.active()}
        found = await visit.desk.fleet.list(most=RUNS)
        return [active.get(info.run, info) for info in found]

    return await visit.shared("fleet", 1.0, read)


async def settings_of(visit: Visit) -> Settings:
    """The settings at a glance; no content is ever shown."""

    async def read() -> Settings:
        store = Store(visit.client.broker)
        try:
            data, reports = await store.revision(), await store.reports()
        except (NotFound, Unavailable):  # nothing was ever published
            return Settings(0, 0.0, {}, 0, [])
        revision = claimed(data) if data else None
        if revision is None:
            return Settings(0, 0.0, reports, 0, [])
        current = sum((r.born, r.number) == revision.order for r in reports.values())
        failed = sorted((a, r) for a, r in reports.items() if r.failed_number)
        return Settings(revision.number, revision.at, reports, current, failed[:10])

    return await visit.shared("settings", SHARED_SECONDS, read)


@router.get("/fleet/agents/{agent}")
async def show_agent(visit: ViewerVisit, agent: str) -> Response:
    """One agent and its facts."""
    info, facts = await visit.desk.agents.show(agent)
    told: dict[str, Any] = masked(facts) if hides(visit.desk.user) else facts
    settings = await settings_of(visit)
    return await visit.show(
        "agent.html",
        "fleet",
        info=info,
        facts=[(name, flat(value)) for name, value in sorted(told.items())],
        report=settings.reports.get(agent),
        revision=settings.number,
    )


def flat(value: Any) -> str:
    """A fact in one line."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ", ".join(value)
    return msgspec.json.encode(value).decode()
