"""Made-up history for `holdfast demo`: two weeks of totals, so that charts and comparisons show
something from the first minute. They are marked as made up, and the pages say so.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Final

from holdfast.durations import DAY, HOUR
from holdfast.model.totals import TOTALS, JobTotals, Totals, added

if TYPE_CHECKING:
    from holdfast.client import Client

DAYS: Final = 14
SLOWER: Final = "ship"
"""Its runs take twice as long in the second week: something to find."""
SECONDS: Final = {"charge": 0.3, "ship": 1.0, "invoice": 0.1, "report": 5.0}
"""About how long the runs of some jobs take."""
SAMPLES: Final = 20
"""Durations of each job and hour: enough for percentiles that move a little."""


async def make_up(client: Client) -> None:
    """Store the totals of the hours before this one; the present is counted from what happens."""
    names, now = client.broker.names, int(client.broker.server_now()) // HOUR * HOUR
    second_week = now // DAY * DAY - 6 * DAY  # as weeks are compared: by whole days, with today
    for at in range(now - DAYS * DAY, now, HOUR):
        jobs = {f"default {job}": _hour(job, at, at >= second_week) for job in SECONDS}
        found = Totals(at, sampled=360, every=added(jobs.values()), jobs=jobs)
        await client.broker.store(names.indexed("hour"), TOTALS.encode(found))


def _hour(job: str, at: int, second_week: bool) -> JobTotals:
    """One job in one hour: more by day than by night, and an outage of the bank now and then."""
    busy = 1 + 0.8 * math.sin(2 * math.pi * (at % DAY / DAY - 0.3))
    count = int(random.uniform(300, 400) * busy)
    dead = count // 20 if job == "charge" and random.random() < 0.03 else 0
    total = JobTotals({"done": count - dead}, failures=count // 7 + 4 * dead, made_up=count)
    if dead:
        total.ended["dead"] = dead
    usual = SECONDS[job] * (2 if second_week and job == SLOWER else 1)
    for _ in range(SAMPLES):
        total.took.add(usual * random.lognormvariate(0, 0.3))
        total.waited.add(random.lognormvariate(-4, 1))
    return total
