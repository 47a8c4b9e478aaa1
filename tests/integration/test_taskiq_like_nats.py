"""What taskiq-nats' own tests ask of its classes, asked of ours, in our own words.

Its package on the index has no tests in it, so none can be fetched in a build; `tools/
taskiq_nats_suite.py` runs the original from a clone. Deviations, each with its reason:

- The core NATS broker and the push broker have no counterpart: a message that the server pushes
  cannot be held back, and one over core NATS is not kept. `ResilientPullBroker` stands for both.
- `pull_consume_timeout` is taken and has no effect: silence is noticed by missing heartbeats.
- Values are JSON, not pickles; pickled ones are read with `read_pickled=True`.
- A function that fails is tried again, and kept as a dead letter, instead of acknowledged.
- Schedule ids with spaces, dots or wildcards are refused when they are added.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from taskiq import AckableMessage, BrokerMessage, ResultGetError, ScheduledTask, TaskiqResult
from taskiq.depends.progress_tracker import TaskProgress, TaskState

from holdfast.integrations.taskiq import (
    ResilientNATSResultBackend,
    ResilientNATSScheduleSource,
    ResilientPullBroker,
)
from holdfast.server import Server


def result(value: Any = "as it was") -> TaskiqResult[Any]:
    return TaskiqResult(is_err=False, log=None, return_value=value, execution_time=0.5)


def schedule(**rule: Any) -> ScheduledTask:
    return ScheduledTask(task_name="t", labels={}, args=[1], kwargs={"a": None}, **rule)


@asynccontextmanager
async def started(made: Any) -> AsyncIterator[Any]:
    await made.startup()
    try:
        yield made
    finally:
        await made.shutdown()


async def test_message_sent_before_anybody_listens_arrives(nats: Server, namespace: str) -> None:
    """With default names; the client's JetStream context is there for who uses it."""
    async with started(ResilientPullBroker([nats.url], subject=namespace)) as broker:
        sent = BrokerMessage(task_id="1", task_name="t", message=b"bytes", labels={})
        await broker.kick(sent)
        listening = broker.listen()
        message = await asyncio.wait_for(anext(listening), 10)
        assert isinstance(message, AckableMessage)
        assert message.data == sent.message
        await message.ack()
        await listening.aclose()
        await broker.js.delete_consumer(stream=broker.stream_name, consumer=broker.durable)
        await broker.js.delete_stream(broker.stream_name)


async def test_result_comes_back_as_it_was(nats: Server, namespace: str) -> None:
    """Kept by default, also for a second reader."""
    backend = ResilientNATSResultBackend[Any]([nats.url], bucket_name=f"{namespace}_r")
    async with started(backend):
        task_id = uuid.uuid4().hex
        assert not await backend.is_result_ready(task_id)
        await backend.set_result(task_id, result())
        assert await backend.is_result_ready(task_id)
        assert await backend.get_result(task_id) == result()
        assert await backend.get_result(task_id) == result()


async def test_result_that_is_missing_is_taskiqs_error(nats: Server, namespace: str) -> None:
    """Code that catches `ResultGetError` still does, also with no bucket there yet."""
    async with started(ResilientNATSResultBackend[Any](nats.url, bucket_name=namespace)) as backend:
        with pytest.raises(ResultGetError):
            await backend.get_result("nothing")


async def test_result_is_removed_when_it_is_not_to_be_kept(nats: Server, namespace: str) -> None:
    """`keep_results=False`: the first reader takes it."""
    made = ResilientNATSResultBackend[Any](nats.url, keep_results=False, bucket_name=namespace)
    async with started(made) as backend:
        await backend.set_result("x", result())
        assert await backend.get_result("x") == result()
        assert not await backend.is_result_ready("x")
        with pytest.raises(ResultGetError):
            await backend.get_result("x")


async def test_result_that_json_cannot_carry_is_refused(nats: Server, namespace: str) -> None:
    """When it is set, not when somebody waits for it."""
    async with started(ResilientNATSResultBackend[Any](nats.url, bucket_name=namespace)) as backend:
        with pytest.raises(ValueError):
            await backend.set_result("x", result(object()))


async def test_large_result_and_error_come_back(nats: Server, namespace: str) -> None:
    """Larger than a message may be; and an exception with its type."""
    async with started(ResilientNATSResultBackend[Any](nats.url, bucket_name=namespace)) as backend:
        await backend.set_result("large", result("x" * 3_000_000))
        assert len((await backend.get_result("large")).return_value) == 3_000_000
        failed = TaskiqResult[Any](
            is_err=True, return_value=None, execution_time=0, error=KeyError("k")
        )
        await backend.set_result("failed", failed)
        found = await backend.get_result("failed")
        assert isinstance(found.error, KeyError)
        assert found.error.args == ("k",)


async def test_progress_comes_back(nats: Server, namespace: str) -> None:
    """taskiq's progress tracker works on the same bucket."""
    async with started(ResilientNATSResultBackend[Any](nats.url, bucket_name=namespace)) as backend:
        assert await backend.get_progress("x") is None
        await backend.set_progress("x", TaskProgress(state=TaskState.STARTED, meta={"n": 1}))
        found = await backend.get_progress("x")
    assert found is not None
    assert (found.state, found.meta) == (TaskState.STARTED, {"n": 1})


async def test_schedule_is_there_until_it_is_deleted(nats: Server, namespace: str) -> None:
    """Added, replaced, read, deleted; each at the next call."""
    async with started(ResilientNATSScheduleSource([nats.url], bucket_name=namespace)) as source:
        assert await source.get_schedules() == []
        cron = schedule(cron="* * * * *", cron_offset="Europe/Paris")
        every = schedule(interval=5)
        await source.add_schedule(cron)
        await source.add_schedule(every)
        assert await source.get_schedules() == [cron, every]
        changed = cron.model_copy(update={"cron": "5 * * * *"})
        await source.add_schedule(changed)
        assert sorted(await source.get_schedules(), key=lambda s: str(s.cron)) == [changed, every]
        await source.delete_schedule(cron.schedule_id)
        assert await source.get_schedules() == [every]
        await source.delete_schedule("never-there")


async def test_schedule_that_was_sent_goes_if_it_is_a_one_off(nats: Server, namespace: str) -> None:
    """After the dispatch a cron schedule stays, an instant does not."""
    async with started(ResilientNATSScheduleSource([nats.url], bucket_name=namespace)) as source:
        cron, once = schedule(cron="* * * * *"), schedule(time=datetime(2000, 1, 1, tzinfo=UTC))
        for task in (cron, once):
            await source.add_schedule(task)
            await source.post_send(task)
        assert await source.get_schedules() == [cron]


async def test_schedules_of_other_prefixes_are_left_alone(nats: Server, namespace: str) -> None:
    """Two sources share a bucket."""
    one, two = (
        ResilientNATSScheduleSource([nats.url], bucket_name=namespace, prefix=p) for p in "ab"
    )
    async with started(one), started(two):
        await one.add_schedule(schedule(interval=5))
        assert len(await one.get_schedules()) == 1
        assert await two.get_schedules() == []
