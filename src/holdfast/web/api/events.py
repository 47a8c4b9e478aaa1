"""Events: publish one."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from holdfast.client.client import EventSent
from holdfast.status import actions as table
from holdfast.web.services import Access, acting
from holdfast.web.wire import answer, does, raw, reads, takes

router = APIRouter(tags=["events"])


class Publish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event to publish."""

    event: str
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Any JSON; null if it is left out."""
    id: str | None = None
    """Id of the event; another event with it is dropped."""


@router.post(
    "/events",
    summary="Publish an event",
    **takes(Publish),
    **does(table.publish_event, EventSent, 201),
)
async def publish(
    request: Request,
    access: Annotated[Access, acting(table.publish_event)],
    wanted: Annotated[Publish, Depends(reads(Publish))],
) -> Response:
    body = raw(wanted.data) or b"null"
    return answer(request, await table.publish_event(access, wanted.event, body, wanted.id), 201)
