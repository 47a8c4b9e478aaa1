"""The order in which the files of the suite are given to its processes: computing beside waiting.

A file that waits for servers and processes leaves the processor to one that computes, so both kinds
run at any time, and the long ones of each kind begin first. `costs.json` knows how long each file
takes, and how much processor time that is; `make costs` measures them again. What it does not know
counts as short, so a new file needs no entry until it takes several seconds.
"""

from __future__ import annotations

import heapq
import json
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FILE = Path(__file__).with_name("costs.json")
LEAST_SECONDS = 1.0
"""Shorter files are not listed: their order makes no difference."""


class Cost(NamedTuple):
    """What a file of tests takes."""

    seconds: float
    processor: float
    """Seconds of processor time, of its child processes too."""

    @property
    def share(self) -> float:
        """How many processors it keeps busy while it runs."""
        return self.processor / self.seconds


SHORT = Cost(0.3, 0.3)


def known() -> dict[str, Cost]:
    """The recorded costs, by file."""
    return {file: Cost(*cost) for file, cost in json.loads(FILE.read_text()).items()}


def spread(costs: Mapping[str, Cost], processes: int) -> list[str]:
    """An order in which computing and waiting are spread evenly over the whole run.

    It plays through how processes take one file after the other: the one that is free takes the
    longest of the files that compute if those that run now wait more than the rest will, and else
    the longest of those that wait.
    """
    left = sorted(costs, key=lambda file: costs[file].seconds, reverse=True)
    running = [(0.0, 0.0)] * processes
    order = []
    while left:
        now, _ = heapq.heappop(running)
        mean = sum(costs[f].processor for f in left) / sum(costs[f].seconds for f in left)
        busy = sum(share for _, share in running)
        computing = busy < mean * processes
        file = next((f for f in left if (costs[f].share >= mean) == computing), left[0])
        left.remove(file)
        heapq.heappush(running, (now + costs[file].seconds, costs[file].share))
        order.append(file)
    return order


# ---- measuring: `make costs` loads this module as a plugin of pytest

_costs: dict[str, list[float]] = {}
"""Of the files that have run in this process."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Add up what each test of a file takes."""
    began, used = time.monotonic(), _processor()
    yield
    _add(item.nodeid.split("::")[0], time.monotonic() - began, _processor() - used)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist has ended: take over its figures."""
    for file, cost in getattr(node, "workeroutput", {}).get("costs", {}).items():
        _add(file, *cost)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the figures on, or write them down."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["costs"] = _costs
        return
    kept = {file: cost for file, cost in _costs.items() if cost[0] >= LEAST_SECONDS}
    lines = [f"{json.dumps(file)}: [{cost[0]:.0f}, {cost[1]:.1f}]" for file, cost in kept.items()]
    FILE.write_text("{\n" + ",\n".join(sorted(lines)) + "\n}\n")


def _add(file: str, seconds: float, processor: float) -> None:
    before = _costs.get(file, [0.0, 0.0])
    _costs[file] = [before[0] + seconds, before[1] + processor]


def _processor() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
