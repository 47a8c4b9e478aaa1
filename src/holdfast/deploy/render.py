"""Rendering: a project's manifests as files, kustomize-friendly, with the scripts that apply them.

    OUT/base/        namespace, network, the pipeline's rights
    OUT/nats/        OUT/control/   OUT/web/   OUT/agents/   OUT/monitoring/
    OUT/jobs/NAME/   register.yaml, workers.yaml, scaling.yaml
    OUT/setup.sh     everything, in order
    OUT/apply-job.sh one job: registered first, then its workers, then their scaling

Each folder has a `kustomization.yaml`, and OUT one over all of them. The same project gives the
same bytes. A folder that is rendered is replaced as a whole; everything else in OUT is left alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from holdfast.deploy import scripts
from holdfast.deploy.manifests import access, agents, control, jobs, monitoring, nats, web
from holdfast.deploy.manifests.pods import Resource
from holdfast.deploy.project import JobDirectory, Project
from holdfast.errors import ConfigError

HEAD = "# Written by `holdfast deploy render`; change holdfast.toml or the job instead.\n"
MARK = "kustomization.yaml"

PARTS: dict[str, Callable[[Project], list[Resource]]] = {
    "base": access.manifests,
    "nats": nats.manifests,
    "control": control.manifests,
    "web": web.manifests,
    "agents": agents.manifests,
    "monitoring": monitoring.manifests,
}


_Fastest: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_Fastest):  # type: ignore[misc]  # which of the two depends on how yaml was built
    """Long texts as blocks, no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def dump(resources: list[Resource]) -> str:
    """Resources as one file."""
    texts = (
        yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
        for one in resources
    )
    return HEAD + "---\n".join(texts)


def render(project: Project, out: Path, *, only: bool = False) -> list[Path]:
    """Write everything, or with `only` just the project's jobs; returns the files."""
    _check_target(out)
    written: list[Path] = []
    if not only:
        for name, manifests in PARTS.items():
            written += _folder(out / name, _files(name, manifests(project)))
        for gone in _others(out / "jobs", {job.name for job in project.jobs}):
            shutil.rmtree(gone)
    for job in project.jobs:
        written += _job(project, job, out / "jobs" / job.name)
    return written + _scripts(project, out)


def _files(part: str, resources: list[Resource]) -> dict[str, list[Resource]]:
    """A part's files: its namespace apart, since secrets go into it before the rest."""
    spaces = [one for one in resources if one["kind"] == "Namespace"]
    others = [one for one in resources if one["kind"] != "Namespace"]
    found = {"namespace.yaml": spaces, f"{part}.yaml": others}
    return {name: content for name, content in found.items() if content}


def _check_target(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: name a directory")
    foreign = [p for p in out.iterdir() if not p.name.startswith(".")] if out.exists() else []
    if foreign and not (out / MARK).exists():
        raise ConfigError(
            f"{out} has files that 'deploy render' did not write: name an empty directory"
        )


def _others(folder: Path, kept: set[str]) -> list[Path]:
    """Folders of jobs that are no more."""
    found = folder.iterdir() if folder.exists() else ()
    return [p for p in found if p.is_dir() and p.name not in kept and (p / MARK).exists()]


def _folder(folder: Path, files: dict[str, list[Resource]]) -> list[Path]:
    if folder.exists():
        shutil.rmtree(folder)
    if not files:
        return []
    folder.mkdir(parents=True)
    written = []
    for name, resources in files.items():
        path = folder / name
        path.write_text(dump(resources), encoding="utf-8")
        written.append(path)
    return [*written, _kustomization(folder, list(files))]


def _kustomization(folder: Path, resources: list[str]) -> Path:
    path = folder / MARK
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": resources,
    }
    path.write_text(dump([content]), encoding="utf-8")
    return path


def _job(project: Project, job: JobDirectory, folder: Path) -> list[Path]:
    return _folder(
        folder,
        {
            "register.yaml": jobs.registration(project, job),
            "workers.yaml": jobs.workers(project, job),
            "scaling.yaml": jobs.scaling(project, job),
        },
    )


def _scripts(project: Project, out: Path) -> list[Path]:
    """Over what is there now: a render of one job does not forget the others."""
    there = [name for name in PARTS if (out / name).is_dir()]
    named = sorted(p.name for p in (out / "jobs").glob("*") if (p / MARK).exists())
    written = []
    for name, text in scripts.scripts(project, there, named).items():
        path = out / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        written.append(path)
    return [*written, _kustomization(out, there + [f"jobs/{name}" for name in named])]
