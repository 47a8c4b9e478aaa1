"""What happens to a slot whose predecessor's run has not ended: allow, skip, queue or cancel.

The predecessor is active according to its run's record or, without one, if its message is still
stored. `skip` records the slot as skipped. `queue` records it as waiting and sends it after the
runs before it have ended, in order. `cancel` requests cancellation of the previous run and then
waits like `queue`, except that the next slot replaces one that is still waiting.

Only schedules with a policy other than `allow` are tracked here, at the cost of a read per slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.model.schedule import NO_BODY
from holdfast.model.slot import Slot
from holdfast.scheduler.store import Planned, SlotStore


class Overlaps:
    """The overlap policies of one leader's term."""

    def __init__(self, store: SlotStore) -> None:
        self._store = store
        self._last: dict[str, Planned | None] = {}
        """The newest slot of each schedule that was sent or will be."""
        self._held: dict[str, list[Planned]] = {}
        """Waiting slots by schedule, oldest first."""
        self._replaced: dict[str, Planned] = {}

    @property
    def waiting(self) -> bool:
        return bool(self._held)

    def held(self) -> list[Planned]:
        """All waiting slots."""
        return [p for group in self._held.values() for p in group]

    def replaced(self) -> list[Planned]:
        """Slots that will not be sent after all; their records must still be written."""
        return list(self._replaced.values())

    def marked(self, planned: Planned) -> None:
        """The slot's record is written."""
        self._replaced.pop(planned.id, None)

    def recorded(self, planned: Planned) -> None:
        """A slot was planned or sent: the next one of its schedule is compared with it."""
        if planned.slot.state == "waiting":
            group = self._held.setdefault(planned.schedule, [])
            if all(p.moment != planned.moment for p in group):
                group.append(planned)
                group.sort(key=lambda p: p.moment)
        if planned.slot.state != "skipped" and planned.schedule in self._last:
            self._last[planned.schedule] = planned

    def forget(self, schedule: str) -> None:
        """The newest slot was not sent after all: read the previous one from its record."""
        self._last.pop(schedule, None)

    # ---- judging new slots

    async def judge(self, wanted: list[Planned], policies: Sequence[str]) -> list[Planned]:
        """The same slots, in the state that the policies require."""
        asked = [n for n, policy in enumerate(policies) if _asks(policy, wanted[n])]
        if not asked:
            return wanted
        for name in dict.fromkeys(wanted[n].schedule for n in asked):
            if name not in self._last:
                self._last[name] = await self._store.last(name)
        last = {p.schedule: p for n in asked if (p := self._last[wanted[n].schedule])}
        answers = await self._store.active(list(last.values()))
        active = dict(zip(last, answers, strict=True))
        judged = list(wanted)
        for n in asked:
            judged[n] = self._judge(wanted[n], policies[n], last, active)
        return judged

    def _judge(
        self, p: Planned, policy: str, last: dict[str, Planned], active: dict[str, bool]
    ) -> Planned:
        name, before = p.schedule, last.get(p.schedule)
        slot = msgspec.structs.replace(p.slot, previous=before.moment if before else 0)
        busy = active.get(name, False)
        active[name] = True  # later slots of this schedule in the batch come after this one
        if busy and policy == "skip":
            lean = msgspec.structs.replace(slot, body=NO_BODY, headers={})
            return p._replace(slot=skipped(lean))
        if busy:
            slot = msgspec.structs.replace(slot, state="waiting")
            if policy == "cancel":
                self._cancel(name, before)
        last[name] = p._replace(slot=slot)
        return last[name]

    def _cancel(self, name: str, before: Planned | None) -> None:
        for old in self._held.pop(name, []):
            self._replaced[old.id] = old._replace(slot=skipped(old.slot))
        if before is not None and before.slot.state != "waiting":
            self._store.cancel(before)

    # ---- releasing

    async def released(self) -> list[Planned]:
        """Waiting slots whose predecessors have ended; they may be sent now."""
        if not self._held:
            return []
        first = [group[0] for group in self._held.values()]
        before = [await self._before(p) for p in first]
        asked = [b for b in before if b is not None]
        answers = iter(await self._store.active(asked))
        found = []
        for p, b in zip(first, before, strict=True):
            if b is not None and next(answers):
                continue
            found.append(p._replace(slot=msgspec.structs.replace(p.slot, state="planned")))
            group = self._held[p.schedule]
            group.remove(p)
            if not group:
                del self._held[p.schedule]
        return found

    async def _before(self, p: Planned) -> Planned | None:
        if not p.slot.previous:
            return None
        known = self._last.get(p.schedule)
        if known is not None and known.moment == p.slot.previous and not known.slot.pending:
            return known
        return await self._store.get(p.schedule, p.slot.previous)


_ASKING = frozenset({"skip", "queue", "cancel"})


def _asks(policy: str, planned: Planned) -> bool:
    return policy in _ASKING and planned.slot.state != "skipped"


def skipped(slot: Slot) -> Slot:
    """The record of a slot that is not sent because the previous run has not ended."""
    return msgspec.structs.replace(slot, state="skipped", reason="overlap")
