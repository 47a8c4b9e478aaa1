"""`holdfast coordinator`: judge the liveness of nodes."""

from __future__ import annotations

import typer

from holdfast.cli.common import Cli, connection_given
from holdfast.cli.scheduler import HealthHost, HealthPort
from holdfast.cli.worker import LogFormat, LogLevel, start_logging


def register(app: Cli) -> None:
    """Add `holdfast coordinator`."""
    app.command("coordinator")(coordinator)


def coordinator(
    health_port: HealthPort = None,
    health_host: HealthHost = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Notice nodes that have died, and give back what they held. Any number may run."""
    from holdfast.config import (
        ConnectionConfig,
        CoordinatorConfig,
        LivenessConfig,
        RecordConfig,
        load,
    )
    from holdfast.coordinator import Coordinator
    from holdfast.model.liveness import from_config
    from holdfast.process import run_role

    start_logging(log_level, log_format)
    connection = load(ConnectionConfig, **connection_given())
    records, liveness = load(RecordConfig), from_config(load(LivenessConfig))
    config = load(CoordinatorConfig, health_port=health_port, health_host=health_host)
    made = lambda: Coordinator(connection, config, records=records, liveness=liveness)  # noqa: E731
    raise typer.Exit(run_role(made))
