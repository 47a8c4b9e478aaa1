"""Many schedules: all due in one second, and none due at all."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.broker import Broker, Bucket
from holdfast.broker.streams import Topology
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.model.schedule import Schedule, define, encode
from holdfast.names import schedule_key
from holdfast.server import Server
from tests.faults.scheduling import leader_of, rounds, scheduler_fleet
from tests.support import until

BURST = 10_000

Report = Callable[[str], None]


async def _store(broker: Broker, schedules: list[Schedule]) -> None:
    """Write them straight into the bucket: that is not what is measured."""
    bucket = Bucket(broker, broker.names.schedules)
    now = time.time()

    async def put(schedule: Schedule) -> None:
        body = encode(msgspec.structs.replace(schedule, since=now, changed=now))
        await bucket.put(schedule_key(schedule.name), body, expected=0)

    for start in range(0, len(schedules), 500):
        await asyncio.gather(*map(put, schedules[start : start + 500]))


def _cpu(pid: int) -> float:
    """Seconds of CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> float:
    """Resident megabytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1000 for line in status.splitlines() if "VmRSS" in line)


@pytest.mark.timeout(200)
async def test_burst_is_enqueued_within_seconds(
    nats: Server, namespace: str, tmp_path: Path, report: Report
) -> None:
    """10,000 schedules due in the same second: all are stored; how soon is told."""
    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with Broker(config) as broker:
        await Topology(broker, RecordConfig()).ensure()
        due = int(time.time()) + 15
        await _store(broker, [define(f"s{n}", "job", at=due) for n in range(BURST)])
        with scheduler_fleet(1, nats.url, namespace, tmp_path) as [scheduler]:
            await leader_of([scheduler])
            before = _cpu(scheduler.pid)
            await asyncio.sleep(max(0.0, due - time.time()))

            async def stored() -> bool:
                info = await broker.api(f"STREAM.INFO.{broker.names.jobs}")
                return int(info["state"]["messages"]) >= BURST

            await until(stored, 60, "all runs")
            late, used = time.time() - due, _cpu(scheduler.pid) - before
            info = await broker.api(f"STREAM.INFO.{broker.names.jobs}")
    assert info["state"]["messages"] == BURST
    crowd = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    report(
        f"{BURST} slots due at once: the last stored {late:.2f} s later, {used:.2f} s of CPU "
        f"time, {crowd:.1f} processes per core"
    )


@pytest.mark.timeout(400)
async def test_idle_schedules_cost_next_to_nothing(
    nats: Server, namespace: str, tmp_path: Path, report: Report
) -> None:
    """Schedules that are not due cost little memory."""
    count = rounds(10_000, 100_000)
    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with Broker(config) as broker:
        await Topology(broker, RecordConfig()).ensure()
        hour = (time.gmtime().tm_hour + 12) % 24
        rules = [f"{n % 60} {hour} {1 + n % 28} * *" for n in range(count)]
        await _store(broker, [define(f"s{n}", "job", cron=r) for n, r in enumerate(rules)])
        with scheduler_fleet(1, nats.url, namespace, tmp_path) as [scheduler]:
            await leader_of([scheduler], 120)
            loading = _cpu(scheduler.pid)
            memory = _memory(scheduler.pid)
    report(f"{count} schedules: {memory:.0f} MB, {loading:.1f} s of CPU time to load")
    assert memory < 60 + count * 0.002
