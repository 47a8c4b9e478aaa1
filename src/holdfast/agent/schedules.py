"""The agent's own schedules: runs what is due, with or without a connection.

    settings in force ─► planner ─► slot due ─► journal ─► execution ─► return, sent when possible

Guaranteed: a slot is started at most once on this host, across restarts: the journal has its id
before it starts, and a file has the time until which all slots were taken. For a slot that could
not be started at its time (the agent was not running, the previous slot still runs), a return says
why. Nothing here needs the server: this machine's clock continues from the server's last known
time, and returns wait on the disk until the connection is back.

Not guaranteed: that a slot runs on a host that is switched off. `catch_up` says what happens when
it is back. A clock that is wrong while no server was ever reached makes slots run at a wrong time,
but not twice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from holdfast.clock import Clock
from holdfast.errors import ConfigError, Unreadable
from holdfast.identity.files import write_private
from holdfast.model.codec import Codec, Instant
from holdfast.model.fleet import Order
from holdfast.model.host_schedule import HostSchedule
from holdfast.model.planner import Decision, Planner
from holdfast.model.schedule import instants
from holdfast.model.slot import slot_id

log = logging.getLogger("holdfast.agent")

FILE: Final = "schedules.json"
MISSED_SECONDS: Final = 30.0
"""A slot that is this late was missed: the agent was not running. A busy host is not that late."""
LOOK_SECONDS: Final = 30.0
"""The longest sleep before a slot: a machine that was suspended, or whose clock was set, notices by
then."""
AHEAD_SECONDS: Final = 60.0
"""A stored time further in the future than this was written by a wrong clock: corrections of a good
one are far smaller."""
MOST_ANSWERED: Final = 100
"""Missed slots of a schedule that are reported one by one; a host that was off for months would
otherwise send thousands of returns."""

MISSED: Final = "the agent was not running when it was due"
OVERLAPPED: Final = "the previous slot was still running"


class _Progress(msgspec.Struct, frozen=True):
    taken: Instant = 0.0
    """Every slot due up to this instant was started or reported."""


_PROGRESS: Final = Codec[_Progress](_Progress, "how far the schedules have come")


class Runner(Protocol):
    """Starts due slots, and reports a return for each slot that it does not start."""

    def fire(self, run: str, order: Order) -> None:
        """Start a slot, unless it is known."""
        ...

    def skip(self, run: str, why: str) -> None:
        """Report a slot that is not started, unless it is known."""
        ...

    def runs(self, run: str) -> bool:
        """Whether it waits or runs."""
        ...


class Schedules:
    """Runs the schedules of one agent."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        now: Callable[[], float],
        wanted: Callable[[], Mapping[str, HostSchedule]],
        runner: Runner,
    ) -> None:
        self.clock = clock
        self.now = now
        self.wake = asyncio.Event()
        """Set when the schedules were replaced."""
        self._path = folder / FILE
        self._wanted = wanted
        self._runner = runner
        self._known: Mapping[str, HostSchedule] = {}
        self._planner = Planner(MISSED_SECONDS)
        self._taken = 0.0
        self._last: dict[str, tuple[str, float]] = {}
        """The newest slot of each schedule that was started, and when."""

    def __len__(self) -> int:
        return len(self._known)

    async def run(self) -> None:
        """Run what is due until cancelled."""
        self._load()
        while True:
            self.wake.clear()
            self._follow()
            self._take()
            await self._rest()

    # ---- which

    def _follow(self) -> None:
        wanted = self._wanted()
        if wanted == self._known:
            return
        for name in self._known.keys() - wanted.keys():
            self._planner.remove(name)
        for name, schedule in wanted.items():
            known = self._known.get(name)
            if known is None or known.timing != schedule.timing:
                self._planner.add(schedule.timing, self._taken)
        self._known = dict(wanted)
        log.info("schedules: %s", ", ".join(sorted(wanted)) or "none")

    # ---- what is due

    def _take(self) -> None:
        now = self.now()
        if self._taken > now + AHEAD_SECONDS:
            self._start_over(now)
        decisions = self._planner.take(now)
        for decision in decisions:
            self._decide(decision, now)
        if decisions:
            self._taken = now
            self._save()

    def _decide(self, decision: Decision, now: float) -> None:
        name = decision.schedule.name
        schedule = self._known[name]
        run = slot_id(name, decision.moment)
        if decision.skip:
            until = decision.last or decision.moment
            missed = instants(decision.schedule, decision.moment - 1, until)
            for moment in deque(itertools.islice(missed, 100_000), MOST_ANSWERED):
                self._runner.skip(slot_id(name, moment), MISSED)
        elif self._overlaps(name, now):
            self._runner.skip(run, OVERLAPPED)
        else:
            self._last[name] = run, now
            self._runner.fire(
                run,
                Order(
                    schedule.function,
                    schedule.args,
                    schedule.kwargs,
                    deadline=now + schedule.timeout,
                    user=f"schedule {name}",
                ),
            )

    def _overlaps(self, name: str, now: float) -> bool:
        """Whether an earlier slot still runs; slots that are late together take turns."""
        last, started = self._last.get(name, ("", now))
        return started < now and self._runner.runs(last)

    def _start_over(self, now: float) -> None:
        """Reset after a clock that was ahead was corrected: the journal knows what has run
        already."""
        log.warning("the clock was set back: schedules continue from now")
        self._taken = now
        self._planner = Planner(MISSED_SECONDS)
        for schedule in self._known.values():
            self._planner.add(schedule.timing, now)
        self._save()

    async def _rest(self) -> None:
        due = self._planner.next_due
        tasks: set[asyncio.Task[Any]] = {asyncio.create_task(self.wake.wait())}
        if due is not None:
            pause = min(max(due - self.now(), 0.0), LOOK_SECONDS)
            tasks.add(asyncio.ensure_future(self.clock.sleep(pause)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---- the file

    def _load(self) -> None:
        if not self._path.exists():
            return
        try:
            self._taken = _PROGRESS.decode(self._path.read_bytes()).taken
        except (OSError, Unreadable) as error:
            log.error("schedules: %s cannot be read, slots continue from now: %s", FILE, error)
            self._taken = self.now()

    def _save(self) -> None:
        try:
            content = _PROGRESS.encode(_Progress(self._taken))
            write_private(self._path, content, "progress of the schedules", replace=True)
        except (OSError, ConfigError) as error:
            log.error("schedules: %s cannot be written: %s", FILE, error)
