"""What a worker holds, and the places in which it executes: at most `limit` at a time.

A place is a long-lived task that executes one message after another. Places are created on demand
and stay. Besides a place, a job needs its lane: the event loop, a thread, or a process. A lane has
a limit too; a message waits in its lane's backlog until it can start, so nothing is claimed before
its handler can run at once. Threads are the exception while handlers are short: claims of the next
hundredth of a second are made meanwhile, and given back if the handlers before them take longer.

A handler that was given up and still runs keeps its place until it ends: it is *stuck*. A lane with
only stuck places is *blocked*: it takes nothing, and its worker is not ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from holdfast import errors
from holdfast.broker import Broker, Delivery
from holdfast.model.node import HeldRun
from holdfast.ownership.claims import Company
from holdfast.process import PLACE_TASK
from holdfast.worker.attempt import Held, Interrupt
from holdfast.worker.backlog import LOW_SHARE, Backlog

YIELD_EVERY: Final = 32
"""Runs after which a place yields to the loop: short handlers may never await anything, and
acknowledgements have to be sent in between."""
CLOSE_SECONDS: Final = 2.0
"""How long `close` waits for interrupted runs to be settled, which is a few writes."""
SPEED_SECONDS: Final = 0.25
"""How often the speed of each lane is measured."""
CLAIM_AHEAD_SECONDS: Final = 0.01
"""How much work is claimed ahead of threads: twice the interval at which Python switches threads,
so that a thread has enough to do while the event loop makes the next claims."""
INDEX_SECONDS: Final = 0.2
"""Runs held for less are not in the index: most end before anyone could read it."""
INDEX_UNCLAIMED: Final = 500
"""Most unclaimed messages in the index; the rest are redelivered after `ack_wait`."""

Left = Sequence[asyncio.Future[Any]]
"""What a handler has left running."""


class Lane:
    """The places for handlers of one kind."""

    __slots__ = (
        "ahead",
        "backlog",
        "busy",
        "executed",
        "limit",
        "measured",
        "name",
        "speed",
        "stuck",
    )

    def __init__(self, name: str, limit: int, low_share: float = LOW_SHARE) -> None:
        self.name = name
        self.limit = limit
        self.busy = 0
        self.stuck = 0
        self.executed = 0
        self.measured = 0
        self.speed = 0.0
        """Recent runs per second."""
        self.ahead = 0
        """How many runs more than `limit` may be claimed, to wait for a thread."""
        self.backlog = Backlog(low_share)
        """Messages delivered and not started."""

    @property
    def free(self) -> int:
        return self.limit - self.busy - self.stuck

    @property
    def blocked(self) -> bool:
        return self.stuck >= self.limit

    @property
    def startable(self) -> bool:
        """Whether the first message of the backlog can start now, or nearly so."""
        if not self.backlog or self.blocked:
            return False
        taken = self.busy + self.stuck
        return taken < self.limit or (taken < self.limit + self.ahead and self.backlog.first.quick)

    def measure(self) -> float:
        """The speed since the last measurement; it rises at once and falls slowly."""
        speed = (self.executed - self.measured) / SPEED_SECONDS
        self.speed = speed if speed > self.speed else (self.speed + speed) / 2
        self.measured = self.executed
        if self.name == "thread":
            self.ahead = int(self.speed * CLAIM_AHEAD_SECONDS)
        return self.speed


class Places(Company):
    """Executes each submitted message, by priority and order of arrival within its lane."""

    def __init__(
        self,
        limit: int,
        lanes: Mapping[str, int] | None = None,
        low_share: float = LOW_SHARE,
    ) -> None:
        self.limit = limit
        self.busy = 0
        self.executed = 0
        self.speed = 0.0
        widths = {"loop": limit, **(lanes or {})}
        self.lanes = {n: Lane(n, min(most, limit), low_share) for n, most in widths.items()}
        self.held: dict[str, Held] = {}
        """Everything delivered and not yet settled or given back, by reply subject."""
        self.reserved = False
        """While true, nothing is started, because a run that may kill this process is executed
        alone."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when a place does, which only a bug can cause."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: list[asyncio.Future[None]] = []
        self._closed = False
        self._empty: asyncio.Future[None] | None = None
        self._all_ended = asyncio.Event()

    def open(
        self, execute: Callable[[Held], Awaitable[Left]], freed: Callable[[Held], None]
    ) -> None:
        """Set how a place executes a message, and what to call when it is free again."""
        self._execute = execute
        self._freed = freed

    @property
    def waiting(self) -> int:
        """Messages delivered and not started."""
        return sum(len(lane.backlog) for lane in self.lanes.values())

    @property
    def stuck(self) -> int:
        """Places taken by handlers that were given up and still run."""
        return sum(lane.stuck for lane in self.lanes.values())

    # ---- executing

    def submit(self, held: Held) -> None:
        """Execute the message as soon as a place is free."""
        lane = self.lanes[held.job.lane]
        lane.backlog.append(held)
        if lane.startable:
            self._wake_one()

    def _wake(self, places: int) -> None:
        for _ in range(places):
            self._wake_one()

    def _wake_one(self) -> None:
        while self._idle:
            waiter = self._idle.pop()
            if not waiter.done():
                waiter.set_result(None)
                return
        if len(self._tasks) < self.limit:
            task = asyncio.create_task(self._run(), name=PLACE_TASK)
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._closed or self.failure.done():
            return
        if task.cancelled():
            self.failure.set_exception(RuntimeError("a place was cancelled by somebody's code"))
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
            held = lane.backlog.pop()
            if last is not None and last is not lane and last.startable:
                self._wake_one()  # this place leaves a lane in which something could start
            last = lane
            left: Left = ()
            self.busy += 1
            lane.busy += 1
            try:
                left = await self._execute(held)
            finally:
                self._leave(lane, left)
                self._freed(held)
            if left:
                await self._outlive(lane, left)
            count += 1
            if count % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    def _leave(self, lane: Lane, left: Left) -> None:
        self.busy -= 1
        lane.busy -= 1
        lane.executed += 1
        self.executed += 1
        if left:
            lane.stuck += 1
        if self._empty is not None and self.busy <= 1 and not self._empty.done():
            self._empty.set_result(None)
        if not self.busy:
            self._all_ended.set()

    def _startable(self) -> Lane | None:
        if self.reserved:
            return None
        for lane in self.lanes.values():
            if lane.startable:
                return lane
        return None

    async def _outlive(self, lane: Lane, left: Left) -> None:
        """Keep the place until the handler left in it has ended."""
        try:
            await asyncio.wait(left)
        finally:
            lane.stuck -= 1

    def measure(self) -> None:
        """Measure the recent speed, which decides how much to take in advance."""
        self.speed = sum(lane.measure() for lane in self.lanes.values())
        for lane in self.lanes.values():
            if lane.ahead:
                self._wake(min(len(lane.backlog), lane.ahead))

    # ---- one run alone (`ownership.claims`)

    async def leave(self, limit: float) -> bool:
        """Start nothing, and wait for all runs but the caller's; False on timeout."""
        self.reserved = True
        if self.busy > 1:
            self._empty = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._empty], timeout=limit)
            self._empty = None
        return self.busy <= 1

    def join(self) -> None:
        """Start runs again."""
        self.reserved = False
        self._wake(min(self.waiting, self.limit))

    # ---- held messages

    async def extend(self, broker: Broker, every: float, trusted: Callable[[], bool]) -> None:
        """Keep extending the messages we hold, while this node is trusted."""
        clock = broker.clock
        while True:
            await clock.sleep(every / 3)
            if not broker.connected or not trusted():
                continue
            now = clock.monotonic()
            with contextlib.suppress(errors.NotConnected):
                for held in list(self.held.values()):
                    if now - held.extended >= every * 2 / 3 and not held.lost:
                        held.extended = now
                        await held.message.extend()

    def index(self, now: float) -> tuple[HeldRun, ...]:
        """The messages that this node has held for a while; if it dies, others give them back."""
        claimed, unclaimed = [], []
        for held in self.held.values():
            if held.lost or held.since >= now - INDEX_SECONDS:
                continue
            if held.claim is not None:
                claimed.append(HeldRun(held.run, held.claim.revision, held.message.reply))
            elif held.job.spec.restart == "immediately":
                unclaimed.append(HeldRun("", 0, held.message.reply))
        return (*claimed, *unclaimed[:INDEX_UNCLAIMED])

    def claim_lost(self, run: str) -> None:
        """Another node holds a run: send nothing more about its message."""
        for held in self.held.values():
            if held.run == run and isinstance(held.message, Delivery):
                held.message.abandon()

    def executed_by(self, task: asyncio.Task[Any] | None) -> tuple[str, str]:
        """The run and the job that a task executes; called from another thread."""
        for held in list(self.held.values()):
            if task is not None and held.call is not None and held.call.task is task:
                return held.run, held.job.spec.name
        return "", ""

    def given_back(self, before: float) -> Iterator[Held]:
        """Remove from backlogs what arrived before an instant; everything if nothing can start.

        Backlogs keep the order of arrival, so the oldest of a priority is always first.
        """
        for lane in self.lanes.values():
            hopeless = lane.blocked or self.reserved
            yield from lane.backlog.late(math.inf if hopeless else before)
            if lane.busy + lane.stuck > lane.limit:  # some of them wait for a thread
                for held in list(self.held.values()):
                    held.withdraw(before)

    # ---- the end

    def interrupt_all(self) -> None:
        """The grace period is over: stop what still runs and give it back."""
        for held in list(self.held.values()):
            held.interrupt(Interrupt.SHUTDOWN)

    async def wait_idle(self, limit: float) -> bool:
        """Wait for running handlers; False on timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while self.busy:
                    self._all_ended.clear()
                    await self._all_ended.wait()
        return not self.busy

    async def close(self) -> None:
        """End every place at once; a run being interrupted is settled first.

        A handler that cannot be stopped is left behind: it ends with the process.
        """
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        if not self.failure.done():
            self.failure.cancel()
        elif not self.failure.cancelled():
            self.failure.exception()  # retrieved, so that asyncio does not log it
