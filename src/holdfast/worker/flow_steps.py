"""Steps of a flow: functions that are called until their result is stored, and compensations.

A step runs at least once, and its result is stored once. Failed attempts are stored too, so that a
crash does not reset their number, and the flow parks between attempts that are far apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import typing
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import msgspec

from holdfast import durations
from holdfast.context import sending
from holdfast.errors import (
    Discard,
    FlowStopped,
    FlowTooLong,
    InvalidInput,
    Retry,
    Snooze,
    StepFailed,
    Unreadable,
)
from holdfast.flow import FlowStep, Parked, Unwound, running_step
from holdfast.job import Job
from holdfast.model import backoff
from holdfast.model.backoff import Backoff
from holdfast.model.journal import JournalEntry
from holdfast.model.run import NO_RESULT
from holdfast.names import step_key, step_object
from holdfast.payload import decode_result, encode_result
from holdfast.worker.flow_core import FlowCore
from holdfast.worker.settling import error_line

log = logging.getLogger("holdfast.flows")

SOON_SECONDS: Final = 0.005
"""How early a scheduled wake may seem to arrive, because the worker only estimates the server's
clock."""
REPAIR_SECONDS: Final = 30 * durations.DAY
"""How long a large result is kept beyond its flow's deadline: time to repair a stopped flow."""


class FlowSteps(FlowCore):
    """Steps, stored values and compensations."""

    # ---- the call

    async def drive(self, function: Coroutine[Any, Any, Any]) -> Any:
        """Await the flow's function; undo what it did if it fails."""
        sending.set("flow")
        if self._now() >= self.deadline and self.unwinding is None:
            self._time_is_over()
        try:
            value = await function
        except Parked:
            raise
        except (Unwound, Exception) as raised:  # noqa: BLE001 - a flow may raise anything
            error: BaseException = raised
        else:
            self._check()
            self._remember(self.replay.finish)
            return value
        self._check()
        if isinstance(error, (FlowStopped, Unreadable)):
            raise error
        await self._undo_all(error)
        raise error

    # ---- steps

    async def step(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None,
        retry: Backoff | None,
        timeout: float | None,
    ) -> Any:
        called = name or _name_of(func)
        async with self._operation(f"step {called!r}"):
            n, stored = self._remember(lambda: self._next("step", called))
            returns = _returns(func)
            if stored is not None:
                return await self._stored(stored, returns)
            await self._frontier(n)
            await self._flush()
            tried = self.journal.tried.get(n)
            policy = retry if retry is not None else backoff.DEFAULT
            work = functools.partial(func, *args, **kwargs)
            entry = await self._attempts(n, called, work, policy, timeout, tried, "step")
            entry = _checked(entry, returns)
            await self._append(entry)
            if self._flows.on_step is not None:
                self._flows.on_step("after", called)
            return await self._stored(entry, returns)

    async def _attempts(
        self,
        n: int,
        name: str,
        work: functools.partial[Any],
        policy: Backoff,
        timeout: float | None,
        tried: JournalEntry | None,
        kind: str,
    ) -> JournalEntry:
        """Call a function until it returns or has no attempts left; returns the entry with the
        outcome."""
        began = tried.since if tried else self._now()
        attempt = tried.attempt if tried else 0
        if tried is not None and tried.due > self._now() + SOON_SECONDS:
            await self._pause(f"retry of {kind} {name}", tried.due)
        while True:
            attempt += 1
            if self._flows.on_step is not None:
                self._flows.on_step("before", name)
            key = step_key(self._held.run, self.generation, kind, n)
            step = FlowStep(key, self._writer.epoch, attempt)
            value, error = await self._call(work, step, timeout)
            if self._flows.on_step is not None:
                self._flows.on_step("called", name)
            if error is None:
                return await self._entry(n, name, value, began, attempt, kind)
            line = error_line(error, self._held)
            wait = _wait_after(error, policy, attempt, step.key)
            ended = "undone" if kind == "undo" else "step"
            if wait is None:
                return JournalEntry(ended, n, name, self._now(), began, error=line, attempt=attempt)
            log.warning(
                "attempt %d of %s %s in flow %s failed, next in %s: %s",
                attempt,
                kind,
                name,
                self._held.run,
                durations.text(wait),
                line,
                extra=self._held.log_fields(),
            )
            due = self._now() + wait
            state = "undo" if kind == "undo" else ""
            await self._append(
                JournalEntry(
                    "tried",
                    n,
                    name,
                    self._now(),
                    began,
                    error=line,
                    attempt=attempt,
                    due=due,
                    state=state,
                )
            )
            await self._pause(f"retry of {kind} {name}", due)

    async def _call(
        self, work: functools.partial[Any], step: FlowStep, timeout: float | None
    ) -> tuple[Any, BaseException | None]:
        token, sender = running_step.set(step), sending.set("")
        try:
            async with asyncio.timeout(timeout):
                return await _perform(work), None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._held.interrupted or (task is not None and task.cancelling()):
                raise
            return None, error
        except self._flows.fatal:
            raise
        except TimeoutError as error:
            if timeout is None or str(error):
                return None, error
            return None, TimeoutError(f"the step took longer than {durations.text(timeout)}")
        except BaseException as error:  # noqa: BLE001 - a step may raise anything
            return None, error
        finally:
            running_step.reset(token)
            sending.reset(sender)

    async def _entry(
        self, n: int, name: str, value: Any, began: float, attempt: int, kind: str
    ) -> JournalEntry:
        """The entry of a step that has returned; a large value goes to the object store."""
        done = "undone" if kind == "undo" else "step"
        try:
            body = encode_result(value) if value is not None and kind == "step" else b"null"
        except InvalidInput as error:
            line = error_line(error, self._held)
            return JournalEntry(done, n, name, self._now(), began, error=line, attempt=attempt)
        stored = ""
        if len(body) > self._flows.outbox.largest_result:
            stored = step_object(self._held.run, n, self._writer.epoch)
            await self._flows.outbox.keep(stored, body, self._kept_seconds)
            body = b"null"
        return JournalEntry(
            done,
            n,
            name,
            self._now(),
            began,
            value=msgspec.Raw(body) if body != b"null" else NO_RESULT,
            object=stored,
            attempt=attempt,
        )

    @property
    def _kept_seconds(self) -> float | None:
        """How long a large result is kept if the flow's end does not remove it; None: for ever."""
        limit = self._held.job.spec.run_timeout_seconds
        return None if limit is None else limit + REPAIR_SECONDS

    async def _stored(self, entry: JournalEntry, returns: Any) -> Any:
        """What an operation returns, the same on its first call and in every replay."""
        if entry.error:
            raise StepFailed(entry.name, entry.error, entry.attempt)
        body = await self._fetched(bytes(entry.value), entry.object)
        return self._decoded(body, returns, f"step {entry.name!r}")

    # ---- values

    def value(self, name: str, make: Callable[[], Any]) -> Any:
        """A value that would differ in each call: made once, and stored with the next entry."""
        self._check()
        n, stored = self._remember(lambda: self.replay.next("value", name))
        if stored is not None:
            return msgspec.json.decode(stored.value)
        found = make()
        body = msgspec.Raw(msgspec.json.encode(found))
        self._pending.append(JournalEntry("value", n, name, self._now(), value=body))
        return found

    def changed(self, name: str) -> bool:
        """Whether the flow runs the changed code."""
        self._check()
        position = self.replay.position
        found, new = self.replay.changed(name)
        if new:
            self._pending.append(JournalEntry("changed", position, name, self._now()))
        return found

    async def publish(self, event: str, send: Callable[[], Awaitable[None]]) -> None:
        """Publish an event once."""
        async with self._operation(f"publish {event!r}"):
            n, stored = self._remember(lambda: self._next("publish", event))
            if stored is None:
                await self._frontier(n)
                await self._flush()
                await send()
                await self._append(JournalEntry("publish", n, event, self._now()))

    # ---- compensations

    def undo(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Register a compensation; the code registers it again in every replay."""
        self._check()
        self._undos.append((_name_of(func), func, args, kwargs))

    async def _undo_all(self, error: BaseException) -> None:
        """Call the compensations, the last one first."""
        if not self._undos:
            return
        async with self._operation("undo"):
            if self.journal.unwind is None:
                line = error_line(error, self._held)
                n = self.replay.position
                await self._append(
                    JournalEntry("unwind", n, at=self._now(), state="failed", error=line)
                )
            for k in reversed(range(len(self._undos))):
                if k not in self.journal.undone:
                    name, func, args, kwargs = self._undos[k]
                    work = functools.partial(func, *args, **kwargs)
                    tried = self.journal.undo_tried.get(k)
                    entry = await self._attempts(
                        k, name, work, backoff.DEFAULT, None, tried, "undo"
                    )
                    await self._append(entry)


def _checked(entry: JournalEntry, returns: Any) -> JournalEntry:
    """The entry of a step; an error if its result is not what its annotation says.

    It has never been decoded as that type, so a later replay would mistake the failure for a change
    of the code.
    """
    if entry.error or entry.value == NO_RESULT:
        return entry
    try:
        decode_result(bytes(entry.value), returns)
    except InvalidInput as error:
        line = error_line(error)
        return msgspec.structs.replace(entry, value=NO_RESULT, error=line)
    return entry


def _wait_after(error: BaseException, policy: Backoff, attempt: int, seed: str) -> float | None:
    """How long to wait before the next attempt; None: there is none."""
    if isinstance(error, (Discard, FlowTooLong)):
        return None
    wait = policy.wait(attempt, seed)
    if wait is not None and isinstance(error, (Retry, Snooze)) and error.delay is not None:
        with contextlib.suppress(InvalidInput):
            return durations.seconds(error.delay, "delay")
    return wait


async def _perform(work: functools.partial[Any]) -> Any:
    """Call a step: on the loop if it is async, else in a thread."""
    func = work.func.func if isinstance(work.func, Job) else work.func
    work = functools.partial(func, *work.args, **work.keywords)
    if inspect.iscoroutinefunction(func):
        return await work()
    found = await asyncio.to_thread(work)
    return await found if inspect.isawaitable(found) else found


def _name_of(func: Callable[..., Any]) -> str:
    if isinstance(func, Job):
        return func.name
    inner = func
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", "") or type(inner).__qualname__
    return name.rpartition("<locals>.")[2][:200]


def _returns(func: Callable[..., Any]) -> Any:
    """The return annotation of a step, so that a stored result is decoded as the same kind of
    object."""
    if isinstance(func, Job):
        return func.signature.returns
    try:
        return _annotated(func)
    except TypeError:  # not hashable
        return Any


@functools.lru_cache(maxsize=1000)
def _annotated(func: Callable[..., Any]) -> Any:
    try:
        found = typing.get_type_hints(func).get("return", Any)
    except Exception:  # noqa: BLE001 - an annotation may name anything
        return Any
    return Any if found is None else found
