"""Commands to agents: they arrive once, their returns are kept, and a run ends as it must."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent import Agent
from holdfast.agent.journal import Journal
from holdfast.config import AgentConfig
from holdfast.errors import ConfigError, InvalidInput, RunNotFound, Unavailable
from holdfast.model import fleet as model
from holdfast.model.fleet import Order
from holdfast.names import H_EPOCH, H_EXPIRES, H_RUN, active_key, fleet_key
from holdfast.server import Server
from holdfast.status.fleet import Agents, FleetStatus
from tests.fleet_world import World
from tests.support import until

QUICK = {"ack_seconds": 0.3, "grace_seconds": 0.3}


@pytest.fixture
def world(nats: Server, namespace: str, tmp_path: Path) -> World:
    return World(nats, namespace, tmp_path)


async def test_fleet_run_reaches_every_agent_once(world: World) -> None:
    """Three agents, three returns, each executed once, the record tells it all."""
    async with world, world.dispatcher(**QUICK):
        await world.start_agents("web1", "web2", "db1")
        record, returns = await world.run("*", "mark", "first")
        assert record.status == "complete"
        assert (record.returned, record.succeeded, record.unreachable) == (3, 3, ())
        assert {a: r.value for a, r in returns.items()} == {
            a: f"{a}:first" for a in ("web1", "web2", "db1")
        }
        assert world.effects.of("first") == {"web1": 1, "web2": 1, "db1": 1}
        assert record.request.user == "tester"
        kept, stored = await FleetStatus(world.client).show(record.run)
        assert kept.status == "complete"
        assert set(stored) == {"web1", "web2", "db1"}
        assert await FleetStatus(world.client).active() == []


async def test_fleet_run_chooses_by_target(world: World) -> None:
    """Globs, lists, facts and compounds, resolved by whichever dispatcher is asked."""
    async with world, world.dispatcher(**QUICK), world.dispatcher(**QUICK):
        await world.start_agents("web1", "web2", "db1")
        await world.run("web1", "facts.set", "role", "edge")
        for target, expected in {
            "web*": {"web1", "web2"},
            "L@db1,web2": {"db1", "web2"},
            "E@.*1$": {"web1", "db1"},
            "G@role:edge": {"web1"},
            "G@os:linux and not G@role:edge": {"web2", "db1"},
        }.items():
            await until(
                lambda t=target, e=expected: _resolves(world, t, e), 10, f"{target} in the index"
            )
            _, returns = await world.run(target, "ping")
            assert set(returns) == expected, target
        with pytest.raises(InvalidInput, match="no agent matches"):
            await world.run("nobody*", "ping")
        with pytest.raises(InvalidInput, match="operator"):
            await world.run("web1 web2", "ping")


async def _resolves(world: World, target: str, expected: set[str]) -> bool:
    return all([set(await world.fleet.resolve(target)) == expected for _ in range(4)])


async def test_fleet_run_tells_failures_from_silence(world: World) -> None:
    """An agent that fails is `failed`; one that is not there is unreachable after two tries."""
    async with world, world.dispatcher(**QUICK):
        await world.start_agents("web1", "web2")
        record, returns = await world.run("*", "fail", "x")
        assert (record.status, model.exit_code(record)) == ("failed", 2)
        assert "does not like it" in returns["web1"].error
        record, returns = await world.run("L@web1,ghost", "ping")
        assert (record.status, model.exit_code(record)) == ("partial", 3)
        assert record.unreachable == ("ghost",)
        assert record.offline == ("ghost",)
        record, _ = await world.run("L@web1,ghost", "fail", "y")
        assert (record.status, model.exit_code(record)) == ("partial", 4)
        record, _ = await world.run("ghost", "ping")
        assert (record.status, model.exit_code(record)) == ("timeout", 3)
        record, returns = await world.run("web1", "no.such")
        assert "no function 'no.such'" in returns["web1"].error
        assert world.effects.of("x") == {"web1": 1, "web2": 1}


async def test_fleet_run_is_one_run_however_often_it_is_asked(world: World) -> None:
    """A repeated request returns the run; another one under its id is refused."""
    async with world, world.dispatcher(**QUICK), world.dispatcher(**QUICK):
        await world.start_agents("web1", "web2")
        request = world.request("*", "mark", "once")
        await asyncio.gather(*(world.fleet.start(request) for _ in range(20)))
        record, _ = await world.followed(request.run)
        again = await world.fleet.start(request)
        assert again.run == record.run
        assert again.status == "complete"
        assert world.effects.of("once") == {"web1": 1, "web2": 1}
        with pytest.raises(InvalidInput, match="belongs to another run"):
            await world.fleet.start(world.request("*", "ping", run=request.run))


async def test_agent_refuses_stale_and_equal_epochs(world: World) -> None:
    """A lower epoch is refused and counted; the same, or a later one, executes nothing again."""
    async with world, world.dispatcher(**QUICK):
        await world.start_agents("web1")
        body = model.encode(Order("mark", ("fenced",)))

        async def command(epoch: int, run: str = "f-one") -> None:
            expires = str(int((world.broker.server_now() + 30) * 1000))
            headers = {H_RUN: run, H_EPOCH: str(epoch), H_EXPIRES: expires}
            await world.sender.publish(world.sender.names.agent("web1", "exec"), body, headers)

        await command(10)
        await until(lambda: world.commands("accepted") == 1, what="the first")
        await command(10)
        await command(9)
        await command(11)
        await command(10)
        await until(lambda: world.commands("stale") == 2, what="both stale ones refused")
        assert world.commands("known") == 2
        assert world.effects.of("fenced") == {"web1": 1}
        for bad in ({}, {H_RUN: "f-x"}, {H_RUN: "f-x", H_EPOCH: "1", H_EXPIRES: "5"}):
            await world.sender.publish(world.sender.names.agent("web1", "exec"), body, bad)
        await until(lambda: world.commands("refused: expired") == 1, what="the last of them")
        assert world.commands("refused: malformed") == 2
        assert world.effects.of("fenced") == {"web1": 1}


async def test_agent_restarted_does_not_repeat(world: World, tmp_path: Path) -> None:
    """What was accepted in an earlier life is reported as interrupted, and not started again."""
    async with world, world.dispatcher(**QUICK):
        request = world.request("web1", "mark", "long")
        journal = Journal(tmp_path / "web1")
        journal.open()
        journal.enter(request.run, 1)
        journal.close()
        await world.start_agent("web1")
        record, returns = await world.followed(request)
        assert record.status == "failed"
        assert returns["web1"].outcome == "interrupted"
        assert world.effects.of("long") == {}


async def test_second_agent_with_one_id_is_refused(world: World) -> None:
    """Two agents of one id would execute twice: the second one says so and ends."""
    async with world, world.dispatcher(**QUICK):
        await world.start_agent("web1")
        second = Agent(
            AgentConfig(id="web1", data_dir=str(world._root / "other")),
            connection=world.connection,
        )
        with pytest.raises(ConfigError, match="running already"):
            await second.run()
        assert [a.online for a in await Agents(world.client).list()] == [True]  # the first one


async def test_mutating_functions_take_turns_and_the_queue_is_bounded(world: World) -> None:
    """One runs, two wait, the others are told busy; what only reads goes at once."""
    async with world, world.dispatcher(**QUICK):
        await world.start_agents("web1", queue_size=2)
        runs = [world.request("web1", "mark", f"m{n}", 0.5) for n in range(5)]
        for request in runs:
            await world.fleet.start(request)
            await until(lambda: world.commands("accepted") + world.commands("busy") >= 1)
        record, _ = await world.run("web1", "look", "reads")
        assert record.status == "complete"
        assert world.effects.of("m1") == {}  # still waiting, and `look` is done
        ends = [await world.followed(request.run) for request in runs]
        outcomes = [returns["web1"].outcome for _, returns in ends]
        assert outcomes.count("ok") == 3
        assert outcomes.count("busy") == 2
        started = [label for _, label in world.effects if label != "reads"]
        assert len(started) == 3


async def test_cancel_from_any_dispatcher_stops_queued_and_running(
    world: World, report: Callable[[str], None]
) -> None:
    """Cancel reaches agents directly: what runs stops, what waits never starts."""
    async with world, world.dispatcher(**QUICK), world.dispatcher(**QUICK):
        await world.start_agents("web1", "web2", "web3")
        done = await world.run("web3", "ping")
        assert done[0].status == "complete"
        first = world.request("L@web1,web2", "mark", "runs", 60.0)
        second = world.request("*", "mark", "waits", 0.0)
        await world.fleet.start(first)
        await until(lambda: len(world.effects.of("runs")) == 2, what="both running")
        await world.fleet.start(second)
        await until(lambda: world.effects.of("waits") == {"web3": 1}, what="one done")
        asked = time.monotonic()
        for request in (second, first):
            marked = await world.fleet.cancel(request.run, "tester")
            assert marked.cancelled_by == "tester"
        await until(lambda: world.commands("returned: cancelled") == 4, what="all stopped")
        report(f"two runs stopped on two agents {time.monotonic() - asked:.2f} s after the cancel")
        record, returns = await world.followed(first.run)
        assert {r.outcome for r in returns.values()} == {"cancelled"}
        assert record.status == "cancelled"
        record, returns = await world.followed(second.run)
        assert returns["web3"].outcome == "ok"
        assert returns["web1"].outcome == "cancelled"
        assert world.effects.of("waits") == {"web3": 1}
        again = await world.fleet.cancel(first.run)
        assert again.over
        with pytest.raises(InvalidInput, match="no fan-out run"):
            await world.fleet.cancel("fNobody")


async def test_cancel_ends_a_run_whose_agents_are_silent(world: World) -> None:
    """Targets that never return do not hold a cancel up, and later waves are not sent."""
    async with world, world.dispatcher(ack_seconds=30, grace_seconds=30):
        await world.start_agents("web1", "web2")
        request = world.request("L@ghost,web1,web2", "mark", "later", batch=1)
        await world.fleet.start(request)
        await world.fleet.cancel(request.run, "tester")
        record, _ = await world.followed(request.run)
        assert record.status == "cancelled"
        assert {"web1", "web2"} <= set(record.unsent)
        assert world.effects.of("later") == {}


async def test_batch_sends_in_waves_and_stops_when_too_many_fail(world: World) -> None:
    """Waves follow one another; after too many failures the rest is left alone, and named."""
    ids = [f"w{n}" for n in range(6)]
    async with world, world.dispatcher(**QUICK):
        await world.start_agents(*ids)
        record, _ = await world.run("*", "mark", "waves", 0.05, batch=2)
        assert record.status == "complete"
        order = [agent for agent, label in world.effects if label == "waves"]
        assert [set(order[n : n + 2]) for n in (0, 2, 4)] == [
            {"w0", "w1"},
            {"w2", "w3"},
            {"w4", "w5"},
        ]
        record, _ = await world.run("*", "fail", "bad", batch=2, max_failures=2)
        assert record.status == "partial"
        assert record.unsent == ("w4", "w5")
        assert "did not get the command" in record.reason
        assert set(world.effects.of("bad")) == {"w0", "w1", "w2", "w3"}


async def test_timeout_is_enforced_by_the_agent(world: World) -> None:
    """What takes longer than the run's time is stopped, and says so."""
    async with world, world.dispatcher(**QUICK):
        await world.start_agents("web1")
        record, returns = await world.run("web1", "mark", "slow", 60.0, timeout=0.5)
        assert returns["web1"].outcome == "timeout"
        assert record.status == "failed"


async def test_large_return_is_kept_whole(world: World) -> None:
    """A return that no message can carry goes to the object store, and a note says so."""
    async with world, world.dispatcher(**QUICK):
        await world.start_agents("web1")
        record, returns = await world.run("web1", "big", 3_000_000)
        assert record.status == "complete"
        assert returns["web1"].value is None
        assert "object store" in returns["web1"].note
        assert await world.fleet.value(returns["web1"]) == "x" * 3_000_000


async def test_dispatcher_that_leaves_hands_its_runs_over(world: World) -> None:
    """SIGTERM does not finalise: another goes on with a higher epoch, and nothing repeats."""
    async with world, world.coordinator():
        request = world.request("L@web1,web2", "mark", "over", 1.0)
        async with world.dispatcher(**QUICK) as first:
            await world.start_agents("web1", "web2")
            before = await world.fleet.start(request)
            assert before.owner == first.node
            await until(lambda: len(world.effects.of("over")) == 2, what="both started")
        left = await world.fleet.read(request.run)
        assert (left.status, left.owner) == ("running", "")
        async with world.dispatcher(**QUICK) as second:
            record, returns = await world.followed(request.run)
        assert record.owner == second.node
        assert record.epoch > left.epoch
        assert record.status == "complete"
        assert record.adoptions == 0
        assert set(returns) == {"web1", "web2"}
        assert world.effects.of("over") == {"web1": 1, "web2": 1}


async def test_run_that_was_claimed_and_never_sent_is_sent_by_another(world: World) -> None:
    """`claimed` means never sent: an adopter sends it to everybody."""
    async with world, world.dispatcher(**QUICK) as alive:
        await world.start_agents("web1", "web2")
        request = world.request("*", "mark", "adopted")
        now = world.sender.server_now()
        record = model.FleetRun(
            request,
            "claimed",
            ("web1", "web2"),
            owner="dispatcher-gone",
            token="gone.1",
            created=now,
            deadline=now + 30,
        )
        bucket = alive._records.bucket
        await bucket.put(fleet_key(request.run), model.encode(record), expected=0)
        active = model.encode(model.Active("dispatcher-gone", now))
        await bucket.put(active_key(request.run), active, expected=0)
        found, returns = await world.followed(request.run)
        assert found.status == "complete"
        assert found.adoptions == 1
        assert found.owner == alive.node
        assert world.effects.of("adopted") == {"web1": 1, "web2": 1}
        assert set(returns) == {"web1", "web2"}


async def test_run_that_has_lost_its_owner_too_often_is_given_up(world: World) -> None:
    """After three adoptions the fourth dispatcher does not try: the run may be what kills them."""
    async with world, world.dispatcher(**QUICK) as alive:
        await world.start_agents("web1")
        request = world.request("*", "mark", "poison")
        now = world.sender.server_now()
        record = model.FleetRun(
            request,
            "running",
            ("web1",),
            owner="dispatcher-gone",
            token="gone.1",
            deadline=now + 30,
            adoptions=3,
        )
        bucket = alive._records.bucket
        await bucket.put(fleet_key(request.run), model.encode(record), expected=0)
        active = model.encode(model.Active("dispatcher-gone", now))
        await bucket.put(active_key(request.run), active, expected=0)
        await until(lambda: _ended(world, request.run), 20, "given up")
        found = await world.fleet.read(request.run)
        assert found.status == "failed"
        assert "4 dispatchers were lost" in found.reason
        assert world.effects.of("poison") == {}


async def _ended(world: World, run: str) -> bool:
    return (await world.fleet.read(run)).over


async def test_adopted_run_has_only_the_time_that_was_left(world: World) -> None:
    """A run whose deadline has passed is finished at once, with what was returned."""
    async with world, world.dispatcher(**QUICK) as alive:
        await world.start_agents("web1")
        request = world.request("web1", "mark", "late")
        now = world.sender.server_now()
        record = model.FleetRun(
            request, "running", ("web1",), owner="dispatcher-gone", token="g.1", deadline=now - 5
        )
        bucket = alive._records.bucket
        await bucket.put(fleet_key(request.run), model.encode(record), expected=0)
        active = model.encode(model.Active("dispatcher-gone", now))
        await bucket.put(active_key(request.run), active, expected=0)
        found, _ = await world.followed(request.run)
        assert found.status == "timeout"
        assert world.effects.of("late") == {}


async def test_no_dispatcher_is_an_error_that_says_what_to_do(world: World) -> None:
    """A request that nobody takes fails with one sentence."""
    async with world:
        with pytest.raises(Unavailable, match="holdfast control"):
            await world.fleet.start(world.request("*", "ping"))
        with pytest.raises(RunNotFound):
            await world.fleet.read("fNobody")


async def test_agents_are_listed_and_forgotten(world: World) -> None:
    """An agent that has ended is offline, stays known, and can be forgotten."""
    async with world, world.dispatcher(**QUICK):
        await world.start_agents("web1", "db1")
        agents = Agents(world.client)
        assert [(a.id, a.online) for a in await agents.list()] == [("db1", True), ("web1", True)]
        info, facts = await agents.show("web1")
        assert "ping" in info.functions
        assert "cmd.run" not in info.functions
        assert facts["id"] == "web1"
        with pytest.raises(InvalidInput, match="is online"):
            await agents.forget("db1")
        await world.agents.pop("db1").close()
        assert [a.id for a in await agents.list(online=True)] == ["web1"]
        assert [a.id for a in await agents.list("db*")] == ["db1"]
        await agents.forget("db1")
        assert [a.id for a in await agents.list()] == ["web1"]
        _, returns = await world.run("*", "ping")
        assert set(returns) == {"web1"}


async def test_forged_return_is_dropped(world: World) -> None:
    """A return that names another agent than its subject counts for nobody."""
    async with world, world.dispatcher(**QUICK) as dispatcher:
        await world.start_agents("web1")
        request = world.request("L@web1,ghost", "mark", "forged", 0.3)
        await world.fleet.start(request)
        forged: dict[str, Any] = {"run": request.run, "agent": "web1", "outcome": "ok"}
        body = model.encode(model.Return(**forged))
        await world.sender.store(world.sender.names.returned(request.run, "ghost"), body)
        record, _ = await world.followed(request.run)
        assert record.unreachable == ("ghost",)
        assert record.status == "partial"
        refused = dispatcher.telemetry.registry.get_sample_value
        assert refused("holdfast_fleet_refused_total", {"what": "return"}) == 1
