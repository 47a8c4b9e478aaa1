"""The audit: was every check made, and was every incident reported once?

It relies on no counters. What had to happen follows from the schedules (an instant per interval
since they were added) and is compared with the results in their bucket; what had to be sent follows
from the incidents and is compared with what the receiver got.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from uptime.app import app, checks, incidents, results
from uptime.check import Check
from uptime.record import Incident

from holdfast import Schedules
from tests.uptime.sites import Receiver

LATE_SECONDS = 12.0
"""Without a result for this long a check is missed: allows for a dead worker's run to return."""


@dataclass
class Report:
    """What was found."""

    due: int = 0
    made: int = 0
    missed: list[str] = field(default_factory=list)
    repeated: int = 0
    """Attempts after a crash; the same slot, counted once."""
    incidents: int = 0
    told: int = 0
    untold: list[str] = field(default_factory=list)
    known_repeats: int = 0
    """Deliveries that the receiver could recognise as repeats, by id and attempt."""
    unknown_repeats: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.missed or self.untold or self.unknown_repeats)

    def __str__(self) -> str:
        return (
            f"checks due {self.due:,}, made {self.made:,}, missed {len(self.missed)}; "
            f"incidents {self.incidents}, alerts {self.told}, "
            f"told twice {len(self.unknown_repeats)}, not told {len(self.untold)}"
        )


class Audit:
    """Compares what had to happen with what did."""

    def __init__(self, receiver: Receiver, late: float = LATE_SECONDS) -> None:
        self._receiver = receiver
        self._late = late

    async def look(self, until: float | None = None) -> Report:
        """Examine everything that was due until then.

        Without an instant it is now, and only what has been overdue for a while counts as missed.
        """
        now, report = time.time() - 1, Report()
        overdue = now - self._late if until is None else until
        schedules = await Schedules.of(app)
        for check in [entry.value async for entry in checks.entries()]:
            if not check.paused:
                since = (await schedules.show(check.schedule)).since
                await self._look_at(check, since, until or now, overdue, report)
        for incident in [entry.value async for entry in incidents.entries()]:
            self._look_told(incident, overdue, report)
        self._look_repeats(report)
        return report

    async def _look_at(
        self, check: Check, since: float, until: float, overdue: float, report: Report
    ) -> None:
        found = {entry.value.at: entry.value async for entry in results.entries(check.id)}
        expected = list(instants(check, since, until))
        report.due += len(expected)
        report.made += sum(at in found for at in expected)
        report.repeated += sum(result.attempt > 1 for result in found.values())
        missing = [at for at in expected if at not in found and at <= overdue]
        report.missed += [f"{check.id} at {at}" for at in missing]

    def _look_told(self, incident: Incident, until: float, report: Report) -> None:
        report.incidents += 1
        counts = self._receiver.counts
        must = [f"{incident.id}.opened"] if incident.started < until else []
        if incident.ended and incident.ended < until and incident.status == "down":
            must.append(f"{incident.id}.closed")
        report.untold += [id for id in must if not counts[id]]

    def _look_repeats(self, report: Report) -> None:
        first: dict[str, int] = {}
        for told in self._receiver.told:
            if told.id not in first:
                first[told.id] = told.attempt
            elif told.attempt > first[told.id]:
                report.known_repeats += 1
            else:
                report.unknown_repeats.append(told.id)
        report.told = len(first)


def instants(check: Check, since: float, until: float) -> Iterator[int]:
    """Every instant at which a check was due after `since`, up to `until`."""
    first = int(since) - (int(since) - check.phase) % check.interval + check.interval
    yield from range(first, int(until) + 1, check.interval)
