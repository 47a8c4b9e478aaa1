"""`holdfast doctor`: what is wrong is named, quickly, with what to do; nothing is changed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from holdfast import Holdfast
from holdfast.broker import Broker, Bucket
from holdfast.broker.streams import Topology
from holdfast.client import Client
from holdfast.config import ConnectionConfig, LivenessConfig, RecordConfig
from holdfast.errors import PermissionDenied, ServerTooOld
from holdfast.model import node as nodes
from holdfast.model.liveness import Liveness
from holdfast.model.node import NodeRecord
from holdfast.names import kv_stream
from holdfast.server import Cluster, Server
from holdfast.status import checks
from holdfast.status.doctor import PATIENCE_SECONDS, examine
from holdfast.status.probes import Finding, Site
from tests.integration.cli_support import holdfast
from tests.integration.command import Command
from tests.integration.old_server import claiming
from tests.integration.support import broker_of, working

RESTRICTED = """
accounts { HF { jetstream: enabled, users: [
  { user: client, password: pw, permissions: {
      publish: ["$JS.API.INFO", "hf.job.>"], subscribe: ["_INBOX.>"] } }
  { user: deaf, password: pw, permissions: { subscribe: ["nothing"] } }
  { user: all, password: pw }
] } }
"""


@pytest.fixture(scope="module")
def restricted() -> Iterator[Server]:
    """A server that asks for a password and does not allow everybody everything."""
    with Server(fast=True, extra_config=RESTRICTED) as server:
        yield server


def login(server: Server, user: str) -> str:
    return server.url.replace("//", f"//{user}:pw@")


Found = dict[str, list[Finding]]


async def command(app: Holdfast, *arguments: str) -> tuple[int, Found]:
    """The exit code of `holdfast doctor`, and its findings by check."""
    ended = await holdfast(app, "doctor", "--json", *arguments)
    return ended.code, by_check(msgspec.json.decode(ended.out, type=list[Finding]))


async def examined(app: Holdfast, *monitor_urls: str) -> Found:
    """The findings by check."""
    config = replace(app.connection_config(), connect_timeout_seconds=1.0)
    return by_check(await examine(config, RecordConfig(), monitor_urls))


def by_check(findings: list[Finding]) -> Found:
    found: Found = {}
    for finding in findings:
        found.setdefault(finding.check, []).append(finding)
    return found


def levels(found: Found, check: str) -> set[str]:
    return {finding.level for finding in found[check]}


async def test_doctor_is_content_with_a_working_namespace(nats: Server, app: Holdfast) -> None:
    """With a worker at work nothing fails; one server without syncing is worth two warnings."""

    @app.job
    async def nothing() -> None: ...

    async with working(app):
        code, found = await command(app, "--monitor-url", nats.monitor_url)
        text = await holdfast(app, "doctor")
    assert code == text.code == 0
    assert levels(found, "replicas") == levels(found, "durability") == {"warn"}
    assert "does not sync every write" in found["durability"][0].text
    for check in ("permissions", "streams", "clock", "nodes", "jobs", "records", "storage"):
        assert levels(found, check) == {"ok"}, found[check]
    assert found["nodes"][0].text == "alive: 1 worker"
    assert "0 failed, 2 warnings, 18 ok" in text.out


async def test_doctor_sees_that_every_write_is_synced(namespace: str) -> None:
    """`sync_always` is read from the monitor; without one it says that it could not."""
    with Server() as server:
        app = Holdfast("shop", nats_url=server.url, namespace=namespace)
        assert levels(await examined(app, server.monitor_url), "durability") == {"ok"}
        (finding,) = (await examined(app))["durability"]
    assert finding.level == "warn"
    assert "could not be checked: no monitor answers" in finding.text


async def test_doctor_names_what_is_not_allowed(restricted: Server) -> None:
    """Each forbidden family of subjects is a finding, all of them within one round trip."""
    app = Holdfast("shop", nats_url=login(restricted, "client"))
    began = time.monotonic()
    found = await examined(app)
    assert time.monotonic() - began < PATIENCE_SECONDS, "no probe may wait for a timeout"
    assert levels(found, "permissions") == {"fail", "warn"}, (
        "what only makes it slower is a warning"
    )
    todos = {finding.todo for finding in found["permissions"]}
    for family in ("hf.event.>", "$KV.hf_runs.>", "$JS.API.CONSUMER.CREATE.>", "$JS.ACK.HF_JOBS.>"):
        assert f'allow this user to publish to "{family}"' in todos
    assert 'allow this user to subscribe to "hf.run.*.cancel"' in todos
    assert 'allow this user to publish to "hf.job.>"' not in todos
    assert "pw" not in str(found)


async def test_doctor_changes_nothing(restricted: Server) -> None:
    """The probes of a user who may do everything leave no message and purge none."""
    app = Holdfast("shop", nats_url=login(restricted, "all"))

    @app.job
    async def nothing() -> None: ...

    async with app:
        await nothing.enqueue()
        broker = await broker_of(app)
        before = await broker.api("STREAM.LIST")
        found = await examined(app)
        after = await broker.api("STREAM.LIST")
    assert levels(found, "permissions") == {"ok"}
    assert [(s["config"], s["state"]) for s in before["streams"]] == [
        (s["config"], s["state"]) for s in after["streams"]
    ]
    texts = [finding.text for finding in found["jobs"]]
    assert texts == ["1 runs of nothing (group default) wait, and no live worker has it"]


async def test_doctor_tells_why_no_answer_arrives(restricted: Server) -> None:
    """A user who may not subscribe to inboxes hears that, and is not left with timeouts."""
    found = await examined(Holdfast("shop", nats_url=login(restricted, "deaf")))
    assert 'allow this user to subscribe to "_INBOX.>"' in [f.todo for f in found["permissions"]]


async def test_start_up_says_what_is_not_allowed(restricted: Server) -> None:
    """Without permission to hear answers a process ends with that sentence, not with a timeout."""
    with pytest.raises(PermissionDenied, match="_inbox"):
        await Broker(ConnectionConfig(nats_url=login(restricted, "deaf"))).open()


async def test_doctor_says_that_the_login_is_refused(restricted: Server) -> None:
    """A wrong password is not mistaken for a server that is away."""
    found = await examined(Holdfast("shop", nats_url=login(restricted, "nobody")))
    assert "refuses the login" in found["connection"][0].text


async def test_doctor_finds_and_fixes_drift(app: Holdfast) -> None:
    """What differs is named; --fix puts right what loses nothing, and leaves the rest."""
    async with app:
        broker = await broker_of(app)
        topology, names = Topology(broker, RecordConfig()), broker.names
        await topology.ensure()
        await topology.update_stream(names.jobs, {"subjects": [f"{names.namespace}.job.>"]})
        await topology.update_stream(names.dead, {"max_age": 0})
        found = {f.text.split(" is ")[0]: f for f in (await examined(app))["streams"]}
        subjects, age = found[f"{names.jobs}: subjects"], found[f"{names.dead}: max_age"]
        assert (subjects.level, subjects.todo) == ("fail", "run 'holdfast doctor --fix'")
        assert (age.level, "would be removed" in age.todo) == ("warn", True)
        refused = await holdfast(app, "doctor", "--fix")
        assert (refused.code, "pass --yes" in refused.err) == (1, True)
        code, _ = await command(app, "--fix", "--yes")
        assert code == 0
        left = [f"{d.stream}: {d.key}" for d in await topology.differences()]
        assert left == [f"{names.dead}: max_age"]


async def test_doctor_notices_a_node_that_fell_silent(app: Holdfast) -> None:
    """A record that nobody renews, and nobody judges, is a warning with the node's name."""
    async with app:
        broker = await broker_of(app)
        topology = Topology(broker, RecordConfig())
        await topology.ensure()
        silent = NodeRecord("worker-gone-1", "worker", "default", state="RUNNING")
        await Bucket(broker, broker.names.nodes).put(silent.id, nodes.encode(silent), expected=0)
        later, now = broker.server_now() + 60, broker.clock.monotonic()
        broker.time.learn(later, now, topology.measure_clock)  # as if it were a minute later
        site = Site(broker, Client(broker, RecordConfig()), RecordConfig())
        (finding,) = await checks.node_records(site)
    assert finding.level == "warn"
    assert finding.text == "worker-gone-1 is RUNNING and was last heard of 1m ago"


async def test_doctor_warns_of_nodes_that_nobody_judges(app: Holdfast) -> None:
    """`liveness.enabled = no` is for debugging: of a node that has it, and of the configuration."""
    async with app:
        broker = await broker_of(app)
        await Topology(broker, RecordConfig()).ensure()
        node = NodeRecord("worker-x-1", "worker", state="RUNNING", liveness=Liveness(enabled=False))
        await Bucket(broker, broker.names.nodes).put(node.id, nodes.encode(node), expected=0)
        config, liveness = app.connection_config(), LivenessConfig(enabled="no")
        found = by_check(await examine(config, RecordConfig(), (), liveness))
    texts = [finding.text for finding in found["nodes"] if finding.level == "warn"]
    assert any("no coordinator watches worker-x-1" in text for text in texts), found
    assert any("the configuration here has liveness.enabled = no" in text for text in texts)


async def test_doctor_counts_the_nodes_of_a_cluster(cluster: Cluster, namespace: str) -> None:
    """Three nodes keep three copies; asking for more copies than nodes fails."""
    app = Holdfast("shop", nats_url=cluster.url, namespace=namespace)
    async with app:
        await Topology(await broker_of(app), RecordConfig()).ensure()
        found = await examined(app)
        assert levels(found, "replicas") <= {"ok", "warn"}  # a copy may be behind for a moment
        assert "one server" not in found["replicas"][0].text
        config = replace(app.connection_config(), replicas=5)
        (finding,) = by_check(await examine(config, RecordConfig()))["replicas"]
    assert finding.level == "fail"


async def test_an_old_server_is_refused(tmp_path: Path) -> None:
    """2.9.10, as Debian packages it, is refused with one sentence: it would ignore TTLs."""
    async with claiming("2.9.10") as url:
        with pytest.raises(ServerTooOld, match=r"nats-server 2\.9\.10 is too old"):
            await Broker(ConnectionConfig(nats_url=url)).open()
        code, found = await command(Holdfast("shop", nats_url=url))
        assert (code, levels(found, "server version")) == (1, {"fail"})
        env = {"HOLDFAST_NATS_URL": url, "GATES": str(tmp_path)}
        arguments = ("worker", "tests.integration.gate_app:app")
        with Command(*arguments, folder=tmp_path, env=env) as worker:
            assert await worker.ended() == 1
    assert worker.text.count("\n") == 1
    assert "nats-server 2.9.10 is too old: Holdfast needs 2.12.6" in worker.text


async def test_doctor_sees_a_deleted_bucket(app: Holdfast) -> None:
    """Missing from a namespace that is in use is a failure; an unused namespace misses nothing."""

    @app.job
    async def nothing() -> None: ...

    async with app:
        assert levels(await examined(app), "streams") == {"ok"}
        await nothing.enqueue()
        broker = await broker_of(app)
        stream = kv_stream(broker.names.runs)
        await broker.api(f"STREAM.DELETE.{stream}")
        found = await examined(app)
        assert levels(found, "streams") == {"fail"}
        assert stream in found["streams"][0].text
