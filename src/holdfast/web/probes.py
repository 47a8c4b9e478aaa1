"""Probes: whether the process lives, and whether it is of use. Open to all."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from holdfast.web.services import services_of

router = APIRouter(include_in_schema=False)


def include(app: FastAPI) -> None:
    """Add `/health/live` and `/health/ready`."""
    app.include_router(router)


@router.get("/health/live")
async def live() -> dict[str, Any]:
    """The event loop answers."""
    return {"live": True}


@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """A message can travel."""
    services = services_of(request)
    there = services.broker.connected
    problems = [] if there else ["not connected to NATS"]
    body = msgspec.json.encode({"ready": there, "problems": problems})
    return Response(body, 200 if there else 503, media_type="application/json")
