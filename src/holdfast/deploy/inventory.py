"""Reads rendered manifests back: every resource with its file, and lookups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from holdfast.errors import ConfigError

Resource = dict[str, Any]
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob")
ONCE = ("Job", "CronJob")
"""Workloads whose pods end by themselves."""
SKIPPED = "Kustomization"
PLAIN = "files"
"""Folder with files for other programs; not manifests."""
SINGLE_REASON = "holdfast.dev/single-because"
"""Annotation of a workload that has one replica although rules require two or three; gives the
reason."""
SERVES = "holdfast.dev/serves"
"""Annotation of workers: app, group and jobs, for `deploy unregister` when they are removed."""
TIMEOUT = "holdfast.dev/longest-timeout-seconds"
"""Annotation of workers whose runs a rollout must not interrupt."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Problem:
    """One flaw and where it is."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True, slots=True)
class Item:
    """One resource and its file."""

    path: Path
    resource: Resource

    @property
    def kind(self) -> str:
        return str(self.resource.get("kind", ""))

    @property
    def metadata(self) -> Resource:
        found = self.resource.get("metadata")
        return found if isinstance(found, dict) else {}

    @property
    def name(self) -> str:
        return str(self.metadata.get("name", ""))

    @property
    def namespace(self) -> str:
        return str(self.metadata.get("namespace", ""))

    @property
    def spec(self) -> Resource:
        found = self.resource.get("spec")
        return found if isinstance(found, dict) else {}

    @property
    def where(self) -> str:
        return f"{self.path.as_posix()}: {self.kind} {self.name}"

    def problem(self, text: str) -> Problem:
        """A problem of this resource."""
        return Problem(self.where, text)

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.metadata.get("labels") or {})

    @property
    def annotations(self) -> dict[str, str]:
        return dict(self.metadata.get("annotations") or {})

    @property
    def template(self) -> Resource:
        inner = (self.spec.get("jobTemplate") or {}).get("spec")
        return (inner or self.spec).get("template") or {}

    @property
    def pod(self) -> Resource:
        """The pod spec of a workload."""
        return self.template.get("spec") or {}

    @property
    def pod_labels(self) -> dict[str, str]:
        return dict((self.template.get("metadata") or {}).get("labels") or {})

    @property
    def containers(self) -> list[Resource]:
        return [*(self.pod.get("initContainers") or []), *(self.pod.get("containers") or [])]


class Inventory:
    """All resources of a folder."""

    def __init__(self, items: list[Item], dangling: Sequence[Problem] = ()) -> None:
        self.items = items
        self.dangling = dangling
        """Files that kustomizations name and the folder lacks."""

    def of(self, *kinds: str) -> list[Item]:
        """Resources of these kinds."""
        return [item for item in self.items if item.kind in kinds]

    def named(self, kind: str, name: str) -> Item | None:
        """The first resource of this kind and name."""
        return next((item for item in self.of(kind) if item.name == name), None)

    @property
    def workloads(self) -> list[Item]:
        return self.of(*WORKLOADS)

    def selected(self, selector: Resource) -> list[Item]:
        """The workloads whose pods a selector matches."""
        return [item for item in self.workloads if matches(selector, item.pod_labels)]


Rule = Callable[[Inventory], Iterator[Problem]]


def matches(selector: Resource, labels: dict[str, str]) -> bool:
    """Whether a label selector matches these labels; an empty one matches all."""
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for one in selector.get("matchExpressions") or []:
        there = labels.get(one["key"])
        kind, values = one["operator"], one.get("values") or []
        held = {
            "In": there in values,
            "NotIn": there not in values,
            "Exists": there is not None,
            "DoesNotExist": there is None,
        }
        if not held.get(kind, False):
            return False
    return True


def read(folder: Path) -> Inventory:
    """Read everything below a folder; unreadable files raise an error."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory: render into it first")
    items = []
    dangling: list[Problem] = []
    for path in sorted(p for p in folder.rglob("*.y*ml") if p.suffix in (".yaml", ".yml")):
        if path.parent.name == PLAIN:
            continue
        for document in _documents(path):
            item = Item(path.relative_to(folder), document)
            if item.kind == SKIPPED:
                dangling += _dangling(folder, item)
            else:
                items.append(item)
    if not items:
        raise ConfigError(f"{folder} has no manifests: render into it first")
    return Inventory(items, dangling)


def _documents(path: Path) -> list[Resource]:
    try:
        found = list(yaml.load_all(path.read_text(encoding="utf-8"), _LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: is not YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    for document in found:
        if not isinstance(document, dict | None):
            raise ConfigError(f"{path}: a document is not a resource but {document!r:.60}")
    return [document for document in found if document is not None]


def _dangling(folder: Path, kustomization: Item) -> Iterator[Problem]:
    """Local files that a kustomization names but do not exist; URLs are ignored."""
    for name in kustomization.resource.get("resources") or []:
        local = "://" not in str(name) and "?" not in str(name)
        if local and not (folder / kustomization.path.parent / str(name)).exists():
            text = f"it lists '{name}', which does not exist: render again, or remove it"
            yield Problem(kustomization.path.as_posix(), text)
