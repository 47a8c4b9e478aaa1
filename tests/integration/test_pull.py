"""The pull loop: messages flow whatever happens to the consumer, and no worker hoards them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import Context, Holdfast, Worker
from holdfast.broker import Broker, Delivery, Pull
from holdfast.broker import pull as pulling
from holdfast.broker.pull import HEARTBEAT_SECONDS, SLOW_HEARTBEAT_SECONDS
from holdfast.broker.streams import Topology
from holdfast.config import ConnectionConfig, RecordConfig, WorkerConfig
from holdfast.errors import BrokerError, ConfigError, NotFound
from holdfast.names import consumer
from holdfast.server import Server
from holdfast.worker.intake import SENTINELS
from tests.integration.support import (
    Seen,
    broker_of,
    consumer_info,
    exists,
    lag,
    queue_empty,
    until,
    working,
)


@contextlib.contextmanager
def own_app(server: Server, namespace: str) -> Iterator[Holdfast]:
    """An app on a server of the test's own."""
    yield Holdfast("shop", nats_url=server.url, namespace=namespace)


async def delete_consumer(app: Holdfast, job: str) -> None:
    """Delete a job's consumer as an operator would by mistake."""
    broker = await broker_of(app)
    await broker.api(f"CONSUMER.DELETE.{broker.names.jobs}.{consumer('default', job)}")


# ---- what can vanish


async def test_deleted_consumer_is_made_again_and_messages_flow(app: Holdfast, seen: Seen) -> None:
    """A consumer deleted under the loop comes back; what is queued is neither lost nor doubled."""

    @app.job
    async def work(n: int) -> None:
        seen.append(n)

    async with app, working(app):
        await work.enqueue(0)
        await seen.wait()
        for round_ in (1, 2, 3):
            await delete_consumer(app, "work")
            await work.enqueue(round_)
            await seen.wait(round_ + 1)
        await until(lambda: queue_empty(app), 5, "an empty queue")
        assert seen == [0, 1, 2, 3]


async def test_consumer_deleted_while_runs_are_held_changes_nothing_for_them(
    app: Holdfast, seen: Seen
) -> None:
    """A run that is executed when its consumer vanishes ends once, and its message with it."""
    go = asyncio.Event()

    @app.job
    async def work(n: int) -> int:
        seen.append(n)
        await go.wait()
        return n

    async with app, working(app):
        runs = await work.enqueue_many(range(5))
        await seen.wait(5)
        await delete_consumer(app, "work")
        await until(lambda: _consumer_back(app, "work"), 5, "the consumer")
        go.set()
        assert [await r.result(60) for r in runs] == list(range(5))
        await until(lambda: queue_empty(app), 10, "an empty queue")
        assert sorted(seen) == list(range(5))


async def test_deleted_stream_is_made_again_and_messages_flow(app: Holdfast, seen: Seen) -> None:
    """A stream deleted under the loop comes back with its consumers; later runs are taken."""

    @app.job
    async def work(n: int) -> None:
        seen.append(n)

    async with app, working(app):
        await work.enqueue(0)
        await seen.wait()
        broker = await broker_of(app)
        await broker.api(f"STREAM.DELETE.{broker.names.jobs}")
        await until(lambda: exists(app, broker.names.jobs), 10, "the stream")
        await work.enqueue(1)
        await seen.wait(2)
        assert seen == [0, 1]


async def test_restarted_server_is_worked_with_again(
    namespace: str,
    seen: Seen,
    caplog: pytest.LogCaptureFixture,
    report: Callable[[str], None],
) -> None:
    """After a kill -9 and a restart consumption resumes by itself; the loss is one line of log."""
    with Server(fast=True) as server, own_app(server, namespace) as app:

        @app.job
        async def work(n: int) -> None:
            seen.append(n)

        with caplog.at_level(logging.WARNING, "holdfast"):
            async with working(app):
                await work.enqueue(0)
                await seen.wait()
                server.kill()
                await asyncio.to_thread(server.restart)
                led = await _leader(server, namespace)
                await work.enqueue(1)
                await seen.wait(2, 20)
                took = time.monotonic() - led
                report(f"consumption {took:.2f} s after the consumer has a leader")
        assert seen == [0, 1]
        lines = [r.getMessage() for r in caplog.records]
        assert lines == ["connection to NATS lost, reconnecting"]


async def test_worker_that_cannot_get_its_consumer_back_ends(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that stays away ends the worker with an error: never just deaf."""
    monkeypatch.setattr(pulling, "GIVE_UP_SECONDS", 0.5)

    @app.job
    async def work() -> None: ...

    async with app:
        broker = await broker_of(app)
        jobs = broker.names.jobs
        squatter = {"name": f"X{jobs}", "subjects": [f"{broker.names.namespace}.job.>"]}
        worker = Worker(app)
        task = asyncio.create_task(worker.run())
        await until(lambda: worker.pulling, 5, "a worker that pulls")

        async def squatted() -> bool:
            """Whether the subjects are taken; the worker may have made its stream again before."""
            with contextlib.suppress(NotFound):
                await broker.api(f"STREAM.DELETE.{jobs}")
            with contextlib.suppress(BrokerError):
                await broker.api(f"STREAM.CREATE.X{jobs}", squatter)
            return f"X{jobs}" in (await broker.api("STREAM.NAMES"))["streams"]

        await until(squatted, what="another stream with the subjects of the jobs")
        with contextlib.suppress(NotFound):  # the server may have accepted both at the same time
            await broker.api(f"STREAM.DELETE.{jobs}")
        with pytest.raises(BrokerError, match="could not be brought back"):
            await asyncio.wait_for(task, 60)
        await broker.api(f"STREAM.DELETE.X{jobs}")


async def test_worker_without_a_job_in_its_group_is_refused(app: Holdfast) -> None:
    """A group that no job belongs to is a mistake, and the answer names the groups there are."""

    @app.job(group="photos")
    async def work() -> None: ...

    with pytest.raises(ConfigError, match="its groups are photos"):
        Worker(app, WorkerConfig(group="photo"))


# ---- pausing


async def test_paused_consumer_stays_healthy_and_resumes(app: Holdfast, seen: Seen) -> None:
    """A pause stops deliveries without an alarm; a resume brings what was queued meanwhile."""

    @app.job
    async def work(n: int) -> None:
        seen.append(n)

    async with app, working(app) as worker:
        broker = await broker_of(app)
        topology = Topology(broker, RecordConfig())
        name = consumer("default", "work")
        await work.enqueue(0)
        await seen.wait()
        await topology.pause(broker.names.jobs, name)
        await work.enqueue(1)
        [pull] = worker.current._intake.pulls
        heard = pull._heard
        for _ in range(3):  # three signs of life later it is still healthy, and nothing has come
            await until(
                lambda heard=heard: pull._heard > heard, 5, "a heartbeat of the paused consumer"
            )
            heard = pull._heard
            assert pull.healthy
        assert seen == [0]
        await topology.resume(broker.names.jobs, name)
        await seen.wait(2)
        assert seen == [0, 1]


# ---- how much


async def test_all_consumers_ask_again_when_one_falls_silent(app: Holdfast) -> None:
    """With many jobs only some consumers have quick heartbeats: they watch for the others."""

    async def work(n: int) -> int:
        return n

    jobs = [app.job(name=f"job{n}")(work) for n in range(SENTINELS + 6)]
    async with working(app) as worker:
        node = worker.current
        assert node is not None
        pulls = node._intake.pulls
        await until(lambda: all(pull.outstanding for pull in pulls), 60, "requests")
        quick, slow = pulls[:SENTINELS], pulls[SENTINELS:]
        assert {pull.heartbeat for pull in quick} == {HEARTBEAT_SECONDS}
        assert {pull.heartbeat for pull in slow} == {SLOW_HEARTBEAT_SECONDS}
        now, before = node.broker.clock.monotonic, [pull._generation for pull in slow]
        await until(lambda: all(now() - pull._heard > HEARTBEAT_SECONDS for pull in slow))
        quick[0]._heard -= 60  # as if its server had died
        quick[0].wake()
        await until(lambda: [pull._generation for pull in slow] > before, 60, "new requests")
        assert [await (await job.enqueue(n)).result(60) for n, job in enumerate(jobs)] == list(
            range(len(jobs))
        )


async def test_concurrency_is_a_limit(app: Holdfast, seen: Seen) -> None:
    """Never more runs at a time than configured, and as many as that."""
    running = 0
    most = 0

    @app.job
    async def work(n: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        seen.append(n)

    async with working(app, concurrency=4):
        await work.enqueue_many(range(60))
        await seen.wait(60)
        assert most == 4


async def test_second_worker_gets_what_the_first_cannot_start(app: Holdfast, seen: Seen) -> None:
    """With long runs a worker takes only as many as it can execute: the rest goes elsewhere."""
    go = asyncio.Event()

    @app.job
    async def work(ctx: Context, n: int) -> None:
        seen.append((n, ctx.node))
        await go.wait()

    async with app, working(app, concurrency=2) as first:
        await work.enqueue_many(range(4))
        await seen.wait(2)
        async with working(app, concurrency=2) as second:
            await seen.wait(4)
            assert Counter(node for _, node in seen) == {first.node: 2, second.node: 2}
            go.set()


async def test_full_worker_does_not_keep_the_runs_of_another_job(app: Holdfast, seen: Seen) -> None:
    """A worker that is full with long runs of one job gives back what it took of another."""
    go = asyncio.Event()

    @app.job
    async def long(ctx: Context) -> None:
        seen.append(("long", ctx.node))
        await go.wait()

    @app.job
    async def short(ctx: Context, n: int) -> None:
        seen.append((n, ctx.node))

    async with app, working(app, concurrency=2) as first:
        await long.enqueue_many([long.request(), long.request()])
        await seen.wait(2)
        async with working(app, concurrency=2) as second:
            await short.enqueue_many(range(20))
            await seen.wait(22)
            assert {node for n, node in seen if n != "long"} == {second.node}
            assert sorted(n for n, _ in seen if n != "long") == list(range(20))
            go.set()
        assert {node for n, node in seen if n == "long"} == {first.node}


async def test_groups_do_not_take_each_others_runs(app: Holdfast, seen: Seen) -> None:
    """A worker of one group never executes a run of another."""

    @app.job(group="a")
    async def in_a(ctx: Context, n: int) -> None:
        seen.append(("a", ctx.group, ctx.node))

    @app.job(group="b")
    async def in_b(ctx: Context, n: int) -> None:
        seen.append(("b", ctx.group, ctx.node))

    async with app, working(app, group="a") as a:
        await in_a.enqueue_many(range(5))
        await in_b.enqueue_many(range(5))
        await seen.wait(5)
        assert set(seen) == {("a", "a", a.node)}
        assert (await _lag_of(app, "in_b")) is None
        async with working(app, group="b") as b:
            await seen.wait(10)
            assert set(seen[5:]) == {("b", "b", b.node)}


async def test_worker_ends_after_its_number_of_runs(app: Holdfast, seen: Seen) -> None:
    """`max_runs` drains a process after that many: the rest waits for its successor."""

    @app.job
    async def work(n: int) -> None:
        seen.append(n)

    async with app:
        await work.enqueue_many(range(30))
        worker = Worker(app, WorkerConfig(max_runs=10, concurrency=1))
        await asyncio.wait_for(worker.run(), 20)
        assert 10 <= len(seen) < 30
        async with working(app):
            await seen.wait(30)
            assert sorted(seen) == list(range(30))


# ---- health


async def test_ready_means_that_a_message_can_travel(namespace: str, tmp_path: Path) -> None:
    """Ready is 200 while messages travel, 503 while the consumer cannot be reached, 200 again."""
    with Server(fast=True) as server, own_app(server, namespace) as app:

        @app.job
        async def work() -> None: ...

        path = str(tmp_path / "health")
        async with working(app, health_path=path, canary_seconds=0.5):
            await until(lambda: _status(path, 200), 5, "ready")
            os.kill(server.pid, signal.SIGSTOP)  # connected, and deaf
            try:
                problems = await until(lambda: _status(path, 503), 10, "not ready")
                assert any("silent" in p or "travelled" in p for p in problems["problems"])
                assert (await _get(path, "/health/live"))[0] == 200
            finally:
                os.kill(server.pid, signal.SIGCONT)
            await until(lambda: _status(path, 200), 10, "ready again")
            server.kill()
            problems = await until(lambda: _status(path, 503), 10, "not ready")
            assert "not connected to NATS" in problems["problems"]
            await asyncio.to_thread(server.restart)
            await until(lambda: _status(path, 200), 10, "ready again")


async def test_idle_worker_stays_ready_by_its_canary(app: Holdfast, tmp_path: Path) -> None:
    """Without any runs the worker proves by its own messages that one could travel."""

    @app.job
    async def work() -> None: ...

    path = str(tmp_path / "health")
    async with working(app, health_path=path, canary_seconds=0.5) as worker:
        canary = worker.current.canary
        for _ in range(2):
            before = canary._arrived
            await until(lambda before=before: canary._arrived > before, 5, "a canary")
        assert await _status(path, 200)
        status, body = await _get(path, "/metrics")
        assert status == 200
        assert b"holdfast_canary_age_seconds" in body
        assert (await _get(path, "/nothing"))[0] == 404


# ---- the loop itself


@contextlib.asynccontextmanager
async def pulled(
    server: Server, namespace: str, want: Any
) -> AsyncIterator[tuple[Broker, Pull, list[Delivery]]]:
    """A pull of its own on a consumer of its own."""
    config = ConnectionConfig(nats_url=server.url, namespace=namespace)
    got: list[Delivery] = []
    async with Broker(config) as broker:
        topology = Topology(broker, RecordConfig())
        await topology.ensure()
        subject = broker.names.job("default", "raw")

        async def ensure() -> None:
            await topology.ensure_consumer(broker.names.jobs, "raw", subject, 5.0)

        pull = Pull(broker, broker.names.jobs, "raw", ensure=ensure, deliver=got.append, want=want)
        task = asyncio.create_task(pull.run())
        try:
            await until(lambda: pull.healthy, 5, "a pull that is heard")
            yield broker, pull, got
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_pull_asks_for_no_more_than_is_wanted(nats: Server, namespace: str) -> None:
    """What has come and what is asked for never exceed the room there is."""
    room = 3
    taken: list[Delivery] = []
    async with pulled(nats, namespace, lambda: room - len(taken)) as (broker, pull, got):
        taken = got
        for number in range(10):
            await broker.store(broker.names.job("default", "raw"), b"%d" % number)
        await until(lambda: len(got) == 3, 5, "what there is room for")
        assert pull.outstanding == 0
        room = 100
        pull.wake()
        await until(lambda: len(got) == 10, 5, "the rest")
        assert [d.body for d in got] == [b"%d" % n for n in range(10)]
        assert [d.deliveries for d in got] == [1] * 10
        sequences = [d.sequence for d in got]
        assert sequences == sorted(sequences)
        assert all(abs(d.stored - time.time()) < 60 for d in got)


async def test_pull_overlaps_its_requests(nats: Server, namespace: str) -> None:
    """The next request leaves while half of the last is still to come: no gap between batches."""
    async with pulled(nats, namespace, lambda: 10) as (broker, pull, got):
        least = pull.outstanding
        for number in range(200):
            await broker.store(broker.names.job("default", "raw"), b"%d" % number)
            least = min(least, pull.outstanding)
        await until(lambda: len(got) == 200, 5, "all of them")
        assert least > 0


async def test_delivery_can_be_given_back_and_extended(nats: Server, namespace: str) -> None:
    """A nak brings the message again at once or after its delay; an ack ends it."""
    async with pulled(nats, namespace, lambda: 5) as (broker, _, got):
        await broker.store(broker.names.job("default", "raw"), b"x")
        await until(lambda: len(got) == 1, 5, "the first delivery")
        await got[0].nak()
        await until(lambda: len(got) == 2, 5, "the second delivery")
        before = time.monotonic()
        await got[1].nak(0.3)
        await until(lambda: len(got) == 3, 5, "the third delivery")
        assert time.monotonic() - before >= 0.29
        assert [d.deliveries for d in got] == [1, 2, 3]
        await got[2].extend()
        await got[2].ack_confirmed()
        with pytest.raises(NotFound):
            await broker.api(f"STREAM.MSG.GET.{broker.names.jobs}", {"seq": got[0].sequence})


# ---- looking


async def _consumer_back(app: Holdfast, job: str) -> bool:
    try:
        await consumer_info(app, job)
    except NotFound:
        return False
    return True


async def _lag_of(app: Holdfast, job: str) -> int | None:
    try:
        return await lag(app, job)
    except NotFound:
        return None


async def _leader(server: Server, namespace: str) -> float:
    """When the consumer answers again."""
    config = ConnectionConfig(nats_url=server.url, namespace=namespace)
    async with Broker(config) as broker:

        async def answers() -> bool:
            name = consumer("default", "work")
            try:
                await broker.api(f"CONSUMER.INFO.{broker.names.jobs}.{name}")
            except BrokerError:
                return False
            return True

        await until(answers, 20, "a leader")
        return time.monotonic()


async def _get(path: str, url: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(f"GET {url} HTTP/1.1\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
        await writer.wait_closed()
    return int(head.split()[1]), body


async def _status(path: str, wanted: int) -> Any:
    status, body = await _get(path, "/health/ready")
    return json.loads(body) if status == wanted else None
