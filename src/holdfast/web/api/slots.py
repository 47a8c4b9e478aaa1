"""Slots: the newest of a schedule, with what became of their runs."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from holdfast.clock import rfc3339
from holdfast.durations import instant
from holdfast.errors import InvalidInput
from holdfast.status.outcomes import Outcome, outcomes
from holdfast.web.masking import hides, masked_text
from holdfast.web.services import Desk, ViewerDesk
from holdfast.web.wire import Cursor, Limit, Page, answer, returns, stamp

router = APIRouter(tags=["slots"])

MOST = 500


class SlotShown(msgspec.Struct, frozen=True):
    """One slot and its run."""

    schedule: str
    slot: str
    verdict: str
    """How its run ended or stands, else how far the slot came; `sent`: its run has no record."""
    state: str
    reason: str
    """Why it was skipped, if it was."""
    due: str
    dispatched: str
    node: str
    epoch: int
    count: int
    """How many slots this record stands for: a series that was skipped has one."""
    run: str = ""
    run_state: str = ""
    error: str = ""
    run_seconds: float = 0.0
    backfill: bool = False
    caught_up: bool = False


@router.get("/slots", summary="List slots", **returns(Page[SlotShown]))
async def list_slots(
    request: Request,
    desk: ViewerDesk,
    schedule: Annotated[str, Query(max_length=64, description="The schedule.")],
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """The newest recorded slots of a schedule, the latest first; 500 are looked at."""
    await desk.schedules.show(schedule)
    found = await outcomes(desk.client, schedule, MOST)
    if cursor:
        try:
            before = instant(cursor, "cursor")
        except InvalidInput:
            raise InvalidInput("this is not a cursor: take it from `next` of a page") from None
        found = [one for one in found if one.moment < before]
    page = found[:limit]
    following = rfc3339(page[-1].moment) if len(found) > limit else ""
    return answer(request, Page([_shown(desk, schedule, one) for one in page], following))


def _shown(desk: Desk, schedule: str, one: Outcome) -> SlotShown:
    slot = one.slot
    return SlotShown(
        schedule,
        rfc3339(one.moment),
        one.verdict,
        slot.state,
        slot.reason,
        stamp(slot.due),
        stamp(slot.dispatched),
        slot.sender or slot.node,
        slot.epoch,
        slot.count,
        one.run,
        one.run_state,
        masked_text(one.error) if hides(desk.user) else one.error,
        one.seconds,
        slot.backfill,
        slot.caught_up,
    )
