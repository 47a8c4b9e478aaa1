"""A scheduler whose clock is wrong notices, says so, and fires nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.server import Server
from tests.faults.processes import until
from tests.faults.scheduling import SchedulerProcess, figures, leader_of, ticking

LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/faketime/libfaketime.so.1",
    "/usr/lib64/faketime/libfaketime.so.1",
)

Report = Callable[[str], None]


def faked(clock: Path) -> dict[str, Any]:
    """The environment of a process whose wall clock a file sets; the monotonic one stays true."""
    library = next((path for path in LIBRARIES if Path(path).exists()), None)
    assert library, "libfaketime is needed for this test: apt-get install libfaketime"
    return {
        "LD_PRELOAD": library,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
    }


@pytest.mark.timeout(200)
@pytest.mark.parametrize("jump", ["+3600", "-3600"])
async def test_clock_that_jumps_fires_nothing_early(
    jump: str, nats: Server, namespace: str, tmp_path: Path, report: Report
) -> None:
    """The leader's clock jumps by an hour: it gives the lead away, and no slot is early or lost."""
    clock = tmp_path / "clock"
    clock.write_text("+0\n")
    async with ticking(nats, namespace, fast=20, slow=40) as ticks:
        wrong = SchedulerProcess(nats.url, namespace, tmp_path / "wrong.log", **faked(clock))
        other = None
        try:
            await leader_of([wrong])
            other = SchedulerProcess(nats.url, namespace, tmp_path / "other.log")
            await other.ready()
            await ticks.settle(time.time() + 1)
            clock.write_text(f"{jump}\n")
            jumped = time.time()
            await until(lambda: "clock is off" in wrong.text(), 10, "it notices")
            noticed = time.time() - jumped
            await leader_of([other])
            end = time.time() + 3
            await ticks.settle(end)
            assert not wrong.leads
            count, late = ticks.check(end)
            clock.write_text("+0\n")
            other.kill()
            await leader_of([wrong], 15)
        finally:
            for process in (wrong, other):
                process.close()
    report(figures(f"clock jumped by {jump} s, noticed after {noticed:.2f} s", count, late))
