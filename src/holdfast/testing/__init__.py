"""For the tests of programs that define jobs.

From the lightest to the heaviest, each with the same rules as production:

* `make_context` for calling a handler as the plain function that it is,
* `eager` for code that enqueues: each run is executed at once, in place,
* `memory` for whole scenarios in one process: retries, delays, events, crashes, on a `FakeClock`,
* the pytest fixtures `holdfast_server` and `holdfast_worker`: a real server and a real worker.

Names are loaded when they are used, because pytest imports this package at every start.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.testing.backend import DeadLetter, PublishedEvent
    from holdfast.testing.clock import FakeClock
    from holdfast.testing.context import (
        FakeContext,
        FakeSyncContext,
        make_context,
        make_sync_context,
    )
    from holdfast.testing.eager_mode import eager
    from holdfast.testing.memory_app import Memory, memory
    from holdfast.testing.replaying import replay_flow
    from holdfast.testing.running import RunningWorker

__all__ = [
    "DeadLetter",
    "FakeClock",
    "FakeContext",
    "FakeSyncContext",
    "Memory",
    "PublishedEvent",
    "RunningWorker",
    "eager",
    "make_context",
    "make_sync_context",
    "memory",
    "replay_flow",
]

_MODULES = {
    "DeadLetter": "backend",
    "FakeClock": "clock",
    "FakeContext": "context",
    "FakeSyncContext": "context",
    "Memory": "memory_app",
    "PublishedEvent": "backend",
    "RunningWorker": "running",
    "eager": "eager_mode",
    "make_context": "context",
    "make_sync_context": "context",
    "memory": "memory_app",
    "replay_flow": "replaying",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
