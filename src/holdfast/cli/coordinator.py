"""`holdfast coordinator`: judge the liveness of nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common import Cli, connection_given
from holdfast.cli.worker import LogFormat, LogLevel, start_logging

HealthPort = Annotated[
    int, typer.Option("--health-port", help="Port for health and metrics; 0: none.")
]
HealthHost = Annotated[str, typer.Option("--health-host", help="Address of that port.")]


def register(app: Cli) -> None:
    """Add `holdfast coordinator`."""
    app.command("coordinator")(coordinator)


def coordinator(
    health_port: HealthPort = 0,
    health_host: HealthHost = "0.0.0.0",
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Notice nodes that have died, and give back what they held. Any number may run."""
    from holdfast.config import ConnectionConfig, LivenessConfig, RecordConfig, load
    from holdfast.coordinator import Coordinator
    from holdfast.model.liveness import from_config
    from holdfast.process import run_role

    start_logging(log_level, log_format)
    connection = load(ConnectionConfig, **connection_given())
    records, liveness = load(RecordConfig), from_config(load(LivenessConfig))
    code = run_role(
        lambda: Coordinator(
            connection,
            records=records,
            liveness=liveness,
            health_host=health_host,
            health_port=health_port,
        )
    )
    raise typer.Exit(code)
