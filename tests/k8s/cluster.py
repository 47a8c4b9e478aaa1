"""A real Kubernetes API server: etcd and kube-apiserver, and a thread that plays the controllers.

`KUBEBUILDER_ASSETS` names a directory with both programs, as envtest creates it. `HOLDFAST_CRDS`
may name a file or directory with CRDs of KEDA and the Prometheus operator; kinds it does not define
accept anything. Nothing runs: the thread reports every workload as ready, and ends registrations as
the test wants.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.server.process import free_ports

READY_SECONDS = 180
ADMIN, DEPLOYER, PLATFORM = "admin", "deployer", "platform"
KINDS = {"scaledobjects.keda.sh": "ScaledObject"}
KINDS |= {"servicemonitors.monitoring.coreos.com": "ServiceMonitor"}
KINDS |= {"prometheusrules.monitoring.coreos.com": "PrometheusRule"}
OPTIONAL = {"httproutes.gateway.networking.k8s.io": "HTTPRoute"}
OPTIONAL |= {"externalsecrets.external-secrets.io": "ExternalSecret"}
VERSIONS = {"keda.sh": "v1alpha1"}
"""Of the kinds that are not v1."""


def definition(name: str) -> dict[str, Any]:
    """A CRD that accepts anything."""
    plural, _, group = name.partition(".")
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": VERSIONS.get(group, "v1"), "served": True, "storage": True}
    kind = (KINDS | OPTIONAL)[name]
    names = {"plural": plural, "singular": kind.lower(), "kind": kind}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": name,
            # Asked for by names below k8s.io; these are not the published definitions.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": names,
            "versions": [version | {"schema": {"openAPIV3Schema": schema}}],
        },
    }


@dataclass
class Cluster:
    """The API server, and how registrations end."""

    folder: Path
    outcome: str = "Complete"
    stopping: threading.Event = field(default_factory=threading.Event)

    def config(self, user: str) -> str:
        return str(self.folder / f"{user}.conf")

    def run(self, *words: str, user: str = ADMIN, text: str = "", **env: str) -> tuple[int, str]:
        """Run a command as a user; returns its exit code and output."""
        done = subprocess.run(
            words,
            input=text,
            env=os.environ | {"KUBECONFIG": self.config(user)} | env,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    def kubectl(self, *words: str, user: str = ADMIN, text: str = "") -> str:
        """Run kubectl, which must succeed."""
        code, said = self.run("kubectl", *words, user=user, text=text)
        assert code == 0, said
        return said

    def control(self) -> None:
        """Report everything as ready, and end registrations."""
        while not self.stopping.wait(0.5):
            code, said = self.run("kubectl", "get", "deploy,sts,job", "-A", "-o", "json")
            for item in json.loads(said)["items"] if code == 0 else []:
                where = ("-n", item["metadata"]["namespace"], item["kind"])
                if item["metadata"].get("deletionTimestamp"):  # the garbage collector's part
                    patch = json.dumps({"metadata": {"finalizers": None}})
                    name = item["metadata"]["name"]
                    self.run("kubectl", "patch", *where, name, "--type=merge", "-p", patch)
                elif wanted := self._status(item):
                    patch = json.dumps({"status": wanted})
                    self.run(
                        "kubectl", "patch", *where, item["metadata"]["name"],
                        "--subresource=status", "--type=merge", "-p", patch,
                    )  # fmt: skip

    def _status(self, item: dict[str, Any]) -> dict[str, Any] | None:
        if item["kind"] == "Job":
            if item.get("status", {}).get("conditions"):
                return None
            when = "2026-01-01T00:00:00Z"
            before = {"Complete": "SuccessCriteriaMet", "Failed": "FailureTarget"}[self.outcome]
            conditions = [
                {"type": kind, "status": "True", "lastTransitionTime": when}
                for kind in (before, self.outcome)
            ]
            ended = {"completionTime": when} if self.outcome == "Complete" else {}
            return {"startTime": when, "conditions": conditions} | ended
        generation = item["metadata"]["generation"]
        if item.get("status", {}).get("observedGeneration") == generation:
            return None
        count = item["spec"]["replicas"]
        counts = ("replicas", "readyReplicas", "updatedReplicas", "availableReplicas")
        found = dict.fromkeys(counts, count) | {"observedGeneration": generation}
        revisions = {"currentRevision": "a", "updateRevision": "a"}
        return found | (revisions if item["kind"] == "StatefulSet" else {})


@contextmanager
def cluster(
    folder: Path, users: dict[str, str], *, played: bool = True, kinds: tuple[str, ...] = ()
) -> Iterator[Cluster]:
    """A running API server; `users` maps our names to Kubernetes' names.

    It knows KEDA and the Prometheus operator, or only the `kinds` that are named. With `played`, a
    thread reports everything as ready; without, somebody has to run the pods.
    """
    assets = Path(os.environ["KUBEBUILDER_ASSETS"])
    client, peer, port = free_ports(3)
    rows = [f"{ADMIN},{ADMIN},1,system:masters"]
    rows += [f"{name},{user},{n},pipeline" for n, (name, user) in enumerate(users.items(), 2)]
    (folder / "tokens.csv").write_text("\n".join(rows) + "\n")
    key = str(folder / "sa.key")
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    etcd = f"http://127.0.0.1:{client}"
    commands = [
        [
            str(assets / "etcd"), "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync",
            "--listen-client-urls", etcd, "--advertise-client-urls", etcd,
            "--listen-peer-urls", f"http://127.0.0.1:{peer}",
        ],
        [
            str(assets / "kube-apiserver"), f"--etcd-servers={etcd}", f"--secure-port={port}",
            "--bind-address=127.0.0.1", f"--cert-dir={folder / 'certs'}",
            "--service-cluster-ip-range=10.0.0.0/24", "--authorization-mode=RBAC",
            f"--token-auth-file={folder / 'tokens.csv'}", "--service-account-issuer=https://x",
            f"--service-account-signing-key-file={key}", f"--service-account-key-file={key}",
            "--disable-admission-plugins=ServiceAccount",
        ],
    ]  # fmt: skip
    server = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    for name in (ADMIN, *users):
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": server}],
            "users": [{"name": "u", "user": {"token": name}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (folder / f"{name}.conf").write_text(json.dumps(config))
    with (folder / "log").open("wb") as log:
        processes = [subprocess.Popen(words, stdout=log, stderr=log) for words in commands]
    found = Cluster(folder)
    thread = threading.Thread(target=found.control)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while found.run("kubectl", "get", "--raw", "/readyz")[0]:
            assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(0.5)
        crds = os.environ.get("HOLDFAST_CRDS")
        if crds and not kinds:
            found.kubectl("apply", "--server-side", "-f", crds)
        for name in KINDS:
            wanted = name.partition(".")[0] in kinds or not kinds
            if wanted and found.run("kubectl", "get", "crd", name)[0]:
                found.kubectl("apply", "-f", "-", text=json.dumps(definition(name)))
        if played:
            thread.start()
        yield found
    finally:
        found.stopping.set()
        if thread.ident:
            thread.join()
        for process in reversed(processes):
            process.kill()
            process.wait()
