"""Configuration: one frozen record per role, every field documented where it is defined.

A value comes from the first of: an explicit argument, the environment, `holdfast.toml`, the
default. `load(WorkerConfig, concurrency=10)` does this; the environment and the file are read when
`load` is called, never at import. The file is the one `HOLDFAST_CONFIG` names, or `holdfast.toml`
in the working directory, with one table per role (`[worker]`).

Guaranteed: construction validates everything. Types, limits and the relations between fields are
checked, and a value that cannot work raises a `ConfigError` that names the field, where the value
came from and what to write instead. Unknown tables and keys of the file are refused.
Passwords and tokens, also those inside URLs, appear in no `repr` and in no message.

Not checked: whether files, hosts or ports exist. Unknown environment variables are ignored, because
Kubernetes adds `HOLDFAST_…_PORT` and others for every service of that name.

`python -m holdfast.config` prints `docs/configuration.md`.
"""

from holdfast.config.deployment import DeployConfig
from holdfast.config.fleet import AgentConfig, DispatcherConfig
from holdfast.config.loading import FILE, FILE_VARIABLE, load
from holdfast.config.option import ROLES, Role, options, variable
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
    "ConnectionConfig",
    "CoordinatorConfig",
    "DeployConfig",
    "DispatcherConfig",
    "LivenessConfig",
    "LogConfig",
    "RecordConfig",
    "Role",
    "SchedulerConfig",
    "WebConfig",
    "WorkerConfig",
    "documented",
    "load",
    "markdown",
    "options",
    "variable",
]
