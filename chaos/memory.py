"""How much memory each process of a chaos run uses, and whether it grows.

Read from /proc every few seconds; without /proc nothing is reported. A restarted process counts
under the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

SAMPLE_SECONDS: Final = 5.0
"""Often enough to see a short peak, seldom enough to cost nothing over hours."""


class Usage(msgspec.Struct, frozen=True):
    """One process's resident memory in MB: medians of its first and last tenth, and the peak."""

    early: float
    most: float
    late: float


async def watch(pids: Callable[[], Mapping[str, int]], found: dict[str, list[float]]) -> None:
    """Sample until cancelled."""
    while True:
        for name, pid in pids().items():
            if (used := resident_mb(pid)) is not None:
                found.setdefault(name, []).append(used)
        await asyncio.sleep(SAMPLE_SECONDS)


def resident_mb(pid: int) -> float | None:
    """The resident memory of a process, or None when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return round(int(line.split()[1]) / 1024, 1)
    except OSError:
        return None
    return None


def usage(found: Mapping[str, list[float]]) -> dict[str, Usage]:
    """Usage by process."""
    told = {}
    for name, samples in sorted(found.items()):
        tenth = max(1, len(samples) // 10)
        told[name] = Usage(median(samples[:tenth]), max(samples), median(samples[-tenth:]))
    return told
