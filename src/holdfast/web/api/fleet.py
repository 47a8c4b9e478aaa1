"""The fleet: send a command to many agents, follow it, see what they returned, cancel it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from holdfast.client.fleet import new_run
from holdfast.durations import seconds
from holdfast.errors import InvalidInput, Unavailable
from holdfast.model.fleet import FleetRequest, Return
from holdfast.names import check_run
from holdfast.status.fleet import FleetInfo
from holdfast.web.api.runs import RunPart
from holdfast.web.masking import hides, masked, masked_arguments, masked_text
from holdfast.web.paths import run_of
from holdfast.web.problems import Problem
from holdfast.web.services import AdminDesk, Desk, OperatorDesk, ViewerDesk
from holdfast.web.wire import Cursor, Limit, Page, answer, page_of, reads, returns, takes

router = APIRouter(tags=["fleet"])

MOST = 1_000
"""The newest runs that a list goes through."""


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function for every agent that a target means."""

    target: str
    """`web*`, `E@db[0-9]+`, `L@a,b`, `G@os:linux and not web1`."""
    function: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    timeout: str | float = 60.0
    """How long it may take: seconds, or `5m`."""
    batch: int = 0
    """How many agents make a wave; 0: all at once."""
    max_failures: int = 0
    """With waves: how many agents may fail before no further wave is sent."""
    id: str = ""
    """The run's id: the same once more is the same run; left out: a new one."""


class FleetShown(msgspec.Struct, frozen=True):
    """A fan-out run: what was asked, of whom, and how it stands."""

    info: FleetInfo
    args: Any
    kwargs: Any
    targets: tuple[str, ...]
    offline: tuple[str, ...]
    unreachable: tuple[str, ...]
    unsent: tuple[str, ...]


@router.post("/fleet/runs", summary="Command agents", **takes(Command), **returns(FleetInfo, 202))
async def start(
    request: Request, desk: AdminDesk, wanted: Annotated[Command, Depends(reads(Command))]
) -> Response:
    """The run is dispatched when this answers; its returns come at `/fleet/runs/{run}/returns`."""
    if wanted.batch < 0 or wanted.max_failures < 0:
        raise InvalidInput("batch and max_failures are numbers of agents: 0 or more")
    order = FleetRequest(
        check_run(wanted.id) if wanted.id else new_run(),
        wanted.target,
        wanted.function,
        wanted.args,
        wanted.kwargs,
        timeout=seconds(wanted.timeout, "timeout"),
        batch=wanted.batch,
        max_failures=wanted.max_failures,
        user=desk.user.name,
    )
    try:
        record = await desk.fleet.fleet.start(order)
    except Unavailable as error:
        raise Problem(409, str(error)) from None
    detail = f"{wanted.function} on {wanted.target}"
    await desk.audit.write("command", runs=[record.run], count=len(record.targets), detail=detail)
    return answer(request, FleetInfo.of(record), 202)


@router.get("/fleet/runs", summary="List fan-out runs", **returns(Page[FleetInfo]))
async def list_runs(
    request: Request,
    desk: ViewerDesk,
    status: Annotated[str, Query(description="running, complete, failed, partial, …")] = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """The newest thousand, newest first."""
    found = list(await desk.fleet.list(most=MOST, status=status))
    if cursor:
        place = next((n for n, info in enumerate(found) if info.run == cursor), None)
        if place is None:
            raise InvalidInput("this is not a cursor, or its run has expired: take `next` anew")
        found = found[place + 1 :]
    page = found[:limit]
    return answer(request, Page(page, page[-1].run if len(found) > limit else ""))


@router.get("/fleet/runs/{run}", summary="Show a fan-out run", **returns(FleetShown))
async def show(request: Request, desk: ViewerDesk, part: RunPart) -> Response:
    """Its request, its targets, and the counts so far."""
    record, given = await desk.fleet.show(run_of(part))
    args, kwargs = list(record.request.args), dict(record.request.kwargs)
    if hides(desk.user):
        args, kwargs = masked_arguments(record.request.function, args), masked(kwargs)
    info = FleetInfo.of(record, max(len(given), record.returned))
    shown = FleetShown(
        info, args, kwargs, record.targets, record.offline, record.unreachable, record.unsent
    )
    return answer(request, shown)


@router.get("/fleet/runs/{run}/returns", summary="What agents returned", **returns(Page[Return]))
async def list_returns(
    request: Request, desk: ViewerDesk, part: RunPart, limit: Limit = 50, cursor: Cursor = ""
) -> Response:
    """By agent, as far as they have returned; a large value is named, not shown."""
    _, given = await desk.fleet.show(run_of(part))
    page = page_of([given[a] for a in sorted(given)], lambda r: r.agent, limit, cursor)
    return answer(request, Page([_return(desk, one) for one in page.items], page.next))


def _return(desk: Desk, one: Return) -> Return:
    if not hides(desk.user):
        return one
    return msgspec.structs.replace(one, value=masked(one.value), error=masked_text(one.error))


@router.post("/fleet/runs/{run}/cancel", summary="Cancel a fan-out run", **returns(FleetInfo))
async def cancel(request: Request, desk: OperatorDesk, part: RunPart) -> Response:
    """No further agent is sent to, and those that run it stop."""
    run = run_of(part)
    await desk.fleet.show(run)
    try:
        record = await desk.fleet.cancel(run)
    except Unavailable as error:
        raise Problem(409, str(error)) from None
    return answer(request, FleetInfo.of(record))
