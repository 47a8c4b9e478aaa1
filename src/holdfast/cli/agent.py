"""`holdfast agent`: one agent on this host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.common import Cli, connection_given
from holdfast.cli.worker import LogFormat, LogLevel, start_logging

if TYPE_CHECKING:
    from holdfast.agent import Agent, Extension


def register(app: Cli) -> None:
    """Add `holdfast agent`."""
    app.command("agent")(agent)


def agent(
    id: Annotated[
        str | None, typer.Option("--id", help="The agent's id; without: the host's name.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Directory that it keeps.", metavar="DIR")
    ] = None,
    facts: Annotated[
        str | None, typer.Option("--facts", help="File with facts: JSON or YAML.", metavar="FILE")
    ] = None,
    app: Annotated[
        str, typer.Option("--app", help="App whose jobs it offers too.", metavar="APP")
    ] = "",
    allow_commands: Annotated[
        bool, typer.Option("--allow-commands", help="Offer cmd.run: any program, as this user.")
    ] = False,
    health_port: Annotated[
        int | None, typer.Option("--health-port", help="Serve health and metrics here; 0: nowhere.")
    ] = None,
    health_host: Annotated[
        str | None, typer.Option("--health-host", help="Address of --health-port.", metavar="HOST")
    ] = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Take commands for this host until SIGTERM or Ctrl-C, and report its facts.

    With credentials it obeys only commands that the dispatchers of its account have signed. Exit
    codes: 0 after a signal, 1 when it cannot go on, 128 + signal when told twice.
    """
    from holdfast.process import run_role

    start_logging(log_level, log_format)
    make = make_agent(
        app,
        id=id,
        data_dir=data,
        facts_file=facts,
        commands="yes" if allow_commands else None,
        health_port=health_port,
        health_host=health_host,
    )
    raise typer.Exit(run_role(make))


def make_agent(target: str, **given: Any) -> Callable[[], Agent]:
    """Check everything that can be wrong with the configuration, and return the way to make one."""
    from holdfast.agent import Agent
    from holdfast.agent.facts import check_file
    from holdfast.cli.loading import load_app
    from holdfast.config import AgentConfig, ConnectionConfig, load
    from holdfast.identity import AgentCredentials

    config = load(AgentConfig, **given)
    check_file(config.facts_file)
    connection = load(ConnectionConfig, **connection_given())
    file = connection.credentials_file
    keys = AgentCredentials.load(file) if file else None
    app = load_app(target) if target else None
    return lambda: Agent(
        config, connection=connection, credentials=keys, app=app, extensions=_extensions()
    )


def _extensions() -> list[Extension]:
    """What lives in every agent beside its functions."""
    from holdfast.agent.settings_extension import SettingsExtension

    return [SettingsExtension()]
