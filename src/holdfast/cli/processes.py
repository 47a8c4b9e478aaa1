"""The commands that run a process of Holdfast until SIGTERM or Ctrl-C, and what they share.

`holdfast control` runs scheduler, coordinator and dispatcher in one process. A role that cannot
continue ends them all with exit code 1, so that an orchestrator restarts the process; nothing is
lost, because other control processes continue.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli import out
from holdfast.cli.command import command, with_options
from holdfast.cli.options import (
    LogFormat,
    LogLevel,
    ReleaseOption,
    argument,
    connection_given,
    given,
    option,
)

if TYPE_CHECKING:
    from holdfast.app import Holdfast
    from holdfast.config import ConnectionConfig

Made = Callable[..., Any]
"""Makes a role inside its event loop. Typer evaluates annotations, so this names no class."""
OptionalApp = Annotated[
    str,
    argument("Register the schedules of this app (shop:app) first.", "[APP]", show_default=False),
]
SignOption = Annotated[str | None, option("Sign commands with the account seed in FILE.", "FILE")]
ReadyFile = Annotated[str | None, option("Create FILE while the process is ready.", "FILE")]

_SERVED: dict[str, Any] = {
    "health_port": Annotated[int | None, option("Port for health and metrics; 0 means none.")],
    "health_host": Annotated[str | None, option("Address on which that port listens.", "HOST")],
    "log_level": LogLevel,
    "log_format": LogFormat,
}


def role_command(start: Callable[..., Made | int | None]) -> Callable[..., None]:
    """A command that runs a role, with the options that every role has.

    `start` checks its arguments and returns what makes the role, an exit code, or None when there
    is nothing to run. It gets the health options as `served`, for its configuration.
    """

    @functools.wraps(start)
    def run(served: dict[str, Any], **values: Any) -> None:
        start_logging(served.pop("log_level"), served.pop("log_format"))
        made = start(**values, served=served)
        if made is None:
            return
        if isinstance(made, int):
            raise typer.Exit(made)
        from holdfast.process import run_role

        raise typer.Exit(run_role(made))

    decorated: Callable[..., None] = with_options("served", _SERVED)(run)
    return decorated


def start_logging(level: str | None, style: str | None) -> None:
    """Configure logging from flags, environment and file."""
    from holdfast.config import LogConfig, load
    from holdfast.log_lines import configure_logging

    config = load(LogConfig, level=level or ("debug" if given().verbose else None), format=style)
    configure_logging(config.level, config.format)


def app_and_connection(target: str | None) -> tuple[Holdfast | None, ConnectionConfig]:
    """The named app, if any, and how to connect."""
    from holdfast.cli.loading import load_app
    from holdfast.config import ConnectionConfig, load

    if not target:
        return None, load(ConnectionConfig, **connection_given())
    app = load_app(target)
    return app, app.connection_config(**connection_given())


# ---- control


@command("control")
@role_command
def control(
    served: dict[str, Any],
    app: OptionalApp = "",
    release: ReleaseOption = None,
    seed: SignOption = None,
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
        make_scheduler(served, app, release, ready_file),
        make_coordinator({}),
        make_dispatcher({}, seed),
    ]
    return lambda: Together([make(telemetry=telemetry) for make in roles])


def make_scheduler(
    served: dict[str, Any],
    app: OptionalApp = "",
    release: ReleaseOption = None,
    ready_file: ReadyFile = None,
) -> Made:
    """Fire every slot that is due. SIGTERM and Ctrl-C hand the lead over and end it.

    Exit codes: 0 after a signal, 1 when it cannot continue, 128 + signal after a second signal.
    """
    from holdfast.config import RecordConfig, SchedulerConfig, load
    from holdfast.scheduler import Scheduler

    loaded, connection = app_and_connection(app)
    config = load(SchedulerConfig, release=release, ready_file=ready_file, **served)
    return partial(Scheduler, loaded, config, connection=connection, records=load(RecordConfig))


def make_coordinator(served: dict[str, Any]) -> Made:
    """Detect dead nodes, give back what they held, and send alerts. Any number may run.

    Exit codes: 0 after a signal, 1 when it cannot continue, 128 + signal after a second signal.
    """
    from holdfast.config import AlertsConfig, CoordinatorConfig, LivenessConfig, RecordConfig, load
    from holdfast.coordinator import Coordinator
    from holdfast.model.liveness import from_config
    from holdfast.status.alerts import Alerting

    _, connection = app_and_connection(None)
    config = load(CoordinatorConfig, **served)
    liveness, alerting = from_config(load(LivenessConfig)), Alerting.of(load(AlertsConfig))
    return partial(
        Coordinator,
        connection,
        config,
        records=load(RecordConfig),
        liveness=liveness,
        alerting=alerting,
    )


def make_dispatcher(served: dict[str, Any], seed: SignOption = None) -> Made:
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


command("scheduler")(role_command(make_scheduler))
command("coordinator")(role_command(make_coordinator))
command("dispatcher")(role_command(make_dispatcher))


# ---- relay


@command("relay")
def relay(
    target: Annotated[str, argument("The relay as module:object, such as shop.db:relay.", "RELAY")],
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Send the runs of an outbox to NATS until SIGTERM or Ctrl-C.

    Any number may run at the same time: one sends, and the others take over when it ends. See
    docs/outbox.md.
    """
    from holdfast.cli.loading import load_object
    from holdfast.integrations.relay import Relay
    from holdfast.process import run_role

    start_logging(log_level, log_format)
    found = load_object(target, Relay, "relay", "a relay", "Relay(app, …)")
    found.app.connect_with(**connection_given())
    raise typer.Exit(run_role(lambda: found))


# ---- web


@command("web", invoke_without_command=True, no_args_is_help=False)
@role_command
def web(
    served: dict[str, Any],
    context: typer.Context,
    host: Annotated[str | None, option("Address to listen on.", "HOST")] = None,
    port: Annotated[int | None, option("Port to listen on; 0 means any free port.")] = None,
    app: Annotated[
        str | None, option("Check and mask payloads by the jobs of this app.", "APP")
    ] = None,
    ready_file: ReadyFile = None,
) -> Made | None:
    """Serve the API and the pages until SIGTERM or Ctrl-C. Any number may run.

    Without tokens it listens on this machine only. Options without a flag are in
    docs/configuration.md.
    """
    if context.invoked_subcommand:
        return None
    from holdfast.config import LivenessConfig, RecordConfig, WebConfig, load
    from holdfast.model.liveness import from_config

    loaded, connection = app_and_connection(app)
    config = load(WebConfig, host=host, port=port, **served)
    serve = _web_module("serve")
    serve.check_reachable(config)
    return partial(
        serve.WebServer,
        config,
        connection,
        app=loaded,
        records=load(RecordConfig),
        liveness=from_config(load(LivenessConfig)),
        started=None if ready_file else lambda url: out.say(f"holdfast web is on {url}"),
        ready_file=ready_file or "",  # the parent process prints the address
    )


@command("web token")
def token(
    name: Annotated[str, argument("Name of the user, shown in the audit.", "NAME")],
    role: Annotated[str, option("viewer, operator or admin.", "ROLE")] = "viewer",
) -> None:
    """Make a token for a person or a program, and the line that lets it in."""
    text, line = _web_module("auth").make_token(name, role)
    if out.as_json({"token": text, "line": line}):
        return
    out.say(text)
    out.note(
        "This is the token: it is shown only now. Add the line below to the file that "
        "web.tokens_file names, or to web.tokens (HOLDFAST_WEB_TOKENS); it is of no use to who "
        f"reads it there.\n{line}",
        lines=True,
    )


def _web_module(name: str) -> ModuleType:
    """A module of the web package, whose dependencies are an extra."""
    from holdfast.errors import ConfigError

    try:
        return importlib.import_module(f"holdfast.web.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("holdfast"):
            raise
        raise ConfigError(
            f"the web needs {error.name}, which is not installed: pip install 'holdfast-jobs[web]'"
        ) from None
