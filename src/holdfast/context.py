"""The context of a handler: facts about its run, and what the handler can do.

`Context` is for `async def` handlers, `SyncContext` for plain ones, which run in a thread: the
same names, but its methods block. Annotate a parameter with either, or call it `ctx`.

`run` is the same for all attempts: use it as the idempotency key of an effect. `epoch` only grows:
if you store it with an effect and reject smaller ones, a process that was replaced can do no harm
when it resumes.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections.abc import Callable, Coroutine, MutableMapping
from datetime import UTC, datetime
from typing import Any, Protocol, SupportsFloat, TypeVar

from holdfast.errors import InvalidInput, InvalidName, NoRecord, SettingsError
from holdfast.model.job import JobSpec
from holdfast.model.settings import Settings
from holdfast.model.slot import parse_stamp
from holdfast.names import check_event, parse_slot_run

T = TypeVar("T")

current_run: contextvars.ContextVar[str] = contextvars.ContextVar("holdfast_run", default="")
"""The run that the current code belongs to: runs that it enqueues name it as their cause."""

sending: contextvars.ContextVar[str] = contextvars.ContextVar("holdfast_sending", default="")
"""`flow` in the function of a flow, outside of its steps: what it sends there would be sent again
by every replay."""

_log = logging.getLogger("holdfast.job")


class Attempting(Protocol):
    """The execution behind a context."""

    async def publish(self, event: str, data: Any) -> None:
        """Send an event."""
        ...

    async def still_owner(self) -> bool:
        """Ask whether the claim still holds."""
        ...

    async def progress(self, fraction: float | None, note: str) -> None:
        """Record the progress."""
        ...


class _RunLogger(logging.LoggerAdapter[logging.Logger]):
    """Every line carries the run's fields."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


class _Facts:
    """The facts that both kinds of context carry."""

    def __init__(
        self,
        execution: Attempting,
        *,
        run: str,
        spec: JobSpec,
        group: str,
        node: str,
        attempt: int,
        epoch: int | None,
        headers: dict[str, str],
        deadline: float | None,
        settings: Callable[[], Settings] | None = None,
    ) -> None:
        self.run = run
        self.job = spec.name
        self.group = group
        self.node = node
        self.attempt = attempt
        self.headers = headers
        self.deadline = datetime.fromtimestamp(deadline, UTC) if deadline else None
        """When this attempt times out, or None."""
        self.state: dict[str, Any] = {}
        """For middlewares: values to pass to the handler."""
        self._epoch = epoch
        self._execution = execution
        self._settings = settings
        self._log: _RunLogger | None = None

    @property
    def epoch(self) -> int:
        """The fencing number of this attempt: the revision at which its claim was won."""
        if self._epoch is None:
            raise NoRecord(
                f"ctx.epoch needs a claim, which job {self.job!r} does not make "
                "(delivery='at_least_once'): use delivery='effectively_once'",
                run=self.run,
            )
        return self._epoch

    @property
    def slot(self) -> datetime | None:
        """The instant for which a schedule sent this run; None when no schedule did."""
        found = parse_slot_run(self.run)
        try:
            return datetime.fromtimestamp(parse_stamp(found[1]), UTC) if found else None
        except InvalidName:  # a custom run id that happens to look like a slot's
            return None

    @property
    def settings(self) -> Settings:
        """The settings in force on this host, as its agent has rendered them."""
        if self._settings is None:
            raise SettingsError(
                "this process has no settings: set HOLDFAST_WORKER_SETTINGS_FILE to the file that "
                "the agent on this host keeps (settings.json in its data_dir)",
                reason="none",
            )
        return self._settings()

    @property
    def logger(self) -> _RunLogger:
        """A logger whose lines carry run, job, attempt, node and epoch."""
        if self._log is None:
            fields = {
                "run": self.run,
                "job": self.job,
                "attempt": self.attempt,
                "node": self.node,
                "epoch": self._epoch or 0,
            }
            self._log = _RunLogger(_log, fields)
        return self._log


def _fraction(given: SupportsFloat | None) -> float | None:
    """A handler's progress as the record keeps it; any kind of number is accepted."""
    if given is None:
        return None
    try:
        number = math.nan if isinstance(given, (bool, str, bytes)) else float(given)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= 1:
        kind = type(given).__name__
        shown = f"{number:g}" if math.isfinite(number) else f"a value of type {kind}"
        raise InvalidInput(f"progress is a number between 0 and 1, not {shown}")
    return number


class Context(_Facts):
    """The context of an `async def` handler."""

    async def publish(self, event: str, data: Any = None) -> None:
        """Send an event to the jobs that subscribe to it; a retry of this run repeats nothing."""
        await self._execution.publish(check_event(event), data)

    async def still_owner(self) -> bool:
        """Whether the run is still ours, as the leader knows now; only a fenced write decides."""
        return await self._execution.still_owner()

    async def progress(self, fraction: SupportsFloat | None = None, note: str = "") -> None:
        """Write down how far the run is; shown by `run.status()`."""
        await self._execution.progress(_fraction(fraction), note)


class SyncContext(_Facts):
    """The context of a plain handler, which runs in a thread: its methods block."""

    loop: asyncio.AbstractEventLoop

    @classmethod
    def beside(cls, ctx: Context, loop: asyncio.AbstractEventLoop) -> SyncContext:
        """The same attempt's context for a thread beside its event loop; `state` is shared."""
        found = cls.__new__(cls)
        found.__dict__.update(ctx.__dict__)
        found.loop = loop
        return found

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def publish(self, event: str, data: Any = None) -> None:
        """Send an event to the jobs that subscribe to it; a retry of this run repeats nothing."""
        self._wait(self._execution.publish(check_event(event), data))

    def still_owner(self) -> bool:
        """Whether the run is still ours, as the leader knows now; only a fenced write decides."""
        return self._wait(self._execution.still_owner())

    def progress(self, fraction: SupportsFloat | None = None, note: str = "") -> None:
        """Write down how far the run is; shown by `run.status()`."""
        self._wait(self._execution.progress(_fraction(fraction), note))
