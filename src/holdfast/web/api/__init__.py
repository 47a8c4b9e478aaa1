"""The API, one module per noun, under `/api/v1`."""

from __future__ import annotations

import importlib

from fastapi import Depends, FastAPI

from holdfast.web.wire import describe, known_query

PREFIX = "/api/v1"
NOUNS = (
    "runs",
    "jobs",
    "dead",
    "schedules",
    "slots",
    "nodes",
    "fleet",
    "agents",
    "settings",
    "audit",
    "stats",
)


def include(app: FastAPI) -> None:
    """Add every noun's routes."""
    for noun in NOUNS:
        module = importlib.import_module(f"holdfast.web.api.{noun}")
        app.include_router(module.router, prefix=PREFIX, dependencies=[Depends(known_query)])
    describe(app)
