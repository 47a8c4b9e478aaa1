"""A run as its sender sees it: the request to make one, and the handle on an accepted one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, NamedTuple, Protocol, TypedDict, TypeVar, Unpack, cast

import msgspec

from holdfast.broker import Stored
from holdfast.client.bucket import Data
from holdfast.durations import Duration, instant, seconds
from holdfast.errors import (
    InvalidInput,
    NoRecord,
    ResultTimeout,
    RunCancelled,
    RunFailed,
    RunLost,
)
from holdfast.model.job import JobSpec
from holdfast.model.run import Progress, RunRecord
from holdfast.names import IdMaker, check_header, check_name, keyed_run
from holdfast.payload import decode_result

T = TypeVar("T")

_make_id = IdMaker()


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

    @property
    def delayed(self) -> bool:
        return self.at is not None or self.delay_seconds > 0


class Enqueued(NamedTuple):
    """The stream's answer to a request."""

    run: str
    sequence: int
    duplicate: bool


class SendOptions(TypedDict, total=False):
    """How a run is sent: `job.enqueue(42, key="42", delay="10m")`."""

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


def make_request(
    spec: JobSpec, body: bytes, cause: str = "", **options: Unpack[SendOptions]
) -> Request:
    """A checked request; `InvalidInput` or `InvalidName` before anything is sent."""
    if not options:
        return Request(spec, spec.group, _make_id(), body, cause=cause)
    key, delay, at = options.get("key"), options.get("delay"), options.get("at")
    named = options.get("group")
    group = check_name(named, "group") if named else spec.group
    if delay is not None and at is not None:
        raise InvalidInput("give either delay or at, not both")
    headers = dict(options.get("headers") or {})
    for name, value in headers.items():
        check_header(name, value)
    return Request(
        spec,
        group,
        keyed_run(group, spec.name, key) if key is not None else _make_id(),
        body,
        keyed=key is not None,
        delay_seconds=seconds(delay, "delay") if delay is not None else 0.0,
        at=instant(at, "at") if at is not None else None,
        headers=headers,
        cause=cause,
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

    async def wait(self, run: str, sequence: int, timeout: float | None) -> RunRecord:
        """A run's record once it has ended."""
        ...

    async def cancel(self, run: str, group: str, job: str) -> bool:
        """Cancel a run; False when it had ended already."""
        ...

    async def queued(self, run: str, group: str, job: str, sequence: int) -> str:
        """Where a run without a record is: `queued`, `delayed` or `unknown`."""
        ...

    async def result_bytes(self, record: RunRecord) -> bytes:
        """A run's result as JSON, from the object store if it is there."""
        ...

    async def publish_event(self, event: str, body: bytes, headers: dict[str, str]) -> Stored:
        """Publish an event; it is stored when this returns."""
        ...

    async def data(self, name: str) -> Data:
        """A bucket of the program."""
        ...


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What is known of a run right now.

    `state` is `queued`, `delayed`, `running`, `failed` (waiting for its next attempt), `done`,
    `cancelled`, `dead`, `lost` or `unknown`.
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
        )


class Run(Generic[T]):
    """The handle on an accepted run: its status, its result, its cancellation."""

    def __init__(
        self, backend: Backend, spec: JobSpec, group: str, enqueued: Enqueued, returns: Any = Any
    ) -> None:
        self.id = enqueued.run
        self.job = spec.name
        self.group = group
        self.duplicate = enqueued.duplicate
        """The key was known already: this handle is the earlier run's."""
        self._spec = spec
        self._sequence = enqueued.sequence
        self._backend = backend
        self._returns = returns

    def __repr__(self) -> str:
        return f"<Run {self.id} of {self.job}>"

    def _need_record(self, what: str) -> None:
        if not self._spec.recorded:
            raise NoRecord(
                f"{what} needs the run's record, which job {self.job!r} does not keep "
                "(delivery='at_least_once'): use delivery='effectively_once'",
                run=self.id,
            )

    async def status(self) -> RunStatus:
        """Where the run is now."""
        self._need_record("status()")
        record = await self._backend.read(self.id)
        if record is not None:
            return RunStatus.of(self.id, record)
        where = await self._backend.queued(self.id, self.group, self.job, self._sequence)
        return RunStatus(self.id, where)

    async def result(self, timeout: float | None = None) -> T:
        """Wait for the run to end and return what its handler returned.

        Raises `RunFailed`, `RunCancelled`, `RunLost` or, when `timeout` seconds were not enough,
        `ResultTimeout`; the run itself continues.
        """
        self._need_record("result()")
        try:
            record = await self._backend.wait(self.id, self._sequence, timeout)
        except TimeoutError:
            raise ResultTimeout(
                f"run {self.id} has not ended after {timeout:g} s; it continues", run=self.id
            ) from None
        return await self._outcome(record)

    async def _outcome(self, record: RunRecord) -> T:
        if record.state == "done":
            body = await self._backend.result_bytes(record)
            return cast(T, None if body == b"null" else decode_result(body, self._returns))
        text = f"run {self.id} of {self.job}: {record.error or record.state}"
        if record.state == "cancelled":
            raise RunCancelled(text, run=self.id)
        if record.state == "lost":
            raise RunLost(text, run=self.id)
        raise RunFailed(text, run=self.id)

    async def cancel(self) -> bool:
        """Cancel it: queued, delayed, waiting for a retry or running. False: it had ended."""
        self._need_record("cancel()")
        return await self._backend.cancel(self.id, self.group, self.job)
