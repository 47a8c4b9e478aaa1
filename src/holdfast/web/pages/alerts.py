"""`/alerts`: what fires now, the rules, the channels, and the notices that were sent."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from holdfast.status.alerts import alerts
from holdfast.web.pages.request import ViewerPage

router = APIRouter(include_in_schema=False)


@router.get("/alerts")
async def show(page: ViewerPage) -> Response:
    """The board of alerts."""
    board = await alerts(page.client.broker)
    told = sorted([*board.waiting, *board.told], key=lambda notice: -notice.at)
    return await page.show("alerts.html", "alerts", board=board, told=told)
