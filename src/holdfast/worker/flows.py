"""How a worker handles flows, around the call of a flow's function.

    wake ──► journal ──► [limits] ──► claim ──► open(epoch) ──► function ──► end ──► settle ──► ack
                                                                   │
                                       next wake stored ◄── waits ─┘ ──► settle parked ──► ack

A crash between two steps repeats the last one: the unacknowledged message, or a coordinator, brings
the flow back, and the journal says how far it had come.

A flow that was cancelled, or whose time is over, is called like any other. At its frontier the call
ends, its children are cancelled, and its compensations (`undo`) are called in reverse order. The
number of that operation is stored first, so that every later replay stops there too.

A flow whose code no longer fits its journal, or whose journal cannot be read, is stopped: parked
with the reason, and tried again now and then, because another worker may have the code that fits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from holdfast.client.run import Backend, Request
from holdfast.clock import Clock
from holdfast.errors import ClaimLost, HoldfastError, OutcomeUnknown, Unreadable
from holdfast.model.job import JobSpec
from holdfast.model.journal import (
    FlowJournal,
    JournalEntry,
    check_epoch,
    children_of,
    missing,
)
from holdfast.model.run import NO_RESULT, RunRecord
from holdfast.names import H_PARENT
from holdfast.ownership.claims import Claims
from holdfast.ownership.journals import Journals
from holdfast.worker.attempt import Held
from holdfast.worker.flow_core import DUE_MARK, Park
from holdfast.worker.flow_waits import FlowCall
from holdfast.worker.settling import Outbox

log = logging.getLogger("holdfast.flows")

CANCELS_AT_ONCE: Final = 50
"""Children that are cancelled concurrently: each takes a few requests."""
OPEN_TRIES: Final = 10
"""How often a new holder reads the journal again if its predecessor has just written to it. Each
write of the predecessor costs one try, and its claim is lost."""
NEAR_SECONDS: Final = 1.0
"""A wait of at most this much is not worth parking: parking and waking cost about as much."""
LONGEST_NAK_SECONDS: Final = 60.0
"""How long the wake of a flow that waits for a retry is delayed at most each time, so that an
operator's retry is not missed for long."""
BUSY_SECONDS: Final = (0.02, 2.0)
"""First and longest delay of a wake whose flow is running: it is usually about to park."""

__all__ = ["FlowCall", "FlowRunner", "Park", "busy_delay"]


def busy_delay(deliveries: int) -> float:
    """How long a wake of a running flow waits."""
    first, longest = BUSY_SECONDS
    return min(longest, first * 2.0 ** min(deliveries - 1, 10))


def _child(run: str, group: str, job: str) -> Request:
    """A child as its flow's journal knows it, which is enough to cancel it."""
    return Request(JobSpec(job, group), group, run, b"")


class FlowRunner:
    """The flows of one worker."""

    def __init__(
        self,
        journals: Journals,
        claims: Claims,
        outbox: Outbox,
        clock: Clock,
        backend: Callable[[], Backend],
        *,
        node: str,
        now: Callable[[], float],
        kept_seconds: float,
        near_seconds: float = NEAR_SECONDS,
        fatal: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
    ) -> None:
        self.journals = journals
        self.claims = claims
        self.outbox = outbox
        self.clock = clock
        self.backend = backend
        self.node = node
        self.now = now
        self.kept_seconds = kept_seconds
        """How long the folded journal of an ended flow is kept."""
        self.near_seconds = near_seconds
        self.fatal = fatal
        self.on_step: Callable[[str, str], None] | None = None
        """For tests: called before and after each step, with its name."""

    # ---- before the claim

    async def found(self, held: Held) -> bool:
        """Read the journal of a flow that may have one; False: the message was dealt with."""
        if not held.wake and held.message.deliveries == 1 and held.stamp == 1:
            return True  # nearly always its first message: see `begin`
        try:
            held.journal = await self.journals.load(held.run)
        except Unreadable as error:
            held.broken = str(error)
            return True
        if held.journal.start is not None:
            self._restore_message(held, held.journal.start)
        if not held.wake:
            return True
        return await self._woken(held, held.journal)

    async def _woken(self, held: Held, journal: FlowJournal) -> bool:
        """Whether a wake finds a flow that waits. A wake has no number and takes the record's."""
        try:
            found = await self.claims.read(held.run)
        except Unreadable:
            return True  # the claim would refuse it too
        record = found[0] if found else None
        if record is not None:
            held.stamp = record.message
            wait = record.due - self.now() if record.state == "failed" else 0.0
            if wait > 0 and not held.wake.startswith("x"):
                await held.message.nak(min(wait, LONGEST_NAK_SECONDS))
                return False
        if journal.running or held.wake.startswith("r"):
            return True
        if journal.end is not None and record is not None and record.state in ("parked", "running"):
            return True  # it has ended, but its record was not settled
        await held.message.ack()  # it has ended, or the message with its payload is still to come
        if journal.end is not None:
            await self.journals.unstop(held.run)
        return False

    def _restore_message(self, held: Held, start: JournalEntry) -> None:
        """Take payload and headers from the journal: a wake has none."""
        if held.wake:
            empty = bytes(start.value) == b"null" and not start.total
            held.message.body = b"" if empty else bytes(start.value)
            parent = {H_PARENT: start.parent} if start.parent else {}
            held.message.headers = {**start.headers, **parent, **held.message.headers}
            held.created = start.since

    # ---- after the claim

    async def begin(self, held: Held) -> FlowCall:
        """Open the journal under the claim's epoch."""
        claim = held.claim
        assert claim is not None
        journal = held.journal
        if journal is None and claim.fresh and not held.broken:
            return FlowCall(self, held, FlowJournal(held.run), lazy=True)
        for _ in range(OPEN_TRIES):
            try:
                if journal is None:
                    journal = await self.journals.load(held.run)
            except Unreadable as error:
                held.broken = str(error)
            call = FlowCall(self, held, journal or FlowJournal(held.run))
            if held.broken or (journal and journal.end is not None and call.ended_before):
                return call
            if journal is not None and not check_epoch(journal, claim.epoch):
                raise ClaimLost(f"flow {held.run} was taken over by another node")
            try:
                await call.open()
            except ClaimLost:
                if claim.lost:
                    raise
                journal = None  # the previous holder has just written
                continue
            return call
        raise OutcomeUnknown(f"the journal of {held.run} is being written by others")

    # ---- the end

    def end_of(
        self,
        held: Held,
        journal: FlowJournal,
        state: str,
        *,
        error: str = "",
        value: bytes = b"",
        stored: str = "",
    ) -> JournalEntry:
        """The part of an ended flow's journal that is kept."""
        return JournalEntry(
            "end",
            at=self.now(),
            epoch=journal.epoch,
            node=self.node,
            generation=journal.generation,
            state=state,
            error=error,
            value=msgspec.Raw(value) if value else NO_RESULT,
            object=stored,
            attempt=held.stamp,
            since=journal.created or held.created,
            story=journal.story(),
            total=journal.calls,
        )

    async def clean(self, held: Held, leftovers: Sequence[JournalEntry] = ()) -> None:
        """Remove what waits and results left outside the journal. Best effort."""
        spec = held.job.spec
        await self.journals.forget(held.run)
        await self.journals.unwake(spec.group, spec.name, held.run, DUE_MARK)
        for entry in leftovers:
            if entry.object:
                await self.outbox.forget(entry.object)

    async def cancel_children(self, run: str, children: Iterable[Request]) -> None:
        """Ask children to stop; their flow is told how each ends."""
        limit = asyncio.Semaphore(CANCELS_AT_ONCE)

        async def stop(child: Request) -> None:
            async with limit:
                try:
                    await self.backend().cancel_child(child)
                except (HoldfastError, TimeoutError) as error:
                    log.info("child %s of flow %s: %s", child.run, run, error)

        await asyncio.gather(*map(stop, children))

    async def given_up(self, held: Held, record: RunRecord) -> None:
        """A flow is given up without another call: stop its children, and fold its journal.

        Best effort: a failure only leaves storage behind, and children that nobody waits for.
        """
        try:
            journal = await self.journals.load(held.run)
            if not journal.running:
                return
            entry = journal.newest
            if entry is not None and entry.kind == "gather":
                ends = await self.journals.ends(
                    held.run, journal.gather_number(entry.n), entry.total
                )
                children = children_of(journal, entry)
                left = (children[i] for i in missing(len(children), ends))
                await self.cancel_children(held.run, itertools.starmap(_child, left))
            elif entry is not None and entry.kind == "event":
                event, _, key = entry.name.partition(" ")
                await self.journals.unwait(event, key, held.run)
            end = self.end_of(held, journal, record.state, error=record.error)
            await self.journals.append(
                held.run, [end], expected=journal.last, epoch=end.epoch, ttl=self.kept_seconds
            )
            await self.clean(held, journal.leftovers())
        except (HoldfastError, TimeoutError) as error:
            log.warning("flow %s was given up and could not be cleaned up: %s", held.run, error)

    async def stop(self, held: Held) -> None:
        """A running flow was cancelled: its next call unwinds it."""
        await self.journals.stop(held.run, "cancelled")
