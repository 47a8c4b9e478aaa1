"""The API, one module per noun, under `/api/v1`."""

from __future__ import annotations

from fastapi import Depends, FastAPI

from holdfast.web.api import (
    alerts,
    cluster,
    dead,
    events,
    fleet,
    flows,
    jobs,
    limits,
    runs,
    schedules,
)
from holdfast.web.wire import describe, known_query

PREFIX = "/api/v1"


def include(app: FastAPI) -> None:
    """Add every noun's routes."""
    nouns = (runs, events, jobs, flows, limits, dead, schedules, cluster, fleet, alerts)
    for noun in nouns:
        app.include_router(noun.router, prefix=PREFIX, dependencies=[Depends(known_query)])
    describe(app)
