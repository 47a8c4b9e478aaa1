"""`holdfast control [APP]`: the control roles together in one process, each as if it were alone.

A role that cannot go on ends them all, with exit code 1, so that an orchestrator restarts the
process; nothing is lost meanwhile, since other control processes go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from holdfast.cli.common import Cli, connection_given
from holdfast.cli.dispatcher import SeedFile, make_dispatcher
from holdfast.cli.scheduler import HealthHost, HealthPort, OptionalApp, ReadyFile, Release
from holdfast.cli.worker import LogFormat, LogLevel, start_logging

if TYPE_CHECKING:
    from holdfast.coordinator import Coordinator
    from holdfast.role import Role
    from holdfast.scheduler import Scheduler
    from holdfast.telemetry import Telemetry


def register(app: Cli) -> None:
    """Add `holdfast control`."""
    app.command("control")(control)


def control(
    app: OptionalApp = "",
    release: Release = None,
    seed: SeedFile = None,
    ready_file: ReadyFile = None,
    health_port: HealthPort = None,
    health_host: HealthHost = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Run scheduler, coordinator and dispatcher in one process, until SIGTERM or Ctrl-C.

    Run two or more.

    Exit codes: 0 after a signal, 1 when one of them cannot go on, 128 + signal when told twice.
    """
    from holdfast.process import run_role
    from holdfast.role import Together
    from holdfast.telemetry import Telemetry

    start_logging(log_level, log_format)
    telemetry = Telemetry()
    roles: list[Callable[[], Role]] = [
        make_scheduler(
            app,
            telemetry,
            release=release,
            ready_file=ready_file,
            health_port=health_port,
            health_host=health_host,
        ),
        _make_coordinator(telemetry),
        make_dispatcher(telemetry, seed_file=seed),
    ]
    raise typer.Exit(run_role(lambda: Together([make() for make in roles])))


def make_scheduler(
    target: str, telemetry: Telemetry | None = None, **given: Any
) -> Callable[[], Scheduler]:
    """Check everything that can be wrong with the configuration, and return the way to make one."""
    from holdfast.cli.loading import load_app
    from holdfast.config import ConnectionConfig, RecordConfig, SchedulerConfig, load
    from holdfast.scheduler import Scheduler

    app = load_app(target) if target else None
    config = load(SchedulerConfig, **given)
    if app is not None:
        connection = app.connection_config(**connection_given())
    else:
        connection = load(ConnectionConfig, **connection_given())
    records = load(RecordConfig)
    return lambda: Scheduler(
        app, config, connection=connection, records=records, telemetry=telemetry
    )


def _make_coordinator(telemetry: Telemetry) -> Callable[[], Coordinator]:
    from holdfast.config import ConnectionConfig, LivenessConfig, RecordConfig, load
    from holdfast.coordinator import Coordinator
    from holdfast.model.liveness import from_config

    connection = load(ConnectionConfig, **connection_given())
    records, liveness = load(RecordConfig), from_config(load(LivenessConfig))
    return lambda: Coordinator(connection, records=records, liveness=liveness, telemetry=telemetry)
