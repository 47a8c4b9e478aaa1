"""Projects deployed by the commands of their READMEs, their pods run as processes (`make k8s`)."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer
from obstore.store import S3Store
from PIL import Image as Picture

from holdfast.integrations.objects import s3_store
from holdfast.server.process import free_ports
from tests.k8s.cluster import Cluster, cluster
from tests.k8s.pods import Image, Machine, command_line

ROOT = Path(__file__).parents[2]
EVERY = 5
"""Seconds between two checks of the monitor: short, but more than a busy machine needs for one."""
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An API server whose pods nobody runs yet."""
    with cluster(tmp_path_factory.mktemp("kubernetes"), {}, played=False) as found:
        yield found


class Shell:
    """Types commands in a project."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
        self.environment = kept | {"VIRTUAL_ENV": sys.prefix} | environment

    def run(self, text: str, **more: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", text], cwd=self.folder, env=self.environment | more,
            capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr


class Site(BaseHTTPRequestHandler):
    """A web site with one picture."""

    def do_GET(self) -> None:
        out = BytesIO()
        Picture.new("RGB", (800, 600), "teal").save(out, "PNG")
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.end_headers()
        self.wfile.write(out.getvalue())

    def log_message(self, *args: object) -> None: ...


@contextmanager
def site(host: str) -> Iterator[str]:
    with ThreadingHTTPServer((host, 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{host}:{server.server_port}/picture.png"
        server.shutdown()


@contextmanager
def forwarded(machine: Machine, space: str) -> Iterator[int]:
    """`kubectl port-forward service/nats`, which needs a kubelet."""
    [port] = free_ports(1)
    stopping = threading.Event()
    listening = socket.create_server(("127.0.0.1", port))
    listening.settimeout(0.2)

    def pump(one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65_536):
                other.sendall(data)
        except OSError:
            pass
        finally:
            other.close()

    def serve() -> None:
        while not stopping.is_set():
            try:
                near, _ = listening.accept()
            except TimeoutError:
                continue
            [pod] = machine.of(f"StatefulSet/{space}/nats")
            far = socket.create_connection((pod.address, 4222))
            near.settimeout(None)
            threading.Thread(target=pump, args=(near, far), daemon=True).start()
            threading.Thread(target=pump, args=(far, near), daemon=True).start()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield port
    finally:
        stopping.set()
        thread.join()
        listening.close()


def until(condition: Callable[[], bool], what: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def blocks(path: Path, heading: str) -> list[str]:
    """The shell blocks below a heading."""
    part = path.read_text().split(f"## {heading}\n", 1)[1].split("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", part, re.DOTALL)


def test_image_pipeline_is_deployed_by_its_readme(kubernetes: Cluster, tmp_path: Path) -> None:
    """Two sample jobs with an S3 store and its secret; a rollout under load; a job removed."""
    space = "acme-staging"
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "new", "project", "acme"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    project = tmp_path / "acme"
    (project / "web-line").touch()

    def image(name: str) -> Image:
        if name.startswith("nats:"):
            return Image(entrypoint=())
        part = name.removeprefix("acme-").split(":")[0]
        if part == "control":
            return Image()
        copies = {"/app": project / "jobs" / part, "/shared": project / "shared"}
        return Image(copies, {"PYTHONPATH": "/app:/shared", "PYTHONDONTWRITEBYTECODE": "1"})

    store = ThreadedMotoServer("0.0.0.0", 0, verbose=False)
    store.start()
    _, port = store.get_host_and_port()
    machine = Machine(kubernetes, tmp_path / "machine", image)
    with (
        machine,
        command_line(machine, space, tmp_path) as tools,
        site(machine.gateway) as picture,
    ):
        shell = Shell(project, tools | {"ENVIRONMENT": "staging", "KUBE_NAMESPACE": space})
        endpoint = f"http://{machine.gateway}:{port}"
        request = urllib.request.Request(f"{endpoint}/pictures", method="PUT")
        with urllib.request.urlopen(request) as made:
            assert made.status == 200
        try:
            _deploy_pictures(shell, machine, space, endpoint)
            bucket = s3_store("pictures", endpoint, "KEY", "SECRET", region="us-east-1")
            _send_and_roll(shell, machine, space, picture, bucket)
            _remove(shell, machine, space)
        except BaseException:
            for pod in (*machine.ended, *machine.pods):
                sys.stderr.write(f"--- {pod.name}\n{pod.log[-1500:]}\n")
            raise
    store.stop()


def _deploy_pictures(shell: Shell, machine: Machine, space: str, endpoint: str) -> None:
    """As README.md and docs/deployment.md say, for the small environment; no image is built."""
    project = shell.folder
    first, _ = blocks(project / "docs" / "deployment.md", "The first time")
    lines = first.strip().splitlines()
    assert lines[0] == "make build-all push-all"  # the machine has the project's files
    assert lines[1] == "make check"
    environment = project / "deploy" / "overlays" / "staging" / "holdfast.toml"
    text = environment.read_text() + 'monitoring = "none"\ncooldown_seconds = 5\n'
    environment.write_text(text)
    shell.run("git init -q . && git add . && git -c user.name=a -c user.email=a@b commit -qm start")
    for line in lines[1:]:
        if "auth agent" in line:
            continue  # the small environment has no agents
        said = shell.run(line.replace("rendered/production", "rendered/staging"))
        if "web token" in line:
            (project / "secrets" / "web-tokens").write_text(token_line(said))
    [block] = blocks(project / "README.md", "Pictures in S3, R2 or MinIO")
    for job in ("image-download", "image-resize"):
        settings = project / "jobs" / job / "pyproject.toml"
        text = settings.read_text()
        assert '# secrets = ["pictures"]' in text
        settings.write_text(text.replace('# secrets = ["pictures"]', 'secrets = ["pictures"]'))
    block = block.replace("--namespace acme ", f"--namespace {space} ")
    place = f"s3://pictures?endpoint={endpoint}&region=us-east-1"
    block = re.sub(r"OBJECTS_URL=[^']+", f"OBJECTS_URL={place}", block)
    shell.run(block)


def token_line(said: str) -> str:
    """The line for `secrets/web-tokens` that `holdfast web token` prints."""
    return next(line.strip() for line in said.splitlines() if re.match(r"\s*\S+:\S+:", line)) + "\n"


def _send_and_roll(
    shell: Shell, machine: Machine, space: str, picture: str, bucket: S3Store
) -> None:
    with forwarded(machine, space) as port:
        login = {
            "HOLDFAST_NATS_URL": f"tls://localhost:{port}",
            "HOLDFAST_TLS_CA": "secrets/tls/ca.crt",
            "HOLDFAST_CREDENTIALS_FILE": "secrets/credentials/client.json",
        }
        one = json.dumps({"url": picture})
        words = f"holdfast enqueue image-download '{one}' --group image-download"
        assert not machine.of(f"Deployment/{space}/image-download"), "scaled to zero"
        key = json.loads(shell.run(f"{words} --wait --timeout 120s 2>/dev/null", **login))["key"]

        def kept() -> set[str]:
            return {str(one["path"]) for page in bucket.list() for one in page}

        small = key.replace("images/", "images_resized/")
        until(lambda: {key, small} <= kept(), "the small picture")
        with Picture.open(BytesIO(bytes(bucket.get(small).bytes()))) as found:
            assert found.size == (200, 150)

        sent: list[str] = []
        stopping = threading.Event()

        def send() -> None:
            while not stopping.is_set():
                sent.append(shell.run(f"{words} 2>/dev/null", **login).strip())

        sender = threading.Thread(target=send)
        sender.start()
        until(lambda: len(sent) > 5, "some load")
        settings = shell.folder / "jobs" / "image-download" / "pyproject.toml"
        settings.write_text(
            settings.read_text() + '\n[tool.holdfast.annotations]\nchanged = "yes"\n'
        )
        before = {p.name for p in machine.of(f"Deployment/{space}/image-download")}
        shell.run("make deploy-image-download deploy-control")
        after = {p.name for p in machine.of(f"Deployment/{space}/image-download")}
        assert before
        assert not before & after
        stopping.set()
        sender.join()
        until(lambda: len([k for k in kept() if "resized" in k]) == len(sent) + 1, "every picture")
        assert not any(pod.killed for pod in machine.ended)
        runs = shell.run(
            "holdfast runs list --limit 1000 --json",
            **login | {"HOLDFAST_CREDENTIALS_FILE": "secrets/credentials/operator.json"},
        )
        sys.stderr.write(f"{len(sent)} pictures during two rollouts; {runs[:300]}\n")


def _remove(shell: Shell, machine: Machine, space: str) -> None:
    shutil.rmtree(shell.folder / "jobs" / "image-resize")
    said = shell.run("make deploy-services")
    assert f"no longer rendered: {space} deployment.apps/image-resize" in said
    said = shell.run("make deploy-services ARGS=--prune")
    assert "2 consumers removed" in said, said
    words = "holdfast deploy unregister --dry-run image-resize image-resize image-resize"
    again = shell.run(f"kubectl exec --namespace {space} deployment/control -- {words}")
    assert "0 consumers would be removed" in again, "a worker made them again"
    left = machine.cluster.kubectl("get", "deploy,scaledobject,sa", "-n", space, "-o", "name")
    assert "image-resize" not in left
    assert "image-download" in left


def test_uptime_is_deployed_as_any_project_and_rolls_out_without_a_gap(
    kubernetes: Cluster, tmp_path: Path
) -> None:
    """By the commands of docs/uptime.md; while all is replaced, no page and no check fails."""
    space = "uptime-staging"
    project = tmp_path / "uptime"
    shutil.copytree(ROOT / "apps" / "uptime", project)
    environment = project / "deploy" / "overlays" / "staging" / "holdfast.toml"
    environment.write_text(environment.read_text() + 'monitoring = "none"\n')
    machine = Machine(
        kubernetes,
        tmp_path / "machine",
        lambda name: Image(entrypoint=()) if name.startswith("nats:") else Image(),
    )
    with machine, command_line(machine, space, tmp_path) as tools, site(machine.gateway) as target:
        shell = Shell(project, tools)
        try:
            _deploy_uptime(shell, space)
            _watch_a_rollout(shell, machine, space, target)
        except BaseException:
            for pod in (*machine.ended, *machine.pods):
                sys.stderr.write(f"--- {pod.name}\n{pod.log[-1500:]}\n")
            raise


def _deploy_uptime(shell: Shell, space: str) -> None:
    [block] = blocks(ROOT / "docs" / "uptime.md", "On Kubernetes")
    lines = [line for line in block.strip().splitlines() if not line.startswith("docker ")]
    for line in lines:
        line = line.replace("production", "staging").replace(
            "namespace uptime ", f"namespace {space} "
        )
        if "secret generic" in line:
            line = re.sub("UPTIME_TOKEN=.*", "UPTIME_TOKEN=told", line)
            line += " --from-literal=UPTIME_ALLOW_PRIVATE=10.0.0.0/8"
            line += " --from-literal=UPTIME_SHORTEST_INTERVAL=1"
        said = shell.run(line)
        if "web token" in line:
            (shell.folder / "secrets" / "web-tokens").write_text(token_line(said))


def _watch_a_rollout(shell: Shell, machine: Machine, space: str, target: str) -> None:
    pages = f"Deployment/{space}/uptime-pages"
    known: list[str] = []

    def endpoints() -> None:
        """What a proxy knows: which pods were ready a second ago."""
        while not stopping.wait(1.0):
            known[:] = [pod.address for pod in machine.of(pages) if pod.ready]

    def ask(path: str, body: dict[str, object] | None = None) -> list[dict[str, int]]:
        headers = {"Host": "status.example.com", "Authorization": "Bearer told"}
        headers |= {"Content-Type": "application/json"} if body else {}
        data = json.dumps(body).encode() if body else None
        url = f"http://{known[len(answered) % len(known)]}:8090{path}"
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())

    answered: list[int] = []
    failed: list[str] = []
    stopping = threading.Event()

    def read() -> None:
        while not stopping.wait(0.05):
            try:
                ask("/status.json")
                answered.append(1)
            except OSError as error:
                failed.append(str(error))

    threads = [threading.Thread(target=endpoints), threading.Thread(target=read)]
    threads[0].start()
    try:
        until(lambda: len(known) == 2, "two pods serve the pages")
        check = {"id": "site", "name": "Site", "target": target}
        ask("/api/checks", {**check, "interval": EVERY, "timeout": EVERY})

        def slots() -> list[int]:
            found = ask("/api/checks/site/results?limit=500")
            return sorted(one["at"] for one in found)

        until(lambda: len(slots()) > 2, "the first results")
        threads[1].start()
        settings = shell.folder / "jobs" / "uptime" / "pyproject.toml"
        changed = '\n[tool.holdfast.annotations]\nchanged = "yes"\n'
        settings.write_text(settings.read_text() + changed)
        before = {pod.name for pod in machine.pods if "nats" not in pod.name}
        shell.run("holdfast deploy render --environment staging --tag 2")
        shell.run("deploy/rendered/staging/apply.sh")
        until(lambda: not before & {pod.name for pod in machine.pods}, "every old pod is gone")
        last = slots()[-1]
        until(lambda: slots()[-1] > last + 2 * EVERY, "checks after the rollout")
        made = slots()
        missed = set(range(made[0], made[-1] + 1, EVERY)) - set(made)
    finally:
        stopping.set()
        for thread in threads:
            if thread.ident:
                thread.join()
    assert not missed, f"{len(missed)} of {len(made)} checks missed"
    assert failed == []
    assert not any(pod.killed for pod in machine.ended)
    sys.stderr.write(f"{len(answered)} pages answered, {len(made)} checks made, none missed\n")
