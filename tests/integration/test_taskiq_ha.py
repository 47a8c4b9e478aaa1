"""Several taskiq schedulers and apps on one NATS: each slot is sent, and once."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import StreamConfig
from taskiq import ScheduledTask, ScheduleSource
from taskiq.cli.scheduler.run import SchedulerLoop

from holdfast.broker.wire import parse_headers
from holdfast.errors import BrokerError
from holdfast.integrations.taskiq import K8sScheduler, ResilientPullBroker, slots
from holdfast.names import H_MSG_ID
from holdfast.server import Server
from tests.faults.proxy import Proxy
from tests.faults.scheduling import free_port
from tests.integration.taskiq_support import make_broker, outside, receiving
from tests.support import until

PREFER = ["duplicate", "gap"]


class Listed(ScheduleSource):
    """Any source of a user's."""

    def __init__(self, *tasks: ScheduledTask) -> None:
        self.tasks = list(tasks)

    async def get_schedules(self) -> list[ScheduledTask]:
        return self.tasks


class App:
    """One scheduler of one app, whose loop the test drives."""

    def __init__(self, scheduler: K8sScheduler, broker: ResilientPullBroker) -> None:
        self.scheduler = scheduler
        self.source = scheduler.sources[0]
        self.broker = broker

    @property
    def leads(self) -> bool:
        return self.scheduler.election.is_leader

    async def fire(self, task: ScheduledTask) -> None:
        """A schedule is due."""
        loop = asyncio.get_running_loop()
        await loop.create_task(self.scheduler.on_ready(self.source, task))


def schedule(**rule: Any) -> ScheduledTask:
    return ScheduledTask(task_name="t", labels={}, args=[], kwargs={}, **rule)


@asynccontextmanager
async def app(
    url: str, namespace: str, root: Path, *tasks: ScheduledTask, name: str = "one", **given: Any
) -> AsyncIterator[App]:
    """A scheduler with a queue of its app."""
    broker = make_broker(
        url,
        namespace,
        stream_name=f"{namespace}_{name}",
        subject=f"{namespace}_{name}",
        stream_config=StreamConfig(duplicate_window=0.1),  # nothing but the schedulers counts
    )
    source: ScheduleSource = Listed(*tasks)
    ready = str(root / f"ready-{name}-{time.monotonic_ns()}")
    options = {"ready_file": ready, "namespace": namespace, **given}
    scheduler = K8sScheduler(broker, [source], url, f"{name}-schedules", **options)
    scheduler.election._handle_sigterm = False  # the test's own process
    async with AsyncExitStack() as stack:
        await scheduler.sources[0].startup()
        stack.push_async_callback(scheduler.sources[0].shutdown)
        await scheduler.startup()
        stack.push_async_callback(scheduler.shutdown)
        await scheduler.sources[0].get_schedules()
        yield App(scheduler, broker)


async def sent(url: str, namespace: str, name: str = "one") -> list[str]:
    """The message ids in an app's queue."""
    found: list[str] = []
    stream = f"{namespace}_{name}"
    async with outside(url, namespace) as other:
        start = 1
        while True:
            try:
                request = {"seq": start, "next_by_subj": stream}
                message = (await other.api(f"STREAM.MSG.GET.{stream}", request))["message"]
            except BrokerError:
                return found
            start = message["seq"] + 1
            found.append(_id(message["hdrs"]))


def _id(headers: str) -> str:
    return parse_headers(b64decode(headers))[H_MSG_ID]


@pytest.mark.parametrize("prefer", PREFER)
@pytest.mark.parametrize("known_by", ["id", "content"])
async def test_two_apps_with_equal_schedules_send_both(
    prefer: Any, known_by: str, nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Same task, arguments, rule and id on one NATS: the leader key keeps them apart."""
    tasks = [schedule(interval=3600, schedule_id=f"s{n}") for n in range(6)]
    async with (
        app(nats.url, namespace, tmp_path, *tasks, name="one", prefer=prefer) as one,
        app(nats.url, namespace, tmp_path, *tasks, name="two", prefer=prefer) as two,
    ):
        for each in (one, two):
            each.source._by_content = known_by == "content"  # type: ignore[attr-defined]
            await each.source.get_schedules()
        for task in tasks:
            await one.fire(task)
            await two.fire(task)

        async def all_sent() -> bool:
            return all([len(await sent(nats.url, namespace, n)) == 6 for n in ("one", "two")])

        await until(all_sent, 10, "all slots of both")


async def test_slot_sent_long_ago_is_not_sent_by_a_successor(
    nats: Server, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-by that came by after the leader takes over when a marker would have expired."""
    monkeypatch.setattr(slots, "KEPT_SECONDS", 0.0, raising=False)  # of versions with markers
    task = schedule(interval=3, schedule_id="s")
    async with (
        app(nats.url, namespace, tmp_path, task) as leader,
        app(nats.url, namespace, tmp_path, task) as standby,
    ):
        assert leader.leads
        await until(lambda: time.time() % 3 < 0.5, 10, "the begin of a window")
        await leader.fire(task)

        async def one() -> bool:
            return len(await sent(nats.url, namespace)) == 1

        await until(one, 10, "it was sent")
        await standby.fire(task)
        later = time.time() + 4
        await until(lambda: time.time() > later, 10, "long afterwards")
        await leader.scheduler.election.resign()
        await until(lambda: standby.leads, 10, "the stand-by leads")
        await until(lambda: not _waiting(standby), 10, "it has looked")
    assert len(await sent(nats.url, namespace)) == 1


def _waiting(one: App) -> object:
    source: Any = one.source
    return source._due if hasattr(source, "_due") else source._missed


@pytest.mark.parametrize("prefer", PREFER)
async def test_deleted_bucket_costs_no_slot(
    prefer: Any, nats: Server, namespace: str, tmp_path: Path
) -> None:
    """What falls due while the bucket is gone is sent when it is there again."""
    tasks = [schedule(interval=3600, schedule_id=f"s{n}") for n in range(10)]
    async with app(nats.url, namespace, tmp_path, *tasks, prefer=prefer) as one:
        async with outside(nats.url, namespace) as other:
            await other.api(f"STREAM.DELETE.KV_{namespace}_taskiq_slots")
        for task in tasks:
            await one.fire(task)

        async def all_sent() -> bool:
            return len(await sent(nats.url, namespace)) == 10

        await until(all_sent, 20, "all slots")


@pytest.mark.parametrize("prefer", PREFER)
async def test_short_outages_cost_no_slot_of_a_short_interval(
    prefer: Any, nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Outages longer than the interval, in taskiq's own loop: each window is sent once."""
    async with Proxy(int(nats.url.rpartition(":")[2])) as proxy:
        task = schedule(interval=1, schedule_id="s")
        async with app(proxy.url, namespace, tmp_path, task, prefer=prefer) as one:
            loop = asyncio.create_task(SchedulerLoop(one.scheduler).run())

            async def windows() -> list[int]:
                ids = await sent(nats.url, namespace)
                return sorted(int(id.rpartition("x")[2]) for id in ids)

            await until(windows, 10, "the first")
            for _ in range(2):
                await proxy.cut(1.2)
                await until(lambda: one.leads, 20, "connected again")
            end = int(time.time()) + 1

            async def there() -> bool:
                return (await windows())[-1] >= end

            await until(there, 20, "the last")
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
        found = [n for n in await windows() if n <= end]
    assert found == list(range(found[0], end + 1))


def _get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_scheduler_shows_health_and_what_it_sent(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """A port for probes and Prometheus: who leads, what was sent, and what is overdue."""
    port, task = free_port(), schedule(interval=3600, schedule_id="s")
    async with app(nats.url, namespace, tmp_path, task, health_port=port) as one:
        await one.fire(task)

        async def counted() -> bool:
            _, text = await asyncio.to_thread(_get, port, "/metrics")
            return 'holdfast_slots_total{outcome="dispatched"} 1.0' in text

        await until(counted, 10, "the slot is counted")
        _, text = await asyncio.to_thread(_get, port, "/metrics")
        status, health = await asyncio.to_thread(_get, port, "/health/ready")
        assert 'holdfast_leading{role="one-schedules"} 1.0' in text
        assert "holdfast_slot_overdue_seconds 0.0" in text
        assert (status, json.loads(health)["ready"]) == (200, True)


async def test_worker_shows_health_and_what_it_executed(nats: Server, namespace: str) -> None:
    """The same for a broker: consuming or not, attempts by task, dead letters."""
    port = free_port()
    broker = make_broker(nats.url, namespace, health_port=port)

    @broker.task(task_name="m:fails")
    async def fails() -> None:
        raise RuntimeError("always")

    async with receiving(broker):
        await fails.kiq()
        labels = f'group="{namespace}_stream",job="m_fails"'

        wanted = (
            f'holdfast_dead_letters_total{{{labels},reason="failed"}} 1.0',
            f"holdfast_attempts_started_total{{{labels}}} 3.0",
            f'holdfast_taskiq_consuming{{stream="{namespace}_stream"}} 1.0',
        )

        async def shown() -> bool:
            try:
                _, text = await asyncio.to_thread(_get, port, "/metrics")
                status, _ = await asyncio.to_thread(_get, port, "/health/ready")
            except OSError:  # not listening yet
                return False
            return status == 200 and all(line in text for line in wanted)

        await until(shown, 60, "attempts, the dead letter, consuming and ready")
