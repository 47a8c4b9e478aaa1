"""The deployment of a project on Kubernetes: the input of `holdfast deploy render`.

Guaranteed: every valid record can be rendered. `JobDeployConfig` is what a directory `jobs/NAME`
may override in `[tool.holdfast]` of its `pyproject.toml`; defaults come from the project's
`[deploy]`. `PodConfig` is the rest of that table: what only that job's pods have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

import holdfast.config.roles  # noqa: F401 - these come first on the page
from holdfast.config.option import RoleConfig, option, options
from holdfast.errors import ConfigError

_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|[MGT]|[KMGT]i)?")
STOP_MARGIN_SECONDS = 15
"""Time a pod gets beyond its process's grace period, to give back runs and deregister: more than
the 10 s that a cancelled handler may clean up."""
LEAST_GRACE_SECONDS, MOST_GRACE_SECONDS = 60, 3600
"""Bounds of a grace period derived from timeouts: a rollout should not take hours."""
_GATEWAY = re.compile(r"[a-z0-9-]+/[a-z0-9.-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"/[^:]*")
HEALTH_PORT = 8080
"""The port on which every process of Holdfast serves its health."""
RESERVED_PATHS = ("/etc/holdfast", "/etc/holdfast-tls", "/tmp")
"""Mount paths that every worker uses: its login, its authority and its scratch space."""
BUSY = 0.8
"""The share of its CPU limit that a worker may use before an HPA adds another: beyond it,
throttling begins."""
_UNITS = {"": 1.0, "m": 0.001, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
RESERVED_VARIABLES = ("HOLDFAST_CREDENTIALS_FILE", "HOLDFAST_NATS_URL", "HOLDFAST_NAMESPACE")
"""Identify a worker and its NATS: the same for all processes of a project."""


def amount(quantity: str) -> float:
    """A quantity as a number, e.g. 0.2 for 200m."""
    number = quantity.rstrip("mkKMGTi")
    return float(number) * _UNITS[quantity.removeprefix(number)]


def check_label(value: str, what: str) -> str:
    """Check a Kubernetes name; leaves room for the suffixes we add."""
    if not _LABEL.fullmatch(value):
        raise ConfigError(
            f"{what} {value!r} is not usable: lower-case letters, digits and '-', starting with a "
            "letter, at most 42 characters"
        )
    return value


@dataclass(frozen=True, repr=False)
class Scaling(RoleConfig):
    """How workers are scaled: set for the whole project, or for one job."""

    min_replicas: int = option(0, least=0, most=1000)
    """Number of workers of a job when no run waits."""
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
    grace_seconds: int = option(0, least=0, most=3600)
    """How long handlers may continue after SIGTERM; the pod gets 15 s more. 0 means as long as the
    longest timeout of the group's jobs, at least 60 s and at most an hour."""
    interruptible: str = option("no", choices=("yes", "no"))
    """Whether a rollout may interrupt runs that need longer than `grace_seconds`."""
    cpu: str = option("200m")
    """CPU limit of a worker."""
    memory: str = option("256Mi")
    """Memory limit of a worker."""
    cpu_request: str = option("10m")
    """CPU that is reserved for a worker."""
    memory_request: str = option("")
    """Memory that is reserved for a worker; defaults to its limit."""

    def _check_relations(self) -> None:
        if self.max_replicas < max(1, self.min_replicas):
            raise ConfigError(
                f"max_replicas ({self.max_replicas}) must be at least 1 and not below min_replicas "
                f"({self.min_replicas})"
            )
        for name in ("cpu", "memory", "cpu_request", "memory_request"):
            value = getattr(self, name)
            if not _QUANTITY.fullmatch(value) and (value or name != "memory_request"):
                raise ConfigError(f"{name} {value!r} is not a quantity such as 200m or 128Mi")
        for name in ("cpu", "memory"):
            limit, request = getattr(self, name), getattr(self, f"{name}_request")
            if request and amount(request) > amount(limit):
                raise ConfigError(
                    f"{name}_request ({request}) must not be above {name} ({limit}): Kubernetes "
                    "refuses such pods"
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
    """Tag of the images that have no other; `deploy render --tag NAME=TAG` sets one image's."""
    release: str = option("")
    """Release number, e.g. a build number. Schedules of a lower release never replace those of a
    higher one."""
    pull_secret: str = option("")
    """Secret with the registry's credentials, if it needs any."""
    deployer: str = option("github:repo:example/holdfast:environment:production")
    """Kubernetes user of the pipeline that deploys jobs. It cannot touch NATS, the control plane or
    their secrets."""
    platform_deployer: str = option("")
    """Kubernetes user of the pipeline that deploys control plane and web; none when empty."""
    gitops: str = option("none", choices=("none", "argocd", "flux"))
    """Annotate the resources so that Argo CD or Flux applies them in the same order."""
    gitops_repository: str = option("")
    """Git repository from which Argo CD or Flux applies `deploy/overlays`; `gitops.yaml` is written
    when it is given."""
    gitops_revision: str = option("main")
    """Branch of `gitops_repository`."""
    secret_store: str = option("")
    """ClusterSecretStore of the External Secrets operator that has every secret; with it,
    `secrets.sh` is not needed."""
    secret_store_prefix: str = option("")
    """First part of the secrets' names in `secret_store`; defaults to the Kubernetes namespace and
    a slash."""
    account: str = option("")
    """NATS account that has the streams, for KEDA; defaults to the one from `holdfast auth
    init`."""
    nats_image: str = option("nats:2.15.1-alpine")
    """Image of the nats-server, 2.12.6 or newer."""
    exporter_image: str = option("natsio/prometheus-nats-exporter:0.19.1")
    """Image of the exporter beside each nats-server."""
    reloader_image: str = option("natsio/nats-server-config-reloader:0.21.1")
    """Image of the sidecar that makes each nats-server reload changed users."""
    nats_url: str = option("")
    """Address of an existing NATS; no nats-server is rendered then."""
    nats_replicas: int = option(3, least=1, most=5)
    """Servers of the NATS cluster: 1, 3 or 5. One server is for staging: losing the machine is an
    outage, losing the disk loses everything."""
    nats_spread: str = option("required", choices=("required", "preferred"))
    """Whether two nats-servers may never share a machine, or only should not."""
    tls: str = option("files", choices=("files", "cert-manager", "off"))
    """Encryption between NATS and everything that connects to it. `files`: `secrets.sh` makes an
    authority and a certificate with openssl. `cert-manager`: `tls_issuer` signs."""
    tls_issuer: str = option("")
    """ClusterIssuer of cert-manager that signs the certificates."""
    nats_volume_gib: int = option(20, least=2, most=65_536)
    """Size of each server's volume."""
    nats_max_file_gib: int = option(0, least=0, most=65_536)
    """How much of the volume JetStream may use; 0 means four fifths."""
    storage_class: str = option("")
    """Storage class of the volumes; defaults to the cluster's."""
    control_replicas: int = option(2, least=1, most=9)
    """Number of control processes. One is for staging: no schedule fires while it restarts."""
    web_replicas: int = option(2, least=0, most=9)
    """Number of web processes; 0 means none."""
    web_hosts: str = option("")
    """Host names of the web UI, separated by commas."""
    ingress_class: str = option("")
    """Class of the Ingress that opens the web UI under `web_hosts`; none when empty."""
    ingress_tls_secret: str = option("")
    """Secret with the certificate of `web_hosts`, for the Ingress."""
    gateway: str = option("")
    """Gateway (`NAMESPACE/NAME`) whose HTTPRoute opens the web UI under `web_hosts`, instead of an
    Ingress."""
    backup_url: str = option("")
    """Object store for regular backups, `s3://BUCKET/PREFIX?endpoint=https://…`; none when
    empty."""
    backup_schedule: str = option("17 3 * * *")
    """When a backup is made: a cron rule, in UTC."""
    backup_keep: int = option(14, least=1, most=10_000)
    """Number of backups that are kept."""
    drill_schedule: str = option("47 4 * * 0")
    """Schedule of the restore drill: the newest backup is restored into a temporary server."""
    agents: str = option("yes", choices=("yes", "no"))
    """Whether every machine runs an agent."""
    keda_namespace: str = option("keda")
    """Namespace of KEDA, which is allowed to read the NATS monitor."""
    client_namespaces: str = option("")
    """Other namespaces whose pods may connect to NATS, separated by commas. `secrets.sh` puts the
    client's login into each."""
    monitoring: str = option("operator", choices=("operator", "files", "none"))
    """Whether metrics, alerts and dashboards are resources of the Prometheus operator, plain files
    for a Prometheus and a Grafana without it, or not rendered."""
    monitoring_namespace: str = option("monitoring")
    """Namespace of Prometheus, which is allowed to scrape."""
    runbooks_url: str = option("docs")
    """Base address of the runbooks that alerts link to: where you publish Holdfast's `docs/`; the
    default is the path in its repository."""
    monitoring_release: str = option("prometheus")
    """Value of the label `release` that Prometheus and Grafana select on."""
    scaler: str = option("metrics-api", choices=("metrics-api", "nats-jetstream", "hpa"))
    """What scales the workers. `metrics-api`: KEDA asks the control plane's `/lag`, which sums the
    group's jobs and leaves out paused ones. `nats-jetstream`: KEDA reads the monitor of NATS itself
    (KEDA 2.20 or newer). `hpa`: without KEDA, by CPU, never to zero."""

    @property
    def max_file_gib(self) -> int:
        """How much of a volume JetStream may use."""
        return self.nats_max_file_gib or self.nats_volume_gib * 4 // 5

    @property
    def namespace(self) -> str:
        """The Kubernetes namespace."""
        return self.kubernetes_namespace or self.name

    @property
    def clients(self) -> list[str]:
        """The other namespaces that connect to NATS."""
        return [name.strip() for name in self.client_namespaces.split(",") if name.strip()]

    @property
    def store_prefix(self) -> str:
        """The first part of the secrets' names in the secret store."""
        return self.secret_store_prefix or f"{self.namespace}/"

    @property
    def public_hosts(self) -> list[str]:
        """The names under which the web UI is opened from outside."""
        return [host.strip() for host in self.web_hosts.split(",") if host.strip()]

    @property
    def fleet(self) -> bool:
        """Whether every machine runs an agent."""
        return self.agents == "yes"

    def _check_relations(self) -> None:
        super()._check_relations()
        check_label(self.name, "name")
        check_label(self.namespace, "kubernetes_namespace")
        for name in self.clients:
            check_label(name, "client_namespaces")
        if self.scaler == "hpa" and self.min_replicas == 0:
            object.__setattr__(self, "min_replicas", 1)  # an HPA cannot scale from zero
        self._check_around()
        self._check_nats()

    def _check_around(self) -> None:
        """Check the options about other programs of the cluster."""
        for name in ("ingress_class", "gateway"):
            if getattr(self, name) and not self.public_hosts:
                raise ConfigError(f"{name} needs web_hosts: the names to open")
        if self.gateway and not _GATEWAY.fullmatch(self.gateway):
            raise ConfigError(f"gateway {self.gateway!r} must be NAMESPACE/NAME")
        if self.gateway and self.ingress_class:
            raise ConfigError("ingress_class and gateway both open the web UI: give one of them")
        if self.gitops_repository and self.gitops == "none":
            raise ConfigError("gitops_repository needs gitops: argocd or flux")
        if self.backup_url and not self.backup_url.startswith("s3://"):
            raise ConfigError(
                f"backup_url {self.backup_url!r} must be s3://BUCKET/PREFIX?endpoint=https://…"
            )

    def _check_nats(self) -> None:
        if (self.tls == "cert-manager") != bool(self.tls_issuer):
            raise ConfigError("tls_issuer belongs to tls = cert-manager: give both or neither")
        if self.scaler == "nats-jetstream" and self.nats_url:
            raise ConfigError(
                "scaler nats-jetstream reads the monitor of the NATS that is rendered: with "
                "nats_url use metrics-api"
            )
        if self.nats_replicas % 2 == 0:
            raise ConfigError(f"nats_replicas ({self.nats_replicas}) must be 1, 3 or 5")
        if self.max_file_gib >= self.nats_volume_gib:
            raise ConfigError(
                f"nats_max_file_gib ({self.max_file_gib}) must be below nats_volume_gib "
                f"({self.nats_volume_gib}): a full disk stops nats-server until it is restarted"
            )


SAME = tuple(spec.name for spec in options(Scaling))
"""The options a job may override."""


@dataclass(frozen=True, repr=False)
class JobDeployConfig(Scaling):
    """How one directory's workers run."""

    app: str = option("main:app")
    """The app in the directory."""
    tag: str = option("")
    """Image tag of this job, or a digest: `sha256:…`; defaults to the project's."""

    @property
    def busy_cpu(self) -> str:
        """The CPU of a worker beyond which an HPA adds another."""
        return f"{max(1, round(amount(self.cpu) * BUSY * 1000))}m"

    def grace(self, longest_timeout: float) -> int:
        """The grace period for jobs with this longest timeout; 0 means no timeout."""
        if self.grace_seconds:
            return self.grace_seconds
        return min(max(int(longest_timeout), LEAST_GRACE_SECONDS), MOST_GRACE_SECONDS)


# ---- what one job's pods have


class _StrictTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table that rejects unknown keys."""


class Reference(_StrictTable, frozen=True):
    """A value from a Secret or a ConfigMap."""

    key: str
    secret: str = ""
    config_map: str = ""
    optional: bool = False

    def manifest(self) -> dict[str, Any]:
        """The Kubernetes form."""
        kind = "secretKeyRef" if self.secret else "configMapKeyRef"
        found: dict[str, Any] = {"name": self.secret or self.config_map, "key": self.key}
        return {kind: found | ({"optional": True} if self.optional else {})}


class Volume(_StrictTable, frozen=True):
    """A volume and where it is mounted: a Secret, a ConfigMap, a claim, or scratch space."""

    name: str
    path: str
    secret: str = ""
    config_map: str = ""
    claim: str = ""
    size: str = ""
    """Size of an empty volume that is deleted with the pod."""
    writable: bool = False
    """Whether a claim may be written; scratch space always is."""
    optional: bool = False

    def manifest(self) -> dict[str, Any]:
        """The volume in Kubernetes form."""
        optional = {"optional": True} if self.optional else {}
        if self.secret:
            return {
                "name": self.name,
                "secret": {"secretName": self.secret, "defaultMode": 0o440, **optional},
            }
        if self.config_map:
            return {"name": self.name, "configMap": {"name": self.config_map, **optional}}
        if self.claim:
            return {"name": self.name, "persistentVolumeClaim": {"claimName": self.claim}}
        return {"name": self.name, "emptyDir": {"sizeLimit": self.size}}

    def mount(self) -> dict[str, Any]:
        """Its volume mount."""
        found: dict[str, Any] = {"name": self.name, "mountPath": self.path}
        return found if self.size or (self.claim and self.writable) else found | {"readOnly": True}

    def flaws(self) -> Iterator[str]:
        """Problems, as sentences."""
        sources = [s for s in (self.secret, self.config_map, self.claim, self.size) if s]
        if len(sources) != 1:
            yield f"volume {self.name!r} needs exactly one of secret, config_map, claim and size"
        if self.size and not _QUANTITY.fullmatch(self.size):
            yield f"volume {self.name!r}: size {self.size!r} is not a quantity such as 1Gi"
        if not _PATH.fullmatch(self.path) or self.path.rstrip("/") in ("", *RESERVED_PATHS):
            reserved = ", ".join(RESERVED_PATHS)
            yield f"volume {self.name!r}: path {self.path!r} must be absolute and not {reserved}"
        if not _LABEL.fullmatch(self.name) or self.name in ("credentials", "tmp", "tls"):
            yield f"volume name {self.name!r} is not usable: lower case, and not one of ours"


class Service(_StrictTable, frozen=True):
    """A process of a job's image that answers HTTP, beside its workers: pages, an API."""

    name: str
    command: tuple[str, ...]
    port: int
    ready: str
    """Path that answers 200 while the process can serve."""
    hosts: tuple[str, ...] = ()
    """Names under which the project's Ingress or Gateway opens it."""
    replicas: int = 2
    cpu: str = "500m"
    memory: str = "256Mi"

    def flaws(self) -> Iterator[str]:
        """Problems, as sentences."""
        what = f"service {self.name!r}"
        if not _LABEL.fullmatch(self.name):
            yield f"{what}: the name must have lower-case letters, digits and '-'"
        if not self.command:
            yield f"{what} needs a command"
        if not 1024 <= self.port <= 65_535 or self.port == HEALTH_PORT:
            yield f"{what}: port {self.port} must be from 1024 to 65535 and not {HEALTH_PORT}"
        if not self.ready.startswith("/"):
            yield f"{what}: ready {self.ready!r} must be a path such as /healthz"
        if not 1 <= self.replicas <= 1000:
            yield f"{what}: replicas must be from 1 to 1000"
        for amount in (self.cpu, self.memory):
            if not _QUANTITY.fullmatch(amount):
                yield f"{what}: {amount!r} is not a quantity such as 200m or 128Mi"


class Toleration(_StrictTable, frozen=True):
    """A taint that the pods tolerate."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""
    seconds: int | None = None

    def manifest(self) -> dict[str, Any]:
        """The Kubernetes form."""
        found = {"key": self.key, "operator": self.operator, "value": self.value}
        found["effect"] = self.effect
        kept: dict[str, Any] = {key: value for key, value in found.items() if value}
        return kept | ({"tolerationSeconds": self.seconds} if self.seconds is not None else {})

    def flaws(self) -> Iterator[str]:
        """Problems, as sentences."""
        if self.operator not in ("Equal", "Exists"):
            yield f"toleration: operator {self.operator!r} is neither Equal nor Exists"
        if self.operator == "Exists" and self.value:
            yield f"toleration of {self.key!r}: with operator Exists there is no value"
        if self.effect not in ("", "NoSchedule", "PreferNoSchedule", "NoExecute"):
            yield f"toleration: effect {self.effect!r} is no effect of Kubernetes"


class PodConfig(_StrictTable, frozen=True):
    """Options of one job's pods: the tables of `[tool.holdfast]` in its `pyproject.toml`."""

    env: dict[str, str | Reference] = {}
    """Environment variables: a text, or `{ secret = NAME, key = KEY }` or `{ config_map = … }`."""
    secrets: tuple[str, ...] = ()
    """Secrets whose keys all become environment variables."""
    volumes: tuple[Volume, ...] = ()
    service_account_annotations: dict[str, str] = {}
    """Annotations of the service account, e.g. the cloud role that the pods may assume."""
    labels: dict[str, str] = {}
    """Labels of the pods, beside ours."""
    annotations: dict[str, str] = {}
    """Annotations of the pods."""
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    priority_class: str = ""
    services: tuple[Service, ...] = ()
    """Processes of the job's image that answer HTTP."""

    def flaws(self) -> Iterator[str]:
        """Problems, as sentences."""
        for name, value in self.env.items():
            if not _VARIABLE.fullmatch(name) or name in RESERVED_VARIABLES:
                yield f"env: {name!r} is not usable as the name of a variable"
            if isinstance(value, Reference) and bool(value.secret) == bool(value.config_map):
                yield f"env: {name} needs either a secret or a config_map"
        parts: tuple[Volume | Toleration | Service, ...]
        parts = (*self.volumes, *self.tolerations, *self.services)
        for part in parts:
            yield from part.flaws()
        for table, what in (("volumes", "name"), ("volumes", "path"), ("services", "name")):
            found = [str(getattr(one, what)).rstrip("/") for one in getattr(self, table)]
            for double in sorted({one for one in found if found.count(one) > 1}):
                yield f"{table}: two have the {what} {double!r}"
        for name in self.labels:
            if name.startswith(("app.kubernetes.io/", "holdfast.dev/")):
                yield f"labels: {name} is set by Holdfast"

    @property
    def variables(self) -> list[dict[str, Any]]:
        """The environment in Kubernetes form."""
        return [
            {"name": name, "valueFrom": value.manifest()}
            if isinstance(value, Reference)
            else {"name": name, "value": value}
            for name, value in self.env.items()
        ]

    @property
    def every_secret(self) -> list[str]:
        """Names of the secrets that must exist before the pods can start."""
        found = {*self.secrets}
        found |= {v.secret for v in self.volumes if v.secret and not v.optional}
        values = (v for v in self.env.values() if isinstance(v, Reference))
        return sorted(found | {v.secret for v in values if v.secret and not v.optional})
