"""Runs a role as a process: signals, exit codes, the event loop.

SIGTERM and SIGINT drain; a second one exits immediately. Exit codes: 0 after a drain, 1 when the
role cannot continue (so that an orchestrator restarts it), 128 + signal after a second signal.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Protocol

from holdfast.errors import HoldfastError

log = logging.getLogger("holdfast.process")

SAME_SECONDS: Final = 0.05
"""Signals closer together than this count as one, sent to a process and then to its group."""
HANDLER_TASK: Final = "holdfast-job"
PLACE_TASK: Final = "holdfast-place"
HANDLERS: Final = (HANDLER_TASK, PLACE_TASK)
"""Name prefixes of the threads and tasks that run handlers."""


DEFAULT_THRESHOLDS: Final = (700, 2_000)
"""Python's own defaults, up to 3.12 and later."""
COLLECT_AFTER: Final = 10_000
"""New objects before the next collection: some hundred runs, and a few megabytes at most."""


class Runnable(Protocol):
    """A role: runs until stopped."""

    def stop(self) -> None: ...
    async def run(self) -> None: ...


def cores() -> int:
    """CPU cores available to this process: its affinity, capped by the container's quota."""
    known = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        known = min(known, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no cgroup, or no quota
        pass
    return max(1, known)


def run_role(make: Callable[[], Runnable]) -> int:
    """Build a role inside a fresh event loop and run it; returns the exit code."""
    code = run_loop(_main(make))
    if any(t.name.startswith(HANDLERS) and t.is_alive() for t in threading.enumerate()):
        _exit_now(code)
    return code


def _exit_now(code: int) -> None:
    """Exit without waiting for handlers that cannot be interrupted, in a thread or a task."""
    logging.shutdown()
    os._exit(code)


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:  # not available on every platform
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def _main(make: Callable[[], Runnable]) -> int:
    code = 0
    try:
        role = make()
        collect_rarely()
        handle_signals(role.stop)
        await role.run()
    except HoldfastError as error:
        log.error("%s", error)
        code = 1
    if any(t.get_name().startswith(HANDLERS) for t in asyncio.all_tasks()):
        _exit_now(code)
    return code


def collect_rarely() -> None:
    """Make Python look for reference cycles less often, unless somebody has configured that.

    By default it looks after every 700 new objects, which is a few runs, and each time at all live
    objects of runs. Objects that exist by now are never examined again.
    """
    new, *older = gc.get_threshold()
    if gc.isenabled() and new in DEFAULT_THRESHOLDS:
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECT_AFTER, *older)


def handle_signals(stop: Callable[[], None], kill: Callable[[], None] | None = None) -> None:
    """Call `stop` on the first SIGTERM or SIGINT; on the second, call `kill` and exit.

    A signal within `SAME_SECONDS` of the first is the same one: `timeout` and some shells signal a
    process and then its whole group.
    """
    loop = asyncio.get_running_loop()
    first: list[float] = []

    def received(number: int) -> None:
        if not first:
            first.append(loop.time())
            stop()
        elif loop.time() - first[0] > SAME_SECONDS:
            if kill:
                kill()
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)
