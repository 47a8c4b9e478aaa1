"""`holdfast coordinator`: judge the liveness of nodes."""

from __future__ import annotations

import typer

from holdfast.cli.common import Cli, connection_given
from holdfast.cli.worker import LogFormat, LogLevel, start_logging


def register(app: Cli) -> None:
    """Add `holdfast coordinator`."""
    app.command("coordinator")(coordinator)


def coordinator(log_level: LogLevel = None, log_format: LogFormat = None) -> None:
    """Notice nodes that have died, and give back what they held. Any number may run."""
    from holdfast.config import ConnectionConfig, LivenessConfig, RecordConfig, load
    from holdfast.coordinator import Coordinator
    from holdfast.model.liveness import from_config
    from holdfast.worker.process import run_worker

    start_logging(log_level, log_format)
    connection = load(ConnectionConfig, **connection_given())
    records, liveness = load(RecordConfig), from_config(load(LivenessConfig))
    code = run_worker(lambda: Coordinator(connection, records=records, liveness=liveness))
    raise typer.Exit(code)
