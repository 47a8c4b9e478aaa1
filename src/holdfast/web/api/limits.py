"""Limits: who holds a place, who waits; set, pause, resume."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Path, Request
from starlette.responses import Response

from holdfast.names import check_name
from holdfast.status import actions as table
from holdfast.status.limits import LimitDetail, LimitInfo
from holdfast.web.services import Access, ViewerAccess, acting
from holdfast.web.wire import Cursor, Limit, Page, answer, does, page_of, reads, returns, takes

router = APIRouter(tags=["limits"])

Name = Annotated[str, Path(max_length=64)]


class SetLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a limit allows from now on; without numbers, those of the code apply again."""

    running: int | None = None
    """Runs at the same time."""
    starts: str | None = None
    """Starts in a time: `100/s`, `30/m`."""
    burst: int | None = None
    """How many starts may happen at once."""


@router.get("/limits", summary="List limits", **returns(Page[LimitInfo]))
async def list_limits(
    request: Request, access: ViewerAccess, limit: Limit = 50, cursor: Cursor = ""
) -> Response:
    """Every limit that a worker has registered, by name."""
    return answer(request, page_of(await access.limits.list(), lambda one: one.name, limit, cursor))


@router.get("/limits/{name}", summary="Show a limit", **returns(LimitDetail))
async def show(request: Request, access: ViewerAccess, name: Name) -> Response:
    """What it allows, and its busiest keys."""
    return answer(request, await access.limits.show(check_name(name, "limit")))


@router.post(
    "/limits/{name}/set",
    summary="Change a limit",
    **takes(SetLimit),
    **does(table.set_limit, LimitDetail),
)
async def set_limit(
    request: Request,
    access: Annotated[Access, acting(table.set_limit)],
    name: Name,
    wanted: Annotated[SetLimit, Depends(reads(SetLimit))],
) -> Response:
    limit = check_name(name, "limit")
    await table.set_limit(
        access, limit, running=wanted.running, starts=wanted.starts, burst=wanted.burst
    )
    return answer(request, await access.limits.show(limit))


@router.post(
    "/limits/{name}/pause", summary="Pause a limit", **does(table.pause_limit, LimitDetail)
)
async def pause(
    request: Request, access: Annotated[Access, acting(table.pause_limit)], name: Name
) -> Response:
    await table.pause_limit(access, check_name(name, "limit"))
    return answer(request, await access.limits.show(name))


@router.post(
    "/limits/{name}/resume", summary="Resume a limit", **does(table.resume_limit, LimitDetail)
)
async def resume(
    request: Request, access: Annotated[Access, acting(table.resume_limit)], name: Name
) -> Response:
    await table.resume_limit(access, check_name(name, "limit"))
    return answer(request, await access.limits.show(name))
