"""A worker as a process: signals, exit codes, the event loop.

SIGTERM and SIGINT drain; a second one exits at once. Exit codes: 0 after a drain, 1 when it could
not go on (so that an orchestrator restarts it), 128 + signal when it was told twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.worker.worker import Worker

log = logging.getLogger("holdfast.worker")


def run_worker(worker_factory: Any) -> int:
    """Make a worker inside a fresh event loop and run it to its end; returns the exit code."""
    code = run_loop(_main(worker_factory))
    if any(t.name.startswith("holdfast-job") and t.is_alive() for t in threading.enumerate()):
        logging.shutdown()
        os._exit(code)  # a handler's thread that cannot be interrupted must not hold the exit up
    return code


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def _main(worker_factory: Any) -> int:
    try:
        worker: Worker = worker_factory()
        handle_signals(worker.stop)
        await worker.run()
    except HoldfastError as error:
        log.error("%s", error)
        return 1
    return 0


def handle_signals(stop: Callable[[], None], kill: Callable[[], None] | None = None) -> None:
    """Call `stop` on the first SIGTERM or SIGINT; on the second `kill`, and exit at once."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def received(number: int) -> None:
        if seen:
            if kill:
                kill()
            os._exit(128 + number)
        seen.append(number)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)
