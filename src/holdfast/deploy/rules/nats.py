"""NATS: durable, replicated, never full, and with a closed monitor."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast.deploy.inventory import SINGLE_REASON, Inventory, Item, Problem, Resource, matches

CLIENT, MONITOR = 4222, 8222
_COMMENT = re.compile(r"(^|\s)(#|//)[^\n]*")
PLAIN_REASON = "holdfast.dev/plain-because"
"""Annotation of servers without TLS; gives the reason."""
UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
UNITS |= {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
NATS_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
NATS_UNITS |= {
    f"{unit}{end}": 2 ** (10 * (n + 1)) for n, unit in enumerate("kmgt") for end in ("b", "i", "ib")
}


def _servers(inventory: Inventory) -> list[Item]:
    return [
        item
        for item in inventory.of("StatefulSet")
        if any("nats-server" in (c.get("command") or []) for c in item.containers)
    ]


def server_config(inventory: Inventory, item: Item) -> str:
    """The configuration that a server mounts."""
    for volume in item.pod.get("volumes") or []:
        sources = [volume, *((volume.get("projected") or {}).get("sources") or [])]
        for source in sources:
            name = (source.get("configMap") or {}).get("name", "")
            found = inventory.named("ConfigMap", name) if name else None
            if found and "nats.conf" in (found.resource.get("data") or {}):
                return _COMMENT.sub("", str(found.resource["data"]["nats.conf"]))
    return ""


def durable(inventory: Inventory) -> Iterator[Problem]:
    """Three servers; an acknowledged write is on disk."""
    for item in _servers(inventory):
        replicas = int(item.spec.get("replicas") or 1)
        small = replicas == 1 and item.annotations.get(SINGLE_REASON)
        if (replicas < 3 or replicas % 2 == 0) and not small:
            yield item.problem(
                f"{replicas} servers: three (or five) keep the streams when one is lost"
            )
        if not (item.pod.get("affinity") or {}).get("podAntiAffinity"):
            yield item.problem("servers may land on one machine: add a podAntiAffinity")
        config = server_config(inventory, item)
        encrypted = re.search(r"^tls\s*\{", config, re.MULTILINE)
        if not encrypted and not item.annotations.get(PLAIN_REASON):
            yield item.problem(
                "its configuration has no TLS: logins and payloads travel in the clear; set tls in "
                "[deploy]"
            )
        if not re.search(r"sync_interval\s*[:=]?\s*\"?always", config):
            yield item.problem(
                "its configuration lacks 'sync_interval: always': a power cut loses writes that "
                "were acknowledged in the last two minutes"
            )
        if replicas > 1 and len(re.findall(r"nats://", config)) < replicas:
            yield item.problem(f"its configuration does not name the routes of all {replicas}")


def room(inventory: Inventory) -> Iterator[Problem]:
    """JetStream stops before the volume is full."""
    for item in _servers(inventory):
        limit = _limit(server_config(inventory, item))
        if limit is None:
            yield item.problem("its configuration has no max_file_store: it would fill the volume")
        for claim in item.spec.get("volumeClaimTemplates") or []:
            size = _quantity(claim["spec"]["resources"]["requests"]["storage"])
            if limit is not None and limit >= size * 0.95:
                yield item.problem(
                    f"max_file_store ({limit / 2**30:.1f} GiB) must be below the volume "
                    f"({size / 2**30:.1f} GiB): a full disk stops a server until it is restarted"
                )
        if not item.spec.get("volumeClaimTemplates"):
            yield item.problem("it has no volumeClaimTemplates: its data is lost with the pod")


def _limit(config: str) -> int | None:
    found = re.search(r"max_file(?:_store)?\s*[:=]?\s*\"?(\d+)([a-zA-Z]*)", config)
    return int(found[1]) * NATS_UNITS.get(found[2].lower(), 1) if found else None


def _quantity(text: object) -> float:
    found = re.fullmatch(r"([\d.]+)([A-Za-z]*)", str(text))
    return float(found[1]) * UNITS.get(found[2], 1) if found else 0.0


def orderly(inventory: Inventory) -> Iterator[Problem]:
    """A server enters lame-duck mode and has time to finish it."""
    for item in _servers(inventory):
        server = next(c for c in item.containers if "nats-server" in (c.get("command") or []))
        stop = ((server.get("lifecycle") or {}).get("preStop") or {}).get("exec") or {}
        if not any("ldm" in str(word) for word in stop.get("command") or []):
            yield item.problem(
                "no preStop puts it into lame-duck mode (nats-server -sl=ldm=PIDFILE): its streams "
                "would be without a leader for seconds at each rollout"
            )
        config = server_config(inventory, item)
        found = re.search(r"lame_duck_duration\s*[:=]?\s*\"?(\d+)s", config)
        grace = int(item.pod.get("terminationGracePeriodSeconds") or 30)
        if grace <= (int(found[1]) if found else 120):
            yield item.problem(
                f"terminationGracePeriodSeconds ({grace}) must be above lame_duck_duration"
            )


def reachable(inventory: Inventory) -> Iterator[Problem]:
    """A headless service names each server, even before it is ready."""
    for item in _servers(inventory):
        headless = inventory.named("Service", str(item.spec.get("serviceName")))
        if headless is None or headless.spec.get("clusterIP") != "None":
            yield item.problem("its serviceName must be a headless service (clusterIP: None)")
        elif not headless.spec.get("publishNotReadyAddresses"):
            yield headless.problem(
                "publishNotReadyAddresses must be true: servers find each other before they are "
                "ready"
            )


def closed_monitor(inventory: Inventory) -> Iterator[Problem]:
    """The monitor has no authentication: only named sources may reach it."""
    for item in _servers(inventory):
        policies = [
            policy
            for policy in inventory.of("NetworkPolicy")
            if "Ingress" in (policy.spec.get("policyTypes") or ["Ingress"])
            and matches(policy.spec.get("podSelector") or {}, item.pod_labels)
        ]
        if not policies:
            yield item.problem(f"no NetworkPolicy closes its monitoring port {MONITOR}")
        for policy in policies:
            for rule in policy.spec.get("ingress") or []:
                if _opens(rule):
                    yield policy.problem(
                        f"it opens the monitoring port {MONITOR} to everybody: name who may read it"
                    )


def connected(inventory: Inventory) -> Iterator[Problem]:
    """Network policies admit clients, and KEDA if it reads the monitor."""
    wanted = {CLIENT: "clients cannot reach it"}
    kinds = {t.get("type") for s in inventory.of("ScaledObject") for t in s.spec["triggers"]}
    if "nats-jetstream" in kinds:
        wanted[MONITOR] = "KEDA cannot read the lag"
    for item in _servers(inventory):
        rules = [
            rule
            for policy in inventory.of("NetworkPolicy")
            if matches(policy.spec.get("podSelector") or {}, item.pod_labels)
            for rule in policy.spec.get("ingress") or []
        ]
        allowed = {port.get("port") for rule in rules for port in rule.get("ports") or []}
        for port, text in wanted.items():
            if port not in allowed:
                yield item.problem(f"no NetworkPolicy opens port {port}: {text}")


def inside(inventory: Inventory) -> Iterator[Problem]:
    """Clients' port and monitor are not reachable from outside the cluster."""
    for item in _servers(inventory):
        for service in inventory.of("Service"):
            picks = matches({"matchLabels": service.spec.get("selector") or {}}, item.pod_labels)
            if picks and service.spec.get("type") in ("NodePort", "LoadBalancer"):
                yield service.problem(f"type {service.spec['type']} opens NATS to the outside")


def _opens(rule: Resource) -> bool:
    ports = [one.get("port") for one in rule.get("ports") or []]
    reaches = not ports or MONITOR in ports or "monitor" in ports
    sources = rule.get("from") or []
    everybody = not sources or any(_any(source) for source in sources)
    return reaches and everybody


def _any(source: Resource) -> bool:
    """A source that matches everyone."""
    chosen = [source[key] for key in ("namespaceSelector", "podSelector") if source.get(key)]
    if source.get("ipBlock"):
        return str(source["ipBlock"].get("cidr")) in ("0.0.0.0/0", "::/0")
    return not chosen


RULES = (durable, room, orderly, reachable, closed_monitor, connected, inside)
