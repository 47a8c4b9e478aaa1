"""Renders a project to kustomize-friendly files and the scripts that apply them.

    OUT/base/        namespace, network, the pipelines' rights
    OUT/nats/        OUT/control/   OUT/web/   OUT/agents/   OUT/backup/   OUT/monitoring/
    OUT/jobs/NAME/   register.yaml, workers.yaml, scaling.yaml, services.yaml if it has services,
                     extra.yaml and admin.yaml if it has manifests of its own
    OUT/secrets.sh   every secret, from the folder of `holdfast auth init`
    OUT/apply.sh     everything or single parts, in order, through an overlay
    OUT/gitops.yaml  makes Argo CD or Flux apply it instead, if `gitops_repository` is given

The manifests are the YAML templates in `templates/manifests`; this module supplies their values.
Each folder has a `kustomization.yaml`, and OUT one over all of them. Output is deterministic. A
rendered folder is replaced as a whole; everything else in OUT is left alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from holdfast.config.deployment import STOP_MARGIN_SECONDS
from holdfast.config.fleet import AgentConfig
from holdfast.deploy.inventory import PLAIN, SERVES, SINGLE_REASON, TIMEOUT
from holdfast.deploy.monitoring import dashboards
from holdfast.deploy.project import RESERVED, Group, JobDirectory, Project
from holdfast.deploy.rules.nats import PLAIN_REASON
from holdfast.deploy.rules.pods import PLATFORM_SECRETS
from holdfast.errors import ConfigError
from holdfast.model.cron import check_cron, next_instant
from holdfast.model.liveness import PROFILES

HEAD = "# Written by `holdfast deploy render`; change holdfast.toml or the job instead.\n"
MARK = "kustomization.yaml"
PARTS = ("base", "nats", "control", "web", "agents", "backup", "monitoring")
"""In the order in which they are applied."""
GITOPS = "gitops.yaml"
"""Applied once by an administrator; not part of the kustomization."""
JOB_FILES = ("register.yaml", "workers.yaml", "scaling.yaml")
KEDA_VERSION = "2.20.0"
"""The version that `apply.sh --install-keda` installs: the first that reports a missing consumer as
missing."""
DAY_SECONDS = 86_400
FIRST_SLOT, SLOTS = 1_767_225_600, 100
"""How many slots of the backup schedule are computed, from 2026 on: enough to contain its longest
gap, be it hourly or monthly."""
WAVES = {"namespace": -6, "base": -5, "nats": -4, "control": -3, "web": -2, "agents": -2}
WAVES |= {"backup": -2}
WAVES |= {"monitoring": -2, "register": -1, "workers": 0, "scaling": 1}
WAVES |= {"extra": WAVES["register"], "admin": WAVES["register"]}
"""Argo CD's order: a wave starts once the previous one is healthy. A job's own manifests are in the
wave of its registration, whose pod mounts them: some volume claims are healthy only once a pod
mounts them."""


@functools.cache
def environment() -> Environment:
    """The template engine, shared because it compiles each template once.

    It uses double square brackets, as workflows and alerts contain braces.
    """
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
    # Jinja's built-in filter escapes <, > and ' for HTML.
    found.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    found.filters["yaml"] = lambda value: _dump(value).strip()
    found.filters["manifests"] = lambda values: [value.manifest() for value in values]
    found.filters["hash"] = lambda text: hashlib.sha256(str(text).encode()).hexdigest()[:12]
    return found


def _longest_age(schedule: str) -> int:
    """How old the newest backup may be, in seconds: twice the interval, but at most a day more than
    it."""
    rule = check_cron(schedule)
    at = [FIRST_SLOT]
    while len(at) < SLOTS and (found := next_instant(rule, "UTC", at[-1])):
        at.append(found)
    longest = max((late - early for early, late in pairwise(at[1:])), default=0)
    return longest + min(longest, DAY_SECONDS)


def _dump(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000)


class Templates:
    """The templates with a project's values."""

    def __init__(self, project: Project) -> None:
        self._environment = environment()
        self._project = project
        config, space = project.config, project.config.namespace
        headless = f"nats-headless.{space}.svc.cluster.local"
        hosts = [f"nats-{number}.{headless}" for number in range(config.nats_replicas)]
        scheme = "nats" if config.tls == "off" else "tls"
        url = config.nats_url or ",".join(f"{scheme}://{host}:4222" for host in hosts)
        services = [f"web{end}" for end in ("", f".{space}", f".{space}.svc")]
        services.append(f"web.{space}.svc.cluster.local")
        spaces = [space, *([project.agents_namespace] if config.fleet else [])]
        self._values: dict[str, Any] = {
            "project": project,
            "config": config,
            "namespace": space,
            "agents_namespace": project.agents_namespace,
            "namespaces": spaces,
            "nats_hosts": hosts,
            "nats_url": url,
            "nats_ports": sorted({urlsplit(one).port or 4222 for one in url.split(",")}),
            "nats_names": [
                f"*.{headless}",
                *(f"nats{end}" for end in ("", f".{space}", f".{space}.svc")),
                f"nats.{space}.svc.cluster.local",
            ],
            # KEDA finds the consumer's leader from any server.
            "nats_monitor": f"{headless}:8222",
            "web_hosts": [*config.public_hosts, *services],
            "control_stop_seconds": int(PROFILES["lan"].grace_seconds) + STOP_MARGIN_SECONDS,
            "agent_stop_seconds": int(AgentConfig().grace_seconds) + STOP_MARGIN_SECONDS,
            "keda_version": KEDA_VERSION,
            "single": self._single,
            "hook": self._hook(),
            "reserved": sorted(RESERVED),
            "platform_secrets": sorted(
                PLATFORM_SECRETS.union(
                    filter(None, (config.pull_secret, config.ingress_tls_secret))
                )
            ),
        }
        self._values["secrets"] = self._secrets(self.parts())
        self._values["job_secrets"] = self._job_secrets()

    def text(self, name: str, *, part: str = "", **more: Any) -> str:
        """Render one template."""
        values = self._values | {"part": part, "job": None} | more
        values["gitops"] = lambda step: self._wave(step or part)
        # a macro file sees the values that are given when it is loaded
        for short, file in (("m", "macros"), ("c", "jobs/common")):
            macros = self._environment.get_template(f"manifests/{file}.yaml")
            values[short] = macros.make_module(values)
        found = self._environment.get_template(name).render(values)
        found = re.sub(r"\n[ \t]+(?=\n)", "", found)
        return found.strip().removeprefix("---").lstrip("\n") + "\n"

    def _wave(self, name: str) -> dict[str, str]:
        if self._project.config.gitops != "argocd" or name not in WAVES:
            return {}
        return {"argocd.argoproj.io/sync-wave": str(WAVES[name])}

    def _hook(self) -> dict[str, str]:
        """Makes a GitOps tool replace a registration, because Jobs are immutable."""
        return {
            "none": {},
            "flux": {"kustomize.toolkit.fluxcd.io/force": "enabled"},
            "argocd": {
                "argocd.argoproj.io/hook": "Sync",
                "argocd.argoproj.io/hook-delete-policy": "BeforeHookCreation",
            },
        }[self._project.config.gitops]

    @staticmethod
    def _single(replicas: int, tls: str = "") -> dict[str, str]:
        """Annotations that exempt from a rule of `check`, with the reason: it was configured."""
        reason = "holdfast.toml sets one replica: not for production"
        plain = "holdfast.toml switches TLS off"
        found = {SINGLE_REASON: reason} if replicas == 1 else {}
        return found | ({PLAIN_REASON: plain} if tls == "off" else {})

    def parts(self) -> list[str]:
        """The parts to render."""
        config = self._project.config
        unwanted = {
            "nats": bool(config.nats_url),
            "web": not config.web_replicas,
            "agents": not config.fleet,
            "backup": not config.backup_url,
            "monitoring": config.monitoring == "none",
        }
        return [name for name in PARTS if not unwanted.get(name)]

    def part(self, name: str) -> dict[str, str]:
        """The files of a part.

        The namespace is a separate file because secrets are created in it before the rest.
        """
        if name == "monitoring":
            return self._monitoring()
        more = {"nats_conf": self.text("manifests/nats.conf").strip()} if name == "nats" else {}
        files = {}
        levels = {"base": "restricted", "agents": "privileged"}
        if name in levels:
            space = self._values["namespace" if name == "base" else "agents_namespace"]
            values = {"space": space, "level": levels[name]}
            files["namespace.yaml"] = self.text("manifests/namespace.yaml", **values)
        return files | {f"{name}.yaml": self.text(f"manifests/{name}.yaml", part=name, **more)}

    def _monitoring(self) -> dict[str, str]:
        """Resources of the Prometheus operator, or the same as plain files."""
        config, space = self._project.config, self._values["namespace"]
        agents = self._values["agents_namespace"]
        monitored = [("workers", "health", space), ("control", "health", space)]
        monitored += [] if config.nats_url else [("nats", "metrics", space)]
        monitored += [("web", "health", space)] if config.web_replicas else []
        monitored += [("agent", "health", agents)] if config.fleet else []
        alerts = self.text(
            "monitoring/alerts.yaml",
            own=f'namespace=~"{space}|{agents}"',
            backup_seconds=_longest_age(config.backup_schedule),
            scaled=f'exported_namespace="{space}"',
        )
        boards = {n: json.dumps(board, indent=1) for n, board in dashboards(space).items()}
        if config.monitoring == "operator":
            values = {"monitored": monitored, "dashboards": boards, "alerts": alerts.strip()}
            text = self.text("manifests/monitoring.yaml", part="monitoring", **values)
            return {"monitoring.yaml": text}
        files = {f"{PLAIN}/alerts.yaml": alerts}
        files[f"{PLAIN}/scrape.yaml"] = self.text("monitoring/scrape.yaml", monitored=monitored)
        files |= {f"{PLAIN}/{n}.json": f"{board}\n" for n, board in boards.items()}
        return files | {"monitoring.yaml": self.text("manifests/workers.yaml", part="monitoring")}

    def job(self, job: JobDirectory) -> dict[str, str]:
        """The files of one directory of `jobs/`."""

        def served(group: Group) -> dict[str, str]:
            found = {SERVES: " ".join((job.app or job.name, group.name, *group.jobs))}
            if group.timeout and job.config.interruptible == "no":
                found[TIMEOUT] = f"{group.timeout:g}"
            return found

        values: dict[str, Any] = {"job": job, "served": served}
        names = [*JOB_FILES, *(["services.yaml"] if job.pods.services else [])]
        files = {name: self.text(f"manifests/jobs/{name}", part="job", **values) for name in names}
        return files | self._extra(job)

    def _extra(self, job: JobDirectory) -> dict[str, str]:
        """A job's additional manifests, in the project's namespace and with our labels.

        The jobs' pipeline may apply ConfigMaps only; other kinds are applied with `base`.
        """
        found: dict[str, list[str]] = {}
        for resource in yaml.safe_load_all(job.extra):
            if not isinstance(resource, dict) or not isinstance(resource.get("metadata"), dict):
                raise ConfigError(f"jobs/{job.name}/deploy: a document is not a manifest")
            step = "extra" if resource.get("kind") == "ConfigMap" else "admin"
            metadata = resource["metadata"]
            metadata["namespace"] = self._values["namespace"]
            if notes := self._wave(step) | (metadata.get("annotations") or {}):
                metadata["annotations"] = notes
            metadata["labels"] = (metadata.get("labels") or {}) | {
                "app.kubernetes.io/part-of": self._project.config.name,
                "app.kubernetes.io/managed-by": "holdfast",
                "holdfast.dev/part": "job",
                "holdfast.dev/job": job.name,
                "holdfast.dev/step": step,
            }
            found.setdefault(f"{step}.yaml", []).append(_dump(resource))
        return {name: "---\n".join(texts) for name, texts in found.items()}

    def _secrets(self, parts: list[str]) -> list[tuple[str, str]]:
        """Namespace and name of every secret that these parts and all workers need."""
        config, space = self._project.config, self._values["namespace"]
        needed = {
            "": ["holdfast-control", "holdfast-worker"],
            "web": ["holdfast-web", "holdfast-web-tokens"],
            "nats": ["nats-auth", *(["nats-tls"] if config.tls == "files" else [])],
            "backup": ["holdfast-backup", "holdfast-backup-store"],
        }
        authority = ["holdfast-ca"] if config.tls == "files" else []
        found = [n for part, names in needed.items() if part in ("", *parts) for n in names]
        named = [(space, name) for name in (*found, *authority)]
        if "agents" in parts:
            agents = self._values["agents_namespace"]
            named += [(agents, name) for name in ("holdfast-agents", *authority)]
        clients = ("holdfast-client", *authority)
        return named + [(other, name) for other in config.clients for name in clients]

    def _job_secrets(self) -> list[str]:
        """Secrets that jobs use and that none of their manifests creates."""
        found, made = set(), set()
        for job in self._project.jobs:
            found.update(job.pods.every_secret)
            for one in yaml.safe_load_all(job.extra):
                target = (one.get("spec") or {}).get("target") or {}
                made.add(target.get("name") or one["metadata"].get("name"))
        return sorted(found - made)

    def gitops(self) -> str:
        """What makes Argo CD or Flux apply the overlay; empty unless a repository is named."""
        config, environment = self._project.config, self._project.environment
        if not config.gitops_repository:
            return ""
        path = f"deploy/overlays/{environment}" if environment else "deploy/rendered"
        return self.text(f"manifests/gitops/{config.gitops}.yaml", path=path)

    def scripts(self, parts: list[str], jobs: list[str]) -> dict[str, str]:
        """The scripts for these parts and jobs."""
        config = self._project.config
        environment = self._project.environment
        values: dict[str, Any] = {
            "parts": parts,
            "every_part": PARTS,
            "jobs": jobs,
            "secrets": self._secrets(parts),
            "job_secrets": self._job_secrets(),
            "overlay": f"../../overlays/{environment}" if environment else ".",
        }
        names = ["apply.sh", "secrets.sh", "clean.sh"]
        names += ["agents.sh"] if "agents" in parts else []
        if "nats" in parts:
            names += ["grow-nats.sh", *(["certificates.sh"] if config.tls == "files" else [])]
        return {name: self.text(f"manifests/scripts/{name}", **values) for name in names}


def render(project: Project, out: Path, *, only: bool = False) -> list[Path]:
    """Write everything, or with `only` just the project's jobs; returns the files."""
    _check_target(out)
    templates = Templates(project)
    written: list[Path] = []
    if not only:
        wanted = templates.parts()
        for name in PARTS:
            files = templates.part(name) if name in wanted else {}
            written += _folder(templates, out / name, files)
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
    """Folders of removed jobs."""
    found = folder.iterdir() if folder.exists() else ()
    return [p for p in found if p.is_dir() and p.name not in kept and (p / MARK).exists()]


def _folder(templates: Templates, folder: Path, files: dict[str, str]) -> list[Path]:
    if folder.exists():
        shutil.rmtree(folder)
    if not files:
        return []
    written = []
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((HEAD if path.suffix == ".yaml" else "") + text, encoding="utf-8")
        written.append(path)
    return [*written, _kustomization(templates, folder, [n for n in files if "/" not in n])]


def _kustomization(templates: Templates, folder: Path, resources: list[str]) -> Path:
    path = folder / MARK
    text = templates.text(f"manifests/{MARK}", resources=resources)
    path.write_text(HEAD + text, encoding="utf-8")
    return path


def _scripts(templates: Templates, out: Path) -> list[Path]:
    """Covers all rendered parts: rendering one job keeps the others in the scripts."""
    parts = [name for name in PARTS if (out / name).is_dir()]
    jobs = sorted(p.name for p in (out / "jobs").glob("*") if (p / MARK).exists())
    for old in out.glob("*.sh"):
        old.unlink()
    written = []
    for name, text in templates.scripts(parts, jobs).items():
        path = out / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        written.append(path)
    target = out / GITOPS
    target.unlink(missing_ok=True)
    if text := templates.gitops():
        target.write_text(HEAD + text, encoding="utf-8")
        written.append(target)
    return [*written, _kustomization(templates, out, parts + [f"jobs/{name}" for name in jobs])]
