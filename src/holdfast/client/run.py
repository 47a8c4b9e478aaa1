"""A handle on one run: its status, its result, its cancellation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from holdfast.client.request import Backend, Enqueued
from holdfast.errors import (
    NoRecord,
    ResultTimeout,
    RunCancelled,
    RunFailed,
    RunLost,
)
from holdfast.model.job import JobSpec
from holdfast.model.run import Progress, RunRecord
from holdfast.payload import decode_result

T = TypeVar("T")


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
    """One accepted run."""

    def __init__(
        self, backend: Backend, spec: JobSpec, group: str, enqueued: Enqueued, returns: Any = Any
    ) -> None:
        self.id = enqueued.run
        self.job = spec.name
        self.group = group
        self.duplicate = enqueued.duplicate
        """The key was known already: this is the handle of the earlier run."""
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
        `ResultTimeout`; the run itself goes on.
        """
        self._need_record("result()")
        try:
            record = await self._backend.wait(self.id, self._sequence, timeout)
        except TimeoutError:
            raise ResultTimeout(
                f"run {self.id} has not ended after {timeout:g} s; it goes on", run=self.id
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
