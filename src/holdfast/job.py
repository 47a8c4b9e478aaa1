"""`Job`: a function registered with an app, its contract, and the ways to send a run of it.

Every way to send takes the handler's own parameters, checked by type checkers as a call of the
handler would be: `resize.enqueue(42)`, `resize.options(key="42").enqueue(42)`. A leading context is
left out. The options of sending are separate, in `options()`, because a parameter of the handler
may have any name; `enqueue(42, key="42")` works too, but no type checker can follow it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from holdfast import tracing
from holdfast.built_in_flows import ChainLink
from holdfast.client import JobRequest, Run
from holdfast.client.run import SendOptions, make_request
from holdfast.context import Context, SyncContext, current_run
from holdfast.errors import DefinitionError, InvalidInput
from holdfast.model.job import JobSpec, Lane
from holdfast.model.schedule import Schedule, define
from holdfast.options import ScheduleRule, check_options, check_process
from holdfast.payload import KeyRule, Signature

if TYPE_CHECKING:
    from holdfast.app import Holdfast

P = ParamSpec("P")
A = TypeVar("A")
V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)
G = TypeVar("G", bound=Callable[..., Any])
F_co = TypeVar("F_co", bound=Callable[..., Any], covariant=True)

# The forms of a handler: `async def` or plain, with a leading context or without one. `A` is the
# first other parameter. Overloads list the more specific form first.
Result = Coroutine[Any, Any, V]
WithContext = Callable[Concatenate[Context, P], Result[V]]
WithSyncContext = Callable[Concatenate[SyncContext, P], V]


class _Nothing:
    """Only a parameter without a type, or of type `Any` or `object`, accepts this."""


Untyped = Callable[Concatenate[_Nothing, ...], V]
"""A handler that may or may not have a leading context: its arguments are not checked."""

_OPTIONS = frozenset(SendOptions.__annotations__)


class Sendable(Protocol[P, V_co]):
    """A job, or `job.options(...)`, as `SyncApp` and the outbox take them: type checkers compare
    the arguments with the parameters of the handler."""

    @property
    def app(self) -> Holdfast: ...

    def request(self, *args: P.args, **kwargs: P.kwargs) -> JobRequest[V_co]: ...


class Job(Generic[F_co]):
    """A function registered with `@app.job`, and its contract.

    Call it as the plain function that it is, or `enqueue` it to have a worker run it.
    """

    def __init__(
        self,
        app: Holdfast,
        func: F_co,
        spec: JobSpec,
        key: str | Callable[..., object] | None = None,
    ) -> None:
        self.app = app
        self.spec = spec
        self.func = func
        self.signature = Signature.of(func, (Context, SyncContext))
        if spec.flow:
            self._check_flow(func)
        self.key = KeyRule(spec.name, key, self.signature) if key is not None else None
        if key is not None and not spec.recorded:
            raise DefinitionError(
                f"job {spec.name!r}: key= needs the run's record, which delivery='at_least_once' "
                "does not keep"
            )
        self.is_async = inspect.iscoroutinefunction(func)
        self.lane: Lane = "loop" if self.is_async else "thread"
        if spec.execution == "process":
            check_process(func, spec.name, self.is_async)
            if self.signature.resources:
                raise DefinitionError(
                    f"job {spec.name!r}: execution='process' cannot be handed a resource, which is "
                    "open in the worker's process: open it in the handler's module"
                )
            self.lane = "process"
        self.rehearsing: Callable[..., Any] | None = None
        self._check_limits()
        functools.update_wrapper(self, func)

    def _check_flow(self, func: Callable[..., Any]) -> None:
        if not inspect.iscoroutinefunction(func) or not self.signature.contexts:
            raise DefinitionError(
                f"flow {self.name!r}: write `async def {self.name}(ctx: Flow, ...)`: a flow is "
                "async, and does everything through its context"
            )

    def rehearsal(self, func: G) -> G:
        """Decorate a function that says what the job would change on an agent.

        It takes the job's arguments and changes nothing; see `holdfast fleet run --test`.
        """
        self.rehearsing = func
        return func

    @property
    def name(self) -> str:
        """The name under which it is sent and shown."""
        return self.spec.name

    def _check_limits(self) -> None:
        names = self.signature.parameters
        keys = [limit.per for limit in self.spec.limits]
        keys += [self.spec.debounce.per] if self.spec.debounce else []
        for per in keys:
            if per and len(names) > 1 and per not in names:
                raise DefinitionError(
                    f"job {self.name!r}: per={per!r} is not a member of its payload, which "
                    f"has {', '.join(names)}"
                )

    def configured(self, restart: str, by_group: Mapping[str, str]) -> Job[F_co]:
        """The same job with the restart strategy from a worker's configuration."""
        spec = self.spec.configured(restart, by_group)
        if spec == self.spec:
            return self
        found = copy.copy(self)
        found.spec = spec
        return found

    def __repr__(self) -> str:
        return f"<Job {self.spec.name} in group {self.spec.group}>"

    def __call__(self: Job[Callable[P, V]], *args: P.args, **kwargs: P.kwargs) -> V:
        """Call it as the plain function that it is."""
        return self.func(*args, **kwargs)

    def options(self: Sendable[P, V], **options: Unpack[SendOptions]) -> JobWithOptions[P, V]:
        """The job with its send options filled in: `job.options(key="42").enqueue(...)`."""
        check_options(options, _OPTIONS, "job.options()", InvalidInput)
        return JobWithOptions(cast("Job[Any]", self), options)

    async def enqueue(self: Sendable[P, V], *args: P.args, **kwargs: P.kwargs) -> Run[V]:
        """Send a run with these arguments, and return once the server has stored it.

        `options()` says how to send it. Its options are accepted here too, unless a parameter of
        the job has the same name; type checkers do not know that.
        """
        return await self.app.send(self.request(*args, **kwargs))

    @overload
    def request(self: Job[Untyped[Result[V]]], *args: Any, **kwargs: Any) -> JobRequest[V]: ...
    @overload
    def request(self: Job[Untyped[V]], *args: Any, **kwargs: Any) -> JobRequest[V]: ...
    @overload
    def request(
        self: Job[WithContext[P, V]], *args: P.args, **kwargs: P.kwargs
    ) -> JobRequest[V]: ...
    @overload
    def request(
        self: Job[WithSyncContext[P, V]], *args: P.args, **kwargs: P.kwargs
    ) -> JobRequest[V]: ...
    @overload
    def request(
        self: Job[Callable[P, Result[V]]], *args: P.args, **kwargs: P.kwargs
    ) -> JobRequest[V]: ...
    @overload
    def request(self: Job[Callable[P, V]], *args: P.args, **kwargs: P.kwargs) -> JobRequest[V]: ...
    def request(self, *args: Any, **kwargs: Any) -> JobRequest[Any]:
        """A request to send later, e.g. with `enqueue_many`; takes what `enqueue` takes."""
        return self._request(args, kwargs)

    def _request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JobRequest[Any]:
        if _OPTIONS.isdisjoint(kwargs):
            return self.make_request(args, kwargs, {})
        names = _OPTIONS - set(self.signature.parameters)
        options = {k: v for k, v in kwargs.items() if k in names}
        payload = {k: v for k, v in kwargs.items() if k not in names}
        return self.make_request(args, payload, options)  # type: ignore[arg-type]  # by its names

    def link(self, **given: Any) -> ChainLink:
        """A part of `app.chain(...)`, or the `then=` of a batch: the first parameter that is not
        given gets the result of the previous part."""
        names = self.signature.parameters
        check_options(given, names, f"{self.name}.link()", InvalidInput)
        left = [name for name in names if name not in given]
        return ChainLink(self.spec, given, left[0] if left else "", len(names) == 1)

    def make_request(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], options: SendOptions
    ) -> JobRequest[Any]:
        """Encode the arguments and check the options."""
        body = self.signature.encode(args, kwargs)
        if self.key is not None and options.get("key") is None:
            options = {**options, "key": self.key.of(self.signature.decode(body))}
        request = make_request(self.spec, body, current_run.get(), **options)
        if tracing.on():
            tracing.sent(f"enqueue {self.name}", request.headers, run=request.run)
        return request

    @overload
    async def enqueue_many(
        self: Sendable[Concatenate[A, ...], V], items: Iterable[A | JobRequest[V]]
    ) -> list[Run[V]]: ...
    @overload
    async def enqueue_many(
        self: Sendable[..., V], items: Iterable[JobRequest[V]]
    ) -> list[Run[V]]: ...
    async def enqueue_many(self: Sendable[..., Any], items: Iterable[Any]) -> list[Run[Any]]:
        """Send many runs in batches. An item is a payload, or what `request()` returned."""
        return await self.app.enqueue_many(
            i if isinstance(i, JobRequest) else self.request(i) for i in items
        )

    def run(self: Sendable[..., V], id: str) -> Run[V]:
        """A handle on a run of this job by its id, with the type of its result; see `app.run`."""
        return self.app.run(id)

    @overload
    def schedule(
        self: Sendable[Concatenate[A, ...], Any],
        name: str,
        *,
        payload: A | JobRequest[Any] | Mapping[str, Any] | None = None,
        **rule: Unpack[ScheduleRule],
    ) -> Schedule: ...
    @overload
    def schedule(
        self: Sendable[..., Any],
        name: str,
        *,
        payload: JobRequest[Any] | None = None,
        **rule: Unpack[ScheduleRule],
    ) -> Schedule: ...
    def schedule(
        self: Sendable[..., Any], name: str, *, payload: Any = None, **rule: Any
    ) -> Schedule:
        """A schedule of this job, to be added at run time with `Schedules.of(app)`.

        It takes one of `cron=`, `every=` and `at=`, and the options of `app.cron`. The payload of a
        job with several parameters is `job.request(...)`, or a dict of its arguments.
        """
        check_options(rule, ScheduleRule.__annotations__, "job.schedule()", InvalidInput)
        return cast("Job[Any]", self).make_schedule(name, payload, **rule)

    def make_schedule(self, name: str, payload: Any, **rule: Any) -> Schedule:
        """Encode the payload and check the rule."""
        if isinstance(payload, JobRequest):
            body = payload.body
        else:
            given = dict(payload) if isinstance(payload, dict) else {}
            rest = () if payload is None or isinstance(payload, dict) else (payload,)
            body = self.signature.encode(rest, given)
        return define(name, self.name, group=self.spec.group, body=body, **rule)


class JobWithOptions(Generic[P, V]):
    """A job with its send options filled in: `job.options(key="42").enqueue(...)`."""

    def __init__(self, job: Job[Any], options: SendOptions) -> None:
        self.app = job.app
        self._job = job
        self._options = options

    def request(self, *args: P.args, **kwargs: P.kwargs) -> JobRequest[V]:
        """A request to send later, e.g. with `enqueue_many`."""
        return self._job.make_request(args, kwargs, self._options)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Run[V]:
        """Send a run with these arguments."""
        return await self._job.app.send(self.request(*args, **kwargs))
