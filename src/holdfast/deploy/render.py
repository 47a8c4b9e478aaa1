"""Rendering: a project becomes files, kustomize-friendly, with the scripts that apply them.

    OUT/base/        namespace, network, the pipeline's rights
    OUT/nats/        OUT/control/   OUT/web/   OUT/agents/   OUT/monitoring/
    OUT/jobs/NAME/   register.yaml, workers.yaml, scaling.yaml
    OUT/setup.sh     everything, in order
    OUT/apply-job.sh one job: registered first, then its workers, then their scaling

The manifests are the YAML templates in `templates/manifests`; this module gives them their values.
Each folder has a `kustomization.yaml`, and OUT one over all of them. The same project gives the
same bytes. A folder that is rendered is replaced as a whole; everything else in OUT is left alone.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from holdfast.config.deployment import STOP_MARGIN_SECONDS
from holdfast.config.fleet import AgentConfig
from holdfast.deploy.monitoring import dashboards
from holdfast.deploy.project import JobDirectory, Project
from holdfast.errors import ConfigError
from holdfast.model.liveness import PROFILES

HEAD = "# Written by `holdfast deploy render`; change holdfast.toml or the job instead.\n"
MARK = "kustomization.yaml"
PARTS = ("base", "nats", "control", "web", "agents", "monitoring")
"""In the order in which they are applied."""
JOB_FILES = ("register.yaml", "workers.yaml", "scaling.yaml")
SCRIPTS = ("apply-job.sh", "setup.sh", "secrets.sh", "clean.sh")


def environment() -> Environment:
    """The template engine; double square brackets, because workflows and alerts have braces."""
    found = Environment(
        loader=PackageLoader("holdfast.deploy", "templates"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        variable_start_string="[[",
        variable_end_string="]]",
        block_start_string="[%",
        block_end_string="%]",
        comment_start_string="[#",
        comment_end_string="#]",
        autoescape=False,
    )
    # Jinja's own escapes <, > and ' for HTML.
    found.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return found


class Templates:
    """The templates with a project's values."""

    def __init__(self, project: Project) -> None:
        self._environment = environment()
        config = project.config
        hosts = [
            f"nats-{number}.nats-headless.{config.namespace}.svc.cluster.local"
            for number in range(config.nats_replicas)
        ]
        self._values: dict[str, Any] = {
            "project": project,
            "config": config,
            "namespace": config.namespace,
            "agents_namespace": project.agents_namespace,
            "nats_hosts": hosts,
            "nats_url": ",".join(f"nats://{host}:4222" for host in hosts),
            # From any server KEDA finds the consumer's leader by itself.
            "nats_monitor": f"nats-headless.{config.namespace}.svc.cluster.local:8222",
            "control_stop_seconds": int(PROFILES["lan"].grace_seconds) + STOP_MARGIN_SECONDS,
            "agent_stop_seconds": int(AgentConfig().grace_seconds) + STOP_MARGIN_SECONDS,
        }
        # A macro file sees the values that are given when it is loaded.
        macros = self._environment.get_template("manifests/macros.yaml")
        self._values["m"] = macros.make_module(self._values)

    def text(self, name: str, **more: Any) -> str:
        """One template, filled in."""
        found = self._environment.get_template(name).render(self._values | more)
        return found.strip().removeprefix("---").lstrip("\n") + "\n"

    def part(self, name: str) -> dict[str, str]:
        """The files of a part; none when the part is not wanted.

        Its namespace stands apart, since secrets go into it before the rest.
        """
        config = self._values["config"]
        more: dict[str, Any] = {}
        spaces = {"base": (config.namespace, "restricted")}
        spaces["agents"] = (self._values["agents_namespace"], "privileged")
        if (name == "web" and not config.web_replicas) or (name == "agents" and not config.fleet):
            return {}
        if name == "nats":
            more["nats_conf"] = self.text("manifests/nats.conf")
        if name == "monitoring":
            more = self._monitoring()
        files = {}
        if name in spaces:
            space, level = spaces[name]
            files["namespace.yaml"] = self.text(
                "manifests/namespace.yaml", space=space, level=level
            )
        return files | {f"{name}.yaml": self.text(f"manifests/{name}.yaml", **more)}

    def _monitoring(self) -> dict[str, Any]:
        config, space = self._values["config"], self._values["namespace"]
        monitored = [("workers", "health", space), ("control", "health", space)]
        monitored.append(("nats", "metrics", space))
        if config.web_replicas:
            monitored.append(("web", "health", space))
        if config.fleet:
            monitored.append(("agent", "health", self._values["agents_namespace"]))
        boards = {name: json.dumps(board, indent=1) for name, board in dashboards().items()}
        alerts = self.text("monitoring/alerts.yaml").strip()
        return {"monitored": monitored, "dashboards": boards, "alerts": alerts}

    def job(self, job: JobDirectory) -> dict[str, str]:
        """The files of one directory of `jobs/`."""
        found = self.text("manifests/jobs/register.yaml", job=job, hash="")
        [*_, registration] = yaml.safe_load_all(found)
        spec = json.dumps(registration["spec"], sort_keys=True)
        digest = hashlib.sha256(spec.encode()).hexdigest()[:8]
        return {
            name: self.text(f"manifests/jobs/{name}", job=job, hash=digest) for name in JOB_FILES
        }

    def script(self, name: str, parts: list[str], jobs: list[str]) -> str:
        """One of the scripts, over the parts and jobs that there are."""
        secrets = ["nats-auth", "holdfast-control", "holdfast-worker"]
        secrets += ["holdfast-web", "holdfast-web-tokens"] if "web" in parts else []
        named = [f"{self._values['namespace']}/{secret}" for secret in secrets]
        if "agents" in parts:
            named.append(f"{self._values['agents_namespace']}/holdfast-agents")
        return self.text(f"manifests/scripts/{name}", parts=parts, jobs=jobs, secrets=named)


def render(project: Project, out: Path, *, only: bool = False) -> list[Path]:
    """Write everything, or with `only` just the project's jobs; returns the files."""
    _check_target(out)
    templates = Templates(project)
    written: list[Path] = []
    if not only:
        for name in PARTS:
            written += _folder(templates, out / name, templates.part(name))
        for gone in _others(out / "jobs", {job.name for job in project.jobs}):
            shutil.rmtree(gone)
    for job in project.jobs:
        written += _folder(templates, out / "jobs" / job.name, templates.job(job))
    return written + _scripts(templates, out)


def _check_target(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: name a directory")
    foreign = [p for p in out.iterdir() if not p.name.startswith(".")] if out.exists() else []
    if foreign and not (out / MARK).exists():
        raise ConfigError(
            f"{out} has files that 'deploy render' did not write: name an empty directory"
        )


def _others(folder: Path, kept: set[str]) -> list[Path]:
    """Folders of jobs that were removed."""
    found = folder.iterdir() if folder.exists() else ()
    return [p for p in found if p.is_dir() and p.name not in kept and (p / MARK).exists()]


def _folder(templates: Templates, folder: Path, files: dict[str, str]) -> list[Path]:
    if folder.exists():
        shutil.rmtree(folder)
    if not files:
        return []
    folder.mkdir(parents=True)
    written = []
    for name, text in files.items():
        path = folder / name
        path.write_text(HEAD + text, encoding="utf-8")
        written.append(path)
    return [*written, _kustomization(templates, folder, list(files))]


def _kustomization(templates: Templates, folder: Path, resources: list[str]) -> Path:
    path = folder / MARK
    path.write_text(
        HEAD + templates.text(f"manifests/{MARK}", resources=resources), encoding="utf-8"
    )
    return path


def _scripts(templates: Templates, out: Path) -> list[Path]:
    """Over what is there now: a render of one job keeps the others in the scripts."""
    parts = [name for name in PARTS if (out / name).is_dir()]
    jobs = sorted(p.name for p in (out / "jobs").glob("*") if (p / MARK).exists())
    written = []
    for name in SCRIPTS if parts else SCRIPTS[:1]:
        path = out / name
        path.write_text(templates.script(name, parts, jobs), encoding="utf-8")
        path.chmod(0o755)
        written.append(path)
    return [*written, _kustomization(templates, out, parts + [f"jobs/{name}" for name in jobs])]
