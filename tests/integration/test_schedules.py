"""Schedules on a real server: registered, changed, fired, fenced, explained."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import Context, Holdfast
from holdfast.broker import Bucket
from holdfast.client import Client
from holdfast.client.backfill import backfill
from holdfast.client.schedules import Schedules, UnknownSchedule
from holdfast.config import RecordConfig, SchedulerConfig
from holdfast.errors import DefinitionError, HoldfastError, InvalidInput, StaleTerm
from holdfast.model.schedule import define
from holdfast.model.slot import SchedulerProgress, Slot
from holdfast.names import consumer, kv_stream, schedule_key, term_key
from holdfast.scheduler import Scheduler, registering
from holdfast.scheduler.store import NatsSlots, Planned
from holdfast.scheduler.view import ScheduleView
from holdfast.status.doctor import examine
from holdfast.status.jobs import Jobs
from holdfast.status.schedules import SlotHistory
from tests.integration.support import Seen, working
from tests.support import past, running, until


@contextlib.asynccontextmanager
async def scheduling(app: Holdfast, **config: Any) -> AsyncIterator[Scheduler]:
    """One scheduler of an app on the test's own loop, leading when the block begins."""
    scheduler = Scheduler(app, SchedulerConfig(**config))
    async with running(scheduler, lambda: scheduler.started.is_set() and not scheduler.problems()):
        yield scheduler


async def client_of(app: Holdfast) -> Client:
    backend = await app.backend()
    assert isinstance(backend, Client)
    await backend.topology.ensure()
    return backend


async def test_schedule_fires_with_the_slot_as_run_id(app: Holdfast, seen: Seen) -> None:
    """`@app.cron("* * * * * *")` fires each second; `ctx.run` is the slot, the payload arrives."""

    @app.cron("* * * * * *", payload={"n": 7}, headers={"Color": "red"})
    async def tick(ctx: Context, n: int) -> None:
        seen.append((ctx.run, n, ctx.headers.get("Color"), time.time()))

    async with working(app), scheduling(app):
        await seen.wait(3)
    runs = [run for run, *_ in seen]
    assert len(set(runs)) == len(runs)
    assert all(run.startswith("tick/=t20") for run in runs)
    assert seen[0][1:3] == (7, "red")
    await app.close()


async def test_definitions_in_code_teach(app: Holdfast) -> None:
    """A rule that cannot work, a name taken twice, a misplaced option: refused at import."""
    with pytest.raises(DefinitionError, match="has 3 fields"):
        app.cron("* * *")(nothing)
    app.jobs.clear()
    app.every("5s")(nothing)
    with pytest.raises(DefinitionError, match="defined twice"):
        app.every("6s")(app.jobs["nothing"])
    job = app.every("6s", schedule="second")(app.jobs["nothing"])
    assert set(app.schedules) == {"nothing", "second"}
    with pytest.raises(DefinitionError, match=r"belong to @app\.job"):
        app.every("7s", schedule="third", timeout="5s")(job)


async def nothing() -> None:
    return None


async def test_sync_adds_changes_and_retires(app: Holdfast) -> None:
    """A changed definition replaces its old one, a removed one is retired, a pause outlives it."""
    client = await client_of(app)
    registry = Schedules(client)
    one, two = define("one", "job", every=5), define("two", "job", every=5)
    assert (await registry.sync("shop", [one, two], release="1")).added == ["one", "two"]
    since = (await registry.show("one")).since
    await registry.pause("one")
    again = await registry.sync("shop", [define("one", "job", every=5, limit=3), two], release="2")
    assert (again.changed, again.kept) == (["one"], ["two"])
    now = await registry.show("one")
    assert (now.limit, now.since, bool(now.paused)) == (3, since, True)
    third = await registry.sync("shop", [define("one", "job", every=6)], release="3")
    assert (third.changed, third.retired) == (["one"], ["two"])
    assert (await registry.show("one")).since > since
    with pytest.raises(UnknownSchedule, match="schedules list"):
        await registry.show("two")
    await app.close()


async def test_sync_lower_release_changesnothing(app: Holdfast) -> None:
    """An old pod that starts late neither overwrites nor revives what a newer one registered."""
    client = await client_of(app)
    registry = Schedules(client)
    await registry.sync("shop", [define("one", "job", every=5)], release="1.9")
    await registry.sync("shop", [define("two", "job", every=7)], release="1.10")
    late = await registry.sync("shop", [define("one", "job", every=5)], release="1.9")
    assert late.newer == "1.10"
    assert [s.name for s in await registry.list()] == ["two"]
    await app.close()


async def test_sync_ofnothing_is_refused_unless_meant(app: Holdfast) -> None:
    """An empty set over a populated one is far more often a failed import."""
    client = await client_of(app)
    registry = Schedules(client)
    assert (await registry.sync("empty", [])).added == []
    await registry.sync("shop", [define("one", "job", every=5)])
    with pytest.raises(InvalidInput, match="--allow-empty"):
        await registry.sync("shop", [])
    assert len(await registry.list()) == 1
    assert (await registry.sync("shop", [], allow_empty=True)).retired == ["one"]
    await app.close()


async def test_schedules_of_two_apps_do_not_mix(app: Holdfast) -> None:
    """Neither another app nor the command line may overwrite a schedule of an app's code."""
    client = await client_of(app)
    registry = Schedules(client)
    await registry.sync("shop", [define("one", "job", every=5)])
    with pytest.raises(InvalidInput, match="belongs to app 'shop'"):
        await registry.sync("other", [define("one", "job", every=5)])
    with pytest.raises(InvalidInput, match="defined in the code"):
        await registry.add(define("one", "job", every=9), replace=True)
    await app.close()


async def test_schedule_changes_take_effect_at_once(app: Holdfast, seen: Seen) -> None:
    """Added, paused, resumed and removed at run time, without a restart."""

    @app.job
    async def tick(ctx: Context) -> None:
        seen.append(ctx.run)

    async with working(app), scheduling(app) as scheduler:
        registry = Schedules(await client_of(app))
        await registry.add(define("now", "tick", every=1))
        await seen.wait(2, 5)
        await registry.pause("now")
        await until(lambda: not scheduler._planner.next_due, 3, "the pause")
        await registry.resume("now")
        before = len(seen)
        await seen.wait(before + 1, 5)
        await registry.remove("now")
        await until(lambda: "now" not in scheduler._view.schedules, 3, "the removal")
        run = await registry.add(define("later", "tick", at=time.time() + 1.2))
        assert run.at
        await until(lambda: any(r.startswith("later/") for r in seen), 5, "the one-off")
    await app.close()


async def test_schedule_that_runs_on_start_fires_when_it_is_added(
    app: Holdfast, seen: Seen
) -> None:
    """Once, as a slot of its own that `why` knows; a second start of the scheduler adds none."""

    @app.every("1h", run_on_start=True)
    async def hourly(ctx: Context) -> None:
        seen.append(ctx.run)

    @app.every("1s")
    async def tick(ctx: Context) -> None:
        seen.append(ctx.run)

    async with working(app):
        async with scheduling(app):
            await until(lambda: any(r.startswith("hourly/") for r in seen), 15, "the first slot")
        client = await client_of(app)
        first = (await Schedules(client).show("hourly")).first
        why = await SlotHistory(client).why("hourly", first)
        assert (why.verdict, why.run in seen) == ("dispatched", True)
        async with scheduling(app):
            await seen.wait(len(seen) + 2)
        at_start = [r for r in seen if r == why.run]
        assert len(at_start) == 1
    await app.close()


async def test_trigger_and_backfill_fire_by_hand(app: Holdfast, seen: Seen) -> None:
    """A trigger is a run of its own; a backfill fires what was not fired, once."""

    @app.job
    async def tick(ctx: Context) -> None:
        seen.append(ctx.run)

    client = await client_of(app)
    registry = Schedules(client)
    await registry.add(define("past", "tick", every=60))
    end = time.time() - 60
    async with working(app):
        run = await registry.trigger("past")
        first = await backfill(client, "past", end - 300, end)
        again = await backfill(client, "past", end - 300, end)
        await seen.wait(1 + len(first.sent))
    assert len(first.sent) == 5
    assert (again.sent, again.known) == ([], first.sent)
    assert run in seen
    assert len(set(seen)) == 6
    with pytest.raises(InvalidInput, match="must end in the past"):
        await backfill(client, "past", end, end + 1000)
    await app.close()


async def test_stale_leader_is_refused_by_the_server(app: Holdfast) -> None:
    """A slot is created once, and only in the current term; the refusal tells which it was."""
    client = await client_of(app)
    broker = client.broker
    bucket = Bucket(broker, broker.names.slots)
    store = NatsSlots(broker, lambda _: 3600.0, lambda _: None)
    epoch = await bucket.put(term_key("scheduler"), b"{}", expected=0)
    slots = [
        Planned("a", 1_800_000_000 + n, Slot("planned", 1.0, job="j", group="g")) for n in range(5)
    ]
    first = await store.plan(slots[:3], SchedulerProgress(watermark=1), epoch)
    assert [p.revision for p in first] == [epoch + 1, epoch + 2, epoch + 3]
    second = await store.plan(slots, SchedulerProgress(watermark=2), epoch)
    assert {p.moment: p.revision for p in first}.items() <= {
        p.moment: p.revision for p in second
    }.items()
    assert len(await store.left_over(0, epoch)) == 5
    newer = await bucket.put(term_key("scheduler"), b"{}", expected=epoch)
    with pytest.raises(StaleTerm):
        await store.plan([slots[0]._replace(moment=5)], SchedulerProgress(watermark=3), epoch)
    with pytest.raises(StaleTerm):
        await store.mark(second, SchedulerProgress(watermark=3), epoch)
    assert (await store.progress()).watermark == 2
    marked = [p._replace(slot=Slot("dispatched", 1.0)) for p in second]
    await store.mark(marked, SchedulerProgress(watermark=4), newer)
    assert await store.left_over(0, newer) == []
    await app.close()


async def test_why_explains_every_slot(app: Holdfast) -> None:
    """Sent, to come, before its time, in a pause, not an instant at all."""

    @app.every("1s")
    async def tick() -> None:
        return None

    client = await client_of(app)
    history, registry = SlotHistory(client), Schedules(client)
    async with scheduling(app):

        async def sent() -> bool:
            recent = await history.recent("tick", 1)
            return bool(recent) and recent[0][1].state == "dispatched"

        await until(sent, 5, "a slot")
        why = await history.why("tick")
        assert (why.verdict, why.slot is not None) == ("dispatched", True)
        assert "after it was due" in why.explanation
        assert (await history.why("tick", 1_700_000_000)).verdict == "not_due"
        assert (await history.why("tick", time.time() // 1 + 100)).verdict == "future"
        await registry.pause("tick")
        paused = int(time.time()) + 1
        await past(paused + 0.2)
        assert (await history.why("tick", paused)).verdict == "paused"
    await registry.add(define("rare", "tick", cron="0 0 1 1 *"))
    with pytest.raises(InvalidInput, match="not an instant"):
        await history.why("rare", 1_700_000_001)
    await app.close()


async def test_view_never_shrinks_by_what_it_did_not_hear(app: Holdfast) -> None:
    """Changes that no message told of are found by counting; a key that is gone is confirmed."""
    client = await client_of(app)
    registry = Schedules(client)
    changed: list[str] = []
    gone: list[str] = []
    view = ScheduleView(client.broker, lambda s, _: changed.append(s.name), gone.append)
    await view.open()
    assert view.schedules == {}
    await registry.add(define("one", "job", every=5))
    await until(lambda: "one" in view.schedules, 3, "a change that was heard")
    for sub in list(client.broker._nc._subs.values()):
        if sub.subject.endswith("_schedules.>"):
            await client.broker.unsubscribe(sub)
    await registry.add(define("two", "job", every=5))
    await view.look()
    assert set(view.schedules) == {"one", "two"}
    await view.look()
    assert gone == []
    bucket = Bucket(client.broker, client.broker.names.schedules)
    await bucket.delete(schedule_key("one"))
    await view.look()
    assert gone == ["one"]
    assert set(view.schedules) == {"two"}
    await app.close()


async def test_ready_file_follows_the_role(app: Holdfast, tmp_path: Path) -> None:
    """It is there while the scheduler is ready, and gone when it stops."""
    ready = tmp_path / "ready"
    async with scheduling(app, ready_file=str(ready)):
        await until(ready.exists, 5, "the ready file")
    assert not ready.exists()
    await app.close()


async def test_overlap_policies(app: Holdfast, seen: Seen) -> None:
    """While a run goes on, `skip` leaves slots out, `queue` lines them up, `allow` starts them."""

    async def busy(ctx: Context) -> None:
        seen.append((ctx.run.split("/")[0], "start"))
        await asyncio.sleep(1.6)
        seen.append((ctx.run.split("/")[0], "end"))

    for policy in ("allow", "skip", "queue"):
        app.every("1s", name=policy, overlap=policy)(busy)
    async with working(app, grace_seconds=3.0), scheduling(app):
        await until(lambda: all(seen.count((p, "end")) >= 2 for p in ("skip", "queue")))
    for policy in ("skip", "queue"):
        mine = [what for name, what in seen if name == policy]
        assert mine[:4] == ["start", "end", "start", "end"], policy
    allowed = [what for name, what in seen if name == "allow"]
    assert allowed[:3] == ["start", "start", "end"] or allowed[:2] == ["start", "start"]
    await app.close()


async def test_refused_registration_is_told_until_there_is_room(
    app: Holdfast, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule's name belongs to another app: the scheduler is not ready, the doctor says why,
    other schedules fire; once the name is free, it is registered without a restart."""
    monkeypatch.setattr(registering, "AGAIN_SECONDS", 0.2)
    client = await client_of(app)
    registry = Schedules(client)
    await registry.sync("other", [define("tick", job="work", every="1h")])

    @app.every("1h", name="tick")
    async def work() -> None: ...

    scheduler = Scheduler(app, SchedulerConfig())
    async with running(scheduler, lambda: scheduler.started.is_set() and scheduler.problems()):
        assert "schedules of app shop were not registered" in scheduler.problems()[-1]
        assert not scheduler.health().ready
        found = await examine(client.broker.config, RecordConfig())
        told = [f for f in found if f.check == "schedules"]
        assert [f.level for f in told] == ["fail"]
        assert "app shop" in told[0].text
        await registry.sync("other", [], allow_empty=True)
        await until(lambda: not scheduler.problems(), 20, "the registration")
        assert (await registry.show("tick")).app == "shop"
    await app.close()


async def test_schedules_and_pauses_outlive_their_bucket(app: Holdfast, seen: Seen) -> None:
    """The bucket is deleted, and a paused job's consumer too: a scheduler puts back what it knows,
    and the job stays paused."""

    @app.job
    async def quiet() -> None:
        seen.append("quiet")

    async with working(app), scheduling(app) as scheduler:
        client = await client_of(app)
        names, registry = client.broker.names, Schedules(client)
        await registry.add(define("hand-made", job="quiet", every="1h"))
        await Jobs(client).pause("quiet")
        await until(lambda: "hand-made" in scheduler._view.schedules, what="the schedule")
        await until(lambda: scheduler._view.paused, what="the pause")
        await client.broker.api(f"STREAM.DELETE.{kv_stream(names.schedules)}")
        name = consumer("default", "quiet")
        await client.broker.api(f"CONSUMER.DELETE.{names.jobs}.{name}")

        async def put_back() -> bool:
            try:
                await registry.show("hand-made")
                info = await client.broker.api(f"CONSUMER.INFO.{names.jobs}.{name}")
                return bool(info.get("paused"))
            except HoldfastError:
                return False

        await until(put_back, 40, "schedule and pause")
        assert (await Jobs(client).list("quiet"))[0].paused
        await Jobs(client).resume("quiet")
    await app.close()
