"""Slots: the tasks that execute held messages, at most `limit` at a time.

A slot is one long-lived task that takes message after message, so a run costs no task of its own.
Slots are made when they are needed and stay. `backlog` is what has been delivered and not started.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from holdfast.worker.held import Held

YIELD_EVERY = 32
CLOSE_SECONDS = 2.0
NAME = "holdfast-slot"


class Slots:
    """Runs `execute` for each submitted message, in order of arrival."""

    def __init__(
        self,
        limit: int,
        execute: Callable[[Held], Awaitable[None]],
        freed: Callable[[Held], None],
    ) -> None:
        self.limit = limit
        self.busy = 0
        self.backlog: deque[Held] = deque()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._execute = execute
        self._freed = freed
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: list[asyncio.Future[None]] = []
        self._closed = False

    def submit(self, held: Held) -> None:
        """Execute it as soon as a slot is free."""
        self.backlog.append(held)
        while self._idle:
            waiter = self._idle.pop()
            if not waiter.done():
                waiter.set_result(None)
                return
        if len(self._tasks) < self.limit:
            task = asyncio.create_task(self._run(), name=NAME)
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() and not self.failure.done():
            self.failure.set_exception(task.exception())  # type: ignore[arg-type]

    async def _run(self) -> None:
        count = 0
        while not self._closed:
            while not self.backlog:
                waiter = asyncio.get_running_loop().create_future()
                self._idle.append(waiter)
                await waiter
            held = self.backlog.popleft()
            self.busy += 1
            try:
                await self._execute(held)
            finally:
                self.busy -= 1
                self._freed(held)
            count += 1
            if count % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop every slot at once; a run that is being interrupted is settled first.

        A handler that does not let itself be stopped is left behind: it ends with the process.
        """
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        if not self.failure.done():
            self.failure.cancel()
