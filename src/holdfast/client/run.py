"""A run as its sender sees it: the request to make one, and the handle on an accepted one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import (
    Any,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    get_args,
)

import msgspec

from holdfast.broker import Stored
from holdfast.client.bucket import Data
from holdfast.durations import Duration, instant, seconds
from holdfast.errors import (
    InvalidInput,
    InvalidName,
    NoRecord,
    ResultTimeout,
    RunCancelled,
    RunFailed,
    RunLost,
    RunNotFound,
)
from holdfast.log_lines import Attempted, current_attempt
from holdfast.model.job import JobSpec, Priority
from holdfast.model.run import TERMINAL, Progress, RunRecord
from holdfast.model.runlog import LogLine
from holdfast.names import IdMaker, check_header, check_name, keyed_run, spelled_runs
from holdfast.payload import decode_result

OnDuplicate = Literal["return", "replace", "raise"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_make_id = IdMaker()

log = logging.getLogger("holdfast.client")


class Request(msgspec.Struct, frozen=True):
    """One run to be accepted."""

    spec: JobSpec
    group: str
    run: str
    body: bytes
    keyed: bool = False
    delay_seconds: float = 0.0
    at: float | None = None
    headers: dict[str, str] = {}
    cause: str = ""
    on_duplicate: OnDuplicate = "return"
    queue: str = ""
    """The queue, by the run's priority; by default the job's own."""

    @property
    def delayed(self) -> bool:
        return self.at is not None or self.delay_seconds > 0


class JobRequest(Request, Generic[T_co], frozen=True):
    """A request that says what its run returns, for type checkers."""


class Enqueued(NamedTuple):
    """The stream's answer to a request."""

    run: str
    sequence: int
    duplicate: bool
    state: str = ""
    """The state of an earlier run with the same key, as far as it is known."""
    error: str = ""
    """The error of that earlier run."""


class SendOptions(TypedDict, total=False):
    """How a run is sent: `job.options(key="42", delay="10m").enqueue(42)`."""

    key: str | None
    """Deduplication key: runs of one job with the same key are one run."""
    delay: Duration | None
    """How long to wait before the first attempt."""
    at: datetime | float | None
    """When the first attempt is due, instead of `delay`."""
    headers: dict[str, str] | None
    """Your own headers; they stay with the run through retries and replays."""
    group: str | None
    """The group whose workers run it, instead of the job's."""
    priority: Priority | None
    """`high`, `normal` or `low`, instead of the job's; its retries keep it."""
    on_duplicate: OnDuplicate
    """If a run with this key exists: return its handle (the default), replace it (one that has not
    ended is cancelled first), or raise `DuplicateRun`."""


def make_request(
    spec: JobSpec,
    body: bytes,
    cause: str = "",
    *,
    key_follows: bool = False,
    **options: Unpack[SendOptions],
) -> JobRequest[Any]:
    """A checked request; `InvalidInput` or `InvalidName` before anything is sent.

    `key_follows`: the sender has not yet checked whether the job computes its key.
    """
    if not options:
        return JobRequest(spec, spec.group, _make_id(), body, cause=cause)
    key, delay, at = options.get("key"), options.get("delay"), options.get("at")
    named = options.get("group")
    group = check_name(named, "group") if named else spec.group
    if delay is not None and at is not None:
        raise InvalidInput("give either delay or at, not both")
    headers = dict(options.get("headers") or {})
    for name, value in headers.items():
        check_header(name, value)
    return JobRequest(
        spec,
        group,
        keyed_run(group, spec.name, key) if key is not None else _make_id(),
        body,
        keyed=key is not None,
        delay_seconds=seconds(delay, "delay") if delay is not None else 0.0,
        at=instant(at, "at") if at is not None else None,
        headers=headers,
        cause=cause,
        on_duplicate=_on_duplicate(
            options.get("on_duplicate", "return"), key is not None or key_follows
        ),
        queue=spec.queue_of(options.get("priority")),
    )


def _on_duplicate(given: str, keyed: bool) -> OnDuplicate:
    if given not in get_args(OnDuplicate):
        choices = ", ".join(get_args(OnDuplicate))
        raise InvalidInput(f"on_duplicate is one of {choices}, not {given!r}")
    if given != "return" and not keyed:
        raise InvalidInput(f"on_duplicate={given!r} needs a key")
    return cast(OnDuplicate, given)


_warned: set[tuple[str, str]] = set()


def _warn_of_waiting(attempt: Attempted, job: str, group: str) -> None:
    """Warn once for each pair of jobs that a handler waits for a run of its own group."""
    waiting = getattr(getattr(attempt, "job", None), "spec", None)
    if not isinstance(waiting, JobSpec) or waiting.group != group or waiting.flow:
        return
    if (waiting.name, job) not in _warned:
        _warned.add((waiting.name, job))
        log.warning(
            "a handler of job %s waits for a run of %s with run.result(), and both are in group "
            "%s: while it waits it keeps its place, and if every place of the group waits like "
            "this, nothing runs. Make %s a flow (`@app.flow`), which waits without a place: "
            "`await ctx.call(%s.request(...))`",
            waiting.name,
            job,
            group,
            waiting.name,
            job,
        )


class Backend(Protocol):
    """Where runs are sent: NATS, or memory in unit tests."""

    async def enqueue(self, request: Request) -> Enqueued:
        """Accept one run; it is stored when this returns."""
        ...

    async def enqueue_many(self, requests: Sequence[Request]) -> list[Enqueued]:
        """Accept many; all are stored when this returns."""
        ...

    async def read(self, run: str) -> RunRecord | None:
        """A run's record."""
        ...

    async def recall(self, run: str) -> RunRecord | None:
        """The final record of a run from the history, once its own record has expired."""
        ...

    async def wait(self, run: str, sequence: int, timeout: float | None) -> RunRecord:
        """A run's record once it has ended."""
        ...

    async def cancel(self, run: str, group: str, job: str) -> bool:
        """Cancel a run; False when it had ended already."""
        ...

    async def cancel_child(self, request: Request) -> None:
        """Ask a flow's child to stop, without waiting for its end."""
        ...

    async def publish_signal(
        self, event: str, key: str, body: bytes, headers: dict[str, str]
    ) -> Stored:
        """Publish an event for the flows that wait for it with this key."""
        ...

    async def queued(self, run: str, group: str, job: str, sequence: int) -> str:
        """Where a run without a record is: `queued`, `delayed`, `waiting` or `unknown`."""
        ...

    async def result_bytes(self, record: RunRecord) -> bytes:
        """A run's result as JSON, from the object store if it is there."""
        ...

    async def publish_event(self, event: str, body: bytes, headers: dict[str, str]) -> Stored:
        """Publish an event; it is stored when this returns."""
        ...

    async def logs(self, run: str, after: int = 0) -> list[LogLine]:
        """What a run has logged so far."""
        ...

    def follow(self, run: str, after: int = 0) -> AsyncIterator[LogLine]:
        """What a run logs, until it has ended."""
        ...

    async def look(self, run: str) -> RunStatus:
        """Where a run is, by its id alone; `unknown` if there is no trace of it."""
        ...

    async def retry(self, run: str) -> str:
        """Send a run again that was given up, or start its next attempt now."""
        ...

    async def list_runs(self, job: str, state: str, key: str, limit: int) -> list[RunStatus]:
        """Runs that match, newest change first; an empty text matches all."""
        ...

    async def data(self, name: str) -> Data:
        """A bucket of the program."""
        ...


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What is known of a run right now.

    `state` is `queued`, `delayed`, `waiting` (for a place in a limit), `running`, `failed` (its
    next attempt comes later), `done`, `cancelled`, `dead`, `lost` or `unknown`.
    """

    run: str
    state: str
    attempt: int = 0
    failures: int = 0
    crashes: int = 0
    node: str = ""
    error: str = ""
    progress: Progress | None = None
    record: RunRecord | None = None
    job: str = ""
    group: str = ""

    @property
    def ended(self) -> bool:
        """Whether it is done, cancelled, dead or lost."""
        return self.state in TERMINAL

    @property
    def known(self) -> bool:
        """Whether there is any trace of the run."""
        return self.state != "unknown"

    @classmethod
    def of(cls, run: str, record: RunRecord) -> RunStatus:
        """What a run's record says."""
        return cls(
            run,
            record.state,
            attempt=max(record.begun, len(record.attempts)),
            failures=record.failures,
            crashes=record.crashes,
            node=record.node,
            error=record.error,
            progress=record.progress,
            record=record,
            job=record.job,
            group=record.group,
        )


class Run(Generic[T]):
    """A handle on an accepted run: its status and result, and a way to cancel it."""

    def __init__(
        self, backend: Backend, spec: JobSpec, group: str, enqueued: Enqueued, returns: Any = Any
    ) -> None:
        self.id = enqueued.run
        self.job = spec.name
        self.group = group
        self.duplicate = enqueued.duplicate
        """The key was known already: this handle is the earlier run's."""
        self.state = enqueued.state or "queued"
        """The state of the run when it was sent: `queued`, `delayed`, or, for a duplicate, the
        state of the earlier run; `status()` returns the current one."""
        self._spec = spec
        self._sequence = enqueued.sequence
        self._limited = bool(spec.limits)
        self._backend = backend
        self._returns = returns

    def __repr__(self) -> str:
        return f"<Run {self.id} of {self.job}>"

    async def _need(self, what: str) -> None:
        """Raise if the run keeps no record, which `what` needs."""
        if not self._spec.recorded:
            raise NoRecord(
                f"{what} needs the run's record, which job {self.job!r} does not keep "
                "(delivery='at_least_once'): use delivery='effectively_once'",
                run=self.id,
            )

    async def status(self) -> RunStatus:
        """Where the run is now."""
        await self._need("status()")
        record = await self._backend.read(self.id)
        if record is not None:
            return RunStatus.of(self.id, record)
        where = await self._backend.queued(self.id, self.group, self.job, self._sequence)
        if where == "unknown" and (record := await self._backend.recall(self.id)):
            return RunStatus.of(self.id, record)
        if where == "unknown" and self._limited:
            where = "queued"  # it has its place, and its message is on its way
        return RunStatus(self.id, where, job=self.job, group=self.group)

    async def result(self, timeout: float | None = None) -> T:
        """Wait for the run to end and return what its handler returned.

        Raises `RunFailed`, `RunCancelled`, `RunLost` or, when `timeout` seconds were not enough,
        `ResultTimeout`; the run itself continues.
        """
        await self._need("result()")
        return await self._wait(timeout)

    async def _wait(self, timeout: float | None) -> T:
        attempt = current_attempt.get()
        if attempt is not None:
            _warn_of_waiting(attempt, self.job, self.group)
        try:
            sequence = self._sequence
            if self._limited:  # its message is being moved into a line
                sequence = 0
                found = (await self.status()).record
                if found is not None and found.terminal:
                    return await self._outcome(found)
            record = await self._backend.wait(self.id, sequence, timeout)
        except TimeoutError:
            raise ResultTimeout(
                f"run {self.id} has not ended after {timeout:g} s; it continues", run=self.id
            ) from None
        return await self._outcome(record)

    async def _outcome(self, record: RunRecord) -> T:
        self.state = record.state
        if record.state == "done":
            body = await self._backend.result_bytes(record)
            return cast(T, None if body == b"null" else decode_result(body, self._returns))
        text = f"run {self.id} of {self.job}: {record.error or record.state}"
        if record.state == "cancelled":
            raise RunCancelled(text, run=self.id)
        if record.state == "lost":
            raise RunLost(text, run=self.id)
        raise RunFailed(text, run=self.id)

    async def logs(self) -> list[LogLine]:
        """What its handler has logged and printed so far, in all attempts. Only the newest lines
        are kept."""
        return await self._backend.logs(self.id)

    async def follow(self) -> AsyncIterator[LogLine]:
        """What its handler logs and prints, from the first line kept until the run has ended."""
        await self._need("follow()")
        async for line in self._backend.follow(self.id):
            yield line

    async def cancel(self) -> bool:
        """Cancel it: queued, delayed, waiting for a retry or running. False: it had ended."""
        await self._need("cancel()")
        return await self._backend.cancel(self.id, self.group, self.job)

    async def retry(self) -> str:
        """Send it again after it was given up, or start its next attempt now; returns which of the
        two.

        `RunError` if there is nothing to retry: it is running, queued or done.
        """
        await self._need("retry()")
        return await self._backend.retry(self.id)


class RunById(Run[T]):
    """A handle on a run by its id: `app.run(id)`.

    The id may also be job and key as they were given, `ocr/d2:left`; `id` is the right one once the
    run was found. Its job and group are empty until then. `status()` of an unknown run, or of what
    can be no id, has the state `unknown`; the other methods raise `RunNotFound`.
    """

    def __init__(
        self,
        run: str,
        connect: Callable[[], Awaitable[Backend]],
        returns: Callable[[str], Any],
        found: RunStatus | None = None,
    ) -> None:
        given: object = run
        if not isinstance(given, str):
            raise InvalidName(f"the id of a run must be a string, not {given!r}")
        self.id = run
        self.job, self.group = (found.job, found.group) if found else ("", "")
        self.duplicate = False
        self.state = found.state if found else "unknown"
        self._connect = connect
        self._returns_of = returns
        self._spec = JobSpec("unknown")  # the limits are irrelevant: its place is unknown too

    async def status(self) -> RunStatus:
        self._backend = await self._connect()
        found = await self._look()
        self.id, self.job, self.group, self.state = found.run, found.job, found.group, found.state
        self._returns = self._returns_of(found.job)
        return found

    async def _look(self) -> RunStatus:
        with contextlib.suppress(InvalidName):
            for run in spelled_runs(self.id):
                found = await self._backend.look(run)
                if found.known:
                    return found
        return RunStatus(self.id, "unknown")

    async def _find(self) -> RunStatus:
        found = await self.status()
        if not found.known:
            raise RunNotFound(
                f"no trace of run {self.id}: the id is wrong, or the run ended a while ago and its "
                "record expired",
                run=self.id,
            )
        return found

    async def _need(self, what: str) -> None:
        await self._find()

    async def result(self, timeout: float | None = None) -> T:
        found = await self._find()
        if found.record is not None and found.record.terminal:
            return await self._outcome(found.record)
        self._sequence = 0
        self._limited = False
        return await self._wait(timeout)

    async def logs(self) -> list[LogLine]:
        await self._find()
        return await super().logs()
