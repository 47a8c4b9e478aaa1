"""Manifests: valid, complete, and the same for the same project."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from holdfast.cli.deploy import parse_command
from holdfast.config import DeployConfig
from holdfast.config.deployment import JobDeployConfig
from holdfast.deploy.check import KUBERNETES, OWN_IMAGES, check
from holdfast.deploy.project import JobDirectory
from holdfast.deploy.render import render
from holdfast.deploy.scaffold import new_job
from holdfast.errors import ConfigError
from tests.unit.deployment import group, one, project, read, rendered

CRDS = ("keda.sh/v1alpha1", "monitoring.coreos.com/v1")
EACH = pytest.mark.parametrize(
    "config",
    [
        {},
        {"scaler": "metrics-api", "web_replicas": 0, "agents": "no", "nats_replicas": 5},
        {"pull_secret": "regcred", "storage_class": "ssd", "release": "41", "web_hosts": "a.b"},
    ],
    ids=["default", "lean", "full"],
)


@pytest.mark.parametrize("version", ["1.29", KUBERNETES])
def test_core_kinds_pass_kubernetes_schemas(version: str) -> None:
    """Every resource of Kubernetes' own kinds is valid, with no field that it does not know."""
    checked = 0
    for resource in rendered():
        if resource["apiVersion"] not in CRDS:
            kubernetes_validate.validate(resource, version, strict=True)
            checked += 1
    assert checked >= 20


def test_strict_schemas_refuse_a_wrong_field() -> None:
    """The validation of the test above would see a typing error."""
    deployment = one(rendered(), "Deployment", "control")
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 30
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)


@EACH
def test_rendered_manifests_have_no_flaws(tmp_path: Path, config: dict[str, Any]) -> None:
    """What we render passes our own check."""
    render(project(**config), tmp_path)
    assert check(tmp_path, parse_command) == []


def test_every_command_is_one_of_the_command_line() -> None:
    """The words of each container of ours are taken by the real parser, options included."""
    seen = set()
    for resource in rendered(release="41"):
        template = resource.get("spec", {}).get("template", {}).get("spec", {})
        for container in template.get("containers", []):
            if container["name"] in OWN_IMAGES:
                assert parse_command(container["args"]) == "", container["args"]
                seen.add(container["args"][0])
    assert seen == {"control", "worker", "web", "agent", "deploy"}
    assert parse_command(["worker", "main:app", "--no-such-option"])
    assert parse_command(["nonsense"])


def test_environment_names_options_that_exist() -> None:
    """Every HOLDFAST_ variable of a manifest is the name of an option, with a value it takes."""
    from holdfast.config import ROLES, options, variable
    from holdfast.config.option import checked

    known = {variable(role, s.name): s for role in ROLES.values() for s in options(role)}
    found = {}
    for resource in rendered(web_hosts="jobs.example.com"):
        if resource["kind"] == "ConfigMap":
            found |= resource["data"]
        for container in (
            resource.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
        ):
            found |= {v["name"]: v.get("value") for v in container.get("env", [])}
    ours = {name: value for name, value in found.items() if name.startswith("HOLDFAST_")}
    assert len(ours) >= 8
    for name, value in ours.items():
        spec = known[name]
        checked(spec, int(value) if str(spec.type) == "int" else value, name)


def test_scaled_object_has_what_keda_needs() -> None:
    """One trigger for the queue and one for each subscription, in an account that is named."""
    spec = one(rendered(), "ScaledObject", "resize")["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (0, 5)
    assert (spec["pollingInterval"], spec["cooldownPeriod"]) == (10, 60)
    assert spec["fallback"] == {"failureThreshold": 3, "replicas": 1}
    metadata = [trigger["metadata"] for trigger in spec["triggers"]]
    assert [(m["stream"], m["consumer"]) for m in metadata] == [
        ("HF_JOBS", "resize=resize"),
        ("HF_EVENTS", "resize=resize=loaded"),
    ]
    assert {m["account"] for m in metadata} == {"HF"}
    assert {m["lagThreshold"] for m in metadata} == {"5"}
    assert {m["natsServerMonitoringEndpoint"] for m in metadata} == {
        "nats-headless.acme.svc.cluster.local:8222"
    }


def test_metrics_api_asks_the_control_plane() -> None:
    """The other scaler reads `/lag` of a service that always runs, one trigger for each job."""
    spec = one(rendered(scaler="metrics-api"), "ScaledObject", "shop-default")["spec"]
    assert [t["metadata"]["url"] for t in spec["triggers"]] == [
        "http://control.acme.svc.cluster.local:8080/lag/default/order",
        "http://control.acme.svc.cluster.local:8080/lag/default/mail",
    ]
    assert {t["metadata"]["valueLocation"] for t in spec["triggers"]} == {"lag"}


def test_registration_comes_first_and_is_named_by_what_it_does(tmp_path: Path) -> None:
    """A Job cannot be changed: another release is another Job; the same one is the same."""
    render(project(tag="1", release="1"), tmp_path)
    first, again = read(tmp_path), rendered(tag="1", release="1")
    later = rendered(tag="2", release="2")

    def names(resources: list[dict[str, Any]]) -> list[str]:
        return [r["metadata"]["name"] for r in resources if r["kind"] == "Job"]

    assert names(first) == names(again)
    assert not set(names(first)) & set(names(later))
    script = (tmp_path / "apply-job.sh").read_text()
    applied = [script.index(name) for name in ("register.yaml", "workers.yaml", "scaling.yaml")]
    assert applied == sorted(applied)
    assert script.index("condition=complete") < script.index("scaling.yaml")


def test_pod_stops_after_its_process() -> None:
    """SIGKILL comes after the process's own grace period, for every role."""
    resources = rendered()
    worker = one(resources, "Deployment", "shop-slow")["spec"]["template"]["spec"]
    assert worker["terminationGracePeriodSeconds"] == 135
    assert "120s" in worker["containers"][0]["args"]
    control = one(resources, "Deployment", "control")
    assert control["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 10
    assert control["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert control["spec"]["replicas"] == 2
    assert one(resources, "PodDisruptionBudget", "control")["spec"]["minAvailable"] == 1


def test_workers_leave_their_number_to_the_autoscaler() -> None:
    """An apply must not set the replicas back."""
    assert "replicas" not in one(rendered(), "Deployment", "resize")["spec"]


def test_only_the_init_container_sees_all_agents_credentials() -> None:
    """An agent's own container has its own key and not the others'."""
    pod = one(rendered(), "DaemonSet", "agent")["spec"]["template"]["spec"]
    secret = [v["name"] for v in pod["volumes"] if "secret" in v]
    assert secret == ["issued"]
    mounts = {m["name"] for c in pod["containers"] for m in c["volumeMounts"]}
    assert not mounts & set(secret)
    assert "issued" in {m["name"] for m in pod["initContainers"][0]["volumeMounts"]}


def test_same_project_renders_the_same_bytes(tmp_path: Path) -> None:
    """A diff shows changes and nothing else."""
    first, second = tmp_path / "a", tmp_path / "b"
    render(project(), first)
    render(project(), second)
    texts = [
        {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}
        for out in (first, second)
    ]
    assert texts[0] == texts[1]


def test_render_of_one_job_leaves_the_others(tmp_path: Path) -> None:
    """A pipeline renders what it deploys; the rest keeps its images."""
    render(project(tag="old"), tmp_path)
    whole = project(tag="new")
    only = type(whole)(whole.root, whole.config, whole.jobs[:1], whole.namespace)
    render(only, tmp_path, only=True)
    images = {
        r["metadata"]["name"]: r["spec"]["template"]["spec"]["containers"][0]["image"]
        for r in read(tmp_path)
        if r["kind"] == "Deployment"
    }
    assert images["resize"].endswith("acme-resize:new")
    assert {
        name: image.rpartition(":")[2] for name, image in images.items() if name != "resize"
    } == {
        "control": "old",
        "web": "old",
        "shop-default": "old",
        "shop-slow": "old",
    }
    assert "shop" in (tmp_path / "setup.sh").read_text()


def test_job_that_is_gone_is_gone(tmp_path: Path) -> None:
    """Removing a directory removes its manifests."""
    render(project(), tmp_path)
    whole = project()
    render(type(whole)(whole.root, whole.config, whole.jobs[:1], "hf"), tmp_path)
    assert sorted(p.name for p in (tmp_path / "jobs").iterdir()) == ["resize"]
    assert "apply-job.sh shop" not in (tmp_path / "setup.sh").read_text()


def test_render_refuses_a_directory_of_others(tmp_path: Path) -> None:
    """Files that we did not write are not mixed with ours."""
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match="did not write"):
        render(project(), tmp_path)


def test_kustomizations_name_every_file(tmp_path: Path) -> None:
    """What lies in a folder is applied with it, and nothing is named that is not there."""
    render(project(), tmp_path)
    for path in tmp_path.rglob("kustomization.yaml"):
        named = set(yaml.safe_load(path.read_text())["resources"])
        assert all((path.parent / name).exists() for name in named), path
        files = {p.name for p in path.parent.glob("*.yaml")} - {path.name}
        assert files <= named or path.parent == tmp_path


def test_scripts_are_shell(tmp_path: Path) -> None:
    """`sh -n` takes them, they may be executed, and none skips a verification."""
    render(project(), tmp_path)
    scripts = sorted(tmp_path.glob("*.sh"))
    assert [p.name for p in scripts] == ["apply-job.sh", "clean.sh", "secrets.sh", "setup.sh"]
    for path in scripts:
        subprocess.run(["sh", "-n", str(path)], check=True)
        assert os.access(path, os.X_OK)
        assert "skip-tls" not in path.read_text()
        assert "validate=false" not in path.read_text()


def test_setup_applies_in_the_order_of_dependencies(tmp_path: Path) -> None:
    """Namespace, NATS, control plane, then what depends on them; jobs last."""
    render(project(), tmp_path)
    script = (tmp_path / "setup.sh").read_text()
    order = [
        "-k base",
        "get secret",
        "-k nats",
        "-k control",
        "-k monitoring",
        "apply-job.sh resize",
    ]
    places = [script.index(word) for word in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"nats_replicas": 2}, "1, 3 or 5"),
        ({"nats_volume_gib": 10, "nats_max_file_gib": 10}, "below nats_volume_gib"),
        ({"name": "Not_A_Label"}, "is not usable"),
        ({"min_replicas": 6}, "max_replicas"),
        ({"memory": "lots"}, "not a quantity"),
        ({"control_replicas": 1}, "at least 2"),
    ],
)
def test_configuration_that_cannot_work_is_refused(config: dict[str, Any], words: str) -> None:
    """A mistake is told before anything is written."""
    with pytest.raises(ConfigError, match=words):
        DeployConfig(**config)


def test_workers_have_names_that_kubernetes_takes() -> None:
    """Groups may be called anything that NATS takes; long names stay apart."""
    groups = tuple(group(name, "work") for name in ("Slow_One", "x" * 64, "x" * 63 + "y"))
    job = JobDirectory("shop", JobDeployConfig(), groups, ())
    names = [job.workers(one) for one in groups]
    assert names[0] == "shop-slow-one"
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) for name in names)
    assert max(map(len, names)) <= 52
    assert len(set(names)) == 3


@pytest.mark.parametrize("name", ["control", "web", "nats", "agent"])
def test_job_cannot_take_the_name_of_a_part(tmp_path: Path, name: str) -> None:
    """Two Deployments of one name would replace each other."""
    (tmp_path / "jobs").mkdir()
    with pytest.raises(ConfigError, match="choose another"):
        new_job(name, tmp_path)
