"""What Prometheus scrapes. Workers come and go, so one headless service finds all of them."""

from __future__ import annotations

from holdfast.deploy import alerts, dashboards
from holdfast.deploy.manifests import agents, control, nats, pods, web
from holdfast.deploy.manifests.pods import HEALTH_PORT, Resource
from holdfast.deploy.project import Project

WORKERS = "workers"
EVERY = "15s"


def manifests(project: Project) -> list[Resource]:
    """Services, monitors, rules and dashboards."""
    found = [_workers(project), _monitor(project, WORKERS, WORKERS, "health")]
    found += [
        _monitor(project, control.NAME, control.NAME, "health"),
        _monitor(project, nats.NAME, nats.NAME, "metrics"),
    ]
    if project.config.web_replicas:
        found.append(_monitor(project, web.NAME, web.NAME, "health"))
    if project.config.agents == "yes":
        agent = _monitor(project, agents.NAME, agents.NAME, "health")
        agent["spec"]["namespaceSelector"]["matchNames"] = [pods.agents_namespace(project)]
        found.append(agent)
    return [*found, alerts.manifest(project), *dashboards.manifests(project)]


def _workers(project: Project) -> Resource:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"holdfast.dev/role": "worker"},
        "ports": [{"name": "health", "port": HEALTH_PORT, "targetPort": "health"}],
    }
    return pods.resource(project, "v1", "Service", WORKERS, spec=spec)


def _monitor(project: Project, name: str, component: str, port: str) -> Resource:
    spec = {
        "selector": {"matchLabels": {pods.OWN_LABEL: component}},
        "namespaceSelector": {"matchNames": [project.config.namespace]},
        "endpoints": [{"port": port, "path": "/metrics", "interval": EVERY}],
    }
    found = pods.resource(project, "monitoring.coreos.com/v1", "ServiceMonitor", name, spec=spec)
    found["metadata"]["labels"]["release"] = project.config.monitoring_release
    return found
