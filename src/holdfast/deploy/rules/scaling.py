"""Scaling: KEDA reads an existing consumer in a named account, and has a fallback."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.deploy.inventory import Inventory, Item, Problem, Resource
from holdfast.names import parse_consumer

NUMBERS = ("lagThreshold", "activationLagThreshold", "targetValue", "activationTargetValue")


def complete(inventory: Inventory) -> Iterator[Problem]:
    """Limits, pace and fallback are explicit, not left to defaults."""
    for item in inventory.of("ScaledObject"):
        spec = item.spec
        least, most = spec.get("minReplicaCount"), spec.get("maxReplicaCount")
        if least is None or most is None or int(most) < max(1, int(least)):
            yield item.problem("minReplicaCount and maxReplicaCount must be given, and in order")
        for key in ("pollingInterval", "cooldownPeriod"):
            if not isinstance(spec.get(key), int):
                yield item.problem(f"{key} must be given, in seconds")
        fallback = spec.get("fallback") or {}
        if not fallback.get("replicas") or not fallback.get("failureThreshold"):
            yield item.problem(
                "it has no fallback with replicas: while the lag cannot be read, or a consumer is "
                "gone, no worker would run"
            )
        if not spec.get("triggers"):
            yield item.problem("it has no triggers")
        for trigger in spec.get("triggers") or []:
            for text in _of_trigger(trigger):
                yield item.problem(text)
        summed = ((spec.get("advanced") or {}).get("scalingModifiers") or {}).get("formula")
        if len(spec.get("triggers") or []) > 1 and not summed:
            yield item.problem(
                "KEDA uses the largest of several triggers, not the sum, which is too few workers "
                "for a group: add scalingModifiers with a formula"
            )


def _of_trigger(trigger: Resource) -> Iterator[str]:
    metadata = trigger.get("metadata") or {}
    for key, value in metadata.items():
        if not isinstance(value, str):
            yield f"trigger metadata {key} must be a text: KEDA refuses {value!r}"
    for key in NUMBERS:
        if key in metadata and not str(metadata[key]).isdigit():
            yield f"trigger metadata {key} must be a whole number, as a text"
    if trigger.get("type") == "nats-jetstream":
        yield from _of_jetstream(metadata)
    elif trigger.get("type") == "metrics-api":
        for key in ("url", "valueLocation", "targetValue"):
            if not metadata.get(key):
                yield f"trigger metadata {key} is missing"
    else:
        yield f"trigger type {trigger.get('type')!r} is not nats-jetstream or metrics-api"


def _of_jetstream(metadata: Resource) -> Iterator[str]:
    for key in ("natsServerMonitoringEndpoint", "stream", "consumer", "lagThreshold"):
        if not metadata.get(key):
            yield f"trigger metadata {key} is missing"
    if not metadata.get("account") and not metadata.get("accountID"):
        yield "trigger metadata account is missing: KEDA needs it ($G is the default account)"
    if metadata.get("consumer") and not parse_consumer(str(metadata["consumer"])):
        yield f"consumer {metadata['consumer']!r} is not one that Holdfast makes: <group>=<job>"


def targeted(inventory: Inventory) -> Iterator[Problem]:
    """The scale target exists and is scaled once."""
    seen: dict[str, Item] = {}
    for item in inventory.of("ScaledObject", "HorizontalPodAutoscaler"):
        name = str((item.spec.get("scaleTargetRef") or {}).get("name", ""))
        target = inventory.named("Deployment", name)
        if target is None or target.namespace != item.namespace:
            yield item.problem(f"its target, the Deployment {name!r}, does not exist")
        if name in seen:
            yield item.problem(f"{seen[name].where} scales {name!r} too: they would fight")
        seen[name] = item


def registered(inventory: Inventory) -> Iterator[Problem]:
    """Each scaled app is registered first: its consumers exist before KEDA reads them."""
    for item in inventory.of("ScaledObject"):
        name = (item.spec.get("scaleTargetRef") or {}).get("name")
        target = inventory.named("Deployment", str(name))
        if target is None:
            continue
        images = {container.get("image") for container in target.containers}
        registering = [
            job
            for job in inventory.of("Job")
            if any((c.get("args") or [])[:2] == ["deploy", "register"] for c in job.containers)
            and images & {container.get("image") for container in job.containers}
        ]
        if not registering:
            yield item.problem(
                "nothing registers its app in the same image: without 'holdfast deploy register' "
                "first, KEDA finds no consumer"
            )


def endpoint(inventory: Inventory) -> Iterator[Problem]:
    """The address that KEDA queries is an existing service."""
    for item in inventory.of("ScaledObject"):
        for trigger in item.spec.get("triggers") or []:
            metadata = trigger.get("metadata") or {}
            address = str(metadata.get("natsServerMonitoringEndpoint") or metadata.get("url") or "")
            host = address.removeprefix("http://").removeprefix("https://").split(":")[0]
            service = inventory.named("Service", host.split(".")[0])
            if address and inventory.of("Service") and service is None:
                yield item.problem(f"{address} names a service that does not exist")


RULES = (complete, targeted, registered, endpoint)
