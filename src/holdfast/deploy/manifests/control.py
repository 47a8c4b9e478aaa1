"""The control plane: scheduler, coordinator and dispatcher in one process, two of them.

Ready means that the role is established: leader, or behind one. So a rollout has no gap: the new
pod is ready before the old one is told to stop, and the old one hands its lead over.
"""

from __future__ import annotations

from holdfast.config.deployment import STOP_MARGIN_SECONDS
from holdfast.deploy.manifests import pods
from holdfast.deploy.manifests.pods import HEALTH_PORT, Resource
from holdfast.deploy.project import Project
from holdfast.model.liveness import PROFILES

NAME = "control"
PORTS = [{"name": "health", "containerPort": HEALTH_PORT}]
OWN_GRACE_SECONDS = int(PROFILES["lan"].grace_seconds)


def manifests(project: Project) -> list[Resource]:
    """The control plane."""
    command = ["control", "--health-port", str(HEALTH_PORT), "--ready-file", "/tmp/ready"]
    running = pods.container(
        project,
        NAME,
        project.image(NAME),
        command,
        cpu="500m",
        memory="256Mi",
        env={"HOLDFAST_DISPATCHER_SEED_FILE": f"{pods.CREDENTIALS}/account.seed"},
        ports=PORTS,
        **pods.probes(),
    )
    template = pods.pod(
        project,
        NAME,
        NAME,
        [running],
        stop_seconds=OWN_GRACE_SECONDS + STOP_MARGIN_SECONDS,
        affinity=pods.apart(NAME),
    )
    spec = {
        "replicas": project.config.control_replicas,
        "strategy": pods.no_gap(),
        "minReadySeconds": 2,
        "selector": {"matchLabels": {pods.OWN_LABEL: NAME}},
        "template": template,
    }
    return [
        pods.account(project, NAME),
        pods.service(project, NAME, {"health": HEALTH_PORT}),
        pods.disruption(project, NAME, minAvailable=1),
        pods.resource(project, "apps/v1", "Deployment", NAME, spec=spec),
    ]
