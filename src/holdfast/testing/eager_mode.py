"""Eager mode: what is enqueued is executed at once, in place.

    async def test_order_sends_a_receipt():
        with eager(app):
            run = await place_order.enqueue(Order(id=1))     # executed when this returns
            assert await run.result() == "sent"

For tests of code that enqueues and does not care when runs execute. A run goes through the same
claim, attempts and retries as on a worker; delays and waits are skipped by moving a `FakeClock`, so
every run has ended when `enqueue` returns: done, dead, cancelled or discarded. So have the events
and runs that it caused.

What a handler raises is recorded, as on a worker, and shows when the test asks for the result.
With `raise_errors=True` it is raised from `enqueue`, at the first attempt that fails.

Start-up and shut-down hooks are not called.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

from holdfast.app import Holdfast
from holdfast.broker import Stored
from holdfast.client import Enqueued, Request, RunStatus
from holdfast.client.bucket import Data
from holdfast.errors import HoldfastError
from holdfast.model.run import RunRecord
from holdfast.model.runlog import LogLine
from holdfast.testing.clock import FakeClock
from holdfast.testing.memory_app import MOST_ATTEMPTS, Memory


class _EagerBackend:
    """Sends to memory and executes until nothing is left."""

    def __init__(self, memory: Memory, raise_errors: bool) -> None:
        self._memory = memory
        self._raise = raise_errors

    async def enqueue(self, request: Request) -> Enqueued:
        enqueued = await self._memory.backend.enqueue(request)
        await self._finish()
        return enqueued

    async def enqueue_many(self, requests: Sequence[Request]) -> list[Enqueued]:
        enqueued = await self._memory.backend.enqueue_many(requests)
        await self._finish()
        return enqueued

    async def publish_event(self, event: str, body: bytes, headers: dict[str, str]) -> Stored:
        stored = await self._memory.backend.publish_event(event, body, headers)
        await self._finish()
        return stored

    async def _finish(self) -> None:
        memory = self._memory
        known = len(memory.raised)
        for _ in range(MOST_ATTEMPTS):
            if not await memory.step():
                due = memory.next_due
                if due is None:
                    return
                memory.clock.advance(max(0.0, due.timestamp() - memory.clock.utc()))
            if self._raise and len(memory.raised) > known:
                raise memory.raised[known]
        raise HoldfastError(
            f"not finished after {MOST_ATTEMPTS:,} steps: does a job enqueue or snooze itself?"
        )

    async def data(self, name: str) -> Data:
        return await self._memory.backend.data(name)

    async def read(self, run: str) -> RunRecord | None:
        return await self._memory.backend.read(run)

    async def recall(self, run: str) -> RunRecord | None:
        return await self._memory.backend.recall(run)

    async def wait(self, run: str, sequence: int, timeout: float | None) -> RunRecord:
        return await self._memory.backend.wait(run, sequence, timeout)

    async def cancel(self, run: str, group: str, job: str) -> bool:
        return await self._memory.backend.cancel(run, group, job)

    async def cancel_child(self, request: Request) -> None:
        await self._memory.backend.cancel_child(request)

    async def publish_signal(
        self, event: str, key: str, body: bytes, headers: dict[str, str]
    ) -> Stored:
        stored = await self._memory.backend.publish_signal(event, key, body, headers)
        await self._finish()
        return stored

    async def queued(self, run: str, group: str, job: str, sequence: int) -> str:
        return await self._memory.backend.queued(run, group, job, sequence)

    async def look(self, run: str) -> RunStatus:
        return await self._memory.backend.look(run)

    async def retry(self, run: str) -> str:
        done = await self._memory.backend.retry(run)
        await self._finish()
        return done

    async def list_runs(self, job: str, state: str, key: str, limit: int) -> list[RunStatus]:
        return await self._memory.backend.list_runs(job, state, key, limit)

    async def result_bytes(self, record: RunRecord) -> bytes:
        return await self._memory.backend.result_bytes(record)

    async def logs(self, run: str, after: int = 0) -> list[LogLine]:
        return await self._memory.backend.logs(run, after)

    def follow(self, run: str, after: int = 0) -> AsyncIterator[LogLine]:
        return self._memory.backend.follow(run, after)


@contextmanager
def eager(
    app: Holdfast, *, raise_errors: bool = False, clock: FakeClock | None = None
) -> Iterator[Memory]:
    """Execute at once what is enqueued inside the block; yields the app in memory."""
    memory = Memory(app, clock)
    before = app.replace_backend(_EagerBackend(memory, raise_errors))
    try:
        yield memory
    finally:
        app.replace_backend(before)
        memory.close()
