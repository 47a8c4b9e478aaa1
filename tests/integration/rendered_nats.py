"""A NATS cluster from the rendered configuration, on one machine.

Each server has its own address (127.0.0.1, .2, .3) and all use the same ports, as pods do. Routes
go to a name instead: the certificate of a server must have one that is a route's.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.config import DeployConfig
from holdfast.deploy.project import Project
from holdfast.deploy.render import Templates
from holdfast.identity.users import UserFolder
from holdfast.server.process import Process, free_ports

READY_SECONDS = 60


@dataclass(frozen=True)
class RenderedNats:
    """Where the cluster is, and its logins."""

    url: str
    monitor: str
    users: UserFolder
    routes: str
    """Where other servers connect to."""

    def environment(self, user: str) -> dict[str, str]:
        """The environment of a process with that role."""
        return {
            "HOLDFAST_NATS_URL": self.url,
            "HOLDFAST_CREDENTIALS_FILE": str(self.users.credentials(user)),
            "HOLDFAST_REPLICAS": "3",
            "HOLDFAST_TLS_CA": self.authority,
        }

    @property
    def authority(self) -> str:
        """The authority that signed the servers' certificate."""
        return str(self.users.path / "tls" / "ca.crt")


def server_config_here(project: Project, number: int, ports: tuple[int, ...], folder: Path) -> str:
    """The rendered file with this machine's addresses and paths, otherwise unchanged."""
    client, monitor, *routes = ports
    text = Templates(project).text("manifests/nats.conf")
    for other in range(project.config.nats_replicas):
        host = f"nats-{other}.nats-headless.{project.config.namespace}.svc.cluster.local"
        assert f"{host}:6222" in text
        text = text.replace(f"{host}:6222", f"localhost:{routes[other]}")
    own = f"127.0.0.{number + 1}"
    changes = {
        "$POD_NAME": f"nats-{number}",
        "port: 6222": f'listen: "127.0.0.1:{routes[number]}"',
        "http_port: 8222": f'http: "{own}:{monitor}"',
        "port: 4222": f'listen: "{own}:{client}"',
        "client_advertise: $ADVERTISED\n": "",
        "/var/run/nats/nats.pid": str(folder / "nats.pid"),
        "/data/jetstream": str(folder / "jetstream"),
        'include "auth/auth.conf"': 'include "../users/auth.conf"',
    }
    if project.config.tls != "off":
        changes["/etc/nats-tls"] = str(folder.parent / "users" / "tls")
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


@contextmanager
def rendered_nats(root: Path) -> Iterator[RenderedNats]:
    """Three servers with TLS, ready."""
    project = Project(root, DeployConfig(name="acme"), (), "hf")
    users = UserFolder(root / "users")
    users.init("hf")
    _certificates(project, root)
    ports = tuple(free_ports(2 + project.config.nats_replicas))
    client, monitor = ports[:2]
    processes = []
    try:
        for number in range(project.config.nats_replicas):
            folder = root / f"nats-{number}"
            folder.mkdir()
            config = server_config_here(project, number, ports, folder)
            (folder / "lint.conf").write_text(config)
            processes.append(Process(config, folder, folder / "log"))
        hosts = [f"127.0.0.{n + 1}" for n in range(len(processes))]
        for host in hosts:
            _wait(f"http://{host}:{monitor}/healthz", root)
        urls = ",".join(f"tls://{host}:{client}" for host in hosts)
        yield RenderedNats(urls, f"{hosts[0]}:{monitor}", users, f"nats://localhost:{ports[2]}")
    finally:
        for process in processes:
            process.kill()
            process.exited.wait()


def _certificates(project: Project, root: Path) -> None:
    """What `certificates.sh` creates, also valid for this machine's addresses."""
    script = root / "certificates.sh"
    text = Templates(project).scripts(["nats"], [])["certificates.sh"]
    assert "DNS:*.nats-headless.acme.svc.cluster.local" in text
    addresses = ",".join(f"IP:127.0.0.{n + 1}" for n in range(project.config.nats_replicas))
    script.write_text(text.replace("DNS:localhost", f"DNS:localhost,{addresses}"))
    command = ["sh", str(script), "users"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _wait(url: str, root: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if json.loads(answer.read())["status"] == "ok":
                    return
        except OSError:
            time.sleep(0.1)
    logs = "\n".join(p.read_text()[-800:] for p in root.glob("nats-*/log"))
    raise AssertionError(f"{url} is not healthy:\n{logs}")
