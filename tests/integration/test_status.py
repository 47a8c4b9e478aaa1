"""Runs and jobs as an operator sees them, and what an operator may do to them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Backoff, Context, Holdfast
from holdfast.broker import Bucket
from holdfast.client import Client
from holdfast.errors import (
    InvalidInput,
    InvalidName,
    NoRecord,
    NotFound,
    RunError,
    RunNotFound,
    UnknownJob,
)
from holdfast.model import node as nodes
from holdfast.model import run as runs
from holdfast.model.lifecycle import NodeState
from holdfast.model.node import NodeRecord
from holdfast.model.run import Restart, RunRecord
from holdfast.names import H_MSG_ID, H_RUN, parse_consumer
from holdfast.server import Server
from holdfast.status.actions import cancel_run, pause_job, purge_job, resume_job, retry_run
from holdfast.status.audit import Audit
from holdfast.status.dead import DeadLetters
from holdfast.status.jobs import JobInfo, Jobs
from holdfast.status.listing import RunFilter
from holdfast.status.messages import newest
from holdfast.status.operators import Operator
from holdfast.status.runs import Runs
from holdfast.status.trace import trace
from tests.integration.support import (
    Seen,
    consumer_info,
    operating,
    parked,
    queue_empty,
    raw,
    record_of,
    until,
    working,
)


class Shop:
    """An app with a job for each way that a run can go."""

    def __init__(self, app: Holdfast, seen: Seen) -> None:
        self.app = app
        self.gate = asyncio.Event()

        @app.job
        async def add(a: int, b: int) -> int:
            seen.append(("add", a))
            return a + b

        @app.job
        async def hold(ctx: Context, n: int) -> None:
            seen.append(("hold", ctx.run))
            await self.gate.wait()

        @app.job(retry=Backoff.list(["1h", "1h"]))
        async def flaky(ctx: Context, n: int) -> str:
            seen.append(("flaky", ctx.attempt))
            if ctx.attempt == 1:
                raise ValueError("not yet")
            return "at last"

        @app.job(retry=Backoff.never())
        async def bad() -> None:
            raise KeyError("x")

        @app.job
        async def source(ctx: Context) -> None:
            await ctx.publish("made", {"n": 1})

        @app.job(on="made")
        async def sink(data: dict[str, Any]) -> None:
            seen.append(("sink", data))

        self.add, self.hold, self.flaky = add, hold, flaky
        self.bad, self.source, self.sink = bad, source, sink


@pytest.fixture
def shop(app: Holdfast, seen: Seen) -> Shop:
    return Shop(app, seen)


async def in_state(app: Holdfast, run: str, state: str) -> RunRecord:
    """A run's record once it is in a state."""

    async def there() -> RunRecord | None:
        record = await record_of(app, run)
        return record if record and record.state == state else None

    record: RunRecord = await until(there, 10, f"{run} being {state}")
    return record


# ---- listing


async def test_runs_are_listed_wherever_they_are(app: Holdfast, shop: Shop, seen: Seen) -> None:
    """Queued, delayed, running, failed, done and dead runs are in one list, newest first."""
    async with operating(app) as client:
        operator = Runs(client)
        async with working(app):
            done = await shop.add.options(key="k 1").enqueue(1, 2)
            await done.result(60)
            dead = await shop.bad.enqueue()
            await in_state(app, dead.id, "dead")
            failed = await shop.flaky.enqueue(1)
            await in_state(app, failed.id, "failed")
            running = await shop.hold.enqueue(1)
            await in_state(app, running.id, "running")
            await Jobs(client).pause("add")
            queued = await shop.add.enqueue(3, 4)
            delayed = await shop.add.options(delay="1h").enqueue(5, 6)
            found = await operator.list()
            order = [(i.run, i.state) for i in found]
            assert order == [
                (delayed.id, "delayed"),
                (queued.id, "queued"),
                (running.id, "running"),
                (failed.id, "failed"),
                (dead.id, "dead"),
                (done.id, "done"),
            ]
            assert found[0].due > found[0].created + 3000
            assert found[3].due > found[3].created + 3000
            assert [i.run for i in await operator.list(limit=2)] == [delayed.id, queued.id]
            for state in ("delayed", "queued", "running", "failed", "dead", "done"):
                assert [i.state for i in await operator.list(RunFilter(state=state))] == [state]
            assert len(await operator.list(RunFilter(job="add"))) == 3
            assert [i.run for i in await operator.list(RunFilter(prefix="k "))] == [done.id]
            assert [i.run for i in await operator.list(RunFilter(prefix=dead.id))] == [dead.id]
            node = found[2].node
            assert [i.run for i in await operator.list(RunFilter(node=node))] == [running.id]
            since = RunFilter(since=found[2].updated)
            assert {i.run for i in await operator.list(since)} == {
                delayed.id,
                queued.id,
                running.id,
            }
            shop.gate.set()


async def test_filter_with_a_wrong_word_is_refused() -> None:
    """A state that does not exist, or a name with a wildcard, is an error and not an empty list."""
    with pytest.raises(InvalidInput, match="not a state"):
        RunFilter(state="finished")
    with pytest.raises(InvalidName):
        RunFilter(job="*")


async def test_newest_walks_a_long_and_sparse_stream(app: Holdfast) -> None:
    """Each message once, newest first, however the sequence numbers are spread."""
    async with operating(app) as client:
        broker, names = client.broker, client.broker.names
        wanted = names.event("wanted")
        sent = 0
        for burst, gap in ((3, 0), (1, 3_000), (1_500, 0), (2, 1_200)):
            noise = [await broker.send(names.event("noise"), b"") for _ in range(gap)]
            await asyncio.gather(*noise)
            for _ in range(burst):
                sent += 1
                last = await broker.send(wanted, b"%d" % sent)
            await last
        found = [int(kept.body) async for kept in newest(broker, names.events, wanted)]
        assert found == list(range(sent, 0, -1))
        every = [kept.sequence async for kept in newest(broker, names.events, names.event(">"))]
        assert every == list(range(every[0], every[0] - len(every), -1))
        assert len(every) == sent + 4_200


async def test_plain_publish_is_listed_under_the_id_it_will_have(
    app: Holdfast, nats: Server, shop: Shop
) -> None:
    """A message without any header has the same run id in the queue and in its record."""
    async with operating(app) as client, raw(nats) as (_, js):
        subject = client.broker.names.job("default", "add")
        await js.publish(subject, b'{"a": 1, "b": 2}')
        await js.publish(subject, b'{"a": 2, "b": 2}', headers={H_MSG_ID: "any text at all"})
        queued = await Runs(client).list()
        assert {i.state for i in queued} == {"queued"}
        detail = await Runs(client).show(queued[-1].run)
        assert detail.where.startswith("in the queue of add")
        async with working(app):
            for info in queued:
                assert (await in_state(app, info.run, "done")).job == "add"


async def test_run_that_left_no_trace_is_said_to_be_unknown(app: Holdfast) -> None:
    """An id that nothing knows raises `RunNotFound`; one that cannot be an id is refused."""
    async with operating(app) as client:
        for run in ("r1x", "add/42", "g/add/42", "s12-abc"):
            with pytest.raises(RunNotFound, match="no trace"):
                await Runs(client).show(run)
        with pytest.raises(InvalidName):
            await Runs(client).show("a.b.*")


async def test_show_says_where_a_run_is(app: Holdfast, shop: Shop, seen: Seen) -> None:
    """Running where, put off until when, ended when, or which dead letter."""
    async with operating(app) as client, working(app) as worker:
        operator = Runs(client)
        running = await shop.hold.enqueue(1)
        await seen.wait(1)
        assert (
            await operator.show(running.id)
        ).where == f"running on {worker.node}, which is alive"
        delayed = await shop.add.options(delay="1h").enqueue(1, 1)
        assert (await operator.show(delayed.id)).where.startswith("delayed until")
        failed = await shop.flaky.enqueue(1)
        await in_state(app, failed.id, "failed")
        assert (await operator.show(failed.id)).where.startswith("delayed until")
        dead = await shop.bad.enqueue()
        await in_state(app, dead.id, "dead")
        detail = await operator.show(dead.id)
        assert detail.where.startswith(f"dead letter {detail.dead_letter}")
        shop.gate.set()
        await running.result(60)
        assert (await operator.show(running.id)).where.startswith("ended")


async def test_show_says_that_the_holder_of_a_run_is_gone(app: Holdfast) -> None:
    """A node's record outlives the node: its state counts, and what follows from it."""
    async with operating(app) as client:
        bucket = Bucket(client.broker, client.broker.names.nodes)
        cases: list[tuple[Restart, NodeState, str]] = [
            ("immediately", "INACTIVE", "INACTIVE: another worker takes the run over"),
            ("after_grace", "DISCONNECTED", "DISCONNECTED: another worker takes the run over when"),
            ("never", "NOT_RUNNING", "NOT_RUNNING: the run is recorded as lost"),
            ("immediately", "TERMINATING", "alive (TERMINATING)"),
        ]
        for number, (restart, state, said) in enumerate(cases):
            node = NodeRecord(f"n{number}", "worker", state=state)
            await bucket.put(node.id, nodes.encode(node), expected=0)
            held = RunRecord("running", "default", "add", node=node.id, restart=restart)
            await client.runs.put(f"r{number}", runs.encode(held), expected=0)
            where = (await Runs(client).show(f"r{number}")).where
            assert where.startswith(f"running on {node.id}, which is {said}"), where


async def test_bytes_that_are_no_record_are_passed_over(app: Holdfast) -> None:
    """What somebody else put into the bucket neither breaks a list nor shows up in it."""
    async with operating(app) as client:
        await client.runs.put("r1", b"\xff not a record", expected=0)
        good = RunRecord("done", "default", "add", created=1.0)
        await client.runs.put("r2", runs.encode(good), expected=0)
        assert [i.run for i in await Runs(client).list()] == ["r2"]


# ---- cancelling and retrying


async def test_cancel_reaches_a_run_by_its_id_alone(app: Holdfast, shop: Shop, seen: Seen) -> None:
    """Queued, delayed, waiting and running runs are cancelled; ended ones are not."""
    async with operating(app) as client:
        operator = Operator(client)
        queued = await shop.add.enqueue(1, 1)
        assert await cancel_run(operator, queued.id)
        assert await queue_empty(app)
        delayed = await shop.add.options(delay="1h").enqueue(1, 1)
        assert await cancel_run(operator, delayed.id)
        async with working(app):
            failed = await shop.flaky.enqueue(1)
            await in_state(app, failed.id, "failed")
            assert await cancel_run(operator, failed.id)
            running = await shop.hold.enqueue(1)
            await until(lambda: ("hold", running.id) in seen, 10, "the handler")
            assert await cancel_run(operator, running.id)
            done = await shop.add.enqueue(2, 2)
            await done.result(60)
            assert not await cancel_run(operator, done.id)
            dead = await shop.bad.enqueue()
            await in_state(app, dead.id, "dead")
            assert not await cancel_run(operator, dead.id)
        assert await parked(app) == []
        for run in (queued, delayed, failed, running):
            await in_state(app, run.id, "cancelled")
        verbs = [a.verb for a in await Audit(client).actions()]
        assert verbs == ["cancel"] * 4
    assert ("add", 1) not in seen


async def test_cancel_of_a_queued_run_without_records_takes_its_message(
    app: Holdfast, seen: Seen
) -> None:
    """A job that keeps no records never looks at one: its queued run goes with its message."""

    @app.job(delivery="at_least_once")
    async def light(n: int) -> None:
        seen.append(n)

    async with operating(app) as client:
        first = await light.enqueue(1)
        await light.enqueue(2)
        assert await Runs(client).cancel(first.id)
        async with working(app):
            await seen.wait(1)
            await until(lambda: queue_empty(app), 10, "an empty queue")
    assert seen == [2]


async def test_cancel_of_a_run_in_flight_without_records_is_refused(
    app: Holdfast, seen: Seen
) -> None:
    """What nobody could stop is not called cancelled: the run goes on and no record is made."""
    gate = asyncio.Event()

    @app.job(delivery="at_least_once")
    async def light(n: int) -> None:
        seen.append(n)
        await gate.wait()
        seen.append("ended")

    async with operating(app) as client, working(app):
        run = await light.enqueue(1)
        await seen.wait(1)
        with pytest.raises(NoRecord, match="at_least_once"):
            await Runs(client).cancel(run.id)
        assert await record_of(app, run.id) is None
        gate.set()
        await seen.wait(2)


async def test_retry_starts_the_next_attempt_now(app: Holdfast, shop: Shop, seen: Seen) -> None:
    """A failed run that waits an hour is tried at once, as its second attempt, and only once."""
    async with operating(app) as client, working(app):
        run = await shop.flaky.enqueue(1)
        before = await in_state(app, run.id, "failed")
        assert len(await parked(app)) == 1
        operators = [Runs(client) for _ in range(4)]
        told = await asyncio.gather(*(o.retry(run.id) for o in operators), return_exceptions=True)
        assert any("starts now" in str(t) for t in told)
        assert await run.result(60) == "at last"
        assert await parked(app) == []
        await until(lambda: queue_empty(app), 10, "an empty queue")
        after = await in_state(app, run.id, "done")
    assert seen == [("flaky", 1), ("flaky", 2)]
    assert after.created == before.created


async def test_retry_of_a_dead_run_replays_its_letter(app: Holdfast, shop: Shop) -> None:
    """A dead run goes out again and may die again, with a new letter."""
    async with operating(app) as client, working(app):
        run = await shop.bad.enqueue()
        await in_state(app, run.id, "dead")
        first = (await DeadLetters(client).list())[0]
        assert "sent again" in await retry_run(Operator(client), run.id)

        async def died_again() -> bool:
            letters = await DeadLetters(client).list()
            return bool(letters) and letters[0].attempt == first.attempt + 1

        await until(died_again, 10, "a second letter")
        assert [a.verb for a in await Audit(client).actions(run.id)] == ["retry"]


async def test_retry_refuses_with_a_reason(app: Holdfast, shop: Shop, seen: Seen) -> None:
    """Running and queued runs are refused; what has ended is sent once more, as a new run."""
    async with operating(app) as client, working(app):
        operator = Runs(client)
        done = await shop.add.enqueue(1, 1)
        await done.result(60)
        running = await shop.hold.enqueue(1)
        await until(lambda: ("hold", running.id) in seen, 10, "the handler")
        delayed = await shop.add.options(delay="1h").enqueue(1, 1)
        dead = await shop.bad.enqueue()
        await in_state(app, dead.id, "dead")
        await DeadLetters(client).drop([letter.id for letter in await DeadLetters(client).list()])
        for run, reason in (
            (running, "is running on"),
            (delayed, "has not run yet"),
        ):
            with pytest.raises(RunError, match=reason):
                await operator.retry(run.id)
        await operator.cancel(delayed.id)
        for run in (done, dead, delayed):
            assert "sent again, as run r" in await operator.retry(run.id)
        shop.gate.set()


# ---- tracing


async def test_trace_tells_attempts_events_and_consequences(
    app: Holdfast, shop: Shop, seen: Seen
) -> None:
    """The story is in order, and reaches from the acceptance to the runs that it caused."""
    async with operating(app) as client, working(app) as worker:
        run = await shop.source.enqueue()
        await run.result(60)
        await until(lambda: any(s[0] == "sink" for s in seen), 10, "the subscriber")
        await until(lambda: queue_empty(app), 10, "an empty queue")
        story = await trace(client, run.id)
        kinds = [step.what for step in story.steps]
        assert kinds[:2] == ["accepted", "started"]
        assert {"event", "caused", "ended", "done"} == set(kinds[2:])
        assert [s.at for s in story.steps] == sorted(s.at for s in story.steps)
        started = story.steps[1]
        assert (started.node, started.attempt) == (worker.node, 1)
        assert started.epoch > 0
        caused = next(s for s in story.steps if s.what == "caused")
        below = await trace(client, caused.run)
        assert (below.job, below.cause) == ("sink", run.id)


async def test_trace_tells_failure_replay_and_operator(app: Holdfast, shop: Shop) -> None:
    """Every failed attempt with its error, the dead letter, and who sent it again."""
    async with operating(app) as client, working(app):
        run = await shop.bad.enqueue()
        await in_state(app, run.id, "dead")
        before = await trace(client, run.id)
        ended = next(s for s in before.steps if s.what == "ended")
        assert (ended.outcome, ended.error) == ("failed", "KeyError: 'x'")
        assert [s.what for s in before.steps if s.what in ("dead letter", "dead")]
        await retry_run(Operator(client), run.id)

        async def twice() -> bool:
            record = await record_of(app, run.id)
            return record is not None and record.state == "dead" and len(record.attempts) == 2

        await until(twice, 10, "a second death")
        after = await trace(client, run.id)
        assert [s.what for s in after.steps].count("ended") == 2
        assert any(s.what == "operator" and "retry" in s.detail for s in after.steps)
        await client.runs.delete(run.id)
        left = await trace(client, run.id)
        assert left.state == "dead"
        assert any(s.what == "dead letter" for s in left.steps)


# ---- jobs


async def job_info(client: Client, job: str) -> JobInfo:
    found = await Jobs(client).list(job)
    assert len(found) == 1
    return found[0]


async def test_jobs_list_counts_what_the_server_holds(
    app: Holdfast, shop: Shop, seen: Seen
) -> None:
    """Waiting, in flight, parked and dead, with the age of the oldest, for every known job."""
    async with operating(app) as client:
        await shop.add.enqueue(1, 1)
        unserved = await job_info(client, "add")
        assert (unserved.served, unserved.waiting) == (False, 1)
        async with working(app):
            await until(lambda: queue_empty(app), 10, "an empty queue")
            await shop.bad.enqueue()
            await shop.hold.enqueue(1)
            await shop.add.options(delay="1h").enqueue(1, 1)
            await until(lambda: DeadLetters(client).list(), 10, "a dead letter")
            await until(lambda: any(s[0] == "hold" for s in seen), 10, "the handler")
            await Jobs(client).pause("add")
            await shop.add.enqueue(2, 2)

            async def counted() -> bool:
                return (await job_info(client, "add")).waiting == 1

            await until(counted, 10, "the run in the consumer's count")
            info = await job_info(client, "add")
            assert (info.waiting, info.in_flight, info.parked, info.paused) == (1, 0, 1, True)
            assert info.oldest_seconds is not None
            assert info.oldest_seconds >= 0
            assert (await job_info(client, "hold")).in_flight == 1
            assert (await job_info(client, "bad")).dead == 1
            assert [e.event for e in (await job_info(client, "sink")).events] == ["made"]
            known = {i.job for i in await Jobs(client).list(group="default")}
            assert known == {"add", "hold", "flaky", "bad", "source", "sink"}
            shop.gate.set()


async def test_pause_holds_a_job_and_its_events_until_resumed(
    app: Holdfast, shop: Shop, seen: Seen
) -> None:
    """Nothing is delivered while paused, neither runs nor events; then all of it."""
    async with operating(app) as client, working(app):
        operator = Operator(client)
        paused = await pause_job(operator, "sink")
        assert [(i.job, i.paused) for i in paused] == [("sink", True)]
        assert (await consumer_info(app, "sink", "made"))["paused"]
        await shop.sink.enqueue({"n": 0})
        await (await shop.source.enqueue()).result(60)
        await until(lambda: shop_waiting(client), 10, "both to wait")
        assert seen == []
        await resume_job(operator, group="default")
        await seen.wait(2)
        assert not (await job_info(client, "sink")).paused
        assert [(a.verb, a.job, a.group) for a in await Audit(client).actions()] == [
            ("resume", "", "default"),
            ("pause", "sink", ""),
        ]


async def test_pause_outlives_the_consumers_of_its_job(
    app: Holdfast, shop: Shop, seen: Seen
) -> None:
    """Deleted under a worker, or while none was there: they are made anew, and paused."""

    async def made_anew() -> bool:
        try:
            return all([(await consumer_info(app, "sink", e))["paused"] for e in ("", "made")])
        except NotFound:
            return False

    async with operating(app) as client:
        jobs = Jobs(client)
        async with working(app):
            await jobs.pause("sink")
            await delete_consumers(client, "sink")
            await until(made_anew, 10, "paused consumers")
            await shop.sink.enqueue({"n": 0})
        await delete_consumers(client, "sink")
        assert (await job_info(client, "sink")).paused
        async with working(app):
            await until(made_anew, 10, "paused consumers")
            await (await shop.source.enqueue()).result(60)
            await until(lambda: shop_waiting(client), 10, "both to wait")
            assert seen == []
            await jobs.resume("sink")
            await seen.wait(2)
            await delete_consumers(client, "sink")
            await shop.sink.enqueue({"n": 1})
            await seen.wait(3)


async def test_job_that_was_resumed_is_not_paused_again(app: Holdfast, shop: Shop) -> None:
    """A scheduler that has not heard of it yet takes its own pause back."""
    async with operating(app) as client, working(app):
        jobs = Jobs(client)
        await jobs.pause("sink")
        await jobs.resume("sink")
        await jobs.pause_again({("default", "sink")})
        assert not (await job_info(client, "sink")).paused


async def delete_consumers(client: Client, job: str) -> None:
    """As somebody would by hand."""
    for stream in (client.broker.names.jobs, client.broker.names.events):
        for info in await client.topology.consumers(stream):
            if parse_consumer(info["name"]) == ("default", job):
                await client.broker.api(f"CONSUMER.DELETE.{stream}.{info['name']}")


async def shop_waiting(client: Client) -> bool:
    return (await job_info(client, "sink")).waiting == 2


async def test_unknown_job_or_group_is_refused_with_the_known_ones(
    app: Holdfast, shop: Shop
) -> None:
    """Pausing or purging what does not exist names what does."""
    async with operating(app) as client, working(app):
        jobs = Jobs(client)
        for act in (jobs.pause, jobs.resume, jobs.purge):
            with pytest.raises(UnknownJob, match=r"known are .*default/add"):
                await act("nope")
            with pytest.raises(UnknownJob, match="group 'nope'"):
                await act(group="nope")
            with pytest.raises(InvalidInput, match="name a job"):
                await act()


async def test_purge_removes_what_waits_and_leaves_what_runs(
    app: Holdfast, shop: Shop, seen: Seen
) -> None:
    """Runs in flight go on, also when their worker has to be asked twice; the rest is gone."""
    async with operating(app) as client:
        async with working(app, concurrency=1):
            held = await shop.hold.enqueue(0)
            await seen.wait(1)
            await Jobs(client).pause("hold")
            for n in range(1, 6):
                await shop.hold.enqueue(n)
            done = await Jobs(client).purge("hold", which="waiting")
            assert [(p.job, p.waiting, p.parked) for p in done] == [("hold", 5, 0)]
            info = await job_info(client, "hold")
            assert (info.waiting, info.in_flight, info.paused) == (0, 1, True)
            await Jobs(client).resume("hold")
            shop.gate.set()
            await held.result(60)
        assert await queue_empty(app)
    assert seen == [("hold", held.id)]


async def test_purge_of_parked_runs_ends_their_records(
    app: Holdfast, shop: Shop, seen: Seen
) -> None:
    """A purged retry leaves a cancelled record that expires, not one that waits for ever."""
    async with operating(app) as client, working(app):
        failed = await shop.flaky.enqueue(1)
        await in_state(app, failed.id, "failed")
        delayed = await shop.flaky.options(delay="1h").enqueue(2)
        done = await Jobs(client).purge(group="default", which="parked")
        assert {p.job: p.parked for p in done}["flaky"] == 2
        assert await parked(app) == []
        record = await in_state(app, failed.id, "cancelled")
        assert record.error == "purged"
        with pytest.raises(RunNotFound):
            await Runs(client).show(delayed.id)


async def test_purge_without_a_worker_takes_the_whole_queue(app: Holdfast, shop: Shop) -> None:
    """Before any worker there is no consumer to ask: all that is there goes, and is counted."""
    async with operating(app) as client:
        await shop.add.enqueue_many([shop.add.request(n, 1) for n in range(250)])
        done = await purge_job(Operator(client), "add")
        assert [(p.waiting, p.parked) for p in done] == [(250, 0)]
        assert await queue_empty(app)
        action = (await Audit(client).actions())[0]
        assert (action.verb, action.job, action.count) == ("purge", "add", 250)


async def test_purge_ends_the_record_of_a_run_sent_again(app: Holdfast, shop: Shop) -> None:
    """A replayed run that is purged before a worker saw it does not wait for ever either."""
    async with operating(app) as client:
        async with working(app):
            run = await shop.bad.enqueue()
            await in_state(app, run.id, "dead")
        await Runs(client).retry(run.id)
        assert (await in_state(app, run.id, "failed")).message == 2
        done = await Jobs(client).purge("bad")
        assert done[0].waiting == 1
        await in_state(app, run.id, "cancelled")


async def test_job_in_two_groups_must_be_named_with_its_group(app: Holdfast) -> None:
    """A name that means two jobs is not guessed."""
    async with operating(app) as client:
        for group in ("a", "b"):
            await client.broker.store(client.broker.names.job(group, "same"), b"1", {H_RUN: group})
        with pytest.raises(InvalidInput, match="several groups"):
            await Jobs(client).purge("same")
        done = await Jobs(client).purge("same", "a")
        assert [(p.group, p.waiting) for p in done] == [("a", 1)]
        assert [(i.group, i.waiting) for i in await Jobs(client).list()] == [("b", 1)]
