"""Holdfast: highly available background jobs for Python on NATS JetStream, and nothing else.

What is exported here is imported when it is first used, so that the command line, which lives in
this package too, starts without the NATS client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazily import exporting
from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast.app import Holdfast
    from holdfast.client import Run, RunStatus
    from holdfast.client.bucket import Bucket
    from holdfast.client.once import Once
    from holdfast.client.schedules import Schedules
    from holdfast.context import Context, SyncContext
    from holdfast.errors import Conflict, Discard, HoldfastError, Retry, Snooze, StepFailed
    from holdfast.flow import Flow, FlowEvent, FlowStep, Settled, current_step
    from holdfast.job import Job
    from holdfast.model.backoff import Backoff
    from holdfast.model.limit import Limit
    from holdfast.model.runlog import LogLine
    from holdfast.resources import Resource
    from holdfast.sync import SyncApp
    from holdfast.worker import Worker, run_consumer

__all__ = [
    "Backoff",
    "Bucket",
    "Conflict",
    "Context",
    "Discard",
    "Flow",
    "FlowEvent",
    "FlowStep",
    "Holdfast",
    "HoldfastError",
    "Job",
    "Limit",
    "LogLine",
    "Once",
    "Resource",
    "Retry",
    "Run",
    "RunStatus",
    "Schedules",
    "Settled",
    "Snooze",
    "StepFailed",
    "SyncApp",
    "SyncContext",
    "Worker",
    "__version__",
    "current_step",
    "run_consumer",
]

__getattr__ = exporting(
    __name__,
    {
        "holdfast.app": ("Holdfast",),
        "holdfast.client": ("Run", "RunStatus"),
        "holdfast.client.bucket": ("Bucket",),
        "holdfast.client.once": ("Once",),
        "holdfast.client.schedules": ("Schedules",),
        "holdfast.context": ("Context", "SyncContext"),
        "holdfast.errors": (
            "Conflict",
            "Discard",
            "HoldfastError",
            "Retry",
            "Snooze",
            "StepFailed",
        ),
        "holdfast.flow": ("Flow", "FlowEvent", "FlowStep", "Settled", "current_step"),
        "holdfast.job": ("Job",),
        "holdfast.model.backoff": ("Backoff",),
        "holdfast.model.limit": ("Limit",),
        "holdfast.model.runlog": ("LogLine",),
        "holdfast.resources": ("Resource",),
        "holdfast.sync": ("SyncApp",),
        "holdfast.worker": ("Worker", "run_consumer"),
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
