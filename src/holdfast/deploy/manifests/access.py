"""Who may reach and do what: the namespace, the network, and the pipeline's own rights.

The namespace admits restricted pods only. Nothing may connect to a pod unless a policy says so, and
the control plane, web and agents connect to nothing but NATS and the name service. The pipeline may
apply what belongs to jobs, and read how it went; it may not read secrets.
"""

from __future__ import annotations

from holdfast.deploy.manifests import control, nats, pods, web
from holdfast.deploy.manifests.pods import HEALTH_PORT, Resource
from holdfast.deploy.project import Project

DEPLOYER = "deployer"
ADMISSION = "pod-security.kubernetes.io"


def manifests(project: Project) -> list[Resource]:
    """The namespace and what guards it."""
    return [
        namespace(project, project.config.namespace, "restricted"),
        pods.resource(project, "v1", "ConfigMap", pods.CONFIG, data=environment(project)),
        *_policies(project),
        *_deployer(project),
    ]


def namespace(project: Project, name: str, level: str) -> Resource:
    """A namespace that admits pods of some level of security."""
    marks = {
        "app.kubernetes.io/part-of": project.config.name,
        f"{ADMISSION}/enforce": level,
        f"{ADMISSION}/enforce-version": "latest",
        f"{ADMISSION}/warn": level,
    }
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": marks}}


def environment(project: Project) -> dict[str, str]:
    """What every process of ours is told."""
    return {
        "HOLDFAST_NATS_URL": nats.url(project),
        "HOLDFAST_NAMESPACE": project.namespace,
        "HOLDFAST_REPLICAS": str(min(3, project.config.nats_replicas)),
        "HOLDFAST_LOG_FORMAT": "json",
    }


# ---- the network


def _policies(project: Project) -> list[Resource]:
    found = [
        policy(project, "closed", {}, ingress=[]),
        policy(project, "metrics", {}, ingress=[allow_metrics(project)]),
        policy(
            project,
            "quiet",
            {"matchExpressions": [_roles(control.NAME, web.NAME)]},
            egress=egress(),
        ),
    ]
    if project.config.web_replicas:
        selector = {"matchLabels": {pods.OWN_LABEL: web.NAME}}
        anywhere = {"ports": [{"port": web.PORT, "protocol": "TCP"}]}
        found.append(policy(project, web.NAME, selector, ingress=[anywhere]))
    return found


def _namespace(name: str) -> Resource:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _roles(*roles: str) -> Resource:
    return {"key": "holdfast.dev/role", "operator": "In", "values": list(roles)}


def allow_metrics(project: Project) -> Resource:
    """Prometheus may scrape; KEDA may ask for the lag, if that is where it reads it."""
    sources = [_namespace(project.config.monitoring_namespace)]
    if project.config.scaler == "metrics-api":
        sources.append(_namespace(project.config.keda_namespace))
    return {"from": sources, "ports": [{"port": HEALTH_PORT, "protocol": "TCP"}]}


def egress() -> list[Resource]:
    """The name service, and NATS."""
    names = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    servers = {"podSelector": {"matchLabels": {pods.OWN_LABEL: nats.NAME}}}
    return [
        {"ports": names},  # wherever it is: on some clusters it is an address of the machine
        {"to": [servers], "ports": [{"port": nats.CLIENT, "protocol": "TCP"}]},
    ]


def policy(
    project: Project, name: str, selector: Resource, **directions: list[Resource]
) -> Resource:
    """A policy in the given directions."""
    types = [direction.capitalize() for direction in directions]
    spec = {"podSelector": selector, "policyTypes": types, **directions}
    return pods.resource(project, "networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)


# ---- the pipeline

APPLY = ["get", "list", "watch", "create", "patch"]
LOOK = ["get", "list", "watch"]


def _deployer(project: Project) -> list[Resource]:
    rules = [
        {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": APPLY},
        {"apiGroups": ["apps"], "resources": ["replicasets"], "verbs": LOOK},
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": APPLY},
        {"apiGroups": ["keda.sh"], "resources": ["scaledobjects"], "verbs": APPLY},
        {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": APPLY},
        {"apiGroups": [""], "resources": ["serviceaccounts"], "verbs": APPLY},
        {"apiGroups": [""], "resources": ["pods", "pods/log", "events"], "verbs": LOOK},
    ]
    api, group = "rbac.authorization.k8s.io/v1", "rbac.authorization.k8s.io"
    role = pods.resource(project, api, "Role", DEPLOYER, rules=rules)
    binding = pods.resource(
        project,
        api,
        "RoleBinding",
        DEPLOYER,
        roleRef={"apiGroup": group, "kind": "Role", "name": DEPLOYER},
        subjects=[{"apiGroup": group, "kind": "User", "name": project.config.deployer}],
    )
    return [role, binding]
