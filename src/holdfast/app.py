"""`Holdfast`, the app: the jobs that a program defines, and the way to send them.

An app is a registry and does no I/O until something is sent. Jobs are plain functions with a
contract attached: called directly they just run; `enqueue` sends a run of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, overload

from holdfast import tracing
from holdfast.broker import Broker
from holdfast.built_in_flows import BATCH, CHAIN, ChainLink, asked, batch, chain
from holdfast.client import Client, Run
from holdfast.client.bucket import Bucket, Data
from holdfast.client.once import BUCKET, Once, OnceStore
from holdfast.client.run import Backend, Enqueued, JobRequest, Request, RunById
from holdfast.config import ConnectionConfig, RecordConfig, load
from holdfast.context import Context, sending
from holdfast.durations import Duration
from holdfast.errors import DefinitionError, InvalidInput, UnknownJob
from holdfast.flow import Flow
from holdfast.job import Job
from holdfast.model.backoff import Backoff
from holdfast.model.job import Fallback, GroupSpec
from holdfast.model.limit import Limit, WhenFull
from holdfast.model.run import Restart
from holdfast.model.schedule import Schedule
from holdfast.names import (
    DEFAULT_GROUP,
    H_MSG_ID,
    H_USER,
    IdMaker,
    check_event,
    check_event_id,
    check_header,
    check_name,
)
from holdfast.options import (
    FlowOptions,
    JobOptions,
    RuleOptions,
    ScheduleOptions,
    check_options,
    make_spec,
    name_limits,
)
from holdfast.ownership.store import MemoryStore
from holdfast.payload import encode_value
from holdfast.resources import Resource

F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")
P = ParamSpec("P")
CallNext = Callable[[], Awaitable[Any]]
Middleware = Callable[[Context, CallNext], Awaitable[Any]]
Hook = Callable[[], Awaitable[None] | None]

_make_event_id = IdMaker()


class FlowDecorator(Protocol):
    """What `@app.flow(...)` with options returns: a leading context is no part of the payload."""

    @overload
    def __call__(
        self, func: Callable[Concatenate[Flow, P], Coroutine[Any, Any, V]], /
    ) -> Job[Callable[P, Coroutine[Any, Any, V]]]: ...
    @overload
    def __call__(
        self, func: Callable[..., Coroutine[Any, Any, V]], /
    ) -> Job[Callable[..., Coroutine[Any, Any, V]]]: ...


def _check_sending() -> None:
    """Refuse to send from a flow's function itself: every replay would send again."""
    if sending.get():
        raise InvalidInput(
            "inside a flow, send with its context: `await ctx.call(job.request(...))` or "
            "`ctx.gather(...)` wait for the result, `ctx.start(...)` does not, `ctx.publish(...)` "
            "sends an event. A replay of the flow would send this again"
        )


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
        self.jobs: dict[str, Job[Any]] = {}
        self.schedules: dict[str, Schedule] = {}
        self.groups: dict[str, GroupSpec] = {}
        self.limits: dict[str, Limit] = {}
        self.middlewares: list[Middleware] = []
        self.startup_hooks: list[Hook] = []
        self.shutdown_hooks: list[Hook] = []
        self._overrides: dict[str, Any] = {"nats_url": nats_url, "namespace": namespace}
        self.resources: dict[Callable[[], Any], Resource[Any]] = {}
        self._once: MemoryStore | None = None
        self._backends: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Backend] = (
            weakref.WeakKeyDictionary()
        )
        self._bound: list[tuple[asyncio.AbstractEventLoop, Backend]] = []
        self._fixed: Backend | None = None

    def __repr__(self) -> str:
        return f"<Holdfast {self.name}: {len(self.jobs)} jobs>"

    # ---- defining

    @overload
    def job(self, func: F) -> Job[F]: ...
    @overload
    def job(self, **contract: Unpack[JobOptions]) -> Callable[[F], Job[F]]: ...
    def job(self, func: Any = None, **contract: Any) -> Any:
        """Register a function as a job: `@app.job`, or `@app.job(timeout="5m")`."""
        check_options(contract, JobOptions.__annotations__, "@app.job", DefinitionError)
        if func is not None:
            return self._register(func, contract)
        return lambda decorated: self._register(decorated, contract)

    @overload
    def flow(
        self, func: Callable[Concatenate[Flow, P], Coroutine[Any, Any, V]]
    ) -> Job[Callable[P, Coroutine[Any, Any, V]]]: ...
    @overload
    def flow(
        self, func: Callable[..., Coroutine[Any, Any, V]]
    ) -> Job[Callable[..., Coroutine[Any, Any, V]]]: ...
    @overload
    def flow(self, **contract: Unpack[FlowOptions]) -> FlowDecorator: ...
    def flow(self, func: Any = None, **contract: Any) -> Any:
        """Register a function that survives its processes: `@app.flow(timeout="30d")`.

        It is sent, scheduled and started by events like a job; see `holdfast.Flow` for what it can
        do.
        """
        check_options(contract, FlowOptions.__annotations__, "@app.flow", DefinitionError)
        contract["run_timeout"] = contract.pop("timeout", None)
        contract |= {"flow": True, "retry": Backoff.never()}
        if func is not None:
            return self._register(func, contract)
        return lambda decorated: self._register(decorated, dict(contract))

    def _register(self, func: Callable[..., Any], contract: dict[str, Any]) -> Job[Any]:
        if not callable(func):
            raise DefinitionError(f"@app.job decorates a function, not {func!r}")
        key = contract.pop("key", None)
        name = contract.pop("name", None) or getattr(func, "__name__", "")
        contract["limits"] = name_limits(self.name, self.limits, name, contract.get("limits", ()))
        spec = make_spec(name, self.groups.get(contract.get("group", DEFAULT_GROUP)), contract)
        if spec.name in self.jobs:
            raise DefinitionError(
                f"job {spec.name!r} is defined twice in app {self.name!r}: give one a name="
            )
        job: Job[Any] = Job(self, func, spec, key)
        self.limits |= {limit.name: limit for limit in spec.limits}
        self.jobs[spec.name] = job
        return job

    def limit(
        self,
        name: str,
        *,
        running: int | None = None,
        starts: str | None = None,
        burst: int | None = None,
        per: str = "",
        when_full: WhenFull = "wait",
    ) -> Limit:
        """Define a limit that several jobs share: `@app.job(limits=[stripe])` in each of them."""
        limit = Limit(
            running=running, starts=starts, burst=burst, per=per, when_full=when_full, name=name
        )
        if name in self.limits:
            raise DefinitionError(f"limit {name!r} is defined twice in app {self.name!r}")
        self.limits[name] = limit
        return limit

    def group(
        self,
        name: str,
        *,
        restart: Restart | None = None,
        fallback: Fallback = "wait",
        profile: str = "",
    ) -> GroupSpec:
        """Set defaults for the jobs and workers of a group; call it before the group's first
        job."""
        if any(job.spec.group == name for job in self.jobs.values()):
            raise DefinitionError(f"group {name!r} must be described before its first job")
        self.groups[name] = GroupSpec(name, restart, fallback, profile)
        return self.groups[name]

    def cron(self, expression: str, **options: Unpack[ScheduleOptions]) -> Callable[[F], Job[F]]:
        """Run by a cron rule: 5 fields, 6 with seconds first, or a name such as `@hourly`.

        Also registers the function as a job, so it takes what `job` takes, and in addition:
        `schedule=` (the schedule's name; by default the job's), `tz=`, `jitter=`, `start=`, `end=`,
        `payload=`, `headers=`, `catch_up=`, `limit=`, `overlap=`, `run_on_start=`. Above `@app.job`
        or another rule it adds a rule.
        """
        check_options(options, ScheduleOptions.__annotations__, "@app.cron", DefinitionError)
        return lambda func: self._scheduled(func, {"cron": expression}, dict(options))

    def every(
        self, interval: Duration, **options: Unpack[ScheduleOptions]
    ) -> Callable[[F], Job[F]]:
        """Run at a fixed interval of whole seconds; takes what `cron` takes."""
        check_options(options, ScheduleOptions.__annotations__, "@app.every", DefinitionError)
        return lambda func: self._scheduled(func, {"every": interval}, dict(options))

    def _scheduled(self, func: Any, rule: dict[str, Any], options: dict[str, Any]) -> Job[Any]:
        names = RuleOptions.__annotations__.keys() & options.keys()
        own = {name: options.pop(name) for name in names}
        if isinstance(func, Job) and options:
            raise DefinitionError(
                f"job {func.name!r} is registered already: {', '.join(options)} belong to @app.job"
            )
        job = func if isinstance(func, Job) else self._register(func, options)
        name = own.pop("schedule", None) or job.name
        try:
            schedule = job.make_schedule(
                name, own.pop("payload", None), app=self.name, **rule, **own
            )
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

    @overload
    def resource(self, opener: Callable[[], AsyncIterator[V]]) -> Resource[V]: ...
    @overload
    def resource(self, opener: Callable[[], Iterator[V]]) -> Resource[V]: ...
    @overload
    def resource(self, opener: Callable[[], Awaitable[V]]) -> Resource[V]: ...
    @overload
    def resource(self, opener: Callable[[], V]) -> Resource[V]: ...
    def resource(self, opener: Callable[[], Any]) -> Resource[Any]:
        """Register something that handlers share: opened once per process, passed in by parameter.

        The function yields the opened value, or returns it; see `holdfast.resources`. The same
        function gives the same resource.
        """
        if opener not in self.resources:
            self.resources[opener] = Resource(opener)
        return self.resources[opener]

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

    def job_named(self, name: str) -> Job[Any]:
        """One of this app's jobs; `UnknownJob` says which there are."""
        if name not in self.jobs:
            known = ", ".join(sorted(self.jobs)) or "none"
            raise UnknownJob(f"app {self.name!r} has no job {name!r}: it has {known}")
        return self.jobs[name]

    async def send(self, request: JobRequest[V]) -> Run[V]:
        """Send what `job.request(...)` returned."""
        _check_sending()
        backend = await self.backend()
        return self.handle(request, await backend.enqueue(request), backend)

    @overload
    async def enqueue_many(self, requests: Iterable[JobRequest[V]]) -> list[Run[V]]: ...
    @overload
    async def enqueue_many(self, requests: Iterable[Request]) -> list[Run[Any]]: ...
    async def enqueue_many(self, requests: Iterable[Request]) -> list[Run[Any]]:
        """Send requests of any jobs, in batches, in order."""
        _check_sending()
        wanted = list(requests)
        backend = await self.backend()
        answers = await backend.enqueue_many(wanted)
        return [self.handle(r, e, backend) for r, e in zip(wanted, answers, strict=True)]

    def built_in_flows(self) -> tuple[Job[Any], Job[Any]]:
        """Add the flows behind `batch` and `chain` to this app, so that its workers run them.

        Call it beside your jobs: each costs a worker of the default group one more consumer.
        """
        for name, func in ((BATCH, batch), (CHAIN, chain)):
            if name not in self.jobs:
                self._register(func, {"name": name, "flow": True, "retry": Backoff.never()})
        return self.jobs[BATCH], self.jobs[CHAIN]

    async def batch(
        self,
        requests: Iterable[Request],
        then: Request | ChainLink | None = None,
        *,
        key: str | None = None,
    ) -> Run[Any]:
        """Run many requests, then one more that gets their outcomes; returns once stored.

        `then=report.link()` gets a `BatchEnd`, as `then=report.request(...)` does not. Without
        `then` the result of the batch is the `BatchEnd`.
        """
        payload = [asked(one) for one in requests], asked(then) if then is not None else None
        job = self._built_in(BATCH, "batch")
        return await job.options(key=key).enqueue(*payload)

    async def chain(self, *requests: Request | ChainLink, key: str | None = None) -> Run[Any]:
        """Run requests one after the other; returns once stored.

        `job.link(...)` gets the result of the one before, `job.request(...)` does not. The result
        of the chain is that of its last part.
        """
        job = self._built_in(CHAIN, "chain")
        return await job.options(key=key).enqueue([asked(one) for one in requests])

    def _built_in(self, name: str, method: str) -> Job[Any]:
        if name not in self.jobs:
            raise InvalidInput(
                f"app.{method}() needs a flow that workers know: call `app.built_in_flows()` "
                "beside the jobs of your app"
            )
        return self.jobs[name]

    # ---- runs by their id

    def run(self, id: str) -> Run[Any]:
        """A handle on a run by its id, whoever sent it; see `RunById`."""
        return RunById(id, self.backend, self._returns)

    async def runs(
        self, *, job: str = "", state: str = "", key: str = "", limit: int = 100
    ) -> list[Run[Any]]:
        """Handles on the matching runs, the most recently changed first, with `id`, `job` and
        `state`."""
        found = await (await self.backend()).list_runs(job, state, key, limit)
        return [RunById(s.run, self.backend, self._returns, s) for s in found]

    def _returns(self, job: str) -> Any:
        return self.jobs[job].signature.returns if job in self.jobs else Any

    # ---- events

    async def publish(
        self,
        event: str,
        data: Any = None,
        *,
        id: str | None = None,
        key: str | None = None,
        by: str = "",
    ) -> None:
        """Send an event from outside a run; with an `id`, repeats of it are detected.

        With a `key` it also reaches the flows that wait for it with `ctx.event(event, key=key)`,
        now or later; `by` tells them who sent it.
        """
        _check_sending()
        body = encode_value(data)
        backend = await self.backend()
        headers = {H_MSG_ID: check_event_id(id) if id else _make_event_id("e")}
        tracing.sent(f"publish {event}", headers, event=event)
        if key is None:
            await backend.publish_event(check_event(event), body, headers)
            return
        check_header("by", by)
        told = {H_USER: by} if by else {}
        await backend.publish_signal(check_event(event), key, body, headers | told)

    # ---- records of the program

    @overload
    def bucket(self, name: str) -> Bucket[Any]: ...
    @overload
    def bucket(self, name: str, type: type[V]) -> Bucket[V]: ...
    def bucket(self, name: str, type: Any = Any) -> Bucket[Any]:
        """A bucket for this program's own records, stored beside its runs; see
        `holdfast.Bucket`."""
        return Bucket(self._data, name, type)

    def once(self, key: str, *, ttl: Duration = "24h", timeout: float | None = None) -> Once:
        """A guard around work that is no job, so that it is done once; see `holdfast.client.once`.

            async with app.once("document-42", ttl="24h") as first:
                if first:
                    ...

        It waits while somebody else holds the guard, and raises `StillHeld` after `timeout`
        seconds. With `record.once = "memory"` it guards only within this process.
        """
        return Once(self._once_store, key, ttl, timeout)

    async def _once_store(self) -> OnceStore:
        if self._fixed is None and load(RecordConfig).once == "memory":
            self._once = self._once or MemoryStore()
            return self._once
        return await self._data(BUCKET)

    async def _data(self, name: str) -> Data:
        return await (await self.backend()).data(name)

    def handle(self, request: Request, enqueued: Enqueued, backend: Backend) -> Run[Any]:
        """The handle of an accepted run."""
        returns = self._returns(request.spec.name)
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

    def connect_with(self, **overrides: Any) -> None:
        """Connect with these values from now on, as flags of a command give them."""
        self._overrides |= {k: v for k, v in overrides.items() if v is not None}

    @contextlib.contextmanager
    def bound(self, backend: Backend) -> Iterator[None]:
        """Within the block, send this event loop's runs through `backend`, unless the loop has a
        connection."""
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
        try:
            await self.close_resources()
        finally:
            backend = self._backends.pop(asyncio.get_running_loop(), None)
            if isinstance(backend, Client):
                await backend.broker.close()

    async def close_resources(self) -> None:
        """Close this event loop's resources, the last one opened first, even if one fails."""
        async with contextlib.AsyncExitStack() as stack:
            for resource in sorted(self.resources.values(), key=attrgetter("order")):
                stack.push_async_callback(resource.close)

    async def __aenter__(self) -> Holdfast:
        await self.backend()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
