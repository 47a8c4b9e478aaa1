"""The API, one module per noun, under `/api/v1`."""

from __future__ import annotations

from fastapi import Depends, FastAPI

from holdfast.web.api import cluster, dead, fleet, jobs, runs, schedules
from holdfast.web.wire import describe, known_query

PREFIX = "/api/v1"


def include(app: FastAPI) -> None:
    """Add every noun's routes."""
    for noun in (runs, jobs, dead, schedules, cluster, fleet):
        app.include_router(noun.router, prefix=PREFIX, dependencies=[Depends(known_query)])
    describe(app)
