"""For the tests of programs that define jobs.

From the lightest to the heaviest, each with the same rules as production:

* `make_context` for calling a handler as the plain function that it is,
* `eager` for code that enqueues: each run is executed at once, in place,
* `memory` for whole stories in one process: retries, delays, events, crashes, on a `FakeClock`,
* the pytest fixtures `holdfast_server` and `holdfast_worker`: a real server and a real worker.

Names are loaded when they are used, because pytest imports this package at every start.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.testing.running import RunningWorker

__all__ = ["RunningWorker"]

_WHERE = {"RunningWorker": "running"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
