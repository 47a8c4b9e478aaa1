"""What the history adds up to over time: for charts of throughput, failures and durations.

Ranges of up to a day are counted by the minute, longer ones by the hour. Nothing is kept in this
process, so all processes give the same figures, before and after a restart. A period without runs
has no entry. Neither has one from before the history was counted, nor one that no coordinator has
counted yet: `Counted.until` says up to when everything is counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.durations import DAY, HOUR, MINUTE
from holdfast.model import totals
from holdfast.model.totals import Head, JobTotals, Totals
from holdfast.names import H_SEQUENCE
from holdfast.ownership.history import read_head, stored_since

PERCENTILES: Final = (0.5, 0.95, 0.99)
LATE_SECONDS: Final = 120.0
"""A coordinator counts every few seconds, and a new one takes over within a minute."""


class Period(msgspec.Struct, frozen=True):
    """One minute or hour of one job, or of all that match."""

    at: int
    """When it began."""
    ended: dict[str, int]
    """How many runs ended, by state."""
    failures: int
    """Attempts that failed."""
    crashes: int
    took: tuple[float, float, float]
    """Seconds from the start of the last attempt to the end: p50, p95, p99."""
    waited: tuple[float, float, float]
    """Seconds from the acceptance to the start of the last attempt: p50, p95, p99."""
    waiting: int = 0
    """The most runs that were seen waiting at once; of several jobs, the sum of theirs."""
    in_flight: int = 0

    @property
    def lagging(self) -> bool:
        """Whether runs were seen waiting or in flight."""
        return bool(self.waiting or self.in_flight)


class Counted(msgspec.Struct, frozen=True):
    """A range of time, oldest period first."""

    seconds: int
    """The length of a period."""
    periods: list[Period]
    until: float
    """The server's time up to which runs are counted; 0 if none were."""

    def behind(self, now: float) -> float:
        """Up to when runs are counted if that is longer ago than it should be, or else 0."""
        return self.until if self.until < now - LATE_SECONDS else 0.0

    def ends(self) -> Counter[str]:
        """How runs ended in the whole range, and how many attempts `failed`."""
        total = Counter(failed=sum(period.failures for period in self.periods))
        for period in self.periods:
            total.update(period.ended)
        return +total  # without zeros


async def counted(
    client: Client, seconds: int, job: str = "", group: str = "", *, part: int = 0
) -> Counted:
    """How runs ended in the last `seconds`, of one job, one group or all.

    Periods are a minute or an hour long, or `part` seconds if that is longer.
    """
    broker, length = client.broker, MINUTE if seconds <= DAY else HOUR
    since = broker.server_now() - seconds
    found, head = await _read(broker, seconds, length)
    part = max(part, length)
    parts: dict[int, Totals] = {}
    for at, one in sorted(found.items()):
        if at + length > since:
            parts.setdefault(at // part * part, Totals(at // part * part)).merge(one)
    periods = [_period(at, one, job, group) for at, one in parts.items()]
    return Counted(part, [one for one in periods if one.ended or one.lagging], head.at)


async def trends(client: Client, seconds: int) -> tuple[dict[tuple[str, str], list[int]], float]:
    """How many runs of each job ended in each of the last minutes, oldest first; and up to when
    they are counted."""
    now, count = client.broker.server_now(), seconds // MINUTE
    found, head = await _read(client.broker, seconds, MINUTE)
    first = int(now) // MINUTE - count + 1
    jobs: dict[tuple[str, str], list[int]] = {}
    for at, one in found.items():
        minute = at // MINUTE - first
        if 0 <= minute < count:
            for name, job in one.jobs.items():
                group, _, its_job = name.partition(" ")
                values = jobs.setdefault((group, its_job), [0] * count)
                values[minute] += sum(job.ended.values())
    return jobs, head.at


async def _read(broker: Broker, seconds: int, length: int) -> tuple[dict[int, Totals], Head]:
    """The totals of the last `seconds` by when their minute or hour began."""
    names, since = broker.names, broker.server_now() - seconds
    stream, kind = names.history_index, "minute" if length == MINUTE else "hour"
    found: dict[int, Totals] = {}
    async for message in stored_since(broker, stream, names.indexed(kind), since):
        place = message.headers.get(H_SEQUENCE, "")
        if one := broker.unreadable.read(totals.TOTALS.decode, stream, place, message.body):
            found[one.at] = one
    head, _ = await read_head(broker)
    current: dict[int, Totals] = {}
    for one in [head.minute] if length == MINUTE else [head.hour, head.minute]:
        at = one.at // length * length
        current.setdefault(at, Totals(at)).merge(one)
    return found | current, head  # may have been stored just before a crash, too


def _period(at: int, found: Totals, job: str, group: str) -> Period:
    total, waiting, in_flight = JobTotals(), 0, 0
    for name, one in found.jobs.items():
        its_group, _, its_job = name.partition(" ")
        if job in ("", its_job) and group in ("", its_group):
            total.merge(one)
            waiting, in_flight = waiting + one.waiting, in_flight + one.in_flight
    took, waited = ([s.percentile(p) for p in PERCENTILES] for s in (total.took, total.waited))
    p = (took[0], took[1], took[2]), (waited[0], waited[1], waited[2])
    return Period(at, dict(total.ended), total.failures, total.crashes, *p, waiting, in_flight)
