"""Nodes: list, show with history, drain."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from holdfast.model.node import Transition
from holdfast.names import check_name
from holdfast.status.nodes import NodeInfo
from holdfast.web.services import AdminDesk, ViewerDesk
from holdfast.web.wire import Cursor, Limit, Page, answer, page_of, returns

router = APIRouter(tags=["nodes"])

Node = Annotated[str, Path(max_length=64, description="The node's id.")]


class NodeShown(msgspec.Struct, frozen=True):
    """A node and its history; only the history of one that is gone."""

    info: NodeInfo | None
    history: list[Transition]


class Draining(msgspec.Struct, frozen=True):
    """A node that was asked to end."""

    node: str


@router.get("/nodes", summary="List nodes", **returns(Page[NodeInfo]))
async def list_nodes(
    request: Request,
    desk: ViewerDesk,
    role: Annotated[str, Query(description="worker, scheduler, coordinator, web, …")] = "",
    group: str = "",
    state: Annotated[str, Query(description="RUNNING, DISCONNECTED, …")] = "",
    all: Annotated[bool, Query(description="Also those that have ended.")] = False,
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """By role, group and id."""
    found = await desk.nodes.list(role=role, group=group, state=state, ended=all)
    return answer(request, page_of(found, _key, limit, cursor))


def _key(node: NodeInfo) -> str:
    return f"{node.role}/{node.group}/{node.id}"


@router.get("/nodes/{node}", summary="Show a node", **returns(NodeShown))
async def show(request: Request, desk: ViewerDesk, node: Node) -> Response:
    """Its state and settings, and every transition that the ledger still has, oldest first."""
    info, history = await desk.nodes.show(node)
    return answer(request, NodeShown(info, list(history)))


@router.get("/nodes/{node}/history", summary="A node's history", **returns(Page[Transition]))
async def history(
    request: Request, desk: ViewerDesk, node: Node, limit: Limit = 50, cursor: Cursor = ""
) -> Response:
    """Its transitions, newest first."""
    found = list(await desk.nodes.history(check_name(node, "node")))[::-1]
    start = int(cursor) if cursor.isascii() and cursor.isdigit() and len(cursor) < 9 else 0
    more = start + limit < len(found)
    page = found[start : start + limit]
    return answer(request, Page(page, str(start + limit) if more else ""))


@router.post("/nodes/{node}/drain", summary="Drain a node", **returns(Draining))
async def drain(request: Request, desk: AdminDesk, node: Node) -> Response:
    """It finishes what it runs and ends, as SIGTERM would make it."""
    await desk.nodes.drain(node)
    return answer(request, Draining(node))
