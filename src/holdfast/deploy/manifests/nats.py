"""NATS: three servers that keep every message three times and sync every write to disk.

A server that is told to stop goes into lame-duck mode first: it hands its leaderships over and lets
its clients go one by one (SIGTERM does nothing more to it then). JetStream may use less than the
volume has, because a full disk stops a server for good. The monitor has no authentication, so a
network policy lets only KEDA and the exporter beside it read it.

Users and their permissions come from the secret `nats-auth`, which `holdfast auth init` makes.
"""

from __future__ import annotations

from holdfast.deploy.manifests import pods
from holdfast.deploy.manifests.pods import Resource
from holdfast.deploy.project import Project

NAME = "nats"
HEADLESS = "nats-headless"
AUTH = "nats-auth"
CLIENT, ROUTES, MONITOR, METRICS = 4222, 6222, 8222, 7777
LAME_DUCK_SECONDS = 30
STOP_SECONDS = 60
FOLDER = "/etc/nats"


def host(project: Project, number: int) -> str:
    """The address of one server; stable over restarts."""
    return f"{NAME}-{number}.{HEADLESS}.{project.config.namespace}.svc.cluster.local"


def url(project: Project) -> str:
    """Where clients connect."""
    hosts = (host(project, n) for n in range(project.config.nats_replicas))
    return ",".join(f"nats://{one}:{CLIENT}" for one in hosts)


def monitor(project: Project) -> str:
    """The monitor, as KEDA wants it: from here it finds the consumer's leader by itself."""
    return f"{HEADLESS}.{project.config.namespace}.svc.cluster.local:{MONITOR}"


def server_config(project: Project) -> str:
    """`nats.conf`."""
    config = project.config
    hosts = (host(project, n) for n in range(config.nats_replicas))
    routes = "\n".join(f"    nats://{one}:{ROUTES}" for one in hosts)
    cluster = (
        f"cluster {{\n  name: {config.name}\n  port: {ROUTES}\n  connect_retries: 120\n"
        f"  routes: [\n{routes}\n  ]\n}}\n"
    )
    return (
        "server_name: $POD_NAME\n"
        f"port: {CLIENT}\n"
        f"http_port: {MONITOR}\n"
        "pid_file: /var/run/nats/nats.pid\n"
        "max_payload: 1MB\n"
        "lame_duck_grace_period: 5s\n"
        f"lame_duck_duration: {LAME_DUCK_SECONDS}s\n"
        "jetstream {\n"
        "  store_dir: /data/jetstream\n"
        f"  max_file_store: {config.max_file_gib}GB\n"
        "  max_memory_store: 64MB\n"
        "  sync_interval: always\n"
        "}\n" + (cluster if config.nats_replicas > 1 else "") + 'include "auth/auth.conf"\n'
    )


def manifests(project: Project) -> list[Resource]:
    """Everything of NATS."""
    ports = {"client": CLIENT, "routes": ROUTES, "monitor": MONITOR, "metrics": METRICS}
    headless = pods.service(project, NAME, ports, clusterIP="None", publishNotReadyAddresses=True)
    headless["metadata"]["name"] = HEADLESS
    return [
        pods.account(project, NAME),
        pods.resource(
            project, "v1", "ConfigMap", "nats-config", NAME,
            data={"nats.conf": server_config(project)},
        ),
        headless,
        pods.service(project, NAME, {"client": CLIENT}),
        pods.disruption(project, NAME, maxUnavailable=1),
        _servers(project),
        _policy(project),
    ]  # fmt: skip


def _servers(project: Project) -> Resource:
    config = project.config
    claim: Resource = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": f"{config.nats_volume_gib}Gi"}},
    }
    if config.storage_class:
        claim["storageClassName"] = config.storage_class
    spec = {
        "serviceName": HEADLESS,
        "replicas": config.nats_replicas,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate"},
        "selector": {"matchLabels": {pods.OWN_LABEL: NAME}},
        "template": {
            "metadata": {"labels": pods.labels(project, NAME)},
            "spec": {
                "serviceAccountName": NAME,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": STOP_SECONDS,
                "securityContext": pods.pod_security(),
                "affinity": pods.apart(NAME),
                "containers": [_server(project), _exporter(project)],
                "volumes": [_files(), {"name": "pid", "emptyDir": {}}],
            },
        },
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
    }
    return pods.resource(project, "apps/v1", "StatefulSet", NAME, spec=spec)


def _files() -> Resource:
    """The configuration, and beside it in `auth/` what is secret."""
    return {
        "name": "config",
        "projected": {
            "sources": [
                {"configMap": {"name": "nats-config"}},
                {
                    "secret": {
                        "name": AUTH,
                        "items": [{"key": "auth.conf", "path": "auth/auth.conf"}],
                    }
                },
            ]
        },
    }


def _server(project: Project) -> Resource:
    def probe(query: str, failures: int) -> Resource:
        path = {"path": f"/healthz{query}", "port": "monitor"}
        return {"httpGet": path, "periodSeconds": 10, "failureThreshold": failures}

    return {
        "name": "nats",
        "image": project.config.nats_image,
        "command": ["nats-server", "--config", f"{FOLDER}/nats.conf"],
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "GOMEMLIMIT", "value": "900MiB"},
        ],
        "ports": [
            {"name": "client", "containerPort": CLIENT},
            {"name": "routes", "containerPort": ROUTES},
            {"name": "monitor", "containerPort": MONITOR},
        ],
        "lifecycle": {
            "preStop": {"exec": {"command": ["nats-server", "-sl=ldm=/var/run/nats/nats.pid"]}}
        },
        "startupProbe": probe("", 90),
        "livenessProbe": probe("?js-enabled-only=true", 3),
        "readinessProbe": probe("?js-server-only=true", 3),
        "resources": {
            "requests": {"cpu": "250m", "memory": "1Gi"},
            "limits": {"cpu": "2", "memory": "1Gi"},
        },
        "securityContext": pods.container_security(),
        "volumeMounts": [
            {"name": "config", "mountPath": FOLDER, "readOnly": True},
            {"name": "pid", "mountPath": "/var/run/nats"},
            {"name": "data", "mountPath": "/data"},
        ],
    }


def _exporter(project: Project) -> Resource:
    return {
        "name": "exporter",
        "image": project.config.exporter_image,
        "args": [
            "-port",
            str(METRICS),
            "-prefix",
            "nats",
            "-varz",
            "-connz",
            "-healthz",
            "-jsz=all",
            f"http://localhost:{MONITOR}/",
        ],
        "ports": [{"name": "metrics", "containerPort": METRICS}],
        "resources": pods.resources("100m", "64Mi"),
        "securityContext": pods.container_security(),
    }


def _policy(project: Project) -> Resource:
    """Clients by label, routes among themselves, the monitor for KEDA only."""
    config = project.config

    def from_namespace(name: str) -> Resource:
        return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}

    def from_pods(**wanted: str) -> Resource:
        return {"podSelector": {"matchLabels": wanted}}

    clients = from_pods(**{pods.NATS_CLIENT: "true"})
    rules = [
        (clients, CLIENT),
        (clients | from_namespace(pods.agents_namespace(project)), CLIENT),
        (from_pods(**{pods.OWN_LABEL: NAME}), ROUTES),
        (from_namespace(config.keda_namespace), MONITOR),
        (from_namespace(config.monitoring_namespace), METRICS),
    ]
    spec = {
        "podSelector": {"matchLabels": {pods.OWN_LABEL: NAME}},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [source], "ports": [{"port": port, "protocol": "TCP"}]}
            for source, port in rules
        ],
    }
    return pods.resource(project, "networking.k8s.io/v1", "NetworkPolicy", NAME, spec=spec)
