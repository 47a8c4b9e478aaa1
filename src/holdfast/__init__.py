"""Holdfast: highly available background jobs for Python on NATS JetStream, and nothing else."""

from holdfast.app import Holdfast, Job
from holdfast.client import Run, RunStatus
from holdfast.context import Context, SyncContext
from holdfast.errors import Discard, HoldfastError, Retry, Snooze
from holdfast.model.backoff import Backoff
from holdfast.version import __version__
from holdfast.worker import Worker, run_consumer

__all__ = [
    "Backoff",
    "Context",
    "Discard",
    "Holdfast",
    "HoldfastError",
    "Job",
    "Retry",
    "Run",
    "RunStatus",
    "Snooze",
    "SyncContext",
    "Worker",
    "__version__",
    "run_consumer",
]
