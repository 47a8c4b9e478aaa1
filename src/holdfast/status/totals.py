"""Totals of the history over time, for charts of throughput, failures and durations.

Ranges of up to a day are counted by the minute, longer ones by the hour. All of it is on the
server, so all processes give the same figures, before and after a restart. A period in which a
coordinator ran is `sampled`, even if nothing happened; a missing one was not counted, or its totals
are no longer kept. Everything up to `Counted.until` is counted.

A process that draws charts keeps an `Archive`: past periods do not change, so it reads each once,
and adds up only those that its pages need.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

import msgspec

from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.durations import DAY, HOUR, MINUTE
from holdfast.errors import Unreadable
from holdfast.model import totals
from holdfast.model.totals import Head, JobTotals, StoredTotals
from holdfast.names import H_SEQUENCE
from holdfast.ownership.history import read_head, stored_since

T = TypeVar("T")

PERCENTILES: Final = (0.5, 0.95, 0.99)
LATE_SECONDS: Final = 120.0
"""A coordinator counts every few seconds, and a new one takes over within a minute."""
KEPT: Final = {MINUTE: 25 * HOUR, HOUR: 31 * DAY}
"""How long periods of each length are kept in memory: the longest range and one part of a chart."""
MOST_SERIES: Final = 40
"""Jobs whose periods are kept in memory: about half a megabyte each at most."""
WEEK: Final = 7 * DAY


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
    """The most runs that were seen waiting at once."""
    in_flight: int = 0
    made_up: bool = False
    """Whether it has runs that never were, for a demo."""

    @property
    def lagging(self) -> bool:
        """Whether runs were seen waiting or in flight."""
        return bool(self.waiting or self.in_flight)


class Counted(msgspec.Struct, frozen=True):
    """A range of time, oldest period first; periods that were not counted are missing."""

    seconds: int
    """The length of a period."""
    periods: list[Period]
    until: float
    """The server's time up to which runs are counted; 0 if none were."""

    def behind(self, now: float) -> float:
        """Up to when runs are counted, if that is longer ago than it should be; otherwise 0."""
        return self.until if self.until < now - LATE_SECONDS else 0.0

    def since(self, first: float) -> float:
        """The instant from which runs are counted in a range that began at `first`; its end if none
        are."""
        start = min((period.at for period in self.periods), default=self.until or first)
        return max(first, start)

    @property
    def made_up(self) -> int:
        """Up to when there are runs that never were; 0 if there are none."""
        end = max((p.at + self.seconds for p in self.periods if p.made_up), default=0)
        return min(end, int(self.until))  # the last part of a chart may not be over

    def ends(self) -> Counter[str]:
        """How runs ended in the whole range, and how many attempts `failed`."""
        total = Counter(failed=sum(period.failures for period in self.periods))
        for period in self.periods:
            total.update(period.ended)
        return +total  # without zeros


class Pace(msgspec.Struct, frozen=True):
    """How long the runs of a job took in a week."""

    runs: int
    p50: float
    p95: float


class Change(msgspec.Struct, frozen=True):
    """A job's last seven days beside the seven before."""

    now: Pace
    before: Pace

    @property
    def slower(self) -> float:
        """By which factor the slowest twentieth takes longer now; 0 if unknown."""
        known = self.now.runs and self.before.runs and self.before.p95
        return self.now.p95 / self.before.p95 if known else 0.0


async def counted(
    client: Client, seconds: int, job: str = "", group: str = "", *, part: int = 0
) -> Counted:
    """How runs ended in the last `seconds`, of one job, one group or all; read once."""
    return await Archive(client).counted(seconds, job, group, part=part)


class Archive:
    """The totals of one namespace, with a cache of what was read."""

    def __init__(self, client: Client) -> None:
        self._broker = client.broker
        self._series: dict[tuple[int, str, str], _Series[bytes]] = {}
        """By length of a period, job and group; the one used last at the end."""
        self._recent = _Series(self._broker, MINUTE, MINUTE, HOUR, _counts)
        self._days = _Series(self._broker, HOUR, DAY, 15 * DAY, _each_job)

    async def counted(
        self, seconds: int, job: str = "", group: str = "", *, part: int = 0
    ) -> Counted:
        """How runs ended in the last `seconds`, of one job, one group or all.

        Periods are a minute or an hour long, or `part` seconds if that is longer.
        """
        length = MINUTE if seconds <= DAY else HOUR
        since, part = self._broker.server_now() - seconds, max(part, length)
        found, head = await self._of(length, job, group).read(since)
        parts: dict[int, JobTotals] = {}
        for at, body in sorted(found.items()):
            if at + length > since:
                parts.setdefault(at // part * part, JobTotals()).merge(totals.JOB.decode(body))
        return Counted(part, [_period(at, one) for at, one in parts.items()], head.at)

    async def trends(self, seconds: int) -> dict[tuple[str, str], list[int]]:
        """How many runs of each job ended in each of the last minutes, oldest first."""
        now, count = self._broker.server_now(), seconds // MINUTE
        first = int(now) // MINUTE - count + 1
        jobs: dict[tuple[str, str], list[int]] = {}
        for at, found in (await self._recent.read(now - seconds))[0].items():
            minute = at // MINUTE - first
            if 0 <= minute < count:
                for name, ended in found.items():
                    jobs.setdefault(_home(name), [0] * count)[minute] += ended
        return jobs

    async def changes(self) -> dict[tuple[str, str], Change]:
        """How long the runs of each job took in the last seven days, and in those before."""
        today = int(self._broker.server_now()) // DAY * DAY
        weeks: tuple[dict[str, JobTotals], ...] = {}, {}
        days, _ = await self._days.read(today - 13 * DAY)
        for at, found in days.items():
            week = weeks[at <= today - WEEK]
            for name, job in found.items():
                week.setdefault(name, JobTotals()).merge(job)
        now, before = weeks
        none = JobTotals()
        return {
            _home(name): Change(_pace(now.get(name, none)), _pace(before.get(name, none)))
            for name in now | before
        }

    def _of(self, length: int, job: str, group: str) -> _Series[bytes]:
        key = length, job, group
        found = self._series.pop(key, None)
        if found is None:
            found = _Series(self._broker, length, length, KEPT[length], _sum(job, group))
        self._series[key] = found
        for old in list(self._series)[:-MOST_SERIES]:
            del self._series[old]
        return found


class _Series(Generic[T]):
    """Sums of past periods, and the position up to which the stream was read."""

    def __init__(
        self,
        broker: Broker,
        length: int,
        part: int,
        kept: float,
        take: Callable[[StoredTotals, T | None], T],
    ) -> None:
        """`take` adds a period to the sum of its part."""
        self._broker = broker
        self._length = length
        self._part = part
        self._kept = kept
        self._take = take
        self._found: dict[int, T] = {}
        self._since = float("inf")
        self._last = 0
        """The sequence of the last message read."""
        self._newest = -1
        """The last period read: after a crash one may be stored twice."""
        self._reading = asyncio.Lock()

    async def read(self, since: float) -> tuple[dict[int, T], Head]:
        """Sums by the start of their part, from `since` on, including the current period."""
        async with self._reading:
            since = since // self._part * self._part
            if since < self._since:
                self._found, self._since, self._last, self._newest = {}, since, 0, -1
            await self._read_on()
            head, _ = await read_head(self._broker)
            found = dict(self._found)
        open_ = [head.minute] if self._length == MINUTE else [head.hour, head.minute]
        for one in open_:
            if one.at > self._newest and one.at >= self._since:
                part = one.at // self._part * self._part
                stored = totals.STORED.decode(totals.TOTALS.encode(one))
                found[part] = self._take(stored, found.get(part))
        return found, head

    async def _read_on(self) -> None:
        names = self._broker.names
        stream, kind = names.history_index, "minute" if self._length == MINUTE else "hour"
        start = 0.0 if self._last else self._since
        async for message in stored_since(
            self._broker, stream, names.indexed(kind), start, self._last
        ):
            place = message.headers.get(H_SEQUENCE, "")
            self._last = int(place)
            one = self._broker.unreadable.read(totals.STORED.decode, stream, place, message.body)
            if one and one.at > self._newest:
                self._newest = one.at
                part = one.at // self._part * self._part
                self._found[part] = self._take(one, self._found.get(part))
            await asyncio.sleep(0)  # requests go first: a record may have hundreds of jobs
        oldest = self._broker.server_now() - self._kept
        for part in [part for part in self._found if part + self._part < oldest]:
            del self._found[part]


# ---- what is made of a period


def _sum(job: str, group: str) -> Callable[[StoredTotals, bytes | None], bytes]:
    """The sum of the jobs that match; encoded, because there may be thousands of periods."""

    def take(found: StoredTotals, before: bytes | None) -> bytes:
        total = totals.JOB.decode(before) if before else JobTotals()
        if (every := _every(found)) and not (job or group):
            total.merge(every)
        else:
            jobs = _each(found, lambda home: job in ("", home[1]) and group in ("", home[0]))
            total.merge(totals.added(one for _, one in jobs))
        return totals.JOB.encode(total)

    return take


def _every(found: StoredTotals) -> JobTotals | None:
    """The sum of all jobs, if it was stored."""
    try:
        return totals.JOB.decode(found.every)
    except Unreadable:
        return None


def _each_job(found: StoredTotals, before: dict[str, JobTotals] | None) -> dict[str, JobTotals]:
    """Every job."""
    jobs = dict(before or {})
    for name, one in _each(found):
        if name in jobs:
            one.merge(jobs[name])
        jobs[name] = one  # not changed in place: an open period is added for one reader only
    return jobs


def _counts(found: StoredTotals, before: dict[str, int] | None) -> dict[str, int]:
    """How many runs of each job ended."""
    counts = Counter(before or {})
    for name, one in _each(found):
        counts[name] += sum(one.ended.values())
    return +counts


def _each(
    found: StoredTotals, wanted: Callable[[tuple[str, str]], bool] = lambda _: True
) -> Iterator[tuple[str, JobTotals]]:
    """The readable ones among the wanted jobs."""
    for name, body in found.jobs.items():
        if wanted(_home(name)):
            with contextlib.suppress(Unreadable):
                yield name, totals.JOB.decode(body)


def _home(name: str) -> tuple[str, str]:
    """The group and the job of a name in the totals."""
    group, _, job = name.partition(" ")
    return group, job


def _period(at: int, one: JobTotals) -> Period:
    took, waited = ([s.percentile(p) for p in PERCENTILES] for s in (one.took, one.waited))
    p = (took[0], took[1], took[2]), (waited[0], waited[1], waited[2])
    return Period(
        at,
        dict(one.ended),
        one.failures,
        one.crashes,
        *p,
        one.waiting,
        one.in_flight,
        bool(one.made_up),
    )


def _pace(job: JobTotals) -> Pace:
    p50, p95, _ = (job.took.percentile(p) for p in PERCENTILES)
    return Pace(sum(job.ended.values()), p50, p95)
