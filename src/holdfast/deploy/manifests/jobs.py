"""One directory of `jobs/`: its registration, its workers, and how they scale.

An autoscaler reads consumers, and consumers are made by workers: with no worker there would be
nothing to read. So a registration comes first, a Kubernetes Job in the app's own image that makes
the consumers and registers the schedules; its name has the hash of what it does, since such a Job
cannot be changed. Should the consumers vanish later, the autoscaler's fallback starts a worker, and
that makes them again.

The Deployment says nothing about its replicas: they belong to the autoscaler.
"""

from __future__ import annotations

import hashlib
import json

from holdfast.deploy.manifests import control, nats, pods
from holdfast.deploy.manifests.pods import HEALTH_PORT, Resource
from holdfast.deploy.project import Group, JobDirectory, Project

SCALE_DOWN_SECONDS = 60


def registration(project: Project, job: JobDirectory) -> list[Resource]:
    """What must have ended before anything below is applied."""
    command = ["deploy", "register", job.config.app]
    if project.config.release:
        command += ["--release", project.config.release]
    running = pods.container(
        project, "register", project.image(job.name), command, cpu="500m", memory="256Mi"
    )
    template = pods.pod(project, job.name, "worker", [running], stop_seconds=30)
    template["metadata"]["labels"] |= {
        pods.OWN_LABEL: f"{job.name}-register",
        "holdfast.dev/role": "register",
    }
    template["spec"]["restartPolicy"] = "Never"
    spec = {"backoffLimit": 6, "ttlSecondsAfterFinished": 86_400, "template": template}
    name = f"{job.name}-register-{_hash(spec)}"
    return [
        pods.account(project, job.name),
        pods.resource(project, "batch/v1", "Job", name, job.name, spec=spec),
    ]


def _hash(spec: Resource) -> str:
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:8]


def workers(project: Project, job: JobDirectory) -> list[Resource]:
    """A Deployment for each group."""
    return [
        one
        for group in job.groups
        for one in (
            _workers(project, job, group),
            pods.disruption(project, job.workers(group), maxUnavailable=1),
        )
    ]


def _workers(project: Project, job: JobDirectory, group: Group) -> Resource:
    name, config = job.workers(group), job.config
    command = ["worker", config.app, "--group", group.name]
    command += ["--concurrency", str(config.concurrency), "--grace", f"{config.grace_seconds}s"]
    command += ["--health-port", str(HEALTH_PORT)]
    running = pods.container(
        project,
        "worker",
        project.image(job.name),
        command,
        cpu=config.cpu,
        memory=config.memory,
        ports=control.PORTS,
        **pods.probes(),
    )
    template = pods.pod(project, job.name, "worker", [running], stop_seconds=config.stop_seconds)
    template["metadata"]["labels"][pods.OWN_LABEL] = name
    spec = {
        "strategy": pods.no_gap(),
        "selector": {"matchLabels": {pods.OWN_LABEL: name}},
        "template": template,
    }
    return pods.resource(project, "apps/v1", "Deployment", name, spec=spec)


def scaling(project: Project, job: JobDirectory) -> list[Resource]:
    """A ScaledObject for each group."""
    return [_scaled(project, job, group) for group in job.groups]


def _scaled(project: Project, job: JobDirectory, group: Group) -> Resource:
    config, name = job.config, job.workers(group)
    calm = {"stabilizationWindowSeconds": SCALE_DOWN_SECONDS}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicaCount": config.min_replicas,
        "maxReplicaCount": config.max_replicas,
        "pollingInterval": config.polling_seconds,
        "cooldownPeriod": config.cooldown_seconds,
        "fallback": {"failureThreshold": 3, "replicas": config.fallback_replicas},
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": calm}}},
        "triggers": _triggers(project, job, group),
    }
    return pods.resource(project, "keda.sh/v1alpha1", "ScaledObject", name, spec=spec)


def _triggers(project: Project, job: JobDirectory, group: Group) -> list[Resource]:
    threshold = str(job.config.lag_threshold)
    if project.config.scaler == "metrics-api":
        where = f"{control.NAME}.{project.config.namespace}.svc.cluster.local:{HEALTH_PORT}"
        return [
            {
                "type": "metrics-api",
                "metricType": "AverageValue",
                "metadata": {
                    "url": f"http://{where}/lag/{group.name}/{one}",
                    "format": "json",
                    "valueLocation": "lag",
                    "targetValue": threshold,
                    "activationTargetValue": "0",
                },
            }
            for one in group.jobs
        ]
    return [
        {
            "type": "nats-jetstream",
            "metricType": "AverageValue",
            "metadata": {
                "natsServerMonitoringEndpoint": nats.monitor(project),
                "account": project.account,
                "stream": one.stream,
                "consumer": one.name,
                "lagThreshold": threshold,
                "activationLagThreshold": "0",
                "useHttps": "false",
            },
        }
        for one in group.consumers
    ]
