"""`Holdfast`, the app: the jobs that a program defines, and the way to send them.

An app is a registry and does no I/O until something is sent. Jobs are plain functions with a
contract attached: called directly they just run; `enqueue` sends a run of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import inspect
import weakref
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from datetime import datetime
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar, Unpack, overload

from holdfast import tracing
from holdfast.broker import Broker
from holdfast.client import Client, Run
from holdfast.client.bucket import Bucket, Data
from holdfast.client.run import Backend, Enqueued, Request, SendOptions, make_request
from holdfast.config import ConnectionConfig, RecordConfig, load
from holdfast.context import Context, SyncContext, current_run
from holdfast.durations import Duration, seconds
from holdfast.errors import DefinitionError, InvalidInput, UnknownJob
from holdfast.model import backoff
from holdfast.model.backoff import Backoff
from holdfast.model.job import Delivery, Execution, Fallback, GroupSpec, JobSpec, Lane, RestartSaid
from holdfast.model.run import Restart
from holdfast.model.schedule import CatchUp, Overlap, Schedule, define
from holdfast.names import (
    DEFAULT_GROUP,
    H_MSG_ID,
    IdMaker,
    check_event,
    check_event_id,
    check_name,
)
from holdfast.payload import Signature, encode_value

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")
CallNext = Callable[[], Awaitable[Any]]
Middleware = Callable[[Context, CallNext], Awaitable[Any]]
Hook = Callable[[], Awaitable[None] | None]

_OPTIONS = frozenset(SendOptions.__annotations__)
_make_event_id = IdMaker()


class JobOptions(TypedDict, total=False):
    """What `@app.job(...)` takes: the job's contract."""

    name: str | None
    """The job's name, instead of the function's."""
    group: str
    """The group whose workers run it."""
    delivery: Delivery
    retry: Backoff | None
    """When a failed attempt is repeated."""
    restart: Restart | None
    """What happens to a run whose worker died."""
    timeout: Duration | None
    """The longest that one attempt may take."""
    run_timeout: Duration | None
    """The longest that all attempts together may take."""
    on: str | Sequence[str]
    """Events that start a run each."""
    execution: Execution


class RuleOptions(TypedDict, total=False):
    """Options of a schedule's rule, besides its timing."""

    schedule: str | None
    """The schedule's name, instead of the job's."""
    tz: str
    jitter: Duration
    """Delay each slot by up to this time."""
    start: datetime | float | str | None
    end: datetime | float | str | None
    payload: Any
    headers: dict[str, str] | None
    catch_up: CatchUp
    """Which missed slots fire afterwards."""
    limit: int
    """How many missed slots fire at most."""
    overlap: Overlap
    """What to do when the run of the slot before has not ended."""
    run_on_start: bool


class ScheduleOptions(JobOptions, RuleOptions, total=False):
    """What `@app.cron(...)` and `@app.every(...)` take."""


class Job(Generic[P, R]):
    """A function registered with `@app.job`, and its contract.

    Call it as the plain function that it is, or `enqueue` it to have a worker run it.
    """

    def __init__(self, app: Holdfast, func: Callable[P, R], spec: JobSpec) -> None:
        self.app = app
        self.spec = spec
        self.func = func
        self.signature = Signature.of(func, (Context, SyncContext))
        self.is_async = inspect.iscoroutinefunction(func)
        self.lane: Lane = "loop" if self.is_async else "thread"
        if spec.execution == "process":
            _check_process(func, spec.name, self.is_async)
            self.lane = "process"
        functools.update_wrapper(self, func)

    @property
    def name(self) -> str:
        """The name under which it is sent and shown."""
        return self.spec.name

    def configured(self, restart: str, by_group: Mapping[str, str]) -> Job[P, R]:
        """The same job with the restart strategy that a worker's configuration chooses."""
        spec = self.spec.configured(restart, by_group)
        if spec == self.spec:
            return self
        found = copy.copy(self)
        found.spec = spec
        return found

    def __repr__(self) -> str:
        return f"<Job {self.spec.name} in group {self.spec.group}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it as the plain function that it is."""
        return self.func(*args, **kwargs)

    # The result of an `async def` handler is what awaiting it gives: each of these overloads has
    # that case first.

    @overload
    def options(
        self: Job[Any, Coroutine[Any, Any, V]], **options: Unpack[SendOptions]
    ) -> JobWithOptions[V]: ...
    @overload
    def options(self, **options: Unpack[SendOptions]) -> JobWithOptions[R]: ...
    def options(self, **options: Unpack[SendOptions]) -> JobWithOptions[Any]:
        """The job with its send options filled in, for parameters called `key`, `at`, …"""
        return JobWithOptions(self, options)

    @overload
    async def enqueue(
        self: Job[Any, Coroutine[Any, Any, V]], *args: Any, **kwargs: Any
    ) -> Run[V]: ...
    @overload
    async def enqueue(self, *args: Any, **kwargs: Any) -> Run[R]: ...
    async def enqueue(self, *args: Any, **kwargs: Any) -> Run[Any]:
        """Send a run, and return once the server has stored it.

        `key=`, `delay=`, `at=`, `headers=` and `group=` say how to send it; the other arguments are
        the payload. A parameter of the job with one of these names wins: use `options()` then.
        """
        return await self.app.send(self.request(*args, **kwargs))

    def request(self, *args: Any, **kwargs: Any) -> Request:
        """A run to be sent later by `enqueue_many`; takes what `enqueue` takes."""
        if _OPTIONS.isdisjoint(kwargs):
            return self.make_request(args, kwargs, {})
        names = _OPTIONS - set(self.signature.parameters)
        options = {k: v for k, v in kwargs.items() if k in names}
        payload = {k: v for k, v in kwargs.items() if k not in names}
        return self.make_request(args, payload, options)  # type: ignore[arg-type]  # by its names

    def make_request(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], options: SendOptions
    ) -> Request:
        """Encode the arguments and check the options."""
        body = self.signature.encode(args, kwargs)
        request = make_request(self.spec, body, current_run.get(), **options)
        if tracing.on():
            tracing.sent(f"enqueue {self.name}", request.headers, run=request.run)
        return request

    @overload
    async def enqueue_many(
        self: Job[Any, Coroutine[Any, Any, V]], items: Iterable[Any]
    ) -> list[Run[V]]: ...
    @overload
    async def enqueue_many(self, items: Iterable[Any]) -> list[Run[R]]: ...
    async def enqueue_many(self, items: Iterable[Any]) -> list[Run[Any]]:
        """Send many runs in batches. An item is a payload, or what `request()` returned."""
        requests = [i if isinstance(i, Request) else self.request(i) for i in items]
        return await self.app.enqueue_many(requests)

    def schedule(self, name: str, *, payload: Any = None, **rule: Any) -> Schedule:
        """A schedule of this job, to be added at run time with `Schedules.of(app)`.

        It takes one of `cron=`, `every=` and `at=`, and the options of `app.cron`.
        """
        given = dict(payload) if isinstance(payload, dict) else {}
        rest = () if payload is None or isinstance(payload, dict) else (payload,)
        body = self.signature.encode(rest, given)
        return define(name, self.name, group=self.spec.group, body=body, **rule)


class JobWithOptions(Generic[R]):
    """A job with its send options filled in: `job.options(key="42").enqueue(...)`."""

    def __init__(self, job: Job[Any, R], options: SendOptions) -> None:
        self._job = job
        self._options = options

    def request(self, *args: Any, **kwargs: Any) -> Request:
        """A run to be sent later by `enqueue_many`."""
        return self._job.make_request(args, kwargs, self._options)

    async def enqueue(self, *args: Any, **kwargs: Any) -> Run[R]:
        """Send a run with these arguments."""
        return await self._job.app.send(self.request(*args, **kwargs))


class Holdfast:
    """An app: the jobs and schedules of one program, and its connection to send them.

    app = Holdfast("shop")

    @app.job
    async def resize(image: int) -> None: ...

    async with app:
        await resize.enqueue(42)
    """

    def __init__(
        self, name: str, *, nats_url: str | None = None, namespace: str | None = None
    ) -> None:
        self.name = check_name(name, "app")
        self.jobs: dict[str, Job[Any, Any]] = {}
        self.schedules: dict[str, Schedule] = {}
        self.groups: dict[str, GroupSpec] = {}
        self.middlewares: list[Middleware] = []
        self.startup_hooks: list[Hook] = []
        self.shutdown_hooks: list[Hook] = []
        self._overrides = {"nats_url": nats_url, "namespace": namespace}
        self._backends: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Backend] = (
            weakref.WeakKeyDictionary()
        )
        self._bound: list[tuple[asyncio.AbstractEventLoop, Backend]] = []
        self._fixed: Backend | None = None

    def __repr__(self) -> str:
        return f"<Holdfast {self.name}: {len(self.jobs)} jobs>"

    # ---- defining

    @overload
    def job(self, func: Callable[P, R]) -> Job[P, R]: ...
    @overload
    def job(self, **contract: Unpack[JobOptions]) -> Callable[[Callable[P, R]], Job[P, R]]: ...
    def job(self, func: Any = None, **contract: Any) -> Any:
        """Register a function as a job: `@app.job`, or `@app.job(timeout="5m")`."""
        if func is not None:
            return self._register(func, contract)
        return lambda decorated: self._register(decorated, contract)

    def _register(self, func: Callable[..., Any], contract: dict[str, Any]) -> Job[Any, Any]:
        if not callable(func):
            raise DefinitionError(f"@app.job decorates a function, not {func!r}")
        spec = self._spec(contract.pop("name", None) or getattr(func, "__name__", ""), contract)
        if spec.name in self.jobs:
            raise DefinitionError(
                f"job {spec.name!r} is defined twice in app {self.name!r}: give one a name="
            )
        job: Job[Any, Any] = Job(self, func, spec)
        self.jobs[spec.name] = job
        return job

    def _spec(self, name: str, contract: dict[str, Any]) -> JobSpec:
        """A job's contract: what the job says, then what its group says."""
        group = self.groups.get(contract.get("group", DEFAULT_GROUP))
        said: RestartSaid = "job" if contract.get("restart") else ""
        if group is None:
            return dataclasses.replace(_spec(name, **contract), restart_said=said)
        ours = contract.get("delivery", "effectively_once") == "effectively_once"
        if ours and group.restart and not said:
            contract["restart"], said = group.restart, "group"
        return dataclasses.replace(
            _spec(name, **contract), fallback=group.fallback, restart_said=said
        )

    def group(
        self,
        name: str,
        *,
        restart: Restart | None = None,
        fallback: Fallback = "wait",
        profile: str = "",
    ) -> GroupSpec:
        """Define what the jobs and workers of a group have in common, before its first job."""
        if any(job.spec.group == name for job in self.jobs.values()):
            raise DefinitionError(f"group {name!r} must be described before its first job")
        self.groups[name] = GroupSpec(name, restart, fallback, profile)
        return self.groups[name]

    def cron(
        self, expression: str, **options: Unpack[ScheduleOptions]
    ) -> Callable[[Callable[P, R]], Job[P, R]]:
        """Run by a cron rule: 5 fields, 6 with seconds first, or a name such as `@hourly`.

        Also registers the function as a job, so it takes what `job` takes, and besides: `schedule=`
        (the schedule's name; by default the job's), `tz=`, `jitter=`, `start=`, `end=`, `payload=`,
        `headers=`, `catch_up=`, `limit=`, `overlap=`, `run_on_start=`. Above `@app.job` or another
        rule it adds a rule.
        """
        return lambda func: self._scheduled(func, {"cron": expression}, dict(options))

    def every(
        self, interval: Duration, **options: Unpack[ScheduleOptions]
    ) -> Callable[[Callable[P, R]], Job[P, R]]:
        """Run at a fixed interval of whole seconds; takes what `cron` takes."""
        return lambda func: self._scheduled(func, {"every": interval}, dict(options))

    def _scheduled(self, func: Any, rule: dict[str, Any], options: dict[str, Any]) -> Job[Any, Any]:
        names = RuleOptions.__annotations__.keys() & options.keys()
        own = {name: options.pop(name) for name in names}
        if isinstance(func, Job) and options:
            raise DefinitionError(
                f"job {func.name!r} is registered already: {', '.join(options)} belong to @app.job"
            )
        job = func if isinstance(func, Job) else self._register(func, options)
        name = own.pop("schedule", None) or job.name
        try:
            schedule = job.schedule(name, app=self.name, **rule, **own)
        except InvalidInput as error:
            raise DefinitionError(f"schedule {name!r}: {error}") from None
        if name in self.schedules:
            raise DefinitionError(
                f"schedule {name!r} is defined twice in app {self.name!r}: give one a schedule="
            )
        self.schedules[name] = schedule
        return job

    def middleware(self, func: Middleware) -> Middleware:
        """Wrap every attempt: `async def m(ctx, call_next): return await call_next()`."""
        if not inspect.iscoroutinefunction(func):
            raise DefinitionError("a middleware is an async function of (ctx, call_next)")
        self.middlewares.append(func)
        return func

    def on_startup(self, func: Hook) -> Hook:
        """Call a function once in each worker process before the first run."""
        self.startup_hooks.append(func)
        return func

    def on_shutdown(self, func: Hook) -> Hook:
        """Call a function once in each worker process after the last run."""
        self.shutdown_hooks.append(func)
        return func

    # ---- sending

    async def enqueue(self, job: str, *args: Any, **kwargs: Any) -> Run[Any]:
        """Send a run of one of this app's jobs, by its name."""
        return await self.job_named(job).enqueue(*args, **kwargs)

    def job_named(self, name: str) -> Job[Any, Any]:
        """One of this app's jobs; `UnknownJob` says which there are."""
        if name not in self.jobs:
            known = ", ".join(sorted(self.jobs)) or "none"
            raise UnknownJob(f"app {self.name!r} has no job {name!r}: it has {known}")
        return self.jobs[name]

    async def send(self, request: Request) -> Run[Any]:
        """Send what `job.request(...)` returned."""
        backend = await self.backend()
        return self.handle(request, await backend.enqueue(request), backend)

    async def enqueue_many(self, requests: Iterable[Request]) -> list[Run[Any]]:
        """Send requests of any jobs, in batches, in order."""
        wanted = list(requests)
        backend = await self.backend()
        answers = await backend.enqueue_many(wanted)
        return [self.handle(r, e, backend) for r, e in zip(wanted, answers, strict=True)]

    async def publish(self, event: str, data: Any = None, *, id: str | None = None) -> None:
        """Send an event from outside a run; with an `id`, repeats of it are detected."""
        body = encode_value(data)
        backend = await self.backend()
        headers = {H_MSG_ID: check_event_id(id) if id else _make_event_id("e")}
        tracing.sent(f"publish {event}", headers, event=event)
        await backend.publish_event(check_event(event), body, headers)

    # ---- records of the program

    @overload
    def bucket(self, name: str) -> Bucket[Any]: ...
    @overload
    def bucket(self, name: str, type: type[V]) -> Bucket[V]: ...
    def bucket(self, name: str, type: Any = Any) -> Bucket[Any]:
        """Records of this program, kept where its runs are; see `holdfast.Bucket`."""
        return Bucket(self._data, name, type)

    async def _data(self, name: str) -> Data:
        return await (await self.backend()).data(name)

    def handle(self, request: Request, enqueued: Enqueued, backend: Backend) -> Run[Any]:
        """The handle of an accepted run."""
        job = self.jobs.get(request.spec.name)
        returns = job.signature.returns if job else Any
        return Run(backend, request.spec, request.group, enqueued, returns)

    # ---- connection

    async def backend(self) -> Backend:
        """Where this event loop's runs go: to the worker's connection if one runs on this loop,
        else to a separate one, which is opened on first use."""
        if self._fixed is not None:
            return self._fixed
        loop = asyncio.get_running_loop()
        found = self._backends.get(loop) or self._bound_to(loop)
        if found is None:
            config = load(ConnectionConfig, **self._overrides)
            broker = Broker(config, name=f"{self.name} client")
            await broker.open()
            found = Client(broker, load(RecordConfig))
            if loop in self._backends:
                await broker.close()
                return self._backends[loop]
            self._backends[loop] = found
        return found

    def connection_config(self, **overrides: Any) -> ConnectionConfig:
        """How this app's processes connect."""
        given = {k: v for k, v in overrides.items() if v is not None}
        return load(ConnectionConfig, **{**self._overrides, **given})

    @contextlib.contextmanager
    def bound(self, backend: Backend) -> Iterator[None]:
        """Send this event loop's runs through `backend` meanwhile, unless it has a connection."""
        entry = (asyncio.get_running_loop(), backend)
        self._bound.append(entry)
        try:
            yield
        finally:
            self._bound.remove(entry)

    def _bound_to(self, loop: asyncio.AbstractEventLoop) -> Backend | None:
        return next((b for where, b in reversed(self._bound) if where is loop), None)

    def replace_backend(self, backend: Backend | None) -> Backend | None:
        """For tests: send everything to `backend` on every loop; returns the previous one."""
        before, self._fixed = self._fixed, backend
        return before

    async def close(self) -> None:
        """Close this event loop's connection, if sending has opened one."""
        backend = self._backends.pop(asyncio.get_running_loop(), None)
        if isinstance(backend, Client):
            await backend.broker.close()

    async def __aenter__(self) -> Holdfast:
        await self.backend()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _spec(
    name: str,
    *,
    group: str = DEFAULT_GROUP,
    delivery: Delivery = "effectively_once",
    retry: Backoff | None = None,
    restart: Restart | None = None,
    timeout: Duration | None = None,
    run_timeout: Duration | None = None,
    on: str | Sequence[str] = (),
    execution: Execution = "worker",
) -> JobSpec:
    once = delivery == "at_most_once"
    if retry is not None and not isinstance(retry, Backoff):
        raise DefinitionError(f"job {name!r}: retry= takes a Backoff, such as Backoff.linear()")
    return JobSpec(
        name,
        group,
        delivery,
        retry if retry is not None else (Backoff.never() if once else backoff.DEFAULT),
        restart if restart is not None else ("never" if once else "immediately"),
        seconds(timeout, "timeout") if timeout is not None else None,
        seconds(run_timeout, "run_timeout") if run_timeout is not None else None,
        (on,) if isinstance(on, str) else tuple(on),
        execution=execution,
    )


def _check_process(func: Callable[..., Any], name: str, is_async: bool) -> None:
    """Refuse a handler that a process of the pool could not import and call."""
    if is_async:
        raise DefinitionError(
            f"job {name!r}: execution='process' is for plain handlers: write `def`, not `async def`"
        )
    where = getattr(func, "__qualname__", "<")
    if "<" in where or not getattr(func, "__module__", ""):
        raise DefinitionError(
            f"job {name!r}: execution='process' needs a function that another process can import: "
            "define it at the top level of a module"
        )
