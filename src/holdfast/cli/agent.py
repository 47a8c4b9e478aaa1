"""`holdfast agent`: one agent on this host."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli.common import Cli, connection_given
from holdfast.cli.roles import Made, role_command


def register(app: Cli) -> None:
    """Add `holdfast agent`."""
    app.command("agent")(role_command(agent))


def agent(
    served: dict[str, Any],
    id: Annotated[
        str | None, typer.Option("--id", help="The agent's id; defaults to the host's name.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="DIR", help="Directory for what must outlive the process."),
    ] = None,
    facts: Annotated[
        str | None, typer.Option("--facts", metavar="FILE", help="More facts, as JSON or YAML.")
    ] = None,
    app: Annotated[
        str, typer.Option("--app", metavar="APP", help="Offer the jobs of this app as well.")
    ] = "",
    allow_commands: Annotated[
        bool, typer.Option("--allow-commands", help="Offer cmd.run: any program, as this user.")
    ] = False,
) -> Made:
    """Take commands for this host until SIGTERM or Ctrl-C, and report its facts.

    With credentials it obeys only commands that the dispatchers of its account have signed. Exit
    codes: 0 after a signal, 1 when it cannot continue, 128 + signal after a second signal.
    """
    from holdfast.agent import Agent
    from holdfast.agent.facts import check_file
    from holdfast.agent.settings_extension import SettingsExtension
    from holdfast.cli.loading import load_app
    from holdfast.config import AgentConfig, ConnectionConfig, load
    from holdfast.identity import AgentCredentials

    config = load(
        AgentConfig,
        id=id,
        data_dir=data,
        facts_file=facts,
        commands="yes" if allow_commands else None,
        **served,
    )
    check_file(config.facts_file)
    connection = load(ConnectionConfig, **connection_given())
    file = connection.credentials_file
    keys = AgentCredentials.load(file) if file else None
    loaded = load_app(app) if app else None
    return lambda: Agent(
        config,
        connection=connection,
        credentials=keys,
        app=loaded,
        extensions=[SettingsExtension()],
    )
