"""Agents: who is there, with which facts; forget one that will not come back."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from holdfast.status.agents import AgentInfo
from holdfast.web.masking import hides, masked
from holdfast.web.services import AdminDesk, ViewerDesk
from holdfast.web.wire import Cursor, Limit, Page, answer, page_of, returns

router = APIRouter(tags=["fleet"])

Agent = Annotated[str, Path(max_length=64, description="The agent's id.")]


class AgentShown(msgspec.Struct, frozen=True):
    """An agent and its facts."""

    info: AgentInfo
    facts: dict[str, Any]


class Forgotten(msgspec.Struct, frozen=True):
    """An agent that no target means any more."""

    agent: str


@router.get("/agents", summary="List agents", **returns(Page[AgentInfo]))
async def list_agents(
    request: Request,
    desk: ViewerDesk,
    target: Annotated[str, Query(max_length=2000, description="Only those it means.")] = "*",
    online: Annotated[bool, Query(description="Only those that are there.")] = False,
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """By id; the same targets as those of commands."""
    seen = masked if hides(desk.user) else None
    found = await desk.agents.list(target, online=online, seen=seen)
    return answer(request, page_of(found, lambda a: a.id, limit, cursor))


@router.get("/agents/{agent}", summary="Show an agent", **returns(AgentShown))
async def show(request: Request, desk: ViewerDesk, agent: Agent) -> Response:
    """Its state and its facts."""
    info, facts = await desk.agents.show(agent)
    return answer(request, AgentShown(info, masked(facts) if hides(desk.user) else facts))


@router.delete("/agents/{agent}", summary="Forget an agent", **returns(Forgotten))
async def forget(request: Request, desk: AdminDesk, agent: Agent) -> Response:
    """One that will not come back: no target means it any more."""
    await desk.agents.forget(agent)
    return answer(request, Forgotten(agent))
