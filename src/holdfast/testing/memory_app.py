"""An app without a server: handlers, retries, delays, events and crashes in one process.

    async def test_resize_is_retried_after_a_minute():
        async with memory(app) as mem:
            run = await resize.enqueue(Image(id=42))
            await mem.drain()                         # everything that is due, until nothing is
            assert (await run.status()).state == "failed"
            await mem.advance("1m")                   # and everything that becomes due meanwhile
            assert await run.result() == Thumbnail(key="42-small")

Guaranteed to behave as a worker does, because it is the same code: claims, attempts, retries, dead
letters, events, cancellation and deduplication by key. The clock stands still until `advance`,
which moves it from one due instant to the next, so that each attempt starts at its time.

Not covered: several processes at once (attempts are made one after the other; a crash is simulated
with `crash_next`), acknowledgement deadlines, outages. Timeouts pass in real time. Use the pytest
fixture `holdfast_worker` for a real server.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from holdfast.app import Holdfast, Hook
from holdfast.clock import rfc3339
from holdfast.config import RecordConfig, WorkerConfig
from holdfast.context import Context
from holdfast.durations import Duration, seconds
from holdfast.errors import HoldfastError, RunError, RunNotFound, Signal
from holdfast.job import Job
from holdfast.model import run as runs
from holdfast.model.dead import dead_headers
from holdfast.model.run import RunRecord
from holdfast.model.runlog import LOG_MESSAGE, LogLine, lines_of
from holdfast.names import Names
from holdfast.ownership.claims import Claim, Claims
from holdfast.ownership.store import MemoryStore
from holdfast.payload import Bound
from holdfast.telemetry import Telemetry
from holdfast.testing.backend import DeadLetter, MemoryBackend, MemoryOutbox, PublishedEvent
from holdfast.testing.clock import FakeClock
from holdfast.testing.flows import MemoryJournals
from holdfast.testing.limits import MemoryGates, MemoryLine
from holdfast.testing.queue import MemoryDelivery, MemoryQueue, QueuedMessage
from holdfast.worker.attempt import Call, Caller, Held
from holdfast.worker.backlog import RANKS
from holdfast.worker.execution import Executor
from holdfast.worker.flows import FlowRunner
from holdfast.worker.limiting import Limiter
from holdfast.worker.logs import RunLogs

MOST_ATTEMPTS = 10_000
"""`drain` gives up after this many: a job that enqueues itself without a delay never ends."""

Moment = Literal["start", "end"]
StepMoment = Literal["before", "called", "after"]


class ProcessDied(BaseException):
    """The simulated end of the process: nothing may catch it and nothing is sent."""


class _Calls(Caller):
    """Calls handlers, or simulates a crash instead; remembers what they raised."""

    fatal = (KeyboardInterrupt, ProcessDied)

    def __init__(self, app: Holdfast, telemetry: Telemetry) -> None:
        super().__init__(app.middlewares, threads=4, telemetry=telemetry)
        self.crashes: dict[str, list[Moment]] = {}
        self.step_crashes: dict[tuple[str, str], int] = {}
        """How often the process dies before or after each step of flows."""
        self.raised: list[BaseException] = []

    def on_step(self, moment: str, step: str) -> None:
        """A step of a flow is about to be called, or its result was stored."""
        if self.step_crashes.get((moment, step), 0):
            self.step_crashes[moment, step] -= 1
            raise ProcessDied

    async def call(
        self,
        job: Job[Any],
        run: str,
        bound: Bound,
        make_context: Callable[[], Context],
        call: Call,
    ) -> Any:
        planned = self.crashes.get(job.name)
        moment = planned.pop(0) if planned else None
        if moment == "start":
            raise ProcessDied
        try:
            value = await super().call(job, run, bound, make_context, call)
        except asyncio.CancelledError:
            raise
        except self.fatal:
            raise
        except BaseException as error:
            if moment == "end":
                raise ProcessDied from None
            if not isinstance(error, Signal):
                self.raised.append(error)
            raise
        if moment == "end":
            raise ProcessDied
        return value


class Memory:
    """An app in memory. Made by `memory`."""

    def __init__(
        self,
        app: Holdfast,
        clock: FakeClock | None = None,
        *,
        worker: WorkerConfig | None = None,
        records: RecordConfig | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.app = app
        self.clock = clock or FakeClock()
        self.telemetry = telemetry or Telemetry()
        self._config = worker or WorkerConfig()
        self._records = records or RecordConfig()
        self._names = Names("memory")
        self.store = self._store = MemoryStore(self.clock)
        self._queue = MemoryQueue(self.clock, self._names, self._records.dedup_window_seconds)
        self.journals = MemoryJournals(self.clock, self._queue, self._names)
        self._outbox = MemoryOutbox(app, self._queue, self._names, self.journals)
        self._line = MemoryLine(self._queue, self._names)
        self._gates = MemoryGates(self._line, self.clock, app.limits)
        self._calls = _Calls(app, self.telemetry)
        self.on_step: Callable[[str, str], None] = self._calls.on_step
        """Called around each step of a flow; it may simulate the death of the process."""
        self._deaths = 0
        self._logs: RunLogs | None = None
        self.lines: dict[str, list[LogLine]] = {}
        """What each run has logged."""
        self._attempting: dict[Held, asyncio.Task[None]] = {}
        self._executor = self._new_process()
        self.backend = MemoryBackend(
            self, self._queue, self._names, self._store, self._outbox, self._records, self._line
        )

    def _new_process(self) -> Executor:
        self.node = f"memory-{self._deaths}"
        if self._logs is not None:
            self._logs.detach()
        self._logs = RunLogs("info", self.node, self._keep_lines, lambda _, __: None)
        self._logs.attach()
        claims = Claims(
            self._store,
            self.node,
            self.clock,
            self.telemetry,
            now=self.clock.utc,
            node_alive=self._node_alive,
            crash_limit=self._config.crash_limit,
            keyed_ttl=self._records.keyed_ttl_seconds,
            keyless_ttl=self._records.keyless_ttl_seconds,
        )
        flows = FlowRunner(
            self.journals,
            claims,
            self._outbox,
            self.clock,
            lambda: self.backend,
            node=self.node,
            now=self.clock.utc,
            kept_seconds=self._records.keyed_ttl_seconds,
            near_seconds=0.0,
            fatal=self._calls.fatal,
        )
        flows.on_step = lambda moment, step: self.on_step(moment, step)
        return Executor(
            claims,
            self._outbox,
            self._calls,
            self.clock,
            self.telemetry,
            node=self.node,
            now=self.clock.utc,
            short_wait=self._config.short_wait_seconds,
            cleanup=self._config.cleanup_seconds,
            logs=self._logs,
            limiter=Limiter(self._gates, claims, self._names, self.telemetry),
            flows=flows,
        )

    async def _keep_lines(self, messages: Sequence[tuple[str, bytes]]) -> None:
        for run, body in messages:
            kept = self.lines.setdefault(run, [])
            kept += lines_of(LOG_MESSAGE.decode(body), len(kept) + 1)

    async def _node_alive(self, node: str) -> bool:
        return node == self.node

    # ---- life

    async def __aenter__(self) -> Memory:
        self._before = self.app.replace_backend(self.backend)
        await _call(self.app.startup_hooks)
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = list(self._attempting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.app.close_resources()
        await _call(self.app.shutdown_hooks)
        self.close()
        self.app.replace_backend(self._before)

    def close(self) -> None:
        """Release the threads of plain handlers, and stop listening to their log."""
        self._calls.close()
        if self._logs is not None:
            self._logs.detach()

    # ---- making things happen

    async def drain(self) -> int:
        """Execute everything that is due, and what it causes; returns the attempts made."""
        for count in range(MOST_ATTEMPTS):
            if not await self.step():
                return count
        raise HoldfastError(
            f"not drained after {MOST_ATTEMPTS:,} attempts: does a job enqueue itself?"
        )

    async def step(self) -> bool:
        """Execute the one message that has been due longest; False when nothing is due."""
        jobs = [job for job in self.app.jobs.values() if self._calls.has_place(job)]
        consumers = {(job.spec.group, job.name): RANKS[job.spec.priority] for job in jobs}
        await self._gates.serve(self.clock.utc())
        message = self._queue.take(consumers)
        if message is None:
            return False
        job = self.app.jobs[message.job]
        delivery = MemoryDelivery(self._queue, message)
        held = Held(delivery, job, self.clock.monotonic(), message.event)
        task = asyncio.create_task(self._attempt(held, message), name=f"memory-{job.name}")
        self._attempting[held] = task
        await asyncio.shield(task)  # the caller may be cancelled; the attempt continues
        return True

    async def _attempt(self, held: Held, message: QueuedMessage) -> None:
        try:
            await self._executor.execute(held)
            if self._logs is not None:
                await self._logs.flush_all()  # what it logged of the attempt's end
        except ProcessDied:
            self._deaths += 1
            self._executor = self._new_process()
            self._queue.returned(message)
            if held.claim is not None and held.claim.record.once:
                await self._write_down_as_lost(held, held.claim)
        finally:
            del self._attempting[held]

    async def _write_down_as_lost(self, held: Held, claim: Claim) -> None:
        """What a coordinator does for a run whose message is already gone (`at_most_once`)."""
        error = "its worker died and its restart strategy is 'never'"
        ended = await self._executor.claims.give_up(
            claim.run, claim.record, claim.revision, state="lost", error=error
        )
        if ended is not None:
            headers = dead_headers(
                run=claim.run,
                message=ended.message,
                subject=held.message.subject,
                reason="lost",
                error=error,
                now=self.clock.utc(),
                crashes=ended.crashes,
                attempts=ended.attempts,
            )
            await self._outbox.dead_letter(ended.group, ended.job, held.message.body, headers)

    async def advance(self, duration: Duration) -> int:
        """Let time pass and execute everything when it becomes due; returns the attempts made."""
        end = self.clock.utc() + seconds(duration, "advance")
        count = await self.drain()
        while (due := self._next_due()) is not None and due <= end:
            self.clock.advance(max(0.0, due - self.clock.utc()))
            count += await self.drain()
        self.clock.advance(max(0.0, end - self.clock.utc()))
        return count + await self.drain()

    def crash_next(self, job: Job[Any] | str, *, times: int = 1, at: Moment = "end") -> None:
        """Let the process die at the next attempts of a job.

        At the `end` of the handler its effects have happened and nothing is recorded; at the
        `start` it has not been called. The message is redelivered at once to a new process.
        """
        name = job if isinstance(job, str) else job.name
        self._calls.crashes.setdefault(name, []).extend([at] * times)

    def crash_step(
        self, step: Callable[..., Any] | str, *, times: int = 1, at: StepMoment = "called"
    ) -> None:
        """Let the process die around the next calls of a flow's step.

        `before`: before it is called. `called`: after the call and before its result is stored, the
        one case in which it runs again. `after`: after its result was stored.
        """
        name = step if isinstance(step, str) else step.__qualname__.rpartition("<locals>.")[2]
        self._calls.step_crashes[at, name] = times

    def journal(self, run: str) -> bytes:
        """A flow's journal as it is stored, to be kept as a file and replayed by a test."""
        return self.journals.export(run)

    # ---- looking

    @property
    def dead(self) -> list[DeadLetter]:
        """Every dead letter so far."""
        return self._outbox.dead

    @property
    def events(self) -> list[PublishedEvent]:
        """Every event published so far, repeats left out."""
        return self._outbox.events

    @property
    def next_due(self) -> datetime | None:
        """When the next delayed run or retry is due; None when nothing waits."""
        due = self._next_due()
        return datetime.fromtimestamp(due, UTC) if due is not None else None

    @property
    def raised(self) -> list[BaseException]:
        """What handlers raised so far, signals left out."""
        return self._calls.raised

    def _next_due(self) -> float | None:
        found = [due for due in (self._queue.next_due(), self._gates.next_due()) if due is not None]
        return min(found, default=None)

    async def free(self, run: str) -> None:
        """Free the places of a run that was cancelled while it waited for its next attempt."""
        await self._gates.free(run)

    async def record(self, run: str) -> RunRecord | None:
        """A run's record with its attempts; None before the first and after its TTL."""
        entry = await self._store.get(run)
        return runs.decode(entry.value) if entry else None

    def held(self, run: str) -> tuple[Held, asyncio.Task[None]] | None:
        """The attempt at a run that is being made right now."""
        for held, task in self._attempting.items():
            if held.run == run:
                return held, task
        return None

    async def until_ended(self, run: str, sequence: int, patient: bool) -> RunRecord:
        """Execute what is due until a run has ended; the clock does not move."""
        while True:
            record = await self.record(run)
            if record is not None and record.terminal:
                return record
            if running := self.held(run):
                await asyncio.shield(running[1])
            elif not await self.step():
                left = record is None and sequence and not self._queue.has(sequence)
                if left and (ended := self._outbox.history.get(run)):
                    return ended
                raise self._not_ended(run, sequence, record, patient)

    def _not_ended(
        self, run: str, sequence: int, record: RunRecord | None, patient: bool
    ) -> Exception:
        if record is None and sequence and not self._queue.has(sequence):
            return RunNotFound(f"run {run} is neither queued nor recorded", run=run)
        if not patient:
            return TimeoutError()
        due = self._next_due()
        when = f"; the next item is due at {rfc3339(due)}" if due is not None else ""
        return RunError(
            f"run {run} has not ended and nothing is due now{when}: move the clock with "
            "`await mem.advance(...)`",
            run=run,
        )


def memory(
    app: Holdfast,
    clock: FakeClock | None = None,
    *,
    worker: WorkerConfig | None = None,
    records: RecordConfig | None = None,
) -> Memory:
    """An app in memory, for `async with`; its hooks are called as in a worker."""
    return Memory(app, clock, worker=worker, records=records)


async def _call(hooks: Sequence[Hook]) -> None:
    for hook in hooks:
        result = hook()
        if inspect.isawaitable(result):
            await result
