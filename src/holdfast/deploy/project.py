"""A project on disk: its configuration and the directories in `jobs/`.

The app itself reports what it serves, in a separate process in its directory, run by the Python of
`jobs/NAME/.venv` if there is one, else by ours. So nothing is written down twice, and two
directories may both have a `main.py`.

An app that cannot be imported raises an error that names the directory and the cause.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from holdfast.config import ConnectionConfig, DeployConfig, load
from holdfast.config.deployment import SAME, JobDeployConfig, PodConfig, Service, check_label
from holdfast.config.option import checked, options
from holdfast.errors import ConfigError
from holdfast.identity.rendering import streams_account
from holdfast.names import GRANTED, Names, consumer

JOBS = "jobs"
OVERLAYS = Path("deploy") / "overlays"
SHARED = "shared"
SETTINGS = "pyproject.toml"
LOAD_SECONDS = 120  # leaves time for slow imports on a busy machine
NO_PODS = PodConfig()
LONGEST_NAME = 52
"""Limit for a Deployment, so that its pods' names still fit."""
RESERVED = frozenset(
    {
        "agent",
        "agents",
        "backup",
        "backup-drill",
        "control",
        "dashboards",
        "deployer",
        "holdfast",
        "nats",
        "nats-config",
        "nats-headless",
        "platform-deployer",
        "web",
        "workers",
    }
)
"""Names of Holdfast's own parts: no job may use them, and the admission policy in `base.yaml`
denies them to the jobs' pipeline."""


def check_job(name: str) -> str:
    """Check a job's directory name; it also names its image and its workers."""
    if name in RESERVED:
        raise ConfigError(f"{name!r} is the name of a part of Holdfast: choose another for the job")
    return check_label(name, "job")


@dataclass(frozen=True, slots=True)
class Consumer:
    """One consumer that an app's workers pull from."""

    stream: str
    name: str


@dataclass(frozen=True, slots=True)
class Group:
    """The jobs of one group in one directory; they share workers."""

    name: str
    jobs: tuple[str, ...]
    consumers: tuple[Consumer, ...]
    timeout: float = 0.0
    """The longest timeout of its jobs in seconds; 0 if one has none."""


@dataclass(frozen=True, slots=True)
class JobDirectory:
    """One directory of `jobs/`."""

    name: str
    config: JobDeployConfig
    groups: tuple[Group, ...]
    schedules: tuple[str, ...]
    pods: PodConfig = NO_PODS
    app: str = ""
    """The name of the app."""
    extra: str = ""
    """Additional manifests, from `deploy/*.yaml` in the directory."""

    def grace(self, group: Group) -> int:
        """How long a group's handlers may continue after SIGTERM."""
        return self.config.grace(group.timeout)

    @property
    def names(self) -> list[str]:
        """The names of its Deployments."""
        services = [self.service(one) for one in self.pods.services]
        return [self.workers(group) for group in self.groups] + services

    def service(self, service: Service) -> str:
        """The name of a service in Kubernetes."""
        return f"{self.name}-{service.name}"

    def workers(self, group: Group) -> str:
        """The name of a group's workers in Kubernetes: a valid label for any group name."""
        if len(self.groups) == 1:
            return self.name
        full = f"{self.name}-{group.name.lower().replace('_', '-')}".rstrip("-")
        if len(full) <= LONGEST_NAME:
            return full
        return f"{full[: LONGEST_NAME - 9]}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class Project:
    """Everything to render."""

    root: Path
    config: DeployConfig
    jobs: tuple[JobDirectory, ...]
    namespace: str
    """The first part of every name on the server."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tags or digests of single images, by part."""
    environment: str = ""
    """The overlay that this is rendered for."""

    @property
    def names(self) -> Names:
        return Names(self.namespace)

    @property
    def account(self) -> str:
        """The NATS account that has the streams."""
        return self.config.account or streams_account(self.names)

    @property
    def agents_namespace(self) -> str:
        """Agents have another namespace: the project's does not admit host volumes."""
        return f"{self.config.namespace}-agents"

    @property
    def services(self) -> list[tuple[str, Service]]:
        """The services that run beside the workers, with their names in Kubernetes."""
        return [(job.service(one), one) for job in self.jobs for one in job.pods.services]

    def image(self, part: str) -> str:
        """The image of a job's directory, or of the `control` plane."""
        own = next((job.config.tag for job in self.jobs if job.name == part), "")
        tag = self.tags.get(part) or own or self.config.tag
        mark = "@" if tag.startswith("sha256:") else ":"
        return f"{self.config.registry}/{self.config.name}-{part}{mark}{tag}"


def load_project(
    root: Path,
    *,
    only: str = "",
    environment: str = "",
    tags: Mapping[str, str] | None = None,
    **given: Any,
) -> Project:
    """Load the project in a directory; `only` loads a single job.

    An environment's options are in `deploy/overlays/NAME/holdfast.toml`.
    """
    jobs = root / JOBS
    if not jobs.is_dir():
        raise ConfigError(
            f"{root.resolve()} has no directory {JOBS!r}: run this in a project, or make one with "
            "'holdfast new project NAME'"
        )
    own = environment_options(root, environment) if environment else {}
    config = load(DeployConfig, **own | {k: v for k, v in given.items() if v is not None})
    connection = load(ConnectionConfig)
    found = sorted(p.parent for p in jobs.glob(f"*/{SETTINGS}"))
    if only:
        found = [path for path in found if path.name == only]
        if not found:
            raise ConfigError(f"there is no {JOBS}/{only} with a {SETTINGS}")
    names = Names(connection.namespace)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each starts a process
        read = tuple(pool.map(lambda path: read_job(path, config, names), found))
    known = {path.parent.name for path in jobs.glob(f"*/{SETTINGS}")}
    unknown = set(tags or ()) - known - {"control"}
    if unknown:
        raise ConfigError(f"--tag names {', '.join(sorted(unknown))}: there is no such job")
    return Project(root, config, read, connection.namespace, tags or {}, environment)


def environment_options(root: Path, name: str) -> dict[str, Any]:
    """The options an environment overrides: `[deploy]` of its file, or nothing."""
    folder = root / OVERLAYS / name
    if not folder.is_dir():
        raise ConfigError(f"there is no environment {name!r}: make the directory {folder}")
    path = folder / "holdfast.toml"
    if not path.exists():
        return {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if set(found) - {"deploy"}:
        raise ConfigError(f"{path}: only the table [deploy] is allowed here")
    known = {spec.name: spec for spec in options(DeployConfig)}
    for key in found.get("deploy", {}):
        if key not in known:
            raise ConfigError(f"{path}: deploy.{key} is unknown; known: {', '.join(known)}")
    return {k: checked(known[k], v, f"{path}: {k}") for k, v in found.get("deploy", {}).items()}


def read_job(path: Path, config: DeployConfig, names: Names) -> JobDirectory:
    """Read one directory: its configuration, and what its app serves."""
    check_job(path.name)
    settings, pods = _settings(path / SETTINGS, config)
    described = describe(path, settings.app, pods)
    by_group: dict[str, list[dict[str, Any]]] = {}
    for job in described["jobs"]:
        by_group.setdefault(job["group"], []).append(job)
    if not by_group:
        raise ConfigError(f"{path.name}: app {described['name']!r} has no jobs")
    groups = tuple(_group(name, jobs, names) for name, jobs in sorted(by_group.items()))
    extra = "---\n".join(p.read_text(encoding="utf-8") for p in sorted(path.glob("deploy/*.yaml")))
    schedules = tuple(described["schedules"])
    found = JobDirectory(path.name, settings, groups, schedules, pods, described["name"], extra)
    for made in found.names:
        if made in RESERVED or len(made) > LONGEST_NAME:
            raise ConfigError(
                f"jobs/{path.name}: a group or service would be named {made!r} in Kubernetes, "
                f"which is a part of Holdfast or longer than {LONGEST_NAME} characters: rename it"
            )
    return found


def _group(name: str, jobs: list[dict[str, Any]], names: Names) -> Group:
    found = []
    for job in jobs:
        found.append(Consumer(names.jobs, consumer(name, job["name"])))
        found += [Consumer(names.events, consumer(name, job["name"], on)) for on in job["on"]]
        if job.get("ordered"):
            found.append(Consumer(names.jobs, consumer(name, job["name"], "", GRANTED)))
    timeouts = [job.get("timeout") or 0.0 for job in jobs]
    longest = max(timeouts) if all(timeouts) else 0.0
    return Group(name, tuple(job["name"] for job in jobs), tuple(found), longest)


def _settings(path: Path, config: DeployConfig) -> tuple[JobDeployConfig, PodConfig]:
    """`[tool.holdfast]` of a directory, over the project's values."""
    try:
        tool = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("holdfast", {})
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    known = {spec.name: spec for spec in options(JobDeployConfig)}
    structured = {name: tool.pop(name) for name in PodConfig.__struct_fields__ if name in tool}
    for key in tool:
        if key not in known:
            every = ", ".join((*known, *PodConfig.__struct_fields__))
            raise ConfigError(f"{path}: tool.holdfast.{key} is unknown; known: {every}")
    given = {k: checked(known[k], v, f"{path}: tool.holdfast.{k}") for k, v in tool.items()}
    try:
        pods = msgspec.convert(structured, PodConfig)
        if flaws := list(pods.flaws()):
            raise ConfigError(flaws[0])
        return JobDeployConfig(**{name: getattr(config, name) for name in SAME} | given), pods
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: tool.holdfast: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def plain_environment(pods: PodConfig) -> dict[str, str]:
    """A job's variables on this machine; those from cluster secrets are empty unless set here."""
    return {
        name: value if isinstance(value, str) else os.environ.get(name, "")
        for name, value in pods.env.items()
    }


def describe(path: Path, target: str, pods: PodConfig = NO_PODS) -> dict[str, Any]:
    """What the app in a directory serves, as reported by the app."""
    own = path / ".venv" / "bin" / "python"
    paths = [str(path.resolve()), str((path.parents[1] / SHARED).resolve())]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "app.json"
        python = str(own) if own.exists() else sys.executable
        try:
            done = subprocess.run(
                [python, "-m", "holdfast.cli.loading", target, str(answer)],
                cwd=path,
                env=os.environ | plain_environment(pods) | {"PYTHONPATH": os.pathsep.join(paths)},
                capture_output=True,
                text=True,
                timeout=LOAD_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{path.parent.name}/{path.name}: {target} was not imported in {LOAD_SECONDS} s: "
                "does it connect to something while it is imported?"
            ) from None
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"]
            raise ConfigError(
                f"{path.parent.name}/{path.name}: {target} cannot be loaded: "
                f"{' | '.join(said[-3:])} (its requirements must be installed: make setup)"
            )
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found
