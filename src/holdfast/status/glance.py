"""Everything at a glance: runs by state, throughput, jobs, nodes, the latest failures.

The figures are read from the server one after the other, so they may not agree exactly.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from holdfast.client import Client
from holdfast.errors import NotFound
from holdfast.status.dead import DeadLetters
from holdfast.status.jobs import JobInfo, Jobs
from holdfast.status.listing import RunFilter
from holdfast.status.nodes import NodeInfo, Nodes
from holdfast.status.runs import Runs
from holdfast.status.totals import counted

MINUTES: Final = 60
"""How far the throughput goes back."""
FAILURES: Final = 20
"""Most failures that are read: more than fit on a screen."""


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """An attempt that failed, or a run that was given up."""

    at: float
    run: str
    job: str
    state: str
    error: str


class Glance(msgspec.Struct, frozen=True):
    """One look at a namespace."""

    at: float
    """The server's time."""
    queued: int
    in_flight: int
    delayed: int
    dead_letters: int
    ended: dict[str, int]
    """How many runs ended in the last hour, by state."""
    minutes: list[int]
    """Runs that ended in each of the last 60 minutes, oldest first; the last minute is
    incomplete."""
    history: int
    """How many runs have ended since the namespace exists: two snapshots give the throughput."""
    jobs: list[JobInfo]
    """The longest queue first."""
    nodes: list[NodeInfo]
    """Those with a problem first."""
    failures: list[Failure]
    """The latest first."""


async def glance(client: Client) -> Glance:
    """Look once."""
    now = client.broker.server_now()
    jobs = sorted(await Jobs(client).list(), key=_lag)
    nodes = sorted(await Nodes(client).list(), key=lambda node: (_urgency(node), node.role))
    ended: Counter[str] = Counter()
    minutes = [0] * MINUTES
    for period in (await counted(client, MINUTES * 60)).periods:
        ended.update(period.ended)
        place = MINUTES - 1 - int(now // 60 - period.at // 60)
        if 0 <= place < MINUTES:
            minutes[place] += sum(period.ended.values())
    return Glance(
        now,
        sum(job.waiting for job in jobs),
        sum(job.in_flight for job in jobs),
        sum(job.parked for job in jobs),
        sum(job.dead for job in jobs),
        dict(sorted(ended.items())),
        minutes,
        await _ends(client),
        jobs,
        nodes,
        await _failures(client),
    )


def _lag(job: JobInfo) -> tuple[float, int, str, str]:
    return (-job.waiting, -job.in_flight, job.group, job.job)


def _urgency(node: NodeInfo) -> int:
    if node.state == "RUNNING":
        return 0 if node.trouble else 1
    return 2 if node.state == "TERMINATED_GRACEFULLY" else 0


async def _ends(client: Client) -> int:
    try:
        info = await client.broker.api(f"STREAM.INFO.{client.broker.names.history}")
    except NotFound:
        return 0
    return int(info["state"]["last_seq"])


async def _failures(client: Client) -> list[Failure]:
    """Dead letters, and runs that wait for their next attempt."""
    found = [
        Failure(letter.at, letter.run, letter.job, "dead", letter.error or letter.reason)
        for letter in await DeadLetters(client).list(limit=FAILURES)
    ]
    found += [
        Failure(run.updated, run.run, run.job, run.state, run.error)
        for run in await Runs(client).list(RunFilter(state="failed"), FAILURES)
    ]
    return sorted(found, key=lambda one: -one.at)[:FAILURES]
