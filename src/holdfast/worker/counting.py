"""Counts how runs without a record end: charts are drawn from the history, which has none of them.

Every few seconds a worker stores what came to its counts, in one message for all of its jobs with
`delivery="at_least_once"`; the coordinator that adds up the history adds each message once. A run
costs nothing more for it.

Not guaranteed: the last seconds of a worker that is killed are not counted, nor what no coordinator
has added within `KEPT_SECONDS`. A run that is redelivered has a record, and is counted by that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from holdfast.broker import Broker
from holdfast.broker.kv import ttl_text
from holdfast.durations import MINUTE
from holdfast.errors import BrokerError, PermissionDenied
from holdfast.model import totals
from holdfast.model.job import JobSpec
from holdfast.model.totals import JobTotals, Spread, Totals, step_of
from holdfast.names import H_MSG_ID, H_TTL
from holdfast.telemetry import BOUNDS, Buckets, Telemetry

log = logging.getLogger("holdfast.worker")

COUNT_SECONDS: Final = 10.0
"""How often: as often as the lag is sampled."""
KEPT_SECONDS: Final = 15 * MINUTE
"""How long a message waits for a coordinator: 90 of each worker, so that they take no room from the
index in the same stream."""
LONGEST: Final = 2 * BOUNDS[-1]
"""Durations above the last bound are counted as this."""


class Counting:
    """The counts of one worker, and how much of them is stored."""

    def __init__(
        self, broker: Broker, telemetry: Telemetry, node: str, specs: Iterable[JobSpec]
    ) -> None:
        self._broker = broker
        self._node = node
        self._jobs = {
            f"{spec.group} {spec.name}": _Counted(telemetry, spec)
            for spec in specs
            if not spec.recorded
        }
        self._waiting: Totals | None = None
        """What may be stored, but is not confirmed: it is sent again under the same id."""
        self._number = 0
        self._denied = False

    @property
    def needed(self) -> bool:
        """Whether a job of this worker keeps no records."""
        return bool(self._jobs)

    async def run(self) -> None:
        """Store what was counted, now and then."""
        while not self._denied:
            await self._broker.clock.sleep(COUNT_SECONDS)
            await self.store()

    async def store(self) -> None:
        """Store what was counted since the last time; without a connection it is kept."""
        if self._waiting is None:
            jobs = {name: new for name, job in self._jobs.items() if (new := job.take())}
            self._waiting = Totals(jobs=jobs) if jobs else None
            self._number += 1
        if self._waiting is None or self._denied or not self._broker.connected:
            return
        headers = {
            H_MSG_ID: f"{self._node}.counts.{self._number}",
            H_TTL: ttl_text(KEPT_SECONDS),
        }
        try:
            body = totals.TOTALS.encode(self._waiting)
            await self._broker.store(self._broker.names.indexed("counts"), body, headers)
            self._waiting = None
        except PermissionDenied as error:
            self._denied = True
            log.error("cannot count runs without records: renew the login: %s", error)
        except BrokerError as error:
            log.debug("what was counted is not stored yet: %s", error)


class _Counted:
    """One job, and what of its tally was taken."""

    def __init__(self, telemetry: Telemetry, spec: JobSpec) -> None:
        self._tally = telemetry.tally(spec.group, spec.name)
        self._ended: dict[str, int] = {}
        self._failures = 0
        self._seconds = [0] * len(self._tally.seconds.counts)
        self._waited = [0] * len(self._tally.waited.counts)

    def take(self) -> JobTotals | None:
        """What came since the last time; None if no run has ended."""
        tally, before = self._tally, self._ended
        ended = {
            state: count - before.get(state, 0)
            for state, count in tally.unrecorded.items()
            if count > before.get(state, 0)
        }
        if not ended:
            return None
        took, self._seconds = _since(tally.seconds, self._seconds)
        waited, self._waited = _since(tally.waited, self._waited)
        failures, self._failures = tally.failures - self._failures, tally.failures
        self._ended = dict(tally.unrecorded)
        return JobTotals(ended, failures, took=took, waited=waited)


def _since(found: Buckets, before: list[int]) -> tuple[Spread, list[int]]:
    """What came to a histogram; each value counts as the upper bound of its bucket."""
    steps: dict[str, int] = {}
    for bound, count, old in zip((*BOUNDS, LONGEST), found.counts, before, strict=True):
        if count > old:
            steps[str(step_of(bound))] = count - old
    return Spread(steps), list(found.counts)
