"""How many runs ended how, in the last hour: counted from what the server repeats of each write.

Counts are kept in steps of a few seconds, by job and outcome, and forgotten after an hour. They are
this process's own and cost no request; what happened before it listened is counted once from the
newest records (`live.Feed`), so that a restart leaves no hole unless more ended than is read back.

A run that ends counts by its state; an attempt that failed and is tried again counts as `failed`.
Jobs that keep no records (`delivery="at_least_once"`) are not seen here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from holdfast.model.codec import Codec, Instant

STEP_SECONDS: Final = 5
KEPT_SECONDS: Final = 3600
OUTCOMES: Final = ("done", "failed", "dead", "lost", "cancelled")

Home = tuple[str, str]


class Change(msgspec.Struct, frozen=True):
    """What of a run's record matters here; the rest is not even read."""

    state: str
    group: str
    job: str
    ended: Instant = 0.0


class Ended(msgspec.Struct, frozen=True):
    """An attempt of a record that is read back."""

    ended: Instant = 0.0
    outcome: str | None = None


class Past(msgspec.Struct, frozen=True):
    """A record that is read back."""

    state: str
    group: str
    job: str
    ended: Instant = 0.0
    attempts: tuple[Ended, ...] = ()


CHANGE: Final = Codec[Change](Change, "a run's record")
PAST: Final = Codec[Past](Past, "a run's record")


@dataclass(slots=True)
class Bar:
    """What ended in one part of the time."""

    start: float
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.counts.total()


class Rates:
    """Counts of one hour."""

    def __init__(self) -> None:
        self._steps: dict[int, Counter[tuple[str, str, str]]] = {}
        self.since = 0.0
        """From when on nothing is missing; 0: not counting yet."""

    def count(self, home: Home, outcome: str, at: float) -> None:
        """One more; what is older than an hour is forgotten on the way."""
        step = int(at // STEP_SECONDS)
        counter = self._steps.get(step)
        if counter is None:
            counter = self._steps[step] = Counter()
            self._forget(max(self._steps))
        counter[(*home, outcome)] += 1

    def _forget(self, newest: int) -> None:
        oldest = newest - KEPT_SECONDS // STEP_SECONDS
        for step in [step for step in self._steps if step < oldest]:
            del self._steps[step]

    def read_back(self, record: Past) -> float:
        """Count a record as if each of its writes had been heard; returns its newest time."""
        home = (record.group, record.job)
        times = [record.ended]
        for attempt in record.attempts:
            if attempt.outcome in ("failed", "timeout", "crashed") and attempt.ended:
                times.append(attempt.ended)
                if attempt.ended != record.ended:
                    self.count(home, "failed", attempt.ended)
        if record.ended and record.state in OUTCOMES:
            self.count(home, record.state, record.ended)
        return max(times)

    def bars(self, now: float, seconds: int, bars: int, home: Home | None = None) -> Sequence[Bar]:
        """The last `seconds` in so many parts, oldest first; the newest one is not over yet."""
        width = seconds // bars
        last = int(now // width) * width
        found = [Bar(float(last - (bars - 1 - n) * width)) for n in range(bars)]
        first = found[0].start
        for step, counter in self._steps.items():
            place = int((step * STEP_SECONDS - first) // width)
            if 0 <= place < bars:
                for (group, job, outcome), count in counter.items():
                    if home is None or home == (group, job):
                        found[place].counts[outcome] += count
        return found

    def totals(self, now: float, seconds: float) -> Counter[str]:
        """How many of each outcome in the last `seconds`."""
        found: Counter[str] = Counter()
        for step, counter in self._steps.items():
            if step * STEP_SECONDS >= now - seconds:
                for (_, _, outcome), count in counter.items():
                    found[outcome] += count
        return found

    def by_job(self, now: float, seconds: int, bars: int) -> dict[Home, list[int]]:
        """For each job, how many ended in each part of the last `seconds`."""
        width = seconds // bars
        found: dict[Home, list[int]] = {}
        first = int(now // width) * width - (bars - 1) * width
        for step, counter in self._steps.items():
            place = int((step * STEP_SECONDS - first) // width)
            if 0 <= place < bars:
                for (group, job, _), count in counter.items():
                    found.setdefault((group, job), [0] * bars)[place] += count
        return found
