"""One attempt: the message that carries its run, the call of its handler, and its context.

Guaranteed: a call ends in a value or an error, whatever the handler does. Each handler has its own
task and context variables: one that cancels its task, at once or much later, affects no other run.
Every exception fails only the attempt, even `SystemExit` and other non-`Exception`s; only
`KeyboardInterrupt` on the event loop's thread, which is Ctrl-C, ends the process.

Not guaranteed: that a handler stops when cancelled. One in a thread cannot be stopped, and an async
one may refuse. `Call.leftovers` is what still runs, and occupies a place until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from holdfast import threads, tracing
from holdfast.app import Middleware
from holdfast.clock import Clock
from holdfast.context import Context, SyncContext, current_run
from holdfast.errors import ClaimLost, InvalidPayload, NoRecord
from holdfast.flow import Flow
from holdfast.job import Job
from holdfast.keeper.board import Board
from holdfast.log_lines import Attempted, current_attempt
from holdfast.model.journal import FlowJournal, parent_of
from holdfast.model.message import cause_of, count_of, read_heading
from holdfast.model.run import Progress
from holdfast.names import (
    H_CAUSE,
    H_CRASHES,
    H_MSG_ID,
    H_PARENT,
    H_RUN,
    H_WAKE,
    event_message_id,
    is_keyed_by_sender,
    is_slot_or_trigger,
    keyed_run,
)
from holdfast.ownership.claims import Claim, Claims
from holdfast.ownership.gates import GateKey
from holdfast.payload import Bound, KeyRule, encode_value
from holdfast.process import HANDLER_TASK
from holdfast.redaction import Redactor, of_payload, told
from holdfast.telemetry import Telemetry
from holdfast.threads import Outcome, Threads, Work
from holdfast.worker.backlog import NORMAL
from holdfast.worker.pool import ProcessDied, ProcessPool
from holdfast.worker.settling import Outbox

if TYPE_CHECKING:
    from holdfast.worker.flows import FlowCall

PROGRESS_SECONDS: Final = 0.5
"""The shortest interval between two writes of progress, which is for people and costs a write each
time."""
NOTE_CHARS: Final = 500
"""Characters of a progress note: every later write of the record repeats it."""
TRUSTED_SECONDS: Final = 1.0
"""A claim checked within this time is not checked again before an event: saves a read per event."""
NOTHING_PRINTED: Final[dict[str, str]] = {}
"""Shared by all attempts that have not printed part of a line."""


# ---- the message


class Message(Protocol):
    """A delivery, from NATS or from memory."""

    subject: str
    body: bytes
    headers: dict[str, str]
    reply: str
    board: Board | None
    place: int

    @property
    def deliveries(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def stored_ns(self) -> int: ...

    def ack(self) -> Awaitable[None]: ...
    async def ack_confirmed(self) -> None: ...
    def nak(self, delay: float = 0.0) -> Awaitable[None]: ...
    async def extend(self) -> None: ...


class Interrupt(Enum):
    """Why a running handler was stopped."""

    TIMEOUT = "timeout"
    CANCEL = "cancel"
    CLAIM_LOST = "claim lost"
    SHUTDOWN = "shutdown"
    CROWDED = "no thread became free"


class Held:
    """A message that this process holds, from its delivery until it is settled or given back."""

    extended: float
    """When the server was last told that we are working on the message."""
    rank: int
    """Its priority among the messages that wait in this process."""
    run = ""
    stamp = 1
    """The number of this message among those that carry its run."""
    failures = 0
    alias = ""
    """The id from the message, if the job's key has replaced it."""
    unkeyed = ""
    """Why the job's key could not be computed."""
    attempt = 1
    created = 0.0
    keyed = False
    places: tuple[GateKey, ...] = ()
    """The limits in which its run has a place while it runs."""
    limited = ""
    """The run's id when it took them."""
    claim: Claim | None = None
    cause: Interrupt | None = None
    call: Call | None = None
    """The call of its handler, from its start until the end of the attempt."""
    running = False
    node = ""
    printed = NOTHING_PRINTED
    secrets: Redactor | None = None
    wake = ""
    """Why the message wakes a flow; empty if it carries a payload."""
    journal: FlowJournal | None = None
    """The journal of a flow, as it was read before the claim."""
    flow: FlowCall | None = None
    broken = ""
    """Why the journal cannot be read."""
    patience: float
    waiter: asyncio.Future[None]

    def __init__(
        self, message: Message, job: Job[Any], since: float, event: str = "", rank: int = NORMAL
    ) -> None:
        self.message = message
        self.job = job
        self.since = since
        self.extended = since
        self.event = event
        self.rank = rank

    @property
    def lost(self) -> bool:
        return self.claim is not None and self.claim.lost

    @property
    def interrupted(self) -> bool:
        return self.cause is not None

    # ---- identity

    def identify(self) -> None:
        """Find out which run the message is for; headers are optional and untrusted."""
        message, spec = self.message, self.job.spec
        subscriber = (spec.group, spec.name) if self.event else None
        self.run, self.keyed, self.stamp, self.failures, self.created = read_heading(
            message.headers, message.sequence, message.stored_ns, subscriber
        )
        self.attempt = self.failures + 1
        if self.job.spec.flow:
            self.wake = message.headers.get(H_WAKE, "") if H_RUN in message.headers else ""
        if self.job.key is not None and H_RUN not in message.headers:
            self._use_key(self.job.key)

    def _use_key(self, rule: KeyRule) -> None:
        """Compute the run's key, unless the sender chose one, or a schedule sent it."""
        spec = self.job.spec
        if is_slot_or_trigger(self.run) or is_keyed_by_sender(self.run, spec.group, spec.name):
            return
        try:
            key = rule.of(self.job.signature.decode(self.message.body))
        except Exception as error:  # noqa: BLE001 - the attempt decodes it again, and says so
            self.unkeyed = str(error)
        else:
            self.alias, self.run = self.run, keyed_run(spec.group, spec.name, key)
            self.keyed = True

    def decode(self) -> Bound:
        """The arguments of the call; `InvalidPayload` if they do not fit, or have no key."""
        found = self.job.signature.decode(self.message.body)
        if self.unkeyed:
            raise InvalidPayload(self.unkeyed)
        return found

    def scope(self) -> None:
        """Qualify the run's id, because another job uses the same one."""
        spec = self.job.spec
        self.run, self.keyed = keyed_run(spec.group, spec.name, self.run), True

    def adopt(self, claim: Claim) -> None:
        """Use the record's values where they are more reliable than the message's."""
        self.claim = claim
        self.failures = claim.record.failures
        self.attempt = claim.record.attempt
        self.stamp = claim.record.message
        self.created = claim.record.created or self.created

    @property
    def is_recorded(self) -> bool:
        """Whether the run has a record: by its job's contract, or because it was redelivered."""
        message = self.message
        return self.job.spec.recorded or message.deliveries > 1 or H_CRASHES in message.headers

    @property
    def crashes(self) -> int:
        """Crashes of a run that has a record only because it was redelivered."""
        return count_of(self.message.headers, H_CRASHES)

    @property
    def generation(self) -> int:
        """What distinguishes this generation of a flow from earlier ones under the same id, if
        there may be any.

        A redelivery has it too, so the steps of a flow keep their keys when its worker dies before
        anything is stored.
        """
        if self.wake and self.journal is not None and self.journal.running:
            return self.journal.generation  # its record may be gone
        reused = self.keyed or self.stamp > 1
        return self.message.sequence if self.job.spec.flow and reused else 0

    @property
    def sender(self) -> str:
        """The run that sent this one, if any."""
        return cause_of(self.message.headers)

    @property
    def parent(self) -> str:
        """The flow that waits for the end of this run, if the header names one."""
        found = self.message.headers.get(H_PARENT, "")
        return found if found and parent_of(found) else ""

    # ---- its log

    def log_fields(self) -> dict[str, Any]:
        """Fields for every log line of a run."""
        return {
            "run": self.run,
            "job": self.job.name,
            "attempt": self.attempt,
            "node": self.node,
            "epoch": self.claim.epoch if self.claim else 0,
        }

    def conceal(self, text: str) -> str:
        """A text of its handler without the payload's secrets; the payload is read once."""
        if self.secrets is None:
            self.secrets = of_payload(self.message.body, self.job.signature.parameters)
        return self.secrets.scrub(text)

    def show(self) -> None:
        """Name the run on the keeper's board: its handler is about to start."""
        board, place = self.message.board, self.message.place
        if board is not None and place >= 0:
            board.name(place, self.run, self.claim.epoch if self.claim else 0)

    # ---- the handler

    def begin(self, call: Call, patience: float) -> asyncio.Future[None]:
        """The handler has started.

        The future is done when the handler has ended, or `patience` seconds after it was
        interrupted: time to clean up.
        """
        self.call = call
        self.running = True
        self.patience = patience
        self.waiter = asyncio.get_running_loop().create_future()
        call.task.add_done_callback(self._wake)
        return self.waiter

    def _wake(self, _: object = None) -> None:
        if not self.waiter.done():
            self.waiter.set_result(None)

    def interrupt(self, cause: Interrupt) -> None:
        """Stop the handler if it is running; the first cause counts."""
        if self.cause is None:
            self.cause = cause
            if self.running and self.call is not None:
                self.call.task.cancel()
                asyncio.get_running_loop().call_later(self.patience, self._wake)

    @property
    def quick(self) -> bool:
        """Whether its run may be claimed a moment before its handler can start.

        Not one that must not start again once it was claimed.
        """
        spec = self.job.spec
        return spec.restart == "immediately" and spec.delivery != "at_most_once"

    def withdraw(self, before: float) -> None:
        """Give it back if it has been waiting for a thread since before an instant."""
        work = self.call.work if self.call is not None and self.running else None
        if work is not None and self.since < before and work.withdraw():
            self.interrupt(Interrupt.CROWDED)

    def over(self) -> None:
        """End the attempt: it cannot be interrupted, and its context refuses everything."""
        self.running = False


class Deadlines:
    """Interrupts attempts that exceed their time limit, with one timer for all of them.

    Nearly every attempt ends long before its deadline. A timer for each would be the most expensive
    part of a short run, so each only records its deadline.
    """

    def __init__(self) -> None:
        self._due: dict[Held, tuple[float, float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, held: Held, seconds: float) -> None:
        """Interrupt the attempt `seconds` after its handler began, unless it has ended."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        self._due[held] = due, seconds
        if self._timer is None or due < self._timer.when():
            self._set(loop, due)

    def end(self, held: Held) -> None:
        """The attempt has ended."""
        self._due.pop(held, None)

    def _set(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for held, seconds in [(h, limit) for h, (due, limit) in self._due.items() if due <= now]:
            left = seconds - held.call.seconds if held.call else 0.0
            if left > 0:  # it waited for a thread
                self._due[held] = now + left, seconds
                continue
            del self._due[held]
            held.interrupt(Interrupt.TIMEOUT)
        if self._due:
            self._set(loop, min(due for due, _ in self._due.values()))


# ---- the call


class Call:
    """One call of a handler: its task, and threads it left behind."""

    __slots__ = ("attempt", "behind", "started", "task", "work")

    task: asyncio.Task[Outcome]

    def __init__(self, attempt: Attempted | None = None) -> None:
        self.attempt = attempt
        self.started = True
        """Whether the handler has begun; False if it was stopped before a thread was free."""
        self.work: Work | None = None
        """The call of a plain handler, once it was given to the threads."""
        self.behind: tuple[asyncio.Future[Any], ...] = ()

    @property
    def seconds(self) -> float:
        """How long a handler in a thread has run; one on the loop has always begun at once."""
        if self.work is None:
            return math.inf
        return time.monotonic() - self.work.began if self.work.began else 0.0

    @property
    def leftovers(self) -> list[asyncio.Future[Any]]:
        """Futures of what still runs."""
        return [future for future in (self.task, *self.behind) if not future.done()]


class Caller:
    """Calls handlers with their middlewares."""

    fatal: ClassVar[tuple[type[BaseException], ...]] = (KeyboardInterrupt,)
    """Exceptions that end the process, not only the attempt."""

    def __init__(
        self,
        middlewares: list[Middleware],
        threads: int,
        telemetry: Telemetry,
        processes: int = 1,
    ) -> None:
        self.threads = threads
        self.processes = processes
        self._processes: ProcessPool | None = None
        self._middlewares = middlewares
        self._threads: Threads | None = None
        self._telemetry = telemetry

    def lanes(self, jobs: Iterable[Job[Any]]) -> dict[str, int]:
        """How many handlers of these jobs can run at once, by lane; the loop has no limit."""
        most = {"thread": self.threads, "process": self.processes}
        return {job.lane: most[job.lane] for job in jobs if job.lane in most}

    async def prepare(self, job: Job[Any]) -> None:
        """Start a process for a job that needs one, outside the time limit of the attempt."""
        with contextlib.suppress(ProcessDied, OSError):  # the call retries, and reports the error
            await self._pool_of_processes().prepare(job)

    def _pool_of_processes(self) -> ProcessPool:
        if self._processes is None:
            self._processes = ProcessPool(self.processes)
        return self._processes

    @property
    def busy_threads(self) -> int:
        """Handlers that run in a thread or wait for one."""
        return self._threads.busy if self._threads else 0

    def has_place(self, job: Job[Any]) -> bool:
        """Whether a handler of this job could start at once."""
        return job.lane != "thread" or self.busy_threads < self.threads

    def start(
        self,
        job: Job[Any],
        run: str,
        bound: Bound,
        make_context: Callable[[], Context],
        attempt: Attempted | None = None,
    ) -> Call:
        """Begin one attempt; the context is created only if somebody uses it."""
        call = Call(attempt)
        body = self._outcome(job, run, bound, make_context, call)
        call.task = asyncio.create_task(body, name=HANDLER_TASK)
        return call

    async def _outcome(
        self,
        job: Job[Any],
        run: str,
        bound: Bound,
        make_context: Callable[[], Context],
        call: Call,
    ) -> Outcome:
        try:
            return await self.call(job, run, bound, make_context, call), None
        except asyncio.CancelledError:
            raise
        except self.fatal:
            raise
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything
            return None, error

    def call(
        self,
        job: Job[Any],
        run: str,
        bound: Bound,
        make_context: Callable[[], Context],
        call: Call,
    ) -> Coroutine[Any, Any, Any]:
        """The attempt itself, inside its task."""
        current_run.set(run)
        current_attempt.set(call.attempt)
        if job.signature.resources:
            return self._with_resources(job, run, bound, make_context, call)
        return self._plainly(job, run, bound, make_context, call)

    async def _with_resources(
        self,
        job: Job[Any],
        run: str,
        bound: Bound,
        make_context: Callable[[], Context],
        call: Call,
    ) -> Any:
        opened = {name: await one() for name, one in job.signature.resources.items()}
        bound = bound._replace(kwargs=bound.kwargs | opened)
        return await self._plainly(job, run, bound, make_context, call)

    def _plainly(
        self,
        job: Job[Any],
        run: str,
        bound: Bound,
        make_context: Callable[[], Context],
        call: Call,
    ) -> Coroutine[Any, Any, Any]:
        traced = tracing.on()
        if not (job.signature.contexts or self._middlewares or traced):
            return self._handler(job, bound, call, run)
        ctx = make_context()
        chain = self._chain(job, ctx, bound, call)
        return _traced(ctx, chain) if traced else chain

    def _chain(
        self, job: Job[Any], ctx: Context, bound: Bound, call: Call
    ) -> Coroutine[Any, Any, Any]:
        if job.signature.contexts and job.lane != "process":
            own = ctx if job.is_async else SyncContext.beside(ctx, asyncio.get_running_loop())
            given = {**bound.kwargs, **dict.fromkeys(job.signature.contexts, own)}
            bound = bound._replace(kwargs=given)
        handler: Any = functools.partial(self._handler, job, bound, call, ctx.run, ctx)
        wrapped: Any
        for wrapped in reversed(self._middlewares):
            handler = functools.partial(wrapped, ctx, handler)
        chained: Coroutine[Any, Any, Any] = handler()
        return chained

    def _handler(
        self, job: Job[Any], bound: Bound, call: Call, run: str, ctx: Context | None = None
    ) -> Coroutine[Any, Any, Any]:
        if job.is_async:
            coroutine: Coroutine[Any, Any, Any] = job.func(*bound.args, **bound.kwargs)
            if job.spec.flow and isinstance(ctx, Flow):
                return ctx.flowing.drive(coroutine)
            return coroutine
        if job.lane == "process":
            return self._pool_of_processes().run(job, bound, run, ctx, call.attempt)
        return self._in_thread(functools.partial(job.func, *bound.args, **bound.kwargs), call)

    async def _in_thread(self, function: functools.partial[Any], call: Call) -> Any:
        if self._threads is None:
            self._threads = Threads(self.threads, HANDLER_TASK)
        inside = functools.partial(contextvars.copy_context().run, function)
        work = call.work = self._threads.submit(inside)
        try:
            outcome = await work.future
        except asyncio.CancelledError:
            if work.withdraw():
                call.started = False
            elif work.future.cancelled():
                self._leave_behind(call, work.outlived())
            raise
        result = threads.given(outcome)
        return await result if asyncio.iscoroutine(result) else result

    def _leave_behind(self, call: Call, future: asyncio.Future[Any]) -> None:
        call.behind += (future,)
        self._telemetry.stuck_threads.inc()
        future.add_done_callback(lambda _: self._telemetry.stuck_threads.dec())

    def close(self) -> None:
        """Release threads and processes; busy threads end with the process."""
        if self._threads is not None:
            self._threads.close()
        if self._processes is not None:
            self._processes.close()


async def _traced(ctx: Context, chain: Coroutine[Any, Any, Any]) -> Any:
    facts = {"run": ctx.run, "group": ctx.group, "attempt": ctx.attempt, "node": ctx.node}
    with tracing.attempting(f"run {ctx.job}", ctx.headers, **facts):
        return await chain


# ---- the context


class CurrentAttempt:
    """What a handler's context does for its attempt: events, ownership, progress."""

    __slots__ = (
        "_claims",
        "_clock",
        "_events",
        "_held",
        "_outbox",
        "_owned_at",
        "_progressed",
        "_telemetry",
    )

    def __init__(
        self, held: Held, claims: Claims, outbox: Outbox, clock: Clock, telemetry: Telemetry
    ) -> None:
        self._held = held
        self._claims = claims
        self._outbox = outbox
        self._clock = clock
        self._telemetry = telemetry
        self._events: dict[str, int] = {}
        self._progressed = -1e9
        self._owned_at = clock.monotonic()

    async def publish(self, event: str, data: Any) -> None:
        if not self._held.running or self._held.lost:
            raise ClaimLost(f"the attempt at run {self._held.run} is over: nothing is published")
        await self._check_owner()
        number = self._events.get(event, 0) + 1
        self._events[event] = number
        headers = {
            H_MSG_ID: event_message_id(self._held.run, event, number),
            H_CAUSE: self._held.run,
        }
        tracing.sent(f"publish {event}", headers, event=event, run=self._held.run)
        subscribed = await self._outbox.event(event, encode_value(data), headers)
        self._telemetry.published.labels(event).inc()
        if not subscribed:
            self._telemetry.tell_unclaimed(event)

    async def _check_owner(self) -> None:
        """Check the claim before publishing: an event's id has no epoch, since a retry must not
        repeat it, so the event of a replaced process would displace its successor's."""
        claim, now = self._held.claim, self._clock.monotonic()
        if claim is None or now - self._owned_at < TRUSTED_SECONDS:
            return
        if not await self._claims.owns(claim):
            raise ClaimLost(f"run {claim.run} was taken over by another node: nothing is published")
        self._owned_at = now

    def _claim(self, what: str) -> Claim:
        claim = self._held.claim
        if claim is None:
            raise NoRecord(
                f"{what} needs a claim, which job {self._held.job.name!r} does not make "
                "(delivery='at_least_once'): use delivery='effectively_once'",
                run=self._held.run,
            )
        return claim

    async def still_owner(self) -> bool:
        return await self._claims.owns(self._claim("still_owner()"))

    async def progress(self, fraction: float | None, note: str) -> None:
        claim = self._claim("progress()")
        now = self._clock.monotonic()
        if now - self._progressed < PROGRESS_SECONDS and fraction != 1:
            return
        self._progressed = now
        at = self._clock.utc()
        await self._claims.progress(claim, Progress(fraction, told(note, NOTE_CHARS), at))
