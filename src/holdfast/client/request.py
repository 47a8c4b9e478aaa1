"""A request to run a job, before it has become a message; and who may take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol, TypedDict

import msgspec

from holdfast.broker import Stored
from holdfast.client.bucket import Data
from holdfast.durations import Duration, seconds
from holdfast.errors import InvalidInput
from holdfast.model.job import JobSpec
from holdfast.model.run import RunRecord
from holdfast.names import IdMaker, check_header, check_name, keyed_run


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
    """What the stream said to a request."""

    run: str
    sequence: int
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Options:
    """How a run is to be sent: `job.options(key="42", delay="10m").enqueue(...)`."""

    key: str | None = None
    delay: Duration | None = None
    at: datetime | float | None = None
    headers: dict[str, str] | None = None
    group: str | None = None


class SendOptions(TypedDict, total=False):
    """`Options` as keyword arguments, for type checkers."""

    key: str | None
    delay: Duration | None
    at: datetime | float | None
    headers: dict[str, str] | None
    group: str | None


_make_id = IdMaker()
NO_OPTIONS = Options()


def make_request(spec: JobSpec, body: bytes, options: Options, cause: str = "") -> Request:
    """Check everything a caller can get wrong, so that nothing half-right is sent."""
    if options is NO_OPTIONS:
        return Request(spec, spec.group, _make_id(), body, cause=cause)
    group = check_name(options.group, "group") if options.group else spec.group
    if options.delay is not None and options.at is not None:
        raise InvalidInput("give either delay or at, not both")
    for name, value in (options.headers or {}).items():
        check_header(name, value)
    run = keyed_run(group, spec.name, options.key) if options.key is not None else _make_id()
    return Request(
        spec,
        group,
        run,
        body,
        keyed=options.key is not None,
        delay_seconds=seconds(options.delay, "delay") if options.delay is not None else 0.0,
        at=_instant(options.at),
        headers=dict(options.headers or {}),
        cause=cause,
    )


def _instant(at: object) -> float | None:
    if at is None:
        return None
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise InvalidInput(
                "at= needs a time zone: datetime(..., tzinfo=UTC) or ZoneInfo('Europe/Paris')"
            )
        return at.timestamp()
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at < 4_102_444_800:
        raise InvalidInput("at= must be a datetime with a time zone, or seconds since 1970")
    return float(at)


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
        """A run's result as JSON, from wherever it was put."""
        ...

    async def publish_event(self, event: str, body: bytes, headers: dict[str, str]) -> Stored:
        """Publish an event; it is stored when this returns."""
        ...

    async def data(self, name: str) -> Data:
        """A bucket of the program's own."""
        ...
