"""The API: JSON for programs. Reading and changing checks needs the token, if there is one."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel

from uptime import summary
from uptime.app import Channel
from uptime.cache import Cache
from uptime.check import CheckInput
from uptime.service import Refusal, Service
from uptime.web.security import Denied

router = APIRouter()
Json = dict[str, Any]


def service_of(request: Request) -> Service:
    """The service of this application."""
    service: Service = request.app.state.service
    return service


def cache_of(request: Request) -> Cache:
    """The cache of this application."""
    cache: Cache = request.app.state.cache
    return cache


def manager(request: Request) -> None:
    """Admit only users who may manage checks."""
    if not request.app.state.gate.knows(request):
        raise Denied("show the token: Authorization: Bearer …", 401)


async def read_json(request: Request) -> Json:
    """The body as a JSON object."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise Refusal("send JSON, with Content-Type: application/json", 415)
    try:
        found = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise Refusal("the body is no JSON", 400) from None
    if not isinstance(found, dict):
        raise Refusal("the body must be a JSON object", 400)
    return found


async def forget(request: Request, id: str = "") -> None:
    """Make a change visible to the next reader."""
    names = ["status"] + ([f"detail.{id}"] if id else [])
    await cache_of(request).forget(*names)


def taking(model: type[BaseModel]) -> Json:
    """Describe a request's body, for the API's description."""
    schema = model.model_json_schema()
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


Managed = Depends(manager)
ServiceOf = Annotated[Service, Depends(service_of)]
Body = Annotated[Json, Depends(read_json)]


@router.get("/status.json")
async def status(request: Request, response: Response, service: ServiceOf) -> Json:
    """What the status page shows."""
    response.headers["Cache-Control"] = f"public, max-age={int(service.config.cache_seconds)}"
    return await cache_of(request).get("status", lambda: summary.status(service))


@router.get("/healthz")
async def health(service: ServiceOf) -> Json:
    """Whether this process can read the store."""
    return {"checks": len(await service.all_checks())}


@router.get("/api/checks", dependencies=[Managed])
async def list_checks(service: ServiceOf) -> list[Json]:
    """Every check."""
    return [check.shown() for check in await service.all_checks()]


@router.post(
    "/api/checks", dependencies=[Managed], status_code=201, openapi_extra=taking(CheckInput)
)
async def add_check(request: Request, body: Body, service: ServiceOf) -> Json:
    """Add a check."""
    check = await service.add(body)
    await forget(request)
    return check.shown()


@router.get("/api/checks/{id}", dependencies=[Managed])
async def show_check(id: str, service: ServiceOf) -> Json:
    """One check, and what is known of it."""
    check, state = await service.check(id), await service.state(id)
    known = {
        "status": state.status,
        "since": state.since,
        "detail": state.detail,
        "expires": state.expires,
        "incident": asdict(state.incident) if state.incident else None,
    }
    return {**check.shown(), "state": known}


@router.put("/api/checks/{id}", dependencies=[Managed], openapi_extra=taking(CheckInput))
async def change_check(request: Request, id: str, body: Body, service: ServiceOf) -> Json:
    """Replace a check; a header whose value is `********` keeps the one that it has."""
    check = await service.change(id, body)
    await forget(request, id)
    return check.shown()


@router.delete("/api/checks/{id}", dependencies=[Managed], status_code=204)
async def remove_check(request: Request, id: str, service: ServiceOf) -> None:
    """Remove a check."""
    await service.remove(id)
    await forget(request, id)


@router.post("/api/checks/{id}/pause", dependencies=[Managed])
async def pause_check(request: Request, id: str, service: ServiceOf) -> Json:
    """Let a check rest."""
    check = await service.pause(id, True)
    await forget(request, id)
    return check.shown()


@router.post("/api/checks/{id}/resume", dependencies=[Managed])
async def resume_check(request: Request, id: str, service: ServiceOf) -> Json:
    """Let a check go on."""
    check = await service.pause(id, False)
    await forget(request, id)
    return check.shown()


@router.post("/api/checks/{id}/run", dependencies=[Managed], status_code=202)
async def run_check(id: str, service: ServiceOf) -> Json:
    """Look once more, now."""
    return {"run": await service.look_now(id)}


@router.get("/api/checks/{id}/results", dependencies=[Managed])
async def list_results(
    id: str, service: ServiceOf, limit: Annotated[int, Query(ge=1, le=10_000)] = 100
) -> list[Json]:
    """A check's newest results."""
    return [asdict(result) for result in await service.results(id, limit)]


@router.get("/api/incidents", dependencies=[Managed])
async def list_incidents(
    service: ServiceOf, check: str = "", limit: Annotated[int, Query(ge=1, le=1_000)] = 50
) -> list[Json]:
    """The newest incidents, with their reasons."""
    return [asdict(incident) for incident in await service.incidents(check, limit)]


@router.get("/api/channels", dependencies=[Managed])
async def list_channels(service: ServiceOf) -> list[Json]:
    """Everybody who is told of incidents."""
    return [channel.model_dump() for channel in await service.all_channels()]


@router.post(
    "/api/channels", dependencies=[Managed], status_code=201, openapi_extra=taking(Channel)
)
async def set_channel(body: Body, service: ServiceOf) -> Json:
    """Add or replace a channel."""
    return (await service.set_channel(body)).model_dump()


@router.delete("/api/channels/{id}", dependencies=[Managed], status_code=204)
async def remove_channel(id: str, service: ServiceOf) -> None:
    """Tell a channel nothing more."""
    await service.remove_channel(id)
