"""Slots of hosts: which agents have run a schedule's slot, and which have not reported.

An agent reports the schedules that it has in force and since when. Its report on a slot is a return
under the slot's id, which is the same for all hosts. So each slot has two lists: hosts that
returned, and hosts that have the schedule and have not returned (off, cut off, or still running
it).

Not guaranteed: that past slots include hosts that no longer have the schedule and have not
returned. Returns are kept for 7 days.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from holdfast import errors
from holdfast.broker import Bucket
from holdfast.client import Client
from holdfast.client.fleet import Fleet
from holdfast.durations import instant
from holdfast.errors import InvalidInput, NotFound
from holdfast.model import schedule as schedules
from holdfast.model.codec import Codec
from holdfast.model.fleet import Return
from holdfast.model.schedule import Schedule, due_at, next_after
from holdfast.model.slot import slot_id
from holdfast.names import check_name
from holdfast.settings.records import Report

DAY: Final = 86_400
_REPORT: Final = Codec[Report](Report, "an agent's report", strict=False)
_CLOCK: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


class HostScheduleInfo(msgspec.Struct, frozen=True):
    """A schedule that hosts run by themselves."""

    name: str
    rules: tuple[str, ...]
    """More than one only while a change is being rolled out."""
    hosts: int


class HostSlot(msgspec.Struct, frozen=True):
    """One slot, on all hosts."""

    schedule: str
    at: int
    run: str
    """The id of its run on every host."""
    returns: dict[str, Return]
    waiting: dict[str, float]
    """Hosts that have the schedule and have not returned, and when it was due there."""

    @property
    def ok(self) -> int:
        return sum(found.ok for found in self.returns.values())


class HostSlots:
    """Reads the slots of hosts in a namespace."""

    def __init__(self, client: Client) -> None:
        self._broker = client.broker
        self._applied = Bucket(client.broker, client.broker.names.applied)
        self._fleet = Fleet(client.broker)

    async def list(self) -> Sequence[HostScheduleInfo]:
        """The schedules that hosts have in force, by name."""
        found: dict[str, list[Schedule]] = {}
        for _, schedule in await self._in_force():
            found.setdefault(schedule.name, []).append(schedule)
        return [
            HostScheduleInfo(name, tuple(sorted({s.rule for s in these})), len(these))
            for name, these in sorted(found.items())
        ]

    async def last(self, name: str, most: int) -> Sequence[HostSlot]:
        """The newest slots of a schedule, newest first."""
        hosts = await self._hosts(name)
        now = self._broker.server_now()
        moments: set[int] = set()
        for rule in {s.rule: s for s in hosts.values()}.values():
            moments |= set(_newest(rule, now, most))
        chosen = sorted(moments, reverse=True)[:most]
        return [await self._slot(name, moment, hosts) for moment in chosen]

    async def show(self, name: str, at: str | int) -> HostSlot:
        """One slot of a schedule; 03:00 is the last one at that time, in UTC."""
        hosts = await self._hosts(name)
        moment = at if isinstance(at, int) else _moment(at, self._broker.server_now())
        found = await self._slot(name, moment, hosts)
        if not found.returns and not found.waiting:
            raise NotFound(f"no host has a slot of {name} at that time: see 'fleet slots {name}'")
        return found

    async def _slot(self, name: str, moment: int, hosts: dict[str, Schedule]) -> HostSlot:
        run = slot_id(name, moment)
        returns = await self._fleet.returns(run)
        waiting = {
            agent: due_at(schedule, moment)
            for agent, schedule in hosts.items()
            if agent not in returns and next_after(schedule, moment - 1) == moment
        }
        return HostSlot(name, moment, run, returns, waiting)

    async def _hosts(self, name: str) -> dict[str, Schedule]:
        check_name(name, "schedule")
        return {agent: s for agent, s in await self._in_force() if s.name == name}

    async def _in_force(self) -> Sequence[tuple[str, Schedule]]:
        try:
            entries = [entry async for entry in self._applied.entries()]
        except errors.NotFound:
            return []  # no settings were ever published
        found = []
        for entry in entries:
            report = self._applied.read(_REPORT.decode, entry)
            found += [(entry.key, s) for s in (report.schedules if report else ()) if _sound(s)]
        return found


def _sound(schedule: Schedule) -> bool:
    """Whether its instants can be computed: an agent may report anything."""
    try:
        schedules.check_rule(schedule)
    except InvalidInput:
        return False
    return True


def _newest(schedule: Schedule, now: float, most: int) -> Iterator[int]:
    """The newest past instants, searched backwards in growing steps."""
    span = float(schedule.every * most) or 3600.0
    found: list[int] = []
    while len(found) < most and span < 400 * DAY:
        begin = max(schedule.since, now - span)
        found = list(schedules.instants(schedule, begin, now))
        if begin <= schedule.since:
            break
        span *= 4
    yield from found[-most:]


def _moment(text: str, now: float) -> int:
    """The instant that a text names."""
    if clock := _CLOCK.fullmatch(text):
        seconds = int(clock[1]) * 3600 + int(clock[2]) * 60
        today = int(now) // DAY * DAY + seconds
        return today if today <= now else today - DAY
    return int(instant(text, "TIME"))
