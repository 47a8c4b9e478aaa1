"""What every pod of ours has: labels, no privileges, configuration, credentials, probes.

A pod runs as an ordinary user, on a read-only file system, without capabilities and without a token
for the Kubernetes API, which no process of Holdfast needs.
"""

from __future__ import annotations

from typing import Any

from holdfast.deploy.project import Project

Resource = dict[str, Any]

USER = 1000
HEALTH_PORT = 8080
CONFIG = "holdfast"
CREDENTIALS = "/etc/holdfast"
NATS_CLIENT = "holdfast.dev/nats-client"
"""Label of pods that may connect to NATS."""
OWN_LABEL = "app.kubernetes.io/name"


def agents_namespace(project: Project) -> str:
    """Agents write to their machine's disk, which the project's own namespace does not admit."""
    return f"{project.config.namespace}-agents"


def labels(project: Project, component: str, **more: str) -> dict[str, str]:
    """The labels of a resource."""
    return {
        OWN_LABEL: component,
        "app.kubernetes.io/part-of": project.config.name,
        "app.kubernetes.io/managed-by": "holdfast",
        **more,
    }


def resource(
    project: Project, api: str, kind: str, name: str, component: str = "", **body: Any
) -> Resource:
    """A resource of the project's namespace."""
    metadata = {
        "name": name,
        "namespace": project.config.namespace,
        "labels": labels(project, component or name),
    }
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **body}


def pod_security() -> Resource:
    """Of a pod: nobody's user, and only the system calls that containers usually need."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Resource:
    """Of a container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def resources(cpu: str, memory: str) -> Resource:
    """Memory is reserved in full, so that no pod is killed for another's appetite."""
    return {
        "requests": {"cpu": "10m", "memory": memory},
        "limits": {"cpu": cpu, "memory": memory},
    }


def account(project: Project, name: str) -> Resource:
    """A service account that can do nothing: no process of ours talks to Kubernetes."""
    return resource(project, "v1", "ServiceAccount", name, automountServiceAccountToken=False)


def probes(port: str = "health") -> Resource:
    """Alive: the loop answers. Ready: a message can travel, a role is established."""
    live = {"path": "/health/live", "port": port}
    ready = {"path": "/health/ready", "port": port}
    return {
        "startupProbe": {"httpGet": live, "periodSeconds": 1, "failureThreshold": 60},
        "livenessProbe": {"httpGet": live, "periodSeconds": 10, "failureThreshold": 3},
        "readinessProbe": {
            "httpGet": ready,
            "initialDelaySeconds": 1,
            "periodSeconds": 3,
            "failureThreshold": 3,
        },
    }


def credentials(role: str) -> Resource:
    """The secret with a role's files, as a volume."""
    return {"name": "credentials", "secret": {"secretName": secret_of(role), "defaultMode": 0o440}}


def secret_of(role: str) -> str:
    """The secret with a role's credentials."""
    return f"holdfast-{role}"


def container(
    project: Project,
    name: str,
    image: str,
    command: list[str],
    *,
    cpu: str,
    memory: str,
    env: dict[str, str] | None = None,
    **more: Any,
) -> Resource:
    """One container of ours, hardened and configured."""
    variables = {"HOLDFAST_CREDENTIALS_FILE": f"{CREDENTIALS}/login.json", **(env or {})}
    found: Resource = {
        "name": name,
        "image": image,
        "args": command,
        "envFrom": [{"configMapRef": {"name": CONFIG}}],
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": resources(cpu, memory),
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "credentials", "mountPath": CREDENTIALS, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    found["volumeMounts"] += more.pop("volumeMounts", [])
    return found | more


def pod(
    project: Project,
    component: str,
    role: str,
    containers: list[Resource],
    *,
    stop_seconds: int,
    volumes: list[Resource] | None = None,
    **more: Any,
) -> Resource:
    """The template of a pod with one role's credentials."""
    spec: Resource = {
        "serviceAccountName": component,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": stop_seconds,
        "securityContext": pod_security(),
        "containers": containers,
        "volumes": [
            credentials(role),
            {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}},
            *(volumes or []),
        ],
        **more,
    }
    if project.config.pull_secret:
        spec["imagePullSecrets"] = [{"name": project.config.pull_secret}]
    marks = {NATS_CLIENT: "true", "holdfast.dev/role": role}
    return {"metadata": {"labels": labels(project, component, **marks)}, "spec": spec}


def apart(component: str) -> Resource:
    """Replicas prefer machines of their own."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {OWN_LABEL: component}},
    }
    return {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "podAffinityTerm": term}
            ]
        }
    }


def no_gap() -> Resource:
    """A new pod is ready before an old one is told to stop."""
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
    }


def disruption(project: Project, component: str, **limit: int) -> Resource:
    """How many may go at the same time when machines are drained."""
    selector = {"matchLabels": {OWN_LABEL: component}}
    return resource(
        project, "policy/v1", "PodDisruptionBudget", component, spec={"selector": selector} | limit
    )


def service(project: Project, component: str, ports: dict[str, int], **more: Any) -> Resource:
    """A service on ports by name."""
    spec: Resource = {
        "selector": {OWN_LABEL: component},
        "ports": [{"name": n, "port": p, "targetPort": n} for n, p in ports.items()],
    }
    return resource(project, "v1", "Service", component, spec=spec | more)
