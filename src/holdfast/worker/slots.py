"""Slots: the tasks that execute held messages, at most `limit` at a time.

A slot is one long-lived task that takes message after message. Slots are made when they are needed
and stay. What a job needs besides a slot is its lane: the event loop, a thread, a process. A lane
has a number of places; a message waits in the backlog of its lane until a place is free, so nothing
is claimed before its handler can start at once.

A handler that was given up and still runs keeps its place until it ends: it is *stuck*. A lane of
which every place is stuck is *blocked*: it takes nothing, and its worker is not ready.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.ownership.claims import Company
from holdfast.worker.held import Held

YIELD_EVERY = 32
CLOSE_SECONDS = 2.0
NAME = "holdfast-slot"

Left = Sequence[asyncio.Future[Any]]
"""What a handler has left running."""
Execute = Callable[[Held], Awaitable[Left]]


class Lane:
    """The places for handlers of one kind."""

    __slots__ = ("backlog", "busy", "executed", "limit", "name", "speed", "stuck")

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.busy = 0
        self.stuck = 0
        self.executed = 0
        self.speed = 0.0
        """Recent runs per second."""
        self.backlog: deque[Held] = deque()
        """What has been delivered and not started."""

    @property
    def free(self) -> int:
        return self.limit - self.busy - self.stuck

    @property
    def blocked(self) -> bool:
        return self.stuck >= self.limit


class Slots(Company):
    """Runs `execute` for each submitted message, in order of arrival within its lane."""

    def __init__(
        self,
        limit: int,
        execute: Execute,
        freed: Callable[[Held], None],
        lanes: Mapping[str, int] | None = None,
        lane_of: Callable[[Held], str] = lambda held: "loop",
    ) -> None:
        self.limit = limit
        self.busy = 0
        self.lanes = {n: Lane(n, min(most, limit)) for n, most in (lanes or {}).items()}
        self.lanes.setdefault("loop", Lane("loop", limit))
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lane_of = lane_of
        self._execute = execute
        self._freed = freed
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: list[asyncio.Future[None]] = []
        self._closed = False
        self.reserved = False
        """Nothing is started: a run that may take this process down is executed alone."""
        self._empty: asyncio.Future[None] | None = None

    @property
    def waiting(self) -> int:
        """How much has been delivered and not started."""
        return sum(len(lane.backlog) for lane in self.lanes.values())

    @property
    def stuck(self) -> int:
        """Places taken by handlers that were given up and still run."""
        return sum(lane.stuck for lane in self.lanes.values())

    def submit(self, held: Held) -> None:
        """Execute it as soon as a place is free."""
        lane = self.lanes[self._lane_of(held)]
        lane.backlog.append(held)
        if lane.free > 0:
            self._wake_one()

    def _wake_one(self) -> None:
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
        if self._closed or self.failure.done():
            return
        if task.cancelled():
            self.failure.set_exception(RuntimeError("a slot was cancelled by somebody's code"))
        elif error := task.exception():
            self.failure.set_exception(error)

    async def _run(self) -> None:
        count = 0
        last: Lane | None = None
        while not self._closed:
            lane = self._startable()
            if lane is None:
                waiter = asyncio.get_running_loop().create_future()
                self._idle.append(waiter)
                await waiter
                continue
            held = lane.backlog.popleft()
            if last is not None and last is not lane and last.backlog and last.free > 0:
                self._wake_one()  # this slot leaves a lane in which something could start
            last = lane
            left: Left = ()
            self.busy += 1
            lane.busy += 1
            try:
                left = await self._execute(held)
            finally:
                self.busy -= 1
                lane.busy -= 1
                lane.executed += 1
                if left:
                    lane.stuck += 1
                if self._empty is not None and self.busy <= 1 and not self._empty.done():
                    self._empty.set_result(None)
                self._freed(held)
            if left:
                await self._outlive(lane, left)
            count += 1
            if count % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    def _startable(self) -> Lane | None:
        if self.reserved:
            return None
        for lane in self.lanes.values():
            if lane.backlog and lane.busy + lane.stuck < lane.limit:
                return lane
        return None

    async def _outlive(self, lane: Lane, left: Left) -> None:
        """Keep the place until what is left in it has ended."""
        try:
            await asyncio.wait(left)
        finally:
            lane.stuck -= 1

    async def leave(self, limit: float) -> bool:
        """Start nothing, and wait for all runs but the caller's; False: they took too long."""
        self.reserved = True
        if self.busy > 1:
            self._empty = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._empty], timeout=limit)
            self._empty = None
        return self.busy <= 1

    def join(self) -> None:
        """Start things again."""
        self.reserved = False
        for _ in range(min(self.waiting, self.limit)):
            self._wake_one()

    def given_back(self, before: float) -> Iterator[Held]:
        """Take out of the backlogs what came before an instant; all of it where nothing can start.

        Lanes keep the order of arrival, so the oldest is always the first.
        """
        for lane in self.lanes.values():
            hopeless = lane.blocked or self.reserved
            while lane.backlog and (hopeless or lane.backlog[0].since < before):
                yield lane.backlog.popleft()

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
        elif not self.failure.cancelled():
            self.failure.exception()  # retrieved, so that asyncio does not complain
