"""The fleet: commands and what agents returned, the agents, and their settings."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from holdfast.client.fleet import new_run
from holdfast.clock import rfc3339
from holdfast.durations import seconds
from holdfast.errors import InvalidInput, Unavailable
from holdfast.model.fleet import FleetRequest, Return
from holdfast.model.join import JoinRecord
from holdfast.names import check_run
from holdfast.settings.records import Report, Revision
from holdfast.settings.store import SettingsStore
from holdfast.status import fleet_actions as table
from holdfast.status.fleet import AgentInfo, FleetInfo
from holdfast.web.masking import masked, masked_arguments, masked_text
from holdfast.web.problems import Problem
from holdfast.web.services import Access, ViewerAccess, acting
from holdfast.web.wire import (
    Cursor,
    Limit,
    Page,
    RunPart,
    answer,
    does,
    page_of,
    reads,
    returns,
    run_of,
    stamp,
    takes,
)

router = APIRouter(tags=["fleet"])

MOST = 1_000
"""How many of the newest fleet runs can be listed: bounds the time of an answer."""

Agent = Annotated[str, Path(max_length=64, description="The agent's id.")]


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function to run on every agent that a target matches."""

    target: str
    """`web*`, `E@db[0-9]+`, `L@a,b`, `G@os:linux and not web1`."""
    function: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    timeout: str | float = 60.0
    """How long it may take: seconds, or e.g. `5m`."""
    batch: int = 0
    """Agents per wave; 0 for all at once."""
    max_failures: int = 0
    """With waves: stop after this many agents failed."""
    id: str = ""
    """The run's id; sending the same id again returns the same run. By default a new one."""


class FleetShown(msgspec.Struct, frozen=True):
    """A fleet run: the command, its targets and its state."""

    info: FleetInfo
    args: Any
    kwargs: Any
    targets: tuple[str, ...]
    offline: tuple[str, ...]
    unreachable: tuple[str, ...]
    unsent: tuple[str, ...]


@router.post(
    "/fleet/runs",
    summary="Run a command on agents",
    **takes(Command),
    **does(table.command_fleet, FleetInfo, 202),
)
async def start(
    request: Request,
    access: Annotated[Access, acting(table.command_fleet)],
    wanted: Annotated[Command, Depends(reads(Command))],
) -> Response:
    if wanted.batch < 0 or wanted.max_failures < 0:
        raise InvalidInput("batch and max_failures must be 0 or more")
    order = FleetRequest(
        check_run(wanted.id) if wanted.id else new_run(),
        wanted.target,
        wanted.function,
        wanted.args,
        wanted.kwargs,
        timeout=seconds(wanted.timeout, "timeout"),
        batch=wanted.batch,
        max_failures=wanted.max_failures,
        user=access.user.name,
    )
    try:
        record = await table.command_fleet(access, order)
    except Unavailable as error:
        raise Problem(409, str(error)) from None
    return answer(request, FleetInfo.of(record), 202)


@router.get("/fleet/runs", summary="List fleet runs", **returns(Page[FleetInfo]))
async def list_runs(
    request: Request,
    access: ViewerAccess,
    status: Annotated[str, Query(description="running, complete, failed, partial, …")] = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """The newest thousand, newest first."""
    found = list(await access.fleet.list(most=MOST, status=status))
    if cursor:
        place = next((n for n, info in enumerate(found) if info.run == cursor), None)
        if place is None:
            raise InvalidInput("not a cursor, or its run has expired: start from the first page")
        found = found[place + 1 :]
    page = found[:limit]
    return answer(request, Page(page, page[-1].run if len(found) > limit else ""))


@router.get("/fleet/runs/{run}", summary="Show a fleet run", **returns(FleetShown))
async def show(request: Request, access: ViewerAccess, part: RunPart) -> Response:
    """The command, its targets, and the counts so far."""
    record, given = await access.fleet.show(run_of(part))
    args, kwargs = list(record.request.args), dict(record.request.kwargs)
    if not access.user.sees_secrets:
        args, kwargs = masked_arguments(record.request.function, args), masked(kwargs)
    info = FleetInfo.of(record, max(len(given), record.returned))
    shown = FleetShown(
        info, args, kwargs, record.targets, record.offline, record.unreachable, record.unsent
    )
    return answer(request, shown)


@router.get(
    "/fleet/runs/{run}/returns", summary="List what agents returned", **returns(Page[Return])
)
async def list_returns(
    request: Request, access: ViewerAccess, part: RunPart, limit: Limit = 50, cursor: Cursor = ""
) -> Response:
    """By agent; large values are only named."""
    _, given = await access.fleet.show(run_of(part))
    page = page_of([given[a] for a in sorted(given)], lambda r: r.agent, limit, cursor)
    return answer(request, Page([_return(access, one) for one in page.items], page.next))


def _return(access: Access, one: Return) -> Return:
    if access.user.sees_secrets:
        return one
    return msgspec.structs.replace(one, value=masked(one.value), error=masked_text(one.error))


@router.post(
    "/fleet/runs/{run}/cancel",
    summary="Cancel a fleet run",
    **does(table.cancel_fleet, FleetInfo),
)
async def cancel(
    request: Request, access: Annotated[Access, acting(table.cancel_fleet)], part: RunPart
) -> Response:
    run = run_of(part)
    await access.fleet.show(run)
    try:
        record = await table.cancel_fleet(access, run)
    except Unavailable as error:
        raise Problem(409, str(error)) from None
    return answer(request, FleetInfo.of(record))


# ---- agents


class AgentShown(msgspec.Struct, frozen=True):
    """An agent and its facts."""

    info: AgentInfo
    facts: dict[str, Any]


class Forgotten(msgspec.Struct, frozen=True):
    """An agent that was removed from the fleet."""

    agent: str


@router.get("/agents", summary="List agents", **returns(Page[AgentInfo]))
async def list_agents(
    request: Request,
    access: ViewerAccess,
    target: Annotated[
        str, Query(max_length=2000, description="Only agents that this target matches.")
    ] = "*",
    online: Annotated[bool, Query(description="Only online agents.")] = False,
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """By id. Targets are the same as for commands."""
    seen = None if access.user.sees_secrets else masked
    found = await access.agents.list(target, online=online, seen=seen)
    return answer(request, page_of(found, lambda a: a.id, limit, cursor))


@router.get("/agents/{agent}", summary="Show an agent", **returns(AgentShown))
async def show_agent(request: Request, access: ViewerAccess, agent: Agent) -> Response:
    """Its state and its facts."""
    info, facts = await access.agents.show(agent)
    return answer(request, AgentShown(info, facts if access.user.sees_secrets else masked(facts)))


@router.delete("/agents/{agent}", summary="Forget an agent", **does(table.forget_agent, Forgotten))
async def forget(
    request: Request, access: Annotated[Access, acting(table.forget_agent)], agent: Agent
) -> Response:
    await table.forget_agent(access, agent)
    return answer(request, Forgotten(agent))


# ---- hosts that ask to join


class JoinShown(msgspec.Struct, frozen=True):
    """A host that asked to become an agent."""

    agent: str
    state: str
    """pending, approved, issued or rejected."""
    host: str
    version: str
    token: str
    asked: str
    replaces: bool
    """Whether a known host has or had this id."""
    by: str
    """Who decided it."""
    fingerprint: str
    """Fingerprint of the host's new login; its log shows the same."""


def _join(record: JoinRecord) -> JoinShown:
    r = record
    asked = stamp(r.at)
    return JoinShown(
        r.agent, r.state, r.host, r.version, r.token, asked, r.replaces, r.by, r.fingerprint
    )


@router.get("/joins", summary="List hosts that ask to join", **returns(Page[JoinShown]))
async def list_joins(
    request: Request,
    access: ViewerAccess,
    every: Annotated[
        bool, Query(description="Include hosts that were accepted or rejected.")
    ] = False,
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """By agent id. Their requests and keys are not shown."""
    found = [_join(record) for record in await access.joins.list(everything=every)]
    found.sort(key=lambda one: one.agent)
    return answer(request, page_of(found, lambda one: one.agent, limit, cursor))


@router.post(
    "/joins/{agent}/accept", summary="Accept a host", **does(table.accept_agent, JoinShown)
)
async def accept_join(
    request: Request,
    access: Annotated[Access, acting(table.accept_agent)],
    agent: Agent,
    replace: Annotated[
        bool, Query(description="Also accept a host that replaces a known one.")
    ] = False,
    fingerprint: Annotated[
        str, Query(description="Accept only the host with this fingerprint.")
    ] = "",
) -> Response:
    record = await table.accept_agent(access, agent, replace=replace, fingerprint=fingerprint)
    return answer(request, _join(record))


@router.post(
    "/joins/{agent}/reject", summary="Reject a host", **does(table.reject_agent, JoinShown)
)
async def reject_join(
    request: Request, access: Annotated[Access, acting(table.reject_agent)], agent: Agent
) -> Response:
    return answer(request, _join(await table.reject_agent(access, agent)))


# ---- settings


class SettingsShown(msgspec.Struct, frozen=True):
    """The settings of the fleet."""

    revision: int
    """The published revision; 0 if there is none."""
    published: str
    generations: list[int]
    """The key generations that secrets are sealed for; two during a rotation."""
    agents: int
    current: int
    """How many agents are on this revision."""
    failed: int
    """How many failed to apply a revision."""


class AgentSettings(msgspec.Struct, frozen=True):
    """The settings of one agent."""

    agent: str
    revision: int
    current: bool
    since: str
    failed_revision: int
    reason: str
    error: str
    refused: int


@router.get("/settings", summary="Show the settings status", **returns(SettingsShown))
async def show_settings(request: Request, access: ViewerAccess) -> Response:
    """The published revision, and how many agents have it. Contents are never shown."""
    store = SettingsStore(access.client.broker)
    current, reports = await store.shown_revision(), await store.reports()
    shown = SettingsShown(
        current.number if current else 0,
        rfc3339(current.at) if current else "",
        current.generations if current else [],
        len(reports),
        sum(_is_current(report, current) for report in reports.values()),
        sum(bool(report.failed_number) for report in reports.values()),
    )
    return answer(request, shown)


def _is_current(report: Report, current: Revision | None) -> bool:
    return current is not None and (report.born, report.number) == current.order


@router.get("/settings/agents", summary="List settings by agent", **returns(Page[AgentSettings]))
async def list_agent_settings(
    request: Request, access: ViewerAccess, limit: Limit = 50, cursor: Cursor = ""
) -> Response:
    """Each agent's revision, and its error if it failed."""
    store = SettingsStore(access.client.broker)
    current, reports = await store.shown_revision(), await store.reports()
    found = [_agent_settings(agent, reports[agent], current) for agent in sorted(reports)]
    return answer(request, page_of(found, lambda a: a.agent, limit, cursor))


def _agent_settings(agent: str, report: Report, current: Revision | None) -> AgentSettings:
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
