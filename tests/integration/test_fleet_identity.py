"""Real dispatchers and agents on a server with permissions: they work, and forgeries do nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.agent import Agent, Function
from holdfast.broker import Broker, Received
from holdfast.broker.streams import Topology
from holdfast.client import Client
from holdfast.client.direct import command as command_directly
from holdfast.client.fleet import Fleet, new_run
from holdfast.config import AgentConfig, DispatcherConfig, RecordConfig
from holdfast.dispatcher import Dispatcher
from holdfast.errors import Unavailable
from holdfast.identity.commands import CommandSigner, Refusal
from holdfast.identity.credentials import AgentCredentials
from holdfast.identity.seed import AccountSeed
from holdfast.identity.users import UserFolder
from holdfast.model import fleet as model
from holdfast.model.fleet import FleetRequest, FleetRun, Order, Return
from holdfast.names import H_SIGNATURE_2, kv_subject
from holdfast.server import Cluster, Server
from holdfast.settings.publisher import Publisher
from holdfast.settings.sealing import Sealer
from holdfast.settings.store import SettingsStore
from holdfast.status.fleet import Agents
from tests.integration.auth_support import NAMESPACE, Site, guarded
from tests.support import running, until

PATTERN = "*"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with a user for each role, and two agents."""
    with guarded(tmp_path_factory.mktemp("site")) as site:
        yield site


@dataclass
class Fleetlet:
    """A dispatcher, two agents, an operator, and what the agents have executed."""

    site: Site
    agents: dict[str, Agent]
    dispatcher: Dispatcher
    operator: Broker
    executed: list[tuple[str, str]] = field(default_factory=list)

    async def run(self, function: str, *args: str) -> tuple[FleetRun, dict[str, Return]]:
        request = FleetRequest(new_run(), PATTERN, function, args=args, raw=True, timeout=30.0)
        record: FleetRun | None = None
        returns: dict[str, Return] = {}
        async for found in Fleet(self.operator).follow(request):
            if isinstance(found, FleetRun):
                record = found
            else:
                returns[found.agent] = found
        assert record is not None
        return record, returns

    def refused(self, agent: str, reason: Refusal) -> float:
        registry = self.agents[agent].telemetry.registry
        labels = {"verdict": f"refused: {reason}"}
        return registry.get_sample_value("holdfast_commands_total", labels) or 0.0

    def denied(self) -> dict[str, dict[str, str]]:
        brokers = {name: agent.broker for name, agent in self.agents.items()}
        brokers |= {"dispatcher": self.dispatcher.broker, "operator": self.operator}
        return {name: broker.denied for name, broker in brokers.items() if broker.denied}


@contextlib.asynccontextmanager
async def fleetlet(site: Site, folder: Path, generation: int = 1) -> AsyncIterator[Fleetlet]:
    """Everything running, each with its own login."""
    executed: list[tuple[str, str]] = []

    def agent(name: str) -> Agent:
        def touch(word: str) -> str:
            executed.append((name, word))
            return word

        return Agent(
            AgentConfig(data_dir=str(folder / name)),
            connection=site.connection(f"agent-{name}"),
            credentials=AgentCredentials.load(site.file(f"agent-{name}")),
            functions=[Function("touch", touch, quick=True)],
        )

    seed_file = str(site.folder.path / "account.seed")
    dispatcher = Dispatcher(
        site.connection("dispatcher"), DispatcherConfig(seed_file=seed_file, generation=generation)
    )
    agents = {name: agent(name) for name in ("alpha", "beta")}
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(running(dispatcher, dispatcher.started.is_set))
        operator = await stack.enter_async_context(site.broker("operator"))
        for one in agents.values():
            await stack.enter_async_context(
                running(one, lambda one=one: one._presence.confirmed > 0)
            )
        found = Fleetlet(site, agents, dispatcher, operator, executed)
        await until(lambda: _both(operator), 10, "both agents in the index")
        yield found


async def _both(operator: Broker) -> bool:
    return set(await Fleet(operator).resolve("*")) == {"alpha", "beta"}


async def test_fleet_works_whole_under_permissions(site: Site, tmp_path: Path) -> None:
    """Commands, acks, returns, facts, large returns and a cancel: nobody is refused anything."""
    async with fleetlet(site, tmp_path) as fleet:
        record, returns = await fleet.run("touch", "one")
        assert (record.status, sorted(returns)) == ("complete", ["alpha", "beta"])
        assert sorted(fleet.executed) == [("alpha", "one"), ("beta", "one")]
        record, _ = await fleet.run("facts.set", "colour", "red")
        assert record.status == "complete"
        assert set(await Fleet(fleet.operator).resolve("G@colour:red")) == {"alpha", "beta"}
        pong = await fleet.operator.request(site.names.node("alpha", "ping"), timeout=5)
        assert msgspec.json.decode(pong.body)["state"] == "RUNNING"
        assert fleet.denied() == {}


async def test_settings_and_secrets_reach_agents_under_permissions(
    site: Site, tmp_path: Path
) -> None:
    """An operator pushes, agents take their own secrets and report; nobody is refused anything."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "top.yaml").write_text("base:\n  '*': [common]\n")
    (tree / "common.yaml").write_text("port: 1\npassword: !encrypted s3cret\n")
    async with fleetlet(site, tmp_path) as fleet:
        publisher = Publisher(fleet.operator, Sealer(site.folder.seed()))
        await publisher.push(tree, agents=["alpha", "beta"])
        await until(lambda: _resolved(fleet), 30, "settings at both agents")
        _, returns = await fleet.run("settings.items")
        for given in returns.values():
            assert "s3cret" not in repr(given.value)
        reports = {entry.key async for entry in publisher.store.applied.entries()}
        assert reports == {"alpha", "beta"}
        assert fleet.denied() == {}


async def test_fact_that_is_set_changes_the_settings_soon(site: Site, tmp_path: Path) -> None:
    """An agent that gets other files by a new fact does not wait for its next look."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "top.yaml").write_text("base:\n  '*': [common]\n  'G@role:edge': [edge]\n")
    (tree / "common.yaml").write_text("port: 1\n")
    (tree / "edge.yaml").write_text("port: 2\n")

    async def on_port(number: int) -> bool:
        _, returns = await fleet.run("settings.get", "port")
        return [r.value for r in returns.values()] == [number, number]

    async with fleetlet(site, tmp_path) as fleet:
        await Publisher(fleet.operator, Sealer(site.folder.seed())).push(tree)
        await until(lambda: on_port(1), 30, "settings at both agents")
        await fleet.run("facts.set", "role", "edge")
        await until(lambda: on_port(2), 30, "settings that fit the fact")
        await fleet.run("facts.set", "role")


async def _resolved(fleet: Fleetlet) -> bool:
    record, returns = await fleet.run("settings.get", "port")
    return record.status == "complete" and {r.value for r in returns.values()} == {1}


async def test_second_agent_of_an_id_is_told_under_permissions(site: Site, tmp_path: Path) -> None:
    """The question whether one is alone stays inside the agents' account, and is answered."""
    async with fleetlet(site, tmp_path) as fleet:
        second = Agent(
            AgentConfig(data_dir=str(tmp_path / "second")),
            connection=site.connection("agent-alpha"),
            credentials=fleet.agents["alpha"].credentials,
        )
        with pytest.raises(Exception, match="is running already"):
            await second.run()


async def test_generation_is_rolled_over(nats: Server, namespace: str, tmp_path: Path) -> None:
    """Agents with two generations obey dispatchers of either, and are believed by both."""
    folder = UserFolder(tmp_path / "auth")
    folder.init(namespace)
    folder.add_agents(["alpha", "beta"], generations=(1, 2))
    site = Site(nats, folder, open_as=namespace)
    for generation in (1, 2):
        async with fleetlet(site, tmp_path / str(generation), generation) as fleet:
            record, returns = await fleet.run("touch", f"generation {generation}")
            assert (record.status, len(returns)) == ("complete", 2)


# ---- forgeries


def order(word: str) -> bytes:
    return model.encode(Order("touch", (word,), deadline=4e9))


def command(seed: AccountSeed, word: str, **changes: Any) -> dict[str, str]:
    """The headers of a command to beta, as a dispatcher of that account would make them."""
    given: dict[str, Any] = {"kind": "exec", "agent": "beta", "run": new_run(), "epoch": 9}
    given |= {"expires": time.time() + 60, "payload": order(word), **changes}
    return CommandSigner(seed.signing_key()).sign(**given)


async def test_forged_commands_execute_nothing(site: Site, tmp_path: Path) -> None:
    """From a user that may publish anything: unsigned, foreign, changed, late, replayed."""
    async with fleetlet(site, tmp_path) as fleet:
        heard: list[Received] = []

        async def keep(message: Received) -> None:
            heard.append(message)

        await fleet.operator.subscribe("hf.agent.*.*", keep)
        await fleet.run("touch", "genuine")
        genuine = {m.subject.split(".")[2]: m for m in heard if m.subject.endswith(".exec")}
        seed, stranger = site.folder.seed(), AccountSeed(bytes(32))
        fresh, foreign = command(seed, "x"), command(stranger, "x")
        late = command(seed, "x", expires=time.time() - 1)
        body = order("x")
        forged: list[tuple[Refusal, dict[str, str], bytes]] = [
            (Refusal.UNSIGNED, {}, body),
            (Refusal.UNSIGNED, {k: v for k, v in fresh.items() if k != H_SIGNATURE_2}, body),
            (Refusal.FOREIGN, foreign, body),
            (Refusal.TAMPERED, fresh, order("other")),
            (Refusal.TAMPERED, {**fresh, "Hf-Epoch": "10"}, body),
            (Refusal.TAMPERED, {**fresh, "Hf-Run": new_run()}, body),
            (Refusal.TAMPERED, command(seed, "x", kind="cancel"), body),
            (Refusal.WRONG_AGENT, genuine["alpha"].headers, genuine["alpha"].body),
            (Refusal.EXPIRED, late, body),
            (Refusal.REPLAYED, genuine["beta"].headers, genuine["beta"].body),
        ]
        before = {reason: fleet.refused("beta", reason) for reason in Refusal}
        for _, headers, payload in forged:
            await fleet.operator.publish("hf.agent.beta.exec", payload, headers)
        await fleet.operator.publish("hf.agent.beta.cancel", b"thief", {"Hf-Run": "r1"})
        await fleet.run("touch", "after")  # in order behind the others: they have been judged
        expected = dict.fromkeys(Refusal, 0.0)
        for reason, _, _ in forged:
            expected[reason] += 1
        expected[Refusal.UNSIGNED] += 1  # the cancel
        got = {reason: fleet.refused("beta", reason) - before[reason] for reason in Refusal}
        assert got == expected
        words = [word for _, word in fleet.executed]
        assert sorted(words) == ["after", "after", "genuine", "genuine"]


async def test_refusal_reaches_no_forger_and_decides_nothing(site: Site, tmp_path: Path) -> None:
    """Forged commands about a run that goes on: their sender hears nothing, the run its returns."""
    async with fleetlet(site, tmp_path) as fleet:
        inbox, answers, acks = fleet.operator.new_inbox(), [], []
        reached = asyncio.Event()

        async def answered(message: Received) -> None:
            answers.append(message)

        async def forge(message: Received) -> None:
            """As soon as the genuine command is on its way, another one in its name."""
            if not message.subject.endswith(".beta.exec") or message.reply == inbox:
                return
            forged = {**message.headers, H_SIGNATURE_2: "0" * 16 + ".AAAA"}
            for _ in range(3):
                await fleet.operator.publish("hf.agent.beta.exec", message.body, forged, inbox)

        async def acked(message: Received) -> None:
            acks.append(msgspec.json.decode(message.body))
            if sum(ack["status"] == "refused" for ack in acks) == 3:
                reached.set()

        await fleet.operator.subscribe(inbox, answered)
        await fleet.operator.subscribe("hf.run.*.ack.beta", acked)
        await fleet.operator.subscribe("hf.agent.*.*", forge)
        record, returns = await fleet.run("touch", "one")
        assert (record.status, sorted(returns)) == ("complete", ["alpha", "beta"])
        assert (record.unreachable, record.refused) == ((), {})
        await asyncio.wait_for(reached.wait(), 10)
        assert {ack.get("reason") for ack in acks if ack["status"] == "refused"} == {"foreign"}
        await fleet.run("touch", "two")  # behind the answers that there might have been
        assert answers == []
        assert fleet.denied() == {}


async def test_reflections_execute_nothing(site: Site, tmp_path: Path) -> None:
    """A direct get answered to, and a consumer delivering to, another agent's command subject."""
    async with fleetlet(site, tmp_path) as fleet, site.raw("agent-alpha") as thief:
        names = site.names
        heard: list[Received] = []

        async def keep(message: Received) -> None:
            heard.append(message)

        await fleet.operator.subscribe("hf.agent.alpha.exec", keep)
        await fleet.run("touch", "genuine")
        mine = {k: v for k, v in heard[0].headers.items() if k.startswith("Hf-")}
        before = {reason: fleet.refused("beta", reason) for reason in Refusal}

        # 1: its own record holds a command, once plain and once with the signature made for itself
        key = kv_subject(names.agents, "alpha")
        get = f"$JS.API.DIRECT.GET.KV_{names.agents}.{key}"
        for headers, body in ((None, order("reflected")), (mine, heard[0].body)):
            await thief.client.request(key, body, headers=headers, timeout=5)
            await thief.client.publish(get, b"", reply="hf.agent.beta.exec")
            await thief.client.flush()
        wrong = (Refusal.UNSIGNED, Refusal.WRONG_AGENT)
        await until(
            lambda: [fleet.refused("beta", r) - before[r] for r in wrong] == [1, 1],
            10,
            "both reflections at beta, refused",
        )

        # 2: a consumer that delivers to beta: an agent may make none
        create = f"$JS.API.CONSUMER.CREATE.{names.jobs}"
        for subject in (create, f"{create}.thief", f"{create}.thief.hf.job.default.none"):
            assert not await thief.may_publish(subject)
        await fleet.run("touch", "after")
        words = [word for _, word in fleet.executed]
        assert sorted(words) == ["after", "after", "genuine", "genuine"]


async def test_reflections_execute_nothing_without_permissions(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """On an open server both reflections arrive, and the signature alone stops them."""
    folder = UserFolder(tmp_path / "auth")
    folder.init(namespace)
    folder.add_agents(["alpha", "beta"])
    open_site = Site(nats, folder, open_as=namespace)
    async with fleetlet(open_site, tmp_path) as fleet:
        broker, names = fleet.operator, open_site.names
        await fleet.run("touch", "genuine")
        key, aim = kv_subject(names.agents, "thief"), names.agent("beta", "exec")
        await broker.store(key, order("reflected"))
        get = f"$JS.API.DIRECT.GET.KV_{names.agents}.{key}"
        await broker.publish(get, b"", reply=aim)
        await until(lambda: fleet.refused("beta", Refusal.UNSIGNED) == 1, 10, "a direct get")
        await broker.subscribe(aim, _ignore)  # the server delivers where it sees this very subject
        await broker.flush()
        queue = names.job("default", "exec")  # what is delivered keeps the subject it came with
        await broker.store(queue, order("delivered"))
        config = {"name": "thief", "deliver_subject": aim, "filter_subject": queue}
        config |= {"ack_policy": "explicit"}
        await broker.api(
            f"CONSUMER.CREATE.{names.jobs}.thief.{queue}",
            {"stream_name": names.jobs, "config": config},
        )
        await until(lambda: fleet.refused("beta", Refusal.UNSIGNED) >= 2, 10, "a delivery")
        await broker.api(f"CONSUMER.DELETE.{names.jobs}.thief")
        await fleet.run("touch", "after")
        words = [word for _, word in fleet.executed]
        assert sorted(words) == ["after", "after", "genuine", "genuine"]


async def _ignore(_: Received) -> None:
    return None


async def test_nonsense_of_one_agent_spoils_nothing_for_others(site: Site, tmp_path: Path) -> None:
    """Records, facts and reports that cannot be read: lists and runs go on without that agent."""
    async with fleetlet(site, tmp_path) as fleet, site.raw("agent-alpha") as alpha:
        names = site.names
        for noun in ("agents", "facts", "applied"):
            await Topology(fleet.operator, RecordConfig()).ensure_buckets(noun)
            for junk in (b"", b"\xff", b"[" * 5000, b'{"id": "beta", "role": "worker"}', b"null"):
                subject = kv_subject(names.bucket(noun), "alpha")
                await alpha.client.request(subject, junk, timeout=5)
        listed = await Agents(Client(fleet.operator, RecordConfig())).list()
        assert [(a.id, a.online) for a in listed if a.id == "beta"] == [("beta", True)]
        assert "beta" in await SettingsStore(fleet.operator).known_agents()
        assert set(await SettingsStore(fleet.operator).reports()) >= {"alpha"}
        _, returns = await fleet.run("touch", "still")
        assert "beta" in returns
        assert fleet.dispatcher._index.online("beta")


async def test_return_of_another_agent_is_not_taken(site: Site, tmp_path: Path) -> None:
    """A forged return, even from inside the core, does not stand in for the agent's own."""
    async with fleetlet(site, tmp_path) as fleet:
        release = asyncio.Event()

        async def hold() -> str:
            await release.wait()
            return "mine"

        for agent in fleet.agents.values():
            agent.functions.add(Function("hold", hold))
        request = FleetRequest(new_run(), "beta", "hold", timeout=30.0)
        await Fleet(fleet.operator).start(request)
        await until(lambda: fleet.agents["beta"]._executor.running == 1, 10)
        forged = Return(request.run, "beta", "ok", "forged", "", 0.0, time.time(), 1)
        with contextlib.suppress(Exception):
            await fleet.operator.store(
                site.names.returned(request.run, "beta"), model.encode(forged)
            )
        registry = fleet.dispatcher.telemetry.registry
        dropped = ("holdfast_fleet_refused_total", {"what": "return"})
        await until(lambda: registry.get_sample_value(*dropped), 10, "a return that was dropped")
        release.set()
        await until(lambda: _over(fleet.operator, request.run), 20, "the end of the run")
        found = await Fleet(fleet.operator).returns(request.run)
        assert found["beta"].value == "mine"


async def _over(operator: Broker, run: str) -> bool:
    return (await Fleet(operator).read(run)).over


async def test_fleet_works_on_a_cluster_with_accounts(tmp_path: Path) -> None:
    """Dispatcher, agents and operator on three different nodes: accounts reach over routes."""
    folder = UserFolder(tmp_path / "auth")
    folder.init(NAMESPACE)
    folder.add_agents(["alpha", "beta"])
    with Cluster(fast=True, includes=[folder.config]) as cluster:
        urls = [node.url for node in cluster.nodes]
        homes = dict(zip(("dispatcher", "agent-alpha", "agent-beta"), urls, strict=True))
        site = Site(cluster, folder, homes=homes)
        async with fleetlet(site, tmp_path) as fleet:
            for word in ("one", "two"):
                record, returns = await fleet.run("touch", word)
                assert (record.status, len(returns)) == ("complete", 2)
            pong = await fleet.operator.request(site.names.node("beta", "ping"), timeout=5)
            assert pong.body
            assert len(fleet.executed) == 4
            assert fleet.denied() == {}


async def test_direct_command_is_signed_with_the_seed(site: Site, tmp_path: Path) -> None:
    """Whoever has it may command an agent without a dispatcher; a login alone may not."""
    async with fleetlet(site, tmp_path) as fleet:
        request = FleetRequest(new_run(), "alpha", "touch", ("direct",), timeout=20)
        found = await command_directly(fleet.operator, request, site.folder.seed())
        assert found.ok
        assert fleet.executed == [("alpha", "direct")]
        other = msgspec.structs.replace(request, run=new_run(), timeout=1)
        with pytest.raises(Unavailable):
            await command_directly(fleet.operator, other, AccountSeed(bytes(32)))
        assert fleet.executed == [("alpha", "direct")]
