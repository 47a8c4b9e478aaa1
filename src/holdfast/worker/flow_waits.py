"""The waits of a flow: for a time, its children, or an event.

Before a flow parks, it stores the wait and what ends it. Whoever ends the wait wakes the flow,
which is then called again and finds the wait over.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from holdfast.client.run import Request
from holdfast.clock import rfc3339
from holdfast.errors import (
    FlowTooLong,
    InvalidInput,
    InvalidPayload,
    OutcomeUnknown,
    RunCancelled,
    RunFailed,
    RunLost,
)
from holdfast.flow import FlowEvent, Settled
from holdfast.model.journal import (
    MOST_CHILDREN,
    ChildEnd,
    JournalEntry,
    Parent,
    gather_number,
    missing,
)
from holdfast.model.run import NO_RESULT
from holdfast.names import H_PARENT, child_run
from holdfast.ownership.journals import wake_message
from holdfast.payload import decode_result
from holdfast.worker.flow_steps import SOON_SECONDS, FlowSteps

STOPPING_SECONDS: Final = 5.0
"""How long a flow waits before it asks children to stop again: a worker that died, or a message in
transit, may have missed the first request."""


class FlowCall(FlowSteps):
    """One call of a flow's function (`flow.Flowing`)."""

    # ---- sleeping

    async def sleep(self, seconds: float | None, until: float) -> None:
        """Sleep for a time, or until an instant."""
        async with self._operation("a sleep"):
            n, stored = self._remember(lambda: self._next("sleep", ""))
            if stored is None:
                await self._frontier(n)
                due = until if seconds is None else self._now() + seconds
                stored = JournalEntry("sleep", n, at=self._now(), due=due)
                await self._append(stored)
            if stored.due <= self._now() + SOON_SECONDS:
                return
            if self.unwinding is not None or self._now() >= self.deadline:
                await self._frontier(n)
            await self._pause(f"until {rfc3339(stored.due)}", stored.due)

    # ---- children

    async def gather(self, requests: list[Any], settled: bool) -> list[Any]:
        """Run children and wait for them."""
        _check_children(requests)
        if not requests:
            return []
        total = len(requests)
        name = ", ".join(sorted({request.spec.name for request in requests}))[:200]
        async with self._operation(f"children {name}"):
            n, stored = self._remember(lambda: self._next("gather", name, total))
            if stored is None:
                await self._frontier(n)
                homes = tuple(f"{one.group} {one.spec.name}" for one in requests)
                homes = homes[:1] if len(set(homes)) == 1 else homes
                stored = JournalEntry("gather", n, name, self._now(), total=total, jobs=homes)
                await self._append(stored)
                await self._send(n, requests, {})
                ends: dict[int, ChildEnd] = {}
            else:
                ends = await self._ends(n, total)
                if n not in self.journal.ends:
                    await self._send(n, requests, ends)
            if len(ends) < total:
                if max(self.journal.operations) > n:
                    raise OutcomeUnknown("they had all ended before; a server does not know it yet")
                await self._not_all(n, name, requests, ends)
            if self.unwinding is not None and any(e.state != "done" for e in ends.values()):
                await self._unwind(n, self.unwinding)  # they were stopped with the flow
            return await self._results(requests, ends, settled)

    async def _ends(self, n: int, total: int) -> dict[int, ChildEnd]:
        number = gather_number(n, self.generation)
        return await self._flows.journals.ends(self._held.run, number, total)

    def _child(self, n: int, index: int, total: int, request: Request) -> Request:
        spec, parent, number = (
            self._held.job.spec,
            self._held.run,
            gather_number(n, self.generation),
        )
        run = child_run(request.group, request.spec.name, parent, number, index)
        headers = dict(request.headers)
        if total:
            headers[H_PARENT] = str(Parent(parent, spec.group, spec.name, number, index, total))
        return msgspec.structs.replace(
            request,
            run=run,
            keyed=False,
            cause=self._held.run,
            headers=headers,
            on_duplicate="return",
        )

    async def _send(self, n: int, requests: Sequence[Request], ends: dict[int, ChildEnd]) -> None:
        total = len(requests)
        left = [self._child(n, i, total, requests[i]) for i in missing(total, ends)]
        await self._flows.backend().enqueue_many(left)
        await self._append(JournalEntry("sent", n, at=self._now()))

    async def _not_all(
        self, n: int, name: str, requests: Sequence[Request], ends: dict[int, ChildEnd]
    ) -> None:
        """Some children have not ended: wait for them, or stop them if the flow has to end."""
        total = len(requests)
        if self.unwinding is None and self._now() >= self.deadline:
            self._time_is_over()
        if self.unwinding is not None:
            await self._stop_children(n, requests, ends)
            ends |= await self._ends(n, total)
            if len(ends) >= total:
                await self._unwind(n, self.unwinding)
            left = total - len(ends)
            again = self._now() + STOPPING_SECONDS
            await self._wait(f"{left} of {total} children to stop: {name}", again)
        left = total - len(ends)
        await self._wait(f"{left} of {total} children: {name}")

    async def _stop_children(
        self, n: int, requests: Sequence[Request], ends: dict[int, ChildEnd]
    ) -> None:
        total = len(requests)
        left = (self._child(n, i, total, requests[i]) for i in missing(total, ends))
        await self._flows.cancel_children(self._held.run, left)

    async def _results(
        self, requests: Sequence[Request], ends: dict[int, ChildEnd], settled: bool
    ) -> list[Any]:
        jobs = self._held.job.app.jobs
        found: list[Any] = []
        for index, request in enumerate(requests):
            job, end = jobs.get(request.spec.name), ends[index]
            value = None
            if end.state == "done":
                body = await self._fetched(bytes(end.result), end.result_object)
                returns = job.signature.returns if job is not None else Any
                value = self._decoded(body, returns, f"child {end.run}")
            elif not settled:
                raise _failure(end, request)
            found.append(Settled(end.run, end.state, value, end.error) if settled else value)
        return found

    async def start(self, request: Any) -> str:
        """Send a run without waiting for it."""
        _check_children([request])
        name = f"start {request.spec.name}"
        async with self._operation(name):
            n, stored = self._remember(lambda: self._next("step", name))
            child = self._child(n, 0, 0, request)
            if stored is None:
                await self._frontier(n)
                await self._flush()
                await self._flows.backend().enqueue_many([child])
                body = msgspec.Raw(msgspec.json.encode(child.run))
                now = self._now()
                await self._append(JournalEntry("step", n, name, now, now, value=body, attempt=1))
            return child.run

    # ---- events

    async def event(self, name: str, key: str, timeout: float | None, kind: Any) -> Any:
        """Wait for an event with a key."""
        called = f"{name} {key}"
        async with self._operation(f"event {name!r}"):
            n, stored = self._remember(lambda: self._next("event", called))
            if stored is None:
                await self._frontier(n)
                due = self._now() + timeout if timeout is not None else 0.0
                stored = JournalEntry("event", n, called, self._now(), due=due)
                await self._append(stored)
            got = self.journal.ends.get(n)
            if got is None:
                got = await self._receive(n, stored, name, key, kind)
            if got.missing:
                return None
            if got.error:  # as received, since anybody may have sent it
                raise InvalidPayload(got.error)
            data = self._decoded(bytes(got.value), kind, f"event {called!r}")
            return FlowEvent(data, datetime.fromtimestamp(got.at, UTC), got.by)

    async def _receive(
        self, n: int, stored: JournalEntry, name: str, key: str, kind: Any
    ) -> JournalEntry:
        journals, run = self._flows.journals, self._held.run
        spec = self._held.job.spec
        while True:
            last = await journals.newest(name, key)
            after = last.sequence if last else 0
            if (
                last
                and last.at >= self.journal.created
                and after > self.journal.taken.get(stored.name, 0)
            ):
                value = _event_value(last.body)
                got = JournalEntry(
                    "got",
                    n,
                    stored.name,
                    last.at,
                    value=value,
                    sequence=after,
                    by=last.by,
                    error=_misfit(value, kind),
                )
                break
            if stored.due and stored.due <= self._now() + SOON_SECONDS:
                got = JournalEntry("got", n, stored.name, self._now(), missing=True)
                break
            if self.unwinding is not None or self._now() >= self.deadline:
                await journals.unwait(name, key, run)
                await self._frontier(n)
            wake = wake_message(self._flows.outbox.names, spec.group, spec.name, run, "")
            if await journals.wait(name, key, wake, run, after):
                await self._wait(f"event {name}, key {key}", stored.due)
        await self._append(got)
        await journals.unwait(name, key, run)
        return got


def _event_value(body: bytes) -> msgspec.Raw:
    """The data of an event; anybody may have published it, so text that is no JSON stays text."""
    if not body or body == b"null":
        return NO_RESULT
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(body.decode(errors="replace")))
    return msgspec.Raw(body)


def _misfit(value: msgspec.Raw, kind: Any) -> str:
    """Why the data of an event is not what the flow expects; empty if it is."""
    if value == NO_RESULT:
        return ""
    try:
        decode_result(bytes(value), kind)
    except InvalidInput as error:
        return str(error)
    return ""


def _check_children(requests: Sequence[Any]) -> None:
    if len(requests) > MOST_CHILDREN:
        raise FlowTooLong(
            f"a gather has at most {MOST_CHILDREN:,} children, not {len(requests):,}: gather child "
            "flows that gather the rest"
        )
    for request in requests:
        if not isinstance(request, Request):
            raise InvalidInput(
                f"children are what `job.request(...)` returns, not {type(request).__name__}"
            )
        if request.spec.debounce:
            raise InvalidInput(
                f"job {request.spec.name!r} cannot be a child: of debounced runs only the last one "
                "runs, and the flow would wait for the others"
            )
        if not request.spec.recorded:
            raise InvalidInput(
                f"job {request.spec.name!r} cannot be a child: at_least_once keeps no result"
            )


def _failure(end: ChildEnd, request: Request) -> Exception:
    text = f"run {end.run} of {request.spec.name}: {end.error or end.state}"
    kinds = {"cancelled": RunCancelled, "lost": RunLost}
    return kinds.get(end.state, RunFailed)(text, run=end.run)
