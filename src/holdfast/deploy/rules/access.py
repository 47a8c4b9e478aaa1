"""Access: least privilege, no secrets in files, no dangling references."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast.deploy.inventory import ONCE, Inventory, Item, Problem, Resource

ROLES = ("Role", "ClusterRole")
_TELLING = ("PASSWORD", "TOKEN", "TOKENS", "SEED", "SECRET")
_SEED = re.compile(r"\bS[ACNOUX][A-Z2-7]{56}\b|BEGIN (USER )?NKEY|PRIVATE KEY-----")


def least_rights(inventory: Inventory) -> Iterator[Problem]:
    """No wildcards, no secrets, no cluster-wide rights."""
    for item in inventory.of(*ROLES):
        for rule in item.resource.get("rules") or []:
            words = [w for key in ("apiGroups", "resources", "verbs") for w in rule.get(key) or []]
            if "*" in words:
                yield item.problem("a rule with '*' grants more than anybody needs")
            if "secrets" in (rule.get("resources") or []):
                yield item.problem("it may access secrets: nothing here needs to")
    for item in inventory.of("ClusterRoleBinding"):
        yield item.problem("it binds for the whole cluster: a RoleBinding is enough")
    guarded = any(
        "deployer" in item.name for item in inventory.of("ValidatingAdmissionPolicyBinding")
    )
    for item in inventory.of("RoleBinding"):
        if item.name == "deployer" and not guarded:
            yield item.problem(
                "no ValidatingAdmissionPolicy guards it, so everybody who may create pods may "
                "mount every secret of the namespace"
            )
        role = (item.resource.get("roleRef") or {}).get("name")
        if role == "cluster-admin" or inventory.named("Role", str(role)) is None:
            yield item.problem(f"it binds {role!r}, which these files do not define")


def no_secrets(inventory: Inventory) -> Iterator[Problem]:
    """Secrets are created from files that stay out of the repository."""
    for item in inventory.of("Secret"):
        yield item.problem("a secret does not belong in a rendered file: secrets.sh makes it")
    for item in inventory.workloads:
        for container in item.containers:
            for variable in container.get("env") or []:
                if _is_secret(str(variable.get("name", "")), variable.get("value")):
                    yield item.problem(
                        f"{variable['name']} has its value in the file: use a secret"
                    )

    for item in inventory.of("ConfigMap"):
        for name, value in (item.resource.get("data") or {}).items():
            if _is_secret(name, value):
                yield item.problem(f"{name} is a secret, and everybody may read a ConfigMap")


def _is_secret(name: str, value: object) -> bool:
    return bool(value) and bool(name.upper().endswith(_TELLING) or _SEED.search(str(value)))


def closed_network(inventory: Inventory) -> Iterator[Problem]:
    """Nothing may connect to a pod unless a policy allows it."""
    for item in inventory.of("Namespace"):
        level = item.labels.get("pod-security.kubernetes.io/enforce")
        if level is None:
            yield item.problem("it enforces no pod security: add the label enforce: restricted")
        closing = [
            policy
            for policy in inventory.of("NetworkPolicy")
            if policy.resource["metadata"].get("namespace") == item.name
            and not policy.spec.get("podSelector")
            and "Ingress" in (policy.spec.get("policyTypes") or [])
            and not policy.spec.get("ingress")
        ]
        if not closing:
            yield item.problem(
                "no NetworkPolicy closes it: add one that selects all and allows none"
            )


def references(inventory: Inventory) -> Iterator[Problem]:
    """Accounts, config maps and selectors exist; nothing is defined twice."""
    seen: dict[tuple[str, str, str], Item] = {}
    for item in inventory.items:
        if not item.kind or not item.name or not item.resource.get("apiVersion"):
            yield item.problem("it lacks apiVersion, kind or a name")
        space = str(item.resource.get("metadata", {}).get("namespace", ""))
        key = (item.kind, space, item.name)
        if key in seen:
            yield item.problem(f"it is also defined in {seen[key].path.as_posix()}")
        seen[key] = item
    for item in inventory.workloads:
        yield from _of_workload(inventory, item)
    for item in inventory.of("Service"):
        yield from _of_service(inventory, item)
    for item in inventory.of("ServiceMonitor"):
        yield from _of_monitor(inventory, item)


def _of_workload(inventory: Inventory, item: Item) -> Iterator[Problem]:
    name = item.pod.get("serviceAccountName")
    if not name or inventory.named("ServiceAccount", str(name)) is None:
        yield item.problem(f"its service account {name!r} does not exist")
    for wanted in sorted(_config_maps(item.pod)):
        if inventory.named("ConfigMap", wanted) is None:
            yield item.problem(f"the ConfigMap {wanted!r} does not exist")
    chosen = (item.spec.get("selector") or {}).get("matchLabels")
    if item.kind not in ONCE and (
        not chosen or item not in inventory.selected(item.spec["selector"])
    ):
        yield item.problem("its selector does not pick its own pods")
    volumes = {volume.get("name") for volume in item.pod.get("volumes") or []}
    volumes |= {c["metadata"]["name"] for c in item.spec.get("volumeClaimTemplates") or []}
    for container in item.containers:
        for mount in container.get("volumeMounts") or []:
            if mount.get("name") not in volumes:
                yield item.problem(
                    f"container {container.get('name')} mounts {mount.get('name')!r}: no volume"
                )


def _config_maps(pod: Resource) -> set[str]:
    containers = [*(pod.get("initContainers") or []), *(pod.get("containers") or [])]
    found = {
        source["configMapRef"]["name"]
        for container in containers
        for source in container.get("envFrom") or []
        if source.get("configMapRef")
    }
    for container in containers:
        for variable in container.get("env") or []:
            key = (variable.get("valueFrom") or {}).get("configMapKeyRef") or {}
            if key and not key.get("optional"):
                found.add(key["name"])
    for volume in pod.get("volumes") or []:
        for source in [volume, *((volume.get("projected") or {}).get("sources") or [])]:
            if source.get("configMap") and not source["configMap"].get("optional"):
                found.add(source["configMap"]["name"])
    return found


def _of_service(inventory: Inventory, item: Item) -> Iterator[Problem]:
    picked = inventory.selected({"matchLabels": item.spec.get("selector") or {}})
    picked = [one for one in picked if one.kind not in ONCE]
    if not picked:
        yield item.problem("its selector picks no pod")
    for port in item.spec.get("ports") or []:
        target = port.get("targetPort")
        if isinstance(target, str) and not all(target in _ports(one) for one in picked):
            yield item.problem(f"its port {target!r} is not a port of the pods")


def _ports(item: Item) -> set[str]:
    return {str(p.get("name")) for c in item.containers for p in c.get("ports") or []}


def _of_monitor(inventory: Inventory, item: Item) -> Iterator[Problem]:
    wanted = (item.spec.get("selector") or {}).get("matchLabels") or {}
    spaces = (item.spec.get("namespaceSelector") or {}).get("matchNames") or [item.namespace]
    if not {one.namespace for one in inventory.of("Service")} & set(spaces):
        return  # it watches other people's workloads
    services = [
        one
        for one in inventory.of("Service")
        if all(one.labels.get(key) == value for key, value in wanted.items())
    ]
    ports = {port.get("name") for one in services for port in one.spec.get("ports") or []}
    for endpoint in item.spec.get("endpoints") or []:
        if endpoint.get("port") not in ports:
            yield item.problem(f"no service that it selects has a port {endpoint.get('port')!r}")


RULES = (least_rights, no_secrets, closed_network, references)
