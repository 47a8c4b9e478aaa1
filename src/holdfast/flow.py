"""`Flow`: the context of a flow's function, and how it waits.

    @app.flow(timeout="30d")
    async def order(ctx: Flow, o: Order) -> Receipt:
        paid = await ctx.step(charge_card, o.card, o.total)
        ctx.undo(refund, paid)
        parts = await ctx.gather(pack.request(i) for i in o.items)
        await ctx.sleep("3d")
        ...

The function is called again from its beginning each time the flow wakes up, and every operation
that it has completed before returns its stored result at once. So everything that can differ
between two calls (the time, a random number, a file, another service) has to go through the
context; the rest is plain Python.

Operations run one after the other: one context cannot wait for two at once. For work in parallel,
`gather` children. While the flow waits, its function is not in memory: an exception that `except
Exception` does not catch ends the call, and `finally` blocks run. So put what must happen once, at
the end, into `undo` or a step, not into `finally`.
"""

from __future__ import annotations

import contextvars
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, overload

from holdfast.context import Context
from holdfast.durations import Duration, instant, seconds
from holdfast.errors import InvalidInput
from holdfast.model.backoff import Backoff
from holdfast.names import check_event

if TYPE_CHECKING:
    from holdfast.client.run import JobRequest

T = TypeVar("T")
V = TypeVar("V")


class Parked(BaseException):
    """Ends the call of a flow's function while the flow waits. Internal; never catch it."""


class Unwound(BaseException):
    """Ends the call of a flow's function because the flow was cancelled or is past its deadline."""

    def __init__(self, reason: Literal["cancelled", "timeout"], why: str) -> None:
        super().__init__(why)
        self.reason = reason


@dataclass(frozen=True)
class FlowStep:
    """The step that is being executed: `holdfast.current_step()`."""

    key: str
    """The same for all attempts of this step and different for every other step: use it as
    idempotency key."""
    epoch: int
    """Grows each time another process takes the flow over: store it, and reject smaller ones."""
    attempt: int
    """Counts from 1."""


running_step: contextvars.ContextVar[FlowStep | None] = contextvars.ContextVar(
    "holdfast_step", default=None
)


def current_step() -> FlowStep:
    """The step that the current code belongs to; its key makes an effect idempotent."""
    found = running_step.get()
    if found is None:
        raise InvalidInput("current_step() is for functions that `ctx.step` calls")
    return found


@dataclass(frozen=True)
class FlowEvent(Generic[T]):
    """An event that a flow has received. Its truth value is always true, whatever its data."""

    data: T
    at: datetime
    """When it was stored."""
    by: str = ""
    """Who sent it, as far as the sender said."""


@dataclass(frozen=True)
class Settled(Generic[T]):
    """How one child of `gather(..., settled=True)` has ended.

    It never raises:

        for end in await ctx.gather(requests, settled=True):
            print(end.result if end.ok else f"{end.run} is {end.state}: {end.error}")
    """

    run: str
    state: str
    """`done`, `cancelled`, `dead` or `lost`."""
    result: T | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is done."""
        return self.state == "done"


class Flowing(Protocol):
    """The execution behind a flow's context."""

    async def step(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None,
        retry: Backoff | None,
        timeout: float | None,
    ) -> Any: ...
    async def sleep(self, seconds: float | None, until: float) -> None: ...
    async def gather(self, requests: list[Any], settled: bool) -> list[Any]: ...
    async def start(self, request: Any) -> str: ...
    async def event(self, name: str, key: str, timeout: float | None, kind: Any) -> Any: ...
    async def publish(self, event: str, send: Callable[[], Awaitable[None]]) -> None: ...
    def undo(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Register a compensation."""

    def changed(self, name: str) -> bool: ...
    def value(self, name: str, make: Callable[[], Any]) -> Any: ...
    def now(self) -> float: ...
    def drive(self, function: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]: ...


class Flow(Context):
    """The context of a flow's function: all of `Context`, and the operations of a flow."""

    flowing: Flowing

    @overload
    async def step(
        self,
        func: Callable[..., Awaitable[V]],
        *args: Any,
        name: str | None = None,
        retry: Backoff | None = None,
        timeout: Duration | None = None,
        **kwargs: Any,
    ) -> V: ...
    @overload
    async def step(
        self,
        func: Callable[..., V],
        *args: Any,
        name: str | None = None,
        retry: Backoff | None = None,
        timeout: Duration | None = None,
        **kwargs: Any,
    ) -> V: ...
    async def step(
        self,
        func: Callable[..., Any],
        *args: Any,
        name: str | None = None,
        retry: Backoff | None = None,
        timeout: Duration | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function until its result is stored, then never again; a plain function runs in a
        thread.

        A failure is retried by `retry` (by default as for jobs); after the last attempt,
        `StepFailed` is raised. After a crash between the call and the write of its result, it is
        called again: make its effect idempotent with `current_step().key`. `timeout` limits one
        attempt. `name` identifies it in the journal instead of the function's name.
        """
        limit = seconds(timeout, "timeout") if timeout is not None else None
        return await self.flowing.step(func, args, kwargs, name, retry, limit)

    async def sleep(self, duration: Duration) -> None:
        """Wait; the flow is parked meanwhile and costs nothing but a stored message."""
        await self.flowing.sleep(seconds(duration, "sleep"), 0.0)

    async def sleep_until(self, when: datetime | float) -> None:
        """Wait until an instant."""
        await self.flowing.sleep(None, instant(when, "sleep_until"))

    async def call(self, request: JobRequest[V]) -> V:
        """Run a job or another flow as a child, on any worker, and return its result.

        Raises `RunFailed`, `RunCancelled` or `RunLost`, as `run.result()` does.
        """
        found: list[V] = await self.flowing.gather([request], False)
        return found[0]

    @overload
    async def gather(self, requests: Iterable[JobRequest[V]]) -> list[V]: ...
    @overload
    async def gather(
        self, requests: Iterable[JobRequest[V]], *, settled: Literal[False]
    ) -> list[V]: ...
    @overload
    async def gather(
        self, requests: Iterable[JobRequest[V]], *, settled: Literal[True]
    ) -> list[Settled[V]]: ...
    async def gather(self, requests: Iterable[JobRequest[Any]], *, settled: bool = False) -> Any:
        """Run children, wait for all of them, and return their results in order.

        If some fail, it raises the error of the first of these once all have ended. With
        `settled=True` it raises nothing and returns how each one ended.
        """
        return await self.flowing.gather(list(requests), settled)

    async def start(self, request: JobRequest[Any]) -> str:
        """Send a run without waiting for it; returns its id."""
        return await self.flowing.start(request)

    @overload
    async def event(
        self, name: str, *, key: str, timeout: Duration | None = None
    ) -> FlowEvent[Any] | None: ...
    @overload
    async def event(
        self, name: str, *, key: str, timeout: Duration | None = None, type: type[V]
    ) -> FlowEvent[V] | None: ...
    async def event(
        self, name: str, *, key: str, timeout: Duration | None = None, type: Any = Any
    ) -> FlowEvent[Any] | None:
        """Wait for `app.publish(name, data, key=key)`; returns None on a timeout.

        An event that was published earlier counts too: the newest one since the flow was enqueued,
        unless the flow has already received it.
        """
        given: object = key
        if not isinstance(given, str) or not given:
            raise InvalidInput("ctx.event() needs a key that is not empty")
        limit = seconds(timeout, "timeout") if timeout is not None else None
        found: FlowEvent[Any] | None = await self.flowing.event(check_event(name), key, limit, type)
        return found

    def undo(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a function if the flow fails, is cancelled or runs out of time.

        Compensations run in reverse order. Each is a step, with the retries of a job.
        """
        self.flowing.undo(func, args, kwargs)

    def changed(self, name: str) -> bool:
        """Whether this flow runs the code of a deliberate change; see "Changing a flow"."""
        return self.flowing.changed(name)

    def now(self) -> datetime:
        """The time, the same in every replay."""
        found = self.flowing.value("now", self.flowing.now)
        return datetime.fromtimestamp(float(found), UTC)

    def uuid(self) -> uuid.UUID:
        """A random UUID, the same in every replay."""
        return uuid.UUID(self.flowing.value("uuid", lambda: str(uuid.uuid4())))

    def random(self) -> float:
        """A random number from 0 to 1, the same in every replay."""
        import random

        return float(self.flowing.value("random", random.random))

    async def publish(self, event: str, data: Any = None) -> None:
        """Send an event to the jobs that subscribe to it, once."""
        await self.flowing.publish(check_event(event), lambda: Context.publish(self, event, data))
