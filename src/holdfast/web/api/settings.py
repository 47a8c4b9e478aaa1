"""Settings: which revision is published, and which agent is on which. No content is ever shown."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from holdfast.clock import rfc3339
from holdfast.errors import NotFound, Unavailable
from holdfast.settings.records import Report, Revision, claimed
from holdfast.settings.store import Store
from holdfast.web.services import ViewerDesk
from holdfast.web.wire import Cursor, Limit, Page, answer, page_of, returns, stamp

router = APIRouter(tags=["fleet"])


class SettingsShown(msgspec.Struct, frozen=True):
    """The settings of the fleet at a glance."""

    revision: int
    """The number that is published; 0: nothing was ever."""
    published: str
    generations: list[int]
    """The keys to which secrets are sealed: two while they are being rotated."""
    agents: int
    current: int
    """How many agents are on this revision."""
    failed: int
    """How many could not use a revision."""


class AgentSettings(msgspec.Struct, frozen=True):
    """What one agent made of the settings."""

    agent: str
    revision: int
    current: bool
    since: str
    failed_revision: int
    reason: str
    error: str
    refused: int


@router.get("/settings", summary="Status of the settings", **returns(SettingsShown))
async def show(request: Request, desk: ViewerDesk) -> Response:
    """The published revision, and how many agents are on it."""
    store = Store(desk.client.broker)
    current, reports = await _revision(store), await store.reports()
    shown = SettingsShown(
        current.number if current else 0,
        rfc3339(current.at) if current else "",
        current.generations if current else [],
        len(reports),
        sum(_is_current(report, current) for report in reports.values()),
        sum(bool(report.failed_number) for report in reports.values()),
    )
    return answer(request, shown)


async def _revision(store: Store) -> Revision | None:
    try:
        data = await store.revision()
    except (NotFound, Unavailable):
        return None  # nothing was ever published
    return claimed(data) if data else None


def _is_current(report: Report, current: Revision | None) -> bool:
    return current is not None and (report.born, report.number) == current.order


@router.get("/settings/agents", summary="Settings by agent", **returns(Page[AgentSettings]))
async def list_agents(
    request: Request, desk: ViewerDesk, limit: Limit = 50, cursor: Cursor = ""
) -> Response:
    """Which agent is on which revision, and who failed with what message."""
    store = Store(desk.client.broker)
    current, reports = await _revision(store), await store.reports()
    found = [_shown(agent, reports[agent], current) for agent in sorted(reports)]
    return answer(request, page_of(found, lambda a: a.agent, limit, cursor))


def _shown(agent: str, report: Report, current: Revision | None) -> AgentSettings:
    return AgentSettings(
        agent,
        report.number,
        _is_current(report, current),
        stamp(report.at),
        report.failed_number,
        report.reason,
        report.error,
        report.refused,
    )
