"""Pods: no privileges, limits, pinned images, probes, and rollouts that leave no gap."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from holdfast.deploy.inventory import SINGLE_REASON, TIMEOUT, Inventory, Item, Problem, Resource

ROOT_REASON = "holdfast.dev/root-because"
"""Annotation of a pod whose init container must be root; gives the reason."""
DISK_REASON = "holdfast.dev/disk-because"
"""Annotation of a pod that writes to its machine's disk; gives the reason."""
HOST = ("hostNetwork", "hostPID", "hostIPC")
OWN = ("control", "worker", "web", "agent")
"""Our containers, by name."""
LIVENESS_SECONDS = 5
"""The shortest timeout of a liveness probe: with busy threads and a fifth of a core, an answer
takes 1 to 3 s."""
PLATFORM_SECRETS = frozenset(
    {
        "holdfast-agents",
        "holdfast-backup",
        "holdfast-backup-store",
        "holdfast-control",
        "holdfast-web",
        "holdfast-web-tokens",
        "nats-auth",
        "nats-tls",
    }
)
"""Secrets that no job may read, enforced by `check` and by the admission policy in `base.yaml`,
along with those to pull images and serve pages."""
QUANTITY = re.compile(r"\d+(\.\d*)?([eE][+-]?\d+|[numkMGTPE]|[KMGTPE]i)?")
"""A Kubernetes quantity."""


def hardened(inventory: Inventory) -> Iterator[Problem]:
    """No root, privileges, capabilities, writable root or token."""
    for item in inventory.workloads:
        pod = item.pod
        if pod.get("automountServiceAccountToken") is not False:
            yield item.problem("automountServiceAccountToken must be false: nothing here needs it")
        for key in HOST:
            if pod.get(key):
                yield item.problem(f"{key} gives the pod access to the machine: remove it")
        if not _notes(item).get(DISK_REASON):
            for volume in pod.get("volumes") or []:
                if volume.get("hostPath"):
                    yield item.problem(f"volume {volume.get('name')} is the machine's disk")
        for container in item.containers:
            for text in _of_container(item, container):
                yield item.problem(f"container {container.get('name')}: {text}")


def _of_container(item: Item, container: Resource) -> Iterator[str]:
    pod = item.pod.get("securityContext") or {}
    own = container.get("securityContext") or {}
    merged = {**pod, **own}
    if not _may_be_root(item, container) and (
        merged.get("runAsNonRoot") is not True or merged.get("runAsUser") in (0, None)
    ):
        yield "it must not run as root: runAsNonRoot: true and a runAsUser above 0"
    if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation must be false"
    if own.get("readOnlyRootFilesystem") is not True:
        yield "readOnlyRootFilesystem must be true: mount an emptyDir where it writes"
    if any(port.get("hostPort") for port in container.get("ports") or []):
        yield "hostPort opens it on the machine: use a service"
    if "ALL" not in ((own.get("capabilities") or {}).get("drop") or []):
        yield "capabilities must drop ALL"
    if (merged.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile must be RuntimeDefault"


def _may_be_root(item: Item, container: Resource) -> bool:
    """An init container that prepares a directory, if the pod gives the reason."""
    return bool(_notes(item).get(ROOT_REASON)) and container in (
        item.pod.get("initContainers") or []
    )


def _notes(item: Item) -> dict[str, str]:
    return (item.template.get("metadata") or {}).get("annotations") or {}


def limited(inventory: Inventory) -> Iterator[Problem]:
    """Memory and CPU are limited, and memory is reserved."""
    for item in inventory.workloads:
        for container in item.containers:
            given = container.get("resources") or {}
            limits, requests = given.get("limits") or {}, given.get("requests") or {}
            if "memory" not in limits or "memory" not in requests or "cpu" not in requests:
                yield item.problem(
                    f"container {container.get('name')}: it needs resources: requests for cpu and "
                    "memory, and a limit for memory"
                )
            for key, amount in (*limits.items(), *requests.items()):
                if not QUANTITY.fullmatch(str(amount)):
                    yield item.problem(
                        f"container {container.get('name')}: {key} {amount!r} is no quantity: "
                        "write it as 500m, 2, 512Mi or 1Gi"
                    )


def pinned(inventory: Inventory) -> Iterator[Problem]:
    """Images have a tag other than `latest`, or a digest."""
    for item in inventory.workloads:
        for container in item.containers:
            image = str(container.get("image", ""))
            _, found, tag = image.rpartition("/")[2].partition(":")
            if "@sha256:" not in image and (not found or tag == "latest"):
                yield item.problem(
                    f"image {image!r} has no fixed tag: a restart could bring another version"
                )


def probed(inventory: Inventory) -> Iterator[Problem]:
    """Workloads have a readiness probe that checks more than liveness."""
    for item in inventory.of("Deployment", "StatefulSet", "DaemonSet"):
        container = (item.pod.get("containers") or [{}])[0]
        ready, live = container.get("readinessProbe"), container.get("livenessProbe")
        if not ready:
            yield item.problem(
                "it has no readinessProbe: a rollout would stop the old pod before the new one is "
                "ready"
            )
        elif ready == live or _asks_only_for_life(container):
            yield item.problem("its readinessProbe only checks liveness: use /health/ready")
        if live and int(live.get("timeoutSeconds") or 1) < LIVENESS_SECONDS:
            yield item.problem(
                f"its livenessProbe waits less than {LIVENESS_SECONDS} s for an answer: a pod that "
                "is busy would be killed; set timeoutSeconds"
            )


def _asks_only_for_life(container: Resource) -> bool:
    path = (container["readinessProbe"].get("httpGet") or {}).get("path")
    return container.get("name") in OWN and path not in (None, "/health", "/health/ready")


def logged_in(inventory: Inventory) -> Iterator[Problem]:
    """Our processes log in from a file, and the web has tokens."""
    for item in inventory.workloads:
        for container in item.pod.get("containers") or []:
            names = {variable.get("name") for variable in container.get("env") or []}
            if container.get("name") not in OWN:
                continue
            if "HOLDFAST_CREDENTIALS_FILE" not in names:
                yield item.problem("it has no HOLDFAST_CREDENTIALS_FILE: it logs in as nobody")
            tokens = names & {"HOLDFAST_WEB_TOKENS_FILE", "HOLDFAST_WEB_TOKENS"}
            if container.get("name") == "web" and not tokens:
                yield item.problem("the web has no HOLDFAST_WEB_TOKENS_FILE: nobody could log in")


_HOLDFAST_SECONDS = re.compile(r"(\d+)s")


def patient(inventory: Inventory) -> Iterator[Problem]:
    """A pod has longer to stop than its process takes."""
    for item in inventory.of("Deployment", "DaemonSet"):
        given = int(item.pod.get("terminationGracePeriodSeconds") or 30)
        for container in item.pod.get("containers") or []:
            own = _own_grace(container)
            if own is not None and given <= own:
                yield item.problem(
                    f"terminationGracePeriodSeconds ({given}) must be above the process's own "
                    f"grace period ({own} s), or Kubernetes kills it while handlers finish"
                )


def uncut(inventory: Inventory) -> Iterator[Problem]:
    """Rollouts let runs finish: the grace period covers the longest timeout."""
    for item in inventory.of("Deployment"):
        longest = item.annotations.get(TIMEOUT)
        for container in item.pod.get("containers") or []:
            own = _own_grace(container)
            if longest and own is not None and own < float(longest):
                yield item.problem(
                    f"its grace period ({own} s) is below the longest timeout ({longest} s): "
                    "a rollout would interrupt runs; raise grace_seconds, or set interruptible = "
                    '"yes" where that is wanted'
                )


def apart_from_the_platform(inventory: Inventory) -> Iterator[Problem]:
    """Workers have their own secrets, and none of NATS, the control plane or the web."""
    pulling = (
        one for item in inventory.workloads for one in item.pod.get("imagePullSecrets") or []
    )
    serving = (one for item in inventory.of("Ingress") for one in item.spec.get("tls") or [])
    platform = PLATFORM_SECRETS.union(one.get("name") for one in pulling)
    platform = platform.union(one.get("secretName") for one in serving)
    for item in inventory.workloads:
        if item.labels.get("holdfast.dev/part") != "job":
            continue
        for name in sorted(_secrets(item.pod) & platform):
            yield item.problem(f"it uses the secret {name!r}, which is not for jobs")


def _secrets(pod: Resource) -> set[Any]:
    """Every secret that a pod's containers can read."""
    found: set[Any] = set()
    for volume in pod.get("volumes") or []:
        found.add((volume.get("secret") or {}).get("secretName"))
        sources = (volume.get("projected") or {}).get("sources") or []
        found |= {(source.get("secret") or {}).get("name") for source in sources}
    for container in [*(pod.get("initContainers") or []), *(pod.get("containers") or [])]:
        given = container.get("envFrom") or []
        found |= {(source.get("secretRef") or {}).get("name") for source in given}
        for variable in container.get("env") or []:
            key = (variable.get("valueFrom") or {}).get("secretKeyRef") or {}
            found.add(key.get("name"))
    return found - {None}


def _own_grace(container: Resource) -> int | None:
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    if "--grace" in words:
        found = _HOLDFAST_SECONDS.fullmatch(str(words[words.index("--grace") + 1]))
        return int(found[1]) if found else None
    return 10 if {"worker", "control", "agent"} & set(words[:1]) else None


# ---- rollouts and node drains leave no gap


def _control(inventory: Inventory) -> list[Item]:
    return [
        item
        for item in inventory.of("Deployment")
        if any((c.get("args") or [""])[0] == "control" for c in item.containers)
    ]


def control_plane(inventory: Inventory) -> Iterator[Problem]:
    """Two control processes, on two machines if possible."""
    for item in _control(inventory):
        if int(item.spec.get("replicas") or 1) < 2 and not item.annotations.get(SINGLE_REASON):
            yield item.problem(
                "the control plane needs 2 replicas: with one, its death is an outage"
            )
        if not (item.pod.get("affinity") or {}).get("podAntiAffinity"):
            yield item.problem("replicas may land on one machine: add a podAntiAffinity")


def no_gap(inventory: Inventory) -> Iterator[Problem]:
    """The new pod is ready before the old one stops."""
    for item in inventory.of("Deployment"):
        rolling = (item.spec.get("strategy") or {}).get("rollingUpdate") or {}
        if rolling.get("maxUnavailable") != 0:
            yield item.problem("rollingUpdate.maxUnavailable must be 0: else a rollout has a gap")


def budgets(inventory: Inventory) -> Iterator[Problem]:
    """Draining a machine never evicts all replicas, and can always evict one."""
    for item in inventory.of("Deployment", "StatefulSet"):
        found = [
            budget
            for budget in inventory.of("PodDisruptionBudget")
            if budget.spec.get("selector") and (item in inventory.selected(budget.spec["selector"]))
        ]
        if not found:
            yield item.problem("it has no PodDisruptionBudget: draining machines could take it all")
        replicas = item.spec.get("replicas")
        for budget in found:
            least = budget.spec.get("minAvailable")
            if isinstance(least, int) and replicas and least >= int(replicas):
                yield budget.problem(
                    f"minAvailable ({least}) leaves none of {replicas} replicas to drain: machines "
                    "could never be taken away"
                )


def budgets_pick_pods(inventory: Inventory) -> Iterator[Problem]:
    """Every disruption budget matches pods."""
    for budget in inventory.of("PodDisruptionBudget"):
        if not inventory.selected(budget.spec.get("selector") or {"matchLabels": {"": ""}}):
            yield budget.problem("its selector picks no pod")


def workers_left_to_the_autoscaler(inventory: Inventory) -> Iterator[Problem]:
    """A scaled Deployment sets no replica count."""
    for scaled in inventory.of("ScaledObject", "HorizontalPodAutoscaler"):
        name = (scaled.spec.get("scaleTargetRef") or {}).get("name")
        target = inventory.named("Deployment", str(name))
        if target and "replicas" in target.spec:
            yield target.problem(
                "it sets replicas although an autoscaler decides: every apply would reset them"
            )


RULES = (
    hardened,
    limited,
    pinned,
    probed,
    logged_in,
    patient,
    uncut,
    apart_from_the_platform,
    control_plane,
    no_gap,
    budgets,
    budgets_pick_pods,
    workers_left_to_the_autoscaler,
)
