"""The cluster: its nodes, its numbers, and who did what."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from holdfast.clock import rfc3339
from holdfast.errors import InvalidInput
from holdfast.model.node import Transition
from holdfast.names import check_name
from holdfast.status import fleet_actions as table
from holdfast.status.audit import AuditLine
from holdfast.status.jobs import JobInfo
from holdfast.status.nodes import NodeInfo, by_role
from holdfast.status.schedules import coming, overdue_since
from holdfast.web.services import Access, ViewerAccess, acting
from holdfast.web.wire import Cursor, Limit, Page, answer, does, page_of, returns

router = APIRouter()

FAILURES = ("failed", "dead", "lost")
LONGEST_SECONDS = 86_400
"""Minutes are kept for a day; the pages have longer ranges."""

Node = Annotated[str, Path(max_length=64, description="The node's id.")]


class NodeShown(msgspec.Struct, frozen=True):
    """A node and its history; a node that is gone has only its history."""

    info: NodeInfo | None
    history: list[Transition]


class Draining(msgspec.Struct, frozen=True):
    """A node that was asked to stop."""

    node: str


@router.get("/nodes", tags=["nodes"], summary="List nodes", **returns(Page[NodeInfo]))
async def list_nodes(
    request: Request,
    access: ViewerAccess,
    role: Annotated[str, Query(description="worker, scheduler, coordinator, web, …")] = "",
    group: str = "",
    state: Annotated[str, Query(description="RUNNING, DISCONNECTED, …")] = "",
    all: Annotated[bool, Query(description="Include stopped nodes.")] = False,
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """By role, group and id."""
    found = await access.nodes.list(role=role, group=group, state=state, ended=all)
    return answer(request, page_of(found, _key, limit, cursor))


def _key(node: NodeInfo) -> str:
    return f"{node.role}/{node.group}/{node.id}"


@router.get("/nodes/{node}", tags=["nodes"], summary="Show a node", **returns(NodeShown))
async def show(request: Request, access: ViewerAccess, node: Node) -> Response:
    """Its state, its liveness numbers and its recorded transitions, oldest first."""
    info, history = await access.nodes.show(node)
    return answer(request, NodeShown(info, list(history)))


@router.get(
    "/nodes/{node}/history",
    tags=["nodes"],
    summary="Show a node's history",
    **returns(Page[Transition]),
)
async def history(
    request: Request, access: ViewerAccess, node: Node, limit: Limit = 50, cursor: Cursor = ""
) -> Response:
    """Its transitions, newest first."""
    found = list(await access.nodes.history(check_name(node, "node")))[::-1]
    start = int(cursor) if cursor.isascii() and cursor.isdigit() and len(cursor) < 9 else 0
    more = start + limit < len(found)
    page = found[start : start + limit]
    return answer(request, Page(page, str(start + limit) if more else ""))


@router.post(
    "/nodes/{node}/drain",
    tags=["nodes"],
    summary="Drain a node",
    **does(table.drain_node, Draining),
)
async def drain(
    request: Request, access: Annotated[Access, acting(table.drain_node)], node: Node
) -> Response:
    await table.drain_node(access, node)
    return answer(request, Draining(node))


# ---- numbers


class Oldest(msgspec.Struct, frozen=True):
    """The run that has waited longest."""

    group: str
    job: str
    seconds: float


class DueNext(msgspec.Struct, frozen=True):
    """A future slot."""

    schedule: str
    job: str
    due: str


class Stats(msgspec.Struct, frozen=True):
    """Everything at a glance."""

    at: str
    namespace: str
    seconds: int
    """The period of `ended`, `per_minute` and `failures`."""
    counted_since: str
    """The start of the counted period: later than requested if no coordinator counted before."""
    counted_until: str
    """The end of the counted period: earlier than now if no coordinator runs."""
    ended: dict[str, int]
    """Runs and failed attempts by outcome."""
    per_minute: float
    failures: int
    waiting: int
    in_flight: int
    lag: int
    parked: int
    dead: int
    oldest_waiting: Oldest | None
    next_due: list[DueNext]
    overdue_seconds: float
    """How long the oldest unfired slot has been due; 0 if there is none."""
    nodes: dict[str, dict[str, int]]
    """How many nodes of each role are in each state."""


@router.get("/stats", tags=["stats"], summary="Show statistics", **returns(Stats))
async def stats(
    request: Request,
    access: ViewerAccess,
    seconds: Annotated[int, Query(ge=60, le=LONGEST_SECONDS)] = 300,
) -> Response:
    """A coordinator counts ended runs by the minute; everything else is read from the server
    now."""
    jobs, nodes, schedules, progress = await asyncio.gather(
        access.jobs.list(), access.nodes.list(), access.schedules.list(), access.slots.progress()
    )
    now = access.client.broker.server_now()
    history = await access.services.archive.counted(seconds)
    ended = history.ends()
    oldest = max(jobs, key=_age, default=None)
    waiting, in_flight = sum(j.waiting for j in jobs), sum(j.in_flight for j in jobs)
    found = Stats(
        rfc3339(now),
        access.services.namespace,
        seconds,
        rfc3339(max(history.since(now - seconds), now - seconds)),
        rfc3339(history.until),
        dict(ended),
        round(60 * ended.total() / seconds, 3),
        sum(ended[kind] for kind in FAILURES),
        waiting,
        in_flight,
        waiting + in_flight,
        sum(j.parked for j in jobs),
        sum(j.dead for j in jobs),
        Oldest(oldest.group, oldest.job, _age(oldest)) if oldest and _age(oldest) else None,
        [DueNext(d.name, d.job, rfc3339(d.at)) for d in coming(schedules, now)],
        round(overdue_since(schedules, progress.watermark, now), 3),
        {role: dict(states) for role, states in by_role(nodes)},
    )
    return answer(request, found)


def _age(job: JobInfo) -> float:
    return job.oldest_seconds or 0.0


# ---- audit


@router.get("/audit", tags=["audit"], summary="List actions", **returns(Page[AuditLine]))
async def list_actions(
    request: Request,
    access: ViewerAccess,
    run: Annotated[str, Query(max_length=400, description="Only actions on this run.")] = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """Newest first."""
    if cursor and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidInput("not a cursor: use `next` of the previous page")
    found, older = await access.audit.page(run, limit, int(cursor or 0))
    return answer(request, Page(found, str(older) if older else ""))
