"""Totals of the history: for each job and minute, how many runs ended in each state, and how long
they took and waited.

Durations are counted in buckets, each a fifth longer than the one before. So a percentile is exact
to a tenth whatever the range, and records can be added: an hour is the sum of its minutes.

Runs without a record have no line in the history: their workers send totals of what they counted.

The index of the history says in which message a run's line is: blocks of (checksum of the run,
offset of its message), in `PARTS` parts, of which a look-up reads one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final

import msgspec

from holdfast.model.codec import Codec, Count, Instant, Moment, Name

PARTS: Final = 64
"""A look-up reads one of these parts of the index: 8 bytes for every 64th run of the history."""
SHORTEST: Final = 0.001
"""The first bucket in seconds; shorter durations count as this."""
STEP: Final = math.log(1.2)
LAST_STEP: Final = 130
"""More than a year."""

_ENTRY: Final = Struct(">II")


# ---- totals


def step_of(seconds: float) -> int:
    """The bucket of a duration."""
    if seconds <= SHORTEST:
        return 0
    return min(LAST_STEP, math.ceil(math.log(seconds / SHORTEST) / STEP))


class Spread(msgspec.Struct, omit_defaults=True):
    """The number of durations in each bucket."""

    steps: dict[str, Count] = {}

    def add(self, seconds: float) -> None:
        step = str(step_of(seconds))
        self.steps[step] = self.steps.get(step, 0) + 1

    def merge(self, other: Spread) -> None:
        for step, count in other.steps.items():
            self.steps[step] = self.steps.get(step, 0) + count

    def percentile(self, fraction: float) -> float:
        """The duration, in seconds, that this fraction does not exceed; 0 when there is none."""
        left = fraction * sum(self.steps.values())
        for step, count in sorted((int(s), c) for s, c in self.steps.items() if s.isdigit()):
            left -= count
            if left <= 1e-9:
                return SHORTEST * math.exp(STEP * min(step, LAST_STEP))
        return 0.0


class JobTotals(msgspec.Struct, omit_defaults=True):
    """One job in one period."""

    ended: dict[str, Count] = {}
    """How many runs ended, by state."""
    failures: Count = 0
    """Attempts that failed, of these runs."""
    crashes: Count = 0
    took: Spread = msgspec.field(default_factory=Spread)
    """From the start of the last attempt to the end."""
    waited: Spread = msgspec.field(default_factory=Spread)
    """From the acceptance to the start of the last attempt."""
    waiting: Count = 0
    """The most runs that were seen waiting at once."""
    in_flight: Count = 0
    """The most that were seen delivered and not acknowledged at once."""
    made_up: Count = 0
    """How many of the runs never were: a demo shows what history looks like."""

    def merge(self, other: JobTotals) -> None:
        for state, count in other.ended.items():
            self.ended[state] = self.ended.get(state, 0) + count
        self.failures += other.failures
        self.crashes += other.crashes
        self.made_up += other.made_up
        self.took.merge(other.took)
        self.waited.merge(other.waited)
        self.waiting = max(self.waiting, other.waiting)
        self.in_flight = max(self.in_flight, other.in_flight)


def added(jobs: Iterable[JobTotals]) -> JobTotals:
    """The sum of several jobs in the same period."""
    total, waiting, in_flight = JobTotals(), 0, 0
    for job in jobs:
        total.merge(job)
        waiting, in_flight = waiting + job.waiting, in_flight + job.in_flight
    total.waiting, total.in_flight = waiting, in_flight
    return total


class Totals(msgspec.Struct, omit_defaults=True):
    """All jobs in one period."""

    at: Moment = 0
    """When it began."""
    sampled: Count = 0
    """How often the lag was sampled; a period without samples and jobs was not counted at all."""
    every: JobTotals | None = None
    """The sum of all jobs, once the period is over: spares readers from adding them up."""
    jobs: dict[str, JobTotals] = {}
    """By `<group> <job>`."""

    def of(self, job: str) -> JobTotals:
        """The totals of one job, to be added to."""
        found = self.jobs.get(job)
        if found is None:
            found = self.jobs[job] = JobTotals()
        return found

    def merge(self, other: Totals) -> None:
        self.sampled += other.sampled
        for job, totals in other.jobs.items():
            self.of(job).merge(totals)


class Head(msgspec.Struct, omit_defaults=True):
    """How far the history was counted and indexed, and the periods that are not over yet."""

    counted: Count = 0
    """The last sequence that is in the totals."""
    indexed: Count = 0
    """The last sequence that is in the index; never above `counted`."""
    added: Count = 0
    """The last message of workers' counts, in the stream of the index, that is in the totals."""
    by: Name = ""
    """The node that wrote this."""
    at: Instant = 0.0
    minute: Totals = msgspec.field(default_factory=Totals)
    hour: Totals = msgspec.field(default_factory=Totals)


HEAD: Final = Codec[Head](Head, "the head of the history's index")
TOTALS: Final = Codec[Totals](Totals, "totals of the history")


class StoredTotals(msgspec.Struct, frozen=True):
    """The same for a reader of single jobs, which are decoded one by one, as `JOB`."""

    at: Moment = 0
    every: msgspec.Raw = msgspec.Raw()
    """Empty in totals of earlier versions."""
    jobs: dict[str, msgspec.Raw] = {}


STORED: Final = Codec[StoredTotals](StoredTotals, "totals of the history")
JOB: Final = Codec[JobTotals](JobTotals, "totals of a job")


# ---- lines, as far as they are counted


class CountedRecord(msgspec.Struct, frozen=True):
    """The part of a run's record that is counted."""

    state: str
    group: Name
    job: Name
    created: Instant = 0.0
    started: Instant = 0.0
    ended: Instant = 0.0
    failures: Count = 0
    crashes: Count = 0


class CountedLine(msgspec.Struct, frozen=True):
    """The part of a line of history that is counted; the rest is not decoded."""

    run: str
    record: CountedRecord


LINE: Final = Codec[CountedLine](CountedLine, "a line of history")


def count(totals: JobTotals, record: CountedRecord) -> None:
    """Add one end to a job's totals."""
    totals.ended[record.state] = totals.ended.get(record.state, 0) + 1
    totals.failures += record.failures
    totals.crashes += record.crashes
    if record.started:
        totals.took.add(max(0.0, record.ended - record.started))
        if record.created:
            totals.waited.add(max(0.0, record.started - record.created))


# ---- the index


class IndexBlock(msgspec.Struct, frozen=True):
    """One part of the index for a range of the history."""

    first: Count
    last: Count
    entries: bytes


BLOCK: Final = Codec[IndexBlock](IndexBlock, "a block of the history's index")


def names_of(run: str) -> tuple[str, ...]:
    """The checksums by which a run is found: of its id, and of its key if it has one."""
    home, slash, key = run.rpartition("/")
    return (run, key) if slash and key and home else (run,)


def checksum(name: str) -> int:
    return zlib.crc32(name.encode())


def blocks(entries: Iterable[tuple[int, int]], first: int, last: int) -> dict[int, bytes]:
    """The encoded parts for entries of (checksum, sequence)."""
    parts = [bytearray() for _ in range(PARTS)]
    for sum_, sequence in entries:
        parts[sum_ % PARTS] += _ENTRY.pack(sum_, sequence - first)
    return {n: BLOCK.encode(IndexBlock(first, last, bytes(p))) for n, p in enumerate(parts)}


def places(block: IndexBlock, sum_: int) -> Iterator[int]:
    """The sequences in a block where a run with this checksum may be."""
    whole = len(block.entries) // _ENTRY.size * _ENTRY.size
    for found, offset in _ENTRY.iter_unpack(block.entries[:whole]):
        if found == sum_:
            yield block.first + offset
