"""Rollouts and drained machines leave no gap."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.deploy.inventory import Inventory, Item, Problem


def _control(inventory: Inventory) -> list[Item]:
    return [
        item
        for item in inventory.of("Deployment")
        if any((c.get("args") or [""])[0] == "control" for c in item.containers)
    ]


def control_plane(inventory: Inventory) -> Iterator[Problem]:
    """Two control processes, on two machines if there are two."""
    for item in _control(inventory):
        if int(item.spec.get("replicas") or 1) < 2:
            yield item.problem("the control plane needs 2 replicas: one is a gap when it dies")
        if not (item.pod.get("affinity") or {}).get("podAntiAffinity"):
            yield item.problem("replicas may land on one machine: add a podAntiAffinity")


def no_gap(inventory: Inventory) -> Iterator[Problem]:
    """The new pod is ready before the old one stops."""
    for item in inventory.of("Deployment"):
        rolling = (item.spec.get("strategy") or {}).get("rollingUpdate") or {}
        if rolling.get("maxUnavailable") != 0:
            yield item.problem("rollingUpdate.maxUnavailable must be 0: else a rollout has a gap")


def budgets(inventory: Inventory) -> Iterator[Problem]:
    """Draining a machine never takes all replicas, and always may take one."""
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
    """A budget that picks nothing guards nothing."""
    for budget in inventory.of("PodDisruptionBudget"):
        if not inventory.selected(budget.spec.get("selector") or {"matchLabels": {"": ""}}):
            yield budget.problem("its selector picks no pod")


def workers_left_to_the_autoscaler(inventory: Inventory) -> Iterator[Problem]:
    """A Deployment that is scaled does not say how many there are."""
    for scaled in inventory.of("ScaledObject"):
        name = (scaled.spec.get("scaleTargetRef") or {}).get("name")
        target = inventory.named("Deployment", str(name))
        if target and "replicas" in target.spec:
            yield target.problem(
                "it says replicas although an autoscaler decides: every apply would set them back"
            )


RULES = (control_plane, no_gap, budgets, budgets_pick_pods, workers_left_to_the_autoscaler)
