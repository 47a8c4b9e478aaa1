"""Attackers who make the server speak for them: only logins that may drain, cancel, dispatch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast import Context, Holdfast, Worker
from holdfast.agent import Function
from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.client.fleet import Fleet, new_run
from holdfast.config import ConnectionConfig, RecordConfig, WorkerConfig
from holdfast.errors import InvalidInput, NotFound
from holdfast.identity.commands import CommandSigner, Refusal
from holdfast.identity.credentials import Credentials
from holdfast.model import fleet as model
from holdfast.model.fleet import FleetRequest, Order
from holdfast.names import H_TTL, kv_stream, kv_subject
from holdfast.status.audit import Audit, AuditLine
from holdfast.status.fleet import Agents
from holdfast.status.nodes import Nodes
from tests.integration.auth_support import Site, guarded
from tests.integration.test_fleet_identity import Fleetlet, fleetlet
from tests.support import running, until


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with guarded(tmp_path_factory.mktemp("requests")) as site:
        yield site


def store_of(broker: Broker) -> Client:
    return Client(broker, RecordConfig())


async def fleet_runs(broker: Broker) -> list[str]:
    return [entry.key async for entry in Fleet(broker)._runs.entries()]


async def settled(fleet: Fleetlet) -> None:
    """Everything that was sent before has been handled: a genuine run went through after it."""
    record, returns = await fleet.run("touch", "genuine")
    assert (record.status, len(returns)) == ("complete", 2)


async def test_command_for_another_namespace_is_refused(site: Site, tmp_path: Path) -> None:
    """Two namespaces of one seed: what one's dispatcher signed is nothing to the other's agents."""
    key = site.folder.seed().signing_key()
    async with fleetlet(site, tmp_path) as fleet:
        for namespace, word in (("other", "evil"), ("hf", "own")):
            payload = model.encode(Order("touch", (word,), deadline=4e9))
            headers = CommandSigner(key, namespace).sign(
                kind="exec",
                agent="beta",
                run=new_run(),
                epoch=9,
                expires=fleet.operator.server_now() + 60,
                payload=payload,
            )
            await fleet.operator.publish(site.names.agent("beta", "exec"), payload, headers)
        await until(lambda: ("beta", "own") in fleet.executed, 20, "the command of its namespace")
        assert fleet.executed == [("beta", "own")]
        assert fleet.refused("beta", Refusal.TAMPERED) == 1


@pytest.mark.parametrize("role", ["client", "worker", "scheduler", "coordinator"])
async def test_reflected_request_runs_no_command(site: Site, tmp_path: Path, role: str) -> None:
    """A request in a record of one's own, fetched with the dispatchers' subject as the reply."""
    names = site.names
    async with fleetlet(site, tmp_path) as fleet, site.broker(role) as thief:
        request = FleetRequest(new_run(), "*", "touch", args=("evil",), raw=True)
        key = kv_subject(names.runs, "evil")
        await thief.store(key, model.encode(request), thief.signature(names.dispatch("run"), b""))
        get = f"$JS.API.DIRECT.GET.{kv_stream(names.runs)}.{key}"
        for verb in ("run", "cancel"):
            await thief.publish(get, b"", reply=names.dispatch(verb))
        await thief.flush()
        await settled(fleet)
        assert {word for _, word in fleet.executed} == {"genuine"}
        assert not [key for key in await fleet_runs(fleet.operator) if request.run in key]


async def test_agent_stops_no_other_agent(site: Site, tmp_path: Path) -> None:
    """An answer of the server delivered to another agent's drain is not obeyed."""
    async with fleetlet(site, tmp_path) as fleet, site.raw("agent-alpha") as thief:
        for question in ("$JS.API.INFO", kv_subject(site.names.facts, "alpha")):
            await thief.client.publish(question, b"{}", reply=site.names.node("beta", "drain"))
        await thief.client.flush()
        await settled(fleet)
        assert not fleet.agents["beta"].stopping.is_set()


async def test_operator_drains_an_agent_and_a_worker(site: Site, tmp_path: Path) -> None:
    """The signed way works for agents and workers; the reflected one stops neither."""
    app = Holdfast("shop")

    @app.job
    async def noop() -> None:
        return None

    worker = Worker(app, WorkerConfig(), connection=site.connection("worker"))
    async with fleetlet(site, tmp_path) as fleet:
        async with running(worker, lambda: worker.pulling):
            async with site.broker("worker") as thief:
                await thief.publish("$JS.API.INFO", reply=site.names.node(worker.node, "drain"))
                await thief.flush()
            await settled(fleet)
            assert not worker.stopping.is_set()
            nodes = Nodes(store_of(fleet.operator))
            await nodes.drain(worker.node)
            await until(worker.stopping.is_set, 10, "a drained worker")
        await nodes.drain("beta")
        await until(fleet.agents["beta"].stopping.is_set, 10, "a drained agent")


async def test_cancel_is_obeyed_from_logins_only(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on when the server is made to say cancel, and ends when a client says it."""
    for name, value in site.environment("client").items():
        monkeypatch.setenv(name, value)
    app = Holdfast("shop")
    begun = asyncio.Event()

    @app.job
    async def long(ctx: Context) -> None:
        begun.set()
        await asyncio.sleep(60)

    worker = Worker(app, WorkerConfig(), connection=site.connection("worker"))
    async with running(worker, lambda: worker.pulling):
        run = await long.enqueue()
        await asyncio.wait_for(begun.wait(), 20)
        async with site.broker("coordinator") as thief:
            await thief.request("$JS.API.INFO")
            await thief.publish("$JS.API.INFO", reply=site.names.cancel(run.id))
            await thief.flush()
            await thief.request("$JS.API.INFO")
        assert (await run.status()).state == "running"
        assert await run.cancel()
        assert (await run.status()).state == "cancelled"
    await app.close()


async def test_record_of_a_run_names_the_login(site: Site, tmp_path: Path) -> None:
    """Whoever a request says to be, the login that signed it is written down."""
    async with fleetlet(site, tmp_path) as fleet:
        request = FleetRequest(new_run(), "*", "touch", args=("x",), raw=True, user="root")
        record = await Fleet(fleet.operator).start(request)
        assert record.request.user == "operator: root"


async def test_operator_of_an_earlier_version(site: Site, tmp_path: Path) -> None:
    """Its requests are refused with what to do, and obeyed where that is switched on."""
    login = Credentials.load(site.file("operator"))
    earlier = tmp_path / "operator.json"
    Credentials(user=login.user, role=login.role, nkey_seed=login.nkey_seed).save(earlier)
    connection = ConnectionConfig(nats_url=site.server.url, credentials_file=str(earlier))
    request = FleetRequest(new_run(), "L@alpha,beta", "touch", args=("old",), raw=True)
    async with fleetlet(site, tmp_path) as fleet, Broker(connection) as operator:
        with pytest.raises(InvalidInput, match="holdfast auth renew"):
            await Fleet(operator).start(request)
        with pytest.raises(NotFound, match="does not obey"):
            await Nodes(store_of(operator)).drain("beta")
        fleet.dispatcher.broker.guard.accept_unsigned = True
        record = await Fleet(operator).start(request)
        assert record.request.function == "touch"


async def test_forged_acks_are_one_line(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent that sends a hundred acks with a wrong code fills no log."""
    async with fleetlet(site, tmp_path) as fleet, site.raw("agent-alpha") as thief:
        release = asyncio.Event()

        async def hold() -> None:
            await release.wait()

        for agent in fleet.agents.values():
            agent.functions.add(Function("hold", hold))
        request = FleetRequest(new_run(), "*", "hold", timeout=30.0)
        await Fleet(fleet.operator).start(request)
        for _ in range(100):
            subject = site.names.ack(request.run, "alpha")
            await thief.client.publish(subject, b"{}", headers={"Hf-Signature": "1.x"})
        await thief.client.flush()
        registry = fleet.dispatcher.telemetry.registry
        dropped = ("holdfast_fleet_refused_total", {"what": "ack"})
        await until(lambda: registry.get_sample_value(*dropped) == 100, 20, "dropped acks")
        release.set()
        lines = [r for r in caplog.records if "ack of agent alpha" in r.getMessage()]
        assert len([r for r in lines if r.levelno >= logging.WARNING]) == 1


async def test_revoked_agent_is_forgotten(site: Site, tmp_path: Path) -> None:
    """A record that was written to stay online for ever keeps no agent from being forgotten."""
    async with fleetlet(site, tmp_path) as fleet:
        names, operator = site.names, fleet.operator
        record = {"id": "ghost", "role": "agent", "liveness": {"timeout_seconds": 1e9}}
        record |= {"state": "RUNNING"}
        await operator.store(kv_subject(names.facts, "ghost"), b"{}")
        body = msgspec.json.encode(record)
        await operator.store(kv_subject(names.agents, "ghost"), body, {H_TTL: "never"})
        agents = Agents(store_of(operator))
        with pytest.raises(Exception, match="is online"):
            await agents.forget("beta")
        await agents.forget("ghost")
        assert "ghost" not in {info.id for info in await agents.list()}
        gone = fleet.dispatcher._index
        await until(lambda: "ghost" not in gone.facts, 10, "the dispatcher's index")


async def test_audit_names_the_login(site: Site, tmp_path: Path) -> None:
    """Entries of the operators' ledger carry the login that signed them; forged ones say so."""
    async with fleetlet(site, tmp_path) as fleet:
        audit = Audit(store_of(fleet.operator), who="dana")
        await audit.write("pause", detail="genuine")
        subject = site.names.log("operator", "pause")
        forged = AuditLine("pause", "dana", "h", 0.0, detail="forged")
        body = msgspec.json.encode(forged)
        await fleet.operator.store(subject, body)
        other = fleet.operator.signature(subject, b"something else") or {}
        await fleet.operator.store(subject, body, other)
        found = [a.who for a in await audit.actions() if a.verb == "pause"]
        assert found == ["forged: dana", "unsigned: dana", "operator: dana"]
