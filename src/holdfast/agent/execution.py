"""Execution: mutating commands run one at a time, the others concurrently.

Guaranteed: each accepted command ends in exactly one `Return`: done, failed, timed out, cancelled
while waiting or running, or interrupted by the end of the agent. The queue is bounded: a command
that does not fit is refused as busy before it is accepted.

Not guaranteed: that a plain function in a thread stops when cancelled. Its return says cancelled,
but the thread runs to its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.agent.functions import Call, Function, Functions
from holdfast.errors import HoldfastError, Unreadable
from holdfast.model.fleet import VALUE, Order, Outcome, Return
from holdfast.redaction import REDACTOR

log = logging.getLogger("holdfast.agent")

Finished = Callable[[Return], None]


class AcceptedCommand:
    """One accepted command."""

    __slots__ = ("call", "ended", "function", "order", "stop", "task")

    def __init__(self, call: Call, function: Function | None, order: Order) -> None:
        self.call = call
        self.function = function
        self.order = order
        self.task: asyncio.Task[None] | None = None
        self.stop: tuple[Outcome, str] | None = None
        """Why it was stopped."""
        self.ended = False


class CommandExecutor:
    """Runs the commands of one agent."""

    def __init__(
        self,
        functions: Functions,
        finished: Finished,
        *,
        now: Callable[[], float],
        monotonic: Callable[[], float],
        queue_size: int = 64,
        concurrency: int = 32,
    ) -> None:
        self._functions = functions
        self._finished = finished
        self._now = now
        self._monotonic = monotonic
        self._queue_size = queue_size
        self._concurrency = concurrency
        self._queue: deque[AcceptedCommand] = deque()
        self._waiting: deque[AcceptedCommand] = deque()
        self._changing: AcceptedCommand | None = None
        self._reading = 0
        self._works: dict[str, AcceptedCommand] = {}
        self._closing = False

    @property
    def running(self) -> int:
        return len(self._works)

    def has(self, run: str) -> bool:
        """Whether a command waits or runs."""
        return run in self._works

    def busy(self, order: Order) -> bool:
        """Whether the queue is full."""
        if self._mutates(order):
            return len(self._queue) >= self._queue_size
        return len(self._waiting) >= self._queue_size

    def _mutates(self, order: Order) -> bool:
        try:
            return self._functions.get(order.function).mutating
        except HoldfastError:
            return False  # it will be refused as soon as its turn comes

    def submit(self, call: Call, order: Order) -> bool:
        """Queue a command, and start it when possible; True if it has ended already."""
        try:
            function: Function | None = self._functions.get(order.function)
        except HoldfastError:
            function = None
        work = self._works[call.run] = AcceptedCommand(call, function, order)
        if function is None or (function.quick and not function.mutating):
            self._run_now(work)
            return True
        (self._queue if function.mutating else self._waiting).append(work)
        self._start_next()
        return False

    def _start_next(self) -> None:
        while self._waiting and self._reading < self._concurrency:
            self._reading += 1
            self._start(self._waiting.popleft(), changes=False)
        if self._queue and self._changing is None:
            self._changing = self._queue.popleft()
            self._start(self._changing, changes=True)

    def _start(self, work: AcceptedCommand, *, changes: bool) -> None:
        name = f"holdfast-command-{work.call.run}"
        work.task = asyncio.create_task(self._run(work), name=name)

        def over(_: asyncio.Task[None]) -> None:
            if changes:
                self._changing = None
            else:
                self._reading -= 1
            if not work.ended:  # cancelled before its first step
                outcome, why = work.stop or ("interrupted", "the agent ended")
                self._end(work, outcome, 0.0, error=why)
            self._start_next()

        work.task.add_done_callback(over)

    def _run_now(self, work: AcceptedCommand) -> None:
        """Execute without a task."""
        started = self._monotonic()
        try:
            function, args, kwargs = self._bound(work)
            value = function.handler(*args, **kwargs)
        except KeyboardInterrupt:  # Ctrl-C is for the agent
            raise
        except BaseException as failure:  # noqa: BLE001 - a user's function may raise anything
            self._end_badly(work, started, failure)
        else:
            self._end(work, "ok", self._monotonic() - started, value=value)

    async def _run(self, work: AcceptedCommand) -> None:
        started = self._monotonic()
        try:
            value = await self._call(work)
        except KeyboardInterrupt:
            raise
        except BaseException as failure:  # noqa: BLE001 - likewise
            self._end_badly(work, started, failure)
        else:
            self._end(work, "ok", self._monotonic() - started, value=value)

    def _end_badly(self, work: AcceptedCommand, started: float, failure: BaseException) -> None:
        outcome: Outcome = "failed"
        if isinstance(failure, TimeoutError):
            outcome, error = "timeout", "the run's time was over before it ended"
        elif isinstance(failure, asyncio.CancelledError):
            outcome, error = work.stop or self._cancelled()
        elif isinstance(failure, HoldfastError):
            error = str(failure)
        else:
            error = f"{type(failure).__name__}: {failure}"
            log.warning("%s of run %s failed: %s", work.order.function, work.call.run, error)
        self._end(work, outcome, self._monotonic() - started, error=error)

    def _cancelled(self) -> tuple[Outcome, str]:
        """A cancellation that is not ours: by the function itself, or the end of the event loop."""
        if self._closing:
            return "interrupted", "the agent ended"
        return "failed", "CancelledError: the function cancelled itself"

    def _bound(self, work: AcceptedCommand) -> tuple[Function, tuple[Any, ...], dict[str, Any]]:
        function = work.function or self._functions.get(work.order.function)
        return function, *function.bind(work.order)

    async def _call(self, work: AcceptedCommand) -> Any:
        function, args, kwargs = self._bound(work)
        if not work.order.deadline:
            return await function.call(args, kwargs, work.call)
        async with asyncio.timeout(max(0.0, work.order.deadline - self._now())):
            return await function.call(args, kwargs, work.call)

    def _end(
        self,
        work: AcceptedCommand,
        outcome: Outcome,
        seconds: float,
        *,
        value: Any = None,
        error: str = "",
    ) -> None:
        work.ended = True
        self._works.pop(work.call.run, None)
        call = work.call
        try:
            value = REDACTOR.scrub_values(VALUE.decode(msgspec.json.encode(value)))
        except Unreadable as problem:
            outcome, value, error = "failed", None, str(problem)
        except (TypeError, ValueError, OverflowError, RecursionError) as problem:
            outcome, value, error = "failed", None, f"what it returned is not JSON: {problem}"
        self._finished(
            Return(
                call.run,
                call.agent,
                outcome,
                value,
                REDACTOR.scrub(error),
                round(seconds, 6),
                self._now(),
                call.epoch,
            )
        )

    # ---- stopping

    def cancel(self, run: str, why: str, outcome: Outcome = "cancelled") -> bool:
        """Stop a waiting or running command; False if it is unknown or already stopped."""
        work = self._works.get(run)
        if work is None or work.stop is not None:
            return False
        work.stop = (outcome, why)
        if work.task is not None:
            work.task.cancel()
            return True
        for queue in (self._queue, self._waiting):
            if work in queue:
                queue.remove(work)
        self._end(work, outcome, 0.0, error=why)
        return True

    async def close(self, grace: float) -> None:
        """Let running commands finish within the grace period; stop the rest."""
        self._closing = True
        for work in [*self._queue, *self._waiting]:
            self.cancel(work.call.run, "the agent ended before its turn came", "interrupted")
        tasks = [w.task for w in self._works.values() if w.task]
        if tasks and grace:
            await asyncio.wait(tasks, timeout=grace)
        for run in list(self._works):
            self.cancel(run, "the agent ended while it ran", "interrupted")
        if tasks:
            await asyncio.wait(tasks, timeout=2)
