"""Holdfast: highly available background jobs for Python on NATS JetStream, and nothing else.

What is exported here is imported when it is first used, so that the command line, which lives in
this package too, starts without the NATS client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast.app import Holdfast, Job
    from holdfast.client import Run, RunStatus
    from holdfast.client.bucket import Bucket
    from holdfast.client.schedules import Schedules
    from holdfast.context import Context, SyncContext
    from holdfast.errors import Conflict, Discard, HoldfastError, Retry, Snooze
    from holdfast.model.backoff import Backoff
    from holdfast.sync import SyncApp
    from holdfast.worker import Worker, run_consumer

__all__ = [
    "Backoff",
    "Bucket",
    "Conflict",
    "Context",
    "Discard",
    "Holdfast",
    "HoldfastError",
    "Job",
    "Retry",
    "Run",
    "RunStatus",
    "Schedules",
    "Snooze",
    "SyncApp",
    "SyncContext",
    "Worker",
    "__version__",
    "run_consumer",
]

_HOMES = {
    "Backoff": "holdfast.model.backoff",
    "Bucket": "holdfast.client.bucket",
    "Conflict": "holdfast.errors",
    "Context": "holdfast.context",
    "Discard": "holdfast.errors",
    "Holdfast": "holdfast.app",
    "HoldfastError": "holdfast.errors",
    "Job": "holdfast.app",
    "Retry": "holdfast.errors",
    "Run": "holdfast.client",
    "RunStatus": "holdfast.client",
    "Schedules": "holdfast.client.schedules",
    "Snooze": "holdfast.errors",
    "SyncApp": "holdfast.sync",
    "SyncContext": "holdfast.context",
    "Worker": "holdfast.worker",
    "run_consumer": "holdfast.worker",
}


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
