"""`holdfast dispatcher`: fan commands out to agents."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.common import Cli, connection_given
from holdfast.cli.worker import LogFormat, LogLevel, start_logging

if TYPE_CHECKING:
    from holdfast.dispatcher import Dispatcher
    from holdfast.telemetry import Telemetry

SeedFile = Annotated[
    str | None,
    typer.Option("--seed", help="File with the account seed: signs commands.", metavar="FILE"),
]


def register(app: Cli) -> None:
    """Add `holdfast dispatcher`."""
    app.command("dispatcher")(dispatcher)


def dispatcher(
    seed: SeedFile = None,
    health_port: Annotated[
        int | None, typer.Option("--health-port", help="Serve health and metrics here; 0: nowhere.")
    ] = None,
    health_host: Annotated[
        str | None, typer.Option("--health-host", help="Address of --health-port.", metavar="HOST")
    ] = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Send commands to agents and collect what they return. Any number may run, all active.

    SIGTERM hands over what is not finished. Exit codes: 0 after a signal, 1 when it cannot go on,
    128 + signal when told twice.
    """
    from holdfast.process import run_role

    start_logging(log_level, log_format)
    make = make_dispatcher(seed_file=seed, health_port=health_port, health_host=health_host)
    raise typer.Exit(run_role(make))


def make_dispatcher(telemetry: Telemetry | None = None, **given: Any) -> Callable[[], Dispatcher]:
    """Check everything that can be wrong with the configuration, and return the way to make one."""
    from holdfast.config import ConnectionConfig, DispatcherConfig, LivenessConfig, RecordConfig
    from holdfast.config import load as load_config
    from holdfast.dispatcher import Dispatcher
    from holdfast.model.liveness import from_config

    connection = load_config(ConnectionConfig, **connection_given())
    config = load_config(DispatcherConfig, **given)
    records, liveness = load_config(RecordConfig), from_config(load_config(LivenessConfig))
    return lambda: Dispatcher(
        connection, config, records=records, liveness=liveness, telemetry=telemetry
    )
