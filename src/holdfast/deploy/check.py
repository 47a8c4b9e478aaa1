"""Checks rendered files: every rule over every file, offline.

Guaranteed: files that pass have none of the flaws that `rules` knows, and this version accepts each
of their `holdfast …` command lines. Not checked: the cluster. If the package `kubernetes-validate`
is installed, resources are also validated strictly against the published schemas; if not, the
report says so.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast.deploy import monitoring
from holdfast.deploy.inventory import Inventory, Problem, Rule, read
from holdfast.deploy.rules import access, nats, pods, scaling
from holdfast.errors import ConfigError

RULES: tuple[Rule, ...] = (
    *access.RULES,
    *pods.RULES,
    *nats.RULES,
    *scaling.RULES,
    *monitoring.RULES,
)
KUBERNETES = "1.36"
"""Version of the schemas; the newest installed ones if these are not."""
OWN_IMAGES = ("control", "worker", "web", "agent", "register", "backup")

Parse = Callable[[Sequence[str]], str]
"""Returns what is wrong with a command line's arguments; empty if valid."""


def check(folder: Path, parse: Parse) -> list[Problem]:
    """All problems of a rendered folder."""
    inventory = read(folder)
    found = [problem for rule in RULES for problem in applied(rule, inventory)]
    found += applied(lambda all_: commands(all_, parse), inventory)
    found += schemas(inventory) or []
    found += inventory.dangling
    return sorted(set(found), key=str)


def check_overlay(overlay: Path, parse: Parse) -> list[Problem]:
    """All problems of what an overlay applies."""
    try:
        done = subprocess.run(["kubectl", "kustomize", overlay], capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError(
            "an overlay can only be checked with kubectl, which is not installed"
        ) from None
    if done.returncode:
        hint = ""
        if "ID conflict" in done.stderr or "already registered id" in done.stderr:
            hint = (
                " ('namespace:' in an overlay puts the agents into the project's namespace: set "
                f"kubernetes_namespace in {overlay}/holdfast.toml instead)"
            )
        raise ConfigError(f"{overlay} cannot be built: {done.stderr.strip()}{hint}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{overlay.name}.yaml").write_text(done.stdout, encoding="utf-8")
        return check(Path(folder), parse)


def applied(rule: Rule, inventory: Inventory) -> list[Problem]:
    """A rule's problems; a malformed manifest becomes a problem instead of an exception."""
    found: list[Problem] = []
    try:
        found.extend(rule(inventory))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        text = f"a resource is not shaped as it should be ({type(error).__name__}: {error})"
        found.append(Problem("manifests", f"{text}; the schemas say which"))
    return found


def commands(inventory: Inventory, parse: Parse) -> Iterator[Problem]:
    """Our containers start with commands that exist."""
    for item in inventory.workloads:
        for container in item.containers:
            if container.get("name") in OWN_IMAGES:
                words = [str(word) for word in container.get("args") or []]
                if wrong := parse(words):
                    yield item.problem(f"'holdfast {' '.join(words)}' does not work: {wrong}")


def schemas(inventory: Inventory) -> list[Problem] | None:
    """What Kubernetes' schemas reject; None if they are not installed."""
    try:
        import kubernetes_validate
    except ImportError:
        return None
    found = []
    known = (KUBERNETES, kubernetes_validate.latest_version())
    version = min(known, key=lambda text: [int(part) for part in text.split(".")])
    for item in inventory.items:
        if not _builtin(item.resource):
            continue
        try:
            kubernetes_validate.validate(item.resource, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(str(part) for part in error.path)
            found.append(item.problem(f"{path}: {error.message}"))
        except (kubernetes_validate.SchemaNotFoundError, AttributeError, KeyError, TypeError):
            found.append(item.problem(f"Kubernetes {version} has no such kind"))
    return found


def _builtin(resource: dict[str, Any]) -> bool:
    """Whether the kind is built into Kubernetes: `apps/v1`, `v1`, `policy/v1`, `….k8s.io/v1`."""
    group = str(resource.get("apiVersion")).split("/")[0]
    return "." not in group or (group.endswith("k8s.io") and not group.startswith("gateway."))
