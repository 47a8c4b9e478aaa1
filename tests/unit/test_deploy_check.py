"""`holdfast deploy check` finds what is wrong, and says so in a sentence."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.cli.deploy import parse_command
from holdfast.deploy.check import RULES, applied, check, commands, schemas
from holdfast.deploy.inventory import Inventory, Item, matches
from holdfast.deploy.monitoring import known, unknown, unknown_labels
from holdfast.errors import ConfigError
from tests.unit.deployment import inventory

Resource = dict[str, Any]
Change = Callable[[Resource], Any]


def problems(items: list[Item]) -> list[str]:
    """What the rules and the command line say, without schemas."""
    found = Inventory(items)
    told = [problem for rule in RULES for problem in rule(found)]
    return sorted(map(str, [*told, *commands(found, parse_command)]))


def planted(kind: str, name: str, change: Change) -> list[str]:
    """The problems of the usual project with one flaw in it."""
    items = [Item(item.path, copy.deepcopy(item.resource)) for item in inventory().items]
    [found] = [i for i in items if i.kind == kind and i.name == name]
    change(found.resource)
    return problems([item for item in items if item.resource.get("kind")])


def _pod(resource: Resource) -> Resource:
    found: Resource = resource["spec"]["template"]["spec"]
    return found


def _main(resource: Resource) -> Resource:
    found: Resource = _pod(resource)["containers"][0]
    return found


def _conf(resource: Resource, old: str, new: str) -> None:
    assert old in resource["data"]["nats.conf"]
    resource["data"]["nats.conf"] = resource["data"]["nats.conf"].replace(old, new)


def _trigger(resource: Resource) -> Resource:
    found: Resource = resource["spec"]["triggers"][0]["metadata"]
    return found


def _board(resource: Resource) -> None:
    [name] = resource["data"]
    board = json.loads(resource["data"][name])
    board["panels"][0]["targets"][0]["expr"] = "sum(rate(holdfast_no_such_total[5m]))"
    resource["data"][name] = json.dumps(board)


def gone(resource: Resource) -> None:
    """Remove the whole resource."""
    resource.clear()


CONTROL = ("Deployment", "control")
WORKER = ("Deployment", "resize")
NATS = ("StatefulSet", "nats")
CONF = ("ConfigMap", "nats-config")
SCALED = ("ScaledObject", "resize")

FLAWS: dict[str, tuple[tuple[str, str], Change, str]] = {
    # pods
    "root": (CONTROL, lambda r: _pod(r)["securityContext"].update(runAsUser=0), "as root"),
    "no user": (CONTROL, lambda r: _pod(r).pop("securityContext"), "as root"),
    "escalation": (
        WORKER,
        lambda r: _main(r)["securityContext"].update(allowPrivilegeEscalation=True),
        "allowPrivilegeEscalation",
    ),
    "privileged": (
        WORKER,
        lambda r: _main(r)["securityContext"].update(privileged=True),
        "allowPrivilegeEscalation",
    ),
    "capabilities": (WORKER, lambda r: _main(r)["securityContext"].pop("capabilities"), "drop ALL"),
    "writable": (
        NATS,
        lambda r: _main(r)["securityContext"].update(readOnlyRootFilesystem=False),
        "readOnlyRootFilesystem",
    ),
    "seccomp": (NATS, lambda r: _pod(r)["securityContext"].pop("seccompProfile"), "seccomp"),
    "token": (WORKER, lambda r: _pod(r).pop("automountServiceAccountToken"), "automount"),
    "host network": (("DaemonSet", "agent"), lambda r: _pod(r).update(hostNetwork=True), "hostN"),
    "agent root": (
        ("DaemonSet", "agent"),
        lambda r: r["spec"]["template"]["metadata"].pop("annotations"),
        "as root",
    ),
    "latest": (WORKER, lambda r: _main(r).update(image="ghcr.io/a/b:latest"), "no fixed tag"),
    "disk": (
        WORKER,
        lambda r: _pod(r)["volumes"].append({"name": "d", "hostPath": {"path": "/"}}),
        "the machine's disk",
    ),
    "host port": (WORKER, lambda r: _main(r)["ports"][0].update(hostPort=80), "hostPort"),
    "ready is only live": (
        CONTROL,
        lambda r: _main(r)["readinessProbe"]["httpGet"].update(path="/health/live"),
        "only checks liveness",
    ),
    "no login": (WORKER, lambda r: _main(r).update(env=[]), "logs in as nobody"),
    "web without tokens": (
        ("Deployment", "web"),
        lambda r: _main(r).update(env=_main(r)["env"][:1]),
        "HOLDFAST_WEB_TOKENS_FILE",
    ),
    "no tag": (WORKER, lambda r: _main(r).update(image="localhost:5000/b"), "no fixed tag"),
    "no limits": (WORKER, lambda r: _main(r).pop("resources"), "resources"),
    "not ready": (CONTROL, lambda r: _main(r).pop("readinessProbe"), "no readinessProbe"),
    "impatient": (
        WORKER,
        lambda r: _main(r)["livenessProbe"].pop("timeoutSeconds"),
        "would be killed",
    ),
    "impatient with NATS": (
        NATS,
        lambda r: _main(r)["livenessProbe"].update(timeoutSeconds=1),
        "would be killed",
    ),
    "ready is live": (
        CONTROL,
        lambda r: _main(r).update(readinessProbe=_main(r)["livenessProbe"]),
        "only checks liveness",
    ),
    "short grace": (
        WORKER,
        lambda r: _pod(r).update(terminationGracePeriodSeconds=60),
        "must be above the process's own",
    ),
    "default grace": (
        WORKER,
        lambda r: _pod(r).pop("terminationGracePeriodSeconds"),
        "must be above the process's own",
    ),
    "wrong command": (WORKER, lambda r: _main(r).update(args=["wroker", "main:app"]), "not work"),
    "wrong option": (CONTROL, lambda r: _main(r)["args"].append("--replicas=2"), "not work"),
    # availability
    "one control": (CONTROL, lambda r: r["spec"].update(replicas=1), "needs 2 replicas"),
    "together": (CONTROL, lambda r: _pod(r).pop("affinity"), "podAntiAffinity"),
    "gap": (
        CONTROL,
        lambda r: r["spec"]["strategy"]["rollingUpdate"].update(maxUnavailable=1),
        "maxUnavailable must be 0",
    ),
    "recreate": (WORKER, lambda r: r["spec"].update(strategy={"type": "Recreate"}), "must be 0"),
    "no budget": (("PodDisruptionBudget", "control"), gone, "no PodDisruptionBudget"),
    "budget for nobody": (
        ("PodDisruptionBudget", "resize"),
        lambda r: r["spec"]["selector"]["matchLabels"].update({"app.kubernetes.io/name": "x"}),
        "picks no pod",
    ),
    "tight budget": (
        ("PodDisruptionBudget", "control"),
        lambda r: r["spec"].update(minAvailable=2),
        "leaves none",
    ),
    "fixed replicas": (WORKER, lambda r: r["spec"].update(replicas=3), "reset them"),
    # NATS
    "two servers": (NATS, lambda r: r["spec"].update(replicas=2), "2 servers"),
    "lazy sync": (CONF, lambda r: _conf(r, "sync_interval: always", ""), "sync_interval"),
    "sync in a comment": (CONF, lambda r: _conf(r, "sync_", "# sync_"), "sync_interval"),
    "servers together": (NATS, lambda r: _pod(r).pop("affinity"), "podAntiAffinity"),
    "outside": (
        ("Service", "nats-headless"),
        lambda r: r["spec"].update(type="NodePort"),
        "to the outside",
    ),
    "no tls": (CONF, lambda r: _conf(r, "tls {", "tlz {"), "has no TLS"),
    "unguarded pipeline": (
        ("ValidatingAdmissionPolicyBinding", "acme-deployer"),
        gone,
        "may mount every secret",
    ),
    "secret of another part": (
        WORKER,
        lambda r: _main(r)["envFrom"].append({"secretRef": {"name": "holdfast-control"}}),
        "is not for jobs",
    ),
    "runs cut short": (
        WORKER,
        lambda r: r["metadata"]["annotations"].update(
            {"holdfast.dev/longest-timeout-seconds": "300"}
        ),
        "would interrupt runs",
    ),
    "largest lag": (
        ("ScaledObject", "shop-default"),
        lambda r: r["spec"]["advanced"].pop("scalingModifiers"),
        "the largest of several triggers, not the sum",
    ),
    "clients shut out": (
        ("NetworkPolicy", "nats"),
        lambda r: r["spec"].update(ingress=r["spec"]["ingress"][2:]),
        "clients cannot reach it",
    ),
    "keda shut out": (
        ("NetworkPolicy", "nats"),
        lambda r: r["spec"]["ingress"].pop(3),
        "KEDA cannot read",
    ),
    "slow sync": (CONF, lambda r: _conf(r, "always", "2m"), "sync_interval"),
    "full disk": (CONF, lambda r: _conf(r, "16GB", "20GB"), "below the volume"),
    "no limit": (CONF, lambda r: _conf(r, "max_file_store: 16GB", ""), "no max_file_store"),
    "small volume": (
        NATS,
        lambda r: r["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"].update(
            storage="10Gi"
        ),
        "below the volume",
    ),
    "no volume": (NATS, lambda r: r["spec"].pop("volumeClaimTemplates"), "is lost with the pod"),
    "no lame duck": (NATS, lambda r: _main(r).pop("lifecycle"), "lame-duck"),
    "hurried": (NATS, lambda r: _pod(r).update(terminationGracePeriodSeconds=20), "lame_duck"),
    "not headless": (
        ("Service", "nats-headless"),
        lambda r: r["spec"].pop("clusterIP"),
        "headless",
    ),
    "hidden": (
        ("Service", "nats-headless"),
        lambda r: r["spec"].pop("publishNotReadyAddresses"),
        "publishNotReady",
    ),
    "routes": (CONF, lambda r: _conf(r, "nats://nats-2", "# nats-2"), "routes of all 3"),
    "open monitor": (
        ("NetworkPolicy", "nats"),
        lambda r: r["spec"]["ingress"][3].pop("from"),
        "opens the monitoring port",
    ),
    "open to all namespaces": (
        ("NetworkPolicy", "nats"),
        lambda r: r["spec"]["ingress"].append({"from": [{"namespaceSelector": {}}]}),
        "opens the monitoring port",
    ),
    # scaling
    "no account": (SCALED, lambda r: _trigger(r).pop("account"), "account is missing"),
    "no fallback": (SCALED, lambda r: r["spec"].pop("fallback"), "no fallback"),
    "no cooldown": (SCALED, lambda r: r["spec"].pop("cooldownPeriod"), "cooldownPeriod"),
    "number": (SCALED, lambda r: _trigger(r).update(lagThreshold=5), "must be a text"),
    "no threshold": (SCALED, lambda r: _trigger(r).pop("lagThreshold"), "lagThreshold is missing"),
    "wrong number": (SCALED, lambda r: _trigger(r).update(lagThreshold="five"), "whole number"),
    "wrong consumer": (SCALED, lambda r: _trigger(r).update(consumer="resize"), "<group>=<job>"),
    "wrong target": (
        SCALED,
        lambda r: r["spec"]["scaleTargetRef"].update(name="rezise"),
        "does not exist",
    ),
    "other namespace": (SCALED, lambda r: r["metadata"].update(namespace="x"), "does not exist"),
    "two scalers": (
        SCALED,
        lambda r: r["spec"]["scaleTargetRef"].update(name="shop-default"),
        "would fight",
    ),
    "wrong endpoint": (
        SCALED,
        lambda r: _trigger(r).update(natsServerMonitoringEndpoint="nat.acme.svc:8222"),
        "service that does not exist",
    ),
    "wrong limits": (SCALED, lambda r: r["spec"].update(maxReplicaCount=0), "in order"),
    "other trigger": (SCALED, lambda r: r["spec"]["triggers"][0].update(type="cpu"), "'cpu'"),
    # access
    "wildcard": (("Role", "deployer"), lambda r: r["rules"][0].update(verbs=["*"]), "'*'"),
    "secrets": (
        ("Role", "deployer"),
        lambda r: r["rules"][5]["resources"].append("secrets"),
        "access secrets",
    ),
    "admin": (
        ("RoleBinding", "deployer"),
        lambda r: r["roleRef"].update(kind="ClusterRole", name="cluster-admin"),
        "cluster-admin",
    ),
    "password": (
        WORKER,
        lambda r: _main(r)["env"].append({"name": "HOLDFAST_PASSWORD", "value": "hunter2"}),
        "has its value in the file",
    ),
    "seed": (
        CONF,
        lambda r: r["data"].update(user="S" + "U" + "A" * 56),
        "everybody may read a ConfigMap",
    ),
    "token in a config map": (
        CONF,
        lambda r: r["data"].update(HOLDFAST_TOKEN="abc"),
        "everybody may read a ConfigMap",
    ),
    "no account object": (("ServiceAccount", "control"), gone, "service account 'control'"),
    "no config": (CONF, gone, "'nats-config' does not exist"),
    "selector": (
        WORKER,
        lambda r: r["spec"]["selector"]["matchLabels"].update({"app.kubernetes.io/name": "x"}),
        "does not pick its own pods",
    ),
    "service port": (
        ("Service", "control"),
        lambda r: r["spec"]["ports"][0].update(targetPort="helth"),
        "not a port of the pods",
    ),
    "monitor port": (
        ("ServiceMonitor", "control"),
        lambda r: r["spec"]["endpoints"][0].update(port="metrics"),
        "has a port 'metrics'",
    ),
    "mount": (WORKER, lambda r: _pod(r)["volumes"].pop(), "no volume"),
    # monitoring
    "rule": (
        ("PrometheusRule", "holdfast"),
        lambda r: r["spec"]["groups"][0]["rules"][0].update(expr="max(holdfast_slot_overdu) > 1"),
        "no metric 'holdfast_slot_overdu'",
    ),
    "quantity": (
        ("Deployment", "control"),
        lambda r: _main(r)["resources"]["limits"].update(memory="lots"),
        "memory 'lots' is no quantity",
    ),
    "label": (
        ("PrometheusRule", "holdfast"),
        lambda r: r["spec"]["groups"][1]["rules"][0].update(expr="max by (jub) (holdfast_job_lag)"),
        "a label 'jub'",
    ),
    "panel": (("ConfigMap", "dashboard-jobs"), _board, "no metric 'holdfast_no_such_total'"),
}


def test_usual_project_has_no_problems() -> None:
    """What follows is found because it was planted."""
    assert problems(inventory().items) == []


@pytest.mark.parametrize("name", FLAWS)
def test_planted_flaw_is_found(name: str) -> None:
    """Each flaw is told, with the resource it is in."""
    (kind, resource), change, words = FLAWS[name]
    found = planted(kind, resource, change)
    assert any(words in text for text in found), found


def test_registration_that_is_missing_is_found() -> None:
    """A consumer that nobody makes first is what scale-to-zero dies of."""
    items = [item for item in inventory().items if item.kind != "Job"]
    found = [text for text in problems(items) if "deploy register" in text]
    assert len(found) == 3


def test_namespace_without_a_closing_policy_is_found() -> None:
    """Each namespace needs its own: the agents' policy does not close the project's."""
    items = [
        item
        for item in inventory().items
        if (item.kind, item.name) != ("NetworkPolicy", "closed")
        or item.resource["metadata"]["namespace"] == "acme-agents"
    ]
    [found] = [text for text in problems(items) if "closes it" in text]
    assert "Namespace acme:" in found


def test_secret_in_a_file_is_found() -> None:
    """A seed does not belong into the repository, also not in base64."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s"},
        "data": {"a": "eA=="},
    }
    found = problems([*inventory().items, Item(Path("extra.yaml"), secret)])
    assert any("does not belong" in text for text in found)


def test_resource_that_is_there_twice_is_found() -> None:
    """Two files that fight are one too many."""
    items = inventory().items
    [control] = [i for i in items if i.kind == "Deployment" and i.name == "control"]
    found = problems([*items, Item(Path("copy.yaml"), control.resource)])
    assert any("is also defined in control/control.yaml" in text for text in found)


def test_schemas_find_a_field_that_kubernetes_does_not_know() -> None:
    """With kubernetes-validate installed, resources are held against its schemas."""
    items = [Item(i.path, copy.deepcopy(i.resource)) for i in inventory().of("Deployment")]
    items[0].spec["replica"] = 2
    found = schemas(Inventory(items))
    assert found is not None
    [told] = [str(problem) for problem in found]
    assert "replica" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [("a: b: c", "is not YAML"), ("- 1\n- 2\n", "not a resource"), ("", "no manifests")],
)
def test_files_that_are_no_manifests_are_told(tmp_path: Path, text: str, words: str) -> None:
    """What cannot be read is an error, not a pass."""
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        check(tmp_path, parse_command)


def test_metadata_that_is_no_object_stops_nothing(tmp_path: Path) -> None:
    """Nonsense where every resource has its name is a problem of that resource, too."""
    (tmp_path / "a.yaml").write_text("{apiVersion: apps/v1, kind: Deployment, metadata: web}")
    assert check(tmp_path, parse_command)


def test_file_that_a_kustomization_names_and_nobody_finds_is_told(tmp_path: Path) -> None:
    """A manifest that was deleted by hand is missed; what is elsewhere is not looked for."""
    (tmp_path / "a.yaml").write_text("{apiVersion: v1, kind: Namespace, metadata: {name: a}}")
    (tmp_path / "kustomization.yaml").write_text(
        "{kind: Kustomization, resources: [a.yaml, gone, 'https://example.org/b.yaml']}"
    )
    found = [str(one) for one in check(tmp_path, parse_command) if "render again" in str(one)]
    assert found == [
        "kustomization.yaml: it lists 'gone', which does not exist: render again, or remove it"
    ]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a resource."""
    if not isinstance(value, dict | list):
        return []
    found = []
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        found += [(*path, key), *_paths(one, (*path, key))]
    return found


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_nonsense_in_any_place_is_told_and_stops_nothing(data: st.DataObject) -> None:
    """Whatever stands where: the check ends, with problems or none, and never with a traceback."""
    items = inventory().items
    number = data.draw(st.integers(0, len(items) - 1))
    resource = copy.deepcopy(items[number].resource)
    path = data.draw(st.sampled_from(_paths(resource)))
    place: Any = resource
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = data.draw(st.sampled_from([None, "", "x", 7, -1, [], ["x"], {}, {"a": None}]))
    changed = Inventory([*items[:number], Item(items[number].path, resource), *items[number + 1 :]])
    for rule in RULES:
        assert all(str(problem) for problem in applied(rule, changed))


def test_selectors_pick_as_kubernetes_does() -> None:
    """matchLabels and every operator."""
    labels = {"a": "1"}
    assert matches({}, labels)
    assert matches({"matchLabels": {"a": "1"}}, labels)
    assert not matches({"matchLabels": {"a": "2"}}, labels)

    def expression(operator: str, key: str = "a", *values: str) -> dict[str, Any]:
        return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}

    assert matches(expression("In", "a", "1", "2"), labels)
    assert not matches(expression("NotIn", "a", "1"), labels)
    assert matches(expression("Exists"), labels)
    assert not matches(expression("Exists", "b"), labels)
    assert matches(expression("DoesNotExist", "b"), labels)


def test_labels_that_no_metric_has_are_seen() -> None:
    """A typing error in a grouping would give one line for everything."""
    good = "sum by (group, exported_job, le) (rate(holdfast_attempt_seconds_bucket[5m]))"
    assert unknown_labels(good) == []
    assert unknown_labels("sum by (colour) (holdfast_job_lag)") == ["colour"]
    assert unknown_labels("max by (le) (holdfast_job_lag)") == ["le"]


def test_unknown_metrics_are_seen_in_any_expression() -> None:
    """Functions, labels, matchers, durations and words of the language are no metrics."""
    good = (
        'max by (stream) (delta(holdfast_stream_messages{stream=~".+_DEAD"}[10m])) > 0 '
        "and on (group) up offset 5m unless absent(holdfast_leading == 1)"
    )
    assert unknown(good) == []
    assert unknown('sum(rate(holdfast_typo_total{a="holdfast_x"}[5m])) / 1e3') == [
        "holdfast_typo_total"
    ]
    assert unknown("histogram_quantile(0.9, sum by (le) (rate(nope_bucket[1m])))") == [
        "nope_bucket"
    ]
    assert "holdfast_slot_delay_seconds_bucket" in known()


def test_older_schemas_are_used_where_the_newest_are_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An older kubernetes-validate checks what it can."""
    import kubernetes_validate

    asked = []
    monkeypatch.setattr(kubernetes_validate, "latest_version", lambda: "1.31.0")
    monkeypatch.setattr(
        kubernetes_validate, "validate", lambda _, version, strict: asked.append(version)
    )
    assert schemas(inventory()) == []
    assert set(asked) == {"1.31.0"}
