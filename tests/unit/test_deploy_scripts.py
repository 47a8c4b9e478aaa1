"""The rendered scripts as they are, with a kubectl that plays a cluster; a real one: `make k8s`."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.deploy.inventory import SERVES
from holdfast.deploy.render import render
from holdfast.identity.users import UserFolder
from tests.unit.deployment import project, read

GROUPS = {"Deployment": "apps", "StatefulSet": "apps", "DaemonSet": "apps", "Job": "batch"}
GROUPS |= {"NetworkPolicy": "networking.k8s.io", "PodDisruptionBudget": "policy"}
GROUPS |= {"ScaledObject": "keda.sh", "HorizontalPodAutoscaler": "autoscaling"}

KUBECTL = """
import json, sys
state = json.load(open(STATE))
words = sys.argv[1:]
with open(STATE.replace("state", "log"), "a") as log:
    print(*words, file=log)
def option(name):
    return words[words.index(name) + 1] if name in words else ""
def live(space):
    return sorted(state["live"].get(space, {}))
verb, space = words[0], option("--namespace")
if verb == "kustomize":
    print(open(state["rendered"]).read())
elif verb == "create" and option("--filename"):
    import yaml
    for one in yaml.load_all(open(option("--filename")), yaml.CSafeLoader):
        meta = one["metadata"]
        print(meta.get("namespace", ""), one["kind"], meta["name"])
elif words[:2] == ["get", "namespaces"]:
    print(*(f"namespace/{name}" for name in state["live"]), sep="\\n")
elif words[:2] == ["get", "job"]:
    print("Complete")
elif words[:2] == ["get", "deployments"]:
    pass
elif words[:2] == ["get", "deployment"] and words[-3:-2] == ["keda-operator"]:
    print(state.get("keda", ""))
elif verb == "get" and "managed-by" in option("--selector"):
    print(*live(space), sep="\\n")
elif verb == "get" and "holdfast" in option("--output"):
    print(state["live"][space][words[3]])
elif verb == "exec" and set(words) & set(state["waiting"]):
    sys.exit("error: runs wait" if state["asking"] == ("--dry-run" in words) else 0)
elif words[:2] == ["delete", "job"]:
    pass
elif verb == "delete":
    if words[-1].startswith("namespace/"):
        del state["live"][words[-1].removeprefix("namespace/")]
    else:
        del state["live"][space][words[-1]]
    json.dump(state, open(STATE, "w"))
"""


@dataclass
class Played:
    """A cluster to which `all` was applied, and scripts that were rendered since."""

    folder: Path

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "state").read_text())
        return found

    @property
    def log(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()

    def changes(self) -> list[str]:
        """The commands that change something, after everything was applied."""
        verbs = ("exec", "annotate", "scale", "wait", "delete")
        changed = [line for line in self.log if line.split()[0] in verbs]
        return [line for line in changed if not line.startswith("delete job")]

    def apply(self, *words: str, waiting: str = "", asking: bool = True) -> tuple[int, str]:
        """Run apply.sh; runs wait for the job `waiting`, noticed when asked or only later."""
        path = self.folder / "state"
        path.write_text(json.dumps(self.state | {"waiting": [waiting], "asking": asking}))
        return self.run("apply.sh", *words)

    def run(self, script: str, *words: str) -> tuple[int, str]:
        """Run a script; returns its exit code and output."""
        done = subprocess.run(
            [str(self.folder / "out" / script), *words],
            env=os.environ | {"PATH": f"{self.folder}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr


def played(folder: Path, *, jobs: int = 2, **config: Any) -> Played:
    """A cluster with the usual project, and the scripts of one with fewer jobs or other options."""
    render(project(), folder / "all")
    live: dict[str, dict[str, str]] = {}
    for one in read(folder / "all"):
        meta, kind = one["metadata"], one["kind"]
        dot = f".{GROUPS[kind]}" if kind in GROUPS else ""
        if space := meta.get("namespace"):
            name = f"{kind.lower()}{dot}/{meta['name']}"
            live.setdefault(space, {})[name] = meta.get("annotations", {}).get(SERVES, "")
    found = project(**config)
    render(dataclasses.replace(found, jobs=found.jobs[:jobs]), folder / "out")
    texts = sorted((folder / "out").rglob("*.yaml"))
    documents = [p.read_text() for p in texts if p.name != "kustomization.yaml"]
    (folder / "rendered").write_text("---\n".join(documents))
    state = {"live": live, "rendered": str(folder / "rendered")}
    (folder / "state").write_text(json.dumps(state))
    tool = folder / "kubectl"
    tool.write_text(f"#!{sys.executable}\nSTATE = {str(folder / 'state')!r}\n{KUBECTL}")
    tool.chmod(0o755)
    return Played(folder)


def test_removed_job_is_only_listed_without_prune(tmp_path: Path) -> None:
    """Its resources of every kind, and nothing of another job."""
    cluster = played(tmp_path, jobs=1)
    code, said = cluster.apply()
    assert code == 0, said
    listed = [line.split()[4] for line in said.splitlines() if line.startswith("no longer")]
    assert {name.partition("/")[2] for name in listed} == {
        "shop", "shop-default", "shop-slow", "shop-register",
    }  # fmt: skip
    assert cluster.changes() == []


def test_nothing_is_deleted_when_runs_wait_for_any_removed_job(tmp_path: Path) -> None:
    """All are asked before anything changes, also when the last one refuses."""
    cluster = played(tmp_path, jobs=1)
    before = cluster.state["live"]
    code, said = cluster.apply("--prune", waiting="report")
    assert (code, "nothing was deleted" in said) == (1, True), said
    asked = [line.partition("-- ")[2] for line in cluster.changes()]
    assert asked == [
        "holdfast deploy unregister --dry-run shop default order mail",
        "holdfast deploy unregister --dry-run shop Slow report",
    ]
    assert cluster.state["live"] == before


def test_workers_stop_before_their_consumers_go(tmp_path: Path) -> None:
    """A worker that runs would make them again, and nobody would ever remove them."""
    cluster = played(tmp_path, jobs=1)
    code, said = cluster.apply("--prune")
    assert code == 0, said
    verbs = [line.split()[0] for line in cluster.changes()]
    first = ["annotate", "scale", "wait", "exec"]
    assert verbs[:10] == ["exec", "exec", *first, *first]
    assert set(verbs[10:]) == {"delete"}
    assert not [name for name in cluster.state["live"]["acme"] if "/shop" in name]
    assert "deployment.apps/resize" in cluster.state["live"]["acme"]


def test_workers_go_on_when_a_run_arrives_meanwhile(tmp_path: Path) -> None:
    """The removal is refused after they stopped: their autoscaler is told to continue."""
    cluster = played(tmp_path, jobs=1)
    before = cluster.state["live"]
    code, said = cluster.apply("--prune", waiting="order", asking=False)
    assert (code, "goes on" in said) == (1, True), said
    paused = "annotate --namespace acme --overwrite scaledobject/shop-default"
    assert f"{paused} autoscaling.keda.sh/paused-replicas=0" in cluster.log
    assert cluster.changes()[-1].endswith("paused-replicas-")
    assert cluster.state["live"] == before


def test_agents_that_are_switched_off_are_removed(tmp_path: Path) -> None:
    """Their namespace is theirs alone, so it goes as a whole."""
    cluster = played(tmp_path, agents="no")
    code, said = cluster.apply()
    assert code == 0, said
    assert "no longer rendered: acme-agents namespace/acme-agents (--prune deletes it)" in said
    code, said = cluster.apply("--prune")
    assert code == 0, said
    assert set(cluster.state["live"]) == {"acme"}


@pytest.mark.parametrize("config", [{"web_replicas": 0}, {"nats_url": "tls://n.example.com:4222"}])
def test_part_that_is_switched_off_is_listed(tmp_path: Path, config: dict[str, Any]) -> None:
    """Also a StatefulSet; volumes stay."""
    cluster = played(tmp_path, **config)
    code, said = cluster.apply()
    assert code == 0, said
    gone = "statefulset.apps/nats" if "nats_url" in config else "deployment.apps/web"
    assert f"no longer rendered: acme {gone} " in said


@pytest.mark.parametrize(
    ("scaler", "image", "words"),
    [
        ("metrics-api", "ghcr.io/kedacore/keda:2.16.1", "KEDA 2.16.1 is too old"),
        ("metrics-api", "keda:2.17.0@sha256:abc", ""),
        ("metrics-api", "", ""),
        ("nats-jetstream", "keda:2.19.0", "KEDA 2.19.0 miscounts"),
        ("nats-jetstream", "", "KEDA unknown miscounts"),
        ("nats-jetstream", "keda:2.20.1", ""),
    ],
)
def test_versions_of_keda_that_miscount_are_refused(
    tmp_path: Path, scaler: str, image: str, words: str
) -> None:
    """Before anything is applied; where the version is not told, metrics-api is let through."""
    cluster = played(tmp_path, scaler=scaler)
    (tmp_path / "state").write_text(json.dumps(cluster.state | {"keda": image}))
    code, said = cluster.apply("--dry-run")
    assert (code, words in said) == (int(bool(words)), True), said
    assert any(line.startswith("apply") for line in cluster.log) is not bool(words)


def test_prune_takes_no_names(tmp_path: Path) -> None:
    """It compares everything; with a name it did nothing, without a word."""
    code, said = played(tmp_path).apply("--prune", "resize")
    assert (code, "leave out resize" in said) == (1, True)


def test_pipeline_of_the_platform_names_parts_that_are_switched_off(tmp_path: Path) -> None:
    """The pipeline applies `control web`, whatever a project renders; a typing error is told."""
    cluster = played(tmp_path, web_replicas=0)
    code, said = cluster.apply("control", "web")
    assert code == 0, said
    assert "web is switched off" in said
    assert cluster.apply("controll")[0] == 1


def test_secrets_for_an_existing_nats_need_its_authority(tmp_path: Path) -> None:
    """Without it the script says what to put where; with it, what that NATS must be given."""
    cluster = played(tmp_path, nats_url="tls://n.example.com:4222")
    users = UserFolder(tmp_path / "secrets")
    users.init("hf")
    users.add_agents(["machine-1"])
    (tmp_path / "secrets" / "web-tokens").write_text("token\n")
    code, said = cluster.run("secrets.sh", str(tmp_path / "secrets"))
    assert (code, "secrets/tls/ca.crt is missing: put the authority" in said) == (1, True), said
    assert not [line for line in cluster.log if line.startswith("create secret")]
    (tmp_path / "secrets" / "tls").mkdir()
    (tmp_path / "secrets" / "tls" / "ca.crt").write_text("a certificate")
    code, said = cluster.run("secrets.sh", str(tmp_path / "secrets"))
    assert code == 0, said
    assert "secrets/auth.conf in the configuration of your NATS" in said
    made = {line.split()[3] for line in cluster.log if line.startswith("create secret")}
    assert {"holdfast-ca", "holdfast-control", "holdfast-agents"} <= made
    assert not made & {"nats-auth", "nats-tls"}
