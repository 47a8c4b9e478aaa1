"""The web: API and pages. It listens beyond its pod, so it has tokens, or it would not start."""

from __future__ import annotations

from holdfast.deploy.manifests import control, pods
from holdfast.deploy.manifests.pods import HEALTH_PORT, Resource
from holdfast.deploy.project import Project

NAME = "web"
PORT = 8000
TOKENS = "holdfast-web-tokens"
TOKENS_FOLDER = "/etc/holdfast-web"


def manifests(project: Project) -> list[Resource]:
    """The web; nothing when it is not wanted."""
    if not project.config.web_replicas:
        return []
    ports = {"http": PORT, "health": HEALTH_PORT}
    env = {
        "HOLDFAST_WEB_TOKENS_FILE": f"{TOKENS_FOLDER}/tokens",
        "HOLDFAST_WEB_HEALTH_PORT": str(HEALTH_PORT),
    }
    if project.config.web_hosts:
        env["HOLDFAST_WEB_HOSTS"] = project.config.web_hosts
    running = pods.container(
        project,
        NAME,
        project.image(control.NAME),
        ["web", "--host", "0.0.0.0", "--port", str(PORT)],
        cpu="500m",
        memory="256Mi",
        env=env,
        ports=[{"name": n, "containerPort": p} for n, p in ports.items()],
        volumeMounts=[{"name": "tokens", "mountPath": TOKENS_FOLDER, "readOnly": True}],
        **pods.probes(),
    )
    template = pods.pod(
        project,
        NAME,
        NAME,
        [running],
        stop_seconds=30,
        volumes=[{"name": "tokens", "secret": {"secretName": TOKENS, "defaultMode": 0o440}}],
        affinity=pods.apart(NAME),
    )
    spec = {
        "replicas": project.config.web_replicas,
        "strategy": pods.no_gap(),
        "selector": {"matchLabels": {pods.OWN_LABEL: NAME}},
        "template": template,
    }
    return [
        pods.account(project, NAME),
        pods.service(project, NAME, ports),
        pods.disruption(project, NAME, maxUnavailable=1),
        pods.resource(project, "apps/v1", "Deployment", NAME, spec=spec),
    ]
