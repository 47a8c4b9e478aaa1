"""Every role by its table name in the file, in the order of the documentation."""

from __future__ import annotations

from typing import Final

from holdfast.config.alerting import AlertsConfig
from holdfast.config.deployment import DeployConfig
from holdfast.config.fleet import AgentConfig, DispatcherConfig
from holdfast.config.option import RoleConfig
from holdfast.config.roles import (
    ConnectionConfig,
    CoordinatorConfig,
    LivenessConfig,
    LogConfig,
    RecordConfig,
    SchedulerConfig,
    WebConfig,
    WorkerConfig,
)

_ALL: Final[tuple[type[RoleConfig], ...]] = (
    ConnectionConfig,
    WorkerConfig,
    LivenessConfig,
    SchedulerConfig,
    CoordinatorConfig,
    AlertsConfig,
    WebConfig,
    RecordConfig,
    LogConfig,
    DeployConfig,
    DispatcherConfig,
    AgentConfig,
)
ROLES: Final = {role.table: role for role in _ALL}
