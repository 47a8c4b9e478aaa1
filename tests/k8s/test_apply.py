"""What is rendered, applied to a real Kubernetes API server by its own scripts (`make k8s`)."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from holdfast.config.deployment import PodConfig
from holdfast.deploy.render import render
from holdfast.identity.users import UserFolder
from tests.k8s.cluster import DEPLOYER, PLATFORM, Cluster, cluster, definition
from tests.unit.deployment import one, project, read

USERS = {DEPLOYER: "pipeline:jobs", PLATFORM: "pipeline:platform"}
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The usual project, rendered, and the folder of its logins beside it."""
    folder = tmp_path_factory.mktemp("rendered")
    found = project(deployer=USERS[DEPLOYER], platform_deployer=USERS[PLATFORM])
    render(found, folder / "all")
    render(dataclasses.replace(found, jobs=found.jobs[:1]), folder / "less")
    users = UserFolder(folder / "secrets")
    users.init("hf")
    users.add_agents(["machine-1"])
    (folder / "secrets" / "web-tokens").write_text("token\n")
    return folder


@pytest.fixture(scope="module")
def kubernetes(out: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An API server to which everything was applied."""
    with cluster(tmp_path_factory.mktemp("kubernetes"), USERS) as found:
        code, said = found.run(str(out / "all" / "secrets.sh"), str(out / "secrets"))
        assert code == 0, said
        code, said = found.run(str(out / "all" / "apply.sh"))
        assert code == 0, said
        yield found


def test_everything_is_taken_and_can_be_applied_again(kubernetes: Cluster, out: Path) -> None:
    """No field is unknown to the server; a second time no pod is replaced."""

    def generations() -> dict[str, int]:
        found = kubernetes.kubectl("get", "deploy,sts,ds", "-A", "-o", "json")
        items = json.loads(found)["items"]
        return {i["metadata"]["name"]: i["metadata"]["generation"] for i in items}

    before = generations()
    code, said = kubernetes.run(str(out / "all" / "apply.sh"))
    assert code == 0, said
    assert "no longer rendered" not in said
    assert len(before) == 7
    assert generations() == before


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "DaemonSet", "Job"])
def test_pods_are_admitted(kubernetes: Cluster, out: Path, kind: str) -> None:
    """Each workload's pod passes the pod security of its namespace."""
    for resource in read(out / "all"):
        if resource["kind"] == kind:
            template = copy.deepcopy(resource["spec"]["template"])
            pod = {"apiVersion": "v1", "kind": "Pod", **template}
            space = resource["metadata"]["namespace"]
            pod["metadata"] |= {"name": "probe", "namespace": space}
            pod["spec"].setdefault("restartPolicy", "Always")
            for claim in resource["spec"].get("volumeClaimTemplates") or []:
                empty = {"name": claim["metadata"]["name"], "emptyDir": {}}
                pod["spec"]["volumes"].append(empty)
            kubernetes.kubectl("create", "--dry-run=server", "-f", "-", text=json.dumps(pod))


def _with(resource: dict[str, Any], **spec: Any) -> str:
    found = copy.deepcopy(resource)
    found["metadata"]["name"] = "probe"
    found["spec"]["template"]["spec"] |= spec
    return json.dumps(found)


def _secret(name: str) -> list[dict[str, Any]]:
    return [{"name": "x", "secret": {"secretName": name}}]


STOLEN: dict[str, dict[str, Any]] = {
    "account seed": {"volumes": _secret("holdfast-control")},
    "users of NATS": {"volumes": _secret("nats-auth")},
    "key of the servers": {"volumes": _secret("nats-tls")},
    "projected": {
        "volumes": [{"name": "x", "projected": {"sources": [{"secret": {"name": "nats-auth"}}]}}]
    },
    "data of NATS": {
        "volumes": [{"name": "x", "persistentVolumeClaim": {"claimName": "data-nats-0"}}]
    },
    "environment": {
        "containers": [
            {"name": "x", "image": "x:1", "envFrom": [{"secretRef": {"name": "holdfast-web"}}]}
        ]
    },
    "variable of an init container": {
        "initContainers": [
            {
                "name": "y",
                "image": "x:1",
                "env": [
                    {
                        "name": "A",
                        "valueFrom": {"secretKeyRef": {"name": "holdfast-control", "key": "a"}},
                    }
                ],
            }
        ]
    },
    "account of another part": {"serviceAccountName": "control"},
}


@pytest.mark.parametrize("theft", STOLEN)
def test_pipeline_of_jobs_reaches_no_secret_of_the_platform(
    kubernetes: Cluster, out: Path, theft: str
) -> None:
    """A Job of its own that mounts one is refused; the same Job without it is not."""
    job = one(read(out / "all"), "Job", "resize-register")
    spec = copy.deepcopy(STOLEN[theft])
    plain = {"volumes": [], "containers": [{"name": "x", "image": "x:1"}]}
    command = ("kubectl", "create", "--dry-run=server", "-f", "-")
    code, said = kubernetes.run(*command, user=DEPLOYER, text=_with(job, **plain))
    assert code == 0, said
    code, said = kubernetes.run(*command, user=DEPLOYER, text=_with(job, **plain | spec))
    assert code == 1
    assert "ValidatingAdmissionPolicy 'acme-deployer'" in said
    code, said = kubernetes.run("kubectl", "get", "secrets", "-n", "acme", user=DEPLOYER)
    assert (code, "forbidden" in said) == (1, True)


def test_each_pipeline_deploys_its_own_part(kubernetes: Cluster, out: Path) -> None:
    """The jobs' pipeline applies jobs and not the control plane; the platform's does that."""
    apply = str(out / "all" / "apply.sh")
    code, said = kubernetes.run(apply, "shop", user=DEPLOYER)
    assert code == 0, said
    code, said = kubernetes.run(apply, "control", user=DEPLOYER)
    assert code == 1
    code, said = kubernetes.run(apply, "control", "web", user=PLATFORM)
    assert code == 0, said


def test_failed_registration_does_not_block_the_next(kubernetes: Cluster, out: Path) -> None:
    """A failure is told at once and changes no worker; the next attempt is a new one."""
    apply = str(out / "all" / "apply.sh")
    kubernetes.outcome = "Failed"
    try:
        code, said = kubernetes.run(apply, "shop")
    finally:
        kubernetes.outcome = "Complete"
    assert (code, "was not registered" in said) == (1, True)
    code, said = kubernetes.run(apply, "shop")
    assert code == 0, said


def test_removed_job_is_pruned_and_nothing_else(
    kubernetes: Cluster, out: Path, tmp_path: Path
) -> None:
    """First it is told; then it goes, unless runs wait for it."""
    apply = str(out / "less" / "apply.sh")
    stub = tmp_path / "kubectl"
    stub.write_text(
        '#!/bin/sh\n[ "$1" != exec ] || { echo "$*" >> "$ASKED"; exit "$WAITING"; }\n'
        'PATH=${PATH#*:} exec kubectl "$@"\n'
    )
    stub.chmod(0o755)
    asked = tmp_path / "asked"
    asked.touch()
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin:/usr/local/bin", "ASKED": str(asked)}
    code, said = kubernetes.run(apply)
    assert code == 0, said
    gone = {line.split()[-4] for line in said.splitlines() if line.startswith("no longer rendered")}
    assert {name.partition("/")[2] for name in gone} == {
        "shop", "shop-default", "shop-slow", "shop-register",
    }  # fmt: skip
    code, said = kubernetes.run(apply, "--prune", WAITING="1", **env)
    assert (code, "nothing was deleted" in said) == (1, True)
    assert "shop-default" in kubernetes.kubectl("get", "deployments", "-n", "acme")
    code, said = kubernetes.run(apply, "--prune", WAITING="0", **env)
    assert code == 0, said
    left = kubernetes.kubectl("get", "deploy,sa,pdb,job,scaledobject", "-n", "acme", "-o", "name")
    assert "shop" not in left
    assert {"deployment.apps/control", "deployment.apps/resize"} <= set(left.split())
    told = [line.partition("-- holdfast deploy ")[2] for line in asked.read_text().splitlines()]
    every = ["shop default order mail", "shop Slow report"]
    assert told[-4:-2] == [f"unregister --dry-run {words}" for words in every]
    assert told[-2:] == [f"unregister {words}" for words in every]


def test_volumes_of_nats_are_grown(kubernetes: Cluster, out: Path, tmp_path: Path) -> None:
    """Kubernetes would refuse the change in the middle of an apply; the script does it."""
    storage: dict[str, Any] = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass"}
    storage |= {"metadata": {"name": "ssd"}, "provisioner": "x", "allowVolumeExpansion": True}
    kubernetes.kubectl("apply", "-f", "-", text=json.dumps(storage))
    for number in range(3):
        name = f"data-nats-{number}"
        claim: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name},
        }
        claim["spec"] = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "ssd",
            "volumeName": name,
            "resources": {"requests": {"storage": "20Gi"}},
        }
        kubernetes.kubectl("apply", "-n", "acme", "-f", "-", text=json.dumps(claim))
        kubernetes.kubectl(
            "patch", "-n", "acme", "pvc", name, "--subresource=status", "--type=merge",
            "-p", json.dumps({"status": {"phase": "Bound", "capacity": {"storage": "20Gi"}}}),
        )  # fmt: skip
    render(project(nats_volume_gib=40), tmp_path)
    code, said = kubernetes.run(str(tmp_path / "apply.sh"), "nats")
    assert (code, "./grow-nats.sh" in said) == (1, True), said
    code, said = kubernetes.run(str(tmp_path / "grow-nats.sh"))
    assert code == 0, said
    template = "jsonpath={.spec.volumeClaimTemplates[0].spec.resources.requests.storage}"
    assert kubernetes.kubectl("get", "sts", "nats", "-n", "acme", "-o", template) == "40Gi"
    sizes = "jsonpath={.items[*].spec.resources.requests.storage}"
    assert kubernetes.kubectl("get", "pvc", "-n", "acme", "-o", sizes) == "40Gi 40Gi 40Gi"
    code, said = kubernetes.run(str(tmp_path / "apply.sh"), "nats")
    assert code == 0, said


def test_added_machine_gets_a_login(kubernetes: Cluster, out: Path) -> None:
    """`agents.sh` finds machines without one, and lets NATS know; a second time it does nothing."""
    for name in ("machine-1", "machine-2.example"):
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        kubernetes.kubectl("apply", "-f", "-", text=json.dumps(node))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = (str(out / "all" / "agents.sh"), str(out / "secrets"))
    before = kubernetes.kubectl("get", "secret", "nats-auth", "-n", "acme", "-o", "yaml")
    code, said = kubernetes.run(*command, PATH=path)
    assert code == 0, said
    found = yaml.safe_load(
        kubernetes.kubectl("get", "secret", "holdfast-agents", "-n", "acme-agents", "-o", "yaml")
    )
    assert set(found["data"]) == {"agent-machine-1.json", "agent-machine-2-example.json"}
    after = kubernetes.kubectl("get", "secret", "nats-auth", "-n", "acme", "-o", "yaml")
    assert yaml.safe_load(before)["data"] != yaml.safe_load(after)["data"]
    code, said = kubernetes.run(*command, PATH=path)
    assert (code, said) == (0, "every machine has a login\n")


def test_options_are_taken_by_the_server(kubernetes: Cluster, tmp_path: Path) -> None:
    """What is rendered only with an option: services, routes, backups, secrets from a store."""
    for name in ("httproutes.gateway.networking.k8s.io", "externalsecrets.external-secrets.io"):
        kubernetes.kubectl("apply", "-f", "-", text=json.dumps(definition(name)))
        kubernetes.kubectl("wait", "--for=condition=Established", "--timeout=60s", f"crd/{name}")
    pages = {"name": "pages", "command": ["pages"], "port": 8090, "ready": "/healthz"}
    pods = msgspec.convert({"services": [pages | {"hosts": ["s.example.com"]}]}, PodConfig)
    options: list[dict[str, Any]] = [
        {"gateway": "infra/public", "web_hosts": "a.b", "secret_store": "vault"},
        {"ingress_class": "nginx", "web_hosts": "a.b", "backup_url": "s3://kept/acme"},
        {"scaler": "hpa", "nats_replicas": 1, "control_replicas": 1},
    ]
    template = "jsonpath={.spec.volumeClaimTemplates[0].spec.resources.requests.storage}"
    size = kubernetes.kubectl("get", "sts", "nats", "-n", "acme", "-o", template)
    volume = int(size.removesuffix("Gi"))  # another test may have grown it
    for number, config in enumerate(options):
        render(project(pods, nats_volume_gib=volume, **config), tmp_path / str(number))
        code, said = kubernetes.run(str(tmp_path / str(number) / "apply.sh"), "--dry-run")
        assert code == 0, said
        assert "unknown field" not in said


def test_keda_is_installed_where_there_is_none(tmp_path: Path, out: Path) -> None:
    """Without it nothing is applied; with `--install-keda` it comes first, from its release."""
    (tmp_path / "server").mkdir()
    manifest = tmp_path / "keda.yaml"
    deployments = [
        _deployment(f"keda-{name}") for name in ("operator", "metrics-apiserver", "admission")
    ]
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "keda"}}
    every = [space, definition("scaledobjects.keda.sh"), *deployments]
    manifest.write_text(yaml.safe_dump_all(every))
    manifest = Path(os.environ.get("HOLDFAST_KEDA", manifest))
    with cluster(tmp_path / "server", {}, kinds=("servicemonitors", "prometheusrules")) as empty:
        apply = str(out / "all" / "apply.sh")
        code, said = empty.run(apply)
        assert (code, "--install-keda" in said) == (1, True), said
        assert empty.run("kubectl", "get", "namespace", "acme")[0] == 1, "nothing was applied"
        code, said = empty.run(str(out / "all" / "secrets.sh"), str(out / "secrets"))
        assert code == 0, said
        code, said = empty.run(apply, "--install-keda", KEDA_MANIFEST=str(manifest))
        assert code == 0, said
        assert "scaledobject.keda.sh/resize created" in said


def _deployment(name: str) -> dict[str, Any]:
    labels = {"app": name}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "x", "image": "x:1"}]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "keda"},
        "spec": {"selector": {"matchLabels": labels}, "template": pod},
    }
