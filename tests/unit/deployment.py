"""A project rendered without a directory, with every kind of manifest."""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import kubernetes_validate.utils
import yaml

from holdfast.config import DeployConfig
from holdfast.config.deployment import JobDeployConfig, PodConfig
from holdfast.deploy.inventory import Inventory
from holdfast.deploy.inventory import read as read_inventory
from holdfast.deploy.project import Consumer, Group, JobDirectory, Project
from holdfast.deploy.render import render
from holdfast.names import Names, consumer

NAMES = Names("hf")

# The library parses all schemas of a version for each resource that it validates.
kubernetes_validate.utils.schema_contents = functools.cache(
    kubernetes_validate.utils.schema_contents
)


def group(name: str, *jobs: str, on: str = "") -> Group:
    """A group whose jobs may subscribe to an event."""
    found = [Consumer(NAMES.jobs, consumer(name, job)) for job in jobs]
    found += [Consumer(NAMES.events, consumer(name, job, on)) for job in jobs if on]
    return Group(name, jobs, tuple(found))


def project(pods: PodConfig | None = None, **config: Any) -> Project:
    """Two directories: one with a subscription, one with two groups and a schedule."""
    jobs = (
        JobDirectory(
            "resize",
            JobDeployConfig(),
            (group("resize", "resize", on="loaded"),),
            (),
            pods or PodConfig(),
        ),
        JobDirectory(
            "shop",
            JobDeployConfig(max_replicas=9, grace_seconds=120),
            (group("default", "order", "mail"), group("Slow", "report")),
            ("nightly",),
        ),
    )
    return Project(Path(), DeployConfig(name="acme", **config), jobs, "hf")


def rendered(**config: Any) -> list[dict[str, Any]]:
    """Everything rendered, read back from the files; safe to modify."""
    return copy.deepcopy(_rendered(tuple(sorted(config.items()))))


@functools.cache
def _rendered(config: tuple[tuple[str, Any], ...]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        render(project(**dict(config)), Path(folder))
        return read(Path(folder))


@functools.cache
def inventory() -> Inventory:
    """The default project with KEDA on NATS' monitor, rendered once; modify copies of it."""
    with tempfile.TemporaryDirectory() as folder:
        render(project(scaler="nats-jetstream"), Path(folder))
        return read_inventory(Path(folder))


def read(out: Path) -> list[dict[str, Any]]:
    """The resources in a folder."""
    return [
        document
        for path in sorted(out.rglob("*.yaml"))
        for document in yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
        if document["kind"] != "Kustomization"
    ]


def one(
    resources: list[dict[str, Any]], kind: str, name: str, namespace: str = ""
) -> dict[str, Any]:
    """The resource with that kind and name."""
    [found] = [
        r
        for r in resources
        if (r["kind"], r["metadata"]["name"]) == (kind, name)
        and namespace in ("", r["metadata"].get("namespace"))
    ]
    return found


def alert_groups(**config: Any) -> list[dict[str, Any]]:
    """The rendered groups of alert rules."""
    rules = one(rendered(**config), "PrometheusRule", "holdfast")
    return list(rules["spec"]["groups"])
