"""Manifests: valid, complete, and the same for the same project."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from holdfast.cli.deploy import parse_command
from holdfast.config import DeployConfig
from holdfast.config.deployment import JobDeployConfig, PodConfig
from holdfast.deploy.check import KUBERNETES, OWN_IMAGES, check
from holdfast.deploy.project import RESERVED, JobDirectory, load_project
from holdfast.deploy.render import Templates, render
from holdfast.deploy.scaffold import new_job
from holdfast.errors import ConfigError
from holdfast.identity.grants import ROLES
from holdfast.names import Names
from holdfast.web.network import Hosts
from tests.unit.deployment import alert_groups, group, one, project, read, rendered

CRDS = ("keda.sh/v1alpha1", "monitoring.coreos.com/v1", "cert-manager.io/v1")
EACH = pytest.mark.parametrize(
    "config",
    [
        {},
        {"scaler": "metrics-api", "web_replicas": 0, "agents": "no", "nats_replicas": 5},
        {"pull_secret": "regcred", "storage_class": "ssd", "release": "41", "web_hosts": "a.b"},
        {"web_hosts": "a.example.com", "ingress_class": "nginx", "ingress_tls_secret": "web-tls"},
        {"nats_replicas": 1, "control_replicas": 1, "web_replicas": 1, "tls": "off"},
        {"tls": "cert-manager", "tls_issuer": "acme", "gitops": "argocd", "monitoring": "files"},
        {"nats_url": "tls://nats.example.com:4222", "platform_deployer": "me", "gitops": "flux"},
        {"scaler": "hpa", "monitoring": "none", "client_namespaces": "shop, billing"},
        {"scaler": "nats-jetstream"},
        {"web_hosts": "a.b", "gateway": "infra/public", "secret_store": "vault"},
        {"backup_url": "s3://kept/acme?endpoint=https://s3.example.com", "agents": "no"},
        {"gitops": "argocd", "gitops_repository": "https://git.example.com/acme.git"},
    ],
    ids=[
        "default",
        "lean",
        "full",
        "ingress",
        "small",
        "cert-manager",
        "existing",
        "hpa",
        "nats-jetstream",
        "gateway",
        "backup",
        "gitops",
    ],
)


@pytest.mark.parametrize("version", ["1.30", "1.33", KUBERNETES])
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
    found: dict[str, Any] = {}
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
    spec = one(rendered(scaler="nats-jetstream"), "ScaledObject", "resize")["spec"]
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
    named = [trigger["name"] for trigger in spec["triggers"]]
    assert spec["advanced"]["scalingModifiers"]["formula"] == " + ".join(named)


def test_metrics_api_asks_the_control_plane() -> None:
    """KEDA reads `/lag` of a service that always runs: one number for all jobs of a group."""
    spec = one(rendered(), "ScaledObject", "shop-default")["spec"]
    [trigger] = spec["triggers"]
    assert trigger["metadata"]["url"] == (
        "http://control.acme.svc.cluster.local:8080/lag/default/order,mail"
    )
    assert trigger["metadata"]["valueLocation"] == "lag"


def test_workers_scale_without_keda() -> None:
    """`scaler = "hpa"`: no resource of KEDA, an HPA of Kubernetes itself, never to zero."""
    resources = rendered(scaler="hpa")
    assert not [r for r in resources if r["apiVersion"].startswith("keda.sh")]
    spec = one(resources, "HorizontalPodAutoscaler", "resize")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 5)
    [metric] = spec["metrics"]
    target = metric["containerResource"]["target"]
    # Of the limit of 200m: of the request of 10m an idle worker uses nearly all.
    assert target == {"type": "AverageValue", "averageValue": "160m"}
    kubernetes_validate.validate(
        one(resources, "HorizontalPodAutoscaler", "resize"), KUBERNETES, strict=True
    )


def test_registration_has_what_the_workers_have() -> None:
    """It imports the same app: with less memory it would be killed, and the job never deployed."""
    found = project()
    text = Templates(found).job(dataclasses.replace(found.jobs[0], config=LARGE))
    both = [text["register.yaml"], text["workers.yaml"]]
    documents = [one for part in both for one in yaml.safe_load_all(part)]
    assert len(documents) == 4
    given = [
        one["spec"]["template"]["spec"]["containers"][0]["resources"]
        for one in documents
        if "template" in one.get("spec", {})
    ]
    assert (
        given
        == [
            {
                "requests": {"cpu": "100m", "memory": "1Gi"},
                "limits": {"cpu": "1500m", "memory": "2Gi"},
            }
        ]
        * 2
    )


PLURALS = {"NetworkPolicy": "networkpolicies", "Ingress": "ingresses"}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"scaler": "hpa"},
        {"web_hosts": "a.b", "ingress_class": "nginx", "ingress_tls_secret": "web-tls"},
        {"web_hosts": "a.b", "gateway": "infra/public"},
        {"tls": "cert-manager", "tls_issuer": "acme", "secret_store": "vault"},
    ],
    ids=["default", "hpa", "ingress", "gateway", "operators"],
)
def test_each_pipeline_may_apply_what_it_applies(tmp_path: Path, config: dict[str, Any]) -> None:
    """Every kind of a job's directory, and of the control plane and the web, with any option."""
    found = project(platform_deployer="me", **config)
    extra = yaml.safe_dump_all([
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "levels"}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}},
    ])  # fmt: skip
    jobs = (dataclasses.replace(found.jobs[0], extra=extra), *found.jobs[1:])
    render(dataclasses.replace(found, jobs=jobs), tmp_path)
    resources = read(tmp_path)
    for role, parts in (("deployer", {"job"}), ("platform-deployer", {"control", "web"})):
        may = {
            (group, kind)
            for rule in one(resources, "Role", role)["rules"]
            if {"get", "create", "patch"} <= set(rule["verbs"])
            for group in rule["apiGroups"]
            for kind in rule["resources"]
        }
        applied = [r for r in resources if r["metadata"]["labels"]["holdfast.dev/part"] in parts]
        assert applied
        for resource in applied:
            kind, group = resource["kind"], resource["apiVersion"].rpartition("/")[0]
            if resource["metadata"]["labels"].get("holdfast.dev/step") != "admin":
                assert (group, PLURALS.get(kind, f"{kind.lower()}s")) in may, (role, kind)


def test_pipeline_leaves_out_what_only_an_administrator_may_apply(tmp_path: Path) -> None:
    """A job's claim is applied with `base`; its ConfigMap with the job."""
    found = project()
    extra = (
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: models}\n"
        "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: levels}\n"
    )
    jobs = (dataclasses.replace(found.jobs[0], extra=extra), *found.jobs[1:])
    render(dataclasses.replace(found, jobs=jobs), tmp_path)
    resources = read(tmp_path)
    steps = {
        name: one(resources, kind, name)["metadata"]["labels"]["holdfast.dev/step"]
        for kind, name in (("PersistentVolumeClaim", "models"), ("ConfigMap", "levels"))
    }
    assert steps == {"models": "admin", "levels": "extra"}
    script = (tmp_path / "apply.sh").read_text()
    base, job = script.index("if wanted base"), script.index("apply_job() {")
    assert script.index("step=admin") > base
    assert "admin" not in script[job : script.index("}", job)]


def test_registration_comes_first_and_replaces_the_last_one(tmp_path: Path) -> None:
    """A Job cannot be changed, and a failed one must not block the next: it is replaced."""
    render(project(), tmp_path)
    script = (tmp_path / "apply.sh").read_text()
    deleted = script.index("kubectl delete job")
    assert script.index("register() {") < deleted < script.index("step=register", deleted)
    job = script[script.index("apply_job() {") :]
    assert job.index("register") < job.index("workers")
    assert "*Failed*) break" in script


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
    assert secret == ["tls", "issued"]
    mounts = {m["name"] for c in pod["containers"] for m in c["volumeMounts"]}
    assert "issued" not in mounts
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
    assert "shop" in (tmp_path / "apply.sh").read_text()


def test_job_that_is_gone_is_gone(tmp_path: Path) -> None:
    """Removing a directory removes its manifests."""
    render(project(), tmp_path)
    whole = project()
    render(type(whole)(whole.root, whole.config, whole.jobs[:1], "hf"), tmp_path)
    assert sorted(p.name for p in (tmp_path / "jobs").iterdir()) == ["resize"]
    assert "shop" not in (tmp_path / "apply.sh").read_text()


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
    assert [p.name for p in scripts] == [
        "agents.sh",
        "apply.sh",
        "certificates.sh",
        "clean.sh",
        "grow-nats.sh",
        "secrets.sh",
    ]
    for path in scripts:
        subprocess.run(["sh", "-n", str(path)], check=True)
        assert os.access(path, os.X_OK)
        assert "skip-tls" not in path.read_text()
        assert "validate=false" not in path.read_text()


def test_setup_applies_in_the_order_of_dependencies(tmp_path: Path) -> None:
    """Namespace, NATS, control plane, then what depends on them; jobs last."""
    render(project(), tmp_path)
    script = (tmp_path / "apply.sh").read_text()
    order = [
        "part=namespace",
        "part=base",
        "need_secret acme",
        "part=nats",
        "part=control",
        "part=monitoring",
        "in resize shop",
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
        ({"memory": "256K"}, "not a quantity"),
        ({"cpu": "5m"}, "must not be above cpu"),
        ({"memory": "1Gi", "memory_request": "2048Mi"}, "must not be above memory"),
        ({"control_replicas": 0}, "at least 1"),
        ({"tls": "cert-manager"}, "tls_issuer"),
        ({"ingress_class": "nginx"}, "needs web_hosts"),
        ({"client_namespaces": "Not Good"}, "is not usable"),
        ({"gateway": "infra/public"}, "needs web_hosts"),
        ({"gateway": "public", "web_hosts": "a.b"}, "NAMESPACE/NAME"),
        ({"gateway": "i/p", "ingress_class": "n", "web_hosts": "a.b"}, "give one of them"),
        ({"gitops_repository": "https://a.b/c"}, "argocd or flux"),
        ({"backup_url": "https://a.b/c"}, "s3://"),
        ({"scaler": "nats-jetstream", "nats_url": "nats://n:4222"}, "metrics-api"),
    ],
)
def test_configuration_that_cannot_work_is_refused(config: dict[str, Any], words: str) -> None:
    """A mistake is told before anything is written."""
    with pytest.raises(ConfigError, match=words):
        DeployConfig(**config)


APP = """
from holdfast import Holdfast, Limit

app = Holdfast("shop")


@app.job(group="GROUP", limits=[Limit(running=1, per="what", ordered=True)])
async def send(what: str) -> None: ...
"""


def app_in(root: Path, group: str, tool: str = "") -> None:
    """A job's directory, with an app of one ordered job."""
    job = root / "jobs" / "platform"
    job.mkdir(parents=True)
    (job / "pyproject.toml").write_text(f"[project]\nname = 'platform'\n{tool}")
    (job / "main.py").write_text(APP.replace("GROUP", group))


def test_granted_runs_of_ordered_jobs_are_counted(tmp_path: Path) -> None:
    """They have a consumer of their own, which the registration makes."""
    app_in(tmp_path, "mail")
    [job] = load_project(tmp_path).jobs
    assert [one.name for one in job.groups[0].consumers] == ["mail=send", "mail=send=:granted"]


@pytest.mark.parametrize("name", ["x" * 44, "deployer"])
def test_service_with_a_name_that_cannot_be_used_is_refused(tmp_path: Path, name: str) -> None:
    """Kubernetes takes 63 characters; `platform-deployer` is the name of a part."""
    service = f"name='{name}'\ncommand=['x']\nport=9000\nready='/'\n"
    app_in(tmp_path, "mail", f"[[tool.holdfast.services]]\n{service}")
    with pytest.raises(ConfigError, match=r"rename it|lower-case"):
        load_project(tmp_path)


def test_workers_have_names_that_kubernetes_takes() -> None:
    """Groups may be called anything that NATS takes; long names stay apart."""
    groups = tuple(group(name, "work") for name in ("Slow_One", "x" * 64, "x" * 63 + "y"))
    job = JobDirectory("shop", JobDeployConfig(), groups, ())
    names = [job.workers(one) for one in groups]
    assert names[0] == "shop-slow-one"
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) for name in names)
    assert max(map(len, names)) <= 52
    assert len(set(names)) == 3


@pytest.mark.parametrize("name", ["control", "web", "nats", "agent", "backup", "backup-drill"])
def test_job_cannot_take_the_name_of_a_part(tmp_path: Path, name: str) -> None:
    """Two Deployments of one name would replace each other."""
    (tmp_path / "jobs").mkdir()
    with pytest.raises(ConfigError, match="choose another"):
        new_job(name, tmp_path)


def test_names_of_the_platform_are_kept_from_jobs_and_their_pipeline(tmp_path: Path) -> None:
    """One list: what a job may be called, its pipeline may deploy, and the reverse."""
    policy = one(rendered(), "ValidatingAdmissionPolicy", "acme-deployer")["spec"]["variables"]
    [parts] = [v["expression"] for v in policy if v["name"] == "parts"]
    assert json.loads(parts) == sorted(RESERVED)
    backed = rendered(backup_url="s3://kept/acme", platform_deployer="me")
    kinds = ("Deployment", "StatefulSet", "DaemonSet", "CronJob", "Service", "ServiceAccount")
    for resource in backed:
        if resource["kind"] in kinds and "holdfast.dev/job" not in resource["metadata"]["labels"]:
            assert resource["metadata"]["name"] in RESERVED


def test_no_job_reads_the_secrets_of_images_and_pages(tmp_path: Path) -> None:
    """Neither past the admission policy nor past the check."""
    config = {"pull_secret": "registry", "ingress_tls_secret": "web-tls"}
    config |= {"web_hosts": "a.b", "ingress_class": "nginx"}
    pods = msgspec.convert({"secrets": ["registry"]}, PodConfig)
    render(project(pods, **config), tmp_path)
    policy = one(read(tmp_path), "ValidatingAdmissionPolicy", "acme-deployer")["spec"]["variables"]
    [secrets] = [v["expression"] for v in policy if v["name"] == "secrets"]
    assert {"registry", "web-tls", "holdfast-control"} <= set(json.loads(secrets))
    told = [str(problem) for problem in check(tmp_path, parse_command)]
    assert len(told) == 2, told
    assert all("uses the secret 'registry'" in text for text in told)


def test_client_of_the_same_authority_is_no_server_of_nats() -> None:
    """A route needs a certificate with a server's name, not any of the authority's."""
    conf = one(rendered(), "ConfigMap", "nats-config")["data"]["nats.conf"]
    cluster = conf[conf.index("cluster {") :]
    assert "verify_cert_and_check_known_urls: true" in cluster


@pytest.mark.parametrize(
    ("schedule", "seconds"),
    [
        ("17 3 * * *", 2 * 86_400),
        ("0 * * * *", 2 * 3600),
        ("47 4 * * 0", 8 * 86_400),
        ("0 3 1 * *", 32 * 86_400),
    ],
)
def test_backup_is_old_by_its_own_schedule(schedule: str, seconds: int) -> None:
    """A weekly backup is not old after two days, an hourly one is before."""
    groups = alert_groups(backup_url="s3://kept/acme", backup_schedule=schedule)
    rules = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    for name in ("HoldfastBackupOld", "HoldfastBackupMissing"):
        assert f"> {seconds}" in rules[name]


def test_two_environments_have_dashboards_of_their_own() -> None:
    """In one Grafana, of one folder: a file or id of the same name would replace the other's."""
    files, ids = [], []
    for space in ("acme", "acme-staging"):
        for resource in rendered(kubernetes_namespace=space):
            if "grafana_dashboard" in resource["metadata"].get("labels", {}):
                [(file, text)] = resource["data"].items()
                files.append(file)
                ids.append(json.loads(text)["uid"])
    assert len(set(files)) == len(set(ids)) == 10
    assert max(map(len, ids)) <= 40


LARGE = JobDeployConfig(memory="2Gi", cpu="1500m", cpu_request="100m", memory_request="1Gi")
PODS = {
    "env": {
        "OBJECTS_URL": "s3://pictures?endpoint=https://r2.example.com",
        "OBJECTS_SECRET": {"secret": "r2", "key": "secret"},
        "LEVEL": {"config_map": "levels", "key": "resize", "optional": True},
    },
    "secrets": ["payments"],
    "volumes": [
        {"name": "models", "path": "/models", "claim": "models"},
        {"name": "work", "path": "/work", "size": "1Gi"},
        {"name": "license", "path": "/license", "secret": "license"},
    ],
    "service_account_annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/resize"},
    "labels": {"azure.workload.identity/use": "true"},
    "annotations": {"example.com/team": "pictures"},
    "node_selector": {"disk": "fast"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "priority_class": "batch",
}


def test_job_has_its_own_environment_secrets_volumes_and_places(tmp_path: Path) -> None:
    """What a job's directory says is in its workers and its registration, and passes the check."""
    render(project(msgspec.convert(PODS, PodConfig)), tmp_path)
    assert check(tmp_path, parse_command) == []
    resources = read(tmp_path)
    for kind, name in (("Deployment", "resize"), ("Job", "resize-register")):
        found = one(resources, kind, name)["spec"]["template"]
        pod, container = found["spec"], found["spec"]["containers"][0]
        kubernetes_validate.validate(one(resources, kind, name), KUBERNETES, strict=True)
        env = {v["name"]: v.get("value") or v["valueFrom"] for v in container["env"]}
        assert env["OBJECTS_URL"] == PODS["env"]["OBJECTS_URL"]  # type: ignore[index]
        assert env["OBJECTS_SECRET"] == {"secretKeyRef": {"name": "r2", "key": "secret"}}
        assert {"secretRef": {"name": "payments"}} in container["envFrom"]
        mounts = {m["mountPath"]: m.get("readOnly", False) for m in container["volumeMounts"]}
        assert (mounts["/models"], mounts["/work"], mounts["/license"]) == (True, False, True)
        volumes = {v["name"]: v for v in pod["volumes"]}
        assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "models"}
        assert volumes["work"]["emptyDir"] == {"sizeLimit": "1Gi"}
        assert found["metadata"]["labels"]["azure.workload.identity/use"] == "true"
        assert found["metadata"]["annotations"]["example.com/team"] == "pictures"
        assert (pod["nodeSelector"], pod["priorityClassName"]) == ({"disk": "fast"}, "batch")
        assert pod["tolerations"] == PODS["tolerations"]
    account = one(resources, "ServiceAccount", "resize")
    assert account["metadata"]["annotations"] == PODS["service_account_annotations"]
    other = one(resources, "Deployment", "shop-slow")["spec"]["template"]["spec"]
    assert "nodeSelector" not in other
    script = (tmp_path / "apply.sh").read_text()
    assert all(f'need_secret "$NAMESPACE" {name}' in script for name in ("r2", "payments"))


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("[tool.holdfast.env]\n1ST = 'a'", "not usable"),
        ("[tool.holdfast.env]\nA = { key = 'b' }", "either a secret or a config_map"),
        ("[tool.holdfast.env]\nHOLDFAST_NATS_URL = 'x'", "not usable"),
        ("[[tool.holdfast.volumes]]\nname='a'\npath='a'\nsize='1Gi'", "must be absolute"),
        ("[[tool.holdfast.volumes]]\nname='a'\npath='/a'", "exactly one of"),
        ("[[tool.holdfast.volumes]]\nname='a'\npath='/tmp/'\nsize='1Gi'", "not /etc/holdfast"),
        ("[[tool.holdfast.volumes]]\nname='a'\npath='/etc/holdfast-tls'\nsize='1Gi'", "must be"),
        ("[[tool.holdfast.tolerations]]\noperator='Maybe'", "neither Equal nor Exists"),
        ("[tool.holdfast]\nnode_selector = 'fast'", "Expected `object`"),
        ("[tool.holdfast.labels]\n'holdfast.dev/role' = 'x'", "set by Holdfast"),
        ("[tool.holdfast]\nnode_selektor = {}", "node_selektor is unknown"),
    ],
)
def test_mistake_in_a_jobs_own_settings_is_told(tmp_path: Path, tool: str, words: str) -> None:
    """With the file it is in, before anything is rendered."""
    job = tmp_path / "jobs" / "invoice"
    job.mkdir(parents=True)
    (job / "pyproject.toml").write_text(f"[project]\nname = 'invoice'\n{tool}\n")
    with pytest.raises(ConfigError, match=re.escape(words)) as told:
        load_project(tmp_path)
    assert "jobs/invoice/pyproject.toml" in str(told.value)


def test_each_image_has_its_own_tag_or_digest() -> None:
    """A pipeline builds what changed: the others keep what they have."""
    base = project(tag="old")
    found = dataclasses.replace(base, tags={"shop": "new", "control": "sha256:" + "a" * 64})
    assert found.image("resize") == "ghcr.io/example/acme-resize:old"
    assert found.image("shop") == "ghcr.io/example/acme-shop:new"
    assert found.image("control") == "ghcr.io/example/acme-control@sha256:" + "a" * 64


def test_grace_period_is_as_long_as_the_longest_timeout() -> None:
    """A rollout lets runs end, within an hour; what was asked for is taken."""
    assert JobDeployConfig().grace(300.0) == 300
    assert JobDeployConfig().grace(0.0) == JobDeployConfig().grace(5.0) == 60
    assert JobDeployConfig().grace(86_400.0) == 3600
    assert JobDeployConfig(grace_seconds=10).grace(300.0) == 10


def test_changed_configuration_restarts_pods() -> None:
    """A pod reads its configuration once: its template has the hash of it."""

    def marks(**config: Any) -> dict[str, str]:
        return {
            r["metadata"]["name"]: r["spec"]["template"]["metadata"]["annotations"][
                "holdfast.dev/config"
            ]
            for r in rendered(**config)
            if r["kind"] in ("Deployment", "StatefulSet", "DaemonSet")
        }

    before, after = marks(), marks(nats_replicas=5)
    assert before.keys() == {
        "agent",
        "control",
        "nats",
        "resize",
        "shop-default",
        "shop-slow",
        "web",
    }
    assert all(before[name] != after[name] for name in before)


def test_servers_of_nats_never_share_a_machine() -> None:
    """One machine must not hold the majority; staging may prefer otherwise."""
    pod = one(rendered(), "StatefulSet", "nats")["spec"]["template"]["spec"]
    [term] = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert pod["topologySpreadConstraints"][0]["topologyKey"] == "topology.kubernetes.io/zone"


def test_web_answers_to_the_name_of_its_service() -> None:
    """Who asks inside the cluster is not turned away."""
    container = one(rendered(web_hosts="jobs.example.com"), "Deployment", "web")["spec"][
        "template"
    ]["spec"]["containers"][0]
    [hosts] = [v["value"] for v in container["env"] if v["name"] == "HOLDFAST_WEB_HOSTS"]
    names = Hosts(hosts, "0.0.0.0")
    for name in ("web:8000", "web.acme", "web.acme.svc.cluster.local", "jobs.example.com"):
        assert names.known(name), name


def test_clients_of_other_namespaces_get_in_and_have_a_login(tmp_path: Path) -> None:
    """`client_namespaces` opens NATS to labelled pods there, and puts the client's login there."""
    render(project(client_namespaces="shop, billing"), tmp_path)
    rules = one(read(tmp_path), "NetworkPolicy", "nats")["spec"]["ingress"]
    let_in = [
        source["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for rule in rules
        for source in rule["from"]
        if "namespaceSelector" in source and "podSelector" in source
    ]
    assert let_in == ["acme-agents", "shop", "billing"]
    script = (tmp_path / "secrets.sh").read_text()
    assert "make_secret shop holdfast-client" in script
    assert "for space in acme acme-agents shop billing" in script


def test_existing_nats_is_used(tmp_path: Path) -> None:
    """No server is rendered, and everybody connects to the one that is named."""
    render(project(nats_url="tls://n1.example.com:4443,tls://n2.example.com:4443"), tmp_path)
    assert not (tmp_path / "nats").exists()
    resources = read(tmp_path)
    settings = [r["data"] for r in resources if r["metadata"]["name"] == "holdfast" and "data" in r]
    assert {s["HOLDFAST_NATS_URL"] for s in settings} == {
        "tls://n1.example.com:4443,tls://n2.example.com:4443"
    }
    [rule] = [
        rule
        for rule in one(resources, "NetworkPolicy", "quiet", "acme")["spec"]["egress"]
        if rule["ports"][0]["port"] != 53
    ]
    assert rule == {"ports": [{"port": 4443, "protocol": "TCP"}]}


def test_gitops_tools_keep_the_order(tmp_path: Path) -> None:
    """Argo CD gets waves and replaces the registration; Flux may replace it, too."""
    argo = rendered(gitops="argocd")
    wave = "argocd.argoproj.io/sync-wave"
    waves = [
        int(one(argo, kind, name)["metadata"]["annotations"][wave])
        for kind, name in (
            ("StatefulSet", "nats"),
            ("Deployment", "control"),
            ("Job", "resize-register"),
            ("Deployment", "resize"),
            ("ScaledObject", "resize"),
        )
    ]
    assert waves == sorted(waves)
    assert len(set(waves)) == 5
    marks = one(argo, "Job", "resize-register")["metadata"]["annotations"]
    assert marks["argocd.argoproj.io/hook-delete-policy"] == "BeforeHookCreation"
    flux = one(rendered(gitops="flux"), "Job", "resize-register")["metadata"]["annotations"]
    assert flux == {"kustomize.toolkit.fluxcd.io/force": "enabled"}


def test_argo_cd_applies_what_a_job_brings_with_its_registration(tmp_path: Path) -> None:
    """The registration mounts it: later, it would wait for ever; earlier, a claim might."""
    extra = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: levels, annotations: {a: b}}\n"
    found = project(gitops="argocd")
    jobs = (dataclasses.replace(found.jobs[0], extra=extra), *found.jobs[1:])
    render(dataclasses.replace(found, jobs=jobs), tmp_path)
    resources = read(tmp_path)
    wave = "argocd.argoproj.io/sync-wave"
    notes = one(resources, "ConfigMap", "levels")["metadata"]["annotations"]
    hook = one(resources, "Job", "resize-register")["metadata"]["annotations"]
    assert notes == {wave: hook[wave], "a": "b"}


def test_gitops_tool_is_told_what_to_apply(tmp_path: Path) -> None:
    """The overlay of the environment, in order, and nothing is deleted by itself."""
    where: dict[str, Any] = {"gitops_repository": "https://git.example.com/acme.git"}
    staging = dataclasses.replace(project(gitops="argocd", **where), environment="staging")
    render(staging, tmp_path)
    application = yaml.safe_load((tmp_path / "gitops.yaml").read_text())
    assert application["spec"]["source"]["path"] == "deploy/overlays/staging"
    assert application["spec"]["syncPolicy"]["automated"]["prune"] is False
    assert "gitops" not in (tmp_path / "kustomization.yaml").read_text()
    render(project(gitops="flux", **where), tmp_path)
    repository, applied = yaml.safe_load_all((tmp_path / "gitops.yaml").read_text())
    assert applied["spec"]["sourceRef"]["name"] == repository["metadata"]["name"]
    render(project(), tmp_path)
    assert not (tmp_path / "gitops.yaml").exists()


PAGES = {
    "name": "pages",
    "command": ["python", "-m", "pages"],
    "port": 8090,
    "ready": "/healthz",
    "hosts": ["status.example.com"],
}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"gateway": "infra/public", "web_hosts": "jobs.example.com"}, "HTTPRoute"),
        ({"ingress_class": "nginx", "web_hosts": "jobs.example.com"}, "Ingress"),
    ],
)
def test_pages_are_opened_under_their_names(
    tmp_path: Path, config: dict[str, Any], kind: str
) -> None:
    """The web under `web_hosts`, and a job's own service under its hosts."""
    pods = msgspec.convert({"services": [PAGES]}, PodConfig)
    render(project(pods, **config), tmp_path)
    resources = read(tmp_path)
    for name, host, port in (
        ("web", "jobs.example.com", 8000),
        ("resize-pages", "status.example.com", 8090),
    ):
        text = json.dumps(one(resources, kind, name)["spec"])
        assert host in text
        assert f"{port}" in text
        ports = one(resources, "Service", name)["spec"]["ports"]
        assert port in [p["port"] for p in ports]
        container = one(resources, "Deployment", name)["spec"]["template"]["spec"]["containers"][0]
        assert container["lifecycle"]["preStop"]["sleep"]["seconds"] >= 5
    assert check(tmp_path, parse_command) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"port": 80}, "port 80"),
        ({"port": 8080}, "not 8080"),
        ({"ready": "healthz"}, "must be a path"),
        ({"command": []}, "needs a command"),
        ({"name": "Not Good"}, "lower-case"),
        ({"memory": "lots"}, "not a quantity"),
        ({"replicas": 0}, "from 1 to 1000"),
    ],
)
def test_service_that_cannot_work_is_refused(change: dict[str, Any], words: str) -> None:
    """One sentence for each mistake."""
    [flaw] = msgspec.convert({"services": [PAGES | change]}, PodConfig).flaws()
    assert words in flaw


def test_secrets_come_from_a_store(tmp_path: Path) -> None:
    """Each secret that a pod uses is kept equal to one in the store, also those of jobs."""
    pods = msgspec.convert({"secrets": ["payments"]}, PodConfig)
    config = {"secret_store": "vault", "backup_url": "s3://b/p", "client_namespaces": "shop"}
    render(project(pods, **config), tmp_path)
    resources = read(tmp_path)
    made = {
        (r["metadata"]["namespace"], r["spec"]["target"]["name"])
        for r in resources
        if r["kind"] == "ExternalSecret"
    }
    used = set()
    for resource in resources:
        space = resource["metadata"].get("namespace", "")
        text = json.dumps(resource.get("spec", {}))
        for pattern in (r'"secretName": "([^"]+)"', r'"secretRef": {"name": "([^"]+)"'):
            used |= {(space, name) for name in re.findall(pattern, text)}
    assert used <= made, used - made
    assert {("shop", "holdfast-client"), ("acme", "nats-auth"), ("acme", "payments")} <= made
    script = (tmp_path / "apply.sh").read_text()
    assert "need_secret acme" not in script
    key = one(resources, "ExternalSecret", "payments")["spec"]["dataFrom"][0]["extract"]["key"]
    assert key == "acme/payments"


def test_secret_that_a_job_brings_itself_is_not_asked_for(tmp_path: Path) -> None:
    """Its manifests are applied before the registration, which may need them."""
    pods = msgspec.convert({"secrets": ["payments", "other"]}, PodConfig)
    extra = (
        "apiVersion: external-secrets.io/v1\nkind: ExternalSecret\nmetadata: {name: x}\n"
        "spec: {target: {name: payments}}\n"
    )
    found = project(pods)
    jobs = (dataclasses.replace(found.jobs[0], extra=extra), *found.jobs[1:])
    render(dataclasses.replace(found, jobs=jobs), tmp_path)
    script = (tmp_path / "apply.sh").read_text()
    assert 'need_secret "$NAMESPACE" other' in script
    assert 'need_secret "$NAMESPACE" payments' not in script
    assert script.index("step=extra") < script.index('register "$1"\n')


def test_backup_may_read_and_a_rehearsal_needs_no_login() -> None:
    """The regular backup has a login that changes nothing; both keep the time in UTC."""
    resources = rendered(backup_url="s3://kept/acme?endpoint=https://s3.example.com")
    for name, login in (("backup", True), ("backup-drill", False)):
        spec = one(resources, "CronJob", name)["spec"]
        assert spec["timeZone"] == "Etc/UTC"
        pod = spec["jobTemplate"]["spec"]["template"]["spec"]
        names = {v["name"] for v in pod["containers"][0]["env"]}
        assert ("HOLDFAST_CREDENTIALS_FILE" in names) is login
        assert parse_command(pod["containers"][0]["args"]) == ""
        kubernetes_validate.validate(one(resources, "CronJob", name), KUBERNETES, strict=True)
    rights = " ".join(ROLES["snapshot"](Names("hf")).publish)
    assert "RESTORE" not in rights
    assert "CREATE" not in rights
