"""Dispatchers and agents that die, freeze and come back: nothing is lost, nothing runs twice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.model import fleet as model
from holdfast.model.fleet import FleetRequest
from holdfast.names import H_EPOCH, H_EXPIRES, H_RUN
from holdfast.server import Server
from tests.faults.processes import Process
from tests.faults.proxy import Proxy
from tests.fleet_world import World, folder
from tests.support import until

AGENTS = int(os.environ.get("HOLDFAST_TEST_AGENTS", "100"))
"""A thousand for the figure."""
RUNS = 20
QUICK = {
    "HOLDFAST_DISPATCHER_ACK_SECONDS": "1",
    "HOLDFAST_DISPATCHER_GRACE_SECONDS": "2",
    "HOLDFAST_LIVENESS_PROFILE": "local",
}


@contextmanager
def processes(
    roles: list[str], url: str, namespace: str, root: Path, **env: str
) -> Iterator[list[Process]]:
    """Control services as real processes, gone afterwards."""
    root.mkdir(parents=True, exist_ok=True)
    found = [
        Process([role], url, namespace, root / f"{role}-{n}.log", **(QUICK | env))
        for n, role in enumerate(roles)
    ]
    try:
        yield found
    finally:
        for process in found:
            process.close()


async def ready(found: list[Process]) -> None:
    """Wait until dispatchers dispatch and coordinators watch."""
    for process in found:
        await until(
            lambda p=process: "dispatching" in p.text() or "watching" in p.text(),
            90,
            "a control service",
        )


async def owners(world: World, requests: list[FleetRequest]) -> dict[str, str]:
    """Who owns each run now."""
    return {r.run: (await world.fleet.read(r.run)).owner for r in requests}


def pid_of(node: str) -> int:
    """The process of a node: its id carries it."""
    return int(node.rsplit("-", 2)[1])


@pytest.mark.timeout(280)
async def test_thousand_agents_answer(
    nats: Server, namespace: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """A command to many agents over three dispatchers: every one of them returns, once."""
    ids = [f"host{n:04}" for n in range(AGENTS)]
    roles = ["dispatcher"] * 3
    patient = {"HOLDFAST_DISPATCHER_ACK_SECONDS": "15"}
    with (
        folder() as root,
        processes(roles, nats.url, namespace, tmp_path, **patient) as control,
    ):
        await ready(control)
        async with World(nats, namespace, root) as world:
            for start in range(0, len(ids), 200):
                await world.start_agents(*ids[start : start + 200])
            await until(lambda: _knows(world, AGENTS), 60, "an index that is complete")
            took: list[float] = []
            whole: list[float] = []
            for n in range(10):
                started = time.monotonic()
                request = world.request("*", "look", f"ping{n}")
                seen: dict[str, float] = {}
                async for found in world.fleet.follow(request):
                    if isinstance(found, model.Return):
                        seen[found.agent] = time.monotonic() - started
                    else:
                        record = found
                whole.append(time.monotonic() - started)
                assert record.status == "complete"
                assert set(seen) == set(ids)
                assert world.effects.of(f"ping{n}") == dict.fromkeys(ids, 1)
                took += seen.values()
    took.sort()
    report(
        f"{AGENTS} agents, 3 dispatchers, 10 runs: returns p50 {took[len(took) // 2]:.2f} s, "
        f"p99 {took[int(len(took) * 0.99)]:.2f} s; whole runs {min(whole):.2f}–{max(whole):.2f} s"
    )


async def _knows(world: World, count: int) -> bool:
    return all([len(await world.fleet.resolve("*")) == count for _ in range(6)])


async def test_killed_dispatcher_loses_and_repeats_nothing(
    nats: Server, namespace: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """kill -9 in the middle of 20 runs: each ends complete, each agent has executed it once."""
    ids = [f"host{n}" for n in range(10)]
    roles = ["dispatcher", "dispatcher", "coordinator"]
    with folder() as root, processes(roles, nats.url, namespace, tmp_path) as control:
        await ready(control)
        async with World(nats, namespace, root) as world:
            await world.start_agents(*ids)
            await until(lambda: _knows(world, len(ids)), 30, "an index that is complete")
            requests = [world.request("*", "look", f"r{n}", 3.0) for n in range(RUNS)]
            await asyncio.gather(*(world.fleet.start(r) for r in requests))
            owned = await owners(world, requests)
            victim = control[0]
            mine = [run for run, owner in owned.items() if pid_of(owner) == victim.pid]
            killed = time.monotonic()
            victim.kill()
            ends = await asyncio.gather(*(world.followed(r.run) for r in requests))
            took = time.monotonic() - killed
            again = await owners(world, requests)
    assert mine, "the killed dispatcher must have owned some"
    assert all(record.status == "complete" for record, _ in ends)
    assert all(set(returns) == set(ids) for _, returns in ends)
    for n in range(RUNS):
        assert world.effects.of(f"r{n}") == dict.fromkeys(ids, 1)
    assert all(pid_of(again[run]) != victim.pid for run in mine)
    adopted = [record for record, _ in ends if record.adoptions == 1]
    assert {record.run for record in adopted} == set(mine)
    report(f"{len(mine)} of {RUNS} runs adopted, all ended {took:.1f} s after the kill (3 s long)")


async def test_dispatcher_killed_between_two_waves(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """The next waves are sent by another dispatcher; nobody is left out or asked twice."""
    ids = [f"host{n}" for n in range(6)]
    roles = ["dispatcher", "dispatcher", "coordinator"]
    with folder() as root, processes(roles, nats.url, namespace, tmp_path) as control:
        await ready(control)
        async with World(nats, namespace, root) as world:
            await world.start_agents(*ids)
            await until(lambda: _knows(world, len(ids)), 30, "an index that is complete")
            request = world.request("*", "mark", "wave", 0.5, batch=1)
            record = await world.fleet.start(request)
            await until(lambda: len(world.effects.of("wave")) == 2, what="the second wave")
            next(p for p in control if p.pid == pid_of(record.owner)).kill()
            record, returns = await world.followed(request.run)
    assert record.status == "complete"
    assert set(returns) == set(ids)
    assert world.effects.of("wave") == dict.fromkeys(ids, 1)


async def test_frozen_dispatcher_lets_go(nats: Server, namespace: str, tmp_path: Path) -> None:
    """SIGSTOP past its lease, SIGCONT: another has its run, its commands are refused, it ends."""
    ids = [f"host{n}" for n in range(4)]
    roles = ["dispatcher", "dispatcher", "coordinator"]
    with folder() as root, processes(roles, nats.url, namespace, tmp_path) as control:
        await ready(control)
        async with World(nats, namespace, root) as world:
            await world.start_agents(*ids)
            await until(lambda: _knows(world, len(ids)), 30, "an index that is complete")
            request = world.request("*", "mark", "frozen", 1.0, batch=2)
            await world.fleet.start(request)
            await until(lambda: len(world.effects.of("frozen")) == 2, what="the first wave")
            before = await world.fleet.read(request.run)
            victim = next(p for p in control if p.pid == pid_of(before.owner))
            victim.signal(signal.SIGSTOP)
            record, _ = await world.followed(request.run)
            assert record.status == "complete"
            assert record.epoch > before.epoch
            victim.signal(signal.SIGCONT)
            assert await victim.stopped() == 1
            # What it had sent, had it been frozen between its check and its write:
            body = model.encode(model.Order("mark", ("frozen",)))
            expires = str(int((world.sender.server_now() + 30) * 1000))
            headers = {H_RUN: request.run, H_EPOCH: str(before.epoch), H_EXPIRES: expires}
            known = world.commands("known")
            for agent in ids:
                await world.sender.publish(world.sender.names.agent(agent, "exec"), body, headers)
            # Those who had returned to it know its epoch only: to them the command is a repeat.
            await until(
                lambda: world.commands("stale") + world.commands("known") - known == 4,
                what="four refusals",
            )
            assert world.commands("stale") >= 2
    assert "declared" in victim.text()
    assert world.effects.of("frozen") == dict.fromkeys(ids, 1)


async def test_killed_agent_does_not_repeat(nats: Server, namespace: str, tmp_path: Path) -> None:
    """kill -9 of an agent in the middle of a command: restarted, it reports and does not repeat."""
    trace = tmp_path / "trace"
    with processes(["dispatcher"], nats.url, namespace, tmp_path) as control:
        await ready(control)
        command = ["agent", "--id", "web1", "--allow-commands", "--data", str(tmp_path / "web1")]
        agent = Process(command, nats.url, namespace, tmp_path / "agent.log")
        try:
            async with World(nats, namespace, tmp_path) as world:
                await until(lambda: "takes commands" in agent.text(), 30, "an agent")
                script = f"echo started >> {trace}; exec sleep 600"
                request = world.request("web1", "cmd.run", "sh", "-c", script)
                await world.fleet.start(request)
                await until(trace.exists, 30, "a start")
                agent.replace()
                record, returns = await world.followed(request.run)
                assert returns["web1"].outcome == "interrupted"
                assert record.status == "failed"
                assert trace.read_text() == "started\n"
                record, _ = await world.run("web1", "ping")
                assert record.status == "complete"
                assert len(agent.text().split("takes commands")) == 3
        finally:
            agent.close()


async def test_all_dispatchers_restarted_at_once(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Every dispatcher and coordinator killed: the first that comes back goes on with the run."""
    ids = [f"host{n}" for n in range(4)]
    roles = ["dispatcher", "dispatcher", "coordinator"]
    with folder() as root:
        async with World(nats, namespace, root) as world:
            with processes(roles, nats.url, namespace, tmp_path / "one") as control:
                await ready(control)
                await world.start_agents(*ids)
                await until(lambda: _knows(world, len(ids)), 30, "an index that is complete")
                request = world.request("*", "look", "restart", 2.0)
                await world.fleet.start(request)
                await until(lambda: len(world.effects.of("restart")) == 4, what="a start")
                for process in control:
                    process.kill()
            await until(lambda: world.commands("returned: ok") == 4, 30, "returns without anybody")
            with processes(roles, nats.url, namespace, tmp_path / "two") as control:
                await ready(control)
                record, returns = await world.followed(request.run)
    assert record.status == "complete"
    assert set(returns) == set(ids)
    assert world.effects.of("restart") == dict.fromkeys(ids, 1)


async def test_server_restart_in_the_middle_of_a_run(namespace: str, tmp_path: Path) -> None:
    """The server is killed while agents work: their returns arrive when it is back."""
    ids = [f"host{n}" for n in range(4)]
    with Server(fast=False, store=tmp_path / "store") as server, folder() as root:
        async with World(server, namespace, root) as world, world.dispatcher():
            await world.start_agents(*ids)
            request = world.request("L@" + ",".join(ids), "look", "outage", 1.0)
            await world.fleet.start(request)
            await until(lambda: len(world.effects.of("outage")) == 4, what="a start")
            server.kill()
            await until(lambda: world.commands("returned: ok") == 4, what="ends without a server")
            server.start()
            await until(lambda: world.sender.connected, what="a connection")
            record, returns = await world.followed(request.run)
            assert record.status == "complete"
            assert set(returns) == set(ids)
            assert world.effects.of("outage") == dict.fromkeys(ids, 1)


async def test_partitioned_dispatcher_abandons_its_runs(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Cut off until its runs are another's, then back: it sends and finishes nothing, and ends."""
    ids = [f"host{n}" for n in range(4)]
    roles = ["dispatcher", "coordinator"]
    async with Proxy(nats.port) as proxy:
        with (
            folder() as root,
            processes(roles, nats.url, namespace, tmp_path) as control,
            processes(["dispatcher"], proxy.url, namespace, tmp_path / "cut") as [victim],
        ):
            await ready([*control, victim])
            async with World(nats, namespace, root) as world:
                await world.start_agents(*ids)
                await until(lambda: _knows(world, len(ids)), 30, "an index that is complete")
                request = await _owned_by(world, victim)
                label = str(request.args[0])
                await until(lambda: len(world.effects.of(label)) == 2, what="the first wave")
                cut = asyncio.create_task(proxy.cut(8))
                record, returns = await world.followed(request.run)
                await cut
                assert await victim.stopped() == 1
                after = await world.fleet.read(request.run)
    assert record.status == "complete"
    assert record.adoptions == 1
    assert pid_of(record.owner) == control[0].pid
    assert set(returns) == set(ids)
    assert (after.owner, after.status) == (record.owner, "complete")
    assert world.effects.of(label) == dict.fromkeys(ids, 1)


async def _owned_by(world: World, process: Process) -> FleetRequest:
    """A run in two waves that this very dispatcher has taken."""
    for n in range(50):
        request = world.request("*", "mark", f"cut{n}", 1.0, batch=2)
        record = await world.fleet.start(request)
        if pid_of(record.owner) == process.pid:
            return request
        await world.fleet.cancel(request.run)
    raise AssertionError("it takes no request")


async def test_agent_ends_while_it_waits_for_a_dispatcher(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """An agent that nobody has prepared anything for still obeys SIGTERM at once."""
    command = ["agent", "--id", "web1", "--data", str(tmp_path / "web1")]
    agent = Process(command, nats.url, namespace, tmp_path / "agent.log")
    try:
        await until(lambda: "waiting for a dispatcher" in agent.text(), 30, "an agent that waits")
        agent.signal(signal.SIGTERM)
        assert await agent.stopped() == 0
    finally:
        agent.close()
