"""Dashboards against a real Prometheus that scrapes a running Holdfast."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import yaml

from holdfast.deploy.monitoring import FOREIGN, dashboards, exposed, expressions
from holdfast.server import Server
from holdfast.server.process import free_ports
from holdfast.telemetry import CATALOGUE
from tests.integration.command import Command
from tests.integration.command import ask as ask_health
from tests.support import until
from tests.unit.deployment import alert_groups as groups

APP = """
from holdfast import Holdfast

app = Holdfast("shop")


@app.job(on="sold")
async def order(what: str) -> str:
    return what


@app.every("1s")
async def tick() -> None:
    await app.publish("sold", "a")
"""
SHOWN = ("lag", "ended", "slots", "nodes", "stream_messages", "leading", "slot_overdue", "canary")
"""What must have values within seconds of such an app running."""


def own(attribute: str) -> str:
    """The name under which a metric of ours is scraped."""
    return next(exposed(metric) for metric in CATALOGUE if metric.attribute == attribute)


def exporter(server: Server) -> str:
    """What NATS's exporter makes of this server's own monitor, under the names that it uses."""
    varz, jsz = server.monitor("/varz"), server.monitor("/jsz?consumers=true&config=true")
    lines = [
        f'nats_varz_{key}{{server_id="{varz["server_name"]}"}} {value}'
        for key, value in varz.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    lines.append(f'nats_healthz_status{{server_id="{varz["server_name"]}"}} 0')
    labels = f'{{server_id="s", server_name="{varz["server_name"]}", cluster=""}}'
    totals = {"streams": "streams", "consumers": "consumers", "messages": "messages"}
    totals |= {"message_bytes": "bytes"}
    lines += [f"nats_server_total_{name}{labels} {jsz[key]}" for name, key in totals.items()]
    lines.append(f"nats_server_max_storage{labels} {jsz['config']['max_storage']}")
    for account in jsz["account_details"]:
        for stream in account["stream_detail"]:
            for consumer in stream.get("consumer_detail") or []:
                named = f'stream_name="{stream["name"]}", consumer_name="{consumer["name"]}"'
                pending = consumer["num_pending"]
                lines.append(f'nats_consumer_num_pending{{{named}, server_id="s"}} {pending}')
    scaled = '{scaledObject="order", scaler="s0", metric="m", namespace="acme"}'
    lines += [f"{name}{scaled} 1" for name in FOREIGN if name.startswith("keda_")]
    lines += [f'{name}{{deployment="order"}} 1' for name in FOREIGN if name.startswith("kube_")]
    return "\n".join(lines) + "\n"


@contextmanager
def serving(text: Callable[[], str], port: int) -> Iterator[None]:
    """A program that is scraped."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def prometheus(folder: Path, targets: dict[str, int], port: int) -> Iterator[str]:
    """Prometheus with our rules, scraping every second."""
    scraped = [
        {
            "job_name": name,
            "static_configs": [
                {"targets": [f"127.0.0.1:{where}"], "labels": {"namespace": "acme"}},
            ],
        }
        for name, where in targets.items()
    ]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": groups()}))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": scraped,
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def ask(url: str, path: str, **query: str) -> Any:
    """What Prometheus answers; None while it cannot."""
    try:
        address = f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.loads(answer.read())["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return None
        raise AssertionError(f"{query}: {error.read().decode()}") from None
    except OSError:
        return None


async def evaluated(url: str) -> bool:
    """Whether Prometheus has looked at each rule."""
    found = await asyncio.to_thread(ask, url, "rules")
    return all(rule["health"] != "unknown" for group in found["groups"] for rule in group["rules"])


async def test_every_panel_is_evaluated_by_a_real_prometheus(
    nats: Server, namespace: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Each expression of each dashboard and rule works on what a running Holdfast exposes."""
    (tmp_path / "main.py").write_text(APP)
    control_port, worker_port, nats_port, port = free_ports(4)
    env = {"HOLDFAST_NATS_URL": nats.url, "HOLDFAST_NAMESPACE": namespace}

    def command(*words: str) -> Command:
        return Command(*words, folder=tmp_path, cwd=tmp_path, env=env)

    targets = {"control": control_port, "workers": worker_port, "nats-headless": nats_port}
    with (
        command("control", "main:app", "--health-port", str(control_port)),
        command("worker", "main:app", "--health-port", str(worker_port)),
        serving(lambda: exporter(nats), nats_port),
        prometheus(tmp_path, targets, port) as url,
    ):

        async def values(expression: str) -> list[Any]:
            found = await asyncio.to_thread(ask, url, "query", query=expression)
            return found["result"] if found else []

        for attribute in SHOWN:
            series = own(attribute)
            wanted = f"rate({series}[5m])" if series.endswith("_total") else series

            async def there(wanted: str = wanted) -> list[Any]:
                return await values(wanted)

            await until(there, what=f"{wanted} has values")
        await until(lambda: evaluated(url), what="every rule was evaluated")
        status, lag = await ask_health(control_port, "/lag/default")
        assert status == 200, lag
        assert json.loads(lag)["jobs"] == ["order", "tick"]
        # Grafana fills in what was chosen.
        asked = [
            text.replace("$namespace", "acme")
            for board in dashboards("acme").values()
            for _, text in expressions(board)
        ]
        answers = {text: await values(text) for text in asked}
        rules = await asyncio.to_thread(ask, url, "rules")
        metadata = await asyncio.to_thread(ask, url, "metadata")
    unscraped = {m.name for m in CATALOGUE} - {name.removesuffix("_total") for name in metadata}
    assert not unscraped, "every metric of the catalogue is exposed"
    health = {rule["name"]: rule["health"] for group in rules["groups"] for rule in group["rules"]}
    assert set(health.values()) == {"ok"}, health
    shown = [text for text, found in answers.items() if found]
    for attribute in SHOWN:
        assert any(own(attribute) in text for text in shown), attribute
    foreign = [text for text in asked if any(name in text for name in FOREIGN if name != "up")]
    assert len(foreign) >= 20
    assert all(
        answers[text] for text in foreign if "rate(" not in text and "max_storage" not in text
    )
    report(f"{len(asked)} expressions evaluated, {len(shown)} with values; {len(health)} rules ok")
