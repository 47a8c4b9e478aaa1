"""An attempt at a taskiq message is a function that was started, and none is lost on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from nats.js.api import ConsumerConfig, StreamConfig
from taskiq import TaskiqMessage, TaskiqMiddleware
from taskiq.middlewares import SmartRetryMiddleware

from holdfast.broker.streams import Topology
from holdfast.client import Client
from holdfast.config import RecordConfig
from holdfast.errors import NotFound
from holdfast.integrations.taskiq import ResilientNATSScheduleSource, ResilientPullBroker
from holdfast.integrations.taskiq import deliveries as deliveries_module
from holdfast.server import Server
from holdfast.status.dead import DeadFilter
from holdfast.status.dead import DeadLetters as AllDeadLetters
from tests.integration.taskiq_support import (
    consumer_info,
    dead_letters,
    make_broker,
    outside,
    receiving,
    waiting,
)
from tests.support import until


async def settled(url: str, namespace: str, broker: ResilientPullBroker) -> None:
    async with outside(url, namespace) as other:

        async def empty() -> bool:
            return await waiting(other, broker) == 0

        await until(empty, 20, "everything acknowledged")


async def abandon(broker: ResilientPullBroker, count: int) -> None:
    """Take messages and die with them, as a worker does that is killed."""
    await broker.startup()
    listening = broker.listen()
    for _ in range(count):
        await asyncio.wait_for(anext(listening), 10)
    broker._deliveries._held.clear()  # a dead process gives nothing back
    await listening.aclose()
    await broker.shutdown()


# ---- the server's own limit of deliveries


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_failure_in_the_last_delivery_is_a_dead_letter(
    retention: Any, nats: Server, namespace: str
) -> None:
    """`max_deliver=2` and three attempts: two attempts, then a dead letter, never silence."""
    broker = make_broker(
        nats.url,
        namespace,
        stream_config=StreamConfig(retention=retention),
        consumer_config=ConsumerConfig(durable_name="workers", max_deliver=2),
    )
    tries: list[int] = []

    @broker.task(task_name="fails")
    async def fails() -> None:
        tries.append(1)
        raise RuntimeError("always")

    async def letters() -> list[Any]:
        return await dead_letters(nats.url, namespace)

    async with receiving(broker):
        await fails.kiq()
        [letter] = await until(letters, 20, "the dead letter")
        await settled(nats.url, namespace, broker)
    assert len(tries) == 2
    assert (letter.reason, letter.task) == ("failed", "fails")


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_crash_in_the_last_delivery_is_a_dead_letter(
    retention: Any, nats: Server, namespace: str
) -> None:
    """A worker dies with the only delivery there is: the server's advisory is heard and kept."""
    config: dict[str, Any] = {
        "stream_config": StreamConfig(retention=retention),
        "consumer_config": ConsumerConfig(durable_name="workers", max_deliver=1, ack_wait=0.5),
    }
    dying, other = (make_broker(nats.url, namespace, **config) for _ in range(2))

    async def fine() -> None: ...

    task = dying.register_task(fine, task_name=f"{namespace}-fine")
    other.register_task(fine, task_name=f"{namespace}-fine")
    await dying.startup()
    await task.kiq()
    await dying.shutdown()
    await abandon(dying, 1)

    async def letters() -> list[Any]:
        return await dead_letters(nats.url, namespace)

    async with receiving(other):
        [letter] = await until(letters, 20, "the dead letter")
    assert letter.reason == "crashed"
    assert letter.task == f"{namespace}-fine"
    if retention == "workqueue":
        async with outside(nats.url, namespace) as broker:
            info = await broker.api(f"STREAM.INFO.{other.stream_name}")
        assert info["state"]["messages"] == 0


async def test_worker_that_stops_hands_over_what_has_no_delivery_left(
    nats: Server, namespace: str
) -> None:
    """It never began with them, so each is executed by the next worker, and none is given up."""
    config = {"consumer_config": ConsumerConfig(durable_name="workers", max_deliver=1)}
    first = make_broker(nats.url, namespace, pull_consume_batch=20, **config)
    second = make_broker(nats.url, namespace, **config)
    gate, seen = asyncio.Event(), Counter[int]()

    @first.task(task_name=f"{namespace}-hold")
    async def hold(number: int) -> None:
        seen[number] += 1
        await gate.wait()

    second.local_task_registry.update(first.local_task_registry)
    async with receiving(first, max_async_tasks=1, max_prefetch=3):
        await asyncio.gather(*(hold.kiq(n) for n in range(15)))
        await until(lambda: seen, 10, "the first")
        await until(lambda: len(first._deliveries) >= 10, 10, "the others wait")
        gate.set()
    async with receiving(second):
        await until(lambda: len(seen) == 15, 20, "all of them")
        await settled(nats.url, namespace, second)
    assert set(seen.values()) == {1}
    assert not await dead_letters(nats.url, namespace)


# ---- waiting is no attempt


async def test_message_that_waits_in_stopping_workers_keeps_its_attempts(
    nats: Server, namespace: str
) -> None:
    """Three gentle restarts and three kills while they wait: then three attempts each."""
    sender = make_broker(nats.url, namespace)
    tries: Counter[int] = Counter()

    @sender.task(task_name=f"{namespace}-fails")
    async def fails(number: int) -> None:
        tries[number] += 1
        raise RuntimeError("always")

    await sender.startup()
    await asyncio.gather(*(fails.kiq(n) for n in range(8)))
    await sender.shutdown()
    for _ in range(3):
        broker = make_broker(nats.url, namespace, pull_consume_batch=8)
        await broker.startup()
        listening = broker.listen()
        await asyncio.wait_for(anext(listening), 10)
        await until(lambda b=broker: len(b._deliveries) == 8, 10, "all are here")
        await listening.aclose()
        await broker.shutdown()
    config = ConsumerConfig(durable_name="workers", ack_wait=0.5)
    for _ in range(3):
        await abandon(make_broker(nats.url, namespace, consumer_config=config), 1)
    worker = make_broker(nats.url, namespace)
    worker.local_task_registry.update(sender.local_task_registry)

    async def letters() -> bool:
        return len(await dead_letters(nats.url, namespace)) == 8

    async with receiving(worker):
        await until(letters, 30, "eight dead letters")
        await settled(nats.url, namespace, worker)
    assert tries == Counter(dict.fromkeys(range(8), 3))


async def test_message_that_waited_in_many_workers_is_no_crash(
    nats: Server, namespace: str
) -> None:
    """Fifteen restarts, and not one start: it is executed."""
    broker = make_broker(nats.url, namespace)
    seen: list[int] = []

    @broker.task(task_name=f"{namespace}-note")
    async def note(number: int) -> None:
        seen.append(number)

    await broker.startup()
    await note.kiq(1)
    for _ in range(15):
        listening = broker.listen()
        await asyncio.wait_for(anext(listening), 10)
        await listening.aclose()
        await broker.shutdown()
        await broker.startup()
    await broker.shutdown()
    async with receiving(broker):
        await until(lambda: seen, 20, "the execution")
        await settled(nats.url, namespace, broker)
    assert seen == [1]
    assert not await dead_letters(nats.url, namespace)


async def test_message_that_kills_its_worker_is_given_up(
    nats: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started again and again and never ended: a dead letter, so that the others can run."""
    monkeypatch.setattr(deliveries_module, "CRASHES", 2)
    config = ConsumerConfig(durable_name="workers", ack_wait=0.3)
    starts: list[int] = []

    class Dies(TaskiqMiddleware):
        async def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
            starts.append(1)
            await asyncio.Event().wait()  # here the process would be gone
            return message

    def make() -> ResilientPullBroker:
        made = make_broker(nats.url, namespace, consumer_config=config)
        made.add_middlewares(Dies())
        made.register_task(lambda: None, task_name="poison")
        return made

    async def letters() -> list[Any]:
        return await dead_letters(nats.url, namespace)

    sender = make()
    await sender.startup()
    await sender.find_task("poison").kiq()
    await sender.shutdown()
    for turn in range(4):
        broker = make()
        async with receiving(broker, wait_tasks_timeout=0.1):
            await until(lambda n=turn: len(starts) > n, 20, "a start")
            broker._deliveries._held.clear()  # a dead process gives nothing back
            for task in list(broker._deliveries._handled):
                broker._deliveries._handled.pop(task)
                task.cancel()
    async with receiving(make()):
        [letter] = await until(letters, 20, "the dead letter")
    assert letter.reason == "crashed"
    assert len(starts) == 4


# ---- a consumer that was deleted


async def test_consumer_deleted_while_no_worker_ran_repeats_nothing(
    nats: Server, namespace: str
) -> None:
    """How far the queue was done is kept on the server, not in a worker's memory."""
    seen: Counter[int] = Counter()

    def make() -> ResilientPullBroker:
        made = make_broker(nats.url, namespace)

        async def note(number: int) -> None:
            seen[number] += 1

        made.register_task(note, task_name="note")
        return made

    first, second = make(), make()
    async with receiving(first):
        task: Any = first.find_task("note")
        await asyncio.gather(*(task.kiq(n) for n in range(100)))
        await until(lambda: len(seen) == 100, 20, "all")
        await settled(nats.url, namespace, first)
    async with outside(nats.url, namespace) as other:
        await other.api(f"CONSUMER.DELETE.{first.stream_name}.{first.durable}")
    async with receiving(second):
        await second.find_task("note").kiq(100)
        await until(lambda: 100 in seen, 20, "the next one")
        await settled(nats.url, namespace, second)
    assert set(seen.values()) == {1}


async def test_consumer_deleted_under_two_workers_repeats_nothing_done_before(
    nats: Server, namespace: str
) -> None:
    """Each worker knows only what it did itself; the floor is what both did."""
    seen: Counter[int] = Counter()
    both = [make_broker(nats.url, namespace) for _ in range(2)]
    for broker in both:

        async def note(number: int) -> None:
            seen[number] += 1

        broker.register_task(note, task_name="note")
    async with receiving(both[0]), receiving(both[1]), outside(nats.url, namespace) as other:
        task: Any = both[0].find_task("note")
        await asyncio.gather(*(task.kiq(n) for n in range(500)))
        await until(lambda: len(seen) == 500, 30, "all")
        await settled(nats.url, namespace, both[0])

        async def written() -> bool:
            floors = [broker._queue._floor for broker in both]
            info = await consumer_info(other, both[0])
            return min(floors) == info["ack_floor"]["stream_seq"]

        await until(written, 10, "the floor is written down")
        await other.api(f"CONSUMER.DELETE.{both[0].stream_name}.{both[0].durable}")

        async def there() -> bool:
            try:
                return bool(await consumer_info(other, both[0]))
            except NotFound:
                return False

        await until(there, 20, "the consumer is there again")
        await asyncio.gather(*(task.kiq(n) for n in range(500, 520)))
        await until(lambda: len(seen) == 520, 20, "the others")
        await settled(nats.url, namespace, both[0])
    assert set(seen.values()) == {1}


# ---- retries of taskiq's own


@pytest.mark.parametrize("keep_result", [True, False])
async def test_retry_through_a_schedule_source_leaves_one_dead_letter(
    keep_result: bool, nats: Server, namespace: str
) -> None:
    """`SmartRetryMiddleware` schedules each retry: none of them is a failure for us."""
    broker, tries = make_broker(nats.url, namespace), []
    source = ResilientNATSScheduleSource(nats.url, bucket_name=namespace)
    broker.add_middlewares(
        SmartRetryMiddleware(
            default_retry_count=3,
            default_delay=0,
            no_result_on_retry=not keep_result,
            schedule_source=source,
        )
    )

    @broker.task(task_name="retried", retry_on_error=True)
    async def retried() -> None:
        tries.append(1)
        raise RuntimeError("always")

    await source.startup()
    async with receiving(broker):
        await retried.kiq()
        for turn in range(1, 3):
            await until(lambda n=turn: len(tries) == n, 20, "the attempt")
            [planned] = await until(source.get_schedules, 20, "the retry is planned")
            await settled(nats.url, namespace, broker)
            assert not await dead_letters(nats.url, namespace)
            await source.delete_schedule(planned.schedule_id)
            kicker = retried.kicker().with_labels(**planned.labels).with_task_id(planned.task_id)
            await kicker.kiq()
        await until(lambda: len(tries) == 3, 20, "the last attempt")
        await settled(nats.url, namespace, broker)
    await source.shutdown()
    assert len(tries) == 3
    assert len(await dead_letters(nats.url, namespace)) == 1


# ---- with the others


async def test_dead_letter_is_among_those_of_jobs_and_can_be_replayed(
    nats: Server, namespace: str
) -> None:
    """`holdfast dead` and the pages list it by queue and task, and send it to its queue again."""
    broker, tries, healthy = make_broker(nats.url, namespace), [], False

    @broker.task(task_name="pkg.mod:shaky", team="blue")
    async def shaky() -> None:
        tries.append(1)
        if not healthy:
            raise RuntimeError("out of order")

    async with receiving(broker):
        await shaky.kiq()
        await until(lambda: len(tries) == 3, 20, "three attempts")
        await settled(nats.url, namespace, broker)
        async with outside(nats.url, namespace) as other:
            await Topology(other, RecordConfig()).ensure()
            dead = AllDeadLetters(Client(other, RecordConfig()))

            async def listed() -> Any:
                return await dead.list(DeadFilter(job="pkg_mod_shaky"))

            [letter] = await until(listed, 10, "the letter")
            assert letter.group == f"{namespace}_stream"
            assert letter.error == "RuntimeError: out of order"
            assert letter.headers["team"] == "blue"
            [would] = await dead.replay([letter.id], dry_run=True)
            assert would.result == "would replay"
            healthy = True
            [done] = await dead.replay([letter.id])
            assert done.result == "replayed", done.why
        await until(lambda: len(tries) == 4, 20, "the replay")
        await settled(nats.url, namespace, broker)
    assert not await dead_letters(nats.url, namespace)
