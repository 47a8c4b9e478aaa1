"""One call of a flow's function: its journal, how it is driven, and how it ends.

An operation is stored before the next one begins, and a wait before the flow parks. Entries that
nothing outside the flow depends on yet (a random number, `changed`) are stored with the next one.

A call ends early by an exception that users do not catch: `Parked` when the flow waits, `Unwound`
when it was cancelled or its time is over. If one is caught anyway, nothing changes: every later
operation raises it again, and the outcome of the call is what was noted here.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast import durations
from holdfast.errors import (
    BrokerError,
    ClaimLost,
    Conflict,
    FlowMismatch,
    FlowStopped,
    HoldfastError,
    InvalidInput,
    PayloadTooLarge,
    TryAgain,
    Unreadable,
)
from holdfast.flow import Parked, Unwound
from holdfast.model.journal import FlowJournal, FlowReplay, JournalEntry
from holdfast.model.message import user_headers
from holdfast.model.run import NO_RESULT
from holdfast.ownership.journals import Writer
from holdfast.payload import decode_result
from holdfast.worker.attempt import Held

if TYPE_CHECKING:
    from holdfast.worker.flows import FlowRunner

log = logging.getLogger("holdfast.flows")

STOPPED_SECONDS: Final = (5.0, 3_600.0)
"""When a flow that does not fit this code is tried again: first soon, since another worker may have
the right code, then each time after twice as long. So it continues after a repair without an
operator."""


DUE_MARK: Final = "t"
"""The number of the scheduled wake, of which a flow has at most one."""


class Park(NamedTuple):
    """What a flow waits for, and until when at most."""

    waits: str
    due: float = 0.0
    """0 if only a wake ends the wait."""
    error: str = ""
    """Why it was stopped."""


class FlowCore:
    """The state of one call, which all its operations share."""

    def __init__(
        self, flows: FlowRunner, held: Held, journal: FlowJournal, lazy: bool = False
    ) -> None:
        claim = held.claim
        assert claim is not None
        self._flows = flows
        self._held = held
        self.journal = journal
        self.replay = FlowReplay(journal)
        self._writer = Writer(
            flows.journals, journal, claim.epoch, flows.clock, lambda: held.lost or claim.lost
        )
        self.park: Park | None = None
        """Set when the function was left because the flow waits."""
        self.lost: ClaimLost | None = None
        self.again = False
        """The journal differs from what this process expected: the message is given back."""
        self._lazy = lazy
        self._pending: list[JournalEntry] = []
        """Entries that are stored with the next one, before anything outside happens."""
        self._undos: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._mismatch: HoldfastError | None = None
        self._busy = ""
        self.unwinding: Unwound | None = None
        limit = held.job.spec.run_timeout_seconds
        self.deadline = held.created + limit if limit is not None else math.inf

    @property
    def generation(self) -> int:
        """The generation of the flow's id, from the start of its journal or from its claim."""
        claim = self._held.claim
        assert claim is not None
        return self.journal.generation if self.journal.start else claim.record.generation

    # ---- opening

    @property
    def ended_before(self) -> bool:
        """Whether the flow ended, and only its record was not settled.

        A replay by an operator has a higher number and another generation, and starts the flow from
        its beginning.
        """
        end, claim = self.journal.end, self._held.claim
        assert claim is not None
        same = end is not None and end.generation == claim.record.generation
        return same and end is not None and self._held.stamp <= end.attempt

    def _start(self) -> JournalEntry:
        held, body, spec = self._held, self._held.message.body, self._held.job.spec
        return JournalEntry(
            "start",
            at=self._now(),
            since=held.created,
            epoch=self._writer.epoch,
            node=self._flows.node,
            generation=self.generation,
            value=msgspec.Raw(body) if body else NO_RESULT,
            total=int(body == b"null"),
            headers=user_headers(held.message.headers),
            jobs=(f"{spec.group} {spec.name}",),
            parent=held.claim.record.parent if held.claim else "",
        )

    async def open(self) -> None:
        """Open the journal, which fences the flow's previous holder."""
        if self.journal.start is None or self.journal.end is not None:
            last = self.journal.last
            self.journal = FlowJournal(self._held.run)
            self.journal.last = last
            self.replay.journal = self._writer.journal = self.journal
            first = self._start()
        else:
            node, epoch = self._flows.node, self._writer.epoch
            first = JournalEntry("open", at=self._now(), epoch=epoch, node=node)
        await self._writer.append(first)
        if why := await self._flows.journals.stopped(self._held.run):
            self.unwinding = Unwound("cancelled", why)

    # ---- what is stored

    @property
    def has_done_something(self) -> bool:
        """Whether the flow got further in an earlier call, so that its code must have changed
        since."""
        return bool(self.journal.operations or self.journal.tried)

    def _decoded(self, body: bytes, kind: Any, what: str) -> Any:
        """A stored value, decoded as the type that the code expects now."""
        if body == b"null":
            return None
        try:
            return decode_result(body, kind)
        except InvalidInput as error:
            raise FlowMismatch(
                f"operation {self.replay.position}: the stored result of {what} no longer fits "
                f"its type: {error}. Let the type accept what is stored, for example by a default "
                "for a new member, then resume the flow",
                operation=self.replay.position,
            ) from error

    async def _fetched(self, body: bytes, name: str) -> bytes:
        return await self._flows.outbox.fetch(name) if name else body

    # ---- the call

    def _check(self) -> None:
        """An exception that the function may have caught, but after which it must not continue."""
        if self.park is not None or self.lost is not None or self.again:
            raise Parked
        if self._mismatch is not None:
            raise self._mismatch

    def _remember(self, step: Callable[[], Any]) -> Any:
        """Do a step of the replay; remember a mismatch, in case the function catches it."""
        try:
            return step()
        except FlowMismatch as error:
            self._mismatch = error
            raise

    def _now(self) -> float:
        return self._flows.now()

    def now(self) -> float:
        """The server's time."""
        return self._now()

    @contextlib.asynccontextmanager
    async def _operation(self, what: str) -> AsyncIterator[None]:
        """One at a time: which of two comes first could differ between replays."""
        self._check()
        if self._busy:
            raise InvalidInput(
                f"the flow asks for {what} while it waits for {self._busy}: await one operation "
                "at a time, and run things in parallel as children, with `ctx.gather`"
            )
        self._busy = what
        try:
            yield
        except ClaimLost as error:
            self.lost = error
            raise Parked from None
        except (Unreadable, FlowMismatch) as error:
            self._mismatch = error
            raise
        except (TryAgain, Conflict) as error:  # the function could do nothing about it
            log.warning("flow %s waits for its redelivery: %s", self._held.run, error)
            self.again = True
            raise Parked from None
        except BrokerError as error:  # retrying would fail in the same way
            self._mismatch = FlowStopped(
                f"operation {self.replay.position}: {what} cannot be done: {error}. Repair that, "
                "then resume the flow"
            )
            raise self._mismatch from error
        finally:
            self._busy = ""

    def _next(self, kind: str, name: str, total: int = 0) -> tuple[int, JournalEntry | None]:
        n, stored = self.replay.next(kind, name, total)
        unwind = self.journal.unwind
        if unwind is not None and n >= unwind.n:
            raise Unwound("timeout" if unwind.state == "timeout" else "cancelled", unwind.error)
        return n, stored

    async def _append(self, *entries: JournalEntry) -> None:
        pending, self._pending = self._pending, []
        if not self._lazy:
            await self._writer.append(*pending, *entries)
            return
        first = self._start()
        try:
            await self._writer.append(first, *pending, *entries)
        except PayloadTooLarge:  # together with the flow's payload
            await self._writer.append(first)
            await self._writer.append(*pending, *entries)
        except ClaimLost:
            if self._held.lost:
                raise
            self.again = True  # there is a journal after all
            raise Parked from None
        finally:
            self._lazy = False

    async def _flush(self) -> None:
        if self._pending:
            await self._append()

    async def _frontier(self, n: int) -> None:
        """The operation is new: unless the flow has to end, it may be executed."""
        if self._now() >= self.deadline and self.unwinding is None:
            self._time_is_over()
        if self.unwinding is not None:
            await self._unwind(n, self.unwinding)

    def _time_is_over(self) -> None:
        limit = durations.text(self._held.job.spec.run_timeout_seconds or 0.0)
        self.unwinding = Unwound("timeout", f"TimeoutError: the flow took longer than {limit}")

    async def _unwind(self, n: int, reason: Unwound) -> None:
        """Store the operation at which the flow ends, and unwind it."""
        unwind = JournalEntry("unwind", n, at=self._now(), state=reason.reason, error=str(reason))
        await self._append(unwind)
        raise reason

    async def _wait(self, waits: str, due: float = 0.0) -> None:
        """Park; at the latest, the flow is called again when it is due or its time is over.

        The new wake replaces that of the previous wait.
        """
        at = min(due or math.inf, self.deadline if self.unwinding is None else math.inf)
        if at < math.inf:
            spec = self._held.job.spec
            await self._flows.journals.wake(spec.group, spec.name, self._held.run, DUE_MARK, at)
        await self._flush()
        self.park = Park(waits, at if at < math.inf else 0.0)
        raise Parked

    async def _pause(self, waits: str, due: float) -> None:
        """Wait here if it is not worth parking."""
        left = due - self._now()
        if left <= self._flows.near_seconds:
            await self._flows.clock.sleep(max(0.0, left))
            return
        await self._wait(waits, due)

    # ---- the end

    @property
    def unwound_as(self) -> str:
        """Why the flow ends: `cancelled`, `timeout` or `failed`."""
        return self.journal.unwind.state if self.journal.unwind else ""

    def story_of_undo(self) -> str:
        """Compensations that failed, for the run's error."""
        failed = [f"{e.name}: {e.error}" for e in self.journal.undone.values() if e.error]
        return f"; not undone: {'; '.join(failed)}" if failed else ""

    async def fold(
        self, state: str, *, error: str = "", value: bytes = b"", stored: str = ""
    ) -> None:
        """Replace the journal by one entry that says how the flow ended, and expires."""
        self._pending = []
        leftovers = self.journal.leftovers()
        end = self._flows.end_of(
            self._held, self.journal, state, error=error, value=value, stored=stored
        )
        end = msgspec.structs.replace(end, epoch=self._writer.epoch, generation=self.generation)
        await self._writer.append(end, ttl=self._flows.kept_seconds)
        if leftovers or self.unwinding is not None:
            await self._flows.clean(self._held, leftovers)

    def stopped(self, error: BaseException | str) -> Park:
        """Park the flow with the reason why it cannot continue."""
        first, longest = STOPPED_SECONDS
        wait, opened = first, self.journal.opened
        record = self._held.claim.record if self._held.claim else None
        if record is not None and record.error and len(opened) > 1:
            wait = min(longest, max(first, 2 * (opened[-1].at - opened[-2].at)))
        return Park("stopped", self._now() + wait, str(error))
