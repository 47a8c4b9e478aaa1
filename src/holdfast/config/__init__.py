"""Configuration: one frozen record per role, every field documented where it is defined.

A value comes from the first of: an explicit argument, the environment, `holdfast.toml`, the
default. `load(WorkerConfig, concurrency=10)` does this; it reads the environment and the file when
called, never at import. The file is the one `HOLDFAST_CONFIG` names, or `holdfast.toml` in the
working directory, with one table per role (`[worker]`).

Guaranteed: construction validates types, limits and relations between fields. An invalid value
raises a `ConfigError` that names the field, the value's source and what to write instead. Unknown
tables and keys of the file are rejected. Passwords and tokens, including those in URLs, never
appear in a `repr` or a message.

Not checked: whether files, hosts or ports exist. Unknown environment variables are ignored, because
Kubernetes adds `HOLDFAST_…_PORT` and others for every service of that name.

`python -m holdfast.config` prints `docs/configuration.md`.
"""

from typing import TYPE_CHECKING

from holdfast.lazily import exporting

if TYPE_CHECKING:
    from holdfast.config.alerting import AlertsConfig
    from holdfast.config.all_roles import ROLES
    from holdfast.config.deployment import DeployConfig
    from holdfast.config.fleet import AgentConfig, DispatcherConfig
    from holdfast.config.loading import FILE, FILE_VARIABLE, load
    from holdfast.config.option import RoleConfig, options, variable
    from holdfast.config.page import documented, markdown
    from holdfast.config.roles import (
        LEASES,
        ConnectionConfig,
        CoordinatorConfig,
        LivenessConfig,
        LogConfig,
        RecordConfig,
        SchedulerConfig,
        WebConfig,
        WorkerConfig,
    )

__all__ = [
    "FILE",
    "FILE_VARIABLE",
    "LEASES",
    "ROLES",
    "AgentConfig",
    "AlertsConfig",
    "ConnectionConfig",
    "CoordinatorConfig",
    "DeployConfig",
    "DispatcherConfig",
    "LivenessConfig",
    "LogConfig",
    "RecordConfig",
    "RoleConfig",
    "SchedulerConfig",
    "WebConfig",
    "WorkerConfig",
    "documented",
    "load",
    "markdown",
    "options",
    "variable",
]

__getattr__ = exporting(
    __name__,
    {
        "holdfast.config.alerting": ("AlertsConfig",),
        "holdfast.config.all_roles": ("ROLES",),
        "holdfast.config.deployment": ("DeployConfig",),
        "holdfast.config.fleet": ("AgentConfig", "DispatcherConfig"),
        "holdfast.config.loading": ("FILE", "FILE_VARIABLE", "load"),
        "holdfast.config.option": ("RoleConfig", "options", "variable"),
        "holdfast.config.page": ("documented", "markdown"),
        "holdfast.config.roles": (
            "LEASES",
            "ConnectionConfig",
            "CoordinatorConfig",
            "LivenessConfig",
            "LogConfig",
            "RecordConfig",
            "SchedulerConfig",
            "WebConfig",
            "WorkerConfig",
        ),
    },
)
