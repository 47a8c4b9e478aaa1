"""Flows: what they wait for and what they have done; signal, resume, cancel."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from holdfast.client.client import EventSent
from holdfast.payload import encode_value
from holdfast.status import actions as table
from holdfast.status.flows import FlowDetail, FlowInfo
from holdfast.web.services import Access, ViewerAccess, acting
from holdfast.web.wire import Limit, RunPart, answer, does, reads, returns, run_of, takes

router = APIRouter(tags=["flows"])


class SignalFlow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event for the flows that wait for it."""

    event: str
    key: str
    data: Any = None


@router.get("/flows", summary="List flows", **returns(list[FlowInfo]))
async def list_flows(
    request: Request,
    access: ViewerAccess,
    limit: Limit = 50,
    state: Annotated[str, Query(max_length=20)] = "",
    job: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """Flows whose record is kept, newest change first; `stopped` is a state too."""
    return answer(request, await access.flows.list(state=state, job=job, limit=limit))


@router.post(
    "/flows/signal",
    summary="Send an event to flows",
    **takes(SignalFlow),
    **does(table.signal_flow, EventSent),
)
async def signal(
    request: Request,
    access: Annotated[Access, acting(table.signal_flow)],
    wanted: Annotated[SignalFlow, Depends(reads(SignalFlow))],
) -> Response:
    sent = await table.signal_flow(access, wanted.event, wanted.key, encode_value(wanted.data))
    return answer(request, sent)


@router.get("/flows/{run}", summary="Show a flow", **returns(FlowDetail))
async def show(request: Request, access: ViewerAccess, part: RunPart) -> Response:
    """What it waits for, and its operations."""
    return answer(request, await access.flows.show(run_of(part)))


@router.post("/flows/{run}/resume", summary="Resume a flow", **does(table.resume_flow, FlowDetail))
async def resume(
    request: Request, access: Annotated[Access, acting(table.resume_flow)], part: RunPart
) -> Response:
    run = run_of(part)
    await table.resume_flow(access, run)
    return answer(request, await access.flows.show(run))


@router.post("/flows/{run}/cancel", summary="Cancel a flow", **does(table.cancel_flow, FlowDetail))
async def cancel(
    request: Request, access: Annotated[Access, acting(table.cancel_flow)], part: RunPart
) -> Response:
    run = run_of(part)
    await table.cancel_flow(access, run)
    return answer(request, await access.flows.show(run))
