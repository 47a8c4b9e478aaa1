"""Agents: one on every machine, under the machine's own name, in a namespace of their own.

What an agent must remember over a restart, the runs it has seen above all, is on the machine's
disk; the project's namespace does not admit such volumes, so agents have another. Each agent has
credentials of its own (`holdfast auth agent NAME`, with '-' for '.' in the machine's name). They
are keys of one secret, which only the init container sees: it copies the machine's own key, and
makes the directory on the disk, for which it must be root. The agent is an ordinary user.
"""

from __future__ import annotations

from holdfast.config.deployment import STOP_MARGIN_SECONDS
from holdfast.config.fleet import AgentConfig
from holdfast.deploy.manifests import access, control, pods
from holdfast.deploy.manifests.pods import HEALTH_PORT, Resource
from holdfast.deploy.project import Project
from holdfast.deploy.rules.pods import DISK_REASON, ROOT_REASON

NAME = "agent"
SECRET = "holdfast-agents"
ISSUED = "/etc/holdfast-agents"
DISK = "/var/lib/holdfast-agent"
DATA = "/data"

_PREPARE = (
    f"install -d -o {pods.USER} -g {pods.USER} -m 0700 {DATA} && "
    f"install -o {pods.USER} -g {pods.USER} -m 0400 "
    f'"{ISSUED}/agent-$(echo "$NODE_NAME" | tr . -).json" {pods.CREDENTIALS}/login.json'
)


def manifests(project: Project) -> list[Resource]:
    """The agents; nothing when they are not wanted."""
    if project.config.agents == "no":
        return []
    spec = {
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}},
        "selector": {"matchLabels": {pods.OWN_LABEL: NAME}},
        "template": _template(project),
    }
    namespace = access.namespace(project, pods.agents_namespace(project), "privileged")
    found = [
        pods.resource(project, "v1", "ConfigMap", pods.CONFIG, data=access.environment(project)),
        access.policy(project, "closed", {}, ingress=[]),
        access.policy(project, "metrics", {}, ingress=[access.allow_metrics(project)]),
        access.policy(project, "quiet", {}, egress=_egress(project)),
        pods.account(project, NAME),
        pods.service(project, NAME, {"health": HEALTH_PORT}, clusterIP="None"),
        pods.resource(project, "apps/v1", "DaemonSet", NAME, spec=spec),
    ]
    for one in found:
        one["metadata"]["namespace"] = pods.agents_namespace(project)
    return [namespace, *found]


def _egress(project: Project) -> list[Resource]:
    names, servers = access.egress()
    servers["to"][0]["namespaceSelector"] = {
        "matchLabels": {"kubernetes.io/metadata.name": project.config.namespace}
    }
    return [names, servers]


def _template(project: Project) -> Resource:
    own = [
        {"name": "credentials", "mountPath": pods.CREDENTIALS},
        {"name": "data", "mountPath": DATA},
    ]
    running = pods.container(
        project,
        NAME,
        project.image(control.NAME),
        [NAME, "--data", DATA, "--health-port", str(HEALTH_PORT)],
        cpu="200m",
        memory="128Mi",
        ports=control.PORTS,
        volumeMounts=own[1:],
        **pods.probes(),
    )
    prepare = {
        "name": "prepare",
        "image": project.image(control.NAME),
        "command": ["sh", "-c", _PREPARE],
        "env": [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "resources": pods.resources("100m", "32Mi"),
        "securityContext": {
            **pods.container_security(),
            "runAsNonRoot": False,
            "runAsUser": 0,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]},
        },
        "volumeMounts": [*own, {"name": "issued", "mountPath": ISSUED, "readOnly": True}],
    }
    template = pods.pod(
        project,
        NAME,
        NAME,
        [running],
        stop_seconds=int(AgentConfig().grace_seconds) + STOP_MARGIN_SECONDS,
        volumes=[
            {"name": "issued", "secret": {"secretName": SECRET, "defaultMode": 0o400}},
            {"name": "data", "hostPath": {"path": DISK, "type": "DirectoryOrCreate"}},
        ],
        initContainers=[prepare],
        tolerations=[{"operator": "Exists", "effect": "NoSchedule"}],
    )
    template["spec"]["volumes"][0] = {"name": "credentials", "emptyDir": {"medium": "Memory"}}
    template["metadata"]["annotations"] = {
        ROOT_REASON: "a directory on the machine belongs to root until it is given away",
        DISK_REASON: "what an agent has executed is remembered when its pod is replaced",
    }
    return template
