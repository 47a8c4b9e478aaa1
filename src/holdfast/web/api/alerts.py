"""Alerts: what fires, which notices were sent, and the rules."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from holdfast.status.alerts import AlertsInfo, alerts
from holdfast.web.services import ViewerAccess
from holdfast.web.wire import answer, returns

router = APIRouter(tags=["alerts"])


@router.get("/alerts", summary="Show alerts", **returns(AlertsInfo))
async def show(request: Request, access: ViewerAccess) -> Response:
    """What fires now, the rules, the channels, and the newest notices."""
    return answer(request, await alerts(access.client.broker))
