"""Who is measured, how their users start them, and how much work each gets.

`speed` is a rough figure for a small machine; it only says how many runs make a sample of the
wanted length.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]
PRODUCT = sys.executable

HIGH = 1_000
"""Runs at a time where the measure is about waiting, for everything that is asynchronous."""

Command = list[str]
Kind = Literal["noop", "naps", "hold"]
"""What the runs do: nothing, wait a moment, or wait for ever."""


def _product(*words: str) -> Command:
    return [PRODUCT, "-m", *words]


@dataclass(frozen=True)
class Subject:
    """One system in one variant."""

    system: str
    variant: str
    worker: Callable[[int, Kind], list[Command]]
    """Commands for so many processes that are to execute runs of a kind."""
    sender: Command
    speed: int
    """Runs per second that one process drains, roughly."""
    mode: str = ""
    """What the subject's own module is told of the variant."""
    broker: Literal["nats", "redis"] = "nats"
    always: bool = False
    measures: frozenset[str] = field(default=frozenset())
    in_full: frozenset[str] = field(default=frozenset())
    """Those of its measures that the short run leaves out."""
    beside: Command = field(default_factory=list)
    """What its documentation wants to run beside the workers, for their recovery."""
    missing: str = ""
    """Why it cannot be measured here."""
    plain: bool = False
    """Without uvloop, even if it is installed."""
    synced_speed: int = 5_000

    @property
    def path(self) -> list[str]:
        """Where its processes look for modules first."""
        given = os.environ.get("PYTHONPATH", "") if self.system == "holdfast" else ""
        plain = [str(ROOT / "benchmarks" / "plain")] if self.plain else []
        return [*plain, str(ROOT), *([given] if given else [])]

    @property
    def name(self) -> str:
        return f"{self.system} {self.variant}"

    def env(self, url: str) -> dict[str, str]:
        """Environment of its processes besides the benchmark's own."""
        if self.system == "holdfast":
            return {"HOLDFAST_NATS_URL": url, "HOLDFAST_LOG_LEVEL": "warning"}
        return {}

    def synced(self) -> Subject:
        """The same on a server that writes to disk before it answers."""
        some = {"enqueue", "enqueue_bulk", "drain", "latency", "schedules"}
        return replace(
            self,
            variant=f"{self.variant}+always",
            always=True,
            measures=self.measures & some,
            in_full=SCHEDULES,
            speed=min(self.speed, self.synced_speed),
        )


ALL = frozenset(
    {
        "enqueue",
        "enqueue_bulk",
        "drain",
        "cpu_run",
        "drain_2",
        "latency",
        "io",
        "memory_idle",
        "memory_loaded",
        "cpu_idle",
    }
)
RECOVERY = frozenset({"recovery"})
SCHEDULES = frozenset({"schedules"})


def floors() -> list[Subject]:
    """nats-py and nothing else."""

    def worker(loop: str) -> Callable[[int, Kind], list[Command]]:
        def commands(processes: int, kind: Kind) -> list[Command]:
            concurrency = str(1 if kind == "noop" else HIGH)
            return [_product("benchmarks.subjects.raw", loop, concurrency)] * processes

        return commands

    sender = _product("benchmarks.subjects.raw")
    fetch = Subject(
        "raw-fetch", "default", worker("fetch"), sender, 20_000, measures=ALL | RECOVERY
    )
    sends = {"enqueue", "enqueue_bulk"}
    callback = Subject(
        "raw-callback", "default", worker("callback"), sender, 40_000, measures=ALL - sends
    )
    return [fetch, callback]


def synced_floor() -> Subject:
    """The floor of writes that are on disk when they are confirmed."""
    return floors()[0].synced()


def holdfast() -> list[Subject]:
    """Holdfast in each delivery mode."""

    def commands(processes: int, kind: Kind) -> list[Command]:
        command = _product("holdfast", "worker", "benchmarks.subjects.holdfast_jobs:app")
        command += ["--health-port", "0", "--processes", str(processes)]
        if kind == "naps":
            command += ["--concurrency", str(HIGH)]
        return [command]

    sender = _product("benchmarks.subjects.holdfast_jobs")
    speeds = {
        "at_least_once": (25_000, 20_000),
        "effectively_once": (8_000, 2_000),
        "at_most_once": (6_000, 1_500),
    }
    found = [
        Subject(
            "holdfast",
            mode,
            commands,
            sender,
            speed,
            mode=mode,
            measures=ALL if mode == "at_most_once" else ALL | RECOVERY,  # it never starts again
            beside=_product("holdfast", "coordinator"),
            synced_speed=synced_speed,
        )
        for mode, (speed, synced_speed) in speeds.items()
    ]
    alone = replace(
        found[1],
        variant="effectively_once, no coordinator",
        beside=[],
        measures=RECOVERY,
    )
    drains = frozenset({"drain", "cpu_run", "drain_2"})
    plain = [
        replace(found[n], variant=f"{found[n].variant}, def", mode=f"{mode} def", measures=drains)
        for n, mode in enumerate(("at_least_once", "effectively_once"))
    ]
    found[1] = replace(found[1], measures=found[1].measures | SCHEDULES)
    return [*found, *plain, alone, synced_floor(), *(subject.synced() for subject in found)]


def scheduler() -> Command:
    """One scheduler of Holdfast."""
    return _product("holdfast", "scheduler", "--health-port", "0")
