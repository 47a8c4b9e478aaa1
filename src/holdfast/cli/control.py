"""`holdfast control [APP]`: scheduler, coordinator and dispatcher in one process, or each alone.

A role that cannot continue ends them all with exit code 1, so that an orchestrator restarts the
process; nothing is lost, because other control processes continue.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from holdfast.cli.common import Cli
from holdfast.cli.roles import Made, ReadyFile, app_and_connection, role_command

OptionalApp = Annotated[
    str,
    typer.Argument(
        metavar="[APP]",
        help="Register the schedules of this app (shop:app) first.",
        show_default=False,
    ),
]
Release = Annotated[
    str | None,
    typer.Option("--release", metavar="N", help="Release of the app: 41, 1.10.2."),
]
SeedFile = Annotated[
    str | None,
    typer.Option("--seed", metavar="FILE", help="Sign commands with the account seed in FILE."),
]


def register(app: Cli) -> None:
    """Add `holdfast control`, and its roles as commands."""
    for command in (scheduler, coordinator, dispatcher, control):
        app.command(command.__name__)(role_command(command))


def control(
    served: dict[str, Any],
    app: OptionalApp = "",
    release: Release = None,
    seed: SeedFile = None,
    ready_file: ReadyFile = None,
) -> Made:
    """Run scheduler, coordinator and dispatcher in one process, until SIGTERM or Ctrl-C.

    Run two or more. It is ready while all three are.

    Exit codes: 0 after a signal, 1 when one of them cannot continue, 128 + signal after a second
    signal.
    """
    from holdfast.role import Together
    from holdfast.telemetry import Telemetry

    telemetry = Telemetry()
    roles = [
        scheduler(served, app, release, ready_file),
        coordinator({}),
        dispatcher({}, seed),
    ]
    return lambda: Together([make(telemetry=telemetry) for make in roles])


def scheduler(
    served: dict[str, Any],
    app: OptionalApp = "",
    release: Release = None,
    ready_file: ReadyFile = None,
) -> Made:
    """Fire every slot that is due, until SIGTERM or Ctrl-C, which hands the lead over.

    Exit codes: 0 after a signal, 1 when it cannot continue, 128 + signal after a second signal.
    """
    from holdfast.config import RecordConfig, SchedulerConfig, load
    from holdfast.scheduler import Scheduler

    loaded, connection = app_and_connection(app)
    config = load(SchedulerConfig, release=release, ready_file=ready_file, **served)
    return partial(Scheduler, loaded, config, connection=connection, records=load(RecordConfig))


def coordinator(served: dict[str, Any]) -> Made:
    """Notice nodes that have died, and give back what they held. Any number may run.

    Exit codes: 0 after a signal, 1 when it cannot continue, 128 + signal after a second signal.
    """
    from holdfast.config import CoordinatorConfig, LivenessConfig, RecordConfig, load
    from holdfast.coordinator import Coordinator
    from holdfast.model.liveness import from_config

    _, connection = app_and_connection(None)
    config = load(CoordinatorConfig, **served)
    liveness = from_config(load(LivenessConfig))
    return partial(Coordinator, connection, config, records=load(RecordConfig), liveness=liveness)


def dispatcher(served: dict[str, Any], seed: SeedFile = None) -> Made:
    """Send commands to agents and collect what they return. Any number may run, all active.

    SIGTERM hands over what is not finished. Exit codes: 0 after a signal, 1 when it cannot
    continue, 128 + signal after a second signal.
    """
    from holdfast.config import DispatcherConfig, LivenessConfig, RecordConfig, load
    from holdfast.dispatcher import Dispatcher
    from holdfast.model.liveness import from_config

    _, connection = app_and_connection(None)
    config = load(DispatcherConfig, seed_file=seed, **served)
    liveness = from_config(load(LivenessConfig))
    return partial(Dispatcher, connection, config, records=load(RecordConfig), liveness=liveness)
