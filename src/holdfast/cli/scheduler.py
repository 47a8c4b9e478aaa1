"""`holdfast scheduler [APP]`: fire schedules. Any number may run; one of them leads."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common import Cli
from holdfast.cli.worker import LogFormat, LogLevel, start_logging

OptionalApp = Annotated[
    str,
    typer.Argument(
        metavar="[APP]",
        help="Register the schedules of this app (shop:app) first.",
        show_default=False,
    ),
]
ReadyFile = Annotated[
    str | None,
    typer.Option("--ready-file", metavar="FILE", help="Exists while the process is ready."),
]
Release = Annotated[
    str | None,
    typer.Option("--release", metavar="N", help="The app's release: 41, 1.10.2."),
]
HealthPort = Annotated[
    int | None, typer.Option("--health-port", help="Serve health and metrics here; 0: nowhere.")
]
HealthHost = Annotated[
    str | None, typer.Option("--health-host", metavar="HOST", help="Address of --health-port.")
]


def register(app: Cli) -> None:
    """Add `holdfast scheduler`."""
    app.command("scheduler")(scheduler)


def scheduler(
    app: OptionalApp = "",
    release: Release = None,
    ready_file: ReadyFile = None,
    health_port: HealthPort = None,
    health_host: HealthHost = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Fire every slot that is due, until SIGTERM or Ctrl-C, which hands the lead over.

    Exit codes: 0 after a signal, 1 when it cannot go on, 128 + signal when it was told twice.
    """
    from holdfast.process import run_role

    start_logging(log_level, log_format)
    from holdfast.cli.control import make_scheduler

    made = make_scheduler(
        app,
        release=release,
        ready_file=ready_file,
        health_port=health_port,
        health_host=health_host,
    )
    raise typer.Exit(run_role(made))
