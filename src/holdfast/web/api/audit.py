"""Who did what: the actions of operators, from the ledger."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from holdfast.errors import InvalidInput
from holdfast.status.audit import Action
from holdfast.web.services import ViewerDesk
from holdfast.web.wire import Cursor, Limit, Page, answer, returns

router = APIRouter(tags=["audit"])


@router.get("/audit", summary="List actions", **returns(Page[Action]))
async def list_actions(
    request: Request,
    desk: ViewerDesk,
    run: Annotated[str, Query(max_length=400, description="Only those that name a run.")] = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> Response:
    """Newest first."""
    if cursor and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidInput("this is not a cursor: take it from `next` of a page")
    found, older = await desk.audit.page(run, limit, int(cursor or 0))
    return answer(request, Page(found, str(older) if older else ""))
