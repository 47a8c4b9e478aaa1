"""Flows on a real server: they survive their processes, and nothing of them is lost."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest

from holdfast import Backoff, Flow, Holdfast, Limit, current_step
from holdfast.broker.kv import direct_batch
from holdfast.errors import NotFound, OutcomeUnknown, RunCancelled, RunFailed
from holdfast.model.journal import FlowJournal, Parent, children_of
from holdfast.model.run import RunRecord, decode, encode
from holdfast.ownership.claims import Claims
from holdfast.ownership.journals import NatsJournals
from holdfast.status import flows
from tests.integration.support import HURRIED, broker_of, until, working


async def journal_of(app: Holdfast, run: str) -> FlowJournal:
    """A flow's journal as it is stored."""
    backend: Any = await app.backend()
    found: FlowJournal = await backend.journals.load(run)
    return found


async def is_parked(run: Any) -> bool:
    """Whether a flow waits."""
    return bool((await run.status()).state == "parked")


async def test_steps_sleep_and_children_end_in_the_result(app: Holdfast) -> None:
    """A whole flow; its journal is one message afterwards."""
    effects: list[str] = []

    @app.job
    async def square(n: int) -> int:
        return n * n

    @app.flow
    async def story(ctx: Flow, n: int) -> list[int]:
        await ctx.step(effects.append, "first", name="first")
        await ctx.sleep(1.5)
        found = await ctx.gather(square.request(i) for i in range(n))
        await ctx.step(effects.append, "last", name="last")
        return [*found, await ctx.call(square.request(9))]

    async with working(app):
        run = await story.enqueue(5)
        assert await run.result(timeout=20) == [0, 1, 4, 9, 16, 81]
        assert effects == ["first", "last"]
        journal = await journal_of(app, run.id)
        assert journal.end is not None
        kinds = [line.kind for line in journal.story()]
        assert kinds == ["step", "sleep", "gather", "step", "gather"]
        broker = await broker_of(app)
        subject = broker.names.flow(run.id)
        stored = [m async for m in direct_batch(broker, broker.names.flows, subject)]
        assert len(stored) == 1


async def test_event_wakes_a_flow_by_plain_publish_too(app: Holdfast) -> None:
    """Events before and after the wait, from the app and from any NATS client."""

    @app.flow
    async def approve(ctx: Flow, order: str) -> list[Any]:
        first = await ctx.event("order.approved", key=order, timeout="1m")
        second = await ctx.event("order.approved", key=order, timeout="1m")
        return [first and [first.data, first.by], second and second.data]

    async with working(app):
        run = await approve.enqueue("o 1")
        await app.publish("order.approved", {"n": 1}, key="o 1", by="ann")
        await until(lambda: is_parked(run))
        broker = await broker_of(app)
        await broker.store(broker.names.signal("order.approved", "o 1"), b'{"n": 2}')
        assert await run.result(timeout=20) == [[{"n": 1}, "ann"], {"n": 2}]


async def test_events_of_other_clients_are_removed_when_they_are_old(app: Holdfast) -> None:
    """Without a TTL only what is older than the given instant goes; journals and waits stay."""
    async with app:
        broker = await broker_of(app)
        client: Any = await app.backend()
        await client.topology.ensure()
        names, journals = broker.names, client.journals
        kept = await broker.store(names.signal_wait("approved", "o1", "r1"), b"x")
        old = await broker.store(names.signal("approved", "o1"), b"1")
        between = broker.server_now() + 0.1
        await until(lambda: _later_than(broker, between))
        await broker.store(names.signal("approved", "o2"), b"2")
        await journals.forget_events(between)
        assert await journals.newest("approved", "o1") is None
        assert (await journals.newest("approved", "o2")).body == b"2"
        await journals.forget_events(broker.server_now() + 60.0)
        assert await journals.newest("approved", "o2") is None
        info = await broker.api(f"STREAM.INFO.{names.flows}", {})
        assert (info["state"]["messages"], info["state"]["first_seq"]) == (1, kept.seq)
        assert old.seq > kept.seq


async def _later_than(broker: Any, instant: float) -> bool:
    return bool(broker.server_now() > instant + 0.1)


async def test_event_that_does_not_come_times_out(app: Holdfast) -> None:
    """None after the timeout."""

    @app.flow
    async def wait(ctx: Flow) -> bool:
        return await ctx.event("never", key="k", timeout=1.2) is None

    async with working(app):
        assert await (await wait.enqueue()).result(timeout=20)


async def test_parked_flow_is_cancelled_with_its_children_and_undone(app: Holdfast) -> None:
    """Cancellation reaches children of every kind and compensates in reverse order."""
    effects: list[str] = []

    @app.job
    async def slow() -> None:
        await asyncio.sleep(60)

    @app.flow
    async def inner(ctx: Flow) -> None:
        ctx.undo(effects.append, "inner")
        await ctx.sleep("1h")

    @app.flow
    async def outer(ctx: Flow) -> None:
        ctx.undo(effects.append, "first")
        await ctx.step(len, "x")
        ctx.undo(effects.append, "second")
        await ctx.gather([slow.request(), inner.request(), slow.options(delay="1h").request()])

    async with working(app):
        run = await outer.enqueue()
        await until(lambda: is_parked(run))
        await asyncio.sleep(0.3)
        assert await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result(timeout=5)
        assert effects == ["inner", "second", "first"]
        assert {r.state for r in await app.runs() if r.id != run.id} == {"cancelled"}


async def test_running_flow_is_cancelled_and_undone(app: Holdfast) -> None:
    """A step that runs is stopped."""
    effects: list[str] = []
    began = asyncio.Event()

    async def endless() -> None:
        began.set()
        await asyncio.sleep(60)

    @app.flow
    async def busy(ctx: Flow) -> None:
        ctx.undo(effects.append, "undone")
        await ctx.step(endless)

    async with working(app):
        run = await busy.enqueue()
        await began.wait()
        assert await run.cancel()
        assert effects == ["undone"]


async def test_every_end_of_a_child_is_told(app: Holdfast) -> None:
    """Done, dead, cancelled by somebody, dropped by a limit."""

    @app.job(retry=Backoff.never())
    async def bad() -> None:
        raise ValueError("bad")

    @app.job
    async def waits() -> None:
        await asyncio.sleep(60)

    @app.job(limits=[Limit(running=1, when_full="drop")])
    async def narrow() -> None:
        await asyncio.sleep(1)

    @app.flow
    async def all_kinds(ctx: Flow) -> list[str]:
        jobs = [bad.request(), waits.options(delay="1h").request(), waits.request()]
        jobs += [narrow.request(), narrow.request()]
        ends = await ctx.gather(jobs, settled=True)
        return sorted(end.state for end in ends)

    async with working(app):
        run = await all_kinds.enqueue()
        await until(lambda: is_parked(run))

        async def cancelled() -> bool:
            left = [r for r in await app.runs(job="waits") if r.state in ("running", "delayed")]
            if len(left) < 2:
                return False
            for one in left:
                await one.cancel()
            return True

        await until(cancelled)
        expected = ["cancelled", "cancelled", "cancelled", "dead", "done"]
        assert await run.result(timeout=20) == expected


async def test_limited_flow_gives_its_place_back_while_it_waits(app: Holdfast) -> None:
    """Children under the same limit cannot be blocked by their parent."""
    shared = app.limit("shared", running=1)

    @app.job(limits=[shared])
    async def child(n: int) -> int:
        return n

    @app.flow(limits=[shared])
    async def parent(ctx: Flow, n: int) -> int:
        return sum(await ctx.gather(child.request(i) for i in range(n)))

    async with working(app):
        runs = [await parent.enqueue(4) for _ in range(3)]
        assert [await run.result(timeout=30) for run in runs] == [6, 6, 6]


async def test_parents_cannot_deadlock_their_children(app: Holdfast) -> None:
    """Two parents with one place in the worker."""

    @app.job
    async def child(n: int) -> int:
        return n

    @app.flow
    async def parent(ctx: Flow, n: int) -> int:
        return await ctx.call(child.request(n))

    async with working(app, concurrency=1):
        runs = [await parent.enqueue(i) for i in range(4)]
        assert [await run.result(timeout=20) for run in runs] == [0, 1, 2, 3]


async def test_flow_that_a_dead_worker_held_goes_on_from_its_journal(app: Holdfast) -> None:
    """A worker that vanishes in a step: another one repeats that step only, with a higher epoch."""
    seen: list[tuple[str, int]] = []
    hang = asyncio.Event()

    async def effect(name: str) -> str:
        seen.append((name, current_step().epoch))
        if name == "b" and len(seen) == 2:
            hang.set()
            await asyncio.sleep(3600)
        return name

    @app.flow
    async def three(ctx: Flow) -> list[str]:
        return [await ctx.step(effect, name, name=name) for name in "abc"]

    async with working(app, grace_seconds=0.01, **HURRIED):
        run = await three.enqueue()
        await hang.wait()
    async with working(app):
        assert await app.run(run.id).result(timeout=20) == ["a", "b", "c"]
    assert [name for name, _ in seen] == ["a", "b", "b", "c"]
    assert seen[1][1] < seen[2][1]


async def test_end_in_the_journal_is_settled_by_the_next_worker(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that vanishes between the journal's end and the record: nothing runs again."""
    seen: list[str] = []
    ended = asyncio.Event()
    settle = Claims.settle

    async def vanish(self: Claims, claim: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        if state == "done" and not ended.is_set():
            ended.set()
            await asyncio.sleep(3600)
        await settle(self, claim, state, *args, **kwargs)

    async def effect(name: str) -> str:
        seen.append(name)
        return name

    @app.flow
    async def two(ctx: Flow) -> list[str]:
        return [await ctx.step(effect, name, name=name) for name in "ab"]

    monkeypatch.setattr(Claims, "settle", vanish)
    async with working(app, grace_seconds=0.01, **HURRIED):
        run = await two.enqueue()
        await ended.wait()
        assert (await journal_of(app, run.id)).end is not None
    async with working(app):
        assert await app.run(run.id).result(timeout=40) == ["a", "b"]
        backend: Any = await app.backend()
        line = await backend.history.find(run.id)
    assert line.record.state == "done"
    assert seen == ["a", "b"]


async def test_failed_flow_is_a_dead_letter_and_a_replay_starts_it_again(app: Holdfast) -> None:
    """The letter has the payload, also if the flow failed after it had been parked."""
    fails = True

    @app.flow
    async def fragile(ctx: Flow, n: int) -> int:
        await ctx.sleep(1.2)
        if fails:
            raise ValueError("broken")
        return n

    async with working(app):
        run = await fragile.enqueue(7)
        with pytest.raises(RunFailed, match="broken"):
            await run.result(timeout=20)
        fails = False
        await run.retry()
        assert await run.result(timeout=20) == 7


async def test_large_input_and_results_pass_through(app: Holdfast) -> None:
    """A payload near the server's limit, and results above what a record holds."""
    text = "x" * 900_000

    def grow(n: int) -> str:
        return "y" * n

    @app.job
    async def big() -> str:
        return "z" * 600_000

    @app.flow
    async def heavy(ctx: Flow, data: str) -> int:
        first = await ctx.step(grow, 700_000)
        await ctx.sleep(1.2)
        second = await ctx.call(big.request())
        return len(data) + len(first) + len(second)

    async with working(app):
        assert await (await heavy.enqueue(text)).result(timeout=30) == 2_200_000


async def test_damaged_journal_stops_the_flow_and_loses_nothing(app: Holdfast) -> None:
    """It says which message cannot be read; without it the flow continues."""

    @app.flow
    async def victim(ctx: Flow) -> str:
        await ctx.event("go", key="k")
        return "done"

    async with working(app):
        run = await victim.enqueue()
        await until(lambda: is_parked(run))
        broker = await broker_of(app)
        names = broker.names
        bad = await broker.store(names.flow(run.id), b"{")
        await app.publish("go", key="k")

        async def is_stopped() -> bool:
            return "cannot be read" in (await run.status()).error

        await until(is_stopped)
        await broker.api(f"STREAM.MSG.DELETE.{names.flows}", {"seq": bad.seq})
        assert await run.result(timeout=30) == "done"


async def test_repair_wakes_a_flow_whose_wake_was_deleted(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored wake that somebody purged: the doctor lists the flow, and the repair wakes it."""
    monkeypatch.setattr(flows, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(flows, "LATE_SECONDS", 0.0)

    @app.flow
    async def sleeper(ctx: Flow) -> str:
        await ctx.sleep(1.5)
        return "awake"

    async with working(app):
        run = await sleeper.enqueue()
        await until(lambda: is_parked(run))
        client: Any = await app.backend()
        names = client.broker.names
        await client.topology.purge(names.jobs, names.later("default", "sleeper", run.id, "*"))
        found = flows.Flows(client)

        async def is_stuck() -> bool:
            return run.id in await found.stuck()

        await until(is_stuck)
        assert run.id in await found.repair()
        assert await run.result(timeout=20) == "awake"


async def test_flows_outlive_the_bucket_of_records(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody holds a parked flow and its parked child: their journals bring both back."""
    monkeypatch.setattr(flows, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(flows, "TOGETHER_SECONDS", -1.0)

    @app.flow
    async def child(ctx: Flow, n: int) -> int:
        await ctx.event("go", key="all")
        return n

    @app.flow
    async def parent(ctx: Flow) -> list[int]:
        return await ctx.gather(child.request(n) for n in range(2))

    async with working(app):
        run = await parent.enqueue()
        client: Any = await app.backend()

        async def parked() -> bool:
            return len(await flows.Flows(client).list(state="parked")) == 3

        await until(parked)
        await client.broker.api(f"STREAM.DELETE.{client.runs.stream}")
        await until(lambda: _exists(client.broker, client.runs.stream))
        assert len(await flows.Flows(client).repair()) == 3
        await until(parked)
        found = flows.Flows(client)
        await found.repair()
        assert await found.repair() == [], "they are not searched for again"
        await app.publish("go", None, key="all")
        assert await run.result(timeout=20) == [0, 1]


async def _exists(broker: Any, stream: str) -> bool:
    with contextlib.suppress(NotFound):
        return bool(await broker.api(f"STREAM.INFO.{stream}"))
    return False


async def test_children_that_had_ended_are_never_waited_for_again(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was cut off may not know their ends yet: the flow is called again."""

    @app.job
    async def child(n: int) -> int:
        return n

    @app.flow
    async def parent(ctx: Flow) -> list[int]:
        found = await ctx.gather(child.request(n) for n in range(2))
        await ctx.sleep(1.5)
        return found

    async with working(app):
        run = await parent.enqueue()

        async def sleeps() -> bool:
            operations = (await journal_of(app, run.id)).operations
            return len(operations) == 2 and await is_parked(run)

        await until(sleeps)
        real, calls = NatsJournals.ends, 0

        async def stale(self: NatsJournals, run: str, number: int, total: int) -> Any:
            nonlocal calls
            calls += 1
            return {} if calls == 1 else await real(self, run, number, total)

        monkeypatch.setattr(NatsJournals, "ends", stale)
        assert await run.result(timeout=20) == [0, 1]
        assert calls > 1


async def test_flow_whose_journal_cannot_be_opened_is_called_again(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was claimed already: the worker gives its claim up."""

    @app.flow
    async def sleeper(ctx: Flow) -> str:
        await ctx.sleep(1.5)
        return "awake"

    async with working(app):
        run = await sleeper.enqueue()
        await until(lambda: is_parked(run))
        away = True

        async def stopped(self: NatsJournals, run: str) -> str:
            if away:
                raise OutcomeUnknown("the connection was lost before an answer came")
            return ""

        monkeypatch.setattr(NatsJournals, "stopped", stopped)

        async def tried() -> bool:
            return len((await journal_of(app, run.id)).opened) > 0

        await until(tried)
        away = False
        assert await run.result(timeout=20) == "awake"


async def test_flow_that_waits_for_what_is_over_is_woken(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record says one thing, its journal another."""
    monkeypatch.setattr(flows, "QUIET_SECONDS", 0.0)

    @app.flow
    async def sleeper(ctx: Flow) -> str:
        await ctx.sleep(1.5)
        return "awake"

    async with working(app):
        run = await sleeper.enqueue()
        await until(lambda: is_parked(run))
        client: Any = await app.backend()
        names = client.broker.names
        await client.topology.purge(names.jobs, names.later("default", "sleeper", run.id, "*"))
        entry = await client.runs.get(run.id)
        record = client.runs.read(decode, entry)
        stale = msgspec.structs.replace(record, waits="1 of 1 children: part", due=0.0)
        await client.runs.put(run.id, encode(stale), expected=entry.revision)

        async def repaired() -> bool:
            return await flows.Flows(client).repair() == [run.id]

        await until(repaired)
        assert await run.result(timeout=20) == "awake"


async def test_purged_children_are_told_to_their_flow(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child without a record and without a message is lost, in two looks."""
    monkeypatch.setattr(flows, "QUIET_SECONDS", 0.0)

    @app.job(group="elsewhere")
    async def child(n: int) -> int:
        return n

    @app.flow
    async def parent(ctx: Flow) -> list[str]:
        ends = await ctx.gather((child.request(i) for i in range(3)), settled=True)
        return [f"{end.state}: {end.error[:19]}" for end in ends]

    async with working(app):
        run = await parent.enqueue()
        await until(lambda: is_parked(run))
        client: Any = await app.backend()
        found = flows.Flows(client)
        assert await found.repair() == []
        await client.topology.purge(client.broker.names.jobs, "*.job.elsewhere.>")
        await found.repair()
        await found.repair()
        assert await run.result(timeout=20) == ["lost: its message is gone"] * 3


async def test_ended_child_in_a_restored_queue_is_told_to_its_flow(app: Holdfast) -> None:
    """A backup may have the record of a child's end and its message, and not what its flow was
    told: the message, delivered for the first time, tells it."""

    @app.job(group="elsewhere")
    async def child(n: int) -> int:
        raise AssertionError("it has ended")

    @app.flow
    async def outer(ctx: Flow) -> int:
        return await ctx.call(child.request(7))

    async with working(app):
        run = await outer.enqueue()
        await until(lambda: is_parked(run))
        client: Any = await app.backend()
        journal = await journal_of(app, run.id)
        entry = journal.newest
        assert entry is not None
        ((child_id, group, job),) = children_of(journal, entry)
        parent = Parent(run.id, "default", "outer", journal.gather_number(entry.n), 0, 1)
        now = client.broker.server_now()
        ended = RunRecord("done", group, job, created=now, ended=now, parent=str(parent))
        ended = msgspec.structs.replace(ended, result=msgspec.Raw(b"7"))
        await client.runs.put(child_id, encode(ended), expected=0)
        async with working(app, group="elsewhere"):
            assert await run.result(timeout=20) == 7


async def test_operator_sees_signals_and_resumes_a_flow(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it waits for, since when, its operations, and who sent the event."""

    @app.flow
    async def approve(ctx: Flow) -> str:
        await ctx.step(len, "x", name="prepare")
        found = await ctx.event("approved", key="o1")
        await ctx.sleep("1h")
        return found.by if found else ""

    async with working(app):
        run = await approve.enqueue()
        await until(lambda: is_parked(run))
        client: Any = await app.backend()
        found = flows.Flows(client)
        (info,) = await found.list()
        assert (info.state, info.waits) == ("parked", "event approved, key o1")
        publish = client.publish_signal

        async def sleeps() -> bool:
            return (await found.list())[0].waits.startswith("until ")

        async def publish_and_be_slow(*args: Any) -> Any:
            stored = await publish(*args)
            await until(sleeps)
            return stored

        monkeypatch.setattr(client, "publish_signal", publish_and_be_slow)
        assert (await found.signal("approved", "o1", b"true", "ann")).subscribed
        detail = await found.show(run.id)
        assert [(line.kind, line.name, line.by) for line in detail.lines] == [
            ("step", "prepare", ""),
            ("event", "approved o1", "ann"),
            ("sleep", "", ""),
        ]
        assert detail.lines[-1].open
        await found.resume(run.id)
        await until(lambda: is_parked(run))
        called = (await found.show(run.id)).calls
        assert called >= 2
        assert await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result(timeout=20)
        detail = await found.show(run.id)
        assert detail.lines[-1].error == "the flow ended here"
        assert detail.calls > called  # it was called once more, to undo


async def subjects_of(app: Holdfast, stream: str, pattern: str) -> list[str]:
    """The subjects of a stream that have a message."""
    broker = await broker_of(app)
    request = {"subjects_filter": pattern}
    info = await broker.api(f"STREAM.INFO.{stream}", request)
    return sorted(info["state"].get("subjects") or {})


async def test_ended_flow_leaves_one_message(app: Holdfast) -> None:
    """No ends of children, no wake for its deadline, no wake for an event that came in time."""

    @app.job
    async def child(n: int) -> int:
        await asyncio.sleep(0.2)
        return n

    @app.flow(timeout="30d")
    async def flow(ctx: Flow) -> int:
        total = 0
        for n in range(3):
            total += sum(await ctx.gather(child.request(i) for i in range(n + 1)))
        await ctx.event("go", key="k", timeout="10d")
        return total

    async with working(app):
        run = await flow.enqueue()
        names = (await broker_of(app)).names
        later = names.later("default", "flow", run.id, "*")

        async def waits() -> bool:
            record = (await run.status()).record
            return record is not None and "event" in record.waits

        await until(waits)
        assert len(await subjects_of(app, names.jobs, later)) == 1
        assert len(await subjects_of(app, names.flows, names.flow_children(run.id, "*"))) == 3
        await app.publish("go", key="k")
        assert await run.result(timeout=20) == 4
        assert await subjects_of(app, names.jobs, later) == []
        assert await subjects_of(app, names.flows, names.flow(run.id) + ".>") == []


async def test_ends_of_children_that_nobody_waits_for_are_removed(app: Holdfast) -> None:
    """Those of flows that have ended, or never were; those of a waiting flow stay."""

    @app.flow
    async def flow(ctx: Flow, ends: bool) -> None:
        if not ends:
            await ctx.gather([waits.request(0), waits.request(9)])

    @app.job
    async def waits(n: int) -> None:
        await asyncio.sleep(6 * n)

    async with working(app):
        ended, waiting = await flow.enqueue(True), await flow.enqueue(False)
        await ended.result(timeout=20)
        backend: Any = await app.backend()
        names, journals = backend.broker.names, backend.journals
        kept = names.flow_children(waiting.id, 0)

        async def one_told() -> bool:
            return await subjects_of(app, names.flows, kept) == [kept]

        await until(one_told)
        for run in (ended.id, "never"):
            await backend.broker.store(names.flow_children(run, 0), b"{}")
        await backend.broker.store(names.flow_children(waiting.id, 770_000), b"{}")
        assert await journals.forget_ends() == 3
        every = names.flow_children("*", "*")
        assert await subjects_of(app, names.flows, every) == [kept]
        await waiting.cancel()


async def test_last_wake_that_meets_a_lagging_replica_is_not_taken_for_an_early_one(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer ends than the leader has are read again before the flow parks."""
    async with app:
        backend: Any = await app.backend()
        await backend.topology.ensure()
        journals = backend.journals
        for place in range(3):
            parent = Parent("r1", "default", "flow", 0, place, 3)
            await journals.tell(parent, f"child-{place}", RunRecord("done", "default", "child"))
        read, calls = journals._read_ends, 0

        async def lagging(subject: str) -> Any:
            nonlocal calls
            calls += 1
            found, count = await read(subject)
            if calls == 1:
                found.pop(2)
                count -= 1
            return found, count

        monkeypatch.setattr(journals, "_read_ends", lagging)
        assert len(await journals.ends("r1", 0, 3)) == 3
        assert calls == 2
        assert len(await journals.ends("r1", 0, 4)) == 3, "one has really not ended"


async def test_payload_and_first_result_together_above_the_limit_of_a_message(
    app: Holdfast,
) -> None:
    """Each fits alone; the journal's first message is split."""

    @app.flow
    async def flow(ctx: Flow, data: str) -> int:
        return len(data) + len(await ctx.step(grow))

    def grow() -> str:
        return "y" * 200_000

    async with working(app):
        run = await flow.enqueue("x" * 900_000)
        assert await run.result(timeout=30) == 1_100_000
