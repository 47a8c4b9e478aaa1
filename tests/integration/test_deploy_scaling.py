"""Scaling to zero and back: what an autoscaler reads is what waits."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast import Backoff, Context, Holdfast
from holdfast.broker import Broker
from holdfast.client import Client
from holdfast.client.schedules import Schedules
from holdfast.config import ConnectionConfig, DeployConfig, RecordConfig, WorkerConfig
from holdfast.config.deployment import JobDeployConfig
from holdfast.deploy.project import JobDirectory, Project, _group
from holdfast.deploy.register import register, unregister
from holdfast.deploy.render import Templates
from holdfast.errors import InvalidInput
from holdfast.health import Health, HealthServer
from holdfast.identity.lint import examine
from holdfast.model.schedule import Schedule
from holdfast.names import H_SUBJECT, Names
from holdfast.server import Server
from holdfast.server.process import Process, free_ports
from holdfast.status.figures import Figures, lags
from holdfast.telemetry import Telemetry
from holdfast.testing import RunningWorker
from tests.integration.command import Command
from tests.integration.keda import Jetstream, MetricsApi, ScalerError, replicas
from tests.integration.rendered_nats import rendered_nats
from tests.support import until

MOMENT = "1h"


def make_app(
    url: str | None = None, namespace: str | None = None
) -> tuple[Holdfast, asyncio.Event]:
    """A job that waits for a gate, fails into a long retry, or subscribes to an event."""
    app = Holdfast("scaled", nats_url=url, namespace=namespace)
    gate = asyncio.Event()

    @app.job(group="scaled", retry=Backoff.list([MOMENT]), on="loaded")
    async def work(ctx: Context, what: Any) -> None:
        if what == "fail":
            raise ValueError("later")
        await gate.wait()

    return app, gate


def scaled_object(names: Names, monitor: str, account: str, lag_url: str = "") -> dict[str, Any]:
    """The specification that would be rendered for that app, with a reachable address."""
    described = [{"name": "work", "on": ["loaded"]}]
    job = JobDirectory("scaled", JobDeployConfig(), (_group("scaled", described, names),), ())
    config = DeployConfig(scaler="metrics-api" if lag_url else "nats-jetstream", account=account)
    files = Templates(Project(Path(), config, (job,), names.namespace)).job(job)
    found = yaml.safe_load(files["scaling.yaml"])
    for trigger in found["spec"]["triggers"]:
        if lag_url:
            trigger["metadata"]["url"] = f"{lag_url}/lag/scaled/work"
        else:
            trigger["metadata"]["natsServerMonitoringEndpoint"] = monitor
    spec: dict[str, Any] = found["spec"]
    return spec


async def test_lag_on_one_server_is_what_waits(nats: Server, namespace: str) -> None:
    """Nothing: 0 pods. Twelve runs: 3. In flight counts, a long retry and a delay do not."""
    app, gate = make_app(nats.url, namespace)
    spec = scaled_object(Names(namespace), nats.monitor_url.removeprefix("http://"), "$G")

    async def pods() -> int:
        return await asyncio.to_thread(replicas, spec)

    assert await pods() == 1, "no consumer yet: the fallback works, and makes them"
    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with app, Broker(config, name="register") as broker:
        done = await register(Client(broker, RecordConfig()), app, WorkerConfig())
        assert done.consumers == ("scaled=work", "scaled=work=loaded")
        assert await pods() == 0
        [job] = app.jobs.values()
        await job.enqueue_many([job.request("gate") for _ in range(12)])
        await app.publish("loaded", "gate")
        await job.enqueue("later", delay="1h")
        await until(lambda: pods_are(spec, 3), what="3 pods for 12 runs")
        triggers = [Jetstream(trigger["metadata"]) for trigger in spec["triggers"]]
        assert [await asyncio.to_thread(t.lag) for t in triggers] == [12, 1]
        async with RunningWorker(app, nats.url, namespace, group="scaled", concurrency=4):
            await until(lambda: busy(broker, 4), what="4 busy")
            assert await pods() == 3, "what is in flight still counts"
            gate.set()
            await until(lambda: pods_are(spec, 0), what="nothing left")
            await job.enqueue("fail")
            await until(lambda: parked(broker), what="parked for an hour")
            await until(lambda: pods_are(spec, 0), what="a long retry keeps no pod")


async def pods_are(spec: dict[str, Any], count: int) -> bool:
    """Whether the autoscaler wants so many pods now."""
    return await asyncio.to_thread(replicas, spec) == count


async def busy(broker: Broker, count: int) -> bool:
    """Whether so many runs or more are in flight."""
    [one] = await lags(Client(broker, RecordConfig()))
    return one.in_flight >= count


async def parked(broker: Broker) -> bool:
    """Whether the run that failed, and the one that was delayed, wait as scheduled messages."""
    from holdfast.status.messages import subject_counts

    names = broker.names
    later = await subject_counts(broker, names.jobs, names.later("*", "*", "*", "*"))
    return sum(later.values()) == 2


async def test_several_jobs_of_a_group_share_their_workers(nats: Server, namespace: str) -> None:
    """Three jobs with a lag of 5 each need as many workers as one with 15."""
    app = Holdfast("many", nats_url=nats.url, namespace=namespace)
    for name in ("one", "two", "three"):

        @app.job(name=name, group="many")
        async def work(what: str) -> None: ...

    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    names = Names(namespace)
    described = [{"name": job, "on": []} for job in app.jobs]
    job = JobDirectory("many", JobDeployConfig(), (_group("many", described, names),), ())
    deployment = DeployConfig(scaler="nats-jetstream", account="$G")
    files = Templates(Project(Path(), deployment, (job,), namespace)).job(job)
    spec = yaml.safe_load(files["scaling.yaml"])["spec"]
    for trigger in spec["triggers"]:
        monitor = nats.monitor_url.removeprefix("http://")
        trigger["metadata"]["natsServerMonitoringEndpoint"] = monitor
    async with app, Broker(config, name="register") as broker:
        client = Client(broker, RecordConfig())
        await register(client, app, WorkerConfig())
        for one in app.jobs.values():
            await one.enqueue_many([one.request("x") for _ in range(5)])
        await until(lambda: pods_are(spec, 3), what="3 workers for 15 runs")
        answer = await Figures(client, Telemetry()).answer("/lag/many/one,two,three")
        assert answer is not None
        assert answer["lag"] == 15
        removed = await unregister(client, "many", ["two"], discard=True)
        assert removed.consumers == ("many=two",)
        assert (await unregister(client, "many", ["two"], discard=True)).consumers == ()


async def test_removed_job_sends_nothing_more(nats: Server, namespace: str) -> None:
    """Its schedules go with its consumers, another's stay; a delayed or limited run holds it."""
    app = Holdfast("nightly", nats_url=nats.url, namespace=namespace)

    @app.cron("0 3 * * *", group="old")
    async def gone(what: str = "") -> None: ...

    @app.cron("0 4 * * *", group="old")
    async def kept(what: str = "") -> None: ...

    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with app, Broker(config, name="register") as broker:
        client = Client(broker, RecordConfig())
        await register(client, app, WorkerConfig())
        schedules = Schedules(client)
        by_hand = Schedule(name="by-hand", job="gone", group="old", cron="0 5 * * *")
        await schedules.add(by_hand)
        run = await gone.options(delay="1h").enqueue("x")
        with pytest.raises(InvalidInput, match="1 of old/gone"):
            await unregister(client, "old", ["gone"])
        assert len(await schedules.list()) == 3
        await run.cancel()
        app.jobs.pop("gone")
        assert (await register(client, app, WorkerConfig())).left == (("old", "gone"),)
        await until(lambda: nothing_later(broker), what="the delayed run is gone")
        names = client.broker.names
        place = names.line("hall", "here", "r1")
        await broker.store(place, b"{}", {H_SUBJECT: names.job("old", "gone")})
        await broker.store(names.line("hall", "here", "r2"), b"{}", {H_SUBJECT: "nonsense"})
        with pytest.raises(InvalidInput, match="1 of old/gone"):
            await unregister(client, "old", ["gone"])
        await client.topology.purge(names.jobs, place)
        planned = await unregister(client, "old", ["gone"], dry_run=True)
        assert (await register(client, app, WorkerConfig())).left, "nothing was removed yet"
        removed = await unregister(client, "old", ["gone"])
        assert removed.consumers == planned.consumers == ("old=gone",)
        assert sorted(removed.schedules) == ["by-hand", "gone"]
        assert [one.job for one in await schedules.list()] == ["kept"]


async def nothing_later(broker: Broker) -> bool:
    """Whether no run waits for its time."""
    from holdfast.status.messages import subject_counts

    later = broker.names.later("*", "*", "*", "*")
    return not await subject_counts(broker, broker.names.jobs, later)


async def test_consumer_that_is_missing_is_an_error(nats: Server, namespace: str) -> None:
    """Zero workers and no registration: KEDA cannot tell, and the fallback starts one."""
    names = Names(namespace)
    metadata = {
        "natsServerMonitoringEndpoint": nats.monitor_url.removeprefix("http://"),
        "account": "$G",
        "stream": names.jobs,
        "consumer": "no=where",
    }
    with pytest.raises(ScalerError):
        await asyncio.to_thread(Jetstream(metadata).lag)


async def test_lag_endpoint_tells_the_same(nats: Server, namespace: str) -> None:
    """`/lag/<group>` and `/lag/<group>/<job>`; unknown is 404, a server that is away is 503."""
    app, _ = make_app(nats.url, namespace)
    [port] = free_ports(1)
    telemetry = Telemetry()
    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with app, Broker(config, name="lag") as broker:
        client = Client(broker, RecordConfig())
        await register(client, app, WorkerConfig())
        figures = Figures(client, telemetry)

        def health() -> Health:
            return Health(True, [], telemetry.render, {}, figures.answer)

        url = f"http://127.0.0.1:{port}"
        async with HealthServer("127.0.0.1", port, health):
            [job] = app.jobs.values()
            await job.enqueue_many([job.request("gate") for _ in range(7)])
            await job.enqueue("later", delay="1h")
            await app.publish("loaded", "gate")
            answer = await asyncio.to_thread(_json, f"{url}/lag/scaled")
            assert answer == {
                "group": "scaled",
                "jobs": ["work"],
                "waiting": 8,
                "in_flight": 0,
                "paused": 0,
                "lag": 8,
            }
            spec = scaled_object(Names(namespace), "", "$G", url)
            assert await asyncio.to_thread(MetricsApi(spec["triggers"][0]["metadata"]).lag) == 8
            assert await asyncio.to_thread(replicas, spec) == 2
            await broker.api(
                f"CONSUMER.PAUSE.{broker.names.jobs}.scaled=work",
                {"pause_until": "2099-01-01T00:00:00Z"},
            )
            answer = await asyncio.to_thread(_json, f"{url}/lag/scaled/work,other")
            assert (answer["waiting"], answer["paused"], answer["lag"]) == (8, 7, 1)
            with pytest.raises(InvalidInput, match="9 of scaled/work"):
                await unregister(client, "scaled", ["work"])
            for path in ("/lag/nobody", "/lag/scaled/nothing", "/lag/", "/laggy"):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    await asyncio.to_thread(_json, url + path)
            await figures.renew()
            text = telemetry.render().decode()
            assert 'holdfast_job_lag{group="scaled",job="work"} 8.0' in text
            assert f'holdfast_stream_messages{{stream="{broker.names.jobs}"}} 8.0' in text
            await broker.close()
            with pytest.raises(urllib.error.HTTPError, match="503"):
                await asyncio.to_thread(_json, f"{url}/lag/scaled")


async def test_job_that_was_never_served_has_what_was_sent(nats: Server, namespace: str) -> None:
    """Runs that wait for a job without a consumer are not invisible."""
    app, _ = make_app(nats.url, namespace)
    config = ConnectionConfig(nats_url=nats.url, namespace=namespace)
    async with app, Broker(config, name="lag") as broker:
        client = Client(broker, RecordConfig())
        await client.topology.ensure()
        [job] = app.jobs.values()
        await job.enqueue_many([job.request("gate") for _ in range(3)])
        assert [(one.job, one.lag) for one in await lags(client)] == [("work", 3)]


def _json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return dict(json.loads(answer.read()))


APP = """
from holdfast import Holdfast

app = Holdfast("shop")


@app.job(group="shop", on="loaded")
async def order(what: str) -> str:
    return what


@app.every("1h")
async def nightly() -> None: ...
"""


STRANGER = """
server_name: stranger
listen: "127.0.0.1:{client}"
cluster {{
  name: acme
  listen: "127.0.0.1:{port}"
  tls {{ cert_file: "{own}.crt", key_file: "{own}.key", ca_file: "{authority}" }}
  routes: ["{routes}"]
}}
"""


async def test_client_of_the_same_authority_is_no_server_of_nats(tmp_path: Path) -> None:
    """Jobs may hold a client's certificate of it: as a route they could read every message."""
    own = tmp_path / "stranger"
    own.mkdir()
    client, port = free_ports(2)
    with rendered_nats(tmp_path) as site:
        files = [f"{own}.{end}" for end in ("key", "csr", "crt")]
        names = ["-subj", "/CN=acme-client", "-addext", "subjectAltName=DNS:acme-client"]
        made = ["openssl", "req", "-new", "-nodes", "-newkey", "rsa:2048", *names]
        openssl(*made, "-keyout", files[0], "-out", files[1])
        signed = ["-CA", site.authority, "-CAkey", site.authority.replace(".crt", ".key")]
        signed += ["-CAcreateserial", "-copy_extensions", "copy"]
        openssl("openssl", "x509", "-req", "-in", files[1], *signed, "-out", files[2])
        config = STRANGER.format(
            client=client, port=port, own=own, authority=site.authority, routes=site.routes
        )
        stranger = Process(config, own, own / "log")
        try:
            refused = "Route Error 'Authorization Violation'"
            log = own / "log"
            await until(lambda: log.exists() and refused in log.read_text(), what="a refusal")
            found = await asyncio.to_thread(_json, f"http://{site.monitor}/routez")
            assert {route["remote_name"] for route in found["routes"]} <= {"nats-1", "nats-2"}
        finally:
            stranger.kill()
            stranger.exited.wait()


def openssl(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


async def test_rendered_cluster_serves_every_role(tmp_path: Path) -> None:
    """The rendered configuration forms a cluster; each role does its work with its own login.

    A registration makes consumers and schedules with a worker's login; KEDA's rule sees the lag
    from every server; control plane and worker run; the monitor shows that each write is synced.
    """
    (tmp_path / "main.py").write_text(APP)
    with rendered_nats(tmp_path) as site:
        jsz = await asyncio.to_thread(_json, f"http://{site.monitor}/jsz?config=true")
        assert jsz["config"]["sync_always"] is True
        assert jsz["config"]["max_storage"] == 16 * 2**30
        varz = await asyncio.to_thread(_json, f"http://{site.monitor}/varz")
        assert varz["tls_required"] is True
        assert varz["cluster"]["tls_required"] is True
        flaws = examine(tmp_path / "nats-0" / "lint.conf", "hf")
        assert [flaw for flaw in flaws if flaw.level == "fail"] == []

        def command(user: str, *words: str) -> Command:
            env = site.environment(user)
            return Command(*words, folder=tmp_path, cwd=tmp_path, env=env)

        with command("worker", "deploy", "register", "main:app", "--release", "7") as registering:
            await until(lambda: registering.process.poll() is not None, what="registration")
            assert registering.process.returncode == 0, registering.text
            assert "shop=order=loaded" in registering.text
            assert "1 schedules: nightly" in registering.text
        login = str(site.users.credentials("operator"))
        config = ConnectionConfig(nats_url=site.url, credentials_file=login, tls_ca=site.authority)
        async with Broker(config, name="sender") as broker:
            for _ in range(3):
                await broker.store(broker.names.job("shop", "order"), b'"a"', {})
        host, _, port = site.monitor.rpartition(":")
        for number in range(3):
            endpoint = f"{host[:-1]}{number + 1}:{port}"
            metadata = {
                "natsServerMonitoringEndpoint": endpoint,
                "account": "HF",
                "stream": "HF_JOBS",
                "consumer": "shop=order",
            }
            lag = Jetstream(metadata).lag

            async def three(lag: Any = lag) -> bool:
                return await asyncio.to_thread(lag) == 3

            await until(three, what=f"lag of 3 at {endpoint}")
        with (
            command("control", "control", "--ready-file", str(tmp_path / "ready")) as control,
            command("worker", "worker", "main:app", "--group", "shop") as worker,
        ):
            await worker.says("at a time")
            await until(lambda: (tmp_path / "ready").exists(), what="the control plane is ready")

            async def none() -> bool:
                return await asyncio.to_thread(lag) == 0

            await until(none, what="the runs are done")
            assert "ermission" not in control.text + worker.text

            async def remembered() -> bool:
                jsz = await asyncio.to_thread(_json, f"http://{site.monitor}/jsz?streams=true")
                streams = [s for a in jsz["account_details"] for s in a["stream_detail"]]
                sizes = {s["name"]: s["state"]["messages"] for s in streams}
                return sizes["HF_HISTORY"] >= 3 and sizes["HF_HISTORY_INDEX"] > 0

            await until(remembered, what="the history has the runs")
        # As `apply.sh --prune` does it: with the login of the control plane.
        with command("control", "deploy", "unregister", "s", "default", "nightly") as removing:
            await until(lambda: removing.process.poll() is not None, what="removal")
            assert removing.process.returncode == 0, removing.text
            assert "1 schedules removed: nightly" in removing.text
