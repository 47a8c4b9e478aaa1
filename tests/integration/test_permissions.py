"""Every role does its whole work with its own login, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast import Backoff, Context, Flow, Holdfast, Limit, Worker
from holdfast.broker import Broker
from holdfast.broker.streams import Topology
from holdfast.config import ConnectionConfig, RecordConfig, SchedulerConfig, WebConfig, WorkerConfig
from holdfast.coordinator import Coordinator
from holdfast.errors import BrokerError, NotConnected, PermissionDenied
from holdfast.identity import grants
from holdfast.identity.credentials import Credentials
from holdfast.identity.users import UserFolder
from holdfast.names import kv_stream, kv_subject
from holdfast.scheduler import Scheduler
from holdfast.server import Server
from holdfast.web import create_app
from tests.faults.processes import Process
from tests.integration.auth_support import AGENTS, NAMESPACE, Site, guarded
from tests.integration.support import Seen
from tests.integration.web_support import TOKENS
from tests.support import running, until


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with a user for each role, and two agents."""
    with guarded(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture
def app(site: Site, monkeypatch: pytest.MonkeyPatch) -> Holdfast:
    """An app that sends as the user `client`, by its environment."""
    for name, value in site.environment("client").items():
        monkeypatch.setenv(name, value)
    return Holdfast("shop")


async def test_roles_do_their_whole_work(app: Holdfast, site: Site) -> None:
    """Runs, delays, events, large results, cancels and slots: nobody is refused anything."""
    seen = Seen()

    @app.job
    async def large(size: int) -> str:
        return "x" * size

    @app.job
    async def sleepy(ctx: Context) -> None:
        seen.append(("sleepy", ctx.run))
        await asyncio.sleep(60)

    @app.job
    async def broken() -> None:
        await app.publish("bang", {})
        raise ValueError("no")

    @app.job(limits=[Limit(running=1)])
    async def narrow(number: int) -> int:
        await asyncio.sleep(0.05)
        return number

    @app.flow
    async def story(ctx: Flow, key: str) -> int:
        ctx.undo(len, "undone")
        await ctx.step(len, "step")
        children = [narrow.request(1), narrow.options(delay="1s").request(2)]
        found = sum(await ctx.gather(children))
        await ctx.sleep(1.2)
        await ctx.event("go", key=key, timeout="1m")
        return found

    @app.job(on="bang")
    async def heard(event: dict[str, str]) -> None:
        seen.append(("heard", event))

    @app.cron("* * * * * *")
    async def tick(ctx: Context) -> None:
        seen.append(("tick", ctx.run))

    client = await app.backend()
    worker = Worker(app, WorkerConfig(), connection=site.connection("worker"))
    scheduler = Scheduler(app, SchedulerConfig(), connection=site.connection("scheduler"))
    coordinator = Coordinator(site.connection("coordinator"))
    async with (
        running(worker, lambda: worker.pulling),
        running(coordinator),
        running(scheduler, lambda: scheduler.started.is_set()),
    ):
        await large.enqueue(3)
        run = await large.options(delay="1s").enqueue(2_000_000)
        assert len(await run.result(timeout=20)) == 2_000_000
        in_line = [await narrow.enqueue(number) for number in range(4)]
        assert [await one.result(timeout=20) for one in in_line] == [0, 1, 2, 3]
        flows = [await story.enqueue(key) for key in ("one", "two")]
        await app.publish("go", key="one")
        assert await flows[0].result(timeout=20) == 3
        assert await flows[1].cancel()
        long = await sleepy.enqueue()
        await until(lambda: ("sleepy", long.id) in seen, 10)
        await long.cancel()
        await broken.enqueue()
        await until(lambda: {"heard", "tick"} <= {kind for kind, _ in seen}, 20)
    brokers = {"worker": worker.current.broker, "scheduler": scheduler.broker}
    brokers |= {"coordinator": coordinator.broker, "client": client.broker}  # type: ignore[attr-defined]
    assert {role: broker.denied for role, broker in brokers.items()} == {
        role: {} for role in brokers
    }
    await app.close()


async def test_coordinator_gives_back_what_a_killed_worker_held(
    app: Holdfast, site: Site, tmp_path: Path
) -> None:
    """A third party's nak and the takeover need no more than is granted: processes and kill -9."""

    @app.job
    async def gate(name: str) -> int:
        raise AssertionError("runs in the processes")

    started: list[Process] = []

    def start(user: str, log: str, *command: str) -> Process:
        env = site.environment(user) | {"GATES": str(tmp_path)}
        url, namespace = env.pop("HOLDFAST_NATS_URL"), env.pop("HOLDFAST_NAMESPACE")
        started.append(Process([*command], url, namespace, tmp_path / log, **env))
        return started[-1]

    try:
        start("control", "control.log", "control")
        first = start("worker", "first.log", "worker", "tests.integration.gate_app:app")
        await until(lambda: first.text(), 30, "the first line of a worker")
        run = await until(lambda: _sent(gate), 30, "the namespace")
        held = f"door.{first.pid}.started"
        await until(lambda: (tmp_path / held).exists(), 30, first.text())
        second = start("worker", "second.log", "worker", "tests.integration.gate_app:app")
        first.kill()
        await until(lambda: (tmp_path / f"door.{second.pid}.started").exists(), 60, second.text())
        (tmp_path / "door.open").touch()
        assert await run.result(timeout=30) == second.pid
        for process in started:
            assert "NATS refused" not in process.text(), process.text()
    finally:
        for process in started:
            process.close()
        await app.close()


async def _sent(gate: Any) -> Any:
    """A run, once the worker has made the streams: a client may not."""
    try:
        return await gate.enqueue("door")
    except PermissionDenied:
        return None


STEERING = (
    "$KV.hf_slots.term.scheduler",
    "$KV.hf_slots.progress.scheduler",
    "$KV.hf_slots.>",
    "$KV.hf_schedules.pause.g.j",
    "$KV.hf_schedules.refused.shop",
)
"""What stops schedules and jobs for everybody; whoever may keep schedules writes none of it."""
FORBIDDEN = {
    "client": (*STEERING, "hf.dead.g.j", "$KV.hf_leases.l", "$JS.API.STREAM.CREATE.HF_JOBS"),
    "worker": (*STEERING, "$KV.hf_leases.l", "hf.agent.alpha.exec", "hf.node.n1.drain"),
    "scheduler": ("hf.dead.g.j", "hf.agent.alpha.exec", "$JS.API.CONSUMER.MSG.NEXT.HF_JOBS.c"),
    "coordinator": ("$KV.hf_schedules.schedule.s", "hf.agent.alpha.exec", "hf.event.e"),
    "dispatcher": ("hf.job.g.j", "$KV.hf_runs.r", "$KV.hf_schedules.schedule.s"),
    "control": ("$KV.hf_secrets.alpha", "$JS.API.CONSUMER.MSG.NEXT.HF_JOBS.c"),
    "web": ("$KV.hf_secrets.alpha", "$JS.API.STREAM.MSG.GET.KV_hf_secrets"),
    "operator": ("other.job.g.j", "$KV.other_runs.r"),
}
NOBODY = (
    "$JS.API.STREAM.DELETE.HF_JOBS",
    "$JS.API.STREAM.DELETE.KV_hf_runs",
    "$JS.API.STREAM.SNAPSHOT.HF_JOBS",
    "$JS.API.STREAM.CREATE.OTHER",
    "$JS.API.ACCOUNT.PURGE.HF",
    "$JS.API.META.LEADER.STEPDOWN",
    "$SYS.REQ.SERVER.PING",
    "$KV.other.key",
    "other.subject",
    "_INBOX.core.worker.x",
)


@pytest.mark.parametrize("role", [r for r in grants.ROLES if r not in grants.ISSUED_LATER])
async def test_role_may_do_nothing_else(site: Site, role: str) -> None:
    """What another role does, what nobody does, and the answers to others are refused."""
    async with site.raw(role) as raw:
        allowed = [s for s in (*FORBIDDEN[role], *NOBODY) if await raw.may_publish(s)]
        other = "client" if role != "client" else "worker"
        ears = (">", "_INBOX.>", f"_INBOX.core.{other}.>", "_INBOX.agents.>", "$JS.>", "$SYS.>")
        heard = [s for s in ears if await raw.may_hear(s)]
        assert (allowed, heard) == ([], [])
        assert await raw.may_hear(f"{raw.login.inbox}.>")
        assert await raw.may_publish("$JS.API.INFO")


JUDGES = {"coordinator", "control", "operator"}


@pytest.mark.parametrize("role", [r for r in grants.ROLES if r not in grants.ISSUED_LATER])
async def test_only_judges_look_at_connections_and_at_what_others_pull(
    site: Site, role: str
) -> None:
    """Coordinators ask for connections and hear what dead workers are handed; nobody else does."""
    async with site.raw(role) as raw:
        other = "_INBOX.core.other"
        assert await raw.may_publish("$SYS.REQ.ACCOUNT.PING.CONNZ") == (role in JUDGES)
        assert await raw.may_hear(f"{other}.pull.0123456789abcdef012345.>") == (role in JUDGES)
        assert not await raw.may_hear(f"{other}.0123456789abcdef012345.*")
        pulls = f"{other}.pull.0123456789abcdef012345.0"
        assert await raw.may_publish(f"{pulls}.probe") == (role in JUDGES)
        assert not await raw.may_publish(f"{pulls}.1"), "what looks like a message to a worker"


async def test_forbidden_requests_are_told_by_name(site: Site) -> None:
    """A process that is refused hears it at once, with the subject."""
    async with site.broker("client") as broker:
        with pytest.raises(PermissionDenied, match="allow it for this user"):
            await broker.store("hf.dead.g.j", b"{}")


# ---- without credentials


def logins(site: Site, tmp_path: Path) -> dict[str, ConnectionConfig]:
    """Ways to come in that are not ours."""
    stranger = UserFolder(tmp_path / "stranger")
    stranger.init(NAMESPACE)
    plain: dict[str, Any] = {"nats_url": site.server.url, "namespace": NAMESPACE}
    return {
        "nothing": ConnectionConfig(**plain),
        "password": ConnectionConfig(**plain, user="worker", password="worker"),
        "token": ConnectionConfig(**plain, token="secret"),
        "another account's worker": ConnectionConfig(
            **plain, credentials_file=str(stranger.credentials("worker"))
        ),
    }


async def test_nobody_gets_in_without_credentials(site: Site, tmp_path: Path) -> None:
    """No login, a guessed one and one of another folder are refused, in one sentence, at once."""
    for name, config in logins(site, tmp_path).items():
        with pytest.raises(NotConnected, match="refuses the login") as refused:
            await Broker(config).open()
        text = str(refused.value)
        assert text.count("\n") == 0, name
        assert "credentials_file" in text
        assert "secret" not in text


async def test_wrong_login_is_tried_once_per_server(site: Site, tmp_path: Path) -> None:
    """However long connecting may take, a refusal ends it after one try at each server."""
    config = ConnectionConfig(
        nats_url=f"{site.server.url},{site.server.url}", connect_timeout_seconds=600
    )
    broker = Broker(config)
    with pytest.raises(NotConnected, match="refuses the login"):
        await asyncio.wait_for(broker.open(), 60)
    assert broker._refusals == 2


# ---- agents


def reachable(site: Site, agent: str) -> tuple[list[str], list[str]]:
    """Every subject that concerns one agent: to publish, and to hear."""
    names = site.names
    buckets = (names.agents, names.nodes, names.facts, names.applied, names.secrets)
    publish = [kv_subject(bucket, agent) for bucket in buckets]
    publish += [kv_subject(names.returns, f"r1.{agent}"), names.returned("r1", agent)]
    publish += [names.ack("r1", agent), names.log("node", agent)]
    publish += [names.agent(agent, verb) for verb in ("exec", "cancel", "settings")]
    publish += [names.node(agent, verb) for verb in ("ping", "drain")]
    publish += [f"_INBOX.agents.agent-{agent}.x"]
    for bucket in (*buckets, names.returns):
        key = f"r1.{agent}" if bucket == names.returns else agent
        publish += [f"$JS.API.DIRECT.GET.{kv_stream(bucket)}.{kv_subject(bucket, key)}"]
    hear = [names.agent(agent, "exec"), names.agent(agent, "*"), names.node(agent, "*")]
    hear += [names.changed(bucket, agent) for bucket in buckets]
    hear += [names.ack("*", agent), names.returned("*", agent), f"_INBOX.agents.agent-{agent}.>"]
    hear += [kv_subject(bucket, agent) for bucket in buckets]
    return publish, hear


def wholesale(site: Site) -> tuple[list[str], list[str]]:
    """Subjects that concern all agents at once, or the core."""
    names, ns = site.names, NAMESPACE
    nouns = "agents nodes facts applied secrets settings returns fleet runs leases slots schedules"
    streams = [kv_stream(names.bucket(noun)) for noun in nouns.split()]
    streams += [
        names.jobs,
        names.events,
        names.dead,
        names.ledger,
        names.history,
        names.history_index,
        names.flows,
    ]
    verbs = "STREAM.INFO STREAM.MSG.GET STREAM.PURGE STREAM.DELETE STREAM.CREATE DIRECT.GET"
    verbs += " STREAM.MSG.DELETE CONSUMER.LIST CONSUMER.NAMES STREAM.SNAPSHOT"
    publish = [f"$JS.API.{verb}.{stream}" for verb in verbs.split() for stream in streams]
    for stream in streams:
        publish += [f"$JS.API.CONSUMER.CREATE.{stream}", f"$JS.API.CONSUMER.CREATE.{stream}.c.>"]
        publish += [f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.c", f"$JS.ACK.{stream}.c.1.1.1.1.0"]
        publish += [f"$JS.API.CONSUMER.MSG.NEXT.{stream}.c"]
    publish += ["$JS.API.STREAM.LIST", "$JS.API.STREAM.NAMES", "$SYS.REQ.SERVER.PING"]
    publish += [kv_subject(names.settings, "revision"), kv_subject(names.leases, "scheduler")]
    publish += [f"{ns}.job.default.j", f"{ns}.event.e", f"{ns}.dead.g.j", f"{ns}.dispatch.run"]
    publish += [names.cancel("r1"), names.handover, names.log("operator", "cancel")]
    publish += ["_INBOX.core.operator.x", "_INBOX.core.dispatcher.x"]
    hear = [">", "*", f"{ns}.>", f"{ns}.agent.>", f"{ns}.agent.*.*", f"{ns}.agent.*.exec"]
    hear += [f"{ns}.kv.>", f"{ns}.kv.{ns}_secrets.*", "_INBOX.>", "_INBOX.*.>", "_INBOX.agents.>"]
    hear += ["$KV.>", f"$KV.{ns}_secrets.>", "$JS.>", "$SYS.>", f"{ns}.run.>", f"{ns}.node.*.ping"]
    return publish, hear


async def test_agent_reaches_nothing_of_another(site: Site) -> None:
    """Every subject and key of beta, and everything that is for all, is closed to alpha."""
    publish, hear = reachable(site, "beta")
    more, ears = wholesale(site)
    async with site.raw("agent-alpha") as alpha:
        assert [s for s in publish + more if await alpha.may_publish(s)] == []
        assert [s for s in hear + ears if await alpha.may_hear(s)] == []


async def test_agent_reaches_its_own(site: Site) -> None:
    """What an agent needs is open to it: the grants are not tight by being useless."""
    own = grants.agent(site.names, "alpha")
    async with site.raw("agent-alpha") as alpha:
        for subject in own.publish:
            shown = subject.replace("*", "r1").replace(">", "revision")
            assert await alpha.may_publish(shown, reply=f"{alpha.login.inbox}.x"), subject
        for subject in (*own.subscribe, f"{alpha.login.inbox}.>"):
            assert await alpha.may_hear(subject), subject


async def test_agent_hears_nothing_of_another(site: Site) -> None:
    """A command to beta and the answers to beta arrive at beta only."""
    async with (
        site.raw("agent-alpha") as alpha,
        site.raw("agent-beta") as beta,
        site.broker("dispatcher") as dispatcher,
    ):
        for agent in (alpha, beta):
            for subject in ("hf.agent.alpha.*", "hf.agent.beta.*", "hf.agent.*.*", "_INBOX.>"):
                await agent.may_hear(subject)
        await dispatcher.publish("hf.agent.beta.exec", b"for beta")
        await dispatcher.flush()
        await until(lambda: beta.heard, 10)
        await alpha.client.flush()
        assert [m.data for m in beta.heard] == [b"for beta"]
        assert alpha.heard == []


ONE_ACCOUNT = """
accounts { ONE { jetstream: enabled, users: [
  { user: core, password: pw }
  { user: agent, password: pw, permissions: { publish: ["$KV.hf_facts.alpha"] } }
] } }
"""


async def test_reflection_is_real_in_one_account() -> None:
    """Why agents have an account of their own: permissions do not stop the server's answers."""
    with Server(fast=True, extra_config=ONE_ACCOUNT) as server:
        url = server.url.replace("//", "//{}:pw@")
        async with Broker(ConnectionConfig(nats_url=url.format("core"))) as core:
            topology = Topology(core, RecordConfig())
            await topology.ensure()
            await topology.ensure_buckets("facts")
            agent = Broker(ConnectionConfig(nats_url=url.format("agent")))
            await agent.open(check=False)
            await agent.publish("$KV.hf_facts.alpha", b"x", reply="$KV.hf_facts.beta")
            await agent.publish("$KV.hf_facts.alpha", b"x", reply="hf.job.default.resize")
            await agent.close()

            async def stored() -> bool:
                job = await core.api("STREAM.INFO.HF_JOBS", {"subjects_filter": ">"})
                fact = await core.api("STREAM.INFO.KV_hf_facts", {"subjects_filter": ">"})
                found = {*(job["state"].get("subjects") or {}), *fact["state"]["subjects"]}
                return {"hf.job.default.resize", "$KV.hf_facts.beta"} <= found

            await until(stored, 10, "an agent's junk as a run, and as another agent's facts")


async def test_reflected_answers_reach_nothing_that_counts(site: Site) -> None:
    """An agent names others' subjects as the reply: the server's answers never reach the core."""
    names = site.names
    aims = [kv_subject(b, "beta") for b in (names.agents, names.nodes, names.facts, names.applied)]
    aims += [kv_subject(names.secrets, "beta"), kv_subject(names.settings, "revision")]
    aims += [kv_subject(names.leases, "scheduler"), kv_subject(names.fleet, "run.r1")]
    aims += [names.job("default", "j"), names.event("e"), names.dead_letter("g", "j")]
    aims += [names.returned("r1", "beta"), names.ack("r1", "beta"), names.cancel("r1")]
    aims += [names.node("worker-1", "drain"), names.dispatch("run"), "_INBOX.core.operator.x"]
    aims += ["$JS.API.STREAM.PURGE.KV_hf_nodes", "$JS.API.STREAM.DELETE.HF_JOBS"]
    async with site.broker("operator") as operator:
        topology = Topology(operator, RecordConfig())
        await topology.ensure()
        for noun in ("agents", "facts", "applied", "secrets", "settings", "fleet", "returns"):
            await topology.ensure_buckets(noun)
        heard: list[str] = []

        async def keep(message: object) -> None:
            heard.append(message.subject)  # type: ignore[attr-defined]

        await operator.subscribe("hf.>", keep)
        await operator.flush()
        own = grants.agent(names, "alpha").publish
        async with site.raw("agent-alpha") as alpha:
            asked = 0
            for question in (s.replace("*", "r0").replace(">", "revision") for s in own):
                for aim in aims:
                    assert await alpha.may_publish(question, reply=aim)
                    asked += 1
            # An answer that comes after all the others, the same way: nothing is under way then.
            await alpha.client.request("$KV.hf_facts.alpha", b"last", timeout=10)
        await operator.flush()
        assert asked == len(own) * len(aims) > 100
        aimed = {a for a in aims if a.startswith("hf.")}
        assert aimed & set(heard) == set()
        for bucket in (names.agents, names.nodes, names.facts, names.applied, names.secrets):
            stored = await operator.api(
                f"STREAM.INFO.{kv_stream(bucket)}", {"subjects_filter": kv_subject(bucket, ">")}
            )
            assert kv_subject(bucket, "beta") not in (stored["state"].get("subjects") or {})
        for stream in (names.jobs, kv_stream(names.settings), kv_stream(names.fleet)):
            info = await operator.api(f"STREAM.INFO.{stream}", {"subjects_filter": ">"})
            assert set(aims) & set(info["state"].get("subjects") or {}) == set(), stream


# ---- changes while the server runs


async def test_revoked_agent_is_cut_off(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a reload its connection is gone, it cannot come back, and others notice nothing."""
    site.folder.add_agents(["gamma", "delta"])
    site.server.reload()
    broken: list[str] = []

    gamma = Broker(site.connection("agent-gamma"))
    await gamma.open()
    async with site.broker("worker") as worker, site.broker("agent-delta") as delta:
        for name, broker in (("delta", delta), ("worker", worker)):
            broker.on_disconnect(lambda name=name: broken.append(name))
        stolen = tmp_path / "stolen.json"
        Credentials.load(site.file("agent-gamma")).save(stolen)
        site.folder.revoke("gamma")
        assert not Path(site.file("agent-gamma")).exists()
        site.server.reload()
        await until(lambda: not gamma.connected, 10, "the end of gamma's connection")
        with pytest.raises(NotConnected, match="refuses the login"):
            await Broker(replace(gamma.config, credentials_file=str(stolen))).open()
        with pytest.raises(BrokerError):
            await gamma.request("$JS.API.INFO")
        assert (await delta.request("$JS.API.INFO")).body
        assert (await worker.request("$JS.API.INFO")).body
        assert broken == []
    await until(lambda: "refuses the login" in caplog.text, 10, "gamma's log to say why")
    assert caplog.text.count("refuses the login") == 1
    await gamma.close()


def test_agents_of_the_site_are_two() -> None:
    """The tests above look at both sides of every pair."""
    assert AGENTS == ("alpha", "beta")


async def test_web_does_its_whole_work(app: Holdfast, site: Site) -> None:
    """Every page and list, an enqueue, a cancel and a drop: the user `web` is refused nothing."""

    @app.job(retry=Backoff.never())
    async def boom() -> None:
        raise ValueError("no")

    @app.job
    async def add(a: int, b: int) -> int:
        return a + b

    worker = Worker(app, WorkerConfig(), connection=site.connection("worker"))
    tokens = ",".join(line for _, line in TOKENS.values())
    config = WebConfig(tokens=tokens, rate_per_second=0)
    web = create_app(app, config=config, connection=site.connection("web"), with_pages=True)
    async with (
        running(worker, lambda: worker.pulling),
        web.router.lifespan_context(web),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(web),
            base_url="http://127.0.0.1:8080",
            headers={"Authorization": f"Bearer {TOKENS['admin'][0]}"},
        ) as asker,
    ):
        sent = await asker.post("/api/v1/runs", json={"job": "add", "payload": {"a": 1, "b": 2}})
        assert sent.status_code in (200, 201, 202), sent.text
        run = sent.json()["run"]
        assert (await asker.post(f"/api/v1/runs/{run}/cancel")).status_code < 500
        schema = (await asker.get("/api/v1/openapi.json")).json()
        plain = [p for p, verbs in schema["paths"].items() if "get" in verbs and "{" not in p]
        answers = {p: (await asker.get(p)).status_code for p in plain if "stream" not in p}
        assert len(answers) > 8
        assert {p: code for p, code in answers.items() if code >= 400 and code != 422} == {}
        pages = ("/", "/jobs", "/runs", "/schedules", "/dead", "/cluster")
        assert {p: (await asker.get(p)).status_code for p in pages} == dict.fromkeys(pages, 200)
    assert web.state.services.broker.denied == {}
