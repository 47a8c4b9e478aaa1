"""Schedules that do not go missing, and slots that are sent by one of several."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from taskiq import ScheduledTask, ScheduleSource
from taskiq.exceptions import SendTaskError
from taskiq.scheduler.scheduler import TaskiqScheduler
from taskiq.serializers import JSONSerializer
from taskiq_nats import NATSKeyValueScheduleSource

from holdfast.broker import Bucket
from holdfast.errors import ConfigError, InvalidName
from holdfast.integrations.taskiq import (
    HAScheduleSource,
    K8sScheduler,
    LeaderElection,
    ResilientNATSScheduleSource,
)
from holdfast.server import Server
from tests.faults.proxy import Proxy
from tests.integration.taskiq_support import make_broker, outside
from tests.support import until


def schedule(**rule: Any) -> ScheduledTask:
    """A schedule of one task."""
    return ScheduledTask(task_name="t", labels={}, args=[], kwargs={}, **rule)


@asynccontextmanager
async def started(made: Any) -> AsyncIterator[Any]:
    await made.startup()
    try:
        yield made
    finally:
        await made.shutdown()


# ---- the bucket


async def test_bucket_is_shared_with_taskiq_nats(nats: Server, namespace: str) -> None:
    """Each reads what the other wrote, with its JSON serializer: one line changes, in any order."""
    old: Any = NATSKeyValueScheduleSource(
        nats.url, bucket_name=namespace, serializer=JSONSerializer()
    )
    new = ResilientNATSScheduleSource(nats.url, bucket_name=namespace)
    async with started(old), started(new):
        first, second = schedule(interval=1), schedule(cron="1 * * * *")
        await old.add_schedule(first)
        await new.add_schedule(second)
        assert await new.get_schedules() == [first, second]
        assert {s.schedule_id for s in await old.get_schedules()} == {
            first.schedule_id,
            second.schedule_id,
        }
        await old.delete_schedule(first.schedule_id)
        assert await new.get_schedules() == [second]


async def test_pickled_schedule_is_read_only_when_told_to(
    nats: Server, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """taskiq-nats' default entries: left out and named, or read; one that could execute is not."""
    old: Any = NATSKeyValueScheduleSource(nats.url, bucket_name=namespace)
    task = schedule(interval=9)
    async with started(old), outside(nats.url, namespace) as other:
        await old.add_schedule(task)
        evil = pickle.dumps({"cron": Path})  # names a class: a pickle could as well call one
        await Bucket(other, namespace).put("schedule.evil", evil, expected=0)
        async with started(ResilientNATSScheduleSource(nats.url, bucket_name=namespace)) as strict:
            assert await strict.get_schedules() == []
        assert "read_pickled=True" in caplog.text
        caplog.clear()
        made = ResilientNATSScheduleSource(nats.url, bucket_name=namespace, read_pickled=True)
        async with started(made) as source:
            assert await source.get_schedules() == [task]
            assert "schedule.evil" in caplog.text
            await source.add_schedule(task)
            entry = await Bucket(other, namespace).get(f"schedule.{task.schedule_id}")
    assert entry is not None
    assert entry.value.startswith(b"{")


async def test_schedules_stay_while_the_server_does_not_answer(
    nats: Server, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """taskiq takes an error for an empty list: an outage must not look like one."""
    port = int(nats.url.rpartition(":")[2])
    async with Proxy(port) as proxy:
        made = ResilientNATSScheduleSource(proxy.url, bucket_name=namespace)
        async with started(made) as source:
            await source.add_schedule(schedule(interval=5))
            assert len(await source.get_schedules()) == 1
            cutting = asyncio.create_task(proxy.cut(0.5))
            await until(lambda: not source.connection.connected, 10, "the cut")
            assert len(await source.get_schedules()) == 1
            assert "using the 1 known before" in caplog.text
            await cutting
            await until(lambda: source.connection.connected, 10, "the connection")
            await source.add_schedule(schedule(interval=6))
            assert len(await source.get_schedules()) == 2


async def test_empty_bucket_is_no_trouble(
    nats: Server, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A bucket without schedules is read without a word."""
    caplog.set_level(logging.INFO)
    made = ResilientNATSScheduleSource(nats.url, bucket_name=namespace)
    async with started(made) as source:
        for _ in range(5):
            assert await source.get_schedules() == []
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_schedules_that_vanish_are_told_of(
    nats: Server, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A purge leaves no marker, a new bucket no history: the view follows, and says so."""
    made = ResilientNATSScheduleSource(nats.url, bucket_name=namespace)
    async with started(made) as source, outside(nats.url, namespace) as other:
        for number in range(3):
            await source.add_schedule(schedule(interval=5, schedule_id=f"s{number}"))
        assert len(await source.get_schedules()) == 3
        await Bucket(other, namespace).delete("schedule.s1")
        assert [s.schedule_id for s in await source.get_schedules()] == ["s0", "s2"]
        assert "schedule.s1" in caplog.text
        await other.api(f"STREAM.DELETE.KV_{namespace}")
        assert len(await source.get_schedules()) == 2
        await source.shutdown()
        await source.startup()
        assert await source.get_schedules() == []


async def test_many_schedules_are_never_read_as_few(nats: Server, namespace: str) -> None:
    """The race of the client's watch: every read is complete, also while writing."""
    made = ResilientNATSScheduleSource(nats.url, bucket_name=namespace)
    async with started(made) as writer:
        known = [schedule(interval=n + 1, schedule_id=f"s{n}") for n in range(300)]
        await asyncio.gather(*(writer.add_schedule(task) for task in known))

        async def read() -> int:
            fresh = ResilientNATSScheduleSource(nats.url, bucket_name=namespace)
            async with started(fresh) as source:
                return len(await source.get_schedules())

        async def write() -> None:
            for task in known[:100]:
                await writer.add_schedule(task)

        *found, _ = await asyncio.gather(*(read() for _ in range(10)), write())
    assert found == [300] * 10


@pytest.mark.parametrize("id", ["", "a b", "a.b", "*", ">"])
async def test_schedule_id_that_no_key_can_have_is_refused(
    id: str, nats: Server, namespace: str
) -> None:
    """Such a key would be stored where no read finds it."""
    made = ResilientNATSScheduleSource(nats.url, bucket_name=namespace)
    async with started(made) as source:
        with pytest.raises(InvalidName):
            await source.add_schedule(schedule(interval=1, schedule_id=id))


# ---- several schedulers


class Listed(ScheduleSource):
    """Any source of a user's."""

    def __init__(self, *tasks: ScheduledTask) -> None:
        self.tasks = list(tasks)
        self.sent: list[str] = []

    async def get_schedules(self) -> list[ScheduledTask]:
        return self.tasks

    def post_send(self, task: ScheduledTask) -> None:
        self.sent.append(task.schedule_id)


class Schedulers:
    """Some schedulers over copies of one schedule, and what they sent."""

    def __init__(self) -> None:
        self.elections: list[LeaderElection] = []
        self.sources: list[HAScheduleSource] = []
        self.schedulers: list[TaskiqScheduler] = []
        self.sent: list[int] = []

    @property
    def leader(self) -> int:
        return next((n for n, e in enumerate(self.elections) if e.is_leader), -1)

    async def fire(self, number: int, task: ScheduledTask) -> None:
        """What taskiq's loop does when a schedule is due; returns when it was sent, if it is."""
        source = self.sources[number]
        loop = asyncio.get_running_loop()
        await loop.create_task(self.schedulers[number].on_ready(source, task))
        await source.idle()


@asynccontextmanager
async def site(
    url: str, namespace: str, task: ScheduledTask, count: int = 2, **given: Any
) -> AsyncIterator[Schedulers]:
    made = Schedulers()
    async with AsyncExitStack() as stack:
        for number in range(count):
            election = LeaderElection(url, "site", namespace=namespace)
            source = HAScheduleSource(Listed(task), election, **given)
            broker = make_broker(url, namespace)
            kick = broker.kick

            async def counted(message: Any, number: int = number, kick: Any = kick) -> None:
                await kick(message)
                made.sent.append(number)

            broker.kick = counted  # type: ignore[method-assign]
            scheduler = TaskiqScheduler(broker, [source])
            source.attach(scheduler)
            await stack.enter_async_context(started(source))
            await stack.enter_async_context(started(scheduler))
            await source.get_schedules()
            made.elections.append(election)
            made.sources.append(source)
            made.schedulers.append(scheduler)
        yield made


async def stored(url: str, namespace: str) -> int:
    """Messages in the queue."""
    async with outside(url, namespace) as other:
        info = await other.api(f"STREAM.INFO.{namespace}_stream")
        return int(info["state"]["messages"])


@pytest.mark.parametrize("prefer", ["duplicate", "gap"])
async def test_slot_is_sent_by_the_leader_and_once(
    prefer: Any, nats: Server, namespace: str
) -> None:
    """All come by the same slot; the one that leads sends it, and it is marked."""
    task = schedule(interval=3600, schedule_id="hourly")
    async with site(nats.url, namespace, task, 3, prefer=prefer) as fleet:
        leader = fleet.leader
        for number in (*range(3), *range(3)):
            await fleet.fire(number, task)
        assert fleet.sent == [leader]
        inner = [source.source for source in fleet.sources]
        assert [s.sent for s in inner if isinstance(s, Listed)][leader] == ["hourly"]
    assert await stored(nats.url, namespace) == 1


async def test_slot_due_while_nobody_led_is_made_up_for(nats: Server, namespace: str) -> None:
    """A stand-by came by it before the leader did, and the leader left: it is sent all the same."""
    task = schedule(interval=3600, schedule_id="hourly")
    async with site(nats.url, namespace, task) as fleet:
        leader = fleet.leader
        other = 1 - leader
        await fleet.fire(other, task)
        assert fleet.sent == []
        await fleet.elections[leader].resign()
        await until(lambda: fleet.sent == [other], 10, "the new leader")
    assert await stored(nats.url, namespace) == 1


async def test_slot_another_has_sent_is_not_made_up_for(nats: Server, namespace: str) -> None:
    """A stand-by comes by a slot after the leader has sent it, and takes over much later."""
    task = schedule(time=datetime.now(UTC) - timedelta(seconds=1), schedule_id="once")
    async with site(nats.url, namespace, task) as fleet:
        leader = fleet.leader
        await fleet.fire(leader, task)
        await fleet.fire(1 - leader, task)
        await fleet.elections[leader].resign()
        await until(lambda: fleet.leader == 1 - leader, 10, "the new leader")
        await until(lambda: not fleet.sources[1 - leader]._due, 10, "it knows")
        await fleet.fire(1 - leader, task)
    assert fleet.sent == [leader]


async def test_standby_forgets_what_the_leader_has_sent(nats: Server, namespace: str) -> None:
    """It asks after a while, so that it need not ask when the record has expired."""
    task = schedule(interval=3600, schedule_id="hourly")
    async with site(nats.url, namespace, task) as fleet:
        leader = fleet.leader
        await fleet.fire(1 - leader, task)
        await fleet.fire(leader, task)
        await until(lambda: not fleet.sources[1 - leader]._due, 20, "the record was seen")
    assert fleet.sent == [leader]


async def test_crash_after_dispatch_stores_the_slot_once(nats: Server, namespace: str) -> None:
    """Sent and not recorded: the successor sends it again, and the server knows the slot."""
    task = schedule(interval=3600, schedule_id="hourly")
    async with site(nats.url, namespace, task) as fleet:
        leader = fleet.leader

        async def crash(task: ScheduledTask) -> None:
            await asyncio.Event().wait()  # the process ends here

        fleet.sources[leader].post_send = crash  # type: ignore[method-assign]
        await fleet.fire(1 - leader, task)
        fleet.sources[leader].note(task)
        await until(lambda: fleet.sent == [leader], 10, "the leader has sent it")
        await fleet.elections[leader].resign()
        await until(lambda: fleet.sent == [leader, 1 - leader], 10, "the successor")
    assert await stored(nats.url, namespace) == 1


async def test_crash_before_dispatch_is_a_gap_only_if_preferred(
    nats: Server, namespace: str
) -> None:
    """`prefer="gap"` records first: what was recorded and not sent is never sent."""
    task = schedule(interval=3600, schedule_id="hourly")
    async with site(nats.url, namespace, task, prefer="gap") as fleet:
        leader = fleet.leader
        await fleet.fire(1 - leader, task)

        async def crash(task: ScheduledTask) -> None:
            await asyncio.Event().wait()  # the process ends here

        fleet.sources[leader]._send = crash
        fleet.sources[leader].note(task)
        progress = fleet.sources[leader]._progress
        await until(progress.all, 10, "it is recorded")
        await fleet.elections[leader].resign()
        await until(lambda: fleet.leader == 1 - leader, 10, "the new leader")
        await fleet.fire(1 - leader, task)
        await until(lambda: not fleet.sources[1 - leader]._due, 10, "it knows")
    assert fleet.sent == []


async def test_preference_that_does_not_exist_is_refused() -> None:
    """A typing error is told when the source is made."""
    with pytest.raises(ConfigError, match="duplicate"):
        HAScheduleSource(Listed(), LeaderElection("x"), prefer="none")  # type: ignore[arg-type]


async def test_dispatch_that_fails_is_repeated(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """A leader whose broker is away keeps the slot and sends it when the broker is back."""
    task = schedule(interval=3600, schedule_id="hourly")
    broker = make_broker(nats.url, namespace)
    scheduler = K8sScheduler(
        broker, [Listed(task)], nats.url, "s", ready_file=str(tmp_path / "r"), namespace=namespace
    )
    scheduler.election._handle_sigterm = False  # the test's own process
    [source] = scheduler.sources
    kick, failing = broker.kick, True

    async def flaky(message: Any) -> None:
        if failing:
            raise SendTaskError
        await kick(message)

    broker.kick = flaky  # type: ignore[method-assign]
    async with started(source), started(scheduler):
        await until((tmp_path / "r").exists, 10, "the ready file")
        await source.get_schedules()
        await asyncio.get_running_loop().create_task(scheduler.on_ready(source, task))
        failing = False

        async def one() -> bool:
            return await stored(nats.url, namespace) == 1

        await until(one, 10, "the slot")
    assert not (tmp_path / "r").exists()


# ---- the election by itself


async def test_election_has_one_leader_and_hands_over(nats: Server, namespace: str) -> None:
    """Of three candidates one leads; when it leaves another does, with a higher epoch."""
    fleet = [LeaderElection(nats.url, "a role: with.text", namespace=namespace) for _ in range(3)]
    async with AsyncExitStack() as stack:
        for election in fleet:
            await stack.enter_async_context(started(election))
        assert sum(e.is_leader for e in fleet) == 1
        assert all(e.established for e in fleet)
        first = next(e for e in fleet if e.is_leader)
        epoch = first.epoch
        await first.resign()
        rest = [e for e in fleet if e is not first]
        await until(lambda: any(e.is_leader for e in rest), 10, "another")
        second = next(e for e in rest if e.is_leader)
        assert second.epoch > epoch
        assert not first.is_leader
        await until(lambda: all(e.holder == second.node for e in rest), 10, "all know it")


async def test_election_waits_for_the_lead(nats: Server, namespace: str) -> None:
    """Code that only wants to run in one place awaits its turn."""
    async with LeaderElection(nats.url, "r", namespace=namespace) as one:
        assert one.is_leader
        async with LeaderElection(nats.url, "r", namespace=namespace) as two:
            waiting = asyncio.create_task(two.wait_until_leader())
            await asyncio.sleep(0)
            assert not waiting.done()
            await one.resign()
            await asyncio.wait_for(waiting, 60)
            assert two.is_leader


async def test_leader_that_is_cut_off_stops_itself_first(nats: Server, namespace: str) -> None:
    """It stops on its own clock, before anybody else can lead."""
    port = int(nats.url.rpartition(":")[2])
    lease: dict[str, Any] = {"ttl_seconds": 1.2, "renew_seconds": 0.3}
    async with Proxy(port) as proxy:
        cut_off = LeaderElection(proxy.url, "r", namespace=namespace, **lease)
        other = LeaderElection(nats.url, "r", namespace=namespace, **lease)
        both: list[bool] = []
        async with started(cut_off), started(other):
            other._election._probe_seconds = 3600.0  # only the TTL
            assert cut_off.is_leader
            other.on_change(lambda: both.append(other.is_leader and cut_off.is_leader))
            cutting = asyncio.create_task(proxy.cut(3))
            await until(lambda: other.is_leader, 20, "the other")
            assert not cut_off.is_leader
            await cutting
    assert both
    assert not any(both)
