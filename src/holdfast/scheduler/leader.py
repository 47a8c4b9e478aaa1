"""A leader's work in one term: plan what is due, send it, mark it as sent.

    begin   read the progress, send what the leader before had planned and not marked
    tick    take what is due ──► plan (atomic, fenced) ──► send ──► mark (atomic, fenced)
            marks wait while more is due: late slots come first

A crash between any two steps loses and duplicates nothing. What is not planned is still due for the
next leader, since the watermark moves in the same batch as the slots. What is planned but not
marked is sent again by the next leader under the same message id, and then marked. A leader that
was replaced is rejected at its next `plan` or `mark` (`StaleTerm`); the runs it may still send are
sent by its successor too, under the same id.

This module has no clock and no tasks, only awaits on the store, so that tests can stop it at every
step. After a broker error, slots that were taken are put back and are due again. A slot too large
for the server is recorded as skipped, and does not block others.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from holdfast.errors import BrokerError
from holdfast.model.planner import Decision, Planner
from holdfast.model.schedule import NO_BODY
from holdfast.model.slot import SchedulerProgress, Slot
from holdfast.scheduler.overlap import Overlaps
from holdfast.scheduler.store import MOST_PLANNED, TOO_LARGE, Answer, Planned, Sent, SlotStore
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.scheduler")

MOST_TAKEN = 20_000
"""Slots decided in one tick: bounds its duration; the rest follow in later ticks."""
MOST_UNMARKED = 200_000
"""Slots that may be sent but not marked while more are due: if the leader dies, its successor has
to check all of them."""


class Leader:
    """One scheduler's term."""

    def __init__(
        self,
        store: SlotStore,
        planner: Planner,
        telemetry: Telemetry,
        *,
        node: str,
        epoch: int,
        now: Callable[[], float],
        seen: Callable[[], int] = lambda: 0,
        known: SchedulerProgress | None = None,
    ) -> None:
        """`now` is the server's time, `seen` the newest schedule change in effect.

        `known` is the progress this process has followed: it is used if the stored one is older,
        because the bucket was deleted.
        """
        self.epoch = epoch
        self.progress = SchedulerProgress()
        self._store = store
        self._planner = planner
        self._telemetry = telemetry
        self._node = node
        self._now = now
        self._seen = seen
        self._known = known or SchedulerProgress()
        self._newest = 0
        self._unsent: dict[str, Planned] = {}
        """Planned, not yet sent, by id."""
        self._unmarked: dict[str, Planned] = {}
        """Sent, not yet marked, by id; with the record to write."""
        self._overlaps = Overlaps(store)
        self._told: set[str] = set()
        """Schedules already logged as too large."""
        self._dispatched = telemetry.slots.labels("dispatched")
        self._duplicate = telemetry.slots.labels("duplicate")

    @property
    def busy(self) -> bool:
        """Whether work is left that must not wait for the next slot."""
        return bool(self._unsent or (self._unmarked and not self._behind(self._now())))

    @property
    def unsent(self) -> int:
        """Slots that are recorded but could not be sent yet."""
        return len(self._unsent)

    @property
    def waiting(self) -> bool:
        """Whether slots wait for the runs of earlier ones to end."""
        return self._overlaps.waiting

    # ---- the term

    async def begin(self) -> None:
        """Take over where the previous leader stopped."""
        stored = await self._store.progress()
        self.progress = stored if stored.watermark >= self._known.watermark else self._known
        self._planner.follow(self.progress.watermark)
        self._newest = self.progress.settled
        for planned in await self._store.left_over(self.progress.settled, self.epoch):
            self._remember(planned)
        await self.settle()

    async def tick(self) -> int:
        """Do everything that is due now; returns the number of slots recorded."""
        await self.settle()
        now = self._now()
        decisions = self._planner.take(now, MOST_TAKEN)
        if decisions:
            await self._record(decisions, now)
        return len(decisions)

    async def settle(self) -> None:
        """Send and mark what is planned, including by earlier leaders."""
        for planned in await self._overlaps.released():
            self._unsent[planned.id] = planned
        if self._unsent:
            await self._send(list(self._unsent.values()))
        if self._unmarked and not self._behind(self._now()):
            await self._mark()

    def _behind(self, now: float) -> bool:
        """Whether marking has to wait, because more slots are due: each mark would delay them.

        A slot that was sent and is not marked is sent again by a later leader, and is then known
        by its message id.
        """
        next_due = self._planner.next_due
        return next_due is not None and next_due <= now and len(self._unmarked) < MOST_UNMARKED

    # ---- planning

    async def _record(self, decisions: list[Decision], now: float) -> None:
        """Plan and send batch by batch; the watermark moves with the last one.

        While the runs of one batch are on their way, the next one is planned.
        """
        next_due = self._planner.next_due
        complete = next_due is None or next_due > now
        done = 0
        sending: list[Planned] = []
        answers: Awaitable[list[Answer]] | None = None
        try:
            for start in range(0, len(decisions), MOST_PLANNED):
                part = decisions[start : start + MOST_PLANNED]
                is_last = start + len(part) == len(decisions)
                planned = await self._plan(part, now if is_last and complete else None)
                done = start + len(part)
                if answers is not None:
                    self._sent(sending, await answers)
                sending, answers = planned, self._store.send(planned)
        except BaseException as error:
            self._planner.put_back(decisions[done:])
            if answers is not None and isinstance(error, BrokerError):
                self._sent(sending, await answers)
            raise
        if answers is not None:
            self._sent(sending, await answers)
        if not self._behind(self._now()):
            await self._mark()

    async def _plan(self, decisions: Sequence[Decision], watermark: float | None) -> list[Planned]:
        """Record slots; returns those to send."""
        wanted = [self._planned(d) for d in decisions]
        wanted = await self._overlaps.judge(wanted, [d.schedule.overlap for d in decisions])
        few = len(self._unmarked) <= MOST_PLANNED  # otherwise checking them would cost too much
        settled = self._settled(frozenset()) if few else self.progress.settled
        progress = self._progress(settled, watermark)
        recorded = await self._store.plan(wanted, progress, self.epoch)
        self.progress = progress
        for planned in recorded:
            self._remember(planned)
            self._count(planned)
        return [planned for planned in recorded if planned.id in self._unsent]

    def _planned(self, decision: Decision) -> Planned:
        schedule = decision.schedule
        slot = Slot(
            "skipped" if decision.skip else "planned",
            round(decision.due, 3),
            planned=round(self._now(), 3),
            node=self._node,
            epoch=self.epoch,
            caught_up=decision.caught_up,
            reason=decision.skip,
            last=decision.last,
            count=decision.count,
            job=schedule.job,
            group=schedule.group,
            body=NO_BODY if decision.skip else schedule.payload,
            headers={} if decision.skip else schedule.headers,
        )
        planned = Planned(schedule.name, decision.moment, slot)
        if decision.skip or self._store.fits(planned):
            return planned
        return self._too_large(planned)

    def _too_large(self, planned: Planned) -> Planned:
        """Turn a slot that exceeds the server's message limit into a skipped one."""
        if planned.schedule not in self._told:
            self._told.add(planned.schedule)
            log.error(
                "schedule %s: its payload is larger than the server accepts, so its slots are "
                "skipped: put the data into an object store and send its key, or raise max_payload",
                planned.schedule,
            )
        lean = {"body": NO_BODY, "headers": {}, "state": "skipped", "reason": "too_large"}
        return planned._replace(slot=msgspec.structs.replace(planned.slot, **lean))

    def _remember(self, planned: Planned) -> None:
        self._newest = max(self._newest, planned.revision)
        if planned.slot.state == "planned":
            self._unsent[planned.id] = planned
        self._overlaps.recorded(planned)

    def _count(self, planned: Planned) -> None:
        slot = planned.slot
        if slot.state == "skipped":
            self._telemetry.slots.labels(slot.reason).inc(max(1, slot.count))
        elif slot.caught_up:
            self._telemetry.slots.labels("caught_up").inc()

    # ---- sending and marking

    async def _send(self, planned: list[Planned]) -> None:
        self._sent(planned, await self._store.send(planned))

    def _sent(self, planned: list[Planned], answers: list[Answer]) -> None:
        now = round(self._now(), 3)
        for p, answer in zip(planned, answers, strict=True):
            if answer is None:
                continue
            if answer is TOO_LARGE:
                done = self._too_large(p)
                self._overlaps.forget(p.schedule)
                self._count(done)
            else:
                done = self._dispatch(p, answer, now)
            del self._unsent[p.id]
            self._unmarked[p.id] = done

    def _dispatch(self, p: Planned, answer: Sent, now: float) -> Planned:
        sent = msgspec.structs.replace(
            p.slot,
            state="dispatched",
            dispatched=now,
            sender="" if p.slot.node == self._node else self._node,
            duplicate=answer.duplicate,
            sequence=answer.sequence,
            body=NO_BODY,
            headers={},
        )
        done = p._replace(slot=sent)
        self._overlaps.recorded(done)
        (self._duplicate if answer.duplicate else self._dispatched).inc()
        self._telemetry.slot_delay.observe(max(0.0, now - p.slot.due))
        return done

    async def _mark(self) -> None:
        changes = [*self._unmarked.values(), *self._overlaps.replaced()]
        for start in range(0, len(changes), MOST_PLANNED):
            part = changes[start : start + MOST_PLANNED]
            marked = {p.id for p in part}
            progress = self._progress(self._settled(marked), None)
            self._newest = max(self._newest, await self._store.mark(part, progress, self.epoch))
            self.progress = progress
            for p in part:
                self._unmarked.pop(p.id, None)
                self._overlaps.marked(p)

    def _settled(self, marked: AbstractSet[str]) -> int:
        """The revision up to which nothing is left to do once these are marked."""
        pending = (self._unsent, self._unmarked)
        found = [p.revision for group in pending for id, p in group.items() if id not in marked]
        others = [*self._overlaps.held(), *self._overlaps.replaced()]
        found += [p.revision for p in others if p.id not in marked]
        return min([*found, self._newest + 1]) - 1

    def _progress(self, settled: int, watermark: float | None) -> SchedulerProgress:
        return SchedulerProgress(
            watermark=self.progress.watermark if watermark is None else watermark,
            settled=max(settled, 0),
            seen=self._seen(),
            node=self._node,
            epoch=self.epoch,
        )


def until_next(next_due: float | None, now: float, longest: float) -> float:
    """How long a leader may sleep."""
    return longest if next_due is None else min(longest, max(0.0, next_due - now + 0.0005))
