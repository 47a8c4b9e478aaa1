"""The deployment of a project on Kubernetes: the input of `holdfast deploy render`.

Guaranteed: every valid record can be rendered. `JobDeployConfig` is what a directory `jobs/NAME`
may set for itself in `[tool.holdfast]` of its `pyproject.toml`; anything it does not set comes from
the project's `[deploy]`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import holdfast.config.roles  # noqa: F401 - these come first on the page
from holdfast.config.option import Role, option, options
from holdfast.errors import ConfigError

_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[KMGT]i?)?")
STOP_MARGIN_SECONDS = 15
"""What a pod gets beyond its process's grace period, to give runs back and deregister."""


def check_label(value: str, what: str) -> str:
    """A valid Kubernetes name, with room for the suffixes we add."""
    if not _LABEL.fullmatch(value):
        raise ConfigError(
            f"{what} {value!r} is not usable: lower-case letters, digits and '-', starting with a "
            "letter, at most 42 characters"
        )
    return value


@dataclass(frozen=True, repr=False)
class Scaling(Role):
    """How workers are scaled: set for the whole project, or for one job."""

    min_replicas: int = option(0, least=0, most=1000)
    """Workers of a job when nothing waits."""
    max_replicas: int = option(5, least=1, most=1000)
    """Maximum number of workers of a job."""
    lag_threshold: int = option(5, least=1, most=1_000_000)
    """Waiting runs per added worker."""
    polling_seconds: int = option(10, least=1, most=3600)
    """How often KEDA reads the lag."""
    cooldown_seconds: int = option(60, least=0, most=86_400)
    """How long the queue must be empty before the last worker is removed."""
    fallback_replicas: int = option(1, least=1, most=1000)
    """Number of workers while the lag cannot be read."""
    concurrency: int = option(10, least=1, most=100_000)
    """Runs that one worker executes at a time."""
    grace_seconds: int = option(60, least=1, most=3600)
    """How long handlers may continue after SIGTERM; the pod gets 15 s more."""
    cpu: str = option("200m")
    """CPU limit of a worker."""
    memory: str = option("256Mi")
    """Memory limit of a worker."""

    def _check_relations(self) -> None:
        if self.max_replicas < max(1, self.min_replicas):
            raise ConfigError(
                f"max_replicas ({self.max_replicas}) must be at least 1 and not below min_replicas "
                f"({self.min_replicas})"
            )
        for name in ("cpu", "memory"):
            if not _QUANTITY.fullmatch(getattr(self, name)):
                raise ConfigError(
                    f"{name} {getattr(self, name)!r} is not a quantity such as 200m or 128Mi"
                )


@dataclass(frozen=True, repr=False)
class DeployConfig(Scaling):
    """What `holdfast deploy render` writes for Kubernetes.

    A job can override everything from `min_replicas` on, in `[tool.holdfast]` of the
    `pyproject.toml` in its directory.
    """

    table = "deploy"

    name: str = option("holdfast")
    """Name of the project, and the first part of its image names."""
    kubernetes_namespace: str = option("")
    """Kubernetes namespace; defaults to the project's name."""
    registry: str = option("ghcr.io/example")
    """Container registry of the images."""
    tag: str = option("dev")
    """Image tag; the pipeline passes the commit."""
    release: str = option("")
    """Release number, e.g. a build number. Schedules of a lower release never replace those of a
    higher one."""
    pull_secret: str = option("")
    """Secret with the registry's credentials, if it needs any."""
    deployer: str = option("github:repo:example/holdfast:environment:production")
    """Kubernetes user of the deployment pipeline."""
    account: str = option("")
    """NATS account of the streams, for KEDA; defaults to the one from `holdfast auth init`."""
    nats_image: str = option("nats:2.15.1-alpine")
    """Image of the nats-server, 2.12.6 or newer."""
    exporter_image: str = option("natsio/prometheus-nats-exporter:0.19.1")
    """Image of the exporter beside each nats-server."""
    nats_replicas: int = option(3, least=1, most=5)
    """Servers of the NATS cluster: 1, 3 or 5."""
    nats_volume_gib: int = option(20, least=2, most=65_536)
    """Size of each server's volume."""
    nats_max_file_gib: int = option(0, least=0, most=65_536)
    """How much of the volume JetStream may use; 0 means four fifths."""
    storage_class: str = option("")
    """Storage class of the volumes; defaults to the cluster's."""
    control_replicas: int = option(2, least=2, most=9)
    """Number of control processes."""
    web_replicas: int = option(2, least=0, most=9)
    """Number of web processes; 0 means none."""
    web_hosts: str = option("")
    """Host names of the web UI, separated by commas."""
    agents: str = option("yes", choices=("yes", "no"))
    """Whether every machine runs an agent."""
    keda_namespace: str = option("keda")
    """Namespace of KEDA, which is allowed to read the NATS monitor."""
    monitoring_namespace: str = option("monitoring")
    """Namespace of Prometheus, which is allowed to scrape."""
    monitoring_release: str = option("prometheus")
    """Value of the label `release` that Prometheus and Grafana select on."""
    scaler: str = option("nats-jetstream", choices=("nats-jetstream", "metrics-api"))
    """Where KEDA reads the lag: from the NATS monitor, or from the control plane's `/lag`."""

    @property
    def max_file_gib(self) -> int:
        """What JetStream may use of a volume."""
        return self.nats_max_file_gib or self.nats_volume_gib * 4 // 5

    @property
    def namespace(self) -> str:
        """The namespace of Kubernetes."""
        return self.kubernetes_namespace or self.name

    @property
    def fleet(self) -> bool:
        """Whether every machine runs an agent."""
        return self.agents == "yes"

    def _check_relations(self) -> None:
        super()._check_relations()
        check_label(self.name, "name")
        check_label(self.namespace, "kubernetes_namespace")
        if self.nats_replicas % 2 == 0:
            raise ConfigError(f"nats_replicas ({self.nats_replicas}) must be 1, 3 or 5")
        if self.max_file_gib >= self.nats_volume_gib:
            raise ConfigError(
                f"nats_max_file_gib ({self.max_file_gib}) must be below nats_volume_gib "
                f"({self.nats_volume_gib}): a full disk stops nats-server until it is restarted"
            )


SAME = tuple(spec.name for spec in options(Scaling))
"""What a job may set for itself."""


@dataclass(frozen=True, repr=False)
class JobDeployConfig(Scaling):
    """How one directory's workers run."""

    app: str = option("main:app")
    """The app in the directory."""

    @property
    def stop_seconds(self) -> int:
        """How long the pod may take to stop."""
        return self.grace_seconds + STOP_MARGIN_SECONDS
