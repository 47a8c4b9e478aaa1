"""The deployment of a project on Kubernetes: what `holdfast deploy render` is told.

Guaranteed: a record that exists can be rendered. `JobDeployConfig` is what a directory `jobs/NAME`
may say about itself in `[tool.holdfast]` of its `pyproject.toml`; where it says nothing, the
project's `[deploy]` holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import holdfast.config.roles  # noqa: F401 - the roles come first on the page
from holdfast.config.option import Role, option
from holdfast.errors import ConfigError

_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[KMGT]i?)?")
STOP_MARGIN_SECONDS = 15
"""What a pod gets beyond its process's own grace period, to give runs back and say goodbye."""


def check_label(value: str, what: str) -> str:
    """A name that Kubernetes takes, with room for what we add to it."""
    if not _LABEL.fullmatch(value):
        raise ConfigError(
            f"{what} {value!r} is not usable: lower-case letters, digits and '-', starting with a "
            "letter, at most 42 characters"
        )
    return value


class _Scaled(Role):
    """What the project says for all of its jobs, and a job for itself."""

    min_replicas: int
    max_replicas: int
    cpu: str
    memory: str

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
class DeployConfig(_Scaled):
    """What `holdfast deploy render` writes for Kubernetes. A job's directory may say otherwise for itself: from `min_replicas` on, in `[tool.holdfast]` of its `pyproject.toml`."""  # noqa: E501 - one line of the generated page

    table = "deploy"

    name: str = option("holdfast", "The project: the first part of its images' names.")
    kubernetes_namespace: str = option("", "Where everything lives; none: as the project's name.")
    registry: str = option("ghcr.io/example", "Where images are pushed to and pulled from.")
    tag: str = option("dev", "The tag of the images; the pipeline gives the commit.")
    release: str = option(
        "",
        "Number of the release, such as a build number: schedules of a lower one never replace "
        "those of a higher one.",
    )
    pull_secret: str = option("", "Secret with the registry's credentials, if it needs any.")
    deployer: str = option(
        "github:repo:example/holdfast:environment:production",
        "The user as whom the pipeline is known to Kubernetes.",
    )
    account: str = option(
        "",
        "The NATS account in which the streams are, for KEDA; none: that of `holdfast auth init`.",
    )
    nats_image: str = option("nats:2.15.1-alpine", "Image of the nats-server, 2.12.6 or newer.")
    exporter_image: str = option(
        "natsio/prometheus-nats-exporter:0.19.1", "Image of the exporter beside each nats-server."
    )
    nats_replicas: int = option(3, "Servers of the NATS cluster: 1, 3 or 5.", least=1, most=5)
    nats_volume_gib: int = option(20, "Size of each server's volume.", least=2, most=65_536)
    nats_max_file_gib: int = option(
        0, "What JetStream may fill of it; 0: four fifths.", least=0, most=65_536
    )
    storage_class: str = option("", "Storage class of the volumes; none: the cluster's default.")
    control_replicas: int = option(2, "Control processes.", least=2, most=9)
    web_replicas: int = option(2, "Web processes; 0: none.", least=0, most=9)
    web_hosts: str = option("", "Names under which the web is reached, separated by commas.")
    agents: str = option("yes", "Whether every machine runs an agent.", choices=("yes", "no"))
    keda_namespace: str = option("keda", "Where KEDA runs: it may read the NATS monitor.")
    monitoring_namespace: str = option("monitoring", "Where Prometheus runs: it may scrape.")
    monitoring_release: str = option(
        "prometheus", "Label `release` by which Prometheus and Grafana pick up what is theirs."
    )
    scaler: str = option(
        "nats-jetstream",
        "Where KEDA reads the lag: from the NATS monitor, or from the control plane's `/lag`.",
        choices=("nats-jetstream", "metrics-api"),
    )
    min_replicas: int = option(0, "Workers that a job has when nothing waits.", least=0, most=1000)
    max_replicas: int = option(5, "Workers that a job has at most.", least=1, most=1000)
    lag_threshold: int = option(5, "Runs for each worker that is added.", least=1, most=1_000_000)
    polling_seconds: int = option(10, "How often KEDA looks.", least=1, most=3600)
    cooldown_seconds: int = option(
        60, "How long nothing must wait before the last worker goes.", least=0, most=86_400
    )
    fallback_replicas: int = option(1, "Workers while the lag cannot be read.", least=1, most=1000)
    concurrency: int = option(10, "Runs that one worker executes at a time.", least=1, most=100_000)
    grace_seconds: int = option(
        60, "How long handlers may go on after SIGTERM; the pod gets 15 s more.", least=1, most=3600
    )
    cpu: str = option("200m", "Processor that a worker may use.")
    memory: str = option("256Mi", "Memory that a worker may use.")

    @property
    def max_file_gib(self) -> int:
        """What JetStream may use of a volume."""
        return self.nats_max_file_gib or self.nats_volume_gib * 4 // 5

    @property
    def namespace(self) -> str:
        """The namespace of Kubernetes."""
        return self.kubernetes_namespace or self.name

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


SAME = (
    *("min_replicas", "max_replicas", "lag_threshold", "polling_seconds", "cooldown_seconds"),
    *("fallback_replicas", "concurrency", "grace_seconds", "cpu", "memory"),
)
"""What a job may say for itself; the defaults are the project's."""


@dataclass(frozen=True, repr=False)
class JobDeployConfig(_Scaled):
    """How one directory's workers run."""

    app: str = option("main:app", "The app in the directory.")
    min_replicas: int = option(0, "", least=0, most=1000)
    max_replicas: int = option(5, "", least=1, most=1000)
    lag_threshold: int = option(5, "", least=1, most=1_000_000)
    polling_seconds: int = option(10, "", least=1, most=3600)
    cooldown_seconds: int = option(60, "", least=0, most=86_400)
    fallback_replicas: int = option(1, "", least=1, most=1000)
    concurrency: int = option(10, "", least=1, most=100_000)
    grace_seconds: int = option(60, "", least=1, most=3600)
    cpu: str = option("200m", "")
    memory: str = option("256Mi", "")

    @property
    def stop_seconds(self) -> int:
        """What the pod gets to end."""
        return self.grace_seconds + STOP_MARGIN_SECONDS
