"""What becomes of a message that taskiq executes, fails, does not know or cannot read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig, StreamConfig
from taskiq import AcknowledgeType, BrokerMessage, Context, SimpleRetryMiddleware, TaskiqDepends
from taskiq.middlewares import SmartRetryMiddleware
from taskiq_nats import PullBasedJetStreamBroker

from holdfast.errors import ConfigError, NotConnected
from holdfast.integrations.taskiq import (
    DeadLetters,
    ResilientNATSResultBackend,
    ResilientPullBroker,
)
from holdfast.model.backoff import Backoff
from holdfast.server import Server
from tests.faults.proxy import Proxy
from tests.integration.taskiq_support import (
    consumer_info,
    dead_letters,
    make_broker,
    outside,
    receiving,
    waiting,
)
from tests.support import until

ACK_TYPES = [AcknowledgeType.WHEN_EXECUTED, AcknowledgeType.WHEN_SAVED]


async def settled(url: str, namespace: str, broker: ResilientPullBroker) -> None:
    """Wait until the server has nothing left that is not acknowledged."""
    async with outside(url, namespace) as other:

        async def empty() -> bool:
            return await waiting(other, broker) == 0

        await until(empty, 20, "everything acknowledged")


# ---- the way things go


@pytest.mark.parametrize("batch", [1, 100])
async def test_messages_are_executed_once_and_acknowledged(
    batch: int, nats: Server, namespace: str
) -> None:
    """Five hundred messages, each executed once, with labels and results as taskiq has them."""
    broker, seen = make_broker(nats.url, namespace, pull_consume_batch=batch), []

    @broker.task(task_name="add")
    async def add(one: int, two: int) -> None:
        seen.append(one + two)

    async with receiving(broker):
        await asyncio.gather(*(add.kicker().with_labels(a="b").kiq(n, 1) for n in range(500)))
        await until(lambda: len(seen) >= 500, 30, "500 executions")
        await settled(nats.url, namespace, broker)
    assert sorted(seen) == list(range(1, 501))
    assert not await dead_letters(nats.url, namespace)


async def test_taskiq_nats_and_this_broker_share_a_queue(nats: Server, namespace: str) -> None:
    """Its stream, its consumer and its messages are ours, and the other way round."""
    names: dict[str, Any] = {
        "subject": f"{namespace}_tasks",
        "stream_name": f"{namespace}_stream",
        "durable": "workers",
    }
    old: Any = PullBasedJetStreamBroker([nats.url], pull_consume_timeout=1, **names)
    new = ResilientPullBroker([nats.url], pull_consume_timeout=1, **names)
    seen: list[int] = []

    async def note(number: int) -> None:
        seen.append(number)

    sent_by_old, sent_by_new = (b.register_task(note, task_name="note") for b in (old, new))
    await old.startup()
    await sent_by_old.kiq(1)
    async with receiving(new):
        await sent_by_old.kiq(2)
        await until(lambda: sorted(seen) == [1, 2], 10, "both")
        await settled(nats.url, namespace, new)
        await sent_by_new.kiq(3)
        await until(lambda: 3 in seen, 10, "its own")
        await settled(nats.url, namespace, new)
    await new.startup()
    await sent_by_new.kiq(4)
    message = await asyncio.wait_for(anext(old.listen()), 10)
    assert b'"args":[4]' in message.data.replace(b" ", b"")
    await message.ack()
    await new.shutdown()
    await old.shutdown()


async def test_configurations_of_the_client_are_used(nats: Server, namespace: str) -> None:
    """`StreamConfig` and `ConsumerConfig` arrive on the server, changes of the consumer too."""
    stream = StreamConfig(max_msgs=77, subjects=[f"{namespace}.t.>"])
    for wait in (7, 9):
        broker = make_broker(
            nats.url,
            namespace,
            subject=f"{namespace}.t.x",
            stream_config=stream,
            consumer_config=ConsumerConfig(durable_name="d", ack_wait=wait, max_ack_pending=5),
        )
        await broker.startup()
        async with outside(nats.url, namespace) as other:
            found = await other.api(f"STREAM.INFO.{broker.stream_name}")
            consumer = await consumer_info(other, broker)
        await broker.shutdown()
        assert found["config"]["max_msgs"] == 77
        assert found["config"]["subjects"] == [f"{namespace}.t.>"]
        assert consumer["config"]["ack_wait"] == wait * 1_000_000_000
        assert consumer["config"]["max_ack_pending"] == 5


def test_push_configuration_is_refused() -> None:
    """A consumer that the server pushes cannot be pulled."""
    with pytest.raises(ConfigError, match="deliver_subject"):
        ResilientPullBroker("x", consumer_config={"deliver_subject": "a"})


async def test_broker_that_was_not_started_says_so() -> None:
    """Sending before `startup` is an error with the remedy, not an attribute that is missing."""
    message = BrokerMessage(task_id="1", task_name="t", message=b"", labels={})
    with pytest.raises(NotConnected, match="startup"):
        await ResilientPullBroker("nats://127.0.0.1:1").kick(message)


# ---- failures


@pytest.mark.parametrize("ack_type", ACK_TYPES, ids=lambda t: t.value)
async def test_failure_is_tried_again_and_then_a_dead_letter(
    ack_type: AcknowledgeType, nats: Server, namespace: str
) -> None:
    """Three attempts, then the message is kept with its error; replayed, it runs again."""
    broker, tries, healthy = make_broker(nats.url, namespace), [], False

    @broker.task(task_name="shaky", team="blue")
    async def shaky(number: int) -> None:
        tries.append(number)
        if not healthy:
            raise RuntimeError("out of order\nsecond line")

    async with receiving(broker, ack_type):
        sent = await shaky.kiq(7)
        await until(lambda: len(tries) == 3, 20, "three attempts")
        await settled(nats.url, namespace, broker)
        [letter] = await dead_letters(nats.url, namespace)
        assert (letter.task, letter.task_id, letter.reason) == ("shaky", sent.task_id, "failed")
        assert letter.error == "RuntimeError: out of order\nsecond line"
        assert "raise RuntimeError" in letter.traceback
        assert letter.labels["team"] == "blue"
        healthy = True
        async with DeadLetters(nats.url, namespace=namespace) as dead:
            await dead.replay(letter)
            await dead.drop(letter)
        await until(lambda: len(tries) == 4, 20, "the replay")
        await settled(nats.url, namespace, broker)
    assert tries == [7] * 4
    assert not await dead_letters(nats.url, namespace)


async def test_failure_leaves_no_result_until_it_is_final(nats: Server, namespace: str) -> None:
    """Who waits for a result gets that of the last attempt, not the error of the first."""
    results: Any = ResilientNATSResultBackend(nats.url, bucket_name=f"{namespace}_results")
    broker = make_broker(nats.url, namespace).with_result_backend(results)
    tries: list[int] = []

    @broker.task(task_name="second")
    async def second() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("not yet")
        return "done"

    @broker.task(task_name="never")
    async def never() -> None:
        raise KeyError("no")

    async with receiving(broker):
        good, bad = await second.kiq(), await never.kiq()
        assert (await good.wait_result(timeout=20)).return_value == "done"
        failed = await bad.wait_result(timeout=20)
    assert failed.is_err
    assert isinstance(failed.error, KeyError)


async def test_rejected_message_is_a_dead_letter_at_once(nats: Server, namespace: str) -> None:
    """`Context.reject()` says that another attempt is of no use."""
    broker, tries = make_broker(nats.url, namespace), []

    @broker.task(task_name="refuse")
    async def refuse(context: Annotated[Context, TaskiqDepends()]) -> None:
        tries.append(1)
        context.reject()

    async with receiving(broker):
        await refuse.kiq()  # type: ignore[call-overload]  # the rest is injected
        await until(lambda: tries, 10, "the attempt")
        await settled(nats.url, namespace, broker)
    assert len(tries) == 1
    [letter] = await dead_letters(nats.url, namespace)
    assert "TaskRejectedError" in letter.error


async def test_message_acknowledged_first_runs_once_and_leaves_a_copy(
    nats: Server, namespace: str
) -> None:
    """`when_received` is at most once, as taskiq means it; its failure is still kept."""
    broker, tries = make_broker(nats.url, namespace), []

    @broker.task(task_name="once", ack_type="when_received")
    async def once() -> None:
        tries.append(1)
        raise RuntimeError("too bad")

    async with receiving(broker):
        await once.kiq()
        await until(lambda: tries, 10, "the attempt")
        await settled(nats.url, namespace, broker)
    assert tries == [1]
    [letter] = await dead_letters(nats.url, namespace)
    assert "too bad" in letter.error


async def test_message_for_manual_ack_comes_back_until_it_is_acknowledged(
    nats: Server, namespace: str
) -> None:
    """A function that ends without acknowledging gets the message again."""
    broker, tries = make_broker(nats.url, namespace), []

    @broker.task(task_name="manual", ack_type="manual")
    async def manual(context: Annotated[Context, TaskiqDepends()]) -> None:
        tries.append(1)
        if len(tries) == 2:
            await context.ack()

    async with receiving(broker):
        await manual.kiq()  # type: ignore[call-overload]  # the rest is injected
        await until(lambda: len(tries) == 2, 20, "the second attempt")
        await settled(nats.url, namespace, broker)
    assert len(tries) == 2
    assert not await dead_letters(nats.url, namespace)


@pytest.mark.parametrize("keep_result", [True, False])
async def test_retry_middleware_keeps_its_say(
    keep_result: bool, nats: Server, namespace: str
) -> None:
    """What taskiq's own middleware sends again is not tried again by us as well."""
    broker, tries = make_broker(nats.url, namespace), []
    middleware = SimpleRetryMiddleware(default_retry_count=3, no_result_on_retry=not keep_result)
    broker.add_middlewares(middleware)

    @broker.task(task_name="retried", retry_on_error=True)
    async def retried() -> None:
        tries.append(1)
        raise RuntimeError("always")

    async with receiving(broker):
        await retried.kiq()
        await until(lambda: len(tries) == 3, 20, "three attempts")
        await settled(nats.url, namespace, broker)
    assert len(tries) == 3
    assert len(await dead_letters(nats.url, namespace)) == 1


async def test_smart_retry_middleware_keeps_its_say(nats: Server, namespace: str) -> None:
    """The same for the one that waits."""
    broker, tries = make_broker(nats.url, namespace), []
    broker.add_middlewares(SmartRetryMiddleware(default_retry_count=2, default_delay=0.05))

    @broker.task(task_name="retried", retry_on_error=True)
    async def retried() -> None:
        tries.append(1)
        raise RuntimeError("always")

    async with receiving(broker):
        await retried.kiq()
        await until(lambda: len(tries) == 2, 20, "two attempts")
        await settled(nats.url, namespace, broker)
    assert len(tries) == 2


async def test_unreadable_message_is_a_dead_letter(nats: Server, namespace: str) -> None:
    """taskiq would acknowledge and forget it; its bytes are kept, untouched."""
    broker = make_broker(nats.url, namespace)
    async with receiving(broker):
        await broker.kick(BrokerMessage(task_id="1", task_name="x", message=b"\x00no", labels={}))
        await settled(nats.url, namespace, broker)
    [letter] = await dead_letters(nats.url, namespace)
    assert (letter.reason, letter.body) == ("invalid", b"\x00no")


async def test_large_message_is_kept_whole_as_a_dead_letter(nats: Server, namespace: str) -> None:
    """As large as a message may be: body and story do not fit one, and nothing is cut off."""
    broker = make_broker(nats.url, namespace)
    body = b"x" * (1024 * 1024 - 200)
    async with receiving(broker):
        await broker.kick(BrokerMessage(task_id="1", task_name="x", message=body, labels={}))
        await settled(nats.url, namespace, broker)
    [letter] = await dead_letters(nats.url, namespace)
    assert letter.body == body


async def test_message_nobody_here_knows_goes_to_a_worker_that_does(
    nats: Server, namespace: str
) -> None:
    """During a rollout an old worker gets a new function's message: it gives it back."""
    patient = Backoff.list([0.05] * 50)
    old, new = (make_broker(nats.url, namespace, retry=patient) for _ in range(2))
    seen: list[int] = []

    async def fresh(number: int) -> None:
        seen.append(number)

    task = new.task(task_name=f"{namespace}-fresh")(fresh)
    async with receiving(old):
        await new.startup()
        for number in range(5):
            await task.kiq(number)
        await new.shutdown()
        async with outside(nats.url, namespace) as other:

            async def handed_out() -> bool:
                info = await consumer_info(other, old)
                return int(info["delivered"]["consumer_seq"]) >= 5

            await until(handed_out, 10, "the old worker had them")
        async with receiving(new):
            await until(lambda: len(seen) == 5, 20, "all of them")
            await settled(nats.url, namespace, new)
    assert sorted(seen) == list(range(5))


async def test_error_of_a_middleware_does_not_lose_the_message(
    nats: Server, namespace: str
) -> None:
    """The receiver dies with it before it acknowledges; the message comes back, then it is kept."""
    broker, calls = make_broker(nats.url, namespace), []

    class Broken(SimpleRetryMiddleware):
        def pre_execute(self, message: Any) -> Any:
            calls.append(message.task_id)
            raise ValueError("a bug of the middleware")

    broker.add_middlewares(Broken())

    @broker.task(task_name="fine")
    async def fine() -> None: ...

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # taskiq never looks at what its callback raised
    async with receiving(broker):
        await fine.kiq()
        await until(lambda: len(calls) == 3, 20, "three attempts")
        await settled(nats.url, namespace, broker)
    [letter] = await dead_letters(nats.url, namespace)
    assert letter.error == "ValueError: a bug of the middleware"


# ---- long, late, twice


async def test_long_function_is_extended_and_runs_once(nats: Server, namespace: str) -> None:
    """Longer than ack_wait, and some wait in line behind it: each is executed once."""
    config = ConsumerConfig(durable_name="workers", ack_wait=1)
    broker, seen = make_broker(nats.url, namespace, consumer_config=config), []

    @broker.task(task_name="long")
    async def long(number: int) -> None:
        await asyncio.sleep(1.5)
        seen.append(number)

    async with receiving(broker, max_async_tasks=1, max_prefetch=2):
        for number in range(2):
            await long.kiq(number)
        await until(lambda: len(seen) == 2, 20, "both")
        await settled(nats.url, namespace, broker)
        async with outside(nats.url, namespace) as other:
            info = await consumer_info(other, broker)
    assert sorted(seen) == [0, 1]
    assert info["delivered"]["consumer_seq"] == 2


async def test_worker_that_stops_gives_back_what_it_has_not_begun(
    nats: Server, namespace: str
) -> None:
    """Nobody waits for ack_wait: the next worker has them at once, and none is lost."""
    first = make_broker(nats.url, namespace, pull_consume_batch=50)
    gate, seen = asyncio.Event(), []

    @first.task(task_name=f"{namespace}-hold")
    async def hold(number: int) -> None:
        seen.append(number)
        await gate.wait()

    async with receiving(first, max_async_tasks=1, max_prefetch=5):
        await asyncio.gather(*(hold.kiq(n) for n in range(30)))
        await until(lambda: seen, 10, "the first")
        gate.set()
    second = make_broker(nats.url, namespace)
    second.local_task_registry.update(first.local_task_registry)
    async with receiving(second):
        await until(lambda: len(seen) == 30, 20, "all")
        await settled(nats.url, namespace, second)
    assert sorted(seen) == list(range(30))


async def test_prefetched_messages_go_to_others_when_functions_turn_long(
    nats: Server, namespace: str
) -> None:
    """A worker that was fast and is stuck now keeps its batch and gives back the rest."""
    stuck, other = (make_broker(nats.url, namespace) for _ in range(2))
    gate, seen = asyncio.Event(), []

    @stuck.task(task_name=f"{namespace}-turn")
    async def turn(number: int) -> None:
        seen.append(number)
        if number >= 900:
            await gate.wait()

    other.local_task_registry.update(stuck.local_task_registry)
    async with receiving(stuck, max_async_tasks=1):
        await asyncio.gather(*(turn.kiq(n) for n in range(1000)))
        await until(lambda: 900 in seen, 30, "it is stuck")
        async with receiving(other, max_async_tasks=200):
            await until(lambda: len(seen) >= 997, 20, "the others")
            gate.set()
            await until(lambda: len(set(seen)) == 1000, 20, "all")
    assert sorted(seen) == list(range(1000))


async def test_deleted_consumer_is_made_again_and_repeats_nothing(
    nats: Server, namespace: str
) -> None:
    """The stream keeps what was done: the new consumer starts behind it, and misses nothing."""
    broker, seen = make_broker(nats.url, namespace), []

    @broker.task(task_name="note")
    async def note(number: int) -> None:
        seen.append(number)

    async with receiving(broker), outside(nats.url, namespace) as other:
        await asyncio.gather(*(note.kiq(n) for n in range(50)))
        await until(lambda: len(seen) == 50, 20, "the first fifty")
        await settled(nats.url, namespace, broker)
        await other.api(f"CONSUMER.DELETE.{broker.stream_name}.{broker.durable}")
        await asyncio.gather(*(note.kiq(n) for n in range(50, 60)))
        await until(lambda: len(seen) >= 60, 20, "the others")
        await settled(nats.url, namespace, broker)
    assert sorted(seen) == list(range(60))


async def test_partition_costs_nothing_and_repeats_nothing(nats: Server, namespace: str) -> None:
    """What runs when the network is cut is acknowledged after it; what is sent meanwhile comes."""
    sender, seen, gate = make_broker(nats.url, namespace), [], asyncio.Event()
    async with Proxy(int(nats.url.rpartition(":")[2])) as proxy:
        broker = make_broker(proxy.url, namespace)

        async def note(number: int) -> None:
            seen.append(number)
            if number < 10:
                await gate.wait()

        broker.register_task(note, task_name="note")
        task = sender.register_task(note, task_name="note")
        await sender.startup()
        async with receiving(broker):
            await asyncio.gather(*(task.kiq(n) for n in range(10)))
            await until(lambda: len(seen) == 10, 20, "ten that wait")
            cutting = asyncio.create_task(proxy.cut(1))
            await until(lambda: not broker.connection.connected, 10, "the cut")
            gate.set()
            await asyncio.gather(*(task.kiq(n) for n in range(10, 20)))
            await cutting
            await until(lambda: len(seen) >= 20, 20, "the others")
            await settled(nats.url, namespace, sender)
        await sender.shutdown()
    assert sorted(seen) == list(range(20))


async def test_deleted_stream_is_made_again(nats: Server, namespace: str) -> None:
    """What was in it is gone; what is sent afterwards is executed."""
    broker, seen = make_broker(nats.url, namespace), []

    @broker.task(task_name="note")
    async def note(number: int) -> None:
        seen.append(number)

    async with receiving(broker), outside(nats.url, namespace) as other:
        await asyncio.gather(*(note.kiq(n) for n in range(20)))
        await until(lambda: len(seen) == 20, 20, "the first")
        await settled(nats.url, namespace, broker)
        await other.api(f"STREAM.DELETE.{broker.stream_name}")
        await until(lambda: broker.consuming, 20, "the stream is there again")
        await note.kiq(100)
        await until(lambda: 100 in seen, 20, "the next")
    assert sorted(seen) == [*range(20), 100]


async def test_send_is_stored_once_however_often_it_is_repeated(
    nats: Server, namespace: str
) -> None:
    """Each send has a message id of its own; a label of that name is the user's choice."""
    broker = make_broker(nats.url, namespace)
    await broker.startup()
    for labels in (
        {},
        {"bad name\r\nNats-Msg-Id": "x"},
        {"Nats-Msg-Id": "m"},
        {"Nats-Msg-Id": "m"},
    ):
        await broker.kick(BrokerMessage(task_id="1", task_name="t", message=b"{}", labels=labels))
    async with outside(nats.url, namespace) as other:
        state = (await other.api(f"STREAM.INFO.{broker.stream_name}"))["state"]
    await broker.shutdown()
    assert state["messages"] == 3


async def test_callbacks_of_the_user_are_called(nats: Server, namespace: str) -> None:
    """Whoever counted on the client's callbacks still hears from them, and may fail in them."""
    heard: list[str] = []

    async def reconnected() -> None:
        heard.append("reconnected")
        raise RuntimeError("in a callback")

    async def disconnected() -> None:
        heard.append("disconnected")

    async def closed() -> None:
        heard.append("closed")

    broker = make_broker(
        nats.url,
        namespace,
        reconnected_cb=reconnected,
        disconnected_cb=disconnected,
        closed_cb=closed,
        name="mine",
    )
    await broker.startup()
    assert isinstance(broker.client, Client)
    await broker.client.force_reconnect()
    await until(lambda: "reconnected" in heard, 20, "the reconnect")
    await broker.shutdown()
    await until(lambda: "closed" in heard, 10, "the end")


async def test_ready_file_is_there_while_messages_can_arrive(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Ready means consuming, not connected; at the end the file is gone."""
    ready = tmp_path / "ready"
    broker = make_broker(nats.url, namespace, ready_file=str(ready))
    async with receiving(broker):
        await until(ready.exists, 10, "the file")
        assert broker.consuming
    assert not ready.exists()
