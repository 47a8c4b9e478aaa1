"""Two `taskiq scheduler` processes: whoever dies, no slot is missed and none is sent twice."""

from __future__ import annotations

import asyncio
import base64
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from holdfast.broker import Broker, Received
from holdfast.broker.wire import parse_headers
from holdfast.config import ConnectionConfig
from holdfast.errors import NotFound
from holdfast.model.lease import decode_lease
from holdfast.names import H_MSG_ID
from holdfast.server import Server
from tests.faults.scheduling import rounds
from tests.faults.taskiq_app import EVERY
from tests.faults.taskiq_processes import TaskiqProcess, schedulers
from tests.support import until

Report = Callable[[str], None]
Window = tuple[int, int]
"""The number of a schedule, and of one of its intervals since 1970."""


class Watch:
    """Sees from outside who leads, and what was stored."""

    def __init__(self, broker: Broker, namespace: str) -> None:
        self._broker = broker
        self._namespace = namespace
        self.holders: list[tuple[float, str]] = []

    async def heard(self, message: Received) -> None:
        record = decode_lease(message.body) if message.body else None
        holder = record.holder if record else ""
        if not self.holders or self.holders[-1][1] != holder:
            self.holders.append((time.monotonic(), holder))

    @property
    def holder(self) -> str:
        return self.holders[-1][1] if self.holders else ""

    async def next_holder(self, before: str) -> float:
        """Wait until another leads; gives when it began to."""
        await until(lambda: self.holder not in ("", before), 60, "another leader")
        return next(at for at, holder in reversed(self.holders) if holder == self.holder)

    async def windows(self) -> Counter[Window]:
        """How often each window of each schedule is in the stream."""
        found: Counter[Window] = Counter()
        start = 1
        while True:
            request = {"seq": start, "next_by_subj": f"{self._namespace}_tasks"}
            try:
                subject = f"STREAM.MSG.GET.{self._namespace}_stream"
                message = (await self._broker.api(subject, request))["message"]
            except NotFound:
                return found
            start = message["seq"] + 1
            number = msgspec.json.decode(base64.b64decode(message["data"]))["args"][0]
            slot = parse_headers(base64.b64decode(message["hdrs"]))[H_MSG_ID]
            found[number, int(slot.rpartition("x")[2])] += 1


@asynccontextmanager
async def watching(url: str, namespace: str) -> AsyncIterator[Watch]:
    async with Broker(ConnectionConfig(nats_url=url, namespace=namespace)) as broker:
        watch = Watch(broker, namespace)
        names = broker.names
        await broker.subscribe(names.changed(names.leases, "ticks"), watch.heard)
        yield watch


def due(begin: float, end: float) -> set[Window]:
    """Every window that lies wholly in a time."""
    return {
        (number, n)
        for number, gap in enumerate(EVERY)
        for n in range(int(begin // gap) + 1, int(end // gap))
    }


async def leader(fleet: list[TaskiqProcess], watch: Watch) -> TaskiqProcess:
    """The process that leads; its node's name is in its log."""

    def found() -> TaskiqProcess | None:
        said = f"{watch.holder} leads ticks"
        return next((p for p in fleet if watch.holder and said in p.text()), None)

    return await until(found, 60, "a leader")


async def end_leader(
    fleet: list[TaskiqProcess], watch: Watch, number: signal.Signals, dice: random.Random
) -> float:
    """End the leader and start another in its place; gives how long nobody led."""
    ending = await leader(fleet, watch)
    await asyncio.sleep(dice.uniform(0.2, 0.8))
    before, at = watch.holder, time.monotonic()
    ending.signal(number)
    took = await watch.next_holder(before) - at
    code = await ending.stopped()
    if number == signal.SIGTERM:
        assert code == 0, ending.text()
        assert not ending.ready_file.exists()
    fleet[fleet.index(ending)] = new = ending.successor()
    await new.ready()
    return took


@pytest.mark.timeout(1800)
async def test_leader_that_ends_costs_no_slot(
    nats: Server, namespace: str, tmp_path: Path, report: Report
) -> None:
    """The leader is killed, then told to end, again and again: each slot is stored once."""
    dice, turns = random.Random(7), rounds(3, 20)
    took: dict[signal.Signals, list[float]] = {signal.SIGKILL: [], signal.SIGTERM: []}
    async with watching(nats.url, namespace) as watch:
        with schedulers(2, nats.url, namespace, tmp_path) as fleet:
            for process in fleet:
                await process.ready()
            began = time.time()
            for number, times in took.items():
                for _ in range(turns):
                    times.append(await end_leader(fleet, watch, number, dice))
            wanted = due(began + 1, time.time())

            async def complete() -> bool:
                return wanted <= set(await watch.windows())

            await until(complete, 30, "every window")
            stored = await watch.windows()
    twice = [window for window, count in stored.items() if count > 1]
    assert not twice, f"{len(twice)} slots were stored twice, such as {twice[:5]}"
    report(f"{len(wanted)} slots, 0 missed, 0 twice")
    for number, times in took.items():
        report(
            f"{number.name} to the leader {turns} times: another led after "
            f"{statistics.median(times) * 1000:.0f} ms (median), {max(times) * 1000:.0f} ms (most)"
        )


@pytest.mark.timeout(300)
async def test_slots_of_an_outage_are_made_up_for(namespace: str, tmp_path: Path) -> None:
    """NATS is killed and back some seconds later: what fell due meanwhile is stored once."""
    with (
        Server(fast=True) as server,
        schedulers(2, server.url, namespace, tmp_path) as fleet,
    ):
        for process in fleet:
            await process.ready()
        began = time.time()
        await asyncio.sleep(1)
        server.kill()
        await until(lambda: not any(p.ready_file.exists() for p in fleet), 30, "not ready")
        await asyncio.sleep(4)
        await asyncio.to_thread(server.restart)
        for process in fleet:
            await process.ready()
        wanted = due(began + 1, time.time())
        async with watching(server.url, namespace) as watch:

            async def complete() -> bool:
                return wanted <= set(await watch.windows())

            await until(complete, 30, "every window")
            stored = await watch.windows()
    assert max(stored.values()) == 1
