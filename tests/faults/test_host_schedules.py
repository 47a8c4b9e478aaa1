"""Schedules that hosts run by themselves: a simulated day, restarts, and no server at the start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from holdfast.agent import Agent, Function
from holdfast.agent.functions import Call
from holdfast.client import Client
from holdfast.config import AgentConfig, DispatcherConfig, RecordConfig
from holdfast.dispatcher import Dispatcher
from holdfast.identity.credentials import AgentCredentials
from holdfast.model.fleet import Order
from holdfast.model.slot import parse_stamp, slot_id
from holdfast.names import parse_slot_run
from holdfast.server import Server
from holdfast.settings.publisher import Publisher
from holdfast.settings.sealing import Sealer
from holdfast.status.slots import HostSlots
from tests.faults.processes import Process
from tests.integration.auth_support import Site, guarded
from tests.support import running, until

HOSTS = [f"host{n}" for n in range(12)]
DAY = 86_400
SPEED = 2_880
"""A day in half a minute."""
HOUR = 3_600
"""A slot each hour: more than a second of real time, so that a busy host does not leave any out."""
TREE = {
    "top": "base:\n  '*': [jobs]\n",
    "jobs": """
schedules:
  hourly:
    function: mark
    args: [hourly]
    every: 1h
    splay: 20m
    catch_up: all
  nightly:
    function: mark
    args: [nightly]
    cron: "0 3 * * *"
    tz: Europe/Zurich
    target: L@host1,host2
    catch_up: all
  never:
    function: mark
    args: [never]
    every: 1m
    enabled: false
""",
}


class Fast:
    """A clock on which a day lasts half a minute."""

    def __init__(self) -> None:
        self._began = time.time()

    def monotonic(self) -> float:
        return self.utc()

    def utc(self) -> float:
        return self._began + (time.time() - self._began) * SPEED

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / SPEED)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with guarded(tmp_path) as made:
        made.folder.add_agents(HOSTS)
        assert isinstance(made.server, Server)
        made.server.reload()
        yield made


class Hosts:
    """Agents on a fast clock, and a list of what they did."""

    def __init__(self, site: Site, root: Path, clock: Fast) -> None:
        self.site = site
        self.root = root
        self.clock = clock
        self.done: list[tuple[str, str]] = []

    def agent(self, id: str) -> Agent:
        def mark(word: str) -> str:
            assert word != "never"
            return word

        agent = Agent(
            AgentConfig(data_dir=str(self.root / id), reconnect_seconds=0.2),
            connection=self.site.connection(f"agent-{id}"),
            credentials=AgentCredentials.load(self.site.file(f"agent-{id}")),
            functions=[Function("mark", mark, quick=True)],
        )
        agent.schedules.clock = self.clock
        agent.schedules.now = self.clock.utc
        fire = agent._commands._executor.submit

        def submit(call: Call, order: Order) -> bool:
            self.done.append((id, call.run))
            return fire(call, order)

        agent._commands._executor.submit = submit  # type: ignore[method-assign]
        return agent

    def count(self, schedule: str) -> Counter[tuple[str, str]]:
        return Counter(d for d in self.done if (parse_slot_run(d[1]) or ("",))[0] == schedule)


@contextlib.asynccontextmanager
async def pushed(site: Site, root: Path, jobs: str = TREE["jobs"]) -> AsyncIterator[None]:
    """A dispatcher that has made the buckets, and published settings."""
    tree = root / "tree"
    tree.mkdir()
    for name, text in (TREE | {"jobs": jobs}).items():
        (tree / f"{name}.yaml").write_text(text)
    seed = site.folder.path / "account.seed"
    dispatcher = Dispatcher(site.connection("dispatcher"), DispatcherConfig(seed_file=str(seed)))
    async with running(dispatcher, dispatcher.started.is_set):
        async with site.broker("operator") as operator:
            await Publisher(operator, Sealer(site.folder.seed())).push(tree, agents=HOSTS)
        yield


async def test_day_of_slots_with_the_centre_away_for_half_of_it(
    site: Site, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Every slot runs once on every host, a host that restarts too; then all answers arrive."""
    assert isinstance(site.server, Server)
    clock = Fast()
    hosts = Hosts(site, tmp_path, clock)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(pushed(site, tmp_path))
        agents = {}
        for id in HOSTS:
            agents[id] = hosts.agent(id)
            lives = running(agents[id], lambda a=agents[id]: len(a.schedules) > 0)
            if id != "host3":
                await stack.enter_async_context(lives)
            else:
                restarted = await stack.enter_async_context(contextlib.AsyncExitStack())
                await restarted.enter_async_context(lives)
        begun = clock.utc()
        await until(lambda: clock.utc() > begun + DAY / 4, 60, "a quarter of the day")
        site.server.kill()
        await until(lambda: clock.utc() > begun + DAY / 2, 60, "noon")
        await restarted.aclose()  # without a server, and it starts without one
        again = hosts.agent("host3")
        await stack.enter_async_context(running(again, lambda: len(again.schedules) > 0))
        await until(lambda: clock.utc() > begun + DAY * 3 / 4, 60, "the centre is back")
        site.server.start()
        site.server.wait_ready()
        await until(lambda: clock.utc() > begun + DAY, 60, "the end of the day")
        async with site.broker("operator") as operator:
            slots = HostSlots(Client(operator, RecordConfig()))
            count = await _check(hosts, slots, begun, begun + DAY)
    report(f"{count} slots on {len(HOSTS)} hosts in a day, each ran once")


async def _check(hosts: Hosts, slots: HostSlots, begun: float, end: float) -> int:
    """Every slot ran once, and every answer is there; returns how many slots there were."""
    first, last = (int(begun) // HOUR + 1) * HOUR, int(end - HOUR / 2) // HOUR * HOUR
    wanted = {(host, slot_id("hourly", m)) for host in HOSTS for m in range(first, last, HOUR)}
    assert len(wanted) >= 12 * 22
    counted = hosts.count("hourly")
    assert wanted <= counted.keys()
    assert set(counted.values()) == {1}
    nights = hosts.count("nightly")
    assert {host for host, _ in nights} == {"host1", "host2"}
    assert set(nights.values()) == {1}
    assert not hosts.count("never")

    async def answered() -> bool:
        for moment in range(first, last, 4 * HOUR):
            found = await slots.show("hourly", moment)
            if found.waiting or found.ok != len(HOSTS):
                return False
        return True

    await until(answered, 60, "every answer at the centre")
    [(_, run), *_] = nights
    moment = parse_stamp((parse_slot_run(run) or ("", ""))[1])
    found = await slots.show("nightly", moment)
    assert set(found.returns) == {"host1", "host2"}
    assert not found.waiting
    return len(wanted)


async def test_agent_without_a_server_works_from_its_disk(site: Site, tmp_path: Path) -> None:
    """It runs its schedules, is killed and started again, and connects when a server answers."""
    assert isinstance(site.server, Server)
    jobs = "schedules: {quarter: {function: facts.keys, every: 1s}}\n"
    effects = tmp_path / "host5" / "runs.jsonl"

    def agent() -> Process:
        words = ["agent", "--id", "host5", "--data", str(tmp_path / "host5")]
        env = site.environment("agent-host5") | {"HOLDFAST_CONNECT_TIMEOUT_SECONDS": "1"}
        return Process(words, site.server.url, "hf", tmp_path / "agent.log", **env)

    def slots() -> Counter[str]:
        lines = effects.read_text().splitlines() if effects.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        return Counter(e["run"] for e in entries if e["state"] == "done" and "quarter" in e["run"])

    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(pushed(site, tmp_path, jobs))
        process = agent()
        await until(lambda: len(slots()) >= 2, 40, "slots while connected")
        site.server.kill()
        process.kill()
        before = len(slots())
        process = agent()
        stack.callback(process.kill)
        await until(lambda: len(slots()) >= before + 3, 40, "slots without a server")
        assert process.running
        newest = max(slots())
        site.server.start()
        site.server.wait_ready()
        async with site.broker("operator") as operator:
            read = HostSlots(Client(operator, RecordConfig()))
            at = parse_stamp((parse_slot_run(newest) or ("", ""))[1])

            async def answered() -> bool:
                return "host5" in (await read.show("quarter", at)).returns

            await until(answered, 60, "the answer of a slot of the outage")
